from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.gymnasium import from_gymnasium
from torchwrap.testing import ScriptedEnv


class Chance(gymnasium.Env):
    # Normal rewards in float32; episodes of 1 to 4 steps that terminate, are truncated, or both.
    observation_space, action_space = spaces.Discrete(5), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.way = (int(number) for number in self.np_random.integers([1, 0], [5, 3]))
        return self.left, {}

    def step(self, action):
        self.left -= 1
        ended = self.left == 0
        return self.left, np.float32(self.np_random.normal(0, 3)), ended and self.way != 1, ended and self.way != 0, {}


def assert_agree(transform, oracles, rtol=1e-6):
    vector_env = SyncVectorEnv([Chance] * len(oracles), autoreset_mode=AutoresetMode.DISABLED)
    env = tw.TransformedEnv(from_gymnasium(vector_env), transform)
    td = env.reset(seed=5)
    for i, oracle in enumerate(oracles):
        oracle.reset(seed=5 + i)
    for _ in range(25):
        transition, td = env.step(td.set("action", env.sample_action()))
        steps = [oracle.step(0) for oracle in oracles]
        rewards = np.array([[step[1]] for step in steps])
        assert transition["next", "reward"].dtype == torch.float32
        np.testing.assert_allclose(transition["next", "reward"], rewards, rtol=rtol)
        for oracle, step in zip(oracles, steps, strict=True):
            if step[2] or step[3]:
                oracle.reset()


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
    assert_agree(T.TransformReward(func), [wrappers.TransformReward(Chance(), numpy_func) for _ in range(3)])


@pytest.mark.parametrize(
    "bounds", [(-1, 1), (None, 0.5), (-2.0, None), (0, 2), (-np.inf, 1), (0.25, 0.5), (-1, 0), (None, 0), (0, None)]
)
def test_clip_reward_equals_gymnasiums(bounds):
    assert_agree(T.ClipReward(*bounds), [wrappers.ClipReward(Chance(), *bounds) for _ in range(3)])


def test_clip_reward_takes_one_bound_for_both():
    td = TensorDict({"reward": torch.tensor([[-3.0], [3.0]])}, [2])
    assert T.ClipReward(1, 1)(td)["reward"].tolist() == [[1], [1]]


def test_reward_transforms_leave_observations_and_spaces_as_they_are():
    env, plain = tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1), T.TransformReward(torch.neg)), ScriptedEnv(2)
    assert env.single_observation_space == plain.single_observation_space
    assert torch.equal(env.reset()["observation"], plain.reset()["observation"])


def test_reward_transforms_reach_the_last_reward_of_an_episode_and_the_first_of_the_next():
    env = tw.TransformedEnv(ScriptedEnv(1, episode_lengths=2), T.TransformReward(lambda reward: 10 * reward))
    data, _ = tw.rollout(env, None, 4)
    assert data["next", "reward"].flatten().tolist() == [10, 20, 10, 20]


def test_transform_reward_passes_the_whole_batch_to_its_function():
    shapes = []
    env = tw.TransformedEnv(ScriptedEnv(7), T.TransformReward(lambda reward: shapes.append(reward.shape) or reward))
    tw.rollout(env, None, 1)
    assert set(shapes) == {(7, 1)}


@pytest.mark.parametrize("transform", [T.ClipReward(-1, 1), T.TransformReward(lambda reward: reward.clamp(-1, 1))], ids=repr)
@pytest.mark.parametrize("batch", [(), (4,), (2, 5)])
def test_a_reward_transform_outside_an_env_takes_any_batch_size_and_leaves_its_input(transform, batch):
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
def test_a_reward_transform_refuses_wrong_arguments(build, error, match):
    with pytest.raises(error, match=match):
        build()


@pytest.mark.parametrize(
    ("func", "error", "match"),
    [
        (lambda reward: reward.squeeze(-1), ValueError, r"TransformReward needs func to give .* \(2, 1\).* but got \(2,\)"),
        (lambda reward: reward.double(), TypeError, "TransformReward needs func to give .*float32.* but got torch.float64"),
        (lambda reward: reward > 0, TypeError, "TransformReward needs func to give .*float32.* but got torch.bool"),
        (lambda reward: 1.0, TypeError, "TransformReward needs func to give .* but got float"),
        (lambda reward: None, TypeError, "TransformReward needs func to give .* but got NoneType"),
        (lambda reward: reward.numpy(), TypeError, "TransformReward needs func to give .* but got ndarray"),
    ],
)
def test_transform_reward_refuses_a_function_that_gives_no_rewards(func, error, match):
    with pytest.raises(error, match=match):
        tw.TransformedEnv(ScriptedEnv(2), T.TransformReward(func))


@pytest.mark.parametrize("bounds", [(-1e39, 1e39), (-np.inf, np.inf), (-(10**300), None), (None, 2**1000), (-1e39, 2**100)])
def test_clip_reward_takes_bounds_beyond_float32_for_none(bounds):
    reward = np.float32([[-np.inf], [-3e38], [0], [3e38], [np.inf]])
    expected = reward.clip(max=np.float32(2**100)) if bounds[1] == 2**100 else reward
    given = T.ClipReward(*bounds)(TensorDict({"reward": torch.from_numpy(reward)}, [5]))["reward"]
    np.testing.assert_array_equal(given, expected)


def test_scale_reward_equals_gymnasiums_transform_reward():
    oracles = [wrappers.TransformReward(Chance(), lambda reward: reward * 0.25) for _ in range(4)]
    assert_agree(T.ScaleReward(0.25), oracles, rtol=0)


@pytest.mark.parametrize("scale", ["1", None, True, float("nan"), float("inf"), -1e39, np.True_, 10**400])
def test_scale_reward_needs_a_number(scale):
    with pytest.raises((TypeError, ValueError), match=r"ScaleReward needs scale in \[-3.4\d*e\+38, 3.4\d*e\+38\], but got"):
        T.ScaleReward(scale)
