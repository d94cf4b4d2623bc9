"""Tensors, TensorDicts, dicts, and tuples of them: taken apart into tensors, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict
from torch import Tensor


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, tuple):
        return list(enumerate(value))
    return sorted(value.items(), key=lambda item: str(item[0]))


def flatten(value: Any, leaves: list[Tensor]) -> Any:
    """Appends the tensors, contiguous, by the names of their keys; gives their structure, a key for dicts.

    It is what two values have in common if one can stand for the other.
    """
    if isinstance(value, Tensor):
        leaves.append(value.contiguous())
        return None
    return tuple([(key, flatten(part, leaves)) for key, part in _parts(value)])


def leaves(value: Any) -> list[Tensor]:
    """The tensors, in the order of `flatten`."""
    found: list[Tensor] = []
    flatten(value, found)
    return found


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
