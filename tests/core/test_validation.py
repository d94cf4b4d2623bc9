from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from torchwrap._core import validation


@pytest.mark.parametrize("value", [1, 7, np.int64(7), np.uint8(1), np.array(7), torch.tensor(7), 2**63 - 1])
def test_integer_is_returned_as_int(value):
    given = validation.integer("X", "n", value, at_least=1)
    assert type(given) is int and given == value


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "X needs n of at least 1, but got 0."),
        (-3, ValueError, "X needs n of at least 1, but got -3."),
        (np.int64(0), ValueError, "X needs n of at least 1, but got 0."),
        (True, ValueError, "X needs n of at least 1, but got True."),
        (np.True_, TypeError, "X needs an integer n of at least 1, but got True."),
        (2.0, TypeError, "X needs an integer n of at least 1, but got 2.0."),
        (np.float64(2), TypeError, "X needs an integer n of at least 1, but got 2.0."),
        (math.nan, TypeError, "X needs an integer n of at least 1, but got nan."),
        ("2", TypeError, "X needs an integer n of at least 1, but got '2'."),
        (None, TypeError, "X needs an integer n of at least 1, but got None."),
        ([2], TypeError, "X needs an integer n of at least 1, but got [2]."),
        (np.array([2]), TypeError, "X needs an integer n of at least 1, but got array([2])."),
        (torch.tensor([2]), TypeError, "X needs an integer n of at least 1, but got tensor([2])."),
        (torch.tensor(True), TypeError, "X needs an integer n of at least 1, but got tensor(True)."),
        (2**63, ValueError, "X needs n of at most 9223372036854775807, but got 9223372036854775808."),
        (10**30, ValueError, f"X needs n of at most 9223372036854775807, but got {10**30}."),
    ],
)
def test_integer_of_wrong_type_or_out_of_bounds_is_refused(value, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        validation.integer("X", "n", value, at_least=1)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), np.int64(1), np.array(0.5), torch.tensor(0.5)])
def test_number_is_returned_with_its_value(value):
    given = validation.number("X", "p", value, 0, 1)
    assert given == value and type(given) in (int, float)


@pytest.mark.parametrize("value", [-math.inf, math.inf, -1e300, 0])
def test_number_without_bounds_is_returned_unchanged(value):
    assert validation.number("X", "p", value) is value


@pytest.mark.parametrize("value", [2**63, -(2**70), Fraction(1, 3), np.longdouble(0.5), np.float16(0.5)])
def test_number_that_pytorch_does_not_take_becomes_float(value):
    given = validation.number("X", "p", value)
    assert type(given) is float and given == float(value)


@pytest.mark.parametrize(
    ("value", "bounds", "error", "message"),
    [
        (1.1, (0, 1), ValueError, "X needs p in [0, 1], but got 1.1."),
        (-0.1, (0, 1), ValueError, "X needs p in [0, 1], but got -0.1."),
        (np.float32(2), (0, 1), ValueError, "X needs p in [0, 1], but got 2.0."),
        (math.nan, (0, 1), ValueError, "X needs p in [0, 1], but got nan."),
        (math.nan, (), ValueError, "X needs a number as p, but got nan."),
        (-1, (0,), ValueError, "X needs p in [0, inf], but got -1."),
        ("a", (), TypeError, "X needs a number as p, but got 'a'."),
        ("0.5", (0, 1), TypeError, "X needs p in [0, 1], but got '0.5'."),
        (None, (0, 1), TypeError, "X needs p in [0, 1], but got None."),
        ([0.5], (0, 1), TypeError, "X needs p in [0, 1], but got [0.5]."),
        (1j, (), TypeError, "X needs a number as p, but got 1j."),
        (np.True_, (), TypeError, "X needs a number as p, but got True."),
        (b"0.5", (), TypeError, "X needs a number as p, but got b'0.5'."),
        (np.array("1"), (), TypeError, "X needs a number as p, but got array('1', dtype='<U1')."),
        (np.timedelta64(1, "s"), (), TypeError, "X needs a number as p, but got 1 seconds."),
        (np.array(1, "m8[ns]"), (), TypeError, "X needs a number as p, but got array(1, dtype='timedelta64[ns]')."),
        (torch.tensor([0.5]), (), TypeError, "X needs a number as p, but got tensor([0.5000])."),
        (10**400, (), ValueError, f"X needs a number as p, but got {10**400}."),
    ],
)
def test_number_of_wrong_type_or_out_of_bounds_is_refused(value, bounds, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        validation.number("X", "p", value, *bounds)


@pytest.mark.parametrize(("value", "shown"), [(1, "1"), (None, "None"), ("yes", "'yes'"), (np.True_, "True of NumPy")])
def test_flag_that_is_no_bool_of_python_is_refused(value, shown):
    with pytest.raises(TypeError, match=f"^X needs f as a bool, but got {shown}.$"):
        validation.flag("X", "f", value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[(kind(3), "3") for kind in (np.int8, np.int64, np.uint8, np.longlong)],
        *[(kind(0.5), "0.5") for kind in (np.float16, np.float32, np.float64, np.longdouble)],
        *[(np.float32("inf"), "inf"), (np.False_, "False"), (np.complex64(1j), "1j")],
        *[(np.str_("a"), "'a'"), (np.bytes_(b"a"), "b'a'"), ("a", "'a'"), (b"a", "b'a'"), (3, "3"), ([1], "[1]")],
        *[(np.array(3), "array(3)"), (torch.tensor(3), "tensor(3)"), (None, "None")],
    ],
)
def test_numpy_scalar_is_shown_as_pythons_by_every_version(value, shown):
    assert validation.shown(value) == shown
