"""Learning curves of examples/ppo.py on each native env, with its default settings."""

from __future__ import annotations

from .measure import Case, Figures, Options, ask
from .report import table

GOALS = {
    "CartPole-v1": 475,
    "Acrobot-v1": -90,
    "MountainCar-v0": -115,
    "MountainCarContinuous-v0": 85,
    "Pendulum-v1": -250,
}


def run(options: Options) -> Figures:
    figures: Figures = {}
    for id, goal in GOALS.items():
        for seed in options.seeds[:3]:
            case = Case("torchwrap", "learn", {"id": id, "seed": seed, "device": options.device})
            found = {"goal": goal, **ask(case, options)}
            if curve := found.get("curve"):
                found["curve"] = [[steps, round(mean, 2)] for steps, mean, _ in curve[:: max(1, len(curve) // 100)]]
            figures[f"learn/{id}/{seed}"] = found
    return figures


def show(figures: Figures) -> str:
    columns = {"goal": "goal", "last 100 episodes": "final_mean_return", "20 new ones": "eval_mean_return"}
    return table("learn: examples/ppo.py, by seed", figures, {**columns, "env steps": "env_steps", "seconds": "wall_seconds"})
