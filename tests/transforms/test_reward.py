"""Reward transforms against Gymnasium's wrappers."""

import numpy as np
import torch
from gymnasium import spaces, wrappers
from oracles import RandomEnv, assert_agrees, make
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

SPACE = spaces.Discrete(5)


def assert_rewards_agree(transform, wrap, reward_rtol=1e-6):
    assert_agrees(
        make(SPACE, transform), [wrap(RandomEnv(SPACE)) for _ in range(3)], reward_rtol=reward_rtol
    )


def test_transform_reward_equals_gymnasiums():
    for func, numpy_func in (
        (lambda r: 0.01 * r,) * 2,
        (torch.sign, np.sign),
        (torch.tanh, np.tanh),
    ):
        assert_rewards_agree(
            T.TransformReward(func),
            lambda env, func=numpy_func: wrappers.TransformReward(env, func),
        )


def test_clip_reward_equals_gymnasiums():
    for bounds in (
        (-1, 1),
        (None, 0.5),
        (-2.0, None),
        (0, 2),
        (-np.inf, 1),
        (0.25, 0.5),
        (-1, 0),
        (None, 0),
        (0, None),
    ):
        assert_rewards_agree(
            T.ClipReward(*bounds), lambda env, bounds=bounds: wrappers.ClipReward(env, *bounds)
        )


def test_clip_reward_equal_bounds_give_a_constant():
    assert T.ClipReward(1, 1)(TensorDict({"reward": torch.tensor([[-3.0], [3.0]])}, [2]))[
        "reward"
    ].tolist() == [[1], [1]]


def test_reward_transforms_cover_the_last_reward_of_an_episode_and_the_first_of_the_next():
    env = tw.TransformedEnv(
        ScriptedEnv(1, episode_lengths=2), T.TransformReward(lambda reward: 10 * reward)
    )
    data, _ = tw.rollout(env, None, 4)
    assert data["next", "reward"].flatten().tolist() == [10, 20, 10, 20]


def test_clip_reward_bounds_beyond_float32_do_not_clip():
    for bounds in (
        (-1e39, 1e39),
        (-np.inf, np.inf),
        (-(10**300), None),
        (None, 2**1000),
        (-1e39, 2**100),
    ):
        reward = np.float32([[-np.inf], [-3e38], [0], [3e38], [np.inf]])
        expected = reward.clip(max=np.float32(2**100)) if bounds[1] == 2**100 else reward
        given = T.ClipReward(*bounds)(TensorDict({"reward": torch.from_numpy(reward)}, [5]))[
            "reward"
        ]
        np.testing.assert_array_equal(given, expected, str(bounds))


def test_scale_reward_equals_gymnasiums_transform_reward():
    theirs = lambda env: wrappers.TransformReward(env, lambda reward: reward * 0.25)  # noqa: E731
    assert_rewards_agree(T.ScaleReward(0.25), theirs, reward_rtol=0)
