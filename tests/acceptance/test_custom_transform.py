"""examples/custom_transform.py: one transform of each kind."""

import runpy

import pytest
import torch
from helpers import EXAMPLES, load_example
from tensordict import TensorDict

import torchwrap as tw
import torchwrap.testing
from torchwrap.testing import ScriptedEnv, check_transform


@pytest.fixture(scope="module")
def custom():
    return load_example("custom_transform")


@pytest.mark.long
@pytest.mark.full
def test_example_runs_and_checks_each_transform(monkeypatch, capsys):
    path, checked, check = EXAMPLES / "custom_transform.py", [], check_transform

    def checking(make, *arguments):
        checked.append(type(make()).__name__)
        check(make, *arguments)

    monkeypatch.setattr(torchwrap.testing, "check_transform", checking)
    runpy.run_path(str(path), run_name="__main__")
    kinds = [
        "ContinuousAction",
        "HideSpeeds",
        "LogReward",
        "Novelty",
        "Progress",
        "StreakReward",
        "SwitchCost",
    ]
    assert sorted(checked) == kinds
    stack, streaks, rewards = capsys.readouterr().out.splitlines()
    assert float(rewards.split()[2].strip(";")) > float(rewards.split()[-1]) > 0.9
    assert stack.startswith(
        "<ContinuousAction()<HideSpeeds()<LogReward()<StreakReward()<CartPole-v1(num_envs=64"
    )
    assert "[2, 3, 4, 5, 6" in streaks and ", 1, " in streaks


def test_streak_reward_counts_until_the_streak_or_the_episode_ends(custom):
    transform = custom.StreakReward()
    transform.allocate(2)

    def step(*theta):
        observation = torch.full((2, 4), 9.0)
        observation[:, 2] = torch.tensor(theta)
        return transform.step(
            TensorDict({"observation": observation, "reward": torch.ones(2, 1)}, [2])
        )["reward"].tolist()

    assert step(0.0, 0.09) == [[2], [2]]
    assert step(-0.09, -0.11) == [[3], [1]]
    assert step(0.0, 0.0) == [[4], [2]]
    transform.reset(
        TensorDict({"observation": torch.zeros(2, 4)}, [2]), tw.RowMask(torch.tensor([True, False]))
    )
    assert step(0.0, 0.0) == [[2], [3]]
    assert list(transform.state_dict()) == []


def test_novelty_falls_where_its_module_has_been_trained(custom):
    env = tw.TransformedEnv(ScriptedEnv(8, (4,), episode_lengths=3), custom.Novelty())
    observation = env.reset(seed=0)["observation"] / 1000
    novelty = env.transforms[0]
    before = novelty.error(observation).mean().item()
    assert custom.train(novelty, observation) < before / 4
    assert not env.step(env.sample_action())[0]["next", "reward"].requires_grad
    assert {name for name in env.state_dict() if "predictor" in name}
