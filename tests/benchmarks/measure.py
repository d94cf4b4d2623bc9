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
    *("torch", "tensordict", "gymnasium", "numpy", "mujoco", "torchrl", "stable-baselines3"),
    *("jax", "gymnax", "envpool"),
)

ISAS = {"avx2": "AVX2", "avx512": "AVX-512", "native": "the processor's own instruction set"}
# These make a processor with AVX-512 run AVX2 code in every library. They have no effect where there is only AVX2.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",  # PyTorch's kernels, and the vectors of Inductor's code
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",  # the instructions that the C++ compiler may use for that code
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENCV_CPU_DISABLE": "AVX512-SKX",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}

Figures = dict[str, dict[str, Any]]
"""`{"<suite>/<row>/<number of envs>": {figure: value}}`; a row that could not be measured has the reason as `skipped`.

The command line appends the setting to each key: "/<instruction set>-<number of threads>", as in "/avx2-1".
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
    names = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NPROC",
    )  # the last is XLA's
    threads, isa = dict.fromkeys(names, str(options.threads)), AVX2 if options.isa == "avx2" else {}
    inherited = {name: value for name, value in os.environ.items() if name not in AVX2}
    return {**inherited, "JAX_PLATFORMS": "cpu", **threads, **isa, **more}


class Worker:
    """A process that runs one case and sends its answers."""

    def __init__(self, case: Case, options: Options, what: str = "time", **variables: str) -> None:
        command, pipe = case.command(options, what), subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,  # simulators and compilers print warnings; an error is in the answer
            text=True,
            cwd=ROOT,
            env=environment(options, **variables),
        )

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        return (
            json.loads(line)
            if line
            else {"skipped": f"the process ended, with {self.process.wait()}"}
        )

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
    """The figures of every row, measured in turns. `ratio` is a row's microseconds divided by those of a reference.

    `us` is the minimum over the repeats: of a step, or of a whole step minus a bare one. `us_median` and `ratio_median` are
    medians of differences and ratios within one round, because a busy machine slows down all rows of a round. On another
    device than the CPU, a case without an argument `device` is skipped.
    """
    figures: Figures = {}
    if options.device != "cpu":
        there = [name for name, row in rows.items() if "device" not in row.whole.arguments]
        figures = {name: {"skipped": "runs on the CPU only"} for name in there}
        rows = {name: row for name, row in rows.items() if name not in figures}
    cases = {json.dumps(case): case for row in rows.values() for case in row if case is not None}
    answers, times = take_turns(cases, options)
    costs = {}
    for name, row in rows.items():
        keys = [json.dumps(case) for case in row if case is not None]
        failed = [answers[key] for key in keys if "skipped" in answers[key]]
        if failed:
            figures[name] = failed[0]
            continue
        whole, bare = times[keys[0]], times[keys[-1]] if row.bare else [0.0] * options.repeats
        costs[name] = _pairwise(operator.sub, whole, bare)
        figures[name] = {
            "us": min(whole) - min(bare),
            "us_median": statistics.median(costs[name]),
            "whole_us": min(whole),
        }
        if row.bare:
            figures[name]["bare_us"] = min(bare)
        figures[name]["build_seconds"] = answers[keys[0]]["build_seconds"]
        if moved := answers[keys[0]]["bytes"]:
            figures[name].update(bytes=moved, gigabytes_per_second=moved / min(whole) / 1e3)
    for reference in (reference for reference in references if reference in costs):
        if min(figures[reference]["us"], *costs[reference]) <= 0:
            continue  # below the noise
        for name in costs.keys() - {reference}:
            ratios = _pairwise(operator.truediv, costs[name], costs[reference])
            figures[name].setdefault("ratio", {})[reference] = (
                figures[name]["us"] / figures[reference]["us"]
            )
            figures[name].setdefault("ratio_median", {})[reference] = statistics.median(ratios)
    return figures


def take_turns(
    cases: Mapping[str, Case], options: Options
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The first answer of each worker, and its microseconds per step in each repeat. The workers take turns, in order.

    The first round is discarded.
    """
    # Without this, each process would start a pool of compile workers, which keep running and disturb the measurement.
    workers = {
        name: Worker(case, options, TORCHINDUCTOR_COMPILE_THREADS="1")
        for name, case in cases.items()
    }
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
    """Every pair of an instruction set and a number of threads; by default, one and two threads as far as there are cores."""
    return list(itertools.product(isas or instruction_sets(), threads or (1, 2)[: os.cpu_count()]))


def machine(options: Options) -> dict[str, Any]:
    """The environment of the figures: processor, the instructions that our libraries use, versions."""
    isas, pythons = instruction_sets(), {"torchwrap": sys.executable, **options.pythons}
    capabilities = Case("torchwrap", "capabilities", {})
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": options.device,
        "capabilities": {isa: ask(capabilities, Options(isa=isa)) for isa in isas}
        if options.device == "cpu"
        else {},
        "num_steps": options.num_steps,
        "versions": {side: _versions(python) for side, python in pythons.items()},
    }


def _versions(python: str) -> dict[str, str]:
    script = (
        "import importlib.metadata as m, json, platform\n"
        f"found = {{d.name.lower().replace('_', '-'): d.version for d in m.distributions()}}\n"
        f"print(json.dumps({{'python': platform.python_version(), **{{n: found[n] for n in {LIBRARIES} if n in found}}}}))"
    )
    return json.loads(
        subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    )


def instruction_sets() -> tuple[str, ...]:
    """The keys of `ISAS` that the processor has according to Linux, narrow ones first."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    return tuple(
        isa for isa, flag in {"avx2": "avx2", "avx512": "avx512vl"}.items() if flag in flags
    ) or ("native",)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":")[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor()
