"""Conversion: dtypes, zeros, flat vectors, and NumPy arrays to tensors and back."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.wrappers.utils import create_zero_array
from tensordict import TensorDict
from torch import Tensor

from torchwrap.spaces.traversal import Value, build, children


@functools.cache
def torch_dtype(to: np.dtype[Any]) -> torch.dtype | None:
    """The torch dtype of a NumPy dtype, or None if it is not a real dtype for which PyTorch implements arithmetic.

    >>> torch_dtype(np.dtype("uint8")), torch_dtype(np.dtype("uint32"))
    (torch.uint8, None)
    """
    try:
        found = torch.from_numpy(np.empty(0, to)).dtype
    except (TypeError, ValueError):
        return None
    # PyTorch can store these three dtypes, but implements almost no operators for them.
    return found if to.kind in "biuf" and found not in (torch.uint16, torch.uint32, torch.uint64) else None


def dtype(space: Space[Any]) -> torch.dtype:
    """The torch dtype of a leaf space.

    Raises:
        TypeError: for a space that tensors cannot represent.

    >>> dtype(spaces.Box(0, 255, (2, 2), np.uint8))
    torch.uint8
    """
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise TypeError(f"A space needs to be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, but got {space}.")
    found = torch_dtype(np.dtype(space.dtype))
    if found is None:
        raise TypeError(f"A space needs a dtype that PyTorch computes with, but got {space} of dtype {space.dtype}.")
    return found


def bound(limit: float, to: torch.dtype) -> float:
    """`limit` as a bound for PyTorch's `clamp`: infinite if the float dtype `to` cannot represent it.

    >>> bound(1e300, torch.float32)
    inf
    """
    return limit if abs(limit) <= torch.finfo(to).max else math.copysign(math.inf, limit)


def zeros(space: Space[Any], num_envs: int, device: torch.device | str = "cpu") -> Value:
    """A new value with the member of the space that is nearest to zero (Gymnasium's `create_zero_array`) for each env.

    >>> zeros(spaces.Discrete(3, start=1), num_envs=2)
    tensor([1, 1])
    """

    def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
        zero = torch.as_tensor(create_zero_array(leaf), dtype=dtype(leaf), device=device)
        return zero.expand(num_envs, *zero.shape).clone()

    return build(space, make, num_envs)


def from_numpy(space: Space[Any], value: Any, device: torch.device | str = "cpu") -> Value:
    """Copies a batched value of Gymnasium's (an array, or a dict or tuple of them) to tensors on `device`.

    >>> from_numpy(spaces.Tuple([spaces.Discrete(2)]), (np.array([0, 1]),))["0"]
    tensor([0, 1])
    """
    subspaces = children(space)
    if subspaces is not None:
        values = dict(enumerate(value)) if isinstance(value, tuple) else value
        named = {key: values[int(key) if isinstance(value, tuple) else key] for key in subspaces}
        tensors = {key: from_numpy(child, named[key], device) for key, child in subspaces.items()}
        return TensorDict(tensors, batch_size=next(iter(tensors.values())).shape[:1])
    return tensor(np.array(value, space.dtype, order="C"), device)


def tensor(array: Any, device: torch.device | str) -> Tensor:
    """A NumPy array as a tensor on `device`. On the CPU it shares the array's memory, so pass a new array.

    Copies to CUDA go through pinned memory and do not block; PyTorch's host allocator keeps that memory until they are done.
    """
    source, kind = torch.from_numpy(array), (torch.device(device) if isinstance(device, str) else device).type
    if kind == "cpu":
        return source
    return (source.pin_memory() if kind == "cuda" else source).to(device, non_blocking=True)


def to_numpy(space: Space[Any], value: Value) -> Any:
    """Copies a value to Gymnasium's batched form: an array, or a dict or tuple of arrays.

    >>> to_numpy(spaces.Discrete(2), torch.tensor([0, 1]))
    array([0, 1])
    """
    subspaces = children(space)
    if subspaces is None:
        return value.numpy(force=True).copy()
    arrays = {key: to_numpy(child, value[key]) for key, child in subspaces.items()}
    return tuple(arrays.values()) if isinstance(space, spaces.Tuple) else arrays


def flatten(space: Space[Any], value: Value, to: torch.dtype) -> Tensor:
    """Flattens each member to a vector, as Gymnasium's `flatten` does: `Discrete` and `MultiDiscrete` become one-hot.

    Args:
        space: the space of the value.
        value: with any batch dimensions.
        to: dtype of the result.

    Returns:
        A tensor `(*batch, flatdim(space))`.

    >>> flatten(spaces.Discrete(3, start=1), torch.tensor([1, 3]), torch.int64)
    tensor([[1, 0, 0],
            [0, 0, 1]])
    """
    subspaces = children(space)
    if subspaces is not None:
        return torch.cat([flatten(child, value[key], to) for key, child in subspaces.items()], -1)
    batch = value.shape[: value.dim() - len(space.shape or ())]
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        sizes, starts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec), np.ravel(space.start)
        columns = value.reshape(*batch, -1).unsqueeze(-1)
        one_hots = [
            columns[..., i, :] == torch.arange(int(start), int(start) + int(n), device=value.device)
            for i, (n, start) in enumerate(zip(sizes, starts, strict=True))
        ]
        return torch.cat(one_hots, -1).to(to)
    return value.reshape(*batch, -1).to(to)
