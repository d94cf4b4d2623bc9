"""Tensors, TensorDicts, dicts, and tuples of them: taken apart into tensors, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict
from torch import Tensor


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, tuple):
        return list(enumerate(value))
    return [(key, value[key]) for key in sorted(value.keys(), key=str)]


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors, contiguous, by the names of their keys."""
    if isinstance(value, Tensor):
        yield value.contiguous()
    else:
        for _, part in _parts(value):
            yield from leaves(part)


def structure(value: Any) -> Any:
    """What two values have in common if one can stand for the other: a key for dicts."""
    return None if isinstance(value, Tensor) else tuple([(key, structure(part)) for key, part in _parts(value)])


def builder(value: Any) -> Callable[[Iterator[Tensor]], Any]:
    """What puts leaves in the order of `leaves` together to a value like this one."""
    if isinstance(value, Tensor):
        return next
    parts = {key: builder(part) for key, part in _parts(value)}
    if isinstance(value, tuple):
        return lambda tensors: tuple([part(tensors) for part in parts.values()])
    if isinstance(value, dict):
        return lambda tensors: {key: part(tensors) for key, part in parts.items()}
    batch_size = value.batch_size
    return lambda tensors: TensorDict({key: part(tensors) for key, part in parts.items()}, batch_size=batch_size)
