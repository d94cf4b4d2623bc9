"""How long PPO takes to solve CartPole-v1: examples/ppo.py in turn with Stable-Baselines3's tuned PPO, a process each."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SEEDS = (1, 2, 3, 4, 5)


def run(
    num_envs: Sequence[int] = (), seconds: float = 0, repeats: int = 0, seeds: Sequence[int] = SEEDS
) -> dict[str, dict[str, Any]]:
    """`{"ppo/<side>/<seed>": figures}`: seconds of training until the latest 100 episodes return 475 on average."""
    figures = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            _python(str(ROOT / "examples" / "ppo.py"), "--seed", str(seed), "--out", folder)
            figures[f"ppo/torchwrap/{seed}"] = json.loads((Path(folder) / "metrics.json").read_text())
        try:
            peer = json.loads(_python("-m", "tests.benchmarks.sb3_peer", str(seed)).splitlines()[-1])
            if peer["seconds_to_target"] and figures[f"ppo/torchwrap/{seed}"]["seconds_to_target"]:
                peer["ratio"] = peer["seconds_to_target"] / figures[f"ppo/torchwrap/{seed}"]["seconds_to_target"]
        except subprocess.CalledProcessError as error:
            peer = {"skipped": error.stderr.strip().splitlines()[-1]}
        figures[f"ppo/sb3/{seed}"] = peer
    return figures


def _python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures to read; a ratio says how many times our seconds the peer took."""
    lines = ["ppo: CartPole-v1, training until the latest 100 episodes return 475 on average", f"{'seed':>6}  {'side':<42}"]
    lines[1] += f"{'steps':>9} {'seconds':>8} {'evaluation':>11} {'ratio':>7}"
    for key, row in figures.items():
        _, name, seed = key.split("/")
        start = f"{seed:>6}  {'torchwrap, examples/ppo.py' if name == 'torchwrap' else 'Stable-Baselines3, tuned PPO':<42}"
        if "skipped" in row:
            lines.append(f"{start}skipped: {row['skipped']}")
            continue
        reached = row["seconds_to_target"]
        columns = f"{row['env_steps_to_target']:9d} {reached:8.2f}" if reached else f"{'never':>9} {'':>8}"
        evaluation = f"{row['eval_mean_return']:11.1f}" if "eval_mean_return" in row else " " * 11
        lines.append(f"{start}{columns} {evaluation}" + (f" {row['ratio']:7.2f}" if "ratio" in row else ""))
    ratios = [row["ratio"] for row in figures.values() if "ratio" in row]
    return "\n".join(lines) + (f"\nmedian ratio: {statistics.median(ratios):.2f}" if ratios else "")
