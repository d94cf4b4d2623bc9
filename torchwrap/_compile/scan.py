"""scan: a loop over steps as one operator of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap._compile.internals import scan_operator
from torchwrap._core import rows

Step = Callable[[Any, Any], tuple[Any, Any]]


def scan(function: Step, carry: Any, xs: Any, reverse: bool = False) -> Any:
    """A loop over the first dimension of `xs`, as `jax.lax.scan`.

    In `torch.compile` it is one operator, whose body is compiled once, whatever the number of
    steps. Otherwise, and if PyTorch lacks this operator, it is a Python loop.

    Args:
        function: takes the carry and a slice of `xs`. Returns the next carry, of the same
            structure, shapes and dtypes, and an output.
        carry: the first carry: Tensors, TensorDicts, and tuples and dicts of them.
        xs: likewise, each tensor with the steps as its first dimension.
        reverse: whether to begin with the last slice.

    Returns:
        carry: the last carry.
        outputs: the outputs, stacked in a new first dimension, in the order of `xs`.

    >>> def add(total, x):
    ...     return total + x, total + x
    >>> scan(add, torch.tensor(0), torch.arange(4))
    (tensor(6), tensor([0, 1, 3, 6]))
    """
    build_carry = rows.builder(carry)
    build_x = rows.builder(xs)

    def body(carry: list[Tensor], x: list[Tensor]) -> Any:
        following, output = function(build_carry(iter(carry)), build_x(iter(x)))
        return _copies(following), _encoded(output)

    first = _copies(carry)
    leaves = rows.leaves(xs)
    if scan_operator is not None and torch.compiler.is_compiling():
        last, outputs = scan_operator(body, first, leaves, reverse=reverse)
        # Another order of keys would make `torch.compile` compile the next call again.
        return _ordered(build_carry(iter(last)), carry), _decoded(outputs)
    steps = list(zip(*[leaf.unbind(0) for leaf in leaves], strict=True))
    found = []
    for x in reversed(steps) if reverse else steps:
        carry, output = function(carry, build_x(iter(x)))
        found.append(output)
    if reverse:
        found.reverse()
    return carry, _stacked(found)


def _stacked(values: list[Any]) -> Any:
    """Values of one structure, stacked in a new first dimension."""
    first = values[0]
    if isinstance(first, Tensor | TensorDictBase):
        return torch.stack(values)
    if isinstance(first, tuple):
        return tuple(_stacked(list(parts)) for parts in zip(*values, strict=True))
    return {key: _stacked([value[key] for value in values]) for key in first}


# The operator takes no TensorDict. A dict takes its place, whose one key is the number of its batch
# dimensions.


def _encoded(value: Any) -> Any:
    """Copies, because what the operator returns must not share memory."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple([_encoded(part) for part in value])
    entries = {key: _encoded(part) for key, part in value.items()}
    if isinstance(value, TensorDictBase):
        return {value.batch_dims: entries}
    return entries


def _decoded(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple):
        return tuple([_decoded(part) for part in value])
    parts = {key: _decoded(part) for key, part in value.items()}
    ((key, entries),) = list(parts.items())[:1]
    if not isinstance(key, int):
        return parts
    first, *_ = rows.leaves(entries)
    return TensorDict(entries, first.shape[: 1 + key])


def _ordered(value: Any, like: Any) -> Any:
    """A value with its keys in the order of another one."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple):
        return tuple([_ordered(part, other) for part, other in zip(value, like, strict=True)])
    entries = {key: _ordered(value[key], like[key]) for key in like.keys()}
    return TensorDict(entries, value.batch_size) if isinstance(value, TensorDictBase) else entries


def _copies(value: Any) -> list[Tensor]:
    return [leaf.clone() for leaf in rows.leaves(value)]
