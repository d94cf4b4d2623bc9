"""Runs the tests with the lowest and the newest versions of Python and of the core dependencies.

`python -m tests.versions` makes a virtual environment for each combination below, one after the
other, installs this checkout in it and runs the tests. `--only lowest -- tests/core` runs some of
them. `setup.cfg` has the lowest versions, pip finds the newest. On Linux, an environment takes up
to 7 GB while it is used, because PyPI's torch is a CUDA build; pip's own variables, such as
PIP_EXTRA_INDEX_URL, apply. The exit code is 0 if all combinations passed.
"""

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "tensordict", "gymnasium", "numpy")


def combinations() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Versions of Python, in order of preference, and requirements beside the checkout's."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lowest = tuple(config["options"]["install_requires"].strip().replace(">=", "==").splitlines())
    return {
        "lowest": (("3.10", "3.11"), lowest),
        "newest-3.12": (("3.12",), ()),
        "newest-3.13": (("3.13",), ()),
    }


def run(
    pythons: Sequence[str], requirements: Sequence[str], tests: Sequence[str], seconds: float
) -> list[str]:
    """Installs and tests one combination, and prints its output. Returns what went wrong."""
    python = next(filter(None, (shutil.which(f"python{version}") for version in pythons)), None)
    if python is None:
        return [f"not run: no Python {' or '.join(pythons)} was found"]
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    with tempfile.TemporaryDirectory(prefix="torchwrap-") as folder:
        own = str(Path(folder) / "bin" / "python")
        pip = [own, "-m", "pip", "install", "-q"]
        versions = f"from importlib.metadata import version; print(*map(version, {LIBRARIES}))"
        for command in (
            [python, "-m", "venv", folder],
            # The pip of Python 3.10 did not choose versions within ten minutes.
            [*pip, "--upgrade", "pip"],
            [*pip, *requirements, "-e", f"{ROOT}[test]"],
            [own, "-c", versions],
            [own, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *tests],
        ):
            pipes = dict(
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env={**env, "COLUMNS": "300"}, timeout=seconds, **pipes
                )
            except subprocess.TimeoutExpired:
                return [f"stopped after {seconds:.0f} s: {' '.join(command)}"]
            print(done.stdout, flush=True)
            if "pytest" in command:
                return read_tests(done.returncode, done.stdout)[1]
            if done.returncode:
                return [f"not run: {' '.join(command)} ended with {done.returncode}"]
    raise AssertionError("The last command runs the tests.")


def read_tests(code: int, output: str) -> tuple[dict[str, str], list[str]]:
    """Counts of pytest's last line, and what failed. Without such a line, how pytest ended."""
    lines = output.splitlines()
    summary = next(
        (line for line in reversed(lines) if re.search(r"\d+ \w+.* in [\d.]+s", line)), ""
    )
    found = {
        kind: int(count)
        for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)
    }
    counts = {
        "passed": found.get("passed", 0),
        "failed": found.get("failed", 0) + found.get("error", 0),
    }
    problems = [line for line in lines if re.match(r"(FAILED|ERROR) \S+", line)]
    if not problems and (code != 0 or not counts["passed"] or counts["failed"]):
        problems = [f"pytest ended with {code}: {' '.join(lines[-1:])}"]
    cells = {**counts, "skipped": found.get("skipped", 0)} if summary else {}
    return {name: str(count) for name, count in cells.items()}, problems


def main(argv: Sequence[str] | None = None) -> int:
    every = combinations()
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", description="Runs the tests with other versions."
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(every), default=list(every), help="defaults to all"
    )
    parser.add_argument(
        "--minutes", type=float, default=90, help="for each command of a combination"
    )
    parser.add_argument("tests", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args(argv)
    results = {
        name: run(*every[name], arguments.tests, 60 * arguments.minutes) for name in arguments.only
    }
    for name, problems in results.items():
        print(*(f"{name}: {line}" for line in problems or ["passed"]), sep="\n")
    return 1 if any(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
