"""The cost of each further transform: glue by the number of transforms, from none to eight."""

from __future__ import annotations

from .glue import COLUMNS, SEVEN, ours
from .measure import Figures, Options, compare_groups
from .report import table

EIGHT = (*SEVEN, "FlattenObservation")


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (1024,):
        groups = {str(number): ours(n, EIGHT[:number], options) for number in range(len(EIGHT) + 1)}
        figures |= {f"number/{name}/{n}": row for name, row in compare_groups(groups, options).items()}
    return figures


def show(figures: Figures) -> str:
    return table(f"number: glue of the first n of {', '.join(EIGHT)}", figures, COLUMNS)
