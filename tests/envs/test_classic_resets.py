"""Initial states, reset options and constructor arguments of the classic control envs."""

import math

import numpy as np
import pytest
import torch
from classic_oracle import FUNCTIONS, IDS, INITIAL, make_gymnasium, state_of
from helpers import ks_distance

import torchwrap as tw

FLOATS = [torch.float32, pytest.param(torch.float64, marks=pytest.mark.full)]
STILL = (0, 0)
WITH_OPTIONS = [
    ("CartPole-v1", {"low": -1, "high": 2.5}, [(-1, 2.5)] * 4),
    (
        "Pendulum-v1",
        {"x_init": 0.5, "y_init": 3},
        [(-0.5, 0.5), (-3, 3)],
    ),
    ("Acrobot-v1", {"low": -0.4}, [(-0.4, 0.1)] * 4),
    (
        "MountainCar-v0",
        {"low": -1.1, "high": 0.3},
        [(-1.1, 0.3), STILL],
    ),
    (
        "MountainCarContinuous-v0",
        {"high": -0.55},
        [(-0.6, -0.55), STILL],
    ),
]
BY_DEFAULT = [(id, None, INITIAL[id]) for id in IDS]


def assert_uniform(states, bounds, distance):
    for column, (low, high) in zip(states.T, bounds, strict=True):
        assert column.min() >= low - 1e-6 and column.max() <= high + 1e-6
        if low < high:
            assert ks_distance((column - low) / (high - low), lambda x: x) < distance


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("id", "options", "bounds"), BY_DEFAULT + WITH_OPTIONS, ids=str)
def test_initial_states_are_uniform_as_in_gymnasium(id, options, bounds, dtype):
    env = tw.make(id, 10_000, dtype=dtype)
    env.reset(seed=0)
    for _ in range(2):
        env.reset(options=options)
        states = state_of(env)
        assert_uniform(states, bounds, 0.0195)  # exceeded once in a thousand
        varied = states.T[[low < high for low, high in bounds]]
        assert len(np.unique(varied[0])) > 9_900
        correlation = np.atleast_2d(np.corrcoef(varied)) - np.eye(len(varied))
        assert np.abs(correlation).max() < 0.05  # fields are drawn independently
    single = make_gymnasium(id)
    theirs = []
    for _ in range(300):
        single.reset(options=options)
        theirs.append(np.array(single.unwrapped.state))
    assert_uniform(np.array(theirs), bounds, 0.113)
    env.reset()
    assert_uniform(state_of(env), INITIAL[id], 0.0195)  # options do not last


NO_NUMBERS = ("a", None)
BOUNDS = [
    {"low": 1.0, "high": 0.0},
    {"high": -7},
    {"low": -math.inf},
    {"low": math.nan},
    *[{"low": value} for value in NO_NUMBERS],
]
LIMITS = [-1, math.inf, math.nan, *NO_NUMBERS]
PENDULUM_BOUNDS = [{name: value} for name in ("x_init", "y_init") for value in LIMITS]
INVALID_OPTIONS = [("Pendulum-v1", options) for options in PENDULUM_BOUNDS]
for id in IDS:
    if id != "Pendulum-v1":
        INVALID_OPTIONS += [(id, options) for options in BOUNDS]
    INVALID_OPTIONS += [
        (id, {"hihg": 1.0}),
        (id, {"rng": 1.0}),
    ]


@pytest.mark.parametrize(("id", "options"), INVALID_OPTIONS, ids=str)
def test_reset_with_invalid_options_raises_and_changes_nothing(id, options):
    env = tw.make(id, 3)
    env.step(env.reset(seed=0).set("action", env.sample_action()))
    before = env.snapshot()
    with pytest.raises(ValueError, match="options"):
        env.reset(seed=5, options=options)
    assert (env.snapshot() == before).all()


INVALID_ARGUMENTS = [
    *[("Pendulum-v1", "g", value) for value in ("10", None, math.nan, [9.8])],
    ("Acrobot-v1", "book_or_nips", "paper"),
    *[("Acrobot-v1", "torque_noise_max", value) for value in (-0.1, "0", math.inf)],
]
for id in IDS:
    INVALID_ARGUMENTS.append((id, "length", 2))
    INVALID_ARGUMENTS += [(id, "dtype", value) for value in (torch.float16, "float32", None)]
for id in IDS[3:]:
    INVALID_ARGUMENTS += [(id, "goal_velocity", value) for value in ("0", math.nan)]


@pytest.mark.parametrize(("id", "name", "value"), INVALID_ARGUMENTS, ids=str)
def test_constructor_with_an_invalid_argument_raises(id, name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        tw.make(id, 2, **{name: value})
    with pytest.raises((ValueError, TypeError), match=name):
        FUNCTIONS[id](**{name: value})
