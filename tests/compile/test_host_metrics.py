"""Compiled metrics of infos over a simulator on the host, against the actions and rewards."""

from unittest import TestCase

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from helpers import RewardTerms

import torchwrap as tw
from torchwrap import transforms as T

STEPS = 7
ACTIONS = np.linspace(-2, 2, STEPS * 2, dtype=np.float32).reshape(STEPS, 2, 1)


class Energy(gymnasium.Wrapper):
    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, "energy": float(action[0]) ** 2, "pair": action.repeat(2)}


def over_gymnasium(info_keys=("energy",)):
    arguments = {"backend": "gymnasium", "wrappers": [Energy]}
    return tw.make("Pendulum-v1", 2, info_keys=info_keys, **arguments)


def play(env):
    """The last successor."""
    env = tw.compile(env, backend="aot_eager")
    env.reset(seed=5)
    for action in ACTIONS:
        transition, _ = env.step(torch.from_numpy(action))
    env.close()
    return transition["next"]


def test_sum_of_an_info_beside_one_of_a_declared_space_is_numpys():
    keys = {"pair": Box(-2, 2, (2,)), "energy": Box(0, 4, (1,))}
    metrics = T.RecordEpisodeStatistics(metrics={"energy": "sum"})
    env = tw.TransformedEnv(over_gymnasium(keys), metrics)
    with TestCase().assertLogs("torchwrap", "INFO") as logs:
        sums = play(env)["episode_energy"]
    np.testing.assert_allclose(sums, (ACTIONS**2).sum(0), rtol=1e-6)
    assert len([text for text in logs.output if "compiling the step" in text]) == 1


def test_info_that_an_inner_layer_adds_is_recorded():
    inner = tw.TransformedEnv(over_gymnasium(), RewardTerms())
    recorder = T.RecordEpisodeStatistics(metrics={"twice": "last"})
    successor = play(tw.TransformedEnv(tw.Wrapper(inner), recorder))
    assert torch.equal(successor["episode_twice"], 2 * successor["reward"])


def test_missing_info_is_still_refused_when_compiling():
    metrics = T.RecordEpisodeStatistics(metrics={"energy": "sum"})
    with over_gymnasium(()) as env, pytest.raises(ValueError, match="energy"):
        tw.compile(tw.TransformedEnv(env, metrics), backend="aot_eager")
