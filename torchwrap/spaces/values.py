"""Values of spaces: their nested structure and dtypes, and how they become vectors and NumPy arrays and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import Space, spaces
from tensordict import TensorDict
from torch import Tensor

Path: TypeAlias = tuple[str, ...]

Value: TypeAlias = Any
"""A Tensor, or a TensorDict if the space is a `Dict` or `Tuple`."""

_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")

TORCH_DTYPES: dict[str, torch.dtype] = {np.dtype(name).str: getattr(torch, name) for name in _NAMES}
"""The real dtypes with which both NumPy and PyTorch compute, by NumPy's `dtype.str`: not every Dynamo hashes a dtype."""


def children(space: Space[Any]) -> dict[str, Space[Any]] | None:
    """The subspaces of a `Dict` or `Tuple` space by key. None for any other space.

    >>> children(spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]))
    {'0': Discrete(2), '1': Discrete(3)}
    """
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return {str(index): child for index, child in enumerate(space.spaces)}
    return None


def leaves(space: Space[Any], path: Path = ()) -> Iterator[tuple[Path, Space[Any]]]:
    """Yields each leaf of a space, which is a space of single tensors, with its path of keys.

    Raises a ValueError for an empty `Dict` or `Tuple`, and for a `Dict` with a key that is not a string.

    >>> list(leaves(spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2)))))
    [(('a', 'b'), Discrete(2))]
    """
    subspaces = children(space)
    if subspaces is None:
        yield path, space
        return
    if not subspaces or not all(isinstance(key, str) for key in subspaces):
        raise ValueError(f"A Dict or Tuple space needs at least one subspace and string keys, but got {space}.")
    for key, child in subspaces.items():
        yield from leaves(child, (*path, key))


def build(space: Space[Any], make: Callable[[Path, Space[Any]], Tensor], num_envs: int, path: Path = ()) -> Value:
    """Builds a value of a space: `make(path, leaf)` returns the tensor `(num_envs, *leaf.shape)` of each leaf.

    >>> build(spaces.Dict(a=spaces.Discrete(2)), lambda path, leaf: torch.zeros(3), num_envs=3)["a"]
    tensor([0., 0., 0.])
    """
    subspaces = children(space)
    if subspaces is None:
        return make(path, space)
    values = {key: build(child, make, num_envs, (*path, key)) for key, child in subspaces.items()}
    return TensorDict(values, batch_size=[num_envs])


def to_device(value: Value, device: torch.device) -> Value:
    """A value on a device. `TensorDict.to` would wait for the whole device."""
    return value.to(device) if isinstance(value, Tensor) else value.apply(lambda leaf: leaf.to(device))


def dtype(space: Space[Any]) -> torch.dtype:
    """The torch dtype of a leaf space. Raises a TypeError for a space that tensors cannot represent."""
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise TypeError(f"A space needs to be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, but got {space}.")
    if space.dtype.str not in TORCH_DTYPES:
        needed = "A space needs a dtype that PyTorch computes with"
        raise TypeError(f"{needed}, but got {space} of dtype {space.dtype}.")
    return TORCH_DTYPES[space.dtype.str]


def bound(limit: float, to: torch.dtype) -> float:
    """`limit` as a bound for PyTorch's `clamp`: infinite if the float dtype `to` cannot represent it.

    >>> bound(1e300, torch.float32)
    inf
    """
    return limit if abs(limit) <= torch.finfo(to).max else math.copysign(math.inf, limit)


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


def zeros(space: Space[Any], num_envs: int, device: torch.device | str = "cpu") -> Value:
    """A new value with the member of the space that is nearest to zero for each env, as Gymnasium's `create_zero_array`."""

    def make(path: Path, leaf: Space[Any]) -> Tensor:
        zero = np.clip(0, leaf.low, leaf.high) if isinstance(leaf, spaces.Box) else counts(leaf)[1]
        return torch.as_tensor(zero, dtype=dtype(leaf), device=device).expand(num_envs, *(leaf.shape or ())).clone()

    return build(space, make, num_envs)


def tensor(array: Any, device: torch.device | str) -> Tensor:
    """A NumPy array as a tensor on `device`. On the CPU it shares the array's memory, so pass a new array."""
    source = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        source = source.pin_memory()  # for a copy that does not block; the allocator keeps the memory until it is done
    return source.to(device, non_blocking=True)


def from_numpy(space: Space[Any], value: Any, device: torch.device | str = "cpu") -> Value:
    """Copies a batched value of Gymnasium's (an array, or a dict or tuple of them) to tensors on `device`.

    >>> from_numpy(spaces.Tuple([spaces.Discrete(2)]), (np.array([0, 1]),))["0"]
    tensor([0, 1])
    """
    subspaces = children(space)
    if subspaces is None:
        return tensor(np.array(value, space.dtype, order="C"), device)
    values = {str(index): part for index, part in enumerate(value)} if isinstance(value, tuple) else value
    tensors = {key: from_numpy(child, values[key], device) for key, child in subspaces.items()}
    return TensorDict(tensors, batch_size=next(iter(tensors.values())).shape[:1])


def to_numpy(space: Space[Any], value: Value) -> Any:
    """Copies a value to Gymnasium's batched form, the inverse of `from_numpy`."""
    subspaces = children(space)
    if subspaces is None:
        return value.numpy(force=True).copy()
    arrays = {key: to_numpy(child, value[key]) for key, child in subspaces.items()}
    return tuple(arrays.values()) if isinstance(space, spaces.Tuple) else arrays


def flatten(space: Space[Any], value: Value, to: torch.dtype) -> Tensor:
    """Flattens each member to a vector of a dtype, as Gymnasium's `flatten` does: discrete components become one-hot.

    A value with any batch dimensions becomes a tensor `(*batch, flatdim(space))`.

    >>> flatten(spaces.Discrete(3, start=1), torch.tensor([1, 3]), torch.int64)
    tensor([[1, 0, 0],
            [0, 0, 1]])
    """
    subspaces = children(space)
    if subspaces is not None:
        return torch.cat([flatten(child, value[key], to) for key, child in subspaces.items()], -1)
    columns = value.reshape(*value.shape[: value.dim() - len(space.shape or ())], -1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        # Not by `counts`: Dynamo traces `np.ravel` of NumPy's numbers, but not of Python's.
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        sizes, starts = np.ravel(count).tolist(), np.ravel(space.start).tolist()
        ranges = [torch.arange(start, start + size, device=value.device) for size, start in zip(sizes, starts, strict=True)]
        columns = torch.cat([columns[..., index, None] == values for index, values in enumerate(ranges)], -1)
    return columns.to(to)
