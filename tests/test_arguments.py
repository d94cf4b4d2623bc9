from __future__ import annotations

import math
import re

import numpy as np
import pytest

from torchwrap import arguments


@pytest.mark.parametrize("value", [1, 7, np.int64(7), np.uint8(1), np.array(7), 2**70])
def test_an_integer_is_given_back_as_an_int(value):
    given = arguments.integer("X", "n", value, at_least=1)
    assert type(given) is int and given == value


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "X needs n of at least 1, but got 0."),
        (-3, ValueError, "X needs n of at least 1, but got -3."),
        (np.int64(0), ValueError, "X needs n of at least 1, but got np.int64(0)."),
        (True, ValueError, "X needs n of at least 1, but got True."),
        (np.True_, TypeError, "X needs an integer n of at least 1, but got np.True_."),
        (2.0, TypeError, "X needs an integer n of at least 1, but got 2.0."),
        (np.float64(2), TypeError, "X needs an integer n of at least 1, but got np.float64(2.0)."),
        (math.nan, TypeError, "X needs an integer n of at least 1, but got nan."),
        ("2", TypeError, "X needs an integer n of at least 1, but got '2'."),
        (None, TypeError, "X needs an integer n of at least 1, but got None."),
        ([2], TypeError, "X needs an integer n of at least 1, but got [2]."),
        (np.array([2]), TypeError, "X needs an integer n of at least 1, but got array([2])."),
    ],
)
def test_what_is_no_integer_or_too_small_is_refused(value, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        arguments.integer("X", "n", value, at_least=1)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), np.int64(1), np.array(0.5)])
def test_a_number_is_given_back_as_it_came(value):
    given = arguments.number("X", "p", value, 0, 1)
    assert given == value and type(given) in (int, float)


@pytest.mark.parametrize("value", [-math.inf, math.inf, -1e300, 0])
def test_without_bounds_any_number_will_do(value):
    assert arguments.number("X", "p", value) is value


@pytest.mark.parametrize(
    ("value", "bounds", "error", "message"),
    [
        (1.1, (0, 1), ValueError, "X needs p in [0, 1], but got 1.1."),
        (-0.1, (0, 1), ValueError, "X needs p in [0, 1], but got -0.1."),
        (np.float32(2), (0, 1), ValueError, "X needs p in [0, 1], but got np.float32(2.0)."),
        (math.nan, (0, 1), ValueError, "X needs p in [0, 1], but got nan."),
        (math.nan, (), ValueError, "X needs a number as p, but got nan."),
        (-1, (0,), ValueError, "X needs p in [0, inf], but got -1."),
        ("a", (), TypeError, "X needs a number as p, but got 'a'."),
        ("0.5", (0, 1), TypeError, "X needs p in [0, 1], but got '0.5'."),
        (None, (0, 1), TypeError, "X needs p in [0, 1], but got None."),
        ([0.5], (0, 1), TypeError, "X needs p in [0, 1], but got [0.5]."),
        (1j, (), TypeError, "X needs a number as p, but got 1j."),
    ],
)
def test_what_is_no_number_or_out_of_bounds_is_refused(value, bounds, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        arguments.number("X", "p", value, *bounds)
