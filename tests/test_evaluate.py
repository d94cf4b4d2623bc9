"""`torchwrap.evaluate`: seeds, and episodes that take long."""

from __future__ import annotations

import pytest
import torch

import torchwrap as tw
from torchwrap import collector
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def endless(num_envs=2):
    return ScriptedEnv(num_envs, episode_lengths=10**9)


def values(result):
    return result["episode_return"].tolist(), result["episode_length"].tolist()


def test_evaluate_with_a_seed_is_reproducible():
    env, other = tw.make("CartPole-v1", 4), tw.make("CartPole-v1", 4)
    first, unseeded, again = (values(tw.evaluate(env, None, 8, seed=seed)) for seed in (3, None, 3))
    assert again == first == values(tw.evaluate(other, None, 8, seed=3))
    assert unseeded != first and values(tw.evaluate(other, None, 8, seed=4)) != first


def test_evaluate_of_an_env_that_never_ends_raises(monkeypatch):
    monkeypatch.setattr(collector, "_PATIENCE", 7)
    with pytest.raises(
        RuntimeError, match=r"evaluate needs episodes that end, but an episode of .* has taken 7 steps"
    ) as raised:
        tw.evaluate(endless(), None, 2)
    assert "TimeLimit" in str(raised.value) and "max_steps" in str(raised.value)


def test_evaluate_waits_for_an_episode_of_one_env(monkeypatch):
    monkeypatch.setattr(collector, "_PATIENCE", 7)
    env = ScriptedEnv(2, episode_lengths=(2, 10**9))  # env 0 starts with the short episode, env 1 with the long one
    with pytest.raises(RuntimeError, match="has taken 7 steps"):
        tw.evaluate(env, None, 2)


def test_evaluate_of_a_long_episode_with_a_time_limit_waits_for_it(monkeypatch):
    monkeypatch.setattr(collector, "_PATIENCE", 7)
    env = tw.TransformedEnv(endless(), T.TimeLimit(25))  # more than _PATIENCE, less than four times the limit
    assert tw.evaluate(env, None, 2)["episode_length"].tolist() == [25, 25]


def test_evaluate_that_raises_leaves_the_training_mode(monkeypatch):
    monkeypatch.setattr(collector, "_PATIENCE", 7)
    env = tw.TransformedEnv(endless(), T.NormalizeReward())
    with pytest.raises(RuntimeError):
        tw.evaluate(env, None, 2)
    assert env.training and env.transforms[0].training


def test_evaluate_with_max_steps_returns_the_episodes_that_ended():
    env = ScriptedEnv(2, episode_lengths=(2, 3))  # env 0: 2, 3, 2, ... steps; env 1: 3, 2, 3, ...
    assert values(tw.evaluate(env, None, 8, max_steps=6)) == ([3, 6, 6, 3], [2, 3, 3, 2])


def test_evaluate_with_max_steps_of_an_env_that_never_ends_is_empty(monkeypatch):
    monkeypatch.setattr(collector, "_PATIENCE", 7)
    result = tw.evaluate(endless(), None, 2, max_steps=20)
    assert result.batch_size == (0,)
    assert (result["episode_return"].dtype, result["episode_length"].dtype) == (torch.float32, torch.int64)


def test_evaluate_with_max_steps_stops_after_enough_episodes():
    env = ScriptedEnv(2, episode_lengths=3)
    assert tw.evaluate(env, None, 2, max_steps=100)["episode_length"].tolist() == [3, 3]
    assert env.elapsed.flatten().tolist() == [0, 0]


@pytest.mark.parametrize("max_steps", [0, -1, 2.5, True, "3"])
def test_evaluate_with_invalid_max_steps_raises(max_steps):
    with pytest.raises((TypeError, ValueError), match=r"evaluate needs .*max_steps of at least 1, but got"):
        tw.evaluate(endless(), None, 2, max_steps=max_steps)


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**64])
def test_evaluate_with_an_invalid_seed_raises_and_keeps_the_training_mode(seed):
    env = tw.TransformedEnv(endless(), T.NormalizeReward())
    with pytest.raises(ValueError, match="needs a seed that is an integer"):
        tw.evaluate(env, None, 2, seed=seed)
    assert env.training and env.transforms[0].training


class Drops(torch.nn.Module):
    """A policy with dropout, which records its modes."""

    def __init__(self):
        super().__init__()
        self.dropout, self.modes = torch.nn.Dropout(0.5), []

    def forward(self, td):
        self.modes.append((self.training, self.dropout.training))
        return self.dropout(torch.ones(2, 6))


class Agent:
    def __init__(self):
        self.network = Drops()

    def act(self, td):
        return self.network(td)


@pytest.mark.parametrize(
    "hold", [lambda agent: agent.network, lambda agent: agent.act, lambda agent: lambda td: agent.act(td)]
)
@pytest.mark.parametrize("train", [True, False])
def test_evaluate_puts_the_policy_into_eval_mode_and_back(hold, train):
    agent = Agent()
    agent.network.train(train).dropout.train()
    tw.evaluate(ScriptedEnv(2, episode_lengths=3), hold(agent), 2)
    assert agent.network.modes == [(False, False)] * 3
    assert (agent.network.training, agent.network.dropout.training) == (train, True)


def test_evaluate_of_a_policy_that_raises_puts_it_back():
    agent = Agent()

    def policy(td):
        agent.act(td)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tw.evaluate(ScriptedEnv(2), policy, 2)
    assert agent.network.training and agent.network.dropout.training
