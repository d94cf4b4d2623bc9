"""Startup time: seconds to import, and to compile the first graph on a machine, a new one, and one that is in the cache."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile

from .cartpole import STACK
from .glue import SEVEN
from .measure import ROOT, Case, Figures, Options, ask, environment
from .report import table

IMPORT = """
import json, time
start = time.perf_counter()
import torch, tensordict, gymnasium
before = time.perf_counter()
import torchwrap
print(json.dumps([before - start, time.perf_counter() - before]))
"""


def run(options: Options) -> Figures:
    figures = {"startup/import/1": _imports(options)}
    for n in options.num_envs or (1024, 16384):
        figures.update(_compilation(n, options))
    return figures


def _compilation(n: int, options: Options) -> Figures:
    shared = {"num_envs": n, "compiled": True, "device": options.device}
    cases = {
        "step of seven": Case("torchwrap", "scripted", {**shared, "transforms": SEVEN}),
        "CartPole step": Case("torchwrap", "cartpole", {**shared, "transforms": STACK}),
        "CartPole rollout": Case("torchwrap", "cartpole", {**shared, "transforms": STACK, "num_steps": options.num_steps}),
    }
    figures: Figures = {}
    for name, case in cases.items() if options.compile else ():
        with tempfile.TemporaryDirectory() as cache:
            # Precompiled headers lie in the folder for temporary files, so all but the first process find them.
            folders = {"cold_seconds": "first", "warm_seconds": "first", "new_seconds": "second"}
            answers = {
                figure: ask(case, options, "time", TORCHINDUCTOR_CACHE_DIR=f"{cache}/{folder}", TMPDIR=cache)
                for figure, folder in folders.items()
            }
        figures[f"startup/{name}/{n}"] = next(
            (answer for answer in answers.values() if "skipped" in answer),
            {figure: answer.get("build_seconds") for figure, answer in answers.items()},
        )
    peer = Case("jax", "cartpole", {"num_envs": n, "stack": True, "num_steps": options.num_steps})
    answer = ask(peer, options, "time")
    cold = {"cold_seconds": answer.get("build_seconds")}
    figures[f"startup/gymnax scan/{n}"] = answer if "skipped" in answer else cold
    return figures


def _imports(options: Options) -> dict[str, float]:
    """Medians over fresh processes. The first, which may have to read from the disk, is discarded."""
    command = [sys.executable, "-c", IMPORT]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=environment(options)).stdout)
        for _ in range(options.repeats + 1)
    ]
    below, ours = zip(*runs[1:], strict=True)
    return {"dependencies_seconds": statistics.median(below), "import_seconds": statistics.median(ours)}


def show(figures: Figures) -> str:
    columns = {
        "torch, tensordict, gymnasium": "dependencies_seconds",
        "import torchwrap": "import_seconds",
        "compile, cold": "cold_seconds",
        "new graph": "new_seconds",
        "cached": "warm_seconds",
    }
    return table("startup: seconds", figures, columns)
