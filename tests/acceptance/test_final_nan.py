"""A simulator that blows up terminates the row, and leaves NaN as its final observation.

After a termination the value is 0, whatever the final observation is. So each example has to learn
exactly what it learns from finite final observations.
"""

import math
from types import SimpleNamespace

import atari_lstm
import dqn
import numpy as np
import ppo
import ppo_atari
import ppo_recurrent
import pytest
import sac
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict
from torch.distributions import Categorical

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

NOT_FINITE = [math.nan, math.inf, -math.inf]


class BlowsUp(ScriptedEnv):
    """Observations and rewards are small. The final observation after a termination is `final`."""

    def __init__(self, num_envs, final, action_space):
        super().__init__(num_envs, (2,), (5, 3, 1, 4), action_space=action_space)
        self.final = final

    def _observation_now(self):
        return super()._observation_now() / 1000

    def _step(self, action):
        successor = super()._step(action)
        ended = successor["terminated"]
        successor["observation"] = torch.where(ended, self.final, successor["observation"])
        successor["reward"] = successor["reward"] / 10
        return successor


def train_ppo(final, out, monkeypatch):
    def make(env_id, num_envs, **_):
        return BlowsUp(num_envs, final, Box(-1, 1, (1,)))

    sizes = dict(num_envs=4, num_steps=16, total_timesteps=256, num_minibatches=2)
    ppo.main(ppo.Args(env_id="BlowsUp", out=out, normalize=False, **sizes), make)


def train_dqn(final, out, monkeypatch):
    def make_env(args, num_envs):
        return tw.TransformedEnv(BlowsUp(num_envs, final, Discrete(2)), T.RecordEpisodeStatistics())

    monkeypatch.setattr(dqn, "make_env", make_env)
    sizes = dict(num_envs=4, total_timesteps=256, learning_starts=64, train_frequency=8)
    dqn.main(dqn.Args(env_id="BlowsUp", out=out, **sizes))


def train_sac(final, out, monkeypatch):
    def make_env(args, num_envs):
        env = BlowsUp(num_envs, final, Box(-1, 1, (1,)))
        return tw.TransformedEnv(env, T.RescaleAction(-1, 1), T.RecordEpisodeStatistics())

    monkeypatch.setattr(sac, "make_env", make_env)
    sac.main(sac.Args(env_id="BlowsUp", out=out, total_timesteps=128, learning_starts=64))


TRAININGS = {"ppo": train_ppo, "dqn": train_dqn, "sac": train_sac}


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
def test_example_learns_what_it_learns_from_finite_final_observations(train, tmp_path, monkeypatch):
    parameters = []
    for final in (math.nan, 0.5):
        train(final, tmp_path, monkeypatch)
        parameters.append(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    found, expected = (each.get("agent", each.get("q_network")) for each in parameters)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# By hand: values are 4 and 6, rewards 1, gamma 0.5 and lambda 1. Step 0 is terminated, and step 1
# is the first of the next episode; its successor has the value 10.
ADVANTAGES = [1 - 4, 1 + 0.5 * 10 - 6]


def rollout(final):
    successor = {
        "observation": torch.tensor([[[final], [10.0]]]),
        "reward": torch.ones(1, 2, 1),
        "terminated": torch.tensor([[[True], [False]]]),
        "done": torch.tensor([[[True], [False]]]),
        "hidden": torch.tensor([[[4.0], [6.0]]]),
    }
    data = {
        "observation": torch.tensor([[[4.0], [6.0]]]),
        "value": torch.tensor([[4.0, 6.0]]),
        "action": torch.zeros(1, 2, dtype=torch.int64),
        "logprob": torch.zeros(1, 2),
        "is_init": torch.zeros(1, 2, 1, dtype=torch.bool),
        "hidden": torch.zeros(1, 2, 1),
        "cell": torch.zeros(1, 2, 1),
        "next": successor,
    }
    return TensorDict(data, [1, 2])


def equal_logits(observation):
    return Categorical(logits=torch.zeros(*observation.shape[:-1], 2))


def ppo_advantages(data):
    agent = SimpleNamespace(
        get_value=lambda observation: observation.squeeze(-1), get_distribution=equal_logits
    )
    return ppo.make_batch(agent, data.to_dict(), ppo.Args(gamma=0.5, gae_lambda=1.0))


def recurrent_advantages(data):
    agent = SimpleNamespace(
        critic=lambda hidden: hidden,
        remember=lambda observation, hidden: observation,
        get_distribution=equal_logits,
    )
    args = ppo_recurrent.Args(gamma=0.5, gae_lambda=1.0)
    return ppo_recurrent.make_batch(agent, data, args)


@pytest.mark.parametrize("final", NOT_FINITE, ids=str)
@pytest.mark.parametrize(
    "make_batch", [ppo_advantages, recurrent_advantages], ids=["ppo", "ppo_recurrent"]
)
def test_advantage_of_a_termination_ignores_its_final_observation(make_batch, final):
    batch = make_batch(rollout(final))
    assert batch["advantage"].flatten().tolist() == ADVANTAGES


def atari_advantages(data, root):
    args = ppo_atari.Args(gamma=0.5, gae_lambda=1.0)
    return ppo_atari.make_batch(lambda frames: (None, frames.squeeze(-1)), data, root, args)


def lstm_advantages(data, root):
    agent = SimpleNamespace(get_value=lambda td: td["observation"].squeeze(-1))
    args = atari_lstm.Args(gamma=0.5, gae_lambda=1.0)
    return atari_lstm.make_batch(agent, data, root, args)


# These take the next root's value, so it is the next episode whose value may be infinite.
@pytest.mark.parametrize("value", NOT_FINITE, ids=str)
@pytest.mark.parametrize(
    "make_batch", [atari_advantages, lstm_advantages], ids=["ppo_atari", "atari_lstm"]
)
def test_advantage_of_a_termination_ignores_the_next_episode(make_batch, value):
    data = rollout(10.0)
    data["value"][0, 1] = value
    batch = make_batch(data, {"observation": torch.tensor([[10.0]])})
    assert batch["advantage"].flatten()[0] == ADVANTAGES[0]


@pytest.mark.parametrize("value", NOT_FINITE, ids=str)
@pytest.mark.parametrize("num_steps", [2, 3, 8])
def test_gae_ends_with_the_episode(num_steps, value):
    delta = torch.ones(1, num_steps)
    delta[0, -1] = value
    decay = torch.full((1, num_steps), 0.5)
    decay[0, -2] = 0
    advantages = ppo.gae(delta, decay)
    lengths = np.arange(num_steps - 1, 0, -1)
    expected = 2 - 0.5 ** (lengths - 1)  # 1 + 0.5 + 0.25 + ...
    assert advantages[0, :-1].tolist() == expected.tolist()
