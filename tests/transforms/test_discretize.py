"""DiscretizeObservation and DiscretizeAction against Gymnasium's wrappers."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from oracles import RandomEnv, assert_agrees, make

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

LINE = spaces.Box(-1.2, 0.6, (1,), np.float32)
PLANE = spaces.Box(np.float32([-1.2, -0.07]), np.float32([0.6, 0.07]))
BLOCK = spaces.Box(0, 1, (2, 2), np.float64)
POINT = spaces.Box(-3, 5, (), np.float32)
CASES = [
    (LINE, 10),
    (PLANE, 10),
    (PLANE, (3, 7)),
    (BLOCK, 2),
    (BLOCK, (1, 2, 3, 4)),
    (POINT, 5),
    (PLANE, 1),
]


def test_discretize_observation_equals_gymnasiums():
    for (space, bins), multidiscrete in itertools.product(CASES, (False, True)):
        oracles = [
            wrappers.DiscretizeObservation(RandomEnv(space), bins, multidiscrete) for _ in range(2)
        ]
        assert_agrees(
            make(space, T.DiscretizeObservation(bins, multidiscrete), num_envs=2),
            oracles,
            num_steps=12,
        )


def test_discretize_observation_equals_gymnasiums_at_every_edge_and_beyond():
    for space, bins in CASES:
        oracle = wrappers.DiscretizeObservation(RandomEnv(space), bins, True)
        transform = make(space, T.DiscretizeObservation(bins, True)).transforms[0]
        low, high = space.low.ravel(), space.high.ravel()
        for axis, count in enumerate(oracle.bins):
            for edge in np.linspace(low[axis], high[axis], count + 1).astype(space.dtype):
                for value in (
                    np.nextafter(edge, -np.inf),
                    edge,
                    np.nextafter(edge, np.inf),
                    low[axis] - 9,
                    high[axis] + 9,
                ):
                    point = low.copy()
                    point[axis] = value
                    given = transform.observation(torch.from_numpy(point.reshape(1, *space.shape)))
                    assert (
                        given[0].tolist() == oracle.observation(point.reshape(space.shape)).tolist()
                    ), (space, bins, point)


def test_discretize_observation_revert_equals_gymnasiums_edges():
    for (space, bins), multidiscrete in itertools.product(CASES, (False, True)):
        oracle = wrappers.DiscretizeObservation(RandomEnv(space), bins, multidiscrete)
        transform = make(space, T.DiscretizeObservation(bins, multidiscrete)).transforms[0]
        values = np.stack([oracle.observation_space.sample() for _ in range(20)])
        theirs = zip(
            *[oracle.revert_observation(int(v) if v.ndim == 0 else v) for v in values], strict=True
        )
        for ours, expected in zip(
            transform.revert_observation(torch.from_numpy(values)), theirs, strict=True
        ):
            np.testing.assert_array_equal(
                ours.numpy(), np.stack(expected), f"{space} {bins} {multidiscrete}"
            )


def test_discretize_action_and_its_revert_equal_gymnasiums():
    for (space, bins), multidiscrete in itertools.product(CASES, (False, True)):
        name = f"{space} {bins} {multidiscrete}"
        oracle = wrappers.DiscretizeAction(RandomEnv(LINE, action_space=space), bins, multidiscrete)
        actions = np.stack([oracle.action_space.sample() for _ in range(30)])
        env = tw.TransformedEnv(
            ScriptedEnv(30, (1,), action_space=space), T.DiscretizeAction(bins, multidiscrete)
        )
        assert env.single_action_space == oracle.action_space, name
        transition, _ = env.step(env.reset().set("action", torch.from_numpy(actions)))
        expected = [
            oracle.action(int(action) if action.ndim == 0 else action) for action in actions
        ]
        np.testing.assert_array_equal(
            transition["next", "info", "action"].numpy(), np.stack(expected), name
        )
        points = np.random.default_rng(0).uniform(-2, 6, (40, *space.shape)).astype(space.dtype)
        reverted = env.transforms[0].revert_action(torch.from_numpy(points)).numpy()
        np.testing.assert_array_equal(
            reverted, np.stack([oracle.revert_action(point) for point in points]), name
        )


def test_discretize_bins_as_numbers_and_arrays_are_accepted():
    kinds = (T.DiscretizeObservation, "observation_space"), (T.DiscretizeAction, "action_space")
    for bins, (transform, space) in itertools.product(
        (np.array(3), np.array([3]), [3], np.int8(3)), kinds
    ):
        env = tw.TransformedEnv(ScriptedEnv(2, **{space: spaces.Box(0, 1, (1,))}), transform(bins))
        assert getattr(env, f"single_{space}") == spaces.Discrete(3), repr(bins)


def test_discretize_action_more_bins_than_can_be_sampled_raise_unless_multidiscrete():
    below = ScriptedEnv(2, action_space=spaces.Box(0, 1, (2,)))
    env = tw.TransformedEnv(below, T.DiscretizeAction((2**15, 2**16)))
    assert spaces.Discrete(2**31).contains(env.sample_action()[0].numpy())
    with pytest.raises(ValueError, match="DiscretizeAction needs at most 2147483648 bins in all"):
        tw.TransformedEnv(below, T.DiscretizeAction((2**15, 2**16 + 1)))
    env = tw.TransformedEnv(below, T.DiscretizeAction((2**15, 2**16 + 1), multidiscrete=True))
    assert env.single_action_space.contains(env.sample_action()[0].numpy())
