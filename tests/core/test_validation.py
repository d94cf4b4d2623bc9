from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from torchwrap._core import validation


def integer(value):
    return validation.integer("X", "n", value, at_least=1)


def number(value, *bounds):
    return validation.number("X", "p", value, *bounds)


def test_valid_numbers_are_returned_as_pythons():
    for value in (1, 7, np.int64(7), np.uint8(1), np.array(7), torch.tensor(7), 2**63 - 1):
        assert type(integer(value)) is int and integer(value) == value
    for value in (0, 1, 0.5, np.float32(0.5), np.int64(1), np.array(0.5), torch.tensor(0.5)):
        assert fraction(value) == value and type(fraction(value)) in (int, float)
    for value in (-math.inf, math.inf, -1e300, 0):
        assert number(value) is value
    for value in (2**63, -(2**70), Fraction(1, 3), np.longdouble(0.5), np.float16(0.5)):  # PyTorch takes no such number
        assert type(number(value)) is float and number(value) == float(value)


def fraction(value):
    return validation.number("X", "p", value, 0, 1)


def flag(value):
    return validation.flag("X", "f", value)


REFUSED = [
    (integer, ValueError, "n of at least 1", [0, -3, np.int64(-4), True]),
    (integer, ValueError, "n of at most 9223372036854775807", [2**63, 10**30]),
    (integer, TypeError, "an integer n of at least 1", [np.True_, 2.0, np.float64(2), math.nan, "2", None, [2]]),
    (integer, TypeError, "an integer n of at least 1", [np.array([2]), torch.tensor([2]), torch.tensor(True)]),
    (fraction, ValueError, "p in [0, 1]", [1.1, -0.1, np.float32(2), math.nan]),
    (fraction, TypeError, "p in [0, 1]", ["0.5", None, [0.5]]),
    (number, ValueError, "a number as p", [math.nan, 10**400]),
    (number, TypeError, "a number as p", ["a", b"0.5", 1j, np.True_, np.array("1"), torch.tensor([0.5])]),
    (number, TypeError, "a number as p", [np.timedelta64(1, "s"), np.array(1, "m8[ns]")]),
    (lambda value: number(value, 0), ValueError, "p in [0, inf]", [-1]),
    (flag, TypeError, "f as a bool", [1, None, "yes"]),
]


def test_value_of_wrong_type_or_out_of_bounds_is_refused():
    for call, error, needed, values in REFUSED:
        for value in values:
            message = f"X needs {needed}, but got {validation.shown(value)}."
            with pytest.raises(error, match=f"^{re.escape(message)}$"):
                call(value)
    with pytest.raises(TypeError, match="X needs f as a bool, but got True of NumPy"):
        flag(np.True_)
