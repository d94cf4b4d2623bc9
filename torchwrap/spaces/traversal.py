"""Traversal of nested spaces and of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from gymnasium import Space, spaces
from tensordict import TensorDict
from torch import Tensor

Path: TypeAlias = tuple[str, ...]

Value: TypeAlias = Any
"""A Tensor, or a TensorDict if the space is a `Dict` or `Tuple`."""


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

    Raises:
        ValueError: for an empty `Dict` or `Tuple`, or a `Dict` with a key that is not a string.

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
