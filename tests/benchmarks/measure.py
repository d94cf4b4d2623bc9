"""Measurement: one worker process per case, all of them timed in turns within one run."""

import itertools
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "torch",
    "tensordict",
    "gymnasium",
    "numpy",
    "mujoco",
    "torchrl",
    "stable-baselines3",
    "jax",
    "gymnax",
    "envpool",
)

ISAS = {"avx2": "AVX2", "avx512": "AVX-512", "native": "the processor's own instruction set"}
# A processor with AVX-512 runs AVX2 code in every library with these.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",  # PyTorch's kernels, and the vectors of Inductor's code
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",  # the C++ compiler's, for that code
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": (
        "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
    ),
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENCV_CPU_DISABLE": "AVX512-SKX",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}

Figures = dict[str, dict[str, Any]]
"""`{"<suite>/<row>/<number of envs>": {figure: value}}`; a skipped row has the reason as `skipped`.

The command line appends the setting to each key: "/<instruction set>-<number of threads>".
"""


@dataclass
class Options:
    """The options of the command line; a suite uses those that apply to it."""

    num_envs: Sequence[int] | None = None
    """Batch sizes. Defaults to those of each suite."""
    seconds: float = 0.3
    """Length of one turn of one row."""
    repeats: int = 7
    """Turns of each row that count."""
    num_steps: int = 16
    """Steps of a compiled rollout."""
    seeds: Sequence[int] = (1, 2, 3, 4, 5)
    isa: str = "native"
    """Instruction set of every library, a key of `ISAS`."""
    threads: int = 1
    """Number of threads of every library."""
    device: str = "cpu"
    """Device of torchwrap. Peers that run on the CPU only are skipped with any other."""
    compile: bool = True
    """Whether rows that need torch.compile are measured."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreters of the sides that do not use ours."""

    @property
    def setting(self) -> str:
        return f"{self.isa}-{self.threads}"


class Case(NamedTuple):
    """A function of a side, `torchwrap_side.py` or `<side>_peer.py`, and its arguments."""

    side: str
    function: str
    arguments: dict[str, Any]

    def command(self, options: Options, what: str) -> list[str]:
        module = "torchwrap_side" if self.side == "torchwrap" else f"{self.side}_peer"
        python = options.pythons.get(self.side, sys.executable)
        arguments = json.dumps(self.arguments)
        return [python, "-m", "tests.benchmarks.worker", module, self.function, arguments, what]


class Row(NamedTuple):
    """A case to time; if there is a `bare` case, the row is the difference."""

    whole: Case
    bare: Case | None = None


def environment(options: Options, **more: str) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in AVX2}
    variables["JAX_PLATFORMS"] = "cpu"
    for library in ("OMP", "MKL", "OPENBLAS"):
        variables[f"{library}_NUM_THREADS"] = str(options.threads)
    variables["NPROC"] = str(options.threads)  # XLA's
    if options.isa == "avx2":
        variables |= AVX2
    return variables | more


class Worker:
    """A process that runs one case and sends its answers."""

    def __init__(self, case: Case, options: Options, what: str = "time", **variables: str) -> None:
        self.process = subprocess.Popen(
            case.command(options, what),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # warnings; an error is in the answer
            text=True,
            cwd=ROOT,
            env=environment(options, **variables),
        )

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            return {"skipped": f"the process ended, with {self.process.wait()}"}
        return json.loads(line)

    def turn(self, seconds: float) -> Any:
        print("turn", seconds, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def ask(case: Case, options: Options, what: str = "call", **variables: str) -> dict[str, Any]:
    """The first answer of a new process."""
    worker = Worker(case, options, what, **variables)
    answer = worker.answer()
    worker.close()
    return answer


def compare(rows: Mapping[str, Row], options: Options, references: Sequence[str] = ()) -> Figures:
    """The figures of every row, in turns. `ratio` is a row's time divided by a reference's.

    `us` is the minimum over the repeats: of a step, or of a whole step minus a bare one.
    `us_median` and `ratio_median` are medians of differences and ratios within one round, because a
    busy machine slows down all rows of a round. On another device than the CPU, a case without an
    argument `device` is skipped.
    """
    figures: Figures = {}
    if options.device != "cpu":
        there = [name for name, row in rows.items() if "device" not in row.whole.arguments]
        figures = {name: {"skipped": "runs on the CPU only"} for name in there}
        rows = {name: row for name, row in rows.items() if name not in figures}
    cases = {}
    for row in rows.values():
        cases.update({json.dumps(case): case for case in row if case is not None})
    answers, times = take_turns(cases, options)
    costs = {}
    for name, row in rows.items():
        keys = [json.dumps(case) for case in row if case is not None]
        failed = [answers[key] for key in keys if "skipped" in answers[key]]
        if failed:
            figures[name] = failed[0]
            continue
        whole = times[keys[0]]
        bare = times[keys[1]] if row.bare else [0.0] * options.repeats
        costs[name] = _pairwise(operator.sub, whole, bare)
        figures[name] = {
            "us": min(whole) - min(bare),
            "us_median": statistics.median(costs[name]),
            "whole_us": min(whole),
        }
        if row.bare:
            figures[name]["bare_us"] = min(bare)
        figures[name]["build_seconds"] = answers[keys[0]]["build_seconds"]
        moved = answers[keys[0]]["bytes"]
        if moved:
            figures[name].update(bytes=moved, gigabytes_per_second=moved / min(whole) / 1e3)
    for reference in references:
        if reference not in costs or min(figures[reference]["us"], *costs[reference]) <= 0:
            continue  # below the noise
        for name in costs.keys() - {reference}:
            row = figures[name]
            ratio = row["us"] / figures[reference]["us"]
            ratios = _pairwise(operator.truediv, costs[name], costs[reference])
            row.setdefault("ratio", {})[reference] = ratio
            row.setdefault("ratio_median", {})[reference] = statistics.median(ratios)
    return figures


def take_turns(
    cases: Mapping[str, Case], options: Options
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The first answer of each worker, and its microseconds per step in each repeat.

    The workers take turns, in order. The first round is discarded.
    """
    workers = {}
    for name, case in cases.items():
        # A pool of compile workers would keep running and disturb the measurement.
        workers[name] = Worker(case, options, TORCHINDUCTOR_COMPILE_THREADS="1")
    answers = {name: worker.answer() for name, worker in workers.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(options.repeats + 1):
        for name, worker in workers.items():
            if "skipped" in answers[name]:
                continue
            figure = worker.turn(options.seconds)
            if isinstance(figure, dict):
                answers[name] = figure
            elif repeat > 0:
                times[name].append(figure)
    for worker in workers.values():
        worker.close()
    return answers, times


def _pairwise(
    operation: Callable[[float, float], float], first: list[float], second: list[float]
) -> list[float]:
    return [operation(a, b) for a, b in zip(first, second, strict=True)]


def settings(isas: Sequence[str] | None, threads: Sequence[int] | None) -> list[tuple[str, int]]:
    """Pairs of an instruction set and a number of threads; by default, at most one per core."""
    threads = threads or (1, 2)[: os.cpu_count()]
    return list(itertools.product(isas or instruction_sets(), threads))


def machine(options: Options) -> dict[str, Any]:
    """The environment of the figures: processor, instruction sets of our libraries, versions."""
    pythons = {"torchwrap": sys.executable, **options.pythons}
    capabilities = {}
    if options.device == "cpu":
        for isa in instruction_sets():
            case = Case("torchwrap", "capabilities", {})
            capabilities[isa] = ask(case, Options(isa=isa))
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": options.device,
        "capabilities": capabilities,
        "num_steps": options.num_steps,
        "versions": {side: _versions(python) for side, python in pythons.items()},
    }


def _versions(python: str) -> dict[str, str]:
    script = f"""if True:
        import importlib.metadata, json, platform
        names = {("python", *LIBRARIES)}
        versions = {{"python": platform.python_version()}}
        for found in importlib.metadata.distributions():
            versions[found.name.lower().replace("_", "-")] = found.version
        print(json.dumps({{name: versions[name] for name in names if name in versions}}))
    """
    command = [python, "-c", script]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def instruction_sets() -> tuple[str, ...]:
    """The keys of `ISAS` that the processor has according to Linux, narrow ones first."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    names = {"avx2": "avx2", "avx512": "avx512vl"}
    return tuple(isa for isa, flag in names.items() if flag in flags) or ("native",)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
