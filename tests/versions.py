"""The tests with the lowest and the newest versions of Python, torch, tensordict, gymnasium and numpy, in one command.

`python -m tests.versions` makes a virtual environment for each combination below, one after the other, installs this checkout
in it and runs the tests. `--only lowest -- tests/core` runs some of them. The lowest versions are the ones that `setup.cfg`
asks for, the newest are what pip finds. On Linux, an environment takes up to 7 GB while it is used, because PyPI's torch is
a CUDA build; pip's own variables, such as PIP_EXTRA_INDEX_URL, apply. The exit code is 0 if all combinations passed.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "tensordict", "gymnasium", "numpy")
COLUMNS = ("combination", "Python", *LIBRARIES, "passed", "failed", "skipped", "seconds")


class Combination(NamedTuple):
    """Versions of Python, of which the first that is found is used, and requirements besides those of the checkout."""

    pythons: tuple[str, ...]
    requirements: tuple[str, ...] = ()


class Result(NamedTuple):
    """A row of the table. `problems` are the failed tests, or why there is no result; a row without any has passed."""

    name: str
    cells: dict[str, str]
    problems: list[str]


def floors() -> tuple[str, ...]:
    """What `setup.cfg` asks for, as the lowest versions that it admits."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return tuple(config["options"]["install_requires"].strip().replace(">=", "==").splitlines())


def combinations() -> dict[str, Combination]:
    return {
        "lowest": Combination(("3.10", "3.11"), floors()),
        "newest-3.12": Combination(("3.12",)),
        "newest-3.13": Combination(("3.13",)),
    }


def find_python(version: str) -> str | None:
    """An interpreter of this version: on the path, or among those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *(str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*")))]
    code = "import sys, venv; print(*sys.version_info[:2], sep='.')"
    for path in filter(None, found):  # a shim of pyenv is on the path, but may start nothing
        code_and_output = call([path, "-c", code], 60)
        if code_and_output == (0, f"{version}\n"):
            return path
    return None


def call(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit code and output of a command in the checkout; 124 if it was stopped."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        done = subprocess.run(command, cwd=ROOT, env={**env, "COLUMNS": "300"}, timeout=seconds, **pipes)
    except subprocess.TimeoutExpired as error:
        return 124, f"{(error.stdout or b'').decode(errors='replace')}\nstopped after {seconds:.0f} s\n"
    except OSError as error:
        return 127, f"{error}\n"
    return done.returncode, done.stdout


def commands(python: str, folder: str, combination: Combination, tests: Sequence[str]) -> list[tuple[str, list[str]]]:
    """What is run, by what it does, in this order."""
    own = str(Path(folder) / "bin" / "python")
    pip = [own, "-m", "pip", "install", "-q"]
    versions = f"from importlib.metadata import version; print(*map(version, {LIBRARIES}))"
    return [
        ("make the environment", [python, "-m", "venv", folder]),
        ("update pip", [*pip, "--upgrade", "pip"]),  # the one of Python 3.10 did not choose versions within ten minutes
        ("install", [*pip, *combination.requirements, "-e", f"{ROOT}[test]"]),
        ("read the versions", [own, "-c", versions]),
        ("test", [own, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *tests]),
    ]


def run(name: str, combination: Combination, tests: Sequence[str], seconds: float) -> Result:
    """Installs and tests one combination; its environment is gone afterwards."""
    python = next(filter(None, map(find_python, combination.pythons)), None)
    if python is None:
        return Result(name, {}, [f"not run: no Python {' or '.join(combination.pythons)} was found"])
    cells = {"Python": call([python, "-c", "import platform; print(platform.python_version())"], 60)[1].strip()}
    with tempfile.TemporaryDirectory(prefix="torchwrap-") as folder:
        for purpose, command in commands(python, folder, combination, tests):
            print(f"{name}: {purpose}", flush=True)
            start = time.monotonic()
            code, output = call(command, seconds)
            if purpose == "read the versions" and code == 0:
                cells |= zip(LIBRARIES, output.split(), strict=True)
            elif purpose == "test":
                counts, problems = read_tests(code, output)
                cells |= {**counts, "seconds": f"{time.monotonic() - start:.0f}"}
                return Result(name, cells, problems)
            elif code != 0:
                lines = [line for line in output.splitlines() if line.strip()][-5:]
                return Result(name, cells, [f"not run: failed to {purpose}, with {code}", *lines])
    raise AssertionError("The last command runs the tests.")


def read_tests(code: int, output: str) -> tuple[dict[str, str], list[str]]:
    """Counts of pytest's last line, and what failed. Without such a line, how pytest ended."""
    lines = output.splitlines()
    summary = next((line for line in reversed(lines) if re.search(r"\d+ \w+.* in [\d.]+s", line)), "")
    found = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    counts = {"passed": found.get("passed", 0), "failed": found.get("failed", 0) + found.get("error", 0)}
    problems = [line for line in lines if re.match(r"(FAILED|ERROR) \S+", line)]
    if not problems and (code != 0 or not counts["passed"] or counts["failed"]):
        problems = [f"pytest ended with {code}: {' '.join(lines[-1:])}"]
    cells = {**counts, "skipped": found.get("skipped", 0)} if summary else {}
    return {name: str(count) for name, count in cells.items()}, problems


def table(results: Sequence[Result]) -> str:
    """A row for each combination, then everything that went wrong."""
    rows = [COLUMNS, *([result.name, *(result.cells.get(column, "-") for column in COLUMNS[1:])] for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    problems = [f"{result.name}: {problem}" for result in results for problem in result.problems]
    return "\n".join([*lines, *(["", *problems] if problems else [])])


def main(argv: Sequence[str] | None = None) -> int:
    every = combinations()
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description="Runs the tests with other versions.")
    parser.add_argument("--only", nargs="+", choices=list(every), default=list(every), help="defaults to all")
    parser.add_argument("--minutes", type=float, default=90, help="for each command of a combination")
    parser.add_argument("tests", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args(argv)
    results = [run(name, every[name], arguments.tests, 60 * arguments.minutes) for name in arguments.only]
    print(f"\n{table(results)}")
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
