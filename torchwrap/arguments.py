"""Checks of single arguments, which say whose argument it is, what is needed, and what came."""

from __future__ import annotations

import math
import operator
from typing import Any


def integer(owner: str, name: str, value: Any, at_least: int) -> int:
    """`value` as an int, NumPy's integers included.

    >>> integer("TimeLimit", "max_episode_steps", 0, at_least=1)
    Traceback (most recent call last):
    ValueError: TimeLimit needs max_episode_steps of at least 1, but got 0.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner} needs an integer {name} of at least {at_least}, but got {value!r}.") from None
    if isinstance(value, bool) or number < at_least:
        raise ValueError(f"{owner} needs {name} of at least {at_least}, but got {value!r}.")
    return number


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
    given = number(owner, name, value, 0, 1)
    if given == 1:
        raise ValueError(f"{owner} needs {name} in [0, 1), but got {value!r}.")
    return given


def number(
    owner: str, name: str, value: Any, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> float:
    """`value`, a number in [low, high] and greater than `above`.

    >>> number("NormalizeReward", "gamma", 2, 0, 1)
    Traceback (most recent call last):
    ValueError: NormalizeReward needs gamma in [0, 1], but got 2.
    """
    if above > -math.inf:
        needed = f"{name} above {above:g}"
    elif (low, high) != (-math.inf, math.inf):
        needed = f"{name} in [{low:g}, {high:g}]"
    else:
        needed = f"a number as {name}"
    try:
        if isinstance(value, bool | str):
            raise TypeError
        given = value if isinstance(value, int) else float(value)
        inside = low <= given <= high and (given > above or above == -math.inf)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{owner} needs {needed}, but got {value!r}.") from None
    if not inside:
        raise ValueError(f"{owner} needs {needed}, but got {value!r}.")
    return given
