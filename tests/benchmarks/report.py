"""Tables of the figures; `python -m tests.benchmarks.report <JSON file>` prints those of README.md."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .measure import ISAS, Figures

# What is compared with whom: the row, and the row of ours that it is divided by. README.md has the former.
CLAIMS = {
    ("seven transforms, compiled", "TorchRL, eager"): ("glue/seven torchrl", "torchwrap-compiled"),
    ("seven transforms, eager", "TorchRL, eager"): ("glue/seven torchrl", "torchwrap-eager"),
    ("seven transforms, compiled", "SB3, NumPy"): ("glue/seven sb3", "torchwrap-compiled"),
    ("seven transforms, eager", "SB3, NumPy"): ("glue/seven sb3", "torchwrap-eager"),
    ("CartPole rollout, compiled", "gymnax, `lax.scan`"): ("cartpole/gymnax-scan-16", "torchwrap-rollout"),
}
MORE = {
    ("three transforms, compiled", "Gymnasium's three"): ("glue/three gymnasium", "torchwrap-compiled"),
    ("CartPole rollout of 128, compiled", "gymnax, `lax.scan` of 128"): ("cartpole/gymnax-scan-128", "torchwrap-rollout-128"),
    ("CartPole rollout of 128, compiled", "Gymnasium, normalized"): ("cartpole/gymnasium-normalise", "torchwrap-rollout-128"),
}
SIZES = (64, 1024, 16384)

Columns = Mapping[str, str]
"""Maps headings to figures; "ratio.name" is a nested figure."""


def table(title: str, figures: Figures, columns: Columns, width: int = 11) -> str:
    """One line per row, named `<row> <number of envs>` as in its key; a skipped row gives the reason."""
    names = {key: key.split("/")[1:] for key in figures}
    room = max([len(row) for row, _ in names.values()], default=0)
    widths = [max(width, len(heading) + 2) for heading in columns]
    lines = [title, " " * (room + 10) + _line(columns, widths)]
    for key, row in figures.items():
        name, number = names[key]
        start = f"{name:<{room}}  {number:>8}"
        if "skipped" in row:
            lines.append(f"{start}  skipped: {row['skipped']:.100}")
            continue
        lines.append(start + _line([_number(_find(row, figure)) for figure in columns.values()], widths))
    return "\n".join(lines)


def ratios(references: Sequence[str]) -> dict[str, str]:
    """One column per reference: a row's microseconds divided by the reference's, median over the rounds."""
    return {f"x {reference}": f"ratio_median.{reference}" for reference in references}


def words(settings: Iterable[str]) -> str:
    """`AVX2 and AVX-512, 1 and 2 threads`, for the last parts of keys."""
    isas, threads = (list(dict.fromkeys(parts)) for parts in zip(*(setting.split("-") for setting in settings), strict=True))
    return f"{' and '.join(ISAS[isa] for isa in isas)}, {' and '.join(threads)} thread{'s' * (threads != ['1'])}"


def settings(figures: Figures, start: str) -> list[str]:
    """The settings of the figures whose keys start with `start`, in their order."""
    return list(dict.fromkeys(key.split("/")[-1] for key in figures if key.startswith(start)))


def within(figures: Figures, setting: str) -> Figures:
    """The figures of one setting, by keys without it."""
    return {key.removesuffix(f"/{setting}"): row for key, row in figures.items() if key.endswith(f"/{setting}")}


def worst(figures: Figures, key: str, reference: str) -> float | None:
    """How many times faster than a row the reference is, at least: the lowest of all settings and both estimators."""
    rows = [figures.get(f"{key}/{setting}", {}) for setting in settings(figures, key.split("/")[0])]
    found = [row.get(ratio, {}).get(reference) for row in rows for ratio in ("ratio", "ratio_median")]
    return None if None in found else min(found, default=None)


def claims(
    figures: Figures, comparisons: Mapping[tuple[str, str], tuple[str, str]], sizes: Sequence[int] = SIZES
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


def _line(cells: Iterable[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _find(row: Mapping[str, Any], figure: str) -> Any:
    value: Any = row
    for part in figure.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"


def main(path: str) -> None:
    """Prints the rows of README.md's table and further ones: the worst of all settings, and then each setting."""
    with open(path) as file:
        figures = json.load(file)
    every = settings(figures, "glue/")
    print(f"{words(every)}, README.md and more:", *claims(figures, CLAIMS), "", *claims(figures, MORE), sep="\n")
    for setting in every:
        one = {key: row for key, row in figures.items() if key.endswith(f"/{setting}")}
        print(f"\n{words([setting])}:", *claims(one, CLAIMS | MORE), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
