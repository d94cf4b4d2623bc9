"""How long a step takes, fairly: everything that is to be compared takes turns within one process."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Step = Callable[[], Any]
"""One step of a batch of envs that resets itself; gives `done`, `(num_envs,)` or `(num_envs, 1)`."""

LIBRARIES = ("torch", "tensordict", "gymnasium", "numpy", "torchrl", "stable-baselines3")


def machine() -> dict[str, Any]:
    """What figures depend on: processor, threads, versions."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = None
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


@torch.no_grad()
def take_turns(steps: Mapping[str, Step], seconds: float, repeats: int) -> dict[str, list[float]]:
    """Microseconds a step of each, once a repeat: a turn of `seconds` for each, in order. The first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            figure = _turn(step, seconds)
            if repeat > 0:
                times[name].append(figure)
    return times


def _turn(step: Step, seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds or count == 0:
        for _ in range(5):
            step()
        count += 5
    return elapsed / count * 1e6
