"""The time that PPO takes on CartPole-v1: examples/ppo.py, Stable-Baselines3's tuned PPO, PPO in JAX; one process each."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .measure import ROOT, Case, Figures, Options, ask, environment
from .report import table

PEERS = ("sb3", "jax")
OURS = {"torchwrap": (), "compiled": ("--compile",)}  # from name to flags of examples/ppo.py
# Its speed with more envs, which needs no learning. Two threads pay where minibatches have thousands of rows.
SPEED = {
    "512 envs": ("--num-envs", "512"),
    "512 envs, compiled": ("--num-envs", "512", "--compile"),
    "512 envs, compiled, 2 threads": ("--num-envs", "512", "--compile", "--num-threads", "2"),
}
SPEED_STEPS = 1_000_000


_SPEEDS = ("steps_per_second", "steps_per_second_steady", "compile_seconds")


def run(options: Options) -> Figures:
    """Seconds of training, and since the start of the process, until the latest 100 episodes return 475 on average."""
    figures: Figures = {}
    for seed in options.seeds:
        rows = {name: _ours(seed, options, *flags) for name, flags in OURS.items()}
        rows["sb3"] = ask(Case("sb3", "solve_cartpole", {"seed": seed, "started": time.time()}), options)
        rows["jax"] = ask(Case("jax_ppo", "solve_cartpole", {"seed": seed, "started": time.time()}), options)
        for name in PEERS:
            for figure in ("seconds_to_target", "wall_seconds_to_target"):
                if rows[name].get(figure) and rows["torchwrap"].get(figure):
                    rows[name].setdefault("ratio", {})[figure] = rows[name][figure] / rows["torchwrap"][figure]
        figures.update({f"ppo/{name}/{seed}": row for name, row in rows.items()})
    figures |= _medians(figures)
    for name, flags in SPEED.items():
        row = _ours(options.seeds[0], options, *flags, "--total-timesteps", str(SPEED_STEPS))
        figures[f"ppo/{name}/speed"] = {figure: row[figure] for figure in _SPEEDS}
    return figures


def _ours(seed: int, options: Options, *flags: str) -> dict[str, Any]:
    script = str(ROOT / "examples" / "ppo.py")
    # The script measures from main() on. Only the imports come before it, and --help runs nothing else.
    start = time.perf_counter()
    _python(options, script, "--help")
    imports = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        _python(options, script, "--seed", str(seed), "--device", options.device, "--out", folder, *flags)
        figures = json.loads((Path(folder) / "metrics.json").read_text())
    seconds = figures["seconds_to_target"]
    return {**figures, "import_seconds": imports, "wall_seconds_to_target": seconds and seconds + imports}


def _python(options: Options, *arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, env=environment(options))


def _medians(figures: Figures) -> Figures:
    """The median of each side over the seeds. A run that does not reach the target counts as infinite, so none is left out."""
    found: Figures = {}
    for name in (*OURS, *PEERS):
        rows = [row for key, row in figures.items() if key.split("/")[1] == name]
        if not rows or any("skipped" in row for row in rows):
            continue
        row: dict[str, Any] = {}
        for figure in ("env_steps_to_target", "seconds_to_target", "wall_seconds_to_target", *_SPEEDS):
            if any(figure not in one for one in rows):  # a peer has fewer figures
                continue
            middle = statistics.median(float("inf") if one[figure] is None else one[figure] for one in rows)
            row[figure] = None if middle == float("inf") else middle
        found[f"ppo/{name}/median"] = row
    for name in PEERS:
        peer, ours = found.get(f"ppo/{name}/median", {}), found.get("ppo/torchwrap/median", {})
        for figure in ("seconds_to_target", "wall_seconds_to_target"):
            if peer.get(figure) and ours.get(figure):
                peer.setdefault("ratio", {})[figure] = peer[figure] / ours[figure]
    return found


def show(figures: Figures) -> str:
    columns = {
        "env steps": "env_steps_to_target",
        "steps/s": "steps_per_second",
        "steady steps/s": "steps_per_second_steady",
        "compile s": "compile_seconds",
        "training s": "seconds_to_target",
        "wall s": "wall_seconds_to_target",
        "evaluation": "eval_mean_return",
        "x training": "ratio.seconds_to_target",
        "x wall": "ratio.wall_seconds_to_target",
    }
    return table(
        "ppo: CartPole-v1 by seed, until the latest 100 episodes return 475 on average; x: times ours", figures, columns
    )
