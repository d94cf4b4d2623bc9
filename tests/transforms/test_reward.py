"""Reward transforms against Gymnasium's wrappers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from oracles import RandomEnv, assert_agrees, make
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

SPACE = spaces.Discrete(5)


def assert_rewards_agree(transform, wrap, reward_rtol=1e-6):
    assert_agrees(make(SPACE, transform), [wrap(RandomEnv(SPACE)) for _ in range(3)], reward_rtol=reward_rtol)


@pytest.mark.parametrize(
    ("func", "numpy_func"),
    [
        (lambda r: 0.01 * r, lambda r: 0.01 * r),
        (lambda r: -r, lambda r: -r),
        (torch.sign, np.sign),
        (torch.tanh, np.tanh),
        (torch.zeros_like, np.zeros_like),
    ],
)
def test_transform_reward_equals_gymnasiums(func, numpy_func):
    assert_rewards_agree(T.TransformReward(func), lambda env: wrappers.TransformReward(env, numpy_func))


@pytest.mark.parametrize(
    "bounds", [(-1, 1), (None, 0.5), (-2.0, None), (0, 2), (-np.inf, 1), (0.25, 0.5), (-1, 0), (None, 0), (0, None)]
)
def test_clip_reward_equals_gymnasiums(bounds):
    assert_rewards_agree(T.ClipReward(*bounds), lambda env: wrappers.ClipReward(env, *bounds))


def test_clip_reward_equal_bounds_give_a_constant():
    td = TensorDict({"reward": torch.tensor([[-3.0], [3.0]])}, [2])
    assert T.ClipReward(1, 1)(td)["reward"].tolist() == [[1], [1]]


def test_reward_transforms_do_not_change_observations_and_spaces():
    env, plain = tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1), T.TransformReward(torch.neg)), ScriptedEnv(2)
    assert env.single_observation_space == plain.single_observation_space
    assert torch.equal(env.reset()["observation"], plain.reset()["observation"])


def test_reward_transforms_cover_the_last_reward_of_an_episode_and_the_first_of_the_next():
    env = tw.TransformedEnv(ScriptedEnv(1, episode_lengths=2), T.TransformReward(lambda reward: 10 * reward))
    data, _ = tw.rollout(env, None, 4)
    assert data["next", "reward"].flatten().tolist() == [10, 20, 10, 20]


def test_transform_reward_func_receives_the_whole_batch():
    shapes = []
    env = tw.TransformedEnv(ScriptedEnv(7), T.TransformReward(lambda reward: shapes.append(reward.shape) or reward))
    tw.rollout(env, None, 1)
    assert set(shapes) == {(7, 1)}


@pytest.mark.parametrize("transform", [T.ClipReward(-1, 1), T.TransformReward(lambda reward: reward.clamp(-1, 1))], ids=repr)
@pytest.mark.parametrize("batch", [(), (4,), (2, 5)])
def test_reward_transforms_standalone_take_any_batch_size_and_keep_their_input(transform, batch):
    td = TensorDict({"reward": torch.full((*batch, 1), 5.0)}, batch)
    assert torch.equal(transform(td)["reward"], torch.ones(*batch, 1))
    assert torch.equal(td["reward"], torch.full((*batch, 1), 5.0))


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: T.TransformReward(2), TypeError, "TransformReward needs a callable func, but got 2"),
        (lambda: T.TransformReward(None), TypeError, "TransformReward needs a callable func, but got None"),
        (lambda: T.ClipReward(), ValueError, "ClipReward needs min_reward, max_reward or both, but got neither"),
        (lambda: T.ClipReward(None, None), ValueError, "ClipReward needs min_reward, max_reward or both, but got neither"),
        (lambda: T.ClipReward(1, -1), ValueError, r"ClipReward needs max_reward in \[1, inf\], but got -1"),
        (
            lambda: T.ClipReward(float("nan"), 1),
            ValueError,
            r"ClipReward needs min_reward in \[-inf, 3.40282e\+38\], but got nan",
        ),
        (lambda: T.ClipReward(0, float("nan")), ValueError, r"ClipReward needs max_reward in \[0, inf\], but got nan"),
        (
            lambda: T.ClipReward(min_reward=float("nan")),
            ValueError,
            r"ClipReward needs min_reward in \[-inf, 3.40282e\+38\], but got nan",
        ),
        (lambda: T.ClipReward("a"), TypeError, r"ClipReward needs min_reward in \[-inf, 3.40282e\+38\], but got 'a'"),
        (lambda: T.ClipReward("a", 1), TypeError, r"ClipReward needs min_reward in \[-inf, 3.40282e\+38\], but got 'a'"),
        (lambda: T.ClipReward(1, "a"), TypeError, r"ClipReward needs max_reward in \[1, inf\], but got 'a'"),
    ],
)
def test_reward_transforms_wrong_arguments_raise(build, error, match):
    with pytest.raises(error, match=match):
        build()


@pytest.mark.parametrize(
    ("func", "error", "match"),
    [
        (lambda reward: reward.squeeze(-1), ValueError, r"TransformReward needs func to return .* \(2, 1\).* but got \(2,\)"),
        (lambda reward: reward.double(), TypeError, "TransformReward needs func to return .*float32.* but got torch.float64"),
        (lambda reward: reward > 0, TypeError, "TransformReward needs func to return .*float32.* but got torch.bool"),
        (lambda reward: 1.0, TypeError, "TransformReward needs func to return .* but got float"),
        (lambda reward: None, TypeError, "TransformReward needs func to return .* but got NoneType"),
        (lambda reward: reward.numpy(), TypeError, "TransformReward needs func to return .* but got ndarray"),
    ],
)
def test_transform_reward_func_that_returns_no_rewards_raises(func, error, match):
    with pytest.raises(error, match=match):
        tw.TransformedEnv(ScriptedEnv(2), T.TransformReward(func))


@pytest.mark.parametrize("bounds", [(-1e39, 1e39), (-np.inf, np.inf), (-(10**300), None), (None, 2**1000), (-1e39, 2**100)])
def test_clip_reward_bounds_beyond_float32_do_not_clip(bounds):
    reward = np.float32([[-np.inf], [-3e38], [0], [3e38], [np.inf]])
    expected = reward.clip(max=np.float32(2**100)) if bounds[1] == 2**100 else reward
    given = T.ClipReward(*bounds)(TensorDict({"reward": torch.from_numpy(reward)}, [5]))["reward"]
    np.testing.assert_array_equal(given, expected)


def test_scale_reward_equals_gymnasiums_transform_reward():
    theirs = lambda env: wrappers.TransformReward(env, lambda reward: reward * 0.25)  # noqa: E731
    assert_rewards_agree(T.ScaleReward(0.25), theirs, reward_rtol=0)


@pytest.mark.parametrize("scale", ["1", None, True, float("nan"), float("inf"), -1e39, np.True_, 10**400])
def test_scale_reward_wrong_scale_raises(scale):
    with pytest.raises((TypeError, ValueError), match=r"ScaleReward needs scale in \[-3.4\d*e\+38, 3.4\d*e\+38\], but got"):
        T.ScaleReward(scale)
