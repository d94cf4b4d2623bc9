"""Random Gymnasium envs, alone and in a batch, and the comparison of an env with them."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

ENDINGS = ["terminated", "truncated", "both", "in turn"]  # of a ScriptedEnv
TYPICAL = {  # transforms of every kind, on an env with Box spaces
    "RecordEpisodeStatistics": T.RecordEpisodeStatistics,
    "NormalizeObservation": T.NormalizeObservation,
    "ClipObservation": lambda: T.ClipObservation(-10, 10),
    "FrameStackObservation": lambda: T.FrameStackObservation(3),
    "NormalizeReward": T.NormalizeReward,
    "ClipReward": lambda: T.ClipReward(-10, 10),
    "TimeLimit": lambda: T.TimeLimit(4),
    "RescaleAction": lambda: T.RescaleAction(-3, 5),
    "ClipAction": T.ClipAction,
    "FlattenObservation": T.FlattenObservation,
    "TransformObservation": lambda: T.TransformObservation(lambda observation: 2 * observation),
    "TransformReward": lambda: T.TransformReward(torch.neg),
}


class RandomEnv(gymnasium.Env):
    """Random observations and rewards for any action. Episodes terminate, are truncated, or both.

    Args:
        space: the observation space.
        action_space: the action space.
        max_length: episodes take 1 to `max_length` steps. None never ends them.
        observe: draws an observation from a NumPy generator. None samples the space.
        reward: mean and standard deviation of the rewards, normal and float32.
    """

    def __init__(self, space, *, action_space=None, max_length=4, observe=None, reward=(0, 3)):
        self.observation_space = copy.deepcopy(space)  # because each env seeds its own
        self.action_space = action_space or spaces.Discrete(2)
        self.max_length = max_length
        self.draw = observe
        self.reward = reward

    def observe(self):
        if self.draw is None:
            return self.observation_space.sample()
        return self.draw(self.np_random).astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        longest = self.max_length or 1
        length, self.ending = self.np_random.integers([1, 0], [longest + 1, 3]).tolist()
        self.remaining = self.max_length and length
        return self.observe(), {}

    def step(self, action):
        if self.remaining is not None:
            self.remaining -= 1
        reward = np.float32(self.np_random.normal(*self.reward))
        ended = self.remaining == 0
        terminated = ended and self.ending != 1
        truncated = ended and self.ending != 0
        return self.observe(), reward, terminated, truncated, {}


def quick(values, *kept):
    """Parameters of a test, of which only those kept run without --full."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.full) for value in values
    ]


def vector_env(space, num_envs, autoreset_mode=AutoresetMode.DISABLED, **arguments):
    """Gymnasium's batch of random envs."""
    makers = [lambda: RandomEnv(space, **arguments)] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=autoreset_mode)


def make(space, *transforms, num_envs=3, **arguments):
    """The same batch under torchwrap, with transforms on it."""
    env = tw.from_gymnasium(vector_env(space, num_envs, **arguments))
    return tw.TransformedEnv(env, *transforms)


def scripted(*transforms, num_envs=3, **arguments):
    """A `ScriptedEnv` with transforms on it."""
    return tw.TransformedEnv(ScriptedEnv(num_envs, **arguments), *transforms)


def step(env, td, num_steps=1, action=None):
    """Steps with one action, or random ones; returns the last successor and root."""
    for _ in range(num_steps):
        td["action"] = env.sample_action() if action is None else action.clone()
        transition, td = env.step(td)
    return transition["next"], td


def assert_values_equal(batch, values):
    """A batched value equals one value of Gymnasium per env, in every leaf and dtype."""
    if isinstance(values[0], dict | tuple):
        parts = dict(enumerate(values[0])) if isinstance(values[0], tuple) else values[0]
        assert set(batch.keys()) == set(map(str, parts))
        for key in parts:
            assert_values_equal(batch[str(key)], [value[key] for value in values])
        return
    given, expected = batch.numpy(), np.stack(values)
    assert given.dtype == expected.dtype
    np.testing.assert_array_equal(given, expected)


def assert_agrees(env, oracles, num_steps=25, *, reward_rtol=0.0):
    """An env plays the episodes of single Gymnasium envs, which are reset by hand at their end.

    Returns the flags `terminated` and `truncated`, a NumPy array (num_steps, 2, num_envs).
    """
    assert env.single_observation_space == oracles[0].observation_space
    flags = []
    td = env.reset(seed=5)
    initial = [oracle.reset(seed=seed)[0] for seed, oracle in enumerate(oracles, 5)]
    assert_values_equal(td["observation"], initial)
    for _ in range(num_steps):
        successor, td = step(env, td)
        observations, rewards, *ends, _ = zip(*(oracle.step(0) for oracle in oracles), strict=True)
        assert_values_equal(successor["observation"], observations)
        assert successor["reward"].dtype == torch.float32
        np.testing.assert_allclose(successor["reward"][:, 0], rewards, rtol=reward_rtol)
        for key, expected in zip(("terminated", "truncated"), ends, strict=True):
            assert_values_equal(successor[key][:, 0], expected)
        ended = np.any(ends, axis=0)
        assert_values_equal(successor["done"][:, 0], ended)
        roots = list(observations)
        for row in ended.nonzero()[0]:
            roots[row], _ = oracles[row].reset()
        assert_values_equal(td["observation"], roots)
        flags.append(ends)
    assert np.any(flags, axis=1).sum() > num_steps / 4
    return np.array(flags)


def assert_equals_wrapper(space, name, *arguments, num_steps=12, **options):
    """A transform equals Gymnasium's wrapper of the same name and arguments on random envs."""
    wrap = getattr(gymnasium.wrappers, name)
    oracles = [wrap(RandomEnv(space), *arguments, **options) for _ in range(2)]
    transform = getattr(T, name)(*arguments, **options)
    assert_agrees(make(space, transform, num_envs=2), oracles, num_steps)
