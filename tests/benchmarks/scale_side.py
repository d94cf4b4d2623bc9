"""The measured points of scale.py: calls and examples/ppo.py in 1, 2 and 4 processes of one machine.

`torchrun -m tests.benchmarks.scale_side FILE CALLS` measures the calls in a group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import torchwrap as tw
from torchwrap.distributed import average
from torchwrap.transforms.statistics import RunningMeanStd

from .measure import ROOT
from .scale import COMPONENTS, PARAMETERS, SETTINGS

SIZES = (1, 2, 4)


def measure(calls: int = 300, repeats: int = 3, steps: int = 120_000, iterations: int = 30) -> dict[str, Any]:
    torch.set_num_threads(1)
    measured: dict[str, Any] = {"sync": {}, "average": {}, "phases": {}, "loop": {}}
    load = [round(os.getloadavg()[0], 2)]
    with tempfile.TemporaryDirectory() as folder:
        for n in SIZES:
            path = Path(folder) / f"{n}.json"
            torchrun(n, "-m", "tests.benchmarks.scale_side", str(path), str(calls))
            for kind, rows in json.loads(path.read_text()).items():
                for case, row in rows.items():
                    measured[kind].setdefault(case, {})[str(n)] = row
    load.append(round(os.getloadavg()[0], 2))
    for name, (*_, numbers) in SETTINGS.items():
        fewer = iterations if name == "CartPole-v1" else max(iterations // 6, 2)
        measured["phases"][name] = {str(n): time_phases(name, n, fewer) for n in numbers}
    load.append(round(os.getloadavg()[0], 2))
    for n in SIZES:
        rates = [time_loop(n, steps) for _ in range(repeats)]
        measured["loop"][str(n)] = {"median": rounded(statistics.median(rates)), "max": rounded(max(rates))}
    load.append(round(os.getloadavg()[0], 2))
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    return {"machine": {**machine, "load before, between and after": load}, "measured": measured}


def torchrun(processes: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"torchrun {' '.join(arguments)}:\n{done.stderr[-4000:]}")


def timed(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Microseconds of a call, after a few that do not count."""
    found = []
    for _ in range(calls + 5):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return {"median_us": rounded(statistics.median(found[5:])), "min_us": rounded(min(found[5:]))}


def time_sync(components: int, calls: int) -> dict[str, float]:
    module = RunningMeanStd((components,))
    module.update(torch.ones(2, components))
    return timed(lambda: tw.sync_statistics(module), calls)


def time_average(parameters: int, calls: int) -> dict[str, float]:
    # As many tensors as the agents have, one of which has most of the numbers.
    gradients = [torch.zeros(64) for _ in range(11)] + [torch.zeros(parameters - 11 * 64)]
    return timed(lambda: average(gradients), calls)


def time_calls(calls: int) -> dict[str, Any]:
    """By kind and case. One process alone does what a call takes without others, although it would return at once."""
    number = max(dist.get_world_size(), 2)
    with mock.patch("torchwrap.distributed._world_size", lambda _: number):
        return {
            "sync": {case: time_sync(components, calls) for case, components in COMPONENTS.items()},
            "average": {case: time_average(parameters, calls) for case, parameters in PARAMETERS.items()},
        }


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def time_phases(env_id: str, num_envs: int, iterations: int) -> dict[str, float]:
    """Milliseconds of a rollout and of an update in one process of examples/ppo.py, medians and minima."""
    ppo = example("ppo")
    update, make_batch = ppo.update, ppo.make_batch
    updates: list[float] = []
    rollouts: list[float] = []
    ended: list[float] = []

    def timed_update(*args: Any) -> Any:
        start = time.perf_counter()
        result = update(*args)
        ended[:] = [time.perf_counter()]
        updates.append(ended[0] - start)
        return result

    def timed_make_batch(*args: Any) -> Any:
        result = make_batch(*args)
        rollouts.extend(time.perf_counter() - end for end in ended)  # since the last update, from the second rollout on
        return result

    ppo.update, ppo.make_batch = timed_update, timed_make_batch
    steps = iterations * num_envs * SETTINGS[env_id][0]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = ppo.Args(
            env_id, num_envs=num_envs, num_steps=SETTINGS[env_id][0], total_timesteps=steps, out=Path(folder), normalize=True
        )
        args.save_every = iterations
        ppo.main(args)
    return {
        "rollout_ms": rounded(statistics.median(rollouts) * 1e3),
        "rollout_min_ms": rounded(min(rollouts) * 1e3),
        "update_ms": rounded(statistics.median(updates) * 1e3),
        "update_min_ms": rounded(min(updates) * 1e3),
    }


def time_loop(processes: int, steps: int) -> float:
    """Iterations per second of examples/ppo.py after the first one: CartPole-v1, 64 envs in all."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--normalize", "True", "--total-timesteps", str(steps), "--save-every", "1000000", "--out", folder]
        torchrun(processes, "examples/ppo.py", *arguments)
        metrics = json.loads((Path(folder) / "metrics.json").read_text())
    return metrics["steps_per_second_steady"] / (metrics["num_envs"] * SETTINGS["CartPole-v1"][0])


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = time_calls(int(sys.argv[2]))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()
