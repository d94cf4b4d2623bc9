"""Running statistics: sums that count each row once, and the constants that they become when nothing is counted any more."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchwrap._core import validation
from torchwrap._core.env_buffers import BatchedModule, BufferAttribute
from torchwrap._core.graph_hints import realize, side_by_side, sum_rows
from torchwrap._core.row_mask import can_look, set_first_


class RunningMeanStd(BatchedModule):
    """Mean and variance of each component over all rows seen. Each finite value counts exactly once.

    NaN and infinite values are left out, each by itself: the other components of the row count. `count` is the number of rows,
    and `skipped` how many values of them were left out, per component.

    The module keeps sums of differences from a reference row, in float64, and int64 counts. There is no pseudo-count prior:
    before its first value, the mean of a component is 0 and the variance 1.

    The reference is the first row that was counted, so a mean that is large compared to the deviation does not cancel the sums
    of squares: with R = (mean - reference)^2 / variance, the subtraction amplifies rounding errors R times, and a row that is
    one of n has R <= n. Even 1e12 rows leave four digits. The variance of a feature that never changes is exactly 0. A
    component that has had no value so far takes its reference from the first row of the batch that brings one; if the value
    of that row is not finite, the reference stays 0.

    Args:
        shape: of one row; at least one dimension.
        device: of the buffers.
        dtype: of the reference: float32, or float64 for rows that float32 cannot represent.

    >>> statistics = RunningMeanStd((1,))
    >>> statistics.update(torch.tensor([[1.0], [3.0], [torch.nan]]))
    >>> statistics.mean, statistics.var
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    >>> statistics.count, statistics.skipped
    (tensor([3]), tensor([1]))
    """

    reference = BufferAttribute()
    total = BufferAttribute()
    squares = BufferAttribute()
    count = BufferAttribute()
    skipped = BufferAttribute()
    synced = BufferAttribute()

    def __init__(self, shape: tuple[int, ...], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shape = validation.sizes("RunningMeanStd", "shape", shape, at_least=0)
        device = validation.device("RunningMeanStd", device)
        if not shape:
            raise ValueError(f"RunningMeanStd needs a shape of at least one dimension, but got {shape}.")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"RunningMeanStd needs dtype torch.float32 or torch.float64, but got {dtype!r}.")
        # Never 0-dim: torch 2.13 loses in-place updates of a 0-dim float64 CPU buffer under torch.compile.
        self.register_buffer("reference", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("total", torch.zeros(shape, dtype=torch.float64, device=device))
        # -inf until the first value, so that one look at the sums also finds a component that needs a reference.
        self.register_buffer("squares", torch.full(shape, -math.inf, dtype=torch.float64, device=device))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_buffer("skipped", torch.zeros(shape, dtype=torch.int64, device=device))
        # The sums that all processes of a group had after their last sync, or loaded; see `torchwrap.sync_statistics`.
        self.register_buffer("synced", torch.zeros_like(self.sums()), persistent=False)

    @property
    def mean(self) -> Tensor:
        """The mean, float64, of `shape`."""
        return self.reference + self._moments()[0]

    @property
    def var(self) -> Tensor:
        """The population variance, float64, of `shape`."""
        return self._moments()[1]

    def sums(self) -> Tensor:
        """All that is added up: totals, squares (0 before the first value), skipped values and rows, float64, `(4, size)`."""
        parts = (self.total, self.squares.clamp(min=0), self.skipped, self.count.expand(self.total.numel()))
        return torch.stack([part.flatten().double() for part in parts])

    def set_sums(self, sums: Tensor, reference: Tensor) -> None:
        """Writes sums of differences from a reference `(size,)`, which all processes share from now on."""
        total, squares, skipped, count = sums
        squares = torch.where(count > skipped, squares, -math.inf)
        parts = ((self.reference, reference), (self.total, total), (self.squares, squares), (self.skipped, skipped))
        for buffer, value in parts:
            buffer.copy_(value.view_as(buffer))
        self.count.copy_(count[:1])
        self.synced.copy_(sums)

    def update(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Counts the finite values of `rows` `(n, *shape)`, or of those where `mask` (bool, `(n,)`) is set."""
        self._count(rows, mask)

    def normalize(self, rows: Tensor, epsilon: float, mask: Tensor | None = None, learn: bool = False) -> Tensor:
        """Returns (rows - mean) / sqrt(var + epsilon), float32; with `learn`, after `update(rows, mask)`."""
        differences, seen = self._count(rows, mask) if learn else (rows - self.reference, False)
        mean, var = self._moments(seen)
        scale = var.add_(epsilon).rsqrt_()
        narrow = differences.dtype == torch.float32
        if narrow:
            mean, scale = mean.float(), scale.float()
        if not seen:
            mean, scale = realize(mean), realize(scale)
        normal = differences.sub_(mean).mul_(scale)
        return normal if narrow else normal.float()

    def scale(self, epsilon: float, rows: Tensor | None = None) -> Tensor:
        """Returns 1 / sqrt(var + epsilon), float32, of `shape`; with `rows`, after `update(rows)`."""
        seen = rows is not None and self._count(rows)[1]
        scale = self._moments(seen)[1].add_(epsilon).rsqrt_().float()
        return scale if seen else realize(scale)

    def frozen(self, epsilon: float) -> FrozenMeanStd:
        """What `normalize` computes from now on, without the sums."""
        mean, var = self._moments()
        scale = var.add_(epsilon).rsqrt_()
        return FrozenMeanStd(self.reference.clone(), mean.to(self.reference.dtype), scale.to(self.reference.dtype))

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        state_dict, prefix, errors = args[0], args[1], args[-1]
        if not errors and all(prefix + name in state_dict for name in self.state_dict()):
            with torch.inference_mode():  # in which every buffer can be written to
                self.synced.copy_(self.sums())  # every process loads the same statistics

    def _count(self, rows: Tensor, mask: Tensor | None = None) -> tuple[Tensor, bool]:
        # The differences from the reference; and whether the host knows that every component has a value.
        if mask is not None or not can_look(rows):
            return self._count_finite(rows, mask), False
        differences, sums = rows - self.reference, self.squares
        wide = differences.double()
        total = wide.sum(0)
        squares = (wide.square() if wide is differences else wide.square_()).sum(0)
        # One look at the sums costs less than a mask.
        look = squares.dot(sums) if squares.dim() == 1 else squares.flatten().dot(sums.flatten())
        if not math.isfinite(look):
            return self._count_finite(rows, mask), False
        self.total.add_(total)
        sums.add_(squares)
        self.count.add_(rows.shape[0])
        return differences, True

    def _count_finite(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        if len(rows) == 0:
            return rows - self.reference
        unseen = self.squares < 0
        set_first_(self.reference, rows, unseen, mask)
        differences = kept = rows - self.reference
        number: Tensor | int = len(rows)
        if mask is None:
            kept = side_by_side(kept)
        # What is too large to be squared is left out as well.
        narrow = kept.dtype == torch.float32
        within = kept.abs() < (math.inf if narrow else 1e150)
        if mask is not None:
            within &= mask.view(-1, *(1,) * (rows.dim() - 1))
            number = mask.sum()
        finite = torch.where(within, kept, 0).double()
        counted = sum_rows(within.to(torch.int32 if narrow else kept.dtype), unseen.shape)
        self.total.add_(sum_rows(finite, unseen.shape))
        self.squares.masked_fill_(unseen & (counted > 0), 0).add_(sum_rows(finite * finite, unseen.shape))
        self.count.add_(number)
        self.skipped.add_(number - counted.long())
        return differences

    def _moments(self, seen: bool = False) -> tuple[Tensor, Tensor]:
        # The mean as a difference from the reference, and the variance. `seen`: every component is known to have a value.
        number, squares = self.count - self.skipped, self.squares
        if not seen:
            number.clamp_(min=1)
        number = number.double()  # once, and not in each division
        mean = self.total / number
        var = (squares / number).addcmul_(mean, mean, value=-1).relu_()  # a reference of 0 may leave less than nothing
        return mean, var if seen else var.masked_fill_(squares < 0, 1)


class FrozenMeanStd(BatchedModule):
    """Statistics that are constants, in the dtype of the reference: a float32 observation needs no float64."""

    reference, mean, scale = (BufferAttribute() for _ in range(3))

    def __init__(self, reference: Tensor, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        for name, value in (("reference", reference), ("mean", mean), ("scale", scale)):
            self.register_buffer(name, value)

    def forward(self, rows: Tensor) -> Tensor:
        # Rounded as `RunningMeanStd.normalize` rounds. The mean is much smaller than the reference, so they are not added up.
        return (rows - self.reference).sub_(self.mean).mul_(self.scale).float()
