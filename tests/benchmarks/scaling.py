"""CartPole-v1 by number of envs, from one to a million: bare steps and rollouts of each side."""

from __future__ import annotations

from .cartpole import add_speeds, row
from .measure import Figures, Options, compare

SIZES = tuple(4**power for power in range(11))
REFERENCES = ("torchwrap-step", "torchwrap-rollout")


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or SIZES:
        # A rollout stores at most four million steps, about 250 MB: more envs take fewer steps.
        steps = max(1, min(options.num_steps, 2**22 // n))
        ours = {"num_envs": n, "transforms": None, "device": options.device}
        rows = {"torchwrap-eager": row("torchwrap", **ours)}
        if options.compile:
            rows["torchwrap-step"] = row("torchwrap", **ours, way="compiled")
            rows["torchwrap-rollout"] = row("torchwrap", **ours, way="compiled", num_steps=steps)
        rows["gymnax-step"] = row("jax", num_envs=n, stack=False)
        rows["gymnax-scan"] = row("jax", num_envs=n, stack=False, num_steps=steps)
        rows["gymnasium"] = row("gymnasium", num_envs=n, transforms=None)
        if n <= 2**18:  # a million envs take 8 GB in EnvPool
            rows["envpool"] = row("envpool", num_envs=n)
        found = compare(rows, options, REFERENCES)
        figures.update({f"scaling/{name}/{n}": figure for name, figure in found.items()})
    return add_speeds(figures)
