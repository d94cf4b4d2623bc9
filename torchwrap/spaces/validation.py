"""Validation of spaces, and of values against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from tensordict import TensorDictBase
from torch import Tensor

from torchwrap._core.rows import is_host_readable
from torchwrap.spaces.conversion import dtype, zeros
from torchwrap.spaces.traversal import Value, children, leaves

REWARD: spaces.Box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
"""The space of a reward: any float32 number."""


def check_supported(space: Space[Any]) -> None:
    """Checks that tensors can represent the values of a space.

    Raises:
        TypeError, ValueError: for a space, subspace or dtype that is not supported.
    """
    for _, leaf in leaves(space):
        dtype(leaf)


def optional_space(owner: str, name: str, space: object) -> Space[Any] | None:
    """Returns an argument that has to be a supported space or None.

    Raises:
        TypeError, ValueError: for anything else, in the name of `owner`.

    >>> optional_space("TransformAction", "action_space", 3)
    Traceback (most recent call last):
    TypeError: TransformAction needs a gymnasium Space as action_space, but got 3.
    """
    if space is None:
        return None
    if not isinstance(space, Space):
        raise TypeError(f"{owner} needs a gymnasium Space as {name}, but got {space!r}.")
    try:
        check_supported(space)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{owner} needs an {name} that tensors can hold, but got {space}: {error}") from error
    return space


def box(owner: str, what: str, space: Space[Any], of: Literal["", "numbers", "floats"] = "") -> spaces.Box:
    """Returns the space if it is a Box, optionally of "numbers" (not bools) or "floats" only.

    Raises:
        TypeError: for any other space, in the name of `owner`, which needs it as its `what` space.

    >>> box("ClipAction", "action", spaces.Discrete(2), of="floats")
    Traceback (most recent call last):
    TypeError: ClipAction needs a Box action space of floats, but got Discrete(2).
    """
    if not isinstance(space, spaces.Box) or space.dtype.kind not in {"": "biuf", "numbers": "iuf", "floats": "f"}[of]:
        raise TypeError(f"{owner} needs a Box {what} space{of and f' of {of}'}, but got {space}.")
    return space


def counts(space: Space[Any]) -> tuple[Any, Any]:
    """The number of values of each component of a discrete leaf, and the smallest: arrays of `MultiDiscrete`, else ints.

    >>> counts(spaces.Discrete(3, start=1)), counts(spaces.MultiBinary(2))
    ((3, 1), (2, 0))
    """
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.astype(np.int64), space.start.astype(np.int64)
    if isinstance(space, spaces.Discrete):
        return int(space.n), int(space.start)
    return 2, 0


def contains(space: Space[Any], value: Value) -> bool:
    """Whether every row of a batched value lies in the space: shape, dtype and bounds. Synchronizes with the device.

    >>> contains(spaces.Discrete(2), torch.tensor([0, 1, 2]))
    False
    """
    subspaces = children(space)
    if subspaces is not None:
        if not isinstance(value, TensorDictBase) or set(value.keys()) != set(subspaces):
            return False
        return all(contains(child, value[key]) for key, child in subspaces.items())
    if not isinstance(value, Tensor) or value.dtype != dtype(space) or value.shape[1:] != (space.shape or ()):
        return False
    return _in_bounds(space, value)


def _in_bounds(space: Space[Any], value: Tensor) -> bool:
    if isinstance(space, spaces.Discrete):  # the common case of actions, which are checked at every step
        low, high = value.aminmax()
        return bool(int(low) >= space.start and int(high) < space.start + space.n)
    return not outside(space, value).any()


def outside(space: Space[Any], value: Tensor) -> Tensor:
    """Which components of a leaf's batched value are out of bounds: bool, of the same shape. NaN is out of bounds.

    >>> outside(spaces.Box(-1, 1, (2,)), torch.tensor([[0.0, 2.0]]))
    tensor([[False,  True]])
    """
    if isinstance(space, spaces.Box):
        low, high = (torch.as_tensor(bound, device=value.device) for bound in (space.low, space.high))
        return ~((value >= low) & (value <= high))
    count, start = (torch.as_tensor(number, device=value.device) for number in counts(space))
    value = value.long()
    return (value < start) | (value >= start + count)


# Up to so many discrete actions, out of so many values, a lookup of each in a set takes less time than an operator.
_FEW, _FEW_VALUES = 64, 256


class Form(NamedTuple):
    """What batched values of a leaf have in common: what `check` looks at, in a fifth of its time.

    >>> form = Form.of(spaces.Discrete(2), 2, torch.device("cpu"))
    >>> form.fits(torch.tensor([0, 1])), form.fits(torch.tensor([0, 2]))
    (True, False)
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    values: frozenset[int] | None
    """Of a `Discrete` space."""

    @classmethod
    def of(cls, space: Space[Any], num_envs: int, device: torch.device) -> Form | None:
        """The form of a `Box` space; of a `Discrete` space if it is small and the values are few; None for others."""
        values = None
        if isinstance(space, spaces.Discrete) and num_envs <= _FEW and space.n <= _FEW_VALUES:
            values = frozenset(range(int(space.start), int(space.start + space.n)))
        elif not isinstance(space, spaces.Box):
            return None
        return cls(torch.Size((num_envs, *(space.shape or ()))), dtype(space), device, values)

    def fits(self, value: Tensor) -> bool:
        """Whether `check` accepts the tensor."""
        shape, dtype, device, values = self
        if value.shape != shape or value.dtype != dtype or value.device != device:
            return False
        return values is None or not is_host_readable(value) or values.issuperset(value.tolist())


def check(owner: str, what: str, space: Space[Any], value: object, num_envs: int, device: torch.device) -> None:
    """Checks that a batched value has the structure, shape, dtype and device that the space requires.

    The bounds of discrete spaces are checked too if the host can read the values without a device sync.

    Raises:
        TypeError, ValueError: if not, in the name of `owner`, which needs the value as `what`.

    >>> check("CartPole-v1", "an action", spaces.Discrete(2), torch.tensor([0, 2]), 2, torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: CartPole-v1 needs an action in Discrete(2), but got values from 0 to 2.
    """
    if (subspaces := children(space)) is not None:
        if not isinstance(value, TensorDictBase) or set(value.keys()) != set(subspaces):
            got = sorted(value.keys()) if isinstance(value, TensorDictBase) else type(value).__name__
            raise TypeError(f"{owner} needs {what} as a TensorDict with keys {sorted(subspaces)}, but got {got}.")
        for key, child in subspaces.items():
            check(owner, f"{what}[{key!r}]", child, value[key], num_envs, device)
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner} needs {what} as a torch.Tensor, but got {type(value).__name__}.")
    shape = (num_envs, *(space.shape or ()))
    if value.shape != shape:
        raise ValueError(f"{owner} needs {what} of shape {shape} (num_envs first), but got {tuple(value.shape)}.")
    if value.dtype != (to := dtype(space)):
        raise TypeError(f"{owner} needs {what} of dtype {to} for {space}, but got {value.dtype}.")
    if value.device != device:
        raise ValueError(f"{owner} needs {what} on device {device}, but got {value.device}.")
    if not isinstance(space, spaces.Box) and is_host_readable(value) and not _in_bounds(space, value):
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
    """Calls a function with zeros, and checks that it maps batched values of one space to another.

    Raises:
        TypeError, ValueError: if it raises, or returns a value that does not fit, in the name of `owner`.
    """
    try:
        result = func(zeros(takes, num_envs, device))
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{owner} needs a func that takes {what}, but got {type(error).__name__}: {error}") from error
    check(owner, f"func to return {what}", returns, result, num_envs, device)
