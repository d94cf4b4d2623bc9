"""Validation of spaces, and of values against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import Space, spaces
from tensordict import TensorDictBase
from torch import Tensor

from torchwrap._core.rows import is_host_readable
from torchwrap.spaces.values import TORCH_DTYPES, Value, children, counts, dtype, leaves, zeros

REWARD: spaces.Box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
"""The space of a reward: any float32 number."""


def optional_space(owner: str, name: str, space: object) -> Space[Any] | None:
    """Returns an argument that is a supported space or None. Raises a TypeError or ValueError for anything else."""
    if space is None:
        return None
    if not isinstance(space, Space):
        raise TypeError(f"{owner} needs a gymnasium Space as {name}, but got {space!r}.")
    try:
        for _, leaf in leaves(space):
            dtype(leaf)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{owner} needs an {name} that tensors can hold, but got {space}: {error}") from error
    return space


def box(owner: str, what: str, space: Space[Any], of: Literal["", "numbers", "floats"] = "") -> spaces.Box:
    """Returns the space if it is a Box, of "numbers" (not bools) or "floats" if asked for. Raises a TypeError otherwise."""
    if not isinstance(space, spaces.Box) or space.dtype.kind not in {"": "biuf", "numbers": "iuf", "floats": "f"}[of]:
        raise TypeError(f"{owner} needs a Box {what} space{of and f' of {of}'}, but got {space}.")
    return space


def outside(space: Space[Any], value: Tensor) -> Tensor:
    """Which components of a leaf's batched value are out of bounds: bool, of the same shape. NaN is out of bounds."""
    if isinstance(space, spaces.Box):
        low, high = (torch.as_tensor(bound, device=value.device) for bound in (space.low, space.high))
        return ~((value >= low) & (value <= high))
    count, start = (torch.as_tensor(number, device=value.device) for number in counts(space))
    value = value.long()
    return (value < start) | (value >= start + count)


def contains(space: Space[Any], value: Value) -> bool:
    """Whether every row of a batched value lies in the space: structure, shape, dtype and bounds. Waits for the device."""
    subspaces = children(space)
    if subspaces is not None:
        is_dict = isinstance(value, TensorDictBase) and set(value.keys()) == set(subspaces)
        return is_dict and all(contains(child, value[key]) for key, child in subspaces.items())
    is_like = isinstance(value, Tensor) and value.dtype == dtype(space) and value.shape[1:] == (space.shape or ())
    return is_like and not outside(space, value).any()


def check(owner: str, what: str, space: Space[Any], value: object, num_envs: int, device: torch.device) -> None:
    """Raises a TypeError or ValueError unless a value has the structure, shape, dtype and device that the space requires.

    `owner` and `what` begin the message. The bounds of discrete spaces are checked too if the host can read the values without
    a device sync.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        subspaces = children(space) or {}
        if not isinstance(value, TensorDictBase) or set(value.keys()) != set(subspaces):
            got = sorted(value.keys()) if isinstance(value, TensorDictBase) else type(value).__name__
            raise TypeError(f"{owner} needs {what} as a TensorDict with keys {sorted(subspaces)}, but got {got}.")
        for key, child in subspaces.items():
            check(owner, f"{what}[{key!r}]", child, value[key], num_envs, device)
        return
    # The check of a single tensor is part of every eager step, so it calls few functions and operators.
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner} needs {what} as a torch.Tensor, but got {type(value).__name__}.")
    shape = (num_envs, *(space.shape or ()))
    if value.shape != shape:
        raise ValueError(f"{owner} needs {what} of shape {shape} (num_envs first), but got {tuple(value.shape)}.")
    if value.dtype != TORCH_DTYPES[space.dtype.str]:  # type: ignore[union-attr]
        raise TypeError(f"{owner} needs {what} of dtype {dtype(space)} for {space}, but got {value.dtype}.")
    if value.device != device:
        raise ValueError(f"{owner} needs {what} on device {device}, but got {value.device}.")
    if isinstance(space, spaces.Box) or not is_host_readable(value):
        return
    if isinstance(space, spaces.Discrete):
        low, high = value.aminmax()
        is_inside = int(low) >= space.start and int(high) < space.start + space.n
    else:
        is_inside = not outside(space, value).any()
    if not is_inside:
        raise ValueError(f"{owner} needs {what} in {space}, but got values from {value.min()} to {value.max()}.")


def check_function(
    owner: str,
    what: str,
    func: Callable[[Value], Value],
    takes: Space[Any],
    returns: Space[Any],
    num_envs: int,
    device: torch.device,
) -> None:
    """Calls a function with zeros. Raises a TypeError or ValueError if it raises, or if `check` does for its result."""
    try:
        result = func(zeros(takes, num_envs, device))
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{owner} needs a func that takes {what}, but got {type(error).__name__}: {error}") from error
    check(owner, f"func to return {what}", returns, result, num_envs, device)
