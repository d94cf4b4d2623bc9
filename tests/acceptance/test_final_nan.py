"""A simulator that blows up terminates the row, and leaves NaN as its final observation.

After a termination the value is 0, whatever the final observation is. So each example has to learn
exactly what it learns from finite final observations.
"""

import math

import dqn
import ppo
import pytest
import sac
import torch
from gymnasium.spaces import Box, Discrete
from helpers import params

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


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


@pytest.mark.parametrize("train", params(TRAININGS, quick=["dqn"]))
def test_example_learns_what_it_learns_from_finite_final_observations(train, tmp_path, monkeypatch):
    parameters = []
    for final in (math.nan, 0.5):
        train(final, tmp_path, monkeypatch)
        (path,) = tmp_path.glob("*.pt")
        parameters.append(torch.load(path, weights_only=True))
    found, expected = (each.get("agent", each.get("q_network")) for each in parameters)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
