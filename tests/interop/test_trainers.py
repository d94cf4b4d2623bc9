"""examples/trainers.py: each library learns through its adapter."""

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers import EXAMPLES, load_example

from torchwrap.testing import ScriptedEnv

MODULES = {"torchrl": "torchrl", "rsl_rl": "rsl_rl", "skrl": "skrl", "rl_games": "rl_games", "sb3": "stable_baselines3"}


@pytest.mark.full
@pytest.mark.parametrize("library", MODULES)
def test_trainer_solves_its_env_and_writes_nothing_to_the_working_directory(library, tmp_path):
    """Mean returns: 22 of a random policy on CartPole-v1, 500 at most; -1200 and about -150 on Pendulum-v1."""
    if find_spec(MODULES[library]) is None:
        pytest.skip(f"{library} is not installed")
    # In a process of its own, because some libraries change settings of the whole process. The seed was not used for tuning.
    command = [sys.executable, str(EXAMPLES / "trainers.py"), library, "--seed", "20261126"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    (mean,) = re.findall(rf"^{library}: mean return (-?\d+) of 64 episodes$", run.stdout, re.MULTILINE)
    assert int(mean) >= (-300 if library in ("rsl_rl", "rl_games") else 475)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("library", MODULES)
def test_missing_library_is_answered_with_the_command_that_installs_it(library, monkeypatch):
    trainers = load_example("trainers")
    monkeypatch.setitem(sys.modules, MODULES[library], None)
    extra = library.replace("_", "-")
    needed = f'trainers.py {library} needs {MODULES[library]}, which is not installed: pip install -e ".[{extra}]"'
    with pytest.raises(SystemExit, match=f"^{re.escape(needed)}$"):
        trainers.main(library)


# Each makes of what an adapter's step returns: observations to act on, rewards, ends, and final observations of ended rows.
ADAPTERS = {
    "rsl_rl": lambda obs, reward, done, extras: (obs["policy"], reward, done, extras["final_obs"]["policy"]),
    "skrl": lambda obs, reward, ended, cut, infos: (obs, reward, ended | cut, infos["final_observations"]),
    "rl_games": lambda obs, reward, done, infos: (obs, reward, done, infos["final_observation"]),
    "sb3": lambda obs, reward, done, infos: (obs, reward, done, [info.get("terminal_observation", 0) for info in infos]),
    "gymnasium": lambda obs, reward, ended, cut, infos: (obs, reward, ended | cut, infos["final_obs"]),
    "torchrl": lambda step, td: (td["observation"], *(step["next", key] for key in ("reward", "done", "observation"))),
}


@pytest.mark.parametrize("library", ADAPTERS)
def test_every_adapter_steps_a_hand_computed_env(library):
    """Env i takes (1, 2, 3)[(i + e) % 3] steps in episode e; its observation is 1000 * i + t, and its reward t."""
    if find_spec(MODULES.get(library, library)) is None:
        pytest.skip(f"{library} is not installed")
    env = ScriptedEnv(3, (1,), (1, 2, 3))
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP} if library == "gymnasium" else {}
    adapter = getattr(import_module(f"torchwrap.interop.{library}"), f"to_{library}")(env, **kwargs)
    root = adapter.get_observations() if library == "rsl_rl" else adapter.reset()  # rsl_rl's runner does not reset
    action, seen = torch.zeros(3, 6), []
    for _ in range(3):
        if library == "torchrl":
            result = adapter.step_and_maybe_reset(root.set("action", action))
            root = result[1]
        else:
            result = adapter.step(action.numpy() if library in ("sb3", "gymnasium") else action)
        observation, reward, done, final = ADAPTERS[library](*result)
        done = np.asarray(done, bool).ravel()
        final = [np.asarray(final[row]).item() for row in done.nonzero()[0]]
        seen.append((np.asarray(observation).ravel().tolist(), np.asarray(reward).ravel().tolist(), done.tolist(), final))
    assert seen == [
        ([0, 1001, 2001], [1, 1, 1], [True, False, False], [1]),
        ([1, 1000, 2002], [1, 2, 2], [False, True, False], [1002]),
        ([0, 1001, 2000], [2, 1, 3], [True, False, True], [2, 2003]),
    ]
