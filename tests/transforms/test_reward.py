"""Reward transforms against Gymnasium's wrappers."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.spaces import Box, Discrete
from oracles import RandomEnv, assert_agrees, make

from torchwrap import transforms as T

INF = np.inf


def assert_rewards_agree(transform, wrap, *arguments, rtol=1e-6):
    space = Discrete(5)
    oracles = [wrap(RandomEnv(space), *arguments) for _ in range(3)]
    assert_agrees(make(space, transform), oracles, reward_rtol=rtol)


@pytest.mark.parametrize(
    ("func", "numpy_func"),
    [(lambda r: 0.01 * r, lambda r: 0.01 * r), (torch.sign, np.sign), (torch.tanh, np.tanh)],
    ids=["scale", "sign", "tanh"],
)
def test_transform_reward_equals_gymnasiums(func, numpy_func):
    assert_rewards_agree(T.TransformReward(func), wrappers.TransformReward, numpy_func)


@pytest.mark.parametrize(
    "bounds", [(-1, 1), (None, 0.5), (-2.0, None), (-INF, 1), (0.25, 0.5), (-1, 0)], ids=str
)
def test_clip_reward_equals_gymnasiums(bounds):
    assert_rewards_agree(T.ClipReward(*bounds), wrappers.ClipReward, *bounds)


def test_scale_reward_equals_gymnasiums_transform_reward():
    def scale(reward):
        return reward * 0.25

    assert_rewards_agree(
        T.ScaleReward(0.25),
        wrappers.TransformReward,
        scale,
        rtol=0,
    )


class GymnasiumActionRate(gymnasium.Wrapper):
    def reset(self, **kwargs):
        self.last_action = np.zeros(2)
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        reward += action[0] - np.square(action - self.last_action).sum()
        self.last_action = action
        return observation, reward, *rest


class ActionRate(T.ActionRewardTransform):
    def __init__(self):
        super().__init__()
        self.size = 5  # names of an author are the author's

    def reward(self, reward, action, last_action):
        return reward + action[:, :1] - (action - last_action).square().sum(1, keepdim=True)


def test_reward_of_actions_equals_that_of_a_gymnasium_wrapper():
    space = Box(-1, 1, (2,))
    oracles = [GymnasiumActionRate(RandomEnv(space, action_space=space)) for _ in range(3)]
    env = make(space, T.ClipAction(), ActionRate(), action_space=space)
    env.reset(seed=5)
    for seed, oracle in enumerate(oracles, 5):
        oracle.reset(seed=seed)
    for action in np.random.default_rng(0).normal(0, 2, (25, 3, 2)).astype(np.float32):
        transition, _ = env.step(torch.from_numpy(action))
        for oracle, row, reward in zip(oracles, action, transition["next", "reward"], strict=True):
            _, expected, *ends, _ = oracle.step(row)
            assert reward.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
            if any(ends):
                oracle.reset()


def test_action_of_a_reward_reaches_the_layer_below_as_it_is():
    seen = []
    space = Box(-1, 1, (2,))
    record = T.TransformAction(lambda action: seen.append(action) or action, space)
    env = make(space, record, ActionRate(), action_space=space)
    env.reset(seed=0)
    env.step(torch.ones(3, 2))
    assert all(action.is_contiguous() for action in seen)
