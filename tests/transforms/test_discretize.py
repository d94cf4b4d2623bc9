"""DiscretizeObservation and DiscretizeAction against Gymnasium's wrappers."""

from __future__ import annotations

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
CASES = [(LINE, 10), (PLANE, 10), (PLANE, (3, 7)), (BLOCK, 2), (BLOCK, (1, 2, 3, 4)), (POINT, 5), (PLANE, 1)]


@pytest.mark.parametrize("multidiscrete", [False, True])
@pytest.mark.parametrize(("space", "bins"), CASES, ids=str)
def test_discretize_observation_equals_gymnasiums(space, bins, multidiscrete):
    oracles = [wrappers.DiscretizeObservation(RandomEnv(space), bins, multidiscrete) for _ in range(3)]
    assert_agrees(make(space, T.DiscretizeObservation(bins, multidiscrete)), oracles)


@pytest.mark.parametrize(("space", "bins"), CASES, ids=str)
def test_discretize_observation_equals_gymnasiums_at_every_edge_and_beyond(space, bins):
    oracle = wrappers.DiscretizeObservation(RandomEnv(space), bins, True)
    transform = make(space, T.DiscretizeObservation(bins, True)).transforms[0]
    low, high = space.low.ravel(), space.high.ravel()
    for axis, count in enumerate(oracle.bins):
        for edge in np.linspace(low[axis], high[axis], count + 1).astype(space.dtype):
            for value in (np.nextafter(edge, -np.inf), edge, np.nextafter(edge, np.inf), low[axis] - 9, high[axis] + 9):
                point = low.copy()
                point[axis] = value
                given = transform.observation(torch.from_numpy(point.reshape(1, *space.shape)))
                assert given[0].tolist() == oracle.observation(point.reshape(space.shape)).tolist()


@pytest.mark.parametrize("multidiscrete", [False, True])
@pytest.mark.parametrize(("space", "bins"), CASES, ids=str)
def test_discretize_observation_revert_equals_gymnasiums_edges(space, bins, multidiscrete):
    oracle = wrappers.DiscretizeObservation(RandomEnv(space), bins, multidiscrete)
    transform = make(space, T.DiscretizeObservation(bins, multidiscrete)).transforms[0]
    values = np.stack([oracle.observation_space.sample() for _ in range(20)])
    for ours, theirs in zip(
        transform.revert_observation(torch.from_numpy(values)),
        zip(*[oracle.revert_observation(int(v) if v.ndim == 0 else v) for v in values], strict=True),
        strict=True,
    ):
        np.testing.assert_array_equal(ours.numpy(), np.stack(theirs))


@pytest.mark.parametrize("multidiscrete", [False, True])
@pytest.mark.parametrize(("space", "bins"), CASES, ids=str)
def test_discretize_action_and_its_revert_equal_gymnasiums(space, bins, multidiscrete):
    oracle = wrappers.DiscretizeAction(RandomEnv(LINE, action_space=space), bins, multidiscrete)
    actions = np.stack([oracle.action_space.sample() for _ in range(30)])
    env = tw.TransformedEnv(ScriptedEnv(30, (1,), action_space=space), T.DiscretizeAction(bins, multidiscrete))
    assert env.single_action_space == oracle.action_space
    transition, _ = env.step(env.reset().set("action", torch.from_numpy(actions)))
    arrived = transition["next", "info", "action"].numpy()
    expected = [oracle.action(int(action) if action.ndim == 0 else action) for action in actions]
    np.testing.assert_array_equal(arrived, np.stack(expected))
    points = np.random.default_rng(0).uniform(-2, 6, (40, *space.shape)).astype(space.dtype)
    reverted = env.transforms[0].revert_action(torch.from_numpy(points)).numpy()
    np.testing.assert_array_equal(reverted, np.stack([oracle.revert_action(point) for point in points]))


@pytest.mark.parametrize("bins", [np.array(3), np.array([3]), [3], np.int8(3)], ids=repr)
def test_discretize_bins_as_numbers_and_arrays_are_accepted(bins):
    for transform, space in ((T.DiscretizeObservation, "observation_space"), (T.DiscretizeAction, "action_space")):
        env = tw.TransformedEnv(ScriptedEnv(2, **{space: spaces.Box(0, 1, (1,))}), transform(bins))
        assert getattr(env, f"single_{space}") == spaces.Discrete(3)


@pytest.mark.parametrize(("bins", "fits"), [((2**15, 2**16), True), ((2**15, 2**16 + 1), False)])
def test_discretize_action_more_bins_than_can_be_sampled_raise_unless_multidiscrete(bins, fits):
    space = spaces.Box(0, 1, (2,))
    if fits:
        env = tw.TransformedEnv(ScriptedEnv(2, action_space=space), T.DiscretizeAction(bins))
        assert spaces.Discrete(2**31).contains(env.sample_action()[0].numpy())
    else:
        with pytest.raises(ValueError, match="DiscretizeAction needs at most 2147483648 bins in all"):
            tw.TransformedEnv(ScriptedEnv(2, action_space=space), T.DiscretizeAction(bins))
    env = tw.TransformedEnv(ScriptedEnv(2, action_space=space), T.DiscretizeAction(bins, multidiscrete=True))
    assert env.single_action_space.contains(env.sample_action()[0].numpy())


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: T.DiscretizeObservation(0), ValueError, "DiscretizeObservation needs bins of at least 1, but got 0"),
        (
            lambda: T.DiscretizeObservation(2.5),
            TypeError,
            "DiscretizeObservation needs an integer bins of at least 1, but got 2.5",
        ),
        (lambda: T.DiscretizeObservation((3, "a")), TypeError, "DiscretizeObservation needs an integer bins of at least 1"),
        (lambda: T.DiscretizeObservation(3, 1), TypeError, "DiscretizeObservation needs multidiscrete as a bool, but got 1"),
        (lambda: make(LINE, T.DiscretizeObservation((3, 3))), ValueError, "needs bins for each of 1 dimensions"),
        (lambda: make(spaces.Box(-np.inf, 1, (1,)), T.DiscretizeObservation(3)), ValueError, "needs a box with finite bounds"),
        (lambda: make(spaces.Discrete(3), T.DiscretizeObservation(3)), TypeError, "needs a Box observation space"),
        (
            lambda: make(spaces.Box(0, 1, (64,)), T.DiscretizeObservation(2)),
            ValueError,
            "needs at most 9223372036854775807 bins in all",
        ),
        (lambda: T.DiscretizeAction(-1), ValueError, "DiscretizeAction needs bins of at least 1, but got -1"),
        (lambda: T.DiscretizeAction(3, "yes"), TypeError, "DiscretizeAction needs multidiscrete as a bool, but got 'yes'"),
        (lambda: make(LINE, T.DiscretizeAction(3)), TypeError, "DiscretizeAction needs a Box action space"),
    ],
)
def test_discretize_wrong_arguments_and_spaces_raise(build, error, match):
    with pytest.raises(error, match=match):
        build()
