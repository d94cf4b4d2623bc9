"""examples/custom_transform.py: one transform of each kind."""

import custom_transform as custom
import pytest

import torchwrap as tw
from torchwrap.testing import ScriptedEnv, check_transform


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
    assert len(kinds) == 7
    stack, streaks, rewards = capsys.readouterr().out.splitlines()
    names = "<ContinuousAction()<HideSpeeds()<LogReward()<StreakReward()<CartPole-v1(num_envs=64"
    assert stack.startswith(names)
    assert "[2, 3, 4, 5, 6" in streaks
    assert ", 1, " in streaks
    _, _, before, *_, after = rewards.split()
    assert float(before.strip(";")) > float(after) > 0.9


def test_novelty_falls_where_its_module_is_trained():
    env = tw.TransformedEnv(ScriptedEnv(8, (4,), episode_lengths=3), custom.Novelty())
    observation = env.reset(seed=0)["observation"] / 1000
    novelty = env.transforms[0]
    before = novelty.error(observation).mean().item()
    assert custom.train(novelty, observation) < before / 4
    transition, _ = env.step(env.sample_action())
    assert not transition["next", "reward"].requires_grad
    assert any("predictor" in name for name in env.state_dict())
