"""RowMask: which rows of a batch. Here host code and graph code part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap._core.graph_hints import realize, realize_on_cpu
from torchwrap._core.tracing import is_host_readable, is_tracing
from torchwrap._core.zero_pool import ZeroPool

_LARGE = 2**20  # bytes, from which on a few rows are cleared faster than all of them


class RowMask:
    """A set of rows of a batch, such as the envs whose episode ended.

    If the host can read the mask, it looks the rows up once and then touches only those. Otherwise (in a traced graph, or on
    another device) each method selects with `torch.where` over the full batch. Both give the same values, so authors of envs
    and transforms write one path. `value` is a Tensor or a TensorDict whose first dimension is the batch.

    Args:
        tensor: bool, `(num_envs,)` or `(num_envs, 1)`. It must not change afterwards.
        synchronize: read the mask on the host, once, even if that waits for the device, because a simulator on the host needs
            it. What is on the device is then still selected there.
        zeros: what `spread` takes large tensors from.

    >>> mask = RowMask(torch.tensor([False, True, True]))
    >>> elapsed = torch.tensor([[4], [5], [6]])
    >>> mask.fill_(elapsed, 0)
    >>> elapsed.flatten(), mask.indices
    (tensor([4, 0, 0]), tensor([1, 2]))
    """

    __slots__ = ("_column", "_found", "_indices", "_tensor", "num_rows", "zeros")

    def __init__(self, tensor: Tensor, *, synchronize: bool = False, zeros: ZeroPool | None = None) -> None:
        self.zeros = zeros
        self._column: Tensor | None = tensor if tensor.dim() == 2 else None
        self._tensor: Tensor | None = tensor if tensor.dim() == 1 else None
        self.num_rows = tensor.shape[0]  # `len` would make a constant of the size in an exported graph
        self._indices: Tensor | None = None
        self._found: np.ndarray[Any, Any] | None = None
        if synchronize or is_host_readable(tensor):
            # NumPy, because right after a simulator on the host it finds the rows four times faster than PyTorch does.
            self._found = (tensor if tensor.is_cpu else tensor.cpu()).numpy().ravel().nonzero()[0]

    @classmethod
    def full(cls, num_rows: int, device: torch.device | str = "cpu", *, synchronize: bool = False) -> RowMask:
        """A mask of every row."""
        mask = cls(torch.ones(num_rows, dtype=torch.bool, device=device))
        if synchronize:
            mask._found = np.arange(num_rows)  # known without a wait
        return mask

    @property
    def indices(self) -> Tensor | None:
        """Indices of the rows, int64; None if the host cannot read the mask without a device sync."""
        if self._indices is None and self._found is not None and self.tensor.is_cpu:
            self._indices = torch.from_numpy(self._found)
        return self._indices

    @property
    def tensor(self) -> Tensor:
        """The mask as a tensor: bool, `(num_envs,)`."""
        if self._tensor is None:
            assert self._column is not None
            self._tensor = self._column.squeeze(-1)
        return self._tensor

    @property
    def column(self) -> Tensor:
        """The mask as a tensor: bool, `(num_envs, 1)`."""
        if self._column is None:
            assert self._tensor is not None
            self._column = self._tensor.unsqueeze(-1)
        return self._column

    def any(self) -> bool:
        """Whether a row is set. True as well if the host cannot know without a device sync, so that nothing is skipped."""
        return self._found is None or len(self._found) > 0

    def numpy(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The mask as a NumPy array `(num_envs,)`, for a simulator on the host. Waits for the device, if nothing has yet."""
        if self._found is None:
            return self.tensor.cpu().numpy()
        flags = np.zeros(self.num_rows, bool)
        flags[self._found] = True
        return flags

    def __and__(self, condition: Tensor) -> RowMask:
        """The rows that are set and meet the condition (bool, `(num_envs,)` or `(num_envs, 1)`)."""
        tensor = self.column if condition.dim() == 2 else self.tensor
        return RowMask(tensor & condition)

    def __invert__(self) -> RowMask:
        """The other rows."""
        return RowMask(~self.tensor)

    def where(self, first: Any, second: Any) -> Any:
        """Rows of `first` if set, else of `second`, as a new value."""
        if not isinstance(first, Tensor):
            merged = {key: self.where(first[key], second[key]) for key in first.keys()}
            return TensorDict(merged, batch_size=first.batch_size)
        indices = self.indices
        if indices is None:
            return torch.where(self._like(first), first, second)
        # PyTorch does not vectorize a `where` with a broadcast mask, and the rows are few: copying them is faster.
        return second.index_copy(0, indices, first.index_select(0, indices))

    def scatter_(self, buffer: Tensor, rows: Tensor) -> None:
        """Writes rows into the buffer, such as `gather` returns, in place."""
        indices = self.indices
        if indices is None:
            buffer.copy_(realize_on_cpu(torch.where(self._like(buffer), rows, buffer)))
        else:
            buffer.index_copy_(0, indices, rows)

    def gather(self, value: Tensor) -> Tensor:
        """The rows that are set, one for each of `indices`; all rows if the host cannot tell."""
        indices = self.indices
        return value if indices is None else value.index_select(0, indices)

    def spread(self, rows: Tensor) -> Tensor:
        """Gathered rows as a value for all envs. What the other rows hold is unspecified."""
        # Zeros and not fresh memory, in which a transform further out could find an invalid index.
        indices = self.indices
        if indices is None:
            return rows
        if self.zeros is not None and rows.nbytes * self.num_rows >= _LARGE * rows.shape[0]:
            return self.zeros.with_rows(self.num_rows, indices, rows)
        return rows.new_zeros(self.num_rows, *rows.shape[1:]).index_copy_(0, indices, rows)

    @property
    def gathered(self) -> Tensor | None:
        """The mask of the rows that `gather` returns: None if every one of them is set."""
        return self.tensor if self.indices is None else None

    def apply(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """`function` of the rows that are set, each computed by itself. What the other rows hold is unspecified."""
        return self.spread(function(self.gather(value)))

    def assign_(self, buffer: Any, value: Any) -> None:
        """Writes the set rows of `value` into the buffer, in place."""
        if not isinstance(buffer, Tensor):
            for key in buffer.keys():
                self.assign_(buffer[key], value[key])
        elif (indices := self.indices) is None:
            buffer.copy_(torch.where(self._like(buffer), value, buffer))
        else:
            buffer.index_copy_(0, indices, value.index_select(0, indices))

    def scatter_columns_(self, buffer: Tensor, columns: Tensor, rows: Tensor) -> None:
        """Writes column `i` of rows, such as `gather` returns, into column `columns[i]` of the buffer, in place.

        Args:
            buffer: `(num_envs, num_columns, ...)`.
            columns: all columns in a cyclic order, int64, `(num_columns,)`.
            rows: `(num_set, num_columns, ...)`; `(num_envs, num_columns, ...)` if the host cannot tell which are set.
        """
        indices = self.indices
        if indices is not None:
            buffer.index_put_((indices.unsqueeze(1), columns), rows)
            return
        source = realize_on_cpu((torch.arange(len(columns), device=columns.device) - columns[:1]) % len(columns))
        if buffer.is_cuda:  # as in `append_to_ring_`
            buffer.copy_(torch.where(self._like(rows), rows.index_select(1, source), buffer))
        else:
            # All of it and from a copy in the order of `columns`, because Inductor computes this in one loop with whoever
            # reads the columns in this order: what it wrote in place would be read there, even if no column moved (PyTorch
            # 2.13), and a write by indices would copy the buffer twice.
            current = torch.where(self._like(rows), rows, buffer.index_select(1, columns))
            buffer.copy_(realize(current).index_select(1, source))

    def fill_(self, buffer: Tensor, value: float | bool) -> None:
        """Sets the rows of the buffer to one value, in place."""
        indices = self.indices
        if indices is None:
            buffer.masked_fill_(self._like(buffer), value)
        else:
            buffer.index_fill_(0, indices, value)

    def append_(self, ring: Tensor, size: int, count: Tensor, rows: Tensor, keep: Tensor) -> None:
        """Appends those rows to a ring buffer that are to be kept, in order.

        Args:
            ring: `(size + num_envs, ...)`. Entry number *k*, counted from 0, is at index `k % size`. The last `num_envs` rows
                are scratch space, so that a graph has a distinct index to write each row to, set or not.
            size: of the ring, at least `num_envs`.
            count: int64, `(1,)`: how many entries were appended so far.
            rows: `(num_set, ...)`, such as `gather` returns; `(num_envs, ...)` if the host cannot tell which are set.
            keep: bool, `(num_set, 1)` or `(num_envs, 1)` likewise.
        """
        if self.indices is None:
            kept = self & keep
            # 1 for the first. On CUDA in int32, which takes half of the bytes.
            rank = kept.tensor.cumsum(0, dtype=torch.int32 if ring.is_cuda else None)
            scratch = torch.arange(size, size + self.num_rows, device=ring.device)
            slots = torch.where(kept.tensor, (rank - 1 + count) % size, scratch)
            ring.index_copy_(0, slots, torch.where(kept._like(rows), rows, 0))
            count.add_(rank[-1:])
            return
        chosen = keep.numpy().ravel().nonzero()[0]
        if number := len(chosen):
            slots = torch.from_numpy((int(count) + np.arange(number)) % size)
            ring.index_copy_(0, slots, rows if number == len(rows) else rows.index_select(0, torch.from_numpy(chosen)))
            count.add_(number)

    def _like(self, value: Tensor) -> Tensor:
        # The mask with as many dimensions as the value.
        if value.dim() < 3:
            return self.tensor if value.dim() == 1 else self.column
        return self.tensor.view(-1, *(1,) * (value.dim() - 1))

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"RowMask({self.tensor!r})"


def can_look(rows: Tensor) -> bool:
    """Whether a look at one number costs less than an operator over all rows: the host can read it at once."""
    return is_host_readable(rows)


def append_to_ring_(ring: Tensor, order: Tensor, value: Tensor) -> None:
    """Writes a value into the oldest slot of a ring, and makes it the newest one, in place.

    Args:
        ring: `(num_envs, num_slots, ...)`.
        order: the slots, oldest first, int64, `(num_slots,)`.
        value: `(num_envs, ...)`.
    """
    # One write to the order, so that an interrupt leaves a valid one.
    if is_host_readable(order):
        slots = order.numpy()  # a few numbers take half of the time there
        slots[:] = (slots + 1) % len(slots)
        ring.select(1, int(slots[-1])).copy_(value)  # in a quarter of the time of a copy by index
        return
    order.copy_(realize_on_cpu((order + 1).remainder_(len(order))))  # realized because every element of a stack reads it
    newest, value = order[-1:], value.unsqueeze(1)
    if not (ring.is_cuda and is_tracing(ring)):
        ring.index_copy_(1, newest, value)
    else:  # not by indices, because Inductor would then copy the ring twice; on CUDA that costs more than to write all of it
        is_newest = torch.arange(len(order), device=order.device) == newest
        ring.copy_(torch.where(is_newest.view(-1, *(1,) * (ring.dim() - 2)), value, ring))


def set_first_(buffer: Tensor, rows: Tensor, unset: Tensor, mask: Tensor | None = None) -> None:
    """Writes the first row (of a mask, if there is one) into those components of the buffer that are unset.

    A component whose value in that row is not finite stays as it is.

    Args:
        buffer: of the shape of one row.
        rows: `(n, ...)`, of at least one row.
        unset: bool, of the shape of one row.
        mask: bool, `(n,)`.
    """
    first = rows[0]
    if mask is not None:
        last = len(rows) - 1  # if no row is set
        index = torch.where(mask, torch.arange(last + 1, dtype=torch.int32, device=mask.device), last).amin(0, keepdim=True)
        first, unset = rows.index_select(0, index)[0], unset & mask.index_select(0, index)
    first = first.to(buffer.dtype)
    buffer.copy_(realize(torch.where(unset & (first.abs() < math.inf), first, buffer)))
