"""PPO on CartPole-v1: the time until it is solved, and env steps per second, each run in a process of its own."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .measure import ROOT, Case, Figures, Options, ask, environment

PEERS = ("sb3",)
OURS = {"torchwrap": (), "compiled": ("--compile",)}  # from name to flags of examples/ppo.py
# Speed in steady state needs no learning. Two threads pay where minibatches have thousands of rows.
SPEED = {
    "512 envs": ("ppo.py", "--num-envs", "512"),
    "512 envs, compiled": ("ppo.py", "--num-envs", "512", "--compile"),
    "512 envs, compiled, 2 threads": ("ppo.py", "--num-envs", "512", "--compile", "--num-threads", "2"),
    "whole iteration compiled": ("ppo_compiled.py",),
    "512 envs, whole iteration compiled": ("ppo_compiled.py", "--num-envs", "512"),
}
SPEED_STEPS = 1_000_000
SPEEDS = ("steps_per_second", "steps_per_second_steady", "compile_seconds")
TIMES = ("seconds_to_target", "wall_seconds_to_target")


def run(options: Options) -> Figures:
    """Seconds of training, and since the start of the process, until the latest 100 episodes return 475 on average."""
    figures: Figures = {}
    imports = _import_seconds(options)
    for seed in options.seeds:
        rows = {name: _train("ppo.py", seed, options, *flags) for name, flags in OURS.items()}
        for row in rows.values():
            seconds = row["seconds_to_target"]
            row.update(import_seconds=imports, wall_seconds_to_target=seconds and seconds + imports)
        for name in PEERS:
            rows[name] = ask(Case(name, "solve_cartpole", {"seed": seed, "started": time.time()}), options)
        figures.update({f"ppo/{name}/{seed}": row for name, row in rows.items()})
    figures |= medians(figures)
    for name, (script, *flags) in SPEED.items():
        if not (ROOT / "examples" / script).exists():
            continue
        try:
            row = _train(script, options.seeds[0], options, *flags, "--total-timesteps", str(SPEED_STEPS))
            row = {figure: row[figure] for figure in SPEEDS if figure in row}
        except subprocess.CalledProcessError as error:
            row = {"skipped": error.stderr.decode().strip().splitlines()[-1]}
        figures[f"ppo/{name}/speed"] = row
    return figures


def _train(script: str, seed: int, options: Options, *flags: str) -> dict[str, Any]:
    """The `metrics.json` of a run of a script in examples/."""
    with tempfile.TemporaryDirectory() as folder:
        _python(options, script, "--seed", str(seed), "--device", options.device, "--out", folder, *flags)
        return json.loads((Path(folder) / "metrics.json").read_text())


def _import_seconds(options: Options) -> float:
    # The script measures from main() on. Only the imports come before it, and --help runs nothing else.
    _python(options, "ppo.py", "--help")  # reads the libraries from the disk
    start = time.perf_counter()
    _python(options, "ppo.py", "--help")
    return time.perf_counter() - start


def _python(options: Options, script: str, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment(options))


def medians(figures: Figures) -> Figures:
    """The median of each side over the seeds. A run that does not reach the target counts as infinite, so none is left out."""
    found: Figures = {}
    for name in (*OURS, *PEERS):
        rows = [row for key, row in figures.items() if key.split("/")[1] == name]
        if not rows or any("skipped" in row for row in rows):
            continue
        row = found[f"ppo/{name}/median"] = {}
        for figure in ("env_steps_to_target", *TIMES, *SPEEDS):
            if all(figure in one for one in rows):  # a peer has fewer figures
                middle = statistics.median(math.inf if one[figure] is None else one[figure] for one in rows)
                row[figure] = None if middle == math.inf else middle
    for name in PEERS:
        peer, ours = found.get(f"ppo/{name}/median", {}), found.get("ppo/torchwrap/median", {})
        for figure in TIMES:
            if peer.get(figure) and ours.get(figure):
                peer.setdefault("ratio", {})[figure] = peer[figure] / ours[figure]
    return found
