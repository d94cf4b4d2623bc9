"""examples/trainers.py: each library learns through its adapter."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from helpers import EXAMPLES, load_example

# Mean returns: 22 of a random policy on CartPole-v1, 500 at most; -1200 and about -150 on
# Pendulum-v1.
LIBRARIES = {"torchrl": 475, "skrl": 475, "rl_games": -300}


@pytest.mark.full
@pytest.mark.parametrize("library", LIBRARIES)
def test_trainer_leaves_the_working_directory_empty(library, tmp_path):
    train(library, "--num-updates", "2", cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("library", LIBRARIES)
def test_trainer_solves_its_env(library, tmp_path):
    seed = "20261126"  # not used for tuning
    assert train(library, "--seed", seed, cwd=tmp_path) >= LIBRARIES[library]


def train(library, *arguments, cwd):
    """The mean return, in another process: some libraries change settings of the whole process."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "trainers.py"), library, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    line = rf"^{library}: mean return (-?\d+) of 64 episodes$"
    (mean,) = re.findall(line, run.stdout, re.MULTILINE)
    return int(mean)


@pytest.mark.parametrize("library", LIBRARIES)
def test_missing_library_is_answered_with_the_command_that_installs_it(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    extra = library.replace("_", "-")
    with pytest.raises(SystemExit, match=re.escape(f'pip install -e ".[{extra}]"')):
        load_example("trainers").main(library)
