"""Rows in a mask: looked up where the host can do so, and without a branch in a graph; and what helps graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def free_to_look(tensor: Tensor) -> bool:
    """Whether the host can look at values for nothing: in CPU memory, and not while a graph is traced."""
    return tensor.is_cpu and not tracing(tensor)


def tracing(tensor: Tensor) -> bool:
    """Whether this is a tensor without values, from which a graph is made."""
    return isinstance(tensor, FakeTensor) or torch.compiler.is_compiling()


def once(tensor: Tensor) -> Tensor:
    """The tensor, computed once: a compiler would compute what is small again for each element that it is combined with.

    A view by strides is where PyTorch's inductor has to have its input in memory; bools as floats, for on CPUs it stores and
    loads a vector of bools one by one.
    """
    if not tracing(tensor):
        return tensor
    if tensor.dtype == torch.bool:
        return once(tensor.float()) != 0
    return tensor.as_strided(tensor.shape, tensor.stride())


def as_bytes(tensor: Tensor) -> Tensor:
    """Bools as uint8 0 and 1, in a graph by way of floats: see `once`. Other tensors as they are."""
    if tensor.dtype != torch.bool:
        return tensor
    return tensor.float().to(torch.uint8) if tracing(tensor) else tensor.view(torch.uint8)


def any(mask: Tensor) -> bool:
    """Whether a mask is set anywhere, seen by the host: with NumPy, which after a simulator is sooner there than PyTorch."""
    return bool(np.count_nonzero(mask.cpu().numpy()))


def rows(mask: Tensor) -> Tensor:
    """Places where a mask is set (bool, `(num_envs,)`, which the host can look at), int64."""
    found: Tensor | None = getattr(mask, "rows_set", None)
    if found is not None:
        return found
    return torch.from_numpy(mask.numpy().nonzero()[0]) if mask.is_cpu else mask.nonzero().squeeze(1)


def look_up(mask: Tensor) -> Tensor:
    """`rows` of a mask that nobody changes any more, which knows them from now on."""
    found = mask.rows_set = rows(mask)  # type: ignore[attr-defined]
    return found


def where(mask: Tensor, first: Any, second: Any) -> Any:
    """Rows of `first` where `mask` (bool, `(num_envs,)`), else of `second`, in a value of their own."""
    if not isinstance(first, Tensor):
        merged = {key: where(mask, first[key], second[key]) for key in first.keys()}
        return TensorDict(merged, batch_size=first.batch_size)
    if free_to_look(mask):
        # PyTorch does not vectorise a where whose mask is broadcast; few rows are merged, so copying those is faster.
        places = rows(mask)
        return second.index_copy(0, places, first.index_select(0, places))
    return torch.where(mask.view(-1, *(1,) * (first.dim() - 1)), first, second)


def only(mask: Tensor, value: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The function of rows; of those in the mask (bool, `(num_envs,)`) where the host can look at it, and zeros elsewhere."""
    if not free_to_look(mask):
        return function(value)
    places = rows(mask)
    found = function(value.index_select(0, places))
    return found.new_zeros(len(mask), *found.shape[1:]).index_copy_(0, places, found)


def write(mask: Tensor, value: Any, buffer: Any) -> None:
    """Rows of `value` into the buffer where `mask` (bool, `(num_envs,)`)."""
    if not isinstance(buffer, Tensor):
        for key in buffer.keys():
            write(mask, value[key], buffer[key])
    elif free_to_look(mask):
        places = rows(mask)
        buffer.index_copy_(0, places, value.index_select(0, places))
    else:
        buffer.copy_(torch.where(mask.view(-1, *(1,) * (value.dim() - 1)), value, buffer))
