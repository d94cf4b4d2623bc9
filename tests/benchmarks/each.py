"""The suites that only tests/cuda_day.py runs, on a GPU: each transform alone, growing stacks, images, rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cartpole import add_speeds
from .glue import SEVEN, ours, ways
from .measure import Case, Figures, Options, Row, compare

TRANSFORMS = (
    *("ClipAction", "DelayAction", "DiscretizeAction", "RescaleAction", "StickyAction", "TransformAction"),
    *("ClipReward", "NormalizeReward", "ScaleReward", "TransformReward", "RecordEpisodeStatistics", "TimeLimit"),
    *("AddNoise", "AddWhiteNoise", "ClipObservation", "DelayObservation", "DiscretizeObservation", "DtypeObservation"),
    *("FilterObservation", "FlattenObservation", "FrameStackObservation", "GrayscaleObservation", "NormalizeObservation"),
    *("ObstructView", "RescaleObservation", "ReshapeObservation", "ResizeObservation", "TimeAwareObservation"),
    "TransformObservation",
)
# The observation space in `script.SPACES`; defaults to "numbers".
SPACES = {"DiscretizeObservation": "bounded numbers", "RescaleObservation": "bounded numbers", "FilterObservation": "parts"}
SPACES |= dict.fromkeys(("GrayscaleObservation", "ResizeObservation", "AddWhiteNoise", "ObstructView"), "images")
WAYS = ("eager", "compiled")
EIGHT = (*SEVEN, "FlattenObservation")


def each(options: Options) -> Figures:
    """Every transform alone: a step with it minus a step without."""
    figures: Figures = {}
    for n in options.num_envs or (4096,):
        names = options.only or TRANSFORMS
        groups = {name: ours(n, [name], options, *WAYS, space=SPACES.get(name, "numbers")) for name in names}
        figures |= _groups("each", groups, n, options)
    return figures


def number(options: Options) -> Figures:
    """The first 0 to 8 transforms of a stack."""
    figures: Figures = {}
    for n in options.num_envs or (4096,):
        groups = {str(count): ours(n, EIGHT[:count], options, *WAYS) for count in range(len(EIGHT) + 1)}
        figures |= _groups("number", groups, n, options)
    return figures


def _groups(suite: str, groups: Mapping[str, Mapping[str, Row]], n: int, options: Options) -> Figures:
    """The rows of eight groups at a time are built and measured together, because most of the time is compilation."""
    figures: Figures = {}
    names = list(groups)
    for start in range(0, len(names), 8):
        some = {f"{group} {name}": row for group in names[start : start + 8] for name, row in groups[group].items()}
        figures |= {f"{suite}/{name}/{n}": row for name, row in compare(some, options).items()}
    return figures


def images(options: Options) -> Figures:
    """Atari preprocessing: grayscale, 84x84 and a stack of four, from frames of 210x160x3."""
    figures: Figures = {}
    for n in options.num_envs or (64,):
        found = compare(_rows("atari", options, num_envs=n, device=options.device), options)
        figures |= {f"images/{name}/{n}": row for name, row in found.items()}
    return figures


def collector(options: Options) -> Figures:
    """Rollouts as PPO collects them: CartPole-v1, episode statistics and a policy, compared with TorchRL's Collector."""
    figures: Figures = {}
    for n in options.num_envs or (4096,):
        shared: dict[str, Any] = {"num_envs": n, "num_steps": options.num_steps, "device": options.device}
        rows = {**_rows("collector", options, **shared), "torchrl": Row(Case("torchrl", "collector", shared))}
        found = compare(rows, options, ("torchwrap-eager", "torchwrap-compiled"))
        figures |= {f"collector/{name}/{n}": row for name, row in found.items()}
    return add_speeds(figures)


def _rows(function: str, options: Options, **arguments: Any) -> dict[str, Row]:
    return {f"torchwrap-{way}": Row(Case("torchwrap", function, {**arguments, "way": way})) for way in ways(options, *WAYS)}
