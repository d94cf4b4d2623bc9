"""All work that needs a GPU, in one command: benchmarks, PPO, the device's limits, CUDA tests.

`python -m tests.cuda_day --json cuda.json --plot cuda.png` runs the parts below one after the
other. Each part is a list of steps. Each step is a process with a time limit, and its result is in
the file as soon as it ends. A call continues the last one: it runs the steps that the file does not
have, and names those that did not fit. The output of all steps is in a file next to it, `.log`.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests import versions
from tests.benchmarks import glue, plot
from tests.benchmarks.measure import Case, Options, instruction_sets

ROOT = Path(__file__).parents[1]
START = 5  # seconds; with less, Python and PyTorch would be stopped before they have done anything
WAYS = ("compiled", "eager")
SIZES = {"cuda": (4096, 65536, 1048576), "cpu": (4, 8, 16)}  # small, middle, large


class Step(NamedTuple):
    """A process, and the function that reads its output and exit code.

    `{file}` in its command is a file that the process may write.
    """

    command: Sequence[str]
    read: Callable[[str, int, Path], dict[str, Any]]


class Part(NamedTuple):
    """Steps by name, and the seconds that they may take in all."""

    seconds: float
    steps: dict[str, Step]


# Steps.


def tests(*arguments: str) -> Step:
    flags = shlex.split("-q -rfE --tb=short -p no:cacheprovider -p no:benchmark")
    if find_spec("xdist"):
        flags += ["-n", str(max(2, os.cpu_count() or 2) // 2)]
    return Step([sys.executable, "-m", "pytest", *flags, *arguments], read_tests)


def read_tests(output: str, code: int, file: Path) -> dict[str, Any]:
    """Counts, and a line for each failure."""
    counts, failures = versions.read_tests(code, output)
    if code == 5:  # no test was selected
        failures = []
    return {"status": "failed" if failures else "done", "counts": counts, "failures": failures}


def benchmark(device: str, suite: str, num_envs: int) -> Step:
    command = [sys.executable, "-m", "tests.benchmarks", "--json", "{file}", "--suite", suite]
    command += ["--device", device, "--num-envs", str(num_envs)]
    if device == "cpu":
        quick = "--seconds 0.01 --repeats 1 --num-steps 2 --no-compile --threads 1"
        command += shlex.split(quick)
        command += ["--isa", instruction_sets()[-1]]
    else:
        command += shlex.split("--seconds 0.2 --repeats 5")
    return Step(command, read_benchmark)


def read_benchmark(output: str, code: int, file: Path) -> dict[str, Any]:
    """The figures by suite, row and size, and the rows that failed, without skipped peers."""
    figures = json.loads(file.read_text()) if file.stat().st_size else {}
    rows = {key.rpartition("/")[0]: row for key, row in figures.items() if key != "machine"}
    failures = [
        f"{key}: {row['skipped']}"
        for key, row in rows.items()
        if "torchwrap" in key and _has_failed(row)
    ]
    result = {**outcome(code, output), "failures": failures, "figures": rows}
    return {**result, "status": "failed"} if failures else result


def _has_failed(row: dict[str, Any]) -> bool:
    """A row that is skipped on purpose has not failed."""
    return "trace" in row or row.get("skipped", "").startswith("the process ended")


def call(function: str, **arguments: Any) -> Step:
    return Step(Case("torchwrap", function, arguments).command(Options(), "call"), read_call)


def read_call(output: str, code: int, file: Path) -> dict[str, Any]:
    answers = [
        json.loads(line)
        for line in output.splitlines()
        if line.startswith("{") and line.endswith("}")
    ]
    if not answers or "skipped" in answers[-1]:
        failure = answers[-1]["trace"] if answers else output[-300:]
        return {"status": "failed", "failures": [failure]}
    return {**outcome(code, output), "figures": answers[-1]}


def outcome(code: int, output: str) -> dict[str, Any]:
    if code == 0:
        return {"status": "done"}
    return {"status": "failed", "failures": [f"ended with {code}: {output[-300:]}"]}


def marked_files() -> list[str]:
    """The files with CUDA tests."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.cuda" in path.read_text() and path.stem != "test_cuda_day":
            found.append(path.relative_to(ROOT).as_posix())
    return found


def parts(device: str) -> dict[str, Part]:
    """The parts in the order of their importance: what is unknown first."""
    small, middle, large = SIZES[torch.device(device).type]
    on_cpu = device == "cpu"
    quick = {"num_bytes": 10**6, "seconds": 0.01} if on_cpu else {}
    total = 256 if on_cpu else 10_000_000
    learn = {"device": device, "num_envs": small, "total_timesteps": total}
    seven = {"transforms": glue.SEVEN, "way": "compiled", "device": device}
    frames = {"num_envs": 4 if on_cpu else 64, "device": device}

    def sized(suite: str, *sizes: int) -> dict[str, Step]:
        return {f"{suite}/{n}": benchmark(device, suite, n) for n in sizes}

    def profile(name: str, **arguments: Any) -> Step:
        return call("profile", name=name, arguments=arguments)

    many = {**learn, "num_envs": middle, "total_timesteps": 4 * total}
    grid = {**learn, "num_envs": small // 4, "total_timesteps": total // 4}
    settings = {"seeds": [1, 2, 3, 4], "learning_rate": [1e-3, 3e-3]}
    graph = {
        "ppo_graph": call("example", script="ppo_graph", **learn),
        "ppo_graph/eight": call("example", script="ppo_graph", **grid, **settings),
        f"ppo_graph/{middle}": call("example", script="ppo_graph", **many),
    }
    images = {f"profile/images/{way}": profile("images", way=way, **frames) for way in WAYS}
    profiles = {
        f"profile/seven/{n}": profile("scripted", num_envs=n, **seven) for n in (small, large)
    }
    brief = {"device": device, "compile": not on_cpu}
    scripts = {
        "sac": call("example", script="sac", total_timesteps=2_000, **brief),
        "dqn": call("example", script="dqn", total_timesteps=20_000, **brief),
    }
    ppo = {f"ppo/{way}": call("ppo", compiled=way == "compiled", **learn) for way in WAYS}
    return {
        "machine": Part(20, {"floor": call("floor", device=device, **quick)}),
        "graph": Part(310, graph),
        "ppo": Part(110, ppo),
        "images": Part(60, images),
        "tests": Part(180, {"tests": tests("-m", "cuda", "--full", *marked_files())}),
        "scripts": Part(100, scripts),
        "collector": Part(70, sized("collector", middle, small)),
        "glue": Part(120, sized("glue", middle, large, small)),
        "cartpole": Part(150, sized("cartpole", large, small, middle)),
        "profile": Part(80, profiles),
    }


# Running.


def run(step: Step, seconds: float, log: Path) -> dict[str, Any]:
    """The result of a step. Its processes are ended when its time is over."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        start = time.monotonic()
        file.touch()
        with open(Path(folder) / "output", "w+") as output:
            process = subprocess.Popen(
                [part.replace("{file}", str(file)) for part in step.command],
                cwd=ROOT,
                env={**os.environ, "COLUMNS": "300", "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # workers of a process that was interrupted or has ended, too
                end_group(process)
            output.seek(0)
            text = output.read()
        with open(log, "a") as record:
            record.write(f"\n$ {' '.join(step.command)}\n{text}")
        try:
            result = step.read(text, -9 if code is None else code, file)
        except Exception as error:
            result = {"status": "failed", "failures": [f"{type(error).__name__}: {error}"]}
    if code is None:
        result["status"] = f"stopped after {seconds:.0f} s"
    return {**result, "seconds": round(time.monotonic() - start, 1)}


def end_group(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_parts(
    found: dict[str, Any],
    chosen: dict[str, Part],
    deadline: float,
    keep: Callable[[], None],
    log: Path,
) -> None:
    """Runs the steps that `found["steps"]` does not have as done, and writes the results there."""
    for name, part in chosen.items():
        todo = {
            key: step
            for key, step in part.steps.items()
            if found["steps"].get(key, {}).get("status") != "done"
        }
        until = min(deadline, time.monotonic() + part.seconds)
        print(
            f"\n{name}: {len(todo)} steps, at most {max(until - time.monotonic(), 0):.0f} s",
            flush=True,
        )
        for key, step in todo.items():
            seconds = until - time.monotonic()
            result = {"status": "not run: no time was left"}
            if seconds >= START:
                result = run(step, seconds, log)
            found["steps"][key] = {"part": name, **result}
            keep()
            print(
                f"{name}: {key}: {result['status']}, {result.get('seconds', 0):.0f} s", flush=True
            )
            for line in result.get("failures", []):
                print(f"    {line}", flush=True)


def ratios(steps: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The measured figures that have a target."""
    rows: dict[str, Any] = {}
    for step in steps.values():
        rows |= step.get("figures", {}) if step["part"] not in ("machine", "ppo") else {}
    floor = steps.get("floor", {}).get("figures", {})
    small, _, large = SIZES["cuda"]
    seven = rows.get(f"glue/seven torchwrap-compiled/{small}", {})
    launches = seven.get("whole_us", 0) / floor.get("replay_us", float("inf"))
    rollout = rows.get(f"cartpole/torchwrap-rollout/{large}", {})
    step = rows.get(f"cartpole/torchwrap-compiled/{large}", {})
    peer = rows.get(f"collector/torchrl/{small}", {}).get("ratio", {})
    found = {
        "seven transforms, us per step": (seven.get("whole_us"), 60),
        "seven transforms, launches": (launches, None),
        "CartPole with the stack, step, of copy bandwidth": (step.get("of_copy"), 0.5),
        "CartPole with the stack, rollout, of copy bandwidth": (rollout.get("of_copy"), 0.5),
        "rollouts, times TorchRL's Collector": (peer.get("torchwrap-compiled"), 50),
    }
    return {
        name: {"value": value, "target": target} for name, (value, target) in found.items() if value
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_day", description="Runs all work that needs a GPU."
    )
    parser.add_argument(
        "--json",
        type=Path,
        required=True,
        help="JSON file for all results; one that exists is continued",
    )
    parser.add_argument("--plot", type=Path, help="PNG file for the plot")
    parser.add_argument("--device", default="cuda", help="cpu tries all of it with tiny sizes")
    parser.add_argument("--parts", nargs="+", choices=list(parts("cuda")), help="defaults to all")
    parser.add_argument("--minutes", type=float, default=9, help="for all parts together")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * arguments.minutes
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        print("cuda_day: needs a CUDA device. `--device cpu` tries it without.")
        return 1
    every = parts(arguments.device)
    chosen = {name: part for name, part in every.items() if name in (arguments.parts or every)}
    found: dict[str, Any] = {"device": arguments.device, "steps": {}}
    if arguments.json.exists():
        found = json.loads(arguments.json.read_text())
        if found["device"] != arguments.device:
            parser.error(f"--json: must hold --device {arguments.device}, got {found['device']}.")

    def keep() -> None:
        found["ratios"] = ratios(found["steps"])
        part = arguments.json.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(arguments.json)

    try:
        run_parts(found, chosen, deadline, keep, arguments.json.with_suffix(".log"))
    finally:
        if arguments.plot:
            plot.draw_device(found, str(arguments.plot))
    print(
        "",
        *(
            f"{name}: {row['value']:.3g} (target {row['target']})"
            for name, row in found["ratios"].items()
        ),
        sep="\n",
    )
    missing = [
        f"{key}: {found['steps'][key]['status']}"
        for part in chosen.values()
        for key in part.steps
        if found["steps"][key]["status"] != "done"
    ]
    print("\nNot done:" if missing else "\nAll is done.", *missing, sep="\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
