"""Checks of arguments: each returns the argument, or raises a TypeError or ValueError."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch

from torchwrap._core.errors import refusal


def _plain(value: Any) -> Any:
    """Turns a scalar of NumPy or PyTorch into Python's."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """The repr of a value. That of NumPy's scalars differs by version, so Python's is taken."""
    return repr(_plain(value))


def described(value: object) -> str:
    """A tensor's shape and dtype, or the type of anything else, as error messages show it."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    layout = "" if value.layout == torch.strided else f" {value.layout}"
    return f"{tuple(value.shape)} {value.dtype}{layout}"


def integer(
    owner: str,
    name: str,
    value: Any,
    at_least: int,
    at_most: int = 2**63 - 1,
) -> int:
    """An integer of Python, NumPy or PyTorch, but no bool, as an int in [at_least, at_most]."""
    number = _plain(value)
    bound = f"at least {at_least}"
    if not isinstance(number, int):
        raise TypeError(refusal(owner, f"{name} must be an integer of {bound}", shown(value)))
    if _is_number(number) and at_least <= number <= at_most:
        return number
    if number > at_most:
        bound = f"at most {at_most}"
    raise ValueError(refusal(owner, f"{name} must be an integer of {bound}", number))


def period(owner: str, value: Any) -> int | None:
    """A number of steps, or None."""
    return None if value is None else integer(owner, "period", value, at_least=1)


def sizes(owner: str, name: str, value: Any, at_least: int) -> Any:
    """A tuple or list of integers, each of at least `at_least`, as a tuple of ints."""
    if not isinstance(value, tuple | list):
        must = f"{name} must be a tuple, such as (64,) or (84, 84)"
        raise TypeError(refusal(owner, must, shown(value)))
    return tuple([integer(owner, f"every size in {name}", size, at_least) for size in value])


def flag(owner: str, name: str, value: Any) -> bool:
    """A bool, and not 0 or 1."""
    if not isinstance(value, bool):
        got = f"{shown(value)} of type {type(value).__name__}"
        raise TypeError(refusal(owner, f"{name} must be a bool", got))
    return value


def function(owner: str, name: str, value: Any) -> Any:
    """A function, or another object that can be called."""
    if not callable(value):
        raise TypeError(refusal(owner, f"{name} must be callable", shown(value)))
    return value


def names(owner: str, name: str, value: Any) -> list[str]:
    """A tuple or list of different strings that are not empty, as a list."""
    parts = value if isinstance(value, tuple | list) else [None]
    is_named = all(isinstance(part, str) and part for part in parts)
    if is_named and len(set(parts)) == len(parts):
        return list(value)
    must = f"{name} must be a list of different, non-empty strings"
    raise TypeError(refusal(owner, must, repr(value)))


def probability(owner: str, name: str, value: Any) -> float:
    """A number in [0, 1)."""
    return number(owner, name, value, 0, math.nextafter(1, 0), "in [0, 1)")


def positive(owner: str, name: str, value: Any) -> float:
    """A finite number above 0."""
    return number(owner, name, value, math.ulp(0.0), sys.float_info.max, "finite and above 0")


def number(
    owner: str,
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    needed: str = "",
) -> float:
    """A real number in [low, high]: an int if it fits int64, else a float. NaN is out of range.

    `needed` describes the range in the message; by default it is the interval.
    """
    if not needed:
        is_bounded = (low, high) != (-math.inf, math.inf)
        needed = f"in [{low:g}, {high:g}]" if is_bounded else "a number"
    text = refusal(owner, f"{name} must be {needed}", shown(value))
    number = _plain(value)
    if not _is_number(number):
        raise TypeError(text)
    if abs(number) >= 2**63:
        try:
            number = float(number)
        except OverflowError:
            number = math.nan
    if not low <= number <= high:
        raise ValueError(text)
    return number  # type: ignore[no-any-return]


def on_host(value: Any) -> Any:
    """A tensor, perhaps on a GPU or with a gradient, as a NumPy array; other values as they are."""
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else value


def numbers(
    owner: str,
    name: str,
    value: Any,
    low: float,
    high: float = sys.float_info.max,
) -> Any:
    """Real numbers in [low, high], alone or in nested lists, which a spec can hold as JSON."""
    array = np.array(on_host(value))
    fits = array.dtype.kind in "iuf" and array.size > 0
    if fits:
        # A number of Python, because NumPy would round `high` to float32, and so to infinity.
        lowest = array.min().item()
        fits = low <= lowest <= array.max().item() <= high
    if not fits:
        must = f"{name} must be finite numbers in [{low:g}, {high:g}]"
        raise ValueError(refusal(owner, must, repr(value)))
    return array.tolist()


def tensor(
    owner: str,
    name: str,
    value: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    remedy: str = "",
    kind: type[Exception] = ValueError,
) -> None:
    """Raises unless a value is a tensor of a shape, dtype and device.

    `kind` is the error for another type or dtype. For the rest, it is a ValueError.
    """
    got = type(value).__name__
    if isinstance(value, torch.Tensor):
        is_placed = value.shape == shape and value.device == device
        if is_placed and value.dtype == dtype and value.layout == torch.strided:
            return
        got = f"{described(value)} on {value.device}"
        if not is_placed:
            kind = ValueError
    must = f"{name} must have shape {tuple(shape)} and dtype {dtype}, on {device}"
    raise kind(refusal(owner, must, got, remedy))


def device(owner: str, value: Any) -> torch.device:
    """A device or its name as a `torch.device`."""
    try:
        return torch.device(value)
    except (TypeError, RuntimeError) as error:
        text = refusal(owner, "device must be a torch.device or its name", shown(value))
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(text) from None


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
