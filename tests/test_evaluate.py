"""`torchwrap.evaluate`: which episodes count, seeds, modes, and episodes that take long."""

import re

import numpy as np
import pytest
import torch
from holders import HOLDERS
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import collector
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def scripted(*lengths, num_envs=2):
    return ScriptedEnv(num_envs, episode_lengths=lengths)


def values(result):
    return result["episode_return"].tolist(), result["episode_length"].tolist()


def test_evaluate_with_a_seed_is_reproducible():
    env = tw.make("CartPole-v1", 4)
    other = tw.make("CartPole-v1", 4)
    first = values(tw.evaluate(env, None, 8, seed=3))
    assert values(tw.evaluate(env, None, 8)) != first
    assert values(tw.evaluate(env, None, 8, seed=3)) == first
    assert values(tw.evaluate(other, None, 8, seed=3)) == first
    assert values(tw.evaluate(other, None, 8, seed=4)) != first


def test_evaluate_weighs_every_env_equally():
    # Env 0 has episodes of 1 step (return 1), env 1 of 4 (return 10). Of the first six to end,
    # most would be of env 0.
    class Same(ScriptedEnv):
        def _step(self, action):
            self.episode.zero_()
            return super()._step(action)

    result = tw.evaluate(
        Same(2, episode_lengths=(1, 4)),
        None,
        5,
    )  # rounded up to 6
    assert values(result) == (
        [1, 1, 1, 10, 10, 10],
        [1, 1, 1, 4, 4, 4],
    )


def test_evaluate_below_reward_transforms_returns_raw_return():
    env = tw.TransformedEnv(
        scripted(3),
        T.RecordEpisodeStatistics(),
        T.ClipReward(-1, 1),
    )
    assert tw.evaluate(env, None, 2)["episode_return"].tolist() == [6, 6]


def test_evaluate_with_two_recorders_has_the_return_of_the_inner_one_and_the_metrics_of_both():
    class Reward(T.Transform):
        def step(self, td):
            return td.set(("info", "reward"), td["reward"].clone())

    env = tw.TransformedEnv(
        scripted(3),
        Reward(),
        T.RecordEpisodeStatistics(metrics={"reward": "max"}),
        T.ScaleReward(0.1),
        T.RecordEpisodeStatistics(stats_key="shaped", metrics={"reward": "sum"}),
    )
    result = tw.evaluate(env, None, 2)
    assert result["episode_return"].tolist() == [6, 6]
    assert result["episode_reward"].tolist() == [3, 3]


def test_evaluate_without_recorder_sums_the_rewards_of_the_env():
    env = tw.TransformedEnv(
        scripted(3),
        T.ClipReward(-1, 1),
    )
    assert tw.evaluate(env, None, 2)["episode_return"].tolist() == [3, 3]


def test_evaluate_freezes_statistics_and_restores_modes():
    env = tw.TransformedEnv(
        ScriptedEnv(2),
        T.NormalizeObservation(),
        T.NormalizeReward(),
    )
    tw.rollout(env, None, 5)
    env.transforms[1].eval()
    before = TensorDict(env.state_dict(), []).clone()
    tw.evaluate(env, None, 8)
    assert (TensorDict(env.state_dict(), []) == before).all()
    assert env.training and env.transforms[0].training and not env.transforms[1].training


# Episodes that take long.


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(collector, "_PATIENCE", 7)


def test_evaluate_of_an_env_that_never_ends_raises_and_restores_the_modes(impatient):
    env = tw.TransformedEnv(
        scripted(2, 10**9),
        T.NormalizeReward(),
    )
    env.step(env.reset().set("action", env.sample_action()))
    with pytest.raises(RuntimeError, match=r"7 steps.*TimeLimit.*max_steps"):
        tw.evaluate(env, None, 2)
    assert env.training and env.transforms[0].training


def test_evaluate_of_a_long_episode_with_a_time_limit_waits_for_it(impatient):
    # 25 steps are more than the patience, and less than four times the limit.
    env = tw.TransformedEnv(
        scripted(10**9),
        T.TimeLimit(25),
    )
    assert tw.evaluate(env, None, 2)["episode_length"].tolist() == [25, 25]


def test_evaluate_with_max_steps_returns_the_episodes_that_ended():
    env = scripted(2, 3)  # env 0: 2, 3, 2, ... steps; env 1: 3, 2, 3, ...
    result = tw.evaluate(env, None, 8, max_steps=6)
    assert values(result) == (
        [3, 6, 6, 3],
        [2, 3, 3, 2],
    )
    assert result["env_index"].tolist() == [0, 0, 1, 1]


def test_evaluate_with_max_steps_before_any_end_returns_no_episode():
    result = tw.evaluate(
        scripted(10**9),
        None,
        2,
        max_steps=20,
    )
    assert result.batch_size == (0,)
    assert result["episode_return"].dtype == torch.float32
    assert result["episode_length"].dtype == torch.int64


def test_evaluate_with_max_steps_stops_at_the_last_episode():
    env = scripted(3)
    assert tw.evaluate(env, None, 2, max_steps=100)["episode_length"].tolist() == [3, 3]
    assert env.elapsed.flatten().tolist() == [0, 0]


INVALID = [
    ("max_steps", 0),
    ("max_steps", 2.5),
    ("num_episodes", 0),
    ("num_episodes", None),
    ("seed", -1),
    ("env", T.TimeLimit(3)),
    ("policy", "random"),
]


@pytest.mark.parametrize("name, value", INVALID)
def test_evaluate_with_invalid_argument_raises_and_keeps_the_modes(name, value):
    env = tw.TransformedEnv(ScriptedEnv(2), T.NormalizeReward())
    arguments = {
        "env": env,
        "policy": None,
        "num_episodes": 2,
        name: value,
    }
    with pytest.raises((TypeError, ValueError), match=f": {name} must"):
        tw.evaluate(**arguments)
    assert env.training and env.transforms[0].training


# The policy's modes.


class Drops(torch.nn.Module):
    """A policy with dropout, which records its modes."""

    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.modes = []

    def forward(self, observation):
        self.modes.append((self.training, self.dropout.training))
        return self.dropout(torch.ones(2, 6))


FOUND = ("variable", "method", "decorated", "compiled", "object")


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FOUND)
def test_evaluate_puts_the_policy_into_eval_mode_and_back(name, train):
    network = Drops()
    network.train(train).dropout.train()
    tw.evaluate(scripted(3), HOLDERS[name](network), 2)
    assert set(network.modes) == {(False, False)}
    assert (network.training, network.dropout.training) == (train, True)


class Tenths(ScriptedEnv):
    def _step(self, action):
        return super()._step(action).update({"reward": torch.full((self.num_envs, 1), 0.1)})


@pytest.mark.full
def test_return_of_a_long_episode_is_the_sum_in_float64():
    found = tw.evaluate(
        Tenths(1, (1,), episode_lengths=1500),
        None,
        1,
    )["episode_return"].item()
    rewards = np.full(1500, 0.1, np.float32)
    assert found == np.float32(rewards.astype(np.float64).sum())
    assert found != np.cumsum(rewards, dtype=np.float32)[-1]


def test_progress_bar_counts_episodes_if_it_is_asked_for(capsys):
    env = scripted(2)
    assert len(tw.evaluate(env, None, 6, progress=True)["episode_return"]) == 6
    assert re.search(r"100%.* 6/6 .*episode", capsys.readouterr().err)
    tw.evaluate(env, None, 6)
    assert capsys.readouterr().err == ""


def test_error_of_a_policy_is_its_own():
    with pytest.raises(TypeError, match=r"^unsupported operand"):
        tw.evaluate(ScriptedEnv(2), lambda td: len(td) + "a", 2)
