"""Checks of arguments. Each function returns the argument, or raises a TypeError for its type, a ValueError for its range."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import numpy as np
import torch

from torchwrap._core.errors import refusal


def _real(value: Any) -> Any:
    """A real number of Python, NumPy or PyTorch as Python's; None for anything else: bools, strings, timedeltas, lists."""
    if getattr(value, "ndim", None) == 0 and getattr(value.dtype, "kind", None) not in ("m", "M"):
        value = value.item()
    return (
        value
        if isinstance(value, numbers.Real) and not isinstance(value, bool | np.timedelta64)
        else None
    )


def shown(value: Any) -> str:
    """A value as error messages show it: its repr, but a scalar of NumPy as Python's, because its repr differs by version."""
    if isinstance(value, np.number | np.bool_):
        return str(value)
    return repr(value.item() if isinstance(value, np.character) else value)


def described(value: object) -> str:
    """A tensor's shape and dtype, or the type of anything else, as error messages show it."""
    return (
        f"{tuple(value.shape)} {value.dtype}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )


def integer(owner: str, name: str, value: Any, at_least: int, at_most: int = 2**63 - 1) -> int:
    """An integer of Python, NumPy or PyTorch, but no bool, as an int in [at_least, at_most]."""
    real = _real(value)
    if not isinstance(real, int) or real < at_least:
        kind = ValueError if isinstance(real, int) or isinstance(value, bool) else TypeError
        raise kind(
            f"{owner} needs {name} as an integer of at least {at_least}, but got {shown(value)}."
        )
    if real > at_most:
        raise ValueError(
            f"{owner} needs {name} as an integer of at most {at_most}, but got {shown(value)}."
        )
    return real


def sizes(owner: str, name: str, value: Any, at_least: int) -> tuple[int, ...]:
    """A tuple or list of integers, each of at least `at_least`, as a tuple of ints."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{owner} needs {name} as a tuple, but got {shown(value)}.")
    return tuple([integer(owner, f"every size in {name}", size, at_least) for size in value])


def flag(owner: str, name: str, value: Any) -> bool:
    """A bool, and not 0 or 1."""
    if not isinstance(value, bool):
        of = "NumPy's " * isinstance(value, np.bool_)
        raise TypeError(f"{owner} needs {name} as a bool, but got {of}{shown(value)}.")
    return value


def function(owner: str, name: str, value: Any) -> Any:
    """A function, or another object that can be called."""
    if not callable(value):
        raise TypeError(f"{owner} needs a callable {name}, but got {shown(value)}.")
    return value


def names(owner: str, name: str, value: Any) -> list[str]:
    """A tuple or list of different strings that are not empty, as a list."""
    parts = value if isinstance(value, tuple | list) else [None]
    if not all(isinstance(part, str) and part for part in parts) or len(set(parts)) < len(parts):
        raise TypeError(
            f"{owner} needs {name} as a list of different, non-empty strings, but got {value!r}."
        )
    return list(value)


def probability(owner: str, name: str, value: Any) -> float:
    """A number in [0, 1)."""
    return number(owner, name, value, 0, math.nextafter(1, 0), f"{name} in [0, 1)")


def positive(owner: str, name: str, value: Any) -> float:
    """A finite number above 0."""
    return number(owner, name, value, math.ulp(0.0), sys.float_info.max, f"a finite {name} above 0")


def number(
    owner: str,
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    needed: str = "",
) -> float:
    """A real number of Python, NumPy or PyTorch in [low, high]: an int if it fits int64, else a float. NaN is out of range."""
    if not needed:  # in the error message, by default the interval
        bounded = (low, high) != (-math.inf, math.inf)
        needed = f"{name} in [{low:g}, {high:g}]" if bounded else f"a number as {name}"
    if (real := _real(value)) is None:
        raise TypeError(f"{owner} needs {needed}, but got {shown(value)}.")
    try:
        real = real if isinstance(real, int) and abs(real) < 2**63 else float(real)
    except OverflowError:
        real = math.nan
    if not low <= real <= high:
        raise ValueError(f"{owner} needs {needed}, but got {shown(value)}.")
    return real


def fill(owner: str, value: Any, dtype: Any) -> Any:
    """A number of Python, NumPy or PyTorch as Python's, if a tensor of this dtype holds it."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{owner} needs a torch.dtype, but got {shown(dtype)}.")
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    try:
        held = torch.full((), number, dtype=dtype, device="cpu").item()
    except (TypeError, RuntimeError):
        held = None
    rounds = dtype.is_floating_point or dtype.is_complex
    if held is None or (held != number and not (rounds and abs(held) != math.inf)):
        kind = TypeError if _real(value) is None else ValueError
        raise kind(f"{owner} needs a fill that {dtype} can represent, but got {shown(value)}.")
    return number


def device(owner: str, value: Any) -> torch.device:
    """A device or its name as a `torch.device`."""
    try:
        return torch.device(value)
    except (TypeError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{owner} needs a torch.device or its name, but got {shown(value)}.") from None


def interval(
    owner: str, name: str, value: Any, at_least: int, at_most: int = 2**63 - 1
) -> tuple[int, int]:
    """A pair of integers (lowest, highest) in [at_least, at_most]. An integer is both."""
    bounds = value if isinstance(value, tuple | list) else (value, value)
    if len(bounds) != 2:
        must = f"{name} must be an integer or a pair (lowest, highest)"
        raise ValueError(refusal(owner, must, shown(value)))
    lowest = integer(owner, name, bounds[0], at_least, at_most)
    return lowest, integer(owner, name, bounds[1], lowest, at_most)


def text(owner: str, name: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise TypeError(refusal(owner, f"{name} must be a non-empty string", shown(value)))
    return value


def choice(owner: str, name: str, value: Any, *choices: str) -> Any:
    """One of several strings."""
    if not isinstance(value, str) or value not in choices:
        must = f"{name} must be {' or '.join(map(repr, choices))}"
        raise ValueError(refusal(owner, must, shown(value)))
    return value
