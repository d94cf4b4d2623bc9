"""An ablation: variants of an env, each trained by ppo.py with three seeds, and one plot of all.

python examples/ablation.py                 the maze: networks, and what the agent sees
python examples/ablation.py --seed 201      the seeds 201 to 203; other flags are those of ppo.py

A variant is a function that takes the place of tw.make, and may put transforms on the env. Returns
are of the env's own rewards. Writes ablation.png into --out. If it is killed, the same command
continues it.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import maze
import ppo
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torchwrap as tw
from torchwrap import transforms as T


def flat(*args: Any, **kwargs: Any) -> tw.Env:
    return tw.TransformedEnv(tw.make(*args, **kwargs), T.FlattenObservation())


VARIANTS = {
    "CNN": tw.make,
    "MLP": flat,
    "CNN without trail": functools.partial(tw.make, trail=False),
}
SEEDS = 3


def learning_curve(args: ppo.Args, variant: str, seed: int) -> Tensor:
    """Trains, and returns env steps and mean returns, `(n, 2)`, averaged over a time limit."""
    out = args.out / f"{variant}-{seed}"
    ppo.main(dataclasses.replace(args, seed=seed, out=out, resume=True), VARIANTS[variant])
    curve = torch.load(out / "agent.pt", weights_only=True)["curve"]
    curve = torch.tensor(curve, dtype=torch.float64)[:, :2]
    # At first, only short episodes have ended. Envs that started together time out together.
    limit = tw.make(args.env_id, 1).spec.max_episode_steps or 1
    curve = curve[curve[:, 0] >= args.num_envs * limit]
    return curve.unfold(0, -(-limit // args.num_steps), 1).mean(-1)


def main(args: ppo.Args) -> None:
    ppo.fill_in(args)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for variant in VARIANTS:
        seeds = range(args.seed, args.seed + SEEDS)
        curves = [learning_curve(args, variant, seed) for seed in seeds]
        steps, returns = torch.stack(curves).unbind(-1)
        axes.plot(steps[0], returns.mean(0), label=variant)
        axes.fill_between(steps[0], returns.amin(0), returns.amax(0), alpha=0.2)
    title = f"PPO on {args.env_id}: mean and range of {SEEDS} seeds"
    axes.set(title=title, xlabel="env steps", ylabel="return")
    axes.legend()
    figure.savefig(args.out / "ablation.png", dpi=80)


if __name__ == "__main__":
    defaults = dataclasses.replace(maze.ARGS, out=Path("runs/ablation"))
    main(tyro.cli(ppo.Args, default=defaults))
