"""Reward transforms against Gymnasium's wrappers."""

import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.spaces import Discrete
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
