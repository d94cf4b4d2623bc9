"""PPO on CartPole-v1: the time until it is solved, each run in a process of its own."""

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
SPEEDS = ("steps_per_second", "steps_per_second_steady", "compile_seconds")
TIMES = ("seconds_to_target", "wall_seconds_to_target")


def run(options: Options) -> Figures:
    """Seconds of training, and since the start of the process, until CartPole-v1 returns 475."""
    figures: Figures = {}
    imports = _import_seconds(options)
    for seed in options.seeds:
        rows = {name: _train(seed, options, *flags) for name, flags in OURS.items()}
        for row in rows.values():
            seconds = row["seconds_to_target"]
            row.update(import_seconds=imports, wall_seconds_to_target=seconds and seconds + imports)
        for name in PEERS:
            case = Case(name, "solve_cartpole", {"seed": seed, "started": time.time()})
            rows[name] = ask(case, options)
        figures.update({f"ppo/{name}/{seed}": row for name, row in rows.items()})
    return figures | medians(figures)


def _train(seed: int, options: Options, *flags: str) -> dict[str, Any]:
    """The `metrics.json` of a run of examples/ppo.py."""
    with tempfile.TemporaryDirectory() as folder:
        _python(options, "--seed", str(seed), "--device", options.device, "--out", folder, *flags)
        return json.loads((Path(folder) / "metrics.json").read_text())


def _import_seconds(options: Options) -> float:
    # The script measures from main() on. --help runs the imports alone.
    _python(options, "--help")  # reads the libraries from the disk
    start = time.perf_counter()
    _python(options, "--help")
    return time.perf_counter() - start


def _python(options: Options, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ppo.py"), *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment(options))


def medians(figures: Figures) -> Figures:
    """The median of each side over the seeds. A run that misses the target counts as infinite."""
    found: Figures = {}
    for name in (*OURS, *PEERS):
        rows = [row for key, row in figures.items() if key.startswith(f"ppo/{name}/")]
        if not rows or any("skipped" in row for row in rows):
            continue
        row = found[f"ppo/{name}/median"] = {}
        for figure in ("env_steps_to_target", *TIMES, *SPEEDS):
            if not all(figure in each for each in rows):
                continue  # a peer has fewer figures
            values = [each[figure] for each in rows]
            middle = statistics.median([math.inf if value is None else value for value in values])
            row[figure] = None if middle == math.inf else middle
    for name in PEERS:
        peer = found.get(f"ppo/{name}/median", {})
        ours = found.get("ppo/torchwrap/median", {})
        for figure in TIMES:
            if peer.get(figure) and ours.get(figure):
                peer.setdefault("ratio", {})[figure] = peer[figure] / ours[figure]
    return found
