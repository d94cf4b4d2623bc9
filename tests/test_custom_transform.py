"""examples/custom_transform.py: one transform of each kind."""

from __future__ import annotations

import runpy

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from helpers import EXAMPLES, load_example
from tensordict import TensorDict

import torchwrap as tw
import torchwrap.testing
from torchwrap.testing import ScriptedEnv, check_transform


@pytest.fixture(scope="module")
def custom():
    return load_example("custom_transform")


@pytest.mark.full
def test_example_runs_and_checks_each_transform(monkeypatch, capsys):
    path, checked, check = EXAMPLES / "custom_transform.py", [], check_transform

    def checking(make, *arguments):
        checked.append(type(make()).__name__)
        check(make, *arguments)

    monkeypatch.setattr(torchwrap.testing, "check_transform", checking)
    runpy.run_path(str(path), run_name="__main__")
    kinds = ["ContinuousAction", "HideSpeeds", "LogReward", "Novelty", "Progress", "StreakReward", "SwitchCost"]
    assert sorted(checked) == kinds
    stack, streaks, rewards = capsys.readouterr().out.splitlines()
    assert float(rewards.split()[2].strip(";")) > float(rewards.split()[-1]) > 0.9
    assert stack.startswith("<ContinuousAction()<HideSpeeds()<LogReward()<StreakReward()<CartPole-v1(num_envs=64")
    assert "[2, 3, 4, 5, 6" in streaks and ", 1, " in streaks


def test_streak_reward_counts_until_the_streak_or_the_episode_ends(custom):
    transform = custom.StreakReward()
    transform.allocate(2)

    def step(*theta):
        observation = torch.full((2, 4), 9.0)
        observation[:, 2] = torch.tensor(theta)
        return transform.step(TensorDict({"observation": observation, "reward": torch.ones(2, 1)}, [2]))["reward"].tolist()

    assert step(0.0, 0.09) == [[2], [2]]
    assert step(-0.09, -0.11) == [[3], [1]]
    assert step(0.0, 0.0) == [[4], [2]]
    transform.reset(TensorDict({"observation": torch.zeros(2, 4)}, [2]), tw.RowMask(torch.tensor([True, False])))
    assert step(0.0, 0.0) == [[2], [3]]
    assert list(transform.state_dict()) == []


def test_continuous_action_pushes_left_or_right(custom):
    env = tw.TransformedEnv(ScriptedEnv(3, action_space=Discrete(2)), custom.ContinuousAction())
    assert env.single_action_space == Box(-1, 1, (1,))
    transition, _ = env.step(env.reset().set("action", torch.tensor([[-0.3], [0.2], [0.9]])))
    assert transition["next", "info", "action"].tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"ContinuousAction needs the actions Discrete\(2\), but got Box"):
        tw.TransformedEnv(ScriptedEnv(1), custom.ContinuousAction())


def test_progress_is_the_difference_of_potentials(custom):
    env = tw.TransformedEnv(ScriptedEnv(2, (1,), episode_lengths=(2, 3)), custom.Progress())
    td = env.reset()
    before = td["observation"]
    for step in (1, 2, 1, 2, 3):  # the rewards of row 0, whose episodes take 2 and 3 steps
        transition, td = env.step(td.set("action", env.sample_action()))
        after, reward = transition["next", "observation"], transition["next", "reward"]
        assert reward[0].item() == pytest.approx(step - 0.99 * after[0].item() + before[0].item(), rel=1e-5)
        before = td["observation"]  # an initial one where an episode ended


def test_switch_cost_compares_actions_within_an_episode(custom):
    env = tw.TransformedEnv(ScriptedEnv(1, (1,), episode_lengths=3, action_space=Discrete(2)), custom.SwitchCost())
    td, rewards = env.reset(), []
    for action in (1, 0, 0, 1, 1, 0):
        transition, td = env.step(td.set("action", torch.tensor([action])))
        rewards.append(transition["next", "reward"].item())
    assert rewards == pytest.approx([1, 1.9, 3, 1, 2, 2.9])
    env.transforms[0].cost.fill_(1)
    td["action"] = torch.tensor([0])
    _, td = env.step(td)
    assert env.step(td.set("action", torch.tensor([1])))[0]["next", "reward"].item() == pytest.approx(1)


def test_novelty_falls_where_its_module_has_been_trained(custom):
    env = tw.TransformedEnv(ScriptedEnv(8, (4,), episode_lengths=3), custom.Novelty())
    observation = env.reset(seed=0)["observation"] / 1000
    novelty = env.transforms[0]
    before = novelty.error(observation).mean().item()
    assert custom.train(novelty, observation) < before / 4
    assert not env.step(env.sample_action())[0]["next", "reward"].requires_grad
    assert {name for name in env.state_dict() if "predictor" in name}
