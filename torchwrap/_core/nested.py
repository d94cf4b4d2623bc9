"""Nested values: Tensors, TensorDicts, dicts, and tuples of them, as a list of tensors and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap._core.rows import tensordict

Nested: TypeAlias = Tensor | TensorDictBase | Mapping[str, "Nested"] | tuple["Nested", ...]
Structure: TypeAlias = tuple[object, ...]


def _parts(value: Nested) -> list[tuple[object, Nested]]:
    if isinstance(value, tuple):
        return list(enumerate(value))
    return sorted(((key, value[key]) for key in value.keys()), key=lambda item: str(item[0]))  # type: ignore[union-attr,index]


def structure(value: Nested) -> Structure:
    """The keys at every level, which values of the same kind share. It can be the key of a dict."""
    if isinstance(value, Tensor):
        return ()
    return tuple([(key, structure(part)) for key, part in _parts(value)])


def leaves(value: Nested) -> list[Tensor]:
    """The tensors, in the order of their keys.

    >>> import torch
    >>> leaves({"b": torch.zeros(1), "a": {"c": torch.ones(1)}})
    [tensor([1.]), tensor([0.])]
    """
    if isinstance(value, Tensor):
        return [value]
    return [leaf for _, part in _parts(value) for leaf in leaves(part)]


def builder(value: Nested) -> Callable[[Iterator[Tensor]], Nested]:
    """Returns a function that builds a value like this one from tensors in the order of `leaves`."""
    if isinstance(value, Tensor):
        return next
    parts = {key: builder(part) for key, part in _parts(value)}
    if isinstance(value, tuple):
        return lambda tensors: tuple([part(tensors) for part in parts.values()])
    if isinstance(value, TensorDict):
        size = tuple(value.batch_size)
        return lambda tensors: tensordict({str(key): part(tensors) for key, part in parts.items()}, *size)  # type: ignore[misc]
    return lambda tensors: {key: part(tensors) for key, part in parts.items()}  # type: ignore[return-value,misc]
