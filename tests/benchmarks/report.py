"""Tables of the figures: as text while they are measured, and in Markdown for README.md."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import scores
from .measure import ISAS, Figures
from .ppo import SPEEDS

# What is compared with whom: the row, and the row of ours that it is divided by. The README.md of the project has the former.
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
    *("bare_us", "whole_us", "us", "us_median", "steps_per_second", "of_copy", "whole_ratio"),
    *(
        "env_steps_to_target",
        "seconds_to_target",
        "wall_seconds_to_target",
        "steps_per_second_steady",
        "compile_seconds",
    ),
    *("eval_mean_return", "cold_seconds", "warm_seconds"),
)
HIDDEN = ("copy", "envpool-bare", "gymnax-bare", "torchrl-bare")  # rows that the tables leave out


def dumps(figures: Figures) -> str:
    """JSON with one row per line."""
    return (
        "{\n"
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in figures.items())
        + "\n}\n"
    )


def table(figures: Figures) -> str:
    """Text with one line per row; a skipped row gives the reason.

    A column "x <name>" has a row's microseconds divided by those of a row of ours, as the median over the rounds.
    """
    references = dict.fromkeys(
        name for row in figures.values() for name in row.get("ratio_median", ())
    )
    columns = [name for name in COLUMNS if any(name in row for row in figures.values())]
    widths = [max(11, len(name) + 2) for name in (*columns, *(f"x {name}" for name in references))]
    room = max(map(len, figures), default=0)

    def line(start: str, cells: Iterable[str]) -> str:
        return f"{start:<{room}}" + "".join(
            f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
        )

    lines = [line("", [*columns, *(f"x {name}" for name in references)])]
    for key, row in figures.items():
        if "skipped" in row:
            lines.append(f"{key:<{room}}  skipped: {row['skipped']:.100}")
            continue
        values = [*map(row.get, columns), *map(row.get("ratio_median", {}).get, references)]
        lines.append(line(key, ("" if value is None else _number(value) for value in values)))
    return "\n".join(lines)


def _number(value: float) -> str:
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:,.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def words(settings: Iterable[str]) -> str:
    """`AVX2 and AVX-512, 1 and 2 threads`, for the last parts of keys."""
    isas, threads = (
        list(dict.fromkeys(parts))
        for parts in zip(*(setting.split("-") for setting in settings), strict=True)
    )
    return f"{' and '.join(ISAS[isa] for isa in isas)}, {' and '.join(threads)} thread{'s' * (threads != ['1'])}"


def settings(figures: Figures, start: str) -> list[str]:
    """The settings of the figures whose keys start with `start`, in their order."""
    return list(dict.fromkeys(key.split("/")[-1] for key in figures if key.startswith(start)))


def within(figures: Figures, setting: str) -> Figures:
    """The figures of one setting, by keys without it."""
    return {
        key.removesuffix(f"/{setting}"): row
        for key, row in figures.items()
        if key.endswith(f"/{setting}")
    }


def worst(figures: Figures, key: str, reference: str) -> float | None:
    """How many times faster than a row the reference is, at least: the lowest of all settings and both estimators."""
    rows = [figures.get(f"{key}/{setting}", {}) for setting in settings(figures, key.split("/")[0])]
    found = [
        row.get(ratio, {}).get(reference) for row in rows for ratio in ("ratio", "ratio_median")
    ]
    return None if None in found else min(found, default=None)


def claims(
    figures: Figures,
    comparisons: Mapping[tuple[str, str], tuple[str, str]],
    sizes: Sequence[int] = SIZES,
) -> list[str]:
    """Rows of a table in Markdown; a question mark where a row is missing."""
    return [
        f"| {what} | {peer} | {' | '.join(_floor(worst(figures, f'{row}/{size}', reference)) for size in sizes)} |"
        for (what, peer), (row, reference) in comparisons.items()
    ]


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
        "`bridge`: microseconds per step / times Gymnasium's": _by_size(
            figures, "bridge", "whole_us", "whole_ratio"
        ),
        "`ppo`: CartPole-v1 until the latest 100 episodes return 475; env steps per second": _ppo(
            figures
        ),
        "`startup`: seconds with an empty cache / a full one": _by_size(
            figures, "startup", "cold_seconds", "warm_seconds"
        ),
        "`scores`: PPO on MuJoCo after a million steps": scores.show(trained).splitlines(),
    }
    commits = ", ".join(f"{suite} {commit}" for suite, commit in figures["commits"].items())
    where = f"{', '.join(conditions(figures['machine']).splitlines())}. Commits: {commits}."
    return "\n\n".join(
        [where, *("\n".join([f"{title}:", "", *part]) for title, part in parts.items())]
    )


def conditions(machine: Mapping[str, Any]) -> str:
    """The conditions of a measurement as two lines of text: machine; versions."""
    versions: dict[str, str] = {}
    for found in machine["versions"].values():  # torchwrap's own interpreter is the first
        versions = {**found, **versions}
    libraries = ("torch", "gymnasium", "stable-baselines3", "torchrl", "jax", "gymnax", "envpool")
    where = f"{machine['processor']}, {machine['cores']} cores, device: {machine['device']}"
    return f"{where}\n{', '.join(f'{name} {versions[name]}' for name in libraries if name in versions)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown, without rows that have no figure."""
    lines = [
        head,
        ["---"] * len(head),
        *(row for row in rows if any(cell.strip("? /") for cell in row[1:])),
    ]
    return [f"| {' | '.join(line)} |" for line in lines]


def _ratios(figures: Figures) -> list[str]:
    every = settings(figures, "glue/")
    sizes = [
        size for size in SIZES if any(key.startswith(f"glue/seven sb3/{size}/") for key in figures)
    ]
    parts = [
        figures,
        *(
            {key: row for key, row in figures.items() if key.endswith(f"/{setting}")}
            for setting in every
        ),
    ]
    rows = [
        [
            f"{what}; {peer}",
            *(
                " / ".join(_floor(worst(some, f"{row}/{n}", reference)) for n in sizes)
                for some in parts
            ),
        ]
        for (what, peer), (row, reference) in (CLAIMS | MORE).items()
    ]
    return _table(
        [
            f"at {' / '.join(f'{n:,}' for n in sizes)} envs",
            "worst",
            *(words([one]) for one in every),
        ],
        rows,
    )


def _by_size(figures: Figures, suite: str, *names: str) -> list[str]:
    """A row per row of the suite and a column per number of envs: the lowest and the highest value in all settings."""
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    for key, row in figures.items():
        name = key.split("/")[1] if key.startswith(f"{suite}/") else ""
        if name and names[0] in row and not name.startswith(HIDDEN):
            found.setdefault(name, {}).setdefault(int(key.split("/")[2]), []).append(row)
    sizes = sorted({n for rows in found.values() for n in rows})
    cells = []
    for name, rows in found.items():
        ranges = (
            [_range([row[figure] for row in rows.get(n, ()) if figure in row]) for figure in names]
            for n in sizes
        )
        cells.append([name, *(" / ".join(filter(None, parts)) for parts in ranges)])
    return _table(["", *(f"{n:,} env{'s' * (n > 1)}" for n in sizes)], cells)


def _range(values: Sequence[float]) -> str:
    return (
        " - ".join(
            dict.fromkeys(f"{float(f'{value:.2g}'):,g}" for value in (min(values), max(values)))
        )
        if values
        else ""
    )


def _ppo(figures: Figures) -> list[str]:
    columns = ("env_steps_to_target", "seconds_to_target", "wall_seconds_to_target", *SPEEDS)
    rows = []
    for key in (
        key
        for key in figures
        if key.startswith("ppo/") and key.split("/")[2] in ("median", "speed")
    ):
        cells = [figures[key].get(figure) for figure in columns]
        rows.append(
            [key.split("/")[1], *("" if value is None else _number(value) for value in cells)]
        )
    return _table(["", *(name.replace("_", " ") for name in columns)], rows)
