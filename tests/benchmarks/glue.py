"""The cost of a stack of transforms: a whole step minus a step of the bare env, by number of envs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .measure import Case, Figures, Options, Row, compare
from .report import ratios, table

THREE = ("RecordEpisodeStatistics", "NormalizeObservation", "NormalizeReward")
SEVEN = (
    *("ClipAction", "RecordEpisodeStatistics", "NormalizeObservation", "ClipObservation", "FrameStackObservation"),
    *("NormalizeReward", "ClipReward"),
)
TORCHRL = ("StepCounter", "RewardSum", "VecNormV2", "ClipTransform", "CatFrames", "RewardScaling", "RewardClipping")
REFERENCES = ("torchwrap-eager", "torchwrap-compiled")
COLUMNS = {"bare": "bare_us", "whole": "whole_us", "added": "us", "(median)": "us_median"}


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or sizes(options):
        seven = ours(n, SEVEN, options)
        seven["torchrl"] = _pair("torchrl", TORCHRL, num_envs=n)
        seven["sb3"] = _pair("sb3", True, False, num_envs=n)
        stacks = {"seven": seven}
        if options.device == "cpu":  # the three are there for the comparison with Gymnasium, which runs on the CPU only
            stacks["three"] = {**ours(n, THREE, options), "gymnasium": _pair("gymnasium", THREE, num_envs=n)}
        for stack, rows in stacks.items():
            found = compare(rows, options, REFERENCES)
            figures.update({f"glue/{stack} {name}/{n}": row for name, row in found.items()})
    return figures


def sizes(options: Options) -> tuple[int, ...]:
    return (1, 64, 1024, 16384) if options.device == "cpu" else (4096, 65536, 1048576)


def ours(num_envs: int, transforms: Sequence[str], options: Options, **more: Any) -> dict[str, Row]:
    arguments = {"num_envs": num_envs, "device": options.device, **more}
    rows = {"torchwrap-eager": _pair("torchwrap", transforms, compiled=False, **arguments)}
    if options.compile:
        rows["torchwrap-compiled"] = _pair("torchwrap", transforms, compiled=True, **arguments)
    return rows


def _pair(side: str, whole: Any, bare: Any = None, **arguments: Any) -> Row:
    return Row(*(Case(side, "scripted", {**arguments, "transforms": transforms}) for transforms in (whole, bare)))


def show(figures: Figures) -> str:
    title = "glue: a whole step minus a step of the bare env, microseconds; x: multiple of torchwrap"
    return table(title, figures, {**COLUMNS, **ratios(REFERENCES)})
