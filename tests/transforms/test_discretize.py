"""DiscretizeObservation and DiscretizeAction against Gymnasium's wrappers."""

import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numpy.testing import assert_array_equal
from oracles import RandomEnv, assert_equals_wrapper, make, scripted

from torchwrap import transforms as T

LINE = Box(-1.2, 0.6, (1,))
PLANE = Box(
    np.float32([-1.2, -0.07]),
    np.float32([0.6, 0.07]),
)
BLOCK = Box(
    0,
    1,
    (2, 2),
    np.float64,
)
POINT = Box(-3, 5, ())
CASES = [(LINE, 10), (PLANE, 10), (PLANE, (3, 7)), (BLOCK, (1, 2, 3, 4)), (POINT, 5), (PLANE, 1)]
cases = pytest.mark.parametrize(
    ("space", "bins"),
    CASES,
    ids=str,
)
multidiscrete = pytest.mark.parametrize(
    "multidiscrete",
    [False, True],
    ids=["flat", "multi"],
)


def members(space, number):
    """Members of a space: as an array for us, and one by one for Gymnasium."""
    values = np.stack([space.sample() for _ in range(number)])
    return values, [int(value) if value.ndim == 0 else value for value in values]


@cases
@multidiscrete
def test_discretize_observation_equals_gymnasiums(space, bins, multidiscrete):
    assert_equals_wrapper(space, "DiscretizeObservation", bins, multidiscrete)


@cases
def test_discretize_observation_equals_gymnasiums_at_every_edge_and_beyond(space, bins):
    oracle = wrappers.DiscretizeObservation(RandomEnv(space), bins, True)
    transform = make(space, T.DiscretizeObservation(bins, True)).transforms[0]
    low = space.low.ravel()
    high = space.high.ravel()
    for axis, count in enumerate(oracle.bins):
        edges = np.linspace(low[axis], high[axis], count + 1).astype(space.dtype)
        below = np.nextafter(edges, -np.inf)
        above = np.nextafter(edges, np.inf)
        for value in (*edges, *below, *above, low[axis] - 9, high[axis] + 9):
            point = low.copy()
            point[axis] = value
            point = point.reshape(space.shape)
            given = transform.observation(torch.from_numpy(point[None]))
            assert given[0].tolist() == oracle.observation(point).tolist()


@cases
@multidiscrete
def test_discretize_action_equals_gymnasiums(space, bins, multidiscrete):
    oracle = wrappers.DiscretizeAction(
        RandomEnv(LINE, action_space=space),
        bins,
        multidiscrete,
    )
    env = scripted(
        T.DiscretizeAction(bins, multidiscrete),
        num_envs=30,
        action_space=space,
    )
    assert env.single_action_space == oracle.action_space
    values, singles = members(oracle.action_space, 30)
    transition, _ = env.step(env.reset().set("action", torch.from_numpy(values)))
    received = transition["next", "info", "action"]
    assert_array_equal(
        received,
        np.stack(list(map(oracle.action, singles))),
    )


@pytest.mark.parametrize(
    "bins",
    [np.array(3), np.array([3]), [3], np.int8(3)],
    ids=repr,
)
def test_bins_as_numbers_and_arrays_are_accepted(bins):
    line = Box(0, 1, (1,))
    env = scripted(T.DiscretizeObservation(bins), observation_space=line)
    assert env.single_observation_space == Discrete(3)
    env = scripted(T.DiscretizeAction(bins), action_space=line)
    assert env.single_action_space == Discrete(3)


def test_indices_by_dimension_may_have_a_product_beyond_int64():
    env = scripted(T.DiscretizeObservation(16, True), observation_space=Box(0, 1, (17,)))
    assert env.single_observation_space == MultiDiscrete([16] * 17)


def test_discretize_action_of_the_most_bins_that_can_be_sampled():
    square = Box(0, 1, (2,))
    env = scripted(
        T.DiscretizeAction((2**15, 2**16)),
        action_space=square,
    )
    assert Discrete(2**31).contains(env.sample_action()[0].numpy())
    bins = (2**15, 2**16 + 1)
    with pytest.raises(ValueError, match="bins"):
        scripted(T.DiscretizeAction(bins), action_space=square)
    env = scripted(
        T.DiscretizeAction(bins, multidiscrete=True),
        action_space=square,
    )
    assert env.single_action_space.contains(env.sample_action()[0].numpy())
