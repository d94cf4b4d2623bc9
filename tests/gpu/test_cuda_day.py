"""tests/cuda_day.py without a GPU: parts run, fail, run out of time, and are continued."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def day(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tests.cuda_day")


def test_parts_for_cuda_have_every_step_once(day):
    parts = day.parts("cuda")
    assert sum(part.seconds for part in parts.values()) <= 20 * 60
    names = Counter(key for part in parts.values() for key in part.steps)
    assert set(names.values()) == {1}
    assert {"floor", "ppo_graph", "glue/4096", "ppo/compiled"} <= set(names)
    assert "tests/gpu/test_cuda.py" in parts["tests"].steps["tests"].command
    assert all((ROOT / path).exists() for path in day.marked_files())


def test_day_without_a_device_says_that_it_needs_one(day, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert day.main(["--json", str(tmp_path / "day.json")]) == 1
    assert "--device cpu" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.full
def test_rehearsal_measures_reports_what_fails_or_hangs_and_continues_its_file(
    day, monkeypatch, tmp_path, capsys
):
    def python(code):
        return day.Step(
            [sys.executable, "-c", code], lambda output, code, file: day.outcome(code, output)
        )

    (tmp_path / "other.py").write_text(
        "import pathlib, time; time.sleep(3); pathlib.Path(__file__).with_name('late').touch()"
    )
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
    parts = {
        "machine": day.parts("cpu")["machine"],
        "collector": day.Part(60, {"collector/4": day.benchmark("cpu", "collector", 4)}),
        "broken": day.Part(
            60, {"exit": python("print('here'); raise SystemExit(3)"), "fine": python(count)}
        ),
        "slow": day.Part(
            1,
            {
                "hang": python(f"import runpy; runpy.run_path({str(tmp_path / 'other.py')!r})"),
                "no": python(""),
            },
        ),
        "last": day.Part(
            60, {"last": python("import time; time.sleep(3)")}
        ),  # until the one that hangs would be done
    }
    monkeypatch.setattr(day, "START", 0.1)
    monkeypatch.setattr(day, "parts", lambda device: parts)

    def run(*more):
        files = ["--json", str(tmp_path / "day.json"), "--plot", str(tmp_path / "day.png")]
        code = day.main([*files, "--device", "cpu", *more])
        steps = json.loads((tmp_path / "day.json").read_text())["steps"]
        return code, {key: step["status"] for key, step in steps.items()}, steps

    code, status, steps = run()
    hung = {"hang": "stopped after 1 s", "no": "not run: no time was left"}
    done = dict.fromkeys(("floor", "collector/4", "fine", "last"), "done")
    assert code == 1 and status == {**done, "exit": "failed", **hung}
    assert steps["floor"]["figures"]["copy_gigabytes_per_second"] > 0 and steps["exit"][
        "failures"
    ] == ["ended with 3: here\n"]
    assert steps["collector/4"]["figures"]["collector/torchwrap-eager/4"]["whole_us"] > 0
    assert not (tmp_path / "late").exists() and (tmp_path / "day.png").read_bytes().startswith(
        b"\x89PNG"
    )
    printed = capsys.readouterr().out.split("Not done:")[1].split("\n")
    assert printed[1:4] == [
        "exit: failed",
        "hang: stopped after 1 s",
        "no: not run: no time was left",
    ]
    del parts["slow"]
    parts["broken"].steps["exit"] = python("print('mended')")
    assert run()[:2] == (0, {**status, "exit": "done"}) and (tmp_path / "runs").read_text() == "x"
