"""Compiled metrics of infos over a simulator on the host, against envs stepped by hand."""

from unittest import TestCase

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from helpers import RewardTerms

import torchwrap as tw
from torchwrap import transforms as T

SEED = 5
STEPS = 7
ACTIONS = np.linspace(-2, 2, STEPS * 2, dtype=np.float32).reshape(STEPS, 2, 1)


class Energy(gymnasium.Wrapper):
    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, "energy": float(action[0]) ** 2, "pair": action.repeat(2)}


def by_hand():
    """Energies, rewards and pairs of single envs: (steps, envs)."""
    energies = np.zeros((STEPS, 2))
    rewards = np.zeros((STEPS, 2))
    for row in range(2):
        env = Energy(gymnasium.make("Pendulum-v1"))
        env.reset(seed=SEED + row)
        for step in range(STEPS):
            _, rewards[step, row], _, _, info = env.step(ACTIONS[step, row])
            energies[step, row] = info["energy"]
    return energies, rewards


def over_gymnasium(info_keys=("energy",)):
    arguments = {"backend": "gymnasium", "wrappers": [Energy]}
    return tw.make("Pendulum-v1", 2, info_keys=info_keys, **arguments)


def play(env, key):
    env = tw.compile(env, backend="aot_eager")
    env.reset(seed=SEED)
    for action in ACTIONS:
        transition, _ = env.step(torch.from_numpy(action))
    env.close()
    return transition["next", key].flatten().numpy()


def test_info_of_a_declared_space_and_another_one_equal_those_by_hand():
    keys = {"pair": Box(-2, 2, (2,)), "energy": Box(0, 4, (1,))}
    metrics = T.RecordEpisodeStatistics(metrics={"energy": "sum"})
    env = tw.TransformedEnv(over_gymnasium(keys), metrics)
    energies, _ = by_hand()
    with TestCase().assertLogs("torchwrap", "INFO") as logs:
        sums = play(env, "episode_energy")
    np.testing.assert_allclose(sums, energies.sum(0), rtol=1e-6)
    assert len([text for text in logs.output if "compiling the step" in text]) == 1


@pytest.mark.full
def test_info_that_an_inner_layer_adds_equals_the_one_by_hand():
    inner = tw.TransformedEnv(over_gymnasium(), RewardTerms())
    recorder = T.RecordEpisodeStatistics(metrics={"twice": "last"})
    _, rewards = by_hand()
    doubled = play(tw.TransformedEnv(tw.Wrapper(inner), recorder), "episode_twice")
    np.testing.assert_allclose(doubled, 2 * rewards[-1], rtol=1e-5)


def test_missing_info_is_still_refused_when_compiling():
    metrics = T.RecordEpisodeStatistics(metrics={"energy": "sum"})
    with over_gymnasium(()) as env, pytest.raises(ValueError, match="energy"):
        tw.compile(tw.TransformedEnv(env, metrics), backend="aot_eager")
