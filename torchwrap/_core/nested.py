"""Nested values: Tensors, TensorDicts, dicts, and tuples of them, as a list of tensors and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

# The constructor's checks take two thirds of its time, and a step makes three TensorDicts.
_unchecked = getattr(TensorDict, "_new_unsafe", TensorDict)


def tensordict(values: dict[str, Any], *batch_size: int, names: list[str | None] | None = None) -> TensorDict:
    """A TensorDict of tensors, and of TensorDicts, that are known to have this batch size, with names of its dimensions."""
    return _unchecked(values, batch_size=torch.Size(batch_size), names=names)  # type: ignore[arg-type,no-any-return]


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, tuple):
        return list(enumerate(value))
    return sorted(value.items(), key=lambda item: str(item[0]))


def flatten(value: Any, leaves: list[Tensor]) -> Any:
    """Appends the tensors, contiguous, in the order of their keys, and returns the structure, which can be a dict key.

    Values of equal structure can stand for each other.
    """
    if isinstance(value, Tensor):
        leaves.append(value.contiguous())
        return None
    return tuple([(key, flatten(part, leaves)) for key, part in _parts(value)])


def keys(value: Any) -> list[NestedKey]:
    """The key of each leaf, in the order of `flatten`.

    >>> keys({"b": torch.zeros(1), "a": {"c": torch.zeros(1)}})
    [('a', 'c'), 'b']
    """
    found: list[NestedKey] = []
    for key, part in _parts(value):
        inner = [] if isinstance(part, Tensor) else keys(part)
        found += [(key, *(rest if isinstance(rest, tuple) else (rest,))) for rest in inner] or [key]
    return found


def leaves(value: Any) -> list[Tensor]:
    """The tensors, in the order of `flatten`."""
    found: list[Tensor] = []
    flatten(value, found)
    return found


def copy_(target: Any, source: Any) -> None:
    """Writes each tensor of the source into that of the target, in place."""
    for to, tensor in zip(leaves(target), leaves(source), strict=True):
        to.copy_(tensor)


def builder(value: Any) -> Callable[[Iterator[Tensor]], Any]:
    """Returns a function that builds a value like this one from tensors in the order of `leaves`."""
    if isinstance(value, Tensor):
        return next
    parts = {key: builder(part) for key, part in _parts(value)}
    if isinstance(value, tuple):
        return lambda tensors: tuple([part(tensors) for part in parts.values()])
    if isinstance(value, dict):
        return lambda tensors: {key: part(tensors) for key, part in parts.items()}
    batch_size = value.batch_size
    return lambda tensors: _unchecked({key: part(tensors) for key, part in parts.items()}, batch_size=batch_size)
