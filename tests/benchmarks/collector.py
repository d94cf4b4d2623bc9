"""Rollouts as PPO collects them: CartPole-v1, episode statistics, a policy that samples; compared with TorchRL's Collector."""

from __future__ import annotations

from typing import Any

from .cartpole import add_speeds
from .measure import Case, Figures, Options, Row, compare
from .report import ratios, table

REFERENCES = ("torchwrap-eager", "torchwrap-compiled")


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or ((1024,) if options.device == "cpu" else (4096,)):
        shared: dict[str, Any] = {"num_envs": n, "num_steps": options.num_steps, "device": options.device}
        rows = {"torchwrap-eager": Row(Case("torchwrap", "collector", shared))}
        if options.compile:
            rows["torchwrap-compiled"] = Row(Case("torchwrap", "collector", {**shared, "compiled": True}))
        rows["torchrl"] = Row(Case("torchrl", "collector", shared))
        figures |= {f"collector/{name}/{n}": row for name, row in compare(rows, options, REFERENCES).items()}
    return add_speeds(figures)


def show(figures: Figures) -> str:
    columns = {"us": "us", "(median)": "us_median", "steps/s": "steps_per_second"}
    title = "collector: microseconds per step of all envs in a rollout with a policy; x: times ours"
    return table(title, figures, {**columns, **ratios(REFERENCES)})
