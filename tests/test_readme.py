from __future__ import annotations

import re
from pathlib import Path

import torchwrap as tw
from torchwrap import transforms as T

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_examples_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)  # the README is ours
    assert names["transition"]["next", "reward"].shape == (64, 1) and names["data"].shape == (64, 32)
    assert names["returns"].shape == (128,)


def test_every_transform_stands_in_the_table():
    rows = set(re.findall(r"^\| `(\w+)\(", README, re.MULTILINE))
    bases = {"ActionTransform", "ObservationTransform", "RewardTransform", "RunningMeanStd", "Transform"}
    assert rows == set(T.__all__) - bases


def test_the_two_commands_name_the_torch_version():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2 and all("torch==2.13.0" in command for command in commands)
    assert "examples/ppo.py" in commands[0] and "pytest" in commands[1]


def test_the_public_names_are_few():
    assert len(tw.__all__) <= 13 and all(hasattr(tw, name) for name in tw.__all__)
