"""Checks of single arguments, which say whose argument it is, what is needed, and what came."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import numpy as np
import torch


def _real(value: Any) -> Any:
    """One real number of Python's, NumPy's or PyTorch's, as Python's; None for all else: bools, text, spans of time, lists."""
    if getattr(value, "ndim", None) == 0 and getattr(value.dtype, "kind", None) not in ("m", "M"):
        value = value.item()
    return value if isinstance(value, numbers.Real) and not isinstance(value, bool | np.timedelta64) else None


def integer(owner: str, name: str, value: Any, at_least: int, at_most: int = 2**63 - 1) -> int:
    """`value` as an int, NumPy's and PyTorch's integers included.

    >>> integer("TimeLimit", "max_episode_steps", 0, at_least=1)
    Traceback (most recent call last):
    ValueError: TimeLimit needs max_episode_steps of at least 1, but got 0.
    """
    given = _real(value)
    if not isinstance(given, int) and not isinstance(value, bool):
        raise TypeError(f"{owner} needs an integer {name} of at least {at_least}, but got {value!r}.")
    if isinstance(value, bool) or given < at_least:
        raise ValueError(f"{owner} needs {name} of at least {at_least}, but got {value!r}.")
    if given > at_most:
        raise ValueError(f"{owner} needs {name} of at most {at_most}, but got {value!r}.")
    return given


def sizes(owner: str, name: str, value: Any, at_least: int) -> tuple[int, ...]:
    """`value`, a tuple or list of integers, as a tuple.

    >>> sizes("ReshapeObservation", "shape", 84, at_least=1)
    Traceback (most recent call last):
    TypeError: ReshapeObservation needs shape as a tuple, but got 84.
    """
    if not isinstance(value, tuple | list):
        raise TypeError(f"{owner} needs {name} as a tuple, but got {value!r}.")
    return tuple([integer(owner, name, size, at_least) for size in value])


def flag(owner: str, name: str, value: Any) -> bool:
    """`value`, True or False itself.

    >>> flag("GrayscaleObservation", "keep_dim", 1)
    Traceback (most recent call last):
    TypeError: GrayscaleObservation needs keep_dim as a bool, but got 1.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{owner} needs {name} as a bool, but got {value!r}.")
    return value


def probability(owner: str, name: str, value: Any) -> float:
    """`value`, a number in [0, 1).

    >>> probability("StickyAction", "repeat_action_probability", 1)
    Traceback (most recent call last):
    ValueError: StickyAction needs repeat_action_probability in [0, 1), but got 1.
    """
    return number(owner, name, value, 0, math.nextafter(1, 0), f"{name} in [0, 1)")


def positive(owner: str, name: str, value: Any) -> float:
    """`value`, a finite number above 0.

    >>> positive("NormalizeReward", "epsilon", 0)
    Traceback (most recent call last):
    ValueError: NormalizeReward needs a finite epsilon above 0, but got 0.
    """
    return number(owner, name, value, math.ulp(0.0), sys.float_info.max, f"a finite {name} above 0")


def number(
    owner: str, name: str, value: Any, low: float = -math.inf, high: float = math.inf, needed: str | None = None
) -> float:
    """`value`, a number in [low, high], which the error calls `needed`; an int only where PyTorch takes it.

    >>> number("NormalizeReward", "gamma", 2, 0, 1)
    Traceback (most recent call last):
    ValueError: NormalizeReward needs gamma in [0, 1], but got 2.
    """
    if needed is None:
        bounded = (low, high) != (-math.inf, math.inf)
        needed = f"{name} in [{low:g}, {high:g}]" if bounded else f"a number as {name}"
    given = _real(value)
    if given is None:
        raise TypeError(f"{owner} needs {needed}, but got {value!r}.")
    try:
        given = given if isinstance(given, int) and abs(given) < 2**63 else float(given)
    except OverflowError:
        given = math.nan
    if not low <= given <= high:
        raise ValueError(f"{owner} needs {needed}, but got {value!r}.")
    return given


def device(owner: str, value: Any) -> torch.device:
    """`value` as a device.

    >>> device("make", "nope")
    Traceback (most recent call last):
    ValueError: make needs a device of PyTorch's, but got 'nope'.
    """
    try:
        return torch.device(value)
    except (TypeError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{owner} needs a device of PyTorch's, but got {value!r}.") from None
