"""Initial states, reset options and constructor arguments of the classic control envs."""

import math

import numpy as np
import pytest
import torch
from classic_oracle import FUNCTIONS, IDS, INITIAL, make_gymnasium, state_of
from helpers import ks_distance

import torchwrap as tw

WITH_OPTIONS = {
    "CartPole-v1": ({"low": -1, "high": 2.5}, [(-1, 2.5)] * 4),
    "Pendulum-v1": ({"x_init": 0.5, "y_init": 3}, [(-0.5, 0.5), (-3, 3)]),
    "Acrobot-v1": ({"low": -0.4}, [(-0.4, 0.1)] * 4),
    "MountainCar-v0": ({"low": -1.1, "high": 0.3}, [(-1.1, 0.3), (0, 0)]),
    "MountainCarContinuous-v0": ({"high": -0.55}, [(-0.6, -0.55), (0, 0)]),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("id", "options", "bounds"),
    [*((id, None, INITIAL[id]) for id in IDS), *((id, *WITH_OPTIONS[id]) for id in IDS)],
    ids=str,
)
def test_initial_states_are_uniform_as_in_gymnasium(id, options, bounds, dtype):
    env, single = tw.make(id, 10_000, dtype=dtype), make_gymnasium(id)
    theirs = []
    for _ in range(300):
        single.reset(options=options)
        theirs.append(np.array(single.unwrapped.state))
    env.reset(seed=0)
    for _ in range(2):
        env.reset(options=options)
        for states, allowed in (
            (state_of(env), 0.0195),
            (np.array(theirs), 0.113),
        ):  # exceeded once in a thousand
            for column, (low, high) in zip(states.T, bounds, strict=True):
                assert column.min() >= low - 1e-6 and column.max() <= high + 1e-6
                uniform = lambda x, low=low, high=high: (x - low) / (high - low)  # noqa: E731
                assert low == high or ks_distance(column, uniform) < allowed
        columns = np.stack(
            [
                column
                for column, (low, high) in zip(state_of(env).T, bounds, strict=True)
                if low < high
            ]
        )
        correlation = np.atleast_2d(np.corrcoef(columns)) - np.eye(len(columns))
        assert np.abs(correlation).max() < 0.05  # fields are drawn independently
        assert len(np.unique(columns[0])) > 9_900
    env.reset()
    assert all(
        column.max() <= high + 1e-6
        for column, (_, high) in zip(state_of(env).T, INITIAL[id], strict=True)
    )


INVALID = [
    {"low": 1.0, "high": 0.0},
    {"high": -7},
    *({"low": value} for value in ("a", None, -math.inf, math.nan)),
]
OF_PENDULUM = [
    {name: value} for name in ("x_init", "y_init") for value in (-1, math.inf, math.nan, "a", None)
]


@pytest.mark.parametrize("id", IDS)
def test_reset_with_invalid_options_raises_and_changes_nothing(id):
    env, single = tw.make(id, 3), make_gymnasium(id)
    env.step(env.reset(seed=0).set("action", env.sample_action()))
    before = env.snapshot()["buffers"]
    for options in OF_PENDULUM if id == "Pendulum-v1" else INVALID:
        with pytest.raises(
            ValueError, match=rf"{id}.reset needs options that fit initial\(\), but got \{{'"
        ):
            env.reset(seed=5, options=options)
        if not any(value != value for value in options.values()):  # NumPy accepts NaN
            with pytest.raises((ValueError, OverflowError)):
                single.reset(options=options)
    known = "'x_init', 'y_init'" if id == "Pendulum-v1" else "'low', 'high'"
    for name in ("hihg", "rng"):
        with pytest.raises(
            ValueError, match=rf"needs options among \['state', {known}\], but got \['{name}'\]"
        ):
            env.reset(options={name: 1.0})
    after = env.snapshot()["buffers"]
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


def test_constructor_with_invalid_arguments_raises():
    cases = [
        *(
            (id, {"dtype": dtype}, "a dtype of torch.float32 or")
            for id in IDS
            for dtype in (torch.float16, "float32", None)
        ),
        *((id, {"length": 2}, "'length'") for id in IDS),
        *(("Pendulum-v1", {"g": g}, "g") for g in ("10", None, math.nan, [9.8])),
        (
            "Acrobot-v1",
            {"book_or_nips": "paper"},
            'book_or_nips="book" or "nips", but got \'paper\'',
        ),
        *(
            ("Acrobot-v1", {"torque_noise_max": value}, "torque_noise_max")
            for value in (-0.1, "0", math.inf)
        ),
        *(
            (id, {"goal_velocity": value}, "goal_velocity")
            for id in IDS[3:]
            for value in ("0", math.nan)
        ),
    ]
    for id, arguments, match in cases:
        with pytest.raises((ValueError, TypeError), match=match):
            tw.make(id, 2, **arguments)
        with pytest.raises((ValueError, TypeError), match=match):
            FUNCTIONS[id](**arguments)
