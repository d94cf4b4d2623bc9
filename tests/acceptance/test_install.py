"""An editable install, as `pip install --no-deps -e .` makes it: build, unpack, start Python."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="70.1")  # which has bdist_wheel

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_editable('..'))"
SCRIPT = "from importlib.util import find_spec; print(find_spec('torchwrap').origin)"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of the repository in a folder of its own, which holds nothing else that is ours."""
    clone = tmp_path_factory.mktemp("projects") / "torchwrap"
    clone.mkdir()
    shutil.copytree(ROOT / "torchwrap", clone / "torchwrap")
    for name in ("setup.cfg", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    return clone


@pytest.fixture(scope="module")
def python(clone, tmp_path_factory):
    """Python of a fresh virtual environment that has the clone installed."""
    environment = tmp_path_factory.mktemp("venv")
    venv.create(environment)
    command = [sys.executable, "-c", BUILD]
    build = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True)
    name = build.stdout.splitlines()[-1]
    (packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(clone.parent / name) as wheel:
        wheel.extractall(packages)
    return environment / "bin" / "python"


@pytest.mark.parametrize("folder", ["..", "../..", "."], ids=["beside", "elsewhere", "inside"])
def test_script_imports_the_installed_package_and_not_the_folder_of_the_clone(
    clone, python, folder
):
    script = clone / folder / "script.py"
    script.write_text(SCRIPT)
    command = [python, script.resolve()]
    run = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(clone / "torchwrap" / "__init__.py")
