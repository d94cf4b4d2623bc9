"""tests/cuda_day.py without a GPU: parts run, fail, run out of time and are continued; all of it ends in a file and a plot."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def day(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tests.cuda_day")


@pytest.fixture
def run(day, monkeypatch, tmp_path):
    """Runs parts on the CPU; returns the exit code and what the file has."""

    def run(parts, *more):
        monkeypatch.setattr(day, "parts", lambda device: parts)
        files = ["--json", str(tmp_path / "day.json"), "--plot", str(tmp_path / "day.png")]
        code = day.main([*files, "--device", "cpu", *more])
        return code, json.loads((tmp_path / "day.json").read_text())

    return run


def python(day, code):
    return day.Step([sys.executable, "-c", code], lambda output, code, file: {**day.outcome(code, output), "output": output})


# The parts themselves.


@pytest.mark.full
def test_machine_is_measured_and_drawn(day, run, tmp_path):
    code, found = run({"machine": day.parts("cpu")["machine"]})
    assert code == 0 and found["device"] == "cpu"
    floor = found["steps"]["floor"]["figures"]
    assert floor["torch"] == torch.__version__ and floor["launch_us"] > 0 and floor["copy_gigabytes_per_second"] > 0
    assert (tmp_path / "day.png").read_bytes().startswith(b"\x89PNG")
    assert "torchwrap_side floor" in (tmp_path / "day.log").read_text()


@pytest.mark.full
def test_benchmark_is_measured(day, run):
    code, found = run({"each": day.Part(60, {"each/4/1": day.benchmark("cpu", "each", 4, "--only", "TimeLimit")})})
    assert code == 0 and found["steps"]["each/4/1"]["figures"]["each/TimeLimit torchwrap-eager/4"]["whole_us"] > 0


def test_parts_for_cuda_take_at_most_25_minutes_and_name_every_step_once(day):
    parts = day.parts("cuda")
    assert sum(part.seconds for name, part in parts.items() if name != "large") <= 25 * 60
    names = Counter(key for part in parts.values() for key in part.steps)
    assert set(names.values()) == {1} and {"floor", "rehearsal", "glue/4096", "cartpole/1048576", "ppo/compiled"} <= set(names)
    every = {name for n in "1234" for name in parts["each"].steps[f"each/4096/{n}"].command}
    assert set(importlib.import_module("tests.benchmarks.each").TRANSFORMS) <= every


def test_every_file_with_a_cuda_test_is_run(day):
    (step,) = day.parts("cuda")["tests"].steps.values()
    assert {"tests/testing/test_checks.py", "tests/test_device.py"} <= set(step.command)


# Running.


@pytest.mark.full
def test_part_that_fails_or_hangs_is_reported_and_stops_no_other(day, run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(day, "START", 0.1)
    (tmp_path / "other.py").write_text("import pathlib, time; time.sleep(3); pathlib.Path(__file__).with_name('late').touch()")
    hang = f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'other.py')!r}])"
    parts = {
        "broken": day.Part(60, {"exit": python(day, "print('here'); raise SystemExit(3)"), "fine": python(day, "print(1)")}),
        "slow": day.Part(1, {"hang": python(day, hang), "late": python(day, "print(2)")}),
        "last": day.Part(60, {"last": python(day, "import time; time.sleep(3); print(3)")}),  # until the other would be done
    }
    code, found = run(parts)
    status = {key: step["status"] for key, step in found["steps"].items()}
    hung = {"hang": "stopped after 1 s", "late": "not run: no time was left"}
    assert code == 1 and status == {"exit": "failed", "fine": "done", **hung, "last": "done"}
    assert found["steps"]["exit"]["failures"] == ["ended with 3: here\n"]
    assert not (tmp_path / "late").exists()  # processes of a process are ended with it
    printed = capsys.readouterr().out.split("Not done:")[1].split("\n")
    assert printed[1:4] == ["exit: failed", "hang: stopped after 1 s", "late: not run: no time was left"]


@pytest.mark.full
def test_file_is_continued_and_what_is_done_is_not_run_again(day, run, tmp_path):
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
    parts = {"one": day.Part(60, {"a": python(day, count), "b": python(day, "1 / 0")})}
    code, found = run(parts)
    assert code == 1 and [step["status"] for step in found["steps"].values()] == ["done", "failed"]
    parts["one"].steps["b"] = python(day, "print('mended')")
    code, found = run(parts)
    assert code == 0 and [step["status"] for step in found["steps"].values()] == ["done"] * 2
    assert (tmp_path / "runs").read_text() == "x"
    with pytest.raises(SystemExit):
        day.main(["--json", str(tmp_path / "day.json"), "--device", "meta"])


@pytest.mark.full
def test_minutes_end_all_parts(day, run, monkeypatch):
    monkeypatch.setattr(day, "START", 0.1)
    parts = {name: day.Part(60, {name: python(day, "import time; time.sleep(60)")}) for name in "ab"}
    code, found = run(parts, "--minutes", "0.02")
    status = [step["status"] for step in found["steps"].values()]
    assert code == 1 and status == ["stopped after 1 s", "not run: no time was left"]


def test_without_a_device_it_says_so_in_a_sentence(day, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert day.main(["--json", str(tmp_path / "day.json")]) == 1
    assert capsys.readouterr().out == "cuda_day needs a CUDA device, but got none: --device cpu tries it without.\n"


# What is read from a process.


def test_counts_and_failures_of_tests_are_read(day, tmp_path):
    summary = "FAILED tests/test_some.py::test_bad - assert\n1 failed, 2 passed, 1 skipped in 0.10s\n"
    for code, output, status, failures in (
        (0, "3 passed in 0.10s\n", "done", []),
        (5, "3 deselected in 0.01s\n", "done", []),
        (1, summary, "failed", ["FAILED tests/test_some.py::test_bad - assert"]),
        (139, "Segmentation fault\n", "failed", ["pytest ended with 139: Segmentation fault"]),
    ):
        result = day.read_tests(output, code, tmp_path)
        assert (result["status"], result["failures"]) == (status, failures), output


def test_row_of_ours_that_is_missing_fails_and_a_peer_does_not(day, tmp_path):
    file = tmp_path / "figures.json"
    rows = {
        "glue/seven sb3/4/avx2-1": {"skipped": "runs on the CPU only"},
        "glue/seven torchwrap-eager/4/avx2-1": {"whole_us": 3},
    }
    file.write_text(json.dumps({"machine": {}, **rows}))
    result = day.read_benchmark("", 0, file)
    assert result["status"] == "done" and result["figures"]["glue/seven torchwrap-eager/4"] == {"whole_us": 3}
    for failure in ({"skipped": "OutOfMemoryError", "trace": "..."}, {"skipped": "the process ended, with -9"}):
        file.write_text(json.dumps({**rows, "glue/seven torchwrap-compiled/4/avx2-1": failure}))
        result = day.read_benchmark("", 0, file)
        assert result["status"] == "failed" and result["failures"] == [
            f"glue/seven torchwrap-compiled/4: {failure['skipped']}"
        ]


def test_ratios_relate_figures_to_the_limits_of_the_device(day):
    steps = {
        "floor": {"part": "machine", "figures": {"replay_us": 5.0}},
        "glue/4096": {"part": "glue", "figures": {"glue/seven torchwrap-compiled/4096": {"whole_us": 50.0}}},
        "collector/4096": {
            "part": "collector",
            "figures": {"collector/torchrl/4096": {"ratio": {"torchwrap-compiled": 80.0}}},
        },
        "cartpole/1048576": {"part": "cartpole", "figures": {"cartpole/torchwrap-compiled/1048576": {"of_copy": 0.4}}},
    }
    found = day.ratios(steps)
    assert found["seven transforms, us per step"] == {"value": 50.0, "target": 60}
    assert found["seven transforms, launches"]["value"] == 10
    assert found["rollouts, times TorchRL's Collector"] == {"value": 80.0, "target": 50}
    assert found["CartPole with the stack, step, of copy bandwidth"] == {"value": 0.4, "target": 0.5}
    assert len(found) == 4 and day.ratios({}) == {}
