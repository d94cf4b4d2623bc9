"""Ten million steps of each native env with a stack of transforms: memory, finiteness, and returns against Gymnasium's env."""

from __future__ import annotations

import math

import numpy as np

from .measure import Case, Figures, Options, ask
from .report import table

IDS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1")
STEPS, EPISODES = 10_000_000, 10_000


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (4096,):
        for id in IDS:
            arguments = {"id": id, "num_envs": n, "steps": STEPS, "episodes": EPISODES}
            ours = ask(Case("torchwrap", "soak", arguments), options)
            theirs = ask(Case("gymnasium", "returns", {"id": id, "episodes": EPISODES}), options)
            if "skipped" not in ours:
                ours["p_value"] = two_samples(np.array(ours.pop("returns")), np.array(theirs["returns"]))
            figures[f"soak/{id}/{n}"] = ours
    return figures


def two_samples(one: np.ndarray, two: np.ndarray) -> float:
    """The asymptotic p-value of the two-sample Kolmogorov-Smirnov test."""
    values = np.concatenate([one, two])
    below = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (one, two)]
    scale = math.sqrt(len(one) * len(two) / (len(one) + len(two)))
    distance = scale * float(np.abs(below[0] - below[1]).max())
    terms = [(-1) ** (k - 1) * math.exp(-2 * k * k * distance * distance) for k in range(1, 101)]
    return float(np.clip(2 * sum(terms), 0, 1)) if distance > 0.2 else 1.0


def show(figures: Figures) -> str:
    columns = {"steps": "steps", "seconds": "seconds", "memory drift": "drift", "all finite": "finite"}
    return table("soak: native envs under random actions", figures, {**columns, "p of returns": "p_value"})
