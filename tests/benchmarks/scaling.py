"""CartPole-v1 by number of envs, from one to a million: bare steps and rollouts of each side."""

from __future__ import annotations

from typing import Any

from .cartpole import add_speeds
from .measure import Case, Figures, Options, Row, compare
from .report import ratios, table

SIZES = tuple(4**power for power in range(11))
REFERENCES = ("torchwrap-step", "torchwrap-rollout")


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or SIZES:
        # A rollout stores at most four million steps, about 250 MB: more envs take fewer steps.
        steps = max(1, min(options.num_steps, 2**22 // n))
        ours = {"num_envs": n, "transforms": None, "device": options.device}
        rows = {"torchwrap-eager": _row("torchwrap", **ours)}
        if options.compile:
            rows["torchwrap-step"] = _row("torchwrap", **ours, compiled=True)
            rows["torchwrap-rollout"] = _row("torchwrap", **ours, compiled=True, num_steps=steps)
        rows["gymnax-step"] = _row("jax", num_envs=n, stack=False)
        rows["gymnax-scan"] = _row("jax", num_envs=n, stack=False, num_steps=steps)
        rows["gymnasium"] = _row("gymnasium", num_envs=n, transforms=None)
        if n <= 2**18:  # a million envs take 8 GB in EnvPool
            rows["envpool"] = _row("envpool", num_envs=n)
        found = compare(rows, options, REFERENCES)
        figures.update({f"scaling/{name}/{n}": row for name, row in found.items()})
    return add_speeds(figures)


def _row(side: str, **arguments: Any) -> Row:
    return Row(Case(side, "cartpole", arguments))


def show(figures: Figures) -> str:
    columns = {"us": "us", "(median)": "us_median", "steps/s": "steps_per_second", "GB/s": "gigabytes_per_second"}
    title = "scaling: bare CartPole-v1, microseconds per step of all envs; x: times ours"
    return table(title, figures, {**columns, **ratios(REFERENCES)})
