"""What a deployed policy says about itself, as JSON can represent it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import spec as specs


def of(env: Any, chain: Any, rows: dict[str, Tensor]) -> dict[str, Any]:
    """The metadata of a deployed policy, whose state has these rows."""
    import torchwrap

    return {
        "torchwrap": torchwrap.__version__,
        "env": env._name(),
        "observation": of_space(chain.observation_space),
        "action": of_space(chain.action_space),
        "state": {
            name: {"shape": list(row.shape[1:]), "dtype": str(row.dtype).removeprefix("torch.")} for name, row in rows.items()
        },
        "transforms": chain.shown,
        "left_out": chain.left_out,
    }


def of_space(space: Space[Any]) -> dict[str, Any]:
    """A space: its kind, and for a leaf its shape, dtype and values. Bounds are one number if all of them are equal.

    >>> of_space(gym_spaces.Box(-1, np.inf, (2,)))
    {'type': 'Box', 'shape': [2], 'dtype': 'float32', 'low': -1.0, 'high': None}
    """
    found: dict[str, Any] = {"type": type(space).__name__}
    children = spaces.children(space)
    if children is not None:
        return {**found, "spaces": {key: of_space(child) for key, child in children.items()}}
    found |= {"shape": list(space.shape or ()), "dtype": str(np.dtype(space.dtype))}
    if isinstance(space, gym_spaces.Box):
        return {**found, "low": _bounds(space.low), "high": _bounds(space.high)}
    if isinstance(space, gym_spaces.Discrete):
        return {**found, "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym_spaces.MultiDiscrete):
        return {**found, "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    return found


def _bounds(bound: np.ndarray[Any, Any]) -> Any:
    # JSON has no infinity: None is no bound.
    values = bound.astype(object)
    values[~np.isfinite(bound)] = None
    first = values.flat[0] if values.size else None
    return first if all(value == first for value in values.flat) else values.tolist()


def of_part(part: Any) -> str:
    """A transform or wrapper as the code that makes it, if it has a repr or a spec."""
    if not hasattr(part, "env"):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(part))  # the addresses of functions
    try:
        arguments = specs.record(part).kwargs or {}
    except ValueError:
        return f"{type(part).__name__}(...)"
    return f"{type(part).__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
