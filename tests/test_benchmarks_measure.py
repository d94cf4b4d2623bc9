"""tests/benchmarks: imports, workers, figures, tables and plots."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "tests" / "benchmarks"

HOMES = {
    "torchrl": ["torchrl_peer"],
    "stable_baselines3": ["sb3_peer"],
    "envpool": ["envpool_peer"],
    "gymnax": ["jax_peer", "jax_ppo_peer"],
    "jax": ["jax_peer", "jax_ppo_peer"],
    "optax": ["jax_ppo_peer"],
    "matplotlib": ["plot"],
    "torch": [
        *("lower_bound", "offline_cuda", "offline_cuda_driver", "sb3_peer"),
        *("scale_side", "script", "torchrl_peer", "torchwrap_side"),
    ],
}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"tests.benchmarks.{name}")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module.split(".")[0]


@pytest.mark.parametrize("library", HOMES)
def test_library_is_imported_by_its_own_files_only(library):
    assert sorted(path.stem for path in BENCHMARKS.glob("*.py") if library in imports(path)) == HOMES[library]


def test_worker_imports_the_standard_library_only():
    assert set(imports(BENCHMARKS / "worker.py")) <= sys.stdlib_module_names


# Workers.


def test_worker_answers_with_the_time_of_a_step(load):
    measure = load("measure")
    case = measure.Case("torchwrap", "scripted", {"num_envs": 3, "transforms": ["FrameStackObservation"]})
    worker = measure.Worker(case, measure.Options())
    first, figure = worker.answer(), worker.turn(0.001)
    worker.close()
    assert first["build_seconds"] > 0
    assert first["bytes"] > 2 * 3 * 4 * 17 * 4  # four frames of three envs go out twice
    assert 0 < figure < 1e6
    assert worker.process.returncode == 0


@pytest.mark.full
def test_compare_without_a_library_skips_its_rows_only(load, monkeypatch):
    measure = load("measure")
    monkeypatch.setattr(measure, "LIBRARIES", ())
    here = measure.Row(measure.Case("torchwrap", "copy", {"num_bytes": 1000}))
    there = measure.Row(measure.Case("missing", "step", {}))
    figures = measure.compare({"here": here, "there": there}, measure.Options(seconds=0.001, repeats=1), ["there"])
    assert figures["here"]["us"] > 0
    assert figures["there"]["skipped"].startswith("ModuleNotFoundError")


def test_turn_counts_every_step_and_waits_for_the_device(load, monkeypatch):
    worker, clock, queued = load("worker"), [0.0], []

    def call():
        queued.append(0.002)
        clock[0] += 0.001

    def wait():
        clock[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(worker.time, "perf_counter", lambda: clock[0])
    timed = worker.Timed(call, steps=4, wait=wait)
    assert worker.turn(timed, 0.1) == pytest.approx((1000 + 2000) / 4)
    assert clock[0] == pytest.approx(40 * 0.003)  # waits in between, so that not a second of queued work is left at the end


MEMORY = """
import json
import numpy as np
from tests.benchmarks import worker

def function(num_envs):
    np.ones((num_envs, 4000), np.uint8)  # freed before the first step, like the memory of a compiler
    kept = np.ones((num_envs, 1000), np.uint8)
    return worker.Timed(lambda: np.ones((num_envs, 500), np.uint8).sum() + kept[0, 0])

print(json.dumps(worker.memory(function, {"num_envs": 100_000})))
"""


@pytest.mark.full
def test_memory_measures_what_an_env_keeps():
    """In a separate process, like a worker, because memory that other tests freed would be used instead of new memory."""
    run = subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, capture_output=True, text=True, check=True)
    figures = json.loads(run.stdout)
    assert figures["bytes_per_env"] == pytest.approx(1000, rel=0.1)
    assert figures["peak_bytes_per_env"] == pytest.approx(1500, rel=0.1)


@pytest.mark.parametrize("isa", ["avx2", pytest.param("avx512", marks=pytest.mark.full)])
def test_libraries_use_the_instruction_set_of_the_options(load, monkeypatch, isa):
    measure = load("measure")
    if isa not in measure.instruction_sets():
        pytest.skip(f"needs a processor with {isa}")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # what is set outside does not count
    found = measure.ask(measure.Case("torchwrap", "capabilities", {}), measure.Options(isa=isa))
    wide = isa == "avx512"
    assert found["torch"] == isa.upper() and found["inductor"].split()[0] == isa
    can_choose = hasattr(torch._inductor.config.cpp, "march")
    assert found["compiler"] == ("x86-64-v3" if can_choose and not wide else "native")
    assert any(name in found["numpy"] for name in (("X86_V4", "AVX512") if wide else ("X86_V3", "AVX2")))


@pytest.mark.parametrize(
    ("flags", "found"), [("sse avx2", ("avx2",)), ("avx2 avx512vl", ("avx2", "avx512")), ("asimd", ("native",))]
)
def test_instruction_sets_are_those_of_the_processor(load, monkeypatch, flags, found):
    measure = load("measure")
    monkeypatch.setattr(measure.Path, "read_text", lambda path: f"flags : {flags}\n")
    assert measure.instruction_sets() == found


def test_settings_are_pairs_of_instruction_set_and_threads(load, monkeypatch):
    measure = load("measure")
    monkeypatch.setattr(measure, "instruction_sets", lambda: ("avx2", "avx512"))
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 8)
    assert measure.settings(None, None) == [("avx2", 1), ("avx2", 2), ("avx512", 1), ("avx512", 2)]
    assert measure.settings(["avx512"], [4, 8]) == [("avx512", 4), ("avx512", 8)]
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 1)
    assert measure.settings(None, None) == [("avx2", 1), ("avx512", 1)]


def test_options_set_the_threads_and_interpreter_of_a_process(load):
    measure = load("measure")
    options = measure.Options(threads=3, pythons={"jax": "/there/python"})
    assert measure.environment(options)["OMP_NUM_THREADS"] == measure.environment(options)["NPROC"] == "3"
    assert measure.Case("jax_ppo", "solve_cartpole", {}).command(options, "call")[0] == "/there/python"
    assert measure.Case("torchrl", "scripted", {}).command(options, "time")[0] != "/there/python"


# Figures.


class Fake:
    """A worker that answers from a list, and records its turns."""

    turns: list[str]

    def __init__(self, case, options, what="time", **variables):
        self.name, self.times = case.function, list(case.arguments["times"])

    def answer(self):
        return {"build_seconds": 1.0, "bytes": 3000}

    def turn(self, seconds):
        self.turns.append(self.name)
        return self.times.pop(0)

    def close(self):
        assert not self.times


@pytest.fixture
def compare(load, monkeypatch):
    measure = load("measure")
    monkeypatch.setattr(Fake, "turns", [], raising=False)
    monkeypatch.setattr(measure, "Worker", Fake)

    def compare(references=(), repeats=3, **rows):
        rows = {
            name: measure.Row(*(measure.Case("side", f"{name}{index}", {"times": times}) for index, times in enumerate(row)))
            for name, row in rows.items()
        }
        return measure.compare(rows, measure.Options(repeats=repeats), references)

    return compare


def test_figures_are_minima_and_medians_without_the_first_round(compare):
    figures = compare(
        ["ours"],
        ours=([0, 30, 35, 50], [0, 10, 25, 20]),  # whole, bare: 20, 10, 30 added
        theirs=([0, 70, 75, 60], [0, 10, 15, 20]),  # 60, 60, 40
    )
    assert figures["ours"] == {
        **{"us": 20, "us_median": 20, "whole_us": 30, "bare_us": 10, "build_seconds": 1},
        **{"bytes": 3000, "gigabytes_per_second": 0.1},
    }
    assert figures["theirs"]["us"] == 50 and figures["theirs"]["us_median"] == 60
    assert figures["theirs"]["ratio"] == {"ours": 2.5}
    assert figures["theirs"]["ratio_median"] == {"ours": 3}


def test_peers_without_a_device_are_skipped_by_name_on_a_gpu(load, monkeypatch):
    measure, there = load("measure"), {"times": [0, 3], "device": "cuda"}
    monkeypatch.setattr(measure, "Worker", Fake)
    monkeypatch.setattr(Fake, "turns", [], raising=False)
    groups = {
        number: {"ours": measure.Row(measure.Case("torchwrap", "f", there)), "peer": measure.Row(measure.Case("sb3", "f", {}))}
        for number in "12"
    }
    figures = measure.compare_groups(groups, measure.Options(repeats=1, device="cuda"), ["ours"])
    assert figures["1 ours"]["us"] == figures["2 ours"]["us"] == 3
    assert figures["1 peer"] == figures["2 peer"] == {"skipped": "runs on the CPU only"}
    assert len(Fake.turns) == 2  # the same case in two groups is measured once


def test_rows_take_turns_within_a_round(compare):
    compare(repeats=1, a=([1, 1], [1, 1]), b=([1, 1],))
    assert Fake.turns == ["a0", "a1", "b0"] * 2


def test_ratio_to_a_negative_time_is_absent(compare):
    figures = compare(["ours"], ours=([0, 9, 9, 9], [0, 10, 10, 10]), theirs=([0, 3, 3, 3],))
    assert "ratio" not in figures["theirs"]


def test_median_counts_seeds_that_are_never_solved(load):
    names = ("env_steps_to_target", "seconds_to_target", "wall_seconds_to_target", "steps_per_second")
    seeds = {f"ppo/sb3/{seed}": dict.fromkeys(names, value) for seed, value in enumerate((3, None, 1))}
    assert load("ppo")._medians(seeds)["ppo/sb3/median"] == dict.fromkeys(names, 3)
    seeds["ppo/sb3/0"] = dict.fromkeys(names)
    assert load("ppo")._medians(seeds)["ppo/sb3/median"] == dict.fromkeys(names)


# Tables and plots.


def test_table_has_one_line_per_row(load):
    figures = {
        "glue/ours/64": {"us": 12.34, "ratio_median": {}},
        "glue/theirs/64": {"us": 1234.5, "ratio_median": {"ours": 100.04}},
        "glue/missing/64": {"skipped": "ImportError: no"},
    }
    report = load("report")
    lines = report.table("title", figures, {"added": "us", **report.ratios(["ours"])}).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["added", "x", "ours"],
        ["ours", "64", "12.3"],
        ["theirs", "64", "1,234", "100"],
        ["missing", "64", "skipped:", "ImportError:", "no"],
    ]


def test_command_line_writes_figures_and_a_plot(load, monkeypatch, tmp_path, capsys):
    calls = []

    def run(options):
        calls.append(options)
        return {"memory/ours/8": {"bytes_per_env": 5.0}}

    monkeypatch.setattr(load("memory"), "run", run)
    monkeypatch.setattr(load("measure"), "ask", lambda case, options: {"torch": options.isa})
    path, plot = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["--suite", "memory", "--num-envs", "8", "--no-compile", "--json", str(path), "--plot", str(plot)]
    load("__main__").main(arguments)
    (options,), figures = calls, json.loads(path.read_text())
    assert set(figures) == {"machine", f"memory/ours/8/{options.setting}"}
    assert figures["machine"]["versions"]["torchwrap"]["torch"]
    assert figures["machine"]["capabilities"][options.isa] == {"torch": options.isa}
    assert options.num_envs == [8] and not options.compile
    assert "5.00" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("suite", "arguments", "expected"),
    [
        ("glue", [], ["a-1", "a-2", "b-1", "b-2"]),
        ("memory", [], ["b-2"]),
        ("memory", ["--threads", "1", "3"], ["a-1", "a-3", "b-1", "b-3"]),
        ("memory", ["--isa", "a"], ["a-1", "a-2"]),
    ],
)
def test_command_line_selects_settings(load, monkeypatch, suite, arguments, expected):
    calls, command = [], load("__main__")
    monkeypatch.setattr(load(suite), "run", lambda options: calls.append(options.setting) or {})
    monkeypatch.setattr(load("measure"), "ISAS", {"a": "A", "b": "B"})
    monkeypatch.setattr(load("report"), "ISAS", {"a": "A", "b": "B"})
    monkeypatch.setattr(load("measure").os, "cpu_count", lambda: 2)
    for module in (load("measure"), command):
        monkeypatch.setattr(module, "instruction_sets", lambda: ("a", "b"))
    monkeypatch.setattr(command, "machine", lambda every: {"versions": {}})
    command.main(["--suite", suite, *arguments])
    assert calls == expected


def test_words_name_instruction_sets_and_threads(load):
    words = load("report").words
    assert words(["avx512-2"]) == "AVX-512, 2 threads" and words(["avx2-1", "avx512-1"]) == "AVX2 and AVX-512, 1 thread"
    assert words(["avx2-1", "avx2-2", "avx512-1", "avx512-2"]) == "AVX2 and AVX-512, 1 and 2 threads"


def test_claims_are_the_worst_of_all_settings_and_never_rounded_up(load):
    report, comparisons = load("report"), {("this", "that"): ("glue/theirs", "ours")}
    figures = {"machine": {}, "each/theirs/64/avx2-2": {}}
    ratios = {"avx2-1": (4.0, 2.397), "avx512-1": (2.5, 30.0)}  # of the minimum, and the median
    for setting, (ratio, median) in ratios.items():
        figures[f"glue/theirs/64/{setting}"] = {"ratio": {"ours": ratio}, "ratio_median": {"ours": median}}
    assert report.claims(figures, comparisons, [64]) == ["| this | that | 2.3 |"]
    figures["glue/theirs/64/avx512-1"]["ratio"]["ours"] = 0.0999
    assert report.claims(figures, comparisons, [64]) == ["| this | that | 0.099 |"]
    figures["glue/other/64/avx512-2"] = {}  # a setting in which the row is missing
    assert report.claims(figures, comparisons, [64]) == ["| this | that | ? |"]


def test_report_prints_claims_of_a_file(load, tmp_path, capsys):
    path = tmp_path / "figures.json"
    row = {estimator: {"torchwrap-eager": 2.5} for estimator in ("ratio", "ratio_median")}
    path.write_text(json.dumps({f"glue/seven sb3/64/{setting}": row for setting in ("avx2-1", "avx512-1")}))
    load("report").main(str(path))
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("| seven transforms, eager | SB3, NumPy | 2.5 | ? | ? |") == 3  # the worst, and each setting


def test_every_setting_has_a_panel_with_its_figures_and_the_same_axes(load):
    plot = load("plot")
    from matplotlib.figure import Figure

    settings = ["avx2-1", "avx512-2"]
    row = Figure().subplots(1, 2)
    figures = {f"scaling/envpool/{n}/{s}": {"steps_per_second": n * k} for k, s in enumerate(settings, 1) for n in (1, 4)}
    plot._settings(row, figures, settings, "scaling", plot.SCALING, "steps_per_second")
    assert [axes.get_title() for axes in row] == ["AVX2, 1 thread", "AVX-512, 2 threads"]
    assert [axes.lines[0].get_ydata().tolist() for axes in row] == [[1, 4], [2, 8]]
    assert row[0].get_ylim() == row[1].get_ylim() and row[1].get_legend()


def test_plot_of_scaling_is_next_to_the_other(load, tmp_path):
    figures = {"machine": {"processor": "P", "cores": 2, "device": "cpu", "num_steps": 16, "versions": {}}}
    figures["scaling/envpool/1/avx2-1"] = {"steps_per_second": 1.0}
    load("plot").draw(figures, str(tmp_path / "all.png"))
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "all.png").exists()


def test_scaling_bounds_the_storage_of_rollouts(load, monkeypatch):
    scaling, asked = load("scaling"), []
    monkeypatch.setattr(scaling, "compare", lambda rows, *_: asked.append(rows) or {"torchwrap-rollout": {"us": 2.0}})
    figures = scaling.run(load("measure").Options())
    assert figures["scaling/torchwrap-rollout/1048576"]["steps_per_second"] == 2**20 / 2e-6
    assert ["envpool" in rows for rows in asked] == [True] * 10 + [False]
    for kind in ("torchwrap-rollout", "gymnax-scan"):
        steps = {rows[kind].whole.arguments["num_envs"]: rows[kind].whole.arguments["num_steps"] for rows in asked}
        assert list(steps) == [4**power for power in range(11)] and steps[1] == steps[2**18] == 16 and steps[2**20] == 4


def test_plot_shows_the_figures(load):
    plot = load("plot")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    figures = {f"cartpole/gymnax-scan-{k}/{n}": {"steps_per_second": n * k} for k in (16, 128) for n in (1024, 64)}
    figures["cartpole/torchrl/64"] = {"skipped": "ImportError"}
    plot._lines(axes, figures, "cartpole", plot.CARTPOLE, "steps_per_second")
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[64, 1024], [1024, 16384]]


def test_draw_learning_writes_a_plot(load, tmp_path):
    row = {"goal": 1, "curve": [[0, 0.0], [10, 2.0]]}
    load("plot").draw_learning({"learn/A/1": row, "learn/A/2": row, "learn/B/1": row}, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
