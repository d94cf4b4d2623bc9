"""ZeroPool: large tensors that are zero but for a few rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchwrap._core.buffer_pool import references

_MAX_SPARE = 4


class _Spare(NamedTuple):
    memory: Tensor
    written: Tensor
    """Indices of the rows that are not zero."""
    version: int
    references: int
    """To the storage, while only the pool has it."""


class ZeroPool:
    """A pool of tensors that are zero but for a few rows; their memory is reused once no tensor or view references it.

    To clear a few rows of a large tensor takes a tenth of the time of a new one. Memory that the caller has written to is not
    reused.

    >>> pool = ZeroPool()
    >>> pool.with_rows(3, torch.tensor([1]), torch.ones(1, 2))
    tensor([[0., 0.],
            [1., 1.],
            [0., 0.]])
    """

    def __init__(self) -> None:
        self.spare: dict[Any, list[_Spare]] = {}

    def with_rows(self, num_rows: int, indices: Tensor, rows: Tensor) -> Tensor:
        """Returns zeros of `(num_rows, ...)` with these rows at the indices, int64."""
        shape = (num_rows, *rows.shape[1:])
        if torch.is_inference_mode_enabled():  # in which nothing is counted
            return rows.new_zeros(shape).index_copy_(0, indices, rows)
        spare = self.spare.setdefault((shape, rows.dtype), [])
        found = next((index for index, known in enumerate(spare) if references(known.memory) == known.references), None)
        memory = None
        if found is not None:
            memory, written, version, _ = spare.pop(found)
            memory = memory.index_fill_(0, written, 0) if memory._version == version else None
        if memory is None:
            memory = rows.new_zeros(shape)
        memory.index_copy_(0, indices, rows)
        spare.append(_Spare(memory, indices, memory._version, references(memory)))
        del spare[:-_MAX_SPARE]
        return memory.view(shape)  # which references the memory, and counts what is written to it

    def __reduce__(self) -> tuple[type[ZeroPool], tuple[()]]:
        return ZeroPool, ()  # a copy starts without memory
