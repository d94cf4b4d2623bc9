from __future__ import annotations

import inspect
import re
from pathlib import Path

import gymnasium
import stable_baselines3.common.atari_wrappers as atari_wrappers
import stable_baselines3.common.vec_env as vec_env

import torchwrap as tw
import torchwrap.testing
from torchwrap import transforms as T
from torchwrap import wrappers as W

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_examples_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)  # the README is ours
    assert names["transition"]["next", "reward"].shape == (64, 1) and names["data"].shape == (64, 32)
    assert names["returns"].shape == (128,)


def test_every_transform_and_wrapper_stands_in_a_table():
    rows = set(re.findall(r"^\| `(\w+)\(", README, re.MULTILINE))
    bases = {"ActionTransform", "ObservationTransform", "RewardTransform", "RunningMeanStd", "Transform"}
    assert rows == (set(T.__all__) | set(W.__all__)) - {"TransformedEnv", "Wrapper"} - bases


def test_what_others_call_something_else_is_there_and_here():
    there = {"Gymnasium": [gymnasium.wrappers], "Stable-Baselines3": [vec_env, atari_wrappers]}
    here = [T, W, tw, tw.testing]
    table, library = README.split("### Where to find what you know")[1].split("### ")[0], ""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 3 or "`" not in cells[2] + cells[1]:
            continue
        library = cells[0] or library
        for name in re.findall(r"`(\w+)`", cells[1]):
            known = any(name in dir(module) + getattr(module, "__all__", []) for module in there.get(library, ()))
            assert known or library in ("TorchRL", "Brax") or name in ("AutoResetWrapper", "check_env", "evaluate_policy"), (
                name
            )
        for name in re.findall(r"`(?:testing\.)?([A-Za-z_]+)`", cells[2]):
            fields = inspect.signature(tw.FunctionalEnv).parameters
            assert name in (*fields, "step", "reset") or any(hasattr(module, name) for module in here), name


def test_the_two_commands_name_the_torch_version():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2 and all("torch==2.13.0" in command for command in commands)
    assert "examples/ppo.py" in commands[0] and "pytest" in commands[1]


def test_the_public_names_are_few():
    assert len(tw.__all__) <= 13 and all(hasattr(tw, name) for name in tw.__all__)
