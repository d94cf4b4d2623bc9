"""What a stack of transforms costs by itself: a whole step minus a step of the bare env, beside three peers."""

from __future__ import annotations

import importlib
import operator
import statistics
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from . import torchwrap_side
from .measure import take_turns

NUM_ENVS = (64, 1024, 16384)
PEERS = {
    "torchrl": "TorchRL, 7 transforms",
    "sb3": "Stable-Baselines3, 3 wrappers",
    "gymnasium": "Gymnasium, 3 wrappers: no clip, no stack",
}
LABELS = {"torchwrap": "torchwrap, 7 transforms", **PEERS}


def run(
    num_envs: Sequence[int] = NUM_ENVS, seconds: float = 0.3, repeats: int = 7, peers: Sequence[str] = tuple(PEERS)
) -> dict[str, dict[str, Any]]:
    """`{"glue/<side>/<num_envs>": figures}`, in microseconds a step; a peer that cannot be imported has `skipped` alone."""
    sides: dict[str, ModuleType | str] = {"torchwrap": torchwrap_side}
    for peer in peers:
        try:
            sides[peer] = importlib.import_module(f".{peer}_peer", __package__)
        except ImportError as error:
            sides[peer] = f"{type(error).__name__}: {error}"
    figures = {}
    for number in num_envs:
        measured = _measure(
            {name: side for name, side in sides.items() if isinstance(side, ModuleType)}, number, seconds, repeats
        )
        for name, side in sides.items():
            figures[f"glue/{name}/{number}"] = {"skipped": side} if isinstance(side, str) else measured[name]
    return figures


def _measure(sides: dict[str, ModuleType], num_envs: int, seconds: float, repeats: int) -> dict[str, dict[str, Any]]:
    steps = {}
    for name, side in sides.items():
        steps[f"{name} bare"] = side.bare(num_envs)
        steps[f"{name} whole"] = side.whole(num_envs)
    times = take_turns(steps, seconds, repeats)
    # Differences and ratios within one round: neighbours that slow the machine down for a while slow everybody down.
    glue = {name: _pairwise(operator.sub, times[f"{name} whole"], times[f"{name} bare"]) for name in sides}
    figures = {name: _figures(times[f"{name} bare"], times[f"{name} whole"], glue[name], num_envs) for name in sides}
    for name, theirs in figures.items():
        if name != "torchwrap":
            theirs["ratio"] = theirs["glue_us"] / figures["torchwrap"]["glue_us"]
            theirs["ratio_median"] = statistics.median(_pairwise(operator.truediv, glue[name], glue["torchwrap"]))
    return figures


def _pairwise(operation: Callable[[float, float], float], first: list[float], second: list[float]) -> list[float]:
    return [operation(a, b) for a, b in zip(first, second, strict=True)]


def _figures(bare: list[float], whole: list[float], glue: list[float], num_envs: int) -> dict[str, Any]:
    return {
        "num_envs": num_envs,
        "repeats": len(bare),
        "bare_us": min(bare),
        "whole_us": min(whole),
        "glue_us": min(whole) - min(bare),
        "bare_median_us": statistics.median(bare),
        "whole_median_us": statistics.median(whole),
        "glue_median_us": statistics.median(glue),
    }


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures to read; a ratio says how many times our glue the peer's is."""
    head = ("bare", "whole", "glue", "(median)")
    lines = [
        "glue: a whole step minus a step of the bare env, microseconds; lowest of the repeats, except where it says median",
        f"{'N':>6}  {'side':<42} {' '.join(f'{word:>8}' for word in head)} {'ratio':>7} {'(med.)':>7}",
    ]
    for key, row in figures.items():
        _, name, num_envs = key.split("/")
        start = f"{num_envs:>6}  {LABELS.get(name, name):<42}"
        if "skipped" in row:
            lines.append(f"{start} skipped: {row['skipped']}")
            continue
        columns = [f"{row['bare_us']:8.0f} {row['whole_us']:8.0f} {row['glue_us']:8.0f} {row['glue_median_us']:8.0f}"]
        if "ratio" in row:
            columns.append(f"{row['ratio']:7.2f} {row['ratio_median']:7.2f}")
        lines.append(" ".join([start, *columns]))
    return "\n".join(lines)
