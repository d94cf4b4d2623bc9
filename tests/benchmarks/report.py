"""Tables of the figures: as text while they are measured, and in Markdown for README.md."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import atari, scores, step_costs
from .measure import ISAS, Figures
from .ppo import SPEEDS

# Comparisons: the peer's row, and our row as the divisor. README.md of the project has `CLAIMS`.
CLAIMS = {
    ("seven transforms, compiled", "TorchRL, eager"): ("glue/seven torchrl", "torchwrap-compiled"),
    ("seven transforms, eager", "TorchRL, eager"): ("glue/seven torchrl", "torchwrap-eager"),
    ("seven transforms, compiled", "SB3, NumPy"): ("glue/seven sb3", "torchwrap-compiled"),
    ("seven transforms, eager", "SB3, NumPy"): ("glue/seven sb3", "torchwrap-eager"),
    ("CartPole rollout, compiled", "gymnax, `lax.scan`"): (
        "cartpole/gymnax-scan-16",
        "torchwrap-rollout",
    ),
}
MORE = {
    ("seven transforms, `torch.compile`", "TorchRL, eager"): (
        "glue/seven torchrl",
        "torchwrap-torch.compile",
    ),
    ("seven transforms, `torch.compile`", "SB3, NumPy"): (
        "glue/seven sb3",
        "torchwrap-torch.compile",
    ),
    ("seven transforms, compiled", "same, `torch.compile`"): (
        "glue/seven torchwrap-torch.compile",
        "torchwrap-compiled",
    ),
    ("three transforms, compiled", "Gymnasium's three"): (
        "glue/three gymnasium",
        "torchwrap-compiled",
    ),
    ("three transforms, eager", "Gymnasium's three"): ("glue/three gymnasium", "torchwrap-eager"),
    ("CartPole step, compiled", "gymnax, jitted step"): (
        "cartpole/gymnax-step",
        "torchwrap-compiled",
    ),
    ("CartPole step, compiled", "same, `torch.compile`"): (
        "cartpole/torchwrap-torch.compile",
        "torchwrap-compiled",
    ),
    ("CartPole rollout of 128, compiled", "gymnax, `lax.scan` of 128"): (
        "cartpole/gymnax-scan-128",
        "torchwrap-rollout-128",
    ),
    ("CartPole rollout of 128, compiled", "Gymnasium, normalized"): (
        "cartpole/gymnasium-normalise",
        "torchwrap-rollout-128",
    ),
    ("CartPole step, bare, eager", "Gymnasium, NumPy"): (
        "cartpole/gymnasium-bare",
        "torchwrap-bare-eager",
    ),
}
SIZES = (8, 64, 1024, 16384)
COLUMNS = (  # of the text tables, as far as any row has them
    "bare_us",
    "whole_us",
    "us",
    "us_median",
    "steps_per_second",
    "of_copy",
    "whole_ratio",
    "env_steps_to_target",
    "seconds_to_target",
    "wall_seconds_to_target",
    "steps_per_second_steady",
    "compile_seconds",
    "eval_mean_return",
    "cold_seconds",
    "warm_seconds",
)
HIDDEN = ("copy", "envpool-bare", "gymnax-bare", "torchrl-bare")  # rows that the tables leave out


def dumps(figures: Figures) -> str:
    """JSON with one row per line."""
    lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in figures.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(figures: Figures) -> str:
    """Text with one line per row; a skipped row gives the reason.

    A column "x <name>" has a row's time divided by that row's, as the median over the rounds.
    """
    columns = [name for name in COLUMNS if any(name in row for row in figures.values())]
    references: dict[str, None] = {}
    for row in figures.values():
        references |= dict.fromkeys(row.get("ratio_median", ()))
    head = [*columns, *[f"x {name}" for name in references]]
    room = max(map(len, figures), default=0)

    def line(start: str, cells: Iterable[str]) -> str:
        text = f"{start:<{room}}"
        for cell, name in zip(cells, head, strict=True):
            text += f"{cell:>{max(11, len(name) + 2)}}"
        return text

    lines = [line("", head)]
    for key, row in figures.items():
        if "skipped" in row:
            lines.append(f"{key:<{room}}  skipped: {row['skipped']:.100}")
            continue
        ratios = row.get("ratio_median", {})
        values = [*map(row.get, columns), *map(ratios.get, references)]
        lines.append(line(key, map(_number, values)))
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"


def words(settings: Iterable[str]) -> str:
    """`AVX2 and AVX-512, 1 and 2 threads`, for the last parts of keys."""
    pairs = [setting.split("-") for setting in settings]
    isas = dict.fromkeys(ISAS[isa] for isa, _ in pairs)
    threads = dict.fromkeys(number for _, number in pairs)
    plural = "s" * (list(threads) != ["1"])
    return f"{' and '.join(isas)}, {' and '.join(threads)} thread{plural}"


def settings(figures: Figures, start: str) -> list[str]:
    """The settings of the figures whose keys start with `start`, in their order."""
    found = [key.split("/")[-1] for key in figures if key.startswith(start)]
    return list(dict.fromkeys(found))


def within(figures: Figures, setting: str) -> Figures:
    """The figures of one setting, by keys without it."""
    end = f"/{setting}"
    return {key.removesuffix(end): row for key, row in figures.items() if key.endswith(end)}


def worst(figures: Figures, key: str, reference: str) -> float | None:
    """The lowest ratio of a row to the reference, over all settings and both estimators."""
    suite, *_ = key.split("/")
    found = []
    for setting in settings(figures, suite):
        row = figures.get(f"{key}/{setting}", {})
        for ratio in ("ratio", "ratio_median"):
            found.append(row.get(ratio, {}).get(reference))
    return None if None in found else min(found, default=None)


def claims(
    figures: Figures,
    comparisons: Mapping[tuple[str, str], tuple[str, str]],
    sizes: Sequence[int] = SIZES,
) -> list[str]:
    """Rows of a table in Markdown; a question mark where a row is missing."""
    lines = []
    for (what, peer), (row, reference) in comparisons.items():
        ratios = [_floor(worst(figures, f"{row}/{size}", reference)) for size in sizes]
        lines.append(f"| {' | '.join([what, peer, *ratios])} |")
    return lines


def _floor(ratio: float | None) -> str:
    """Two significant digits, never rounded up."""
    if ratio is None:
        return "?"
    digits = 1 - math.floor(math.log10(ratio))
    return f"{math.floor(ratio * 10**digits) / 10**digits:.{max(digits, 0)}f}"


# The tables of README.md.


def tables(figures: Figures) -> str:
    """All tables, in Markdown. Where a row was not measured, it is left out."""
    trained = json.loads(scores.FILE.read_text())["runs"]
    parts = {
        "`glue`, `cartpole`: times faster than the peer; below 1 is slower": _ratios(figures),
        "`glue`: microseconds that transforms add to a step of the bare env": _by_size(
            figures, "glue", "us"
        ),
        "`cartpole`: microseconds per step of all envs": _by_size(figures, "cartpole", "us"),
        "`bridge`: microseconds per step / times the peer's": _by_size(
            figures, "bridge", "whole_us", "whole_ratio"
        ),
        "`ppo`: CartPole-v1 until the latest 100 episodes return 475; env steps per second": _ppo(
            figures
        ),
        "`startup`: seconds with an empty cache / a full one": _by_size(
            figures, "startup", "cold_seconds", "warm_seconds"
        ),
        "`step_costs`, for examples/guides/compiling.md": step_costs.page(figures),
        "`atari`, for examples/guides/simulators.md": atari.page(figures),
        "`scores`: PPO after equal numbers of env steps": scores.show(trained).splitlines(),
    }
    commits = ", ".join(f"{suite} {commit}" for suite, commit in figures["commits"].items())
    where = f"{', '.join(conditions(figures['machine']).splitlines())}. Commits: {commits}."
    sections = [where]
    for title, part in parts.items():
        sections.append("\n".join([f"{title}:", "", *part]))
    return "\n\n".join(sections)


def conditions(machine: Mapping[str, Any]) -> str:
    """The conditions of a measurement as two lines of text: machine; versions."""
    versions: dict[str, str] = {}
    for found in machine["versions"].values():  # torchwrap's own interpreter is the first
        versions = {**found, **versions}
    libraries = ("torch", "gymnasium", "stable-baselines3", "torchrl", "jax", "gymnax", "envpool")
    named = [f"{name} {versions[name]}" for name in libraries if name in versions]
    where = f"{machine['processor']}, {machine['cores']} cores, device: {machine['device']}"
    return f"{where}\n{', '.join(named)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown, without rows that have no figure."""
    lines = [head, ["---"] * len(head)]
    for row in rows:
        if any(cell.strip("? /") for cell in row[1:]):
            lines.append(row)
    return [f"| {' | '.join(line)} |" for line in lines]


def _ratios(figures: Figures) -> list[str]:
    every = settings(figures, "glue/")
    measured = {key.split("/")[2] for key in figures if key.startswith("glue/seven sb3/")}
    sizes = [size for size in SIZES if str(size) in measured]
    parts = [figures]
    for setting in every:
        end = f"/{setting}"
        parts.append({key: row for key, row in figures.items() if key.endswith(end)})
    rows = []
    for (what, peer), (row, reference) in (CLAIMS | MORE).items():
        cells = [f"{what}; {peer}"]
        for part in parts:
            ratios = [worst(part, f"{row}/{size}", reference) for size in sizes]
            cells.append(" / ".join(map(_floor, ratios)))
        rows.append(cells)
    envs = " / ".join(f"{size:,}" for size in sizes)
    head = [f"at {envs} envs", "worst", *[words([setting]) for setting in every]]
    return _table(head, rows)


def _by_size(figures: Figures, suite: str, *names: str) -> list[str]:
    """A column per number of envs: the lowest and the highest value in all settings."""
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    sizes = set()
    for key, row in figures.items():
        if not key.startswith(f"{suite}/") or names[0] not in row:
            continue
        _, name, size, _ = key.split("/")
        if not name.startswith(HIDDEN):
            sizes.add(int(size))
            found.setdefault(name, {}).setdefault(int(size), []).append(row)
    rows = []
    for name, by_size in found.items():
        cells = [name]
        for size in sorted(sizes):
            same = by_size.get(size, [])
            ranges = [_range([row[each] for row in same if each in row]) for each in names]
            cells.append(" / ".join(filter(None, ranges)))
        rows.append(cells)
    head = [f"{size:,} env{'s' * (size > 1)}" for size in sorted(sizes)]
    return _table(["", *head], rows)


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    ends = [f"{float(f'{value:.2g}'):,g}" for value in (min(values), max(values))]
    return " - ".join(dict.fromkeys(ends))


def _ppo(figures: Figures) -> list[str]:
    columns = ("env_steps_to_target", "seconds_to_target", "wall_seconds_to_target", *SPEEDS)
    rows = []
    for key, row in figures.items():
        if not key.startswith("ppo/"):
            continue
        _, name, seed, _ = key.split("/")
        if seed in ("median", "speed"):
            rows.append([name, *[_number(row.get(figure)) for figure in columns]])
    head = [name.replace("_", " ") for name in columns]
    return _table(["", *head], rows)
