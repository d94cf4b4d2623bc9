"""RunningMeanStd: mean and variance of all rows seen so far, and their merge over processes."""

from __future__ import annotations

import math
import os
import sys
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchwrap._core import validation
from torchwrap._core.buffers import BatchedModule
from torchwrap._core.errors import refusal
from torchwrap._core.rows import materialize, no_zero

# A difference from the reference counts if it is smaller. Sums of float64 squares stay finite.
_LIMITS = {torch.float32: math.inf, torch.float64: 1e150}


class RunningMeanStd(BatchedModule):
    """Mean and variance of each component over all rows seen. Each finite value counts exactly once.

    NaN and infinite values are left out; the other components of their rows count. `count` is the
    number of values per component. There is no pseudo-count prior: before its first value, the mean
    of a component is 0 and the variance 1.

    The module keeps float64 sums of differences from a reference, the first value of each
    component, and int64 counts. Thus a large mean does not cancel: with
    R = (mean - reference)^2 / variance, the variance has R times the rounding error of the sums. A
    reference among n rows has R <= n, so even 1e12 rows leave four digits. The variance of a
    feature that never changes is exactly 0.

    Args:
        shape: of one row; at least one dimension.
        device: of the buffers.
        dtype: of the reference: float32, or float64 for rows that float32 cannot represent.

    >>> statistics = RunningMeanStd((1,))
    >>> statistics.update(torch.tensor([[1.0], [3.0], [torch.nan]]))
    >>> statistics.mean, statistics.var
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    >>> statistics.count
    tensor([2])
    """

    reference: Tensor
    total: Tensor
    squares: Tensor
    count: Tensor
    synced: Tensor
    """The sums that all processes shared after their last sync, or loaded: float64, `(3, size)`."""

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        owner = "RunningMeanStd"
        shape = validation.sizes(owner, "shape", shape, at_least=0)
        device = validation.device(owner, device)
        # torch 2.13 loses in-place updates of a 0-dim float64 CPU buffer under torch.compile.
        if not shape:
            raise ValueError(refusal(owner, "shape must have at least one dimension", shape))
        if dtype not in _LIMITS:
            raise TypeError(refusal(owner, "dtype must be torch.float32 or torch.float64", dtype))
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        self.register_buffer("reference", zeros.to(dtype, copy=True))
        self.register_buffer("total", zeros.clone())
        self.register_buffer("squares", zeros.clone())
        self.register_buffer("count", zeros.long())
        self.register_buffer("synced", self.sums(), persistent=False)

    @property
    def mean(self) -> Tensor:
        """The mean, float64, of `shape`."""
        return self.reference + self._moments()[0]

    @property
    def var(self) -> Tensor:
        """The population variance, float64, of `shape`."""
        return self._moments()[1]

    def update(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Counts the finite values of `rows` `(n, *shape)`.

        Args:
            rows: a batch of rows.
            mask: the rows that count, bool, `(n,)`. None counts all of them.
        """
        if len(rows) == 0:
            return
        rows = materialize(rows)
        if not no_zero(self.count):
            self._set_first_references(rows, mask)
        differences = rows - self.reference
        counted = differences.abs() < _LIMITS[differences.dtype]
        if mask is not None:
            counted &= mask.view(-1, *(1,) * (rows.dim() - 1))
        differences = torch.where(counted, differences, 0).double()
        self.total.add_(differences.sum(0))
        self.squares.add_(differences.square_().sum(0))
        self.count.add_(counted.sum(0, dtype=torch.int32))

    def _set_first_references(self, rows: Tensor, mask: Tensor | None) -> None:
        # Components without a value take the first counted row as their reference.
        unseen = self.count == 0
        first = rows[0]
        if mask is not None:
            index = mask.int().argmax(0, keepdim=True)
            first = rows.index_select(0, index)[0]
            unseen = unseen & mask.index_select(0, index)
        reference = torch.where(unseen & (first.abs() < math.inf), first, self.reference)
        self.reference.copy_(materialize(reference))

    def normalize(self, rows: Tensor, epsilon: float) -> Tensor:
        """Returns (rows - mean) / sqrt(var + epsilon), float32."""
        shift, scale = self._constants(epsilon)
        return ((rows - self.reference - shift) * scale).float()

    def scale(self, epsilon: float) -> Tensor:
        """Returns 1 / sqrt(var + epsilon), float32, of `shape`."""
        return (self.var + epsilon).rsqrt().float()

    def frozen(self, epsilon: float) -> Tensor:
        """The constants of `normalize`, `(3, *shape)`: reference, mean - reference, and scale."""
        self._warn_untrained("A deployed policy")
        return torch.stack([self.reference, *self._constants(epsilon)])

    def sums(self) -> Tensor:
        """Totals, squares and counts, float64, `(3, size)`."""
        parts = (self.total, self.squares, self.count)
        return torch.stack([part.double().flatten() for part in parts])

    def set_sums(self, sums: Tensor, reference: Tensor) -> None:
        """Writes sums `(3, size)` of differences from a reference `(size,)` that all processes share."""
        self.reference.copy_(reference.view_as(self.reference))
        for buffer, values in zip((self.total, self.squares, self.count), sums, strict=True):
            buffer.copy_(values.view_as(buffer))
        self.synced.copy_(sums)

    @torch.inference_mode()  # allows writes to every buffer
    def set_moments(self, mean: Any, var: Any, count: Any) -> None:
        """Continues from another library's statistics, as if it had counted `count` such values.

        Args:
            mean, var: tensors or arrays of `shape`, or a number for all components. `var` is the
                population variance.
            count: one number, or one per component; at least 1, rounded to an integer.

        >>> statistics = RunningMeanStd((2,))
        >>> statistics.set_moments([1.0, 2.0], [4.0, 9.0], count=100)
        >>> statistics.mean, statistics.var
        (tensor([1., 2.], dtype=torch.float64), tensor([4., 9.], dtype=torch.float64))
        >>> statistics.count
        tensor([100, 100])
        """
        dtype = self.reference.dtype
        mean = self._numbers("mean", mean, low=torch.finfo(dtype).min, high=torch.finfo(dtype).max)
        var = self._numbers("var", var, low=0)
        count = self._numbers("count", count, low=1).round()
        reference = mean.to(dtype).double()
        shift = mean - reference
        squares = (var + shift.square()) * count
        self.set_sums(torch.stack([shift * count, squares, count]), reference)

    def _numbers(
        self, name: str, value: Any, low: float, high: float = sys.float_info.max
    ) -> Tensor:
        # Float64 numbers for all components, `(size,)`.
        shape = self.count.shape
        must = f"{name} must have shape {tuple(shape)} and numbers in [{low:g}, {high:g}]"
        fault = refusal("RunningMeanStd", must, validation.shown(value))
        try:
            numbers = torch.as_tensor(value, dtype=torch.float64, device=self.count.device)
        except (RuntimeError, TypeError, ValueError):
            raise TypeError(fault) from None
        if numbers.dim() and numbers.shape != shape:
            raise ValueError(fault)
        if not ((numbers >= low) & (numbers <= high)).all():
            raise ValueError(fault)
        return numbers.expand(shape).flatten()

    def _moments(self) -> tuple[Tensor, Tensor]:
        # The mean as a difference from the reference, and the variance.
        count = self.count.clamp(min=1)
        shift = self.total / count
        var = (self.squares / count - shift.square()).relu()  # rounding can make it negative
        return shift, var + (self.count == 0)

    def _constants(self, epsilon: float) -> tuple[Tensor, Tensor]:
        # mean - reference and 1 / sqrt(var + epsilon), which all rows share.
        shift, var = self._moments()
        scale = (var + epsilon).rsqrt()
        dtype = self.reference.dtype
        return materialize(shift.to(dtype)), materialize(scale.to(dtype))

    def _warn_untrained(self, owner: str) -> None:
        if self.count.is_meta or self.count.any():
            return
        fault = "normalizes in eval() with statistics that have no samples"
        remedy = "Load those of a trained env with load_state_dict(), or learn them in train()"
        warnings.warn(refusal(owner, fault, remedy=remedy), stacklevel=4)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        state_dict, prefix, errors = args[0], args[1], args[-1]
        if not errors and all(prefix + name in state_dict for name in self.state_dict()):
            with torch.inference_mode():  # allows writes to every buffer
                self.synced.copy_(self.sums())  # every process loads the same statistics


def sync_statistics(env: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Merges the running statistics of all processes, as if each had seen the rows of all.

    Call it once per rollout, on every process of the group, in train() and eval() alike. One
    float64 all-reduce adds what each process has counted since the last call. Counts are exact, and
    sums equal a single process's up to the order of addition. Compiled envs and CUDA graphs stay
    valid. Without an initialized process group, the call does nothing.

    Statistics that `load_state_dict` has loaded count as shared: every process has to load the
    same. A snapshot holds the shared part too.

    Args:
        env: an `Env`, or any other module that contains statistics.
        group: the processes; None takes all of them.

    Raises:
        TypeError: if `env` is no module.
        RuntimeError: if torchrun has started several processes without a process group; if their
            statistics differ in names, shapes, order or loaded values (on each process, before
            anything has changed); if the collective fails, because a process has ended.

    >>> import torchwrap as tw
    >>> env = tw.make("CartPole-v1", num_envs=4, first_index=0)
    >>> env = tw.TransformedEnv(env, tw.transforms.NormalizeObservation())
    >>> td = env.reset(seed=0)
    >>> tw.sync_statistics(env)  # nothing to merge with a single process
    """
    if not isinstance(env, nn.Module):
        got = type(env).__name__
        raise TypeError(refusal("sync_statistics", "env must be an Env or another nn.Module", got))
    if not (dist.is_available() and dist.is_initialized()):
        number = os.environ.get("WORLD_SIZE", "1")  # set by torchrun
        if number != "1":
            fault = f"this is one of WORLD_SIZE={number} processes, without a process group"
            remedy = "Call torch.distributed.init_process_group() first"
            raise RuntimeError(refusal("sync_statistics", fault, remedy=remedy))
        return
    if dist.get_world_size(group) == 1:
        return
    modules = {}
    for name, module in env.named_modules():
        if isinstance(module, RunningMeanStd) and module.total.numel():
            modules[name] = module
    # The first device type that the group can reduce, such as "cuda" for NCCL.
    device = torch.device(dist.get_backend_config(group).split(":")[0])
    _require_same(modules, device, group)
    if modules:
        _merge(list(modules.values()), device, group)


def _require_same(
    modules: dict[str, RunningMeanStd], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Raises on every process if one has statistics of other names, shapes or shared values.

    Tensors of different sizes would end a process in a collective, so a checksum is reduced first.
    """
    shapes = {name: tuple(module.total.shape) for name, module in modules.items()}
    checksum = zlib.crc32(str(shapes).encode())
    for module in modules.values():
        reference = torch.where(module.synced[2] > 0, module.reference.flatten(), 0)
        for shared in (module.synced, reference):
            checksum = zlib.crc32(shared.cpu().numpy().tobytes(), checksum)
    extremes = torch.tensor([checksum, -checksum], device=device)
    highest, negated_lowest = _reduce(extremes, group, dist.ReduceOp.MAX)
    if highest != -negated_lowest:
        number = dist.get_world_size(group)
        must = (
            f"statistics must have the same names, shapes and loaded values on all {number} ranks"
        )
        got = f"others than those of rank {dist.get_rank(group)}: {shapes}"
        remedy = "Make the same env on each, and load the same state_dict on each or on none"
        raise RuntimeError(refusal("sync_statistics", must, got, remedy))


@torch.inference_mode()  # allows writes to every buffer
def _merge(
    modules: Sequence[RunningMeanStd], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Adds what each process has counted since the last call to the shared sums."""
    synced = torch.cat([module.synced for module in modules], 1).to(device)
    sums = torch.cat([module.sums() for module in modules], 1).to(device)
    reference = torch.cat([module.reference.flatten().double() for module in modules]).to(device)
    added = _reduce(sums - synced, group)
    if ((synced[2] == 0) & (added[2] > 0)).any():  # components with their first values
        sums, reference = _share_reference(sums, reference, group)
        added = _reduce(sums - synced, group)
    sizes = [module.total.numel() for module in modules]
    merged = (synced + added).split(sizes, 1)
    for module, part, common in zip(modules, merged, reference.split(sizes), strict=True):
        module.set_sums(part, common)


def _share_reference(
    sums: Tensor, reference: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Sums of differences from the reference of the lowest rank that has values, and it."""
    rank = dist.get_rank(group)
    total, squares, count = sums
    owner = torch.where(count > 0, rank, math.inf).double()
    owner = _reduce(owner, group, dist.ReduceOp.MIN)
    common = _reduce(torch.where(owner == rank, reference, 0), group)
    shift = torch.where(count > 0, reference - common, 0)
    squares = squares + 2 * shift * total + count * shift * shift
    return torch.stack([total + count * shift, squares, count]), common


def _reduce(
    values: Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM
) -> Tensor:
    try:
        dist.all_reduce(values, operation, group=group)
    except RuntimeError as error:
        rank = dist.get_rank(group)
        number = dist.get_world_size(group)
        must = f"all {number} processes of the group must take part"
        got = f"a failure on rank {rank}: another one has ended or reduces other tensors ({error})"
        raise RuntimeError(refusal("sync_statistics", must, got)) from error
    return values
