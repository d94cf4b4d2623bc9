"""Real simulators: four transforms on HalfCheetah-v5, and Pong through the Atari stack, compared with Gymnasium's wrappers."""

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
            figures.update(_figures(mode, n, compare(rows, options, REFERENCES)))
    for n in options.num_envs or (64,):
        rows = {"torchwrap-vector": Row(Case("torchwrap", "pong", {"num_envs": n, "vector": True}))}
        if options.compile:
            rows["torchwrap-compiled"] = Row(Case("torchwrap", "pong", {"num_envs": n, "compiled": True}))
        rows["gymnasium"] = Row(Case("gymnasium", "pong", {"num_envs": n}))
        rows["ale-vector"] = Row(Case("gymnasium", "pong", {"num_envs": n, "vector": True}))
        figures.update(_figures("pong", n, compare(rows, options)))
    return figures


def _figures(group: str, num_envs: int, found: Figures) -> Figures:
    for row in found.values():
        if "whole_us" in row and "whole_us" in found["gymnasium"]:
            row["whole_ratio"] = row["whole_us"] / found["gymnasium"]["whole_us"]
    return {f"bridge/{group} {name}/{num_envs}": row for name, row in found.items()}


def _pair(side: str, num_envs: int, mode: str, **whole: Any) -> Row:
    arguments = {"num_envs": num_envs, "mode": mode}
    bare = Case(side, "half_cheetah", {**arguments, "transforms": None})  # a bare simulator has nothing to compile
    return Row(Case(side, "half_cheetah", {**arguments, **whole, "transforms": FOUR}), bare)


def show(figures: Figures) -> str:
    title = (
        "bridge: microseconds that clip, statistics and both normalizations add to a step of HalfCheetah-v5; a step of Pong; "
        "x: times ours; whole x: whole step, times Gymnasium's"
    )
    return table(title, figures, {**COLUMNS, **ratios(REFERENCES), "whole x": "whole_ratio"})
