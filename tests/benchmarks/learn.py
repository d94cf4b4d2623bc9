"""What examples/ppo.py learns on each native env, as it is: returns, seconds and curves."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .measure import ROOT, Figures, Options, environment
from .report import table

GOALS = {
    "CartPole-v1": 475,
    "Acrobot-v1": -90,
    "MountainCar-v0": -115,
    "MountainCarContinuous-v0": 85,
    "Pendulum-v1": -250,
}


def run(options: Options) -> Figures:
    return {f"learn/{id}/{seed}": _learn(id, seed, options) for id in GOALS for seed in options.seeds[:3]}


def _learn(id: str, seed: int, options: Options) -> dict[str, Any]:
    import torch  # the curve is in a checkpoint

    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--env", id, "--seed", str(seed), "--device", options.device, "--out", folder]
        command = [sys.executable, str(ROOT / "examples" / "ppo.py"), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment(options))
        metrics = json.loads((Path(folder) / "metrics.json").read_text())
        curve = torch.load(Path(folder) / "checkpoint.pt", weights_only=True)["curve"]
    kept = ("env_steps", "wall_seconds", "final_mean_return", "eval_mean_return")
    thinned = curve[:: max(1, len(curve) // 100)]
    return {name: metrics[name] for name in kept} | {
        "goal": GOALS[id],
        "curve": [[steps, round(mean, 2)] for steps, mean, _ in thinned],
    }


def show(figures: Figures) -> str:
    columns = {"goal": "goal", "last 100 episodes": "final_mean_return", "20 fresh ones": "eval_mean_return"}
    return table("learn: examples/ppo.py, by seed", figures, {**columns, "env steps": "env_steps", "seconds": "wall_seconds"})
