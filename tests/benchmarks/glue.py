"""The cost of a stack of transforms by number of envs: a whole step minus a bare one."""

from collections.abc import Sequence
from typing import Any

from .measure import Case, Figures, Options, Row, compare

THREE = ("RecordEpisodeStatistics", "NormalizeObservation", "NormalizeReward")
SEVEN = (
    "ClipAction",
    "RecordEpisodeStatistics",
    "NormalizeObservation",
    "ClipObservation",
    "FrameStackObservation",
    "NormalizeReward",
    "ClipReward",
)
TORCHRL = (
    "StepCounter",
    "RewardSum",
    "VecNormV2",
    "ClipTransform",
    "CatFrames",
    "RewardScaling",
    "RewardClipping",
)
WAYS = ("eager", "torch.compile", "compiled")  # the last by `tw.compile`
REFERENCES = tuple(f"torchwrap-{way}" for way in WAYS)


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or sizes(options):
        seven = ours(n, SEVEN, options)
        seven["torchrl"] = pair("torchrl", TORCHRL, num_envs=n)
        seven["sb3"] = pair("sb3", True, False, num_envs=n)
        stacks = {"seven": seven}
        if options.device == "cpu":  # as Gymnasium
            stacks["three"] = ours(n, THREE, options)
            stacks["three"]["gymnasium"] = pair("gymnasium", THREE, num_envs=n)
        for stack, rows in stacks.items():
            found = compare(rows, options, REFERENCES)
            figures.update({f"glue/{stack} {name}/{n}": row for name, row in found.items()})
    return figures


def sizes(options: Options) -> tuple[int, ...]:
    return (8, 64, 1024, 16384) if options.device == "cpu" else (4096, 65536, 1048576)


def ours(num_envs: int, transforms: Sequence[str], options: Options) -> dict[str, Row]:
    rows = {}
    shared = {"num_envs": num_envs, "device": options.device}
    for way in ways(options):
        rows[f"torchwrap-{way}"] = pair("torchwrap", transforms, way=way, **shared)
    return rows


def ways(options: Options, *names: str) -> list[str]:
    """How torchwrap's steps run: those named, or all; without compilation, only eager ones."""
    return [way for way in names or WAYS if options.compile or way == "eager"]


def pair(side: str, whole: Any, bare: Any = None, **arguments: Any) -> Row:
    return Row(
        Case(side, "scripted", {**arguments, "transforms": whole}),
        Case(side, "scripted", {**arguments, "transforms": bare}),
    )
