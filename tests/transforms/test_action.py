"""Action transforms against Gymnasium's wrappers."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from oracles import RandomEnv, quick, scripted

from torchwrap import random
from torchwrap import transforms as T

# Gymnasium warns about the bounds it rounds to the space's dtype.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")

PER_DIMENSION = spaces.Box(np.float32([-2, 0, 5]), np.float32([2, 0.5, 1000]))
STEERING = spaces.Box(np.float32([-1, 0, 0]), np.float32([1, 1, 1]))  # CarRacing's
ONE_SIDED = spaces.Box(np.float32([-np.inf, 0, -1]), np.float32([1, np.inf, 1]))


def single(action_space):
    # One env of Gymnasium with this action space.
    return RandomEnv(spaces.Discrete(1), action_space=action_space)


def acting(action_space, *transforms, num_envs=2):
    return scripted(
        *transforms, num_envs=num_envs, observation_shape=(1,), action_space=action_space
    )


def arrived(env, action):
    # The action that reaches the inner env.
    transition, _ = env.step(env.reset().set("action", torch.as_tensor(action)))
    return transition["next", "info", "action"].numpy()


def random_actions(space, num_envs=16):
    return np.random.default_rng(0).normal(0, 3, (num_envs, *space.shape)).astype(space.dtype)


BOXES = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(-2, 7, (2, 2), np.float32),
    spaces.Box(0, 1, (1,), np.float64),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Box(-1, 1, (2,), np.float16),
    PER_DIMENSION,
]


def test_clip_action_equals_gymnasiums_in_values_and_space():
    turned = spaces.Box(
        -STEERING.high, -STEERING.low
    )  # the upper bounds are equal, and not the lower ones
    for space in (*BOXES, ONE_SIDED, STEERING, turned, spaces.Box(-np.inf, np.inf, (2,))):
        env, oracle = acting(space, T.ClipAction(), num_envs=16), wrappers.ClipAction(single(space))
        actions = random_actions(space)
        assert env.single_action_space == oracle.action_space, space
        ours = arrived(env, actions)
        assert ours.dtype == space.dtype, space
        np.testing.assert_array_equal(
            ours, np.stack([oracle.action(action) for action in actions]), f"{space}"
        )


def test_rescale_action_equals_gymnasiums_in_values_and_space():
    every_bounds = [(-1, 1), (-1.0, 0.5), (0, 3), (np.float64(-1), np.float64(2)), (100, 101)]
    for space, bounds in itertools.product(BOXES, every_bounds):
        env, oracle = (
            acting(space, T.RescaleAction(*bounds), num_envs=16),
            wrappers.RescaleAction(single(space), *bounds),
        )
        actions = random_actions(space)
        assert env.single_action_space == oracle.action_space, (space, bounds)
        ours, theirs = (
            arrived(env, actions),
            np.stack([oracle.action(action) for action in actions]),
        )
        assert ours.dtype == space.dtype, (space, bounds)
        rounding = (
            4
            * np.finfo(space.dtype).eps
            * (1 + np.abs(theirs).max() + np.max(np.abs(bounds)) * np.ptp(theirs))
        )
        np.testing.assert_allclose(
            ours, theirs, rtol=1e-6, atol=rounding, err_msg=f"{space} {bounds}"
        )


def test_clip_action_over_rescale_action_clips_to_the_agents_bounds_as_gymnasiums():
    space = spaces.Box(0, 10, (1,))
    env = acting(space, T.RescaleAction(-1, 1), T.ClipAction(), num_envs=3)
    oracle = wrappers.ClipAction(wrappers.RescaleAction(single(space), -1, 1))
    actions = np.float32([[-3], [0.5], [3]])
    np.testing.assert_allclose(
        arrived(env, actions), [oracle.env.action(oracle.action(a)) for a in actions]
    )


def test_transform_action_equals_gymnasiums():
    space, wider = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-9, 9, (3,), np.float32)
    env = acting(space, T.TransformAction(lambda action: action / 9, wider), num_envs=16)
    oracle = wrappers.TransformAction(single(space), lambda action: action / 9, wider)
    assert env.single_action_space == oracle.action_space
    actions = random_actions(wider)
    np.testing.assert_array_equal(
        arrived(env, actions), np.stack([oracle.action(action) for action in actions])
    )


def test_transform_action_maps_discrete_to_continuous_actions():
    moves = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    env = acting(
        spaces.Box(-1, 1, (2,)),
        T.TransformAction(lambda action: moves[action], spaces.Discrete(4)),
        num_envs=3,
    )
    assert arrived(env, torch.tensor([3, 0, 2])).tolist() == [[0, -1], [1, 0], [-1, 0]]


class Recording(T.StickyAction):
    def action(self, action):
        key = self.stream.key()
        count = self.longest - self.shortest + 1
        self.drawn = random.uniform(key), random.integers(key.fold_in(1), count) + self.shortest
        return super().action(action)


class Replayed:
    # A NumPy generator for Gymnasium that returns the numbers that our transform has drawn.
    def uniform(self):
        return self.drawn[0]

    def integers(self, low, high):
        assert low <= self.drawn[1] < high
        return self.drawn[1]


@pytest.mark.parametrize("duration", quick([1, 3, (1, 4), (2, 2)], (1, 4)))
@pytest.mark.parametrize("probability", quick([0, 0.25, 0.9], 0.25))
@pytest.mark.parametrize("lengths", [(1,), (7, 3, 1), None])
def test_sticky_action_equals_gymnasiums_for_the_same_draws(probability, duration, lengths):
    sticky = Recording(probability, duration)
    env = scripted(sticky, num_envs=5, action_space=spaces.Discrete(1000), episode_lengths=lengths)
    oracles = [
        wrappers.StickyAction(single(spaces.Discrete(1000)), probability, duration)
        for _ in range(5)
    ]
    for oracle in oracles:
        oracle.unwrapped._np_random = Replayed()
    td, repeated = env.reset(seed=0), 0
    for _ in range(40):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        for row, oracle in enumerate(oracles):
            oracle.unwrapped._np_random.drawn = [numbers[row].item() for numbers in sticky.drawn]
            expected = oracle.action(action[row].item())
            assert transition["next", "info", "action"][row] == expected
            repeated += expected != action[row].item()
            if transition["next", "done"][row]:
                (
                    oracle.last_action,
                    oracle.is_sticky_actions,
                    oracle.num_repeats,
                    oracle.repeats_taken,
                ) = None, False, 0, 0
    assert (repeated > 0) == (probability > 0 and lengths != (1,))


def test_sticky_action_of_a_dict_repeats_all_parts_together():
    space = spaces.Dict(a=spaces.Discrete(1000), b=spaces.Tuple([spaces.Box(-1, 1, (2,))]))
    env = scripted(T.StickyAction(0.5), num_envs=50, action_space=space, episode_lengths=None)
    td = env.reset(seed=0)
    before = env.sample_action()
    _, td = env.step(td.set("action", before.clone()))
    chosen = env.sample_action()
    given = env.step(td.set("action", chosen.clone()))[0]["next", "info", "action"]
    stuck = given["a"] == before["a"]
    assert (
        10 < stuck.sum() < 40 and (given["a"] == torch.where(stuck, before["a"], chosen["a"])).all()
    )
    assert (
        given["b", "0"] == torch.where(stuck.unsqueeze(1), before["b", "0"], chosen["b", "0"])
    ).all()
