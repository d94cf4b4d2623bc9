"""`torchwrap.evaluate`: which episodes count, seeds, modes, and episodes that take long."""

import functools
import re

import numpy as np
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


def test_evaluate_weighs_every_env_equally():
    # Env 0 has episodes of 1 step (return 1), env 1 of 4 (return 10). Taken as they end, most of the six would be of env 0.
    class Scripted(ScriptedEnv):
        def _step(self, action):
            self.episode.zero_()
            return super()._step(action)

    result = tw.evaluate(
        Scripted(2, episode_lengths=(1, 4)), None, 5
    )  # rounded up to a multiple of the number of envs
    assert result["episode_return"].tolist() == [1, 1, 1, 10, 10, 10]
    assert result["episode_length"].tolist() == [1, 1, 1, 4, 4, 4]


def test_evaluate_leaves_out_what_quick_envs_do_while_others_go_on():
    # Env 0 ends after 1 step, and again after 2 more, while env 2 takes 9.
    assert values(tw.evaluate(ScriptedEnv(3, episode_lengths=(1, 2, 9)), None, 3)) == (
        [1, 3, 45],
        [1, 2, 9],
    )


def test_evaluate_below_reward_transforms_returns_raw_return():
    env = tw.TransformedEnv(
        ScriptedEnv(2, episode_lengths=3), T.RecordEpisodeStatistics(), T.ClipReward(-1, 1)
    )
    assert tw.evaluate(env, None, 2)["episode_return"].tolist() == [6, 6]
    without = tw.TransformedEnv(ScriptedEnv(2, episode_lengths=3), T.ClipReward(-1, 1))
    assert tw.evaluate(without, None, 2)["episode_return"].tolist() == [3, 3]


def test_evaluate_freezes_statistics_and_restores_modes():
    env = tw.TransformedEnv(ScriptedEnv(2), T.NormalizeObservation(), T.NormalizeReward())
    tw.rollout(env, None, 5)
    env.transforms[1].eval()
    before = {name: value.clone() for name, value in env.state_dict().items()}
    tw.evaluate(env, None, 8)
    assert all((value == before[name]).all() for name, value in env.state_dict().items())
    assert env.training and env.transforms[0].training and not env.transforms[1].training


# Episodes that take long.


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(collector, "_PATIENCE", 7)


def test_evaluate_of_an_env_that_never_ends_raises_and_restores_the_modes(impatient):
    env = tw.TransformedEnv(
        ScriptedEnv(2, episode_lengths=(2, 10**9)), T.NormalizeReward()
    )  # one env starts with a short one
    env.step(env.reset().set("action", env.sample_action()))
    message = r"evaluate needs episodes that end, but an episode of .* has taken 7 steps.*TimeLimit.*max_steps"
    with pytest.raises(RuntimeError, match=message):
        tw.evaluate(env, None, 2)
    assert env.training and env.transforms[0].training


def test_evaluate_of_a_long_episode_with_a_time_limit_waits_for_it(impatient):
    env = tw.TransformedEnv(
        endless(), T.TimeLimit(25)
    )  # more than _PATIENCE, less than four times the limit
    assert tw.evaluate(env, None, 2)["episode_length"].tolist() == [25, 25]


def test_evaluate_with_max_steps_returns_the_episodes_that_ended():
    env = ScriptedEnv(2, episode_lengths=(2, 3))  # env 0: 2, 3, 2, ... steps; env 1: 3, 2, 3, ...
    assert values(tw.evaluate(env, None, 8, max_steps=6)) == ([3, 6, 6, 3], [2, 3, 3, 2])
    result = tw.evaluate(endless(), None, 2, max_steps=20)
    assert result.batch_size == (0,)
    assert (result["episode_return"].dtype, result["episode_length"].dtype) == (
        torch.float32,
        torch.int64,
    )
    env = ScriptedEnv(2, episode_lengths=3)
    assert tw.evaluate(env, None, 2, max_steps=100)["episode_length"].tolist() == [
        3,
        3,
    ]  # enough episodes
    assert env.elapsed.flatten().tolist() == [0, 0]


def test_evaluate_with_invalid_arguments_raises_and_keeps_the_training_mode():
    cases = [
        (name, value) for name in ("max_steps", "num_episodes") for value in (0, -1, 2.5, True, "3")
    ]
    for name, value in [
        *cases,
        ("num_episodes", None),
        *(("seed", seed) for seed in (-1, 1.5, True, 2**64)),
    ]:
        env = tw.TransformedEnv(ScriptedEnv(2), T.NormalizeReward())
        message = f"{'reset' if name == 'seed' else 'evaluate'} needs {name} as an integer of at "
        with pytest.raises((TypeError, ValueError), match=message):
            tw.evaluate(env, None, **{"num_episodes": 2, name: value})
        assert env.training and env.transforms[0].training


# The policy's modes.


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


def test_evaluate_puts_the_policy_into_eval_mode_and_back():
    def around(network):
        return lambda td: network(td)

    def by_keyword(network):
        return functools.partial(lambda td, network: network(td), network=network)

    holders = [lambda agent: agent.network, lambda agent: agent.act]
    holders += [lambda agent: around(agent.network), lambda agent: by_keyword(agent.network)]
    for hold in holders:
        for train in (True, False):
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


class Tenths(ScriptedEnv):
    def _step(self, action):
        return super()._step(action).update({"reward": torch.full((self.num_envs, 1), 0.1)})


def test_return_of_a_long_episode_is_the_sum_in_float64():
    found = tw.evaluate(Tenths(1, (1,), episode_lengths=1500), None, 1)["episode_return"]
    in_float32 = np.cumsum(np.full(1500, 0.1, np.float32), dtype=np.float32)[-1]
    assert (
        found.item() == np.float32(np.full(1500, np.float32(0.1), np.float64).sum()) != in_float32
    )


def test_progress_bars_count_episodes_and_steps(capsys):
    env = ScriptedEnv(2, episode_lengths=2)
    assert len(tw.evaluate(env, None, 6, progress=True)["episode_return"]) == 6
    assert re.search(r"100%.* 6/6 .*episode", capsys.readouterr().err)
    collect = tw.Collector(env, None, 5, progress=True)
    collect()
    tw.compile(collect, backend="eager")(env.reset())
    assert len(re.findall(r"100%.* 5/5 .*step", capsys.readouterr().err)) == 2
    tw.evaluate(env, None, 6), tw.Collector(env, None, 5)()
    assert capsys.readouterr().err == ""
