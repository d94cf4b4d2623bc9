"""Spaces of every kind, and their values as arrays and as tensors."""

import inspect

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict

# Gymnasium before 1.2.3 has a Discrete space in int64 only.
DISCRETE_HAS_DTYPE = "dtype" in inspect.signature(spaces.Discrete).parameters
BOX = spaces.Box(-1, 1, (3,), np.float32)
INF = np.inf

SPACES = {
    "float32": spaces.Box(-1, 1, (2, 3), np.float32),
    "float64": spaces.Box(-1e100, 1e100, (2,), np.float64),
    "float16": spaces.Box(-1, 1, (2,), np.float16),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "each its own": spaces.Box(
        np.array([-1, 2, -INF, 5, -INF]),
        np.array([1, 3, -5, INF, INF]),
        dtype=np.float64,
    ),
    "uint8": spaces.Box(
        0,
        255,
        (4, 4, 3),
        np.uint8,
    ),
    "int8": spaces.Box(-128, 127, (3,), np.int8),
    "int64": spaces.Box(-3, 9, (2,), np.int64),
    "int above zero": spaces.Box(4, 9, (2,), np.int32),
    "int64 unbounded": spaces.Box(-INF, INF, (2,), np.int64),
    "Discrete": spaces.Discrete(3),
    "Discrete start": spaces.Discrete(3, start=-5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 5]),
    "MultiDiscrete start": spaces.MultiDiscrete([3, 5, 1], start=[-2, 7, 100]),
    "MultiDiscrete 2d": spaces.MultiDiscrete(
        [[3, 5], [2, 4]],
        start=[
            [1, 0],
            [0, -9],
        ],
    ),
    "MultiDiscrete int8": spaces.MultiDiscrete([68], start=[60], dtype=np.int8),
    "MultiBinary": spaces.MultiBinary(4),
    "MultiBinary 2d": spaces.MultiBinary((2, 3)),
    "Dict": spaces.Dict(
        {
            "b": BOX,
            "a": spaces.Discrete(3),
            "c.d": spaces.MultiBinary(2),
        }
    ),
    "Tuple": spaces.Tuple([spaces.Discrete(100 + i) for i in range(12)]),
    "deep": spaces.Dict(
        x=spaces.Tuple(
            [
                spaces.Dict(y=BOX),
                spaces.Discrete(3, start=4),
            ]
        ),
        z=spaces.MultiDiscrete([2, 3]),
    ),
}
if DISCRETE_HAS_DTYPE:
    SPACES["Discrete int32"] = spaces.Discrete(3, start=2, dtype=np.int32)

every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def batch(space, count=6, seed=0):
    """Random members of a space, and the same members as Gymnasium's batch."""
    space.seed(seed)
    members = [space.sample() for _ in range(count)]
    return members, concatenate(space, members, create_empty_array(space, count))


def assert_equal_arrays(actual, expected):
    """A value equals Gymnasium's or another value: numbers, shapes, dtypes and order of keys."""
    if isinstance(expected, tuple):
        expected = {str(index): part for index, part in enumerate(expected)}
    if isinstance(expected, dict | TensorDict):
        assert list(actual.keys()) == list(expected.keys())
        for key in expected.keys():
            assert_equal_arrays(actual[key], expected[key])
    else:
        np.testing.assert_array_equal(actual, expected, strict=True)


def leaves_of(value):
    return list(value.values(True, True)) if isinstance(value, TensorDict) else [value]
