"""tests/versions.py without a network: combinations are found, installed and tested, and the table tells what went wrong."""

from __future__ import annotations

import importlib
import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PASSED = "..s [100%]\n5 passed, 2 skipped, 3 deselected in 61.25s (0:01:01)\n"
FAILED = "F\nFAILED tests/test_env.py::test_step - AssertionError\n1 failed, 4 passed, 2 errors in 3.10s\n"


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tests.versions")


@pytest.fixture
def main(versions, monkeypatch, capsys):
    """Runs combinations of this Python, with what each command returns; gives the exit code, the output and the commands."""

    def main(answers, *arguments):
        commands = []

        def call(command, seconds):
            commands.append(command)
            text = " ".join(command)
            return next((answer for part, answer in answers.items() if part in text), (0, "1.0 2.0 3.0 4.0\n"))

        monkeypatch.setattr(versions, "call", call)
        monkeypatch.setattr(versions, "find_python", lambda version: None if version == "3.13" else sys.executable)
        code = versions.main([*arguments])
        return code, capsys.readouterr().out, commands

    return main


def test_every_combination_that_passes_is_a_row_and_the_exit_code_is_zero(main):
    code, output, commands = main({"pytest": (0, PASSED), "platform": (0, "3.12.1\n")}, "--only", "lowest", "newest-3.12")
    head, *rows = (" ".join(line.split()) for line in output.strip().splitlines()[-3:])
    assert code == 0 and head == "combination Python torch tensordict gymnasium numpy passed failed skipped seconds"
    values = "3.12.1 1.0 2.0 3.0 4.0 5 0 2 0"
    assert rows == [f"lowest {values}", f"newest-3.12 {values}"]
    assert sum("pytest" in command for command in commands) == 2


def test_failed_tests_are_named_and_the_exit_code_is_one(main):
    code, output, _ = main({"pytest": (1, FAILED)}, "--only", "newest-3.12")
    row, _, problem = output.strip().splitlines()[-3:]
    assert code == 1 and row.split()[-4:-1] == ["4", "3", "0"]
    assert problem == "newest-3.12: FAILED tests/test_env.py::test_step - AssertionError"


def test_run_that_tests_nothing_or_dies_has_failed(main):
    for answer, problem in (
        ((139, "collecting\nSegmentation fault\n"), "pytest ended with 139: Segmentation fault"),
        ((124, "..\nstopped after 5 s\n"), "pytest ended with 124: stopped after 5 s"),
        ((5, "3 deselected in 0.01s\n"), "pytest ended with 5: 3 deselected in 0.01s"),
        ((0, "2 skipped in 0.01s\n"), "pytest ended with 0: 2 skipped in 0.01s"),
    ):
        code, output, _ = main({"pytest": answer}, "--only", "newest-3.12")
        assert code == 1 and output.endswith(f"newest-3.12: {problem}\n")


def test_what_cannot_be_installed_is_named_and_the_others_run(main):
    pip = "ERROR: No matching distribution found for torch==0.1"
    code, output, commands = main({"torch==": (1, f"Looking\n{pip}\n"), "pytest": (0, PASSED)})
    assert code == 1 and "lowest: not run: failed to install, with 1\n" in output and f"lowest: {pip}\n" in output
    assert output.endswith("newest-3.13: not run: no Python 3.13 was found\n")
    assert re.search(r"^newest-3\.12 .* 5 +0 +2 +0$", output, re.MULTILINE)
    assert sum("pytest" in command for command in commands) == 1


def test_lowest_versions_are_the_ones_that_setup_cfg_asks_for(versions):
    asked = re.findall(r"^    (torch|tensordict|gymnasium|numpy)>=(\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert versions.combinations()["lowest"].requirements == tuple(f"{name}=={version}" for name, version in asked)
    assert [name for name, _ in asked] == list(versions.LIBRARIES)
    assert versions.combinations()["newest-3.12"].requirements == ()


@pytest.mark.full
def test_command_that_takes_too_long_is_stopped_and_python_path_is_not_inherited(versions, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert versions.call([sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"], 60) == (0, "None\n")
    start = time.monotonic()
    code, output = versions.call([sys.executable, "-c", "print('here', flush=True); import time; time.sleep(60)"], 1)
    assert code == 124 and output == "here\n\nstopped after 1 s\n" and time.monotonic() - start < 5
    assert versions.call(["no-such-command"], 1)[0] == 127
