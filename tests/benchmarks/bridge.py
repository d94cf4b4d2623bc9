"""The cost of four transforms on Gymnasium's HalfCheetah-v5, compared with Gymnasium's own four vector wrappers."""

from __future__ import annotations

from typing import Any

from .glue import COLUMNS, REFERENCES
from .measure import Case, Figures, Options, Row, compare
from .report import ratios, table

FOUR = ("ClipAction", "RecordEpisodeStatistics", "NormalizeObservation", "NormalizeReward")


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (8,):
        for mode in ("sync", "async"):
            rows = {"torchwrap-eager": _pair("torchwrap", n, mode)}
            if options.compile:
                rows["torchwrap-compiled"] = _pair("torchwrap", n, mode, compiled=True)
            rows["gymnasium"] = _pair("gymnasium", n, mode)
            found = compare(rows, options, REFERENCES)
            figures.update({f"bridge/{mode} {name}/{n}": row for name, row in found.items()})
    return figures


def _pair(side: str, num_envs: int, mode: str, **whole: Any) -> Row:
    arguments = {"num_envs": num_envs, "mode": mode}
    bare = Case(side, "half_cheetah", {**arguments, "transforms": None})  # a bare simulator has nothing to compile
    return Row(Case(side, "half_cheetah", {**arguments, **whole, "transforms": FOUR}), bare)


def show(figures: Figures) -> str:
    title = "bridge: HalfCheetah-v5, microseconds that clip, statistics and both normalizations add to a step; x: times ours"
    return table(title, figures, {**COLUMNS, **ratios(REFERENCES)})
