"""examples/custom_transform.py: transforms of several kinds."""

import custom_transform as custom
import pytest

from torchwrap.testing import check_transform


@pytest.mark.long
@pytest.mark.full
def test_example_runs_and_checks_each_transform(monkeypatch, capsys):
    checked = []

    def check(make, *arguments):
        checked.append(make)
        check_transform(make, *arguments)

    monkeypatch.setattr(custom, "check_transform", check)
    custom.main()
    kinds = [kind for kind in vars(custom).values() if isinstance(kind, type)]
    kinds = {kind for kind in kinds if kind.__module__ == custom.__name__}
    assert set(checked) == kinds
    assert len(kinds) == 5
    stack, shapes, rewards = capsys.readouterr().out.splitlines()
    assert stack.startswith("<ContinuousAction()<HideSpeeds()<CartPole-v1(num_envs=64")
    assert "[64, 60, 2]" in shapes and "[64, 60, 1]" in shapes
    _, _, before, *_, after = rewards.split()
    assert float(before.strip(";")) > float(after) > 0.9
