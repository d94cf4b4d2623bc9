"""RunningMeanStd: mean and variance of all rows seen so far, and their merge over processes."""

from __future__ import annotations

import math
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchwrap._core import validation
from torchwrap._core.buffers import BatchedModule
from torchwrap._core.errors import refusal
from torchwrap._core.rows import is_host_readable, materialize

# A value counts if its difference from the reference is below the limit. Sums of float64 squares
# then stay finite.
_LIMITS = {torch.float32: math.inf, torch.float64: 1e150}
# Differences of float32 numbers from a smaller reference do not overflow.
_LARGEST_REFERENCE = 2.0**103
_OWNER = "RunningMeanStd"


class RunningMeanStd(BatchedModule):
    """Mean and variance of each component over all rows seen.

    Each finite value counts exactly once. NaN and infinite values are left out; the other
    components of their rows count. `count` is the number of values per component. There is no
    pseudo-count prior: before its first value, the mean of a component is 0 and the variance 1.

    The module keeps float64 sums of differences from a reference, the smallest value of a component
    in the first batch that has any, and int64 counts. Thus a large mean does not cancel: with
    R = (mean - reference)^2 / variance, the variance has R times the rounding error of the sums. A
    reference among n rows has R <= n, so even 1e12 rows leave four digits. The variance of a
    feature that never changes is exactly 0. The reference is 0 instead of a value of size 1e31 or
    more, because differences from it could overflow.

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

    buffer_limits = {"squares": (0, math.inf), "count": (0, 2**53)}
    reference: Tensor
    total: Tensor
    squares: Tensor
    count: Tensor
    synced: Tensor
    """The sums that all processes had after their last sync, or loaded: float64, `(3, *shape)`."""

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        shape = validation.sizes(_OWNER, "shape", shape, at_least=0)
        device = validation.device(_OWNER, device)
        # torch 2.13 loses in-place updates of a 0-dim float64 CPU buffer under torch.compile.
        if not shape:
            raise ValueError(refusal(_OWNER, "shape must have at least one dimension", shape))
        if dtype not in _LIMITS:
            raise TypeError(refusal(_OWNER, "dtype must be torch.float32 or torch.float64", dtype))
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        self.register_buffer("reference", zeros.to(dtype, copy=True))
        self.register_buffer("total", zeros.clone())
        self.register_buffer("squares", zeros.clone())
        self.register_buffer("count", zeros.long())
        self.register_state_buffer("synced", self.sums())

    @property
    def mean(self) -> Tensor:
        """The mean, float64, of `shape`."""
        return self.reference + self._moments()[0]

    @property
    def var(self) -> Tensor:
        """The population variance, float64, of `shape`."""
        return self._moments()[1]

    def update(
        self,
        rows: Tensor,
        mask: Tensor | None = None,
    ) -> None:
        """Counts the finite values of `rows` `(n, *shape)`.

        Args:
            rows: a batch of rows of floats or integers.
            mask: the rows that count, bool, `(n,)`. None counts all of them.

        Raises:
            ValueError: for other rows, such as a single one, and for another mask.
        """
        self._check_rows(rows, 1)
        if mask is not None:
            validation.tensor(
                _OWNER,
                "mask",
                mask,
                rows.shape[:1],
                torch.bool,
                rows.device,
            )
        self._update(rows, mask)

    def _check_rows(self, rows: Any, start: int) -> None:
        shape = self.count.shape
        fits = isinstance(rows, Tensor) and rows.shape[start:] == shape
        if fits and rows.dtype not in (torch.bool, torch.complex64):
            return
        must = f"rows must be a tensor of numbers and shape (n, *{tuple(shape)})"
        raise ValueError(refusal(_OWNER, must, validation.described(rows)))

    def _update(
        self,
        rows: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """As `update`. Returns the differences of the rows from the reference."""
        buffers: Any = self._buffers  # `nn.Module.__getattr__` is slow
        count = buffers["count"]
        rows = materialize(rows)
        # The host skips this once every component has a reference.
        has_references = is_host_readable(count) and bool(count.all())
        if len(rows) and not has_references:
            self._set_first_references(rows.detach().to(self.reference.dtype), mask)
        differences = differences_from(buffers["reference"], rows)
        values = differences.detach() if differences.requires_grad else differences
        counted = self._counted(values, mask)
        values = torch.where(counted, values, 0).double()
        buffers["total"].add_(values.sum(0))
        buffers["squares"].add_((values * values).sum(0))
        count.add_(counted.sum(0, dtype=torch.int32))
        return differences

    def _set_first_references(
        self,
        rows: Tensor,
        mask: Tensor | None,
    ) -> None:
        # Components without a value take their smallest one as their reference, in any order.
        counted = self._counted(rows, mask)
        lowest = torch.where(counted, rows, math.inf).amin(0)
        is_first = (self.count == 0) & (lowest.abs() < _LARGEST_REFERENCE)
        reference = torch.where(is_first, lowest, self.reference)
        self.reference.copy_(materialize(reference))

    def _counted(
        self,
        values: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        counted = values.abs() < _LIMITS[values.dtype]
        if mask is not None:
            counted &= mask.view(-1, *(1,) * (values.dim() - 1))
        return counted

    def normalize(
        self,
        rows: Tensor,
        epsilon: float,
    ) -> Tensor:
        """Returns (rows - mean) / sqrt(var + epsilon), float32, for rows `(*batch, *shape)`."""
        self._check_rows(rows, -self.count.dim())
        return self._normalize(differences_from(self.reference, rows), epsilon)

    def _normalize(
        self,
        differences: Tensor,
        epsilon: float,
    ) -> Tensor:
        _, shift, scale = self.constants(epsilon)
        return ((differences - shift) * scale).float()

    def scale(self, epsilon: float) -> Tensor:
        """Returns 1 / sqrt(var + epsilon), float32, of `shape`."""
        return self.constants(epsilon)[2].float()

    def constants(self, epsilon: float) -> list[Tensor]:
        """Those of `normalize`: the reference, mean - reference, and 1 / sqrt(var + epsilon)."""
        shift, var = self._moments()
        scale = var.add_(epsilon).rsqrt_()
        dtype = self.reference.dtype
        # All rows share them.
        shift = materialize(shift.to(dtype))
        scale = materialize(scale.to(dtype))
        return [self.reference, shift, scale]

    def sums(self) -> Tensor:
        """Totals, squares and counts, float64, `(3, *shape)`."""
        return torch.stack([self.total, self.squares, self.count.double()])

    def set_sums(
        self,
        sums: Tensor,
        reference: Tensor,
    ) -> None:
        """Writes sums of differences from a reference that all processes share."""
        self.reference.copy_(reference)
        self.total.copy_(sums[0])
        self.squares.copy_(sums[1])
        self.count.copy_(sums[2])
        self.synced.copy_(sums)

    @torch.inference_mode()  # allows writes to every buffer
    def set_moments(
        self,
        mean: Any,
        var: Any,
        count: Any,
    ) -> None:
        """Continues from another library's statistics, as if it had counted `count` such values.

        Args:
            mean, var: tensors or arrays of `shape`, or a number for all components. `var` is the
                population variance.
            count: one number, or one per component; from 1 to 2**53, rounded to an integer.

        >>> statistics = RunningMeanStd((2,))
        >>> statistics.set_moments([1.0, 2.0], [4.0, 9.0], count=100)
        >>> statistics.mean, statistics.var
        (tensor([1., 2.], dtype=torch.float64), tensor([4., 9.], dtype=torch.float64))
        >>> statistics.count
        tensor([100, 100])
        """
        limits = torch.finfo(self.reference.dtype)
        mean = self._numbers("mean", mean, limits.min, limits.max)
        var = self._numbers("var", var, 0)
        count = self._numbers("count", count, 1, 2**53).round()
        reference = mean.to(self.reference.dtype)
        shift = mean - reference
        squares = (var + shift.square()) * count
        self.set_sums(torch.stack([shift * count, squares, count]), reference)

    def _numbers(
        self, name: str, value: Any, low: float, high: float = sys.float_info.max
    ) -> Tensor:
        # Float64 numbers for all components.
        shape = self.count.shape
        must = f"{name} must have shape {tuple(shape)} and numbers in [{low:g}, {high:g}]"
        fault = refusal(_OWNER, must, validation.shown(value))
        try:
            numbers = torch.as_tensor(value, dtype=torch.float64, device=self.count.device)
        except (RuntimeError, TypeError, ValueError):
            raise TypeError(fault) from None
        fits = (numbers >= low) & (numbers <= high)
        if numbers.shape not in ((), shape) or not fits.all():
            raise ValueError(fault)
        return numbers.expand(shape)

    def _moments(self) -> tuple[Tensor, Tensor]:
        # The mean as a difference from the reference, and the variance, which rounding can make
        # negative. Before the first value, 0 / 0 is NaN.
        buffers: Any = self._buffers
        count = buffers["count"]
        shift = (buffers["total"] / count).nan_to_num_(0)
        var = (buffers["squares"] / count).sub_(shift * shift)
        return shift, var.relu_().nan_to_num_(1)

    def _warn_untrained(self, owner: str, num_initial: int = 0) -> None:
        if self.count.is_meta or (self.count > num_initial).any():
            return
        fault = "normalizes in eval() with statistics that have no samples"
        remedy = "Load those of a trained env with load_state_dict(), or learn them in train()"
        warnings.warn(refusal(owner, fault, remedy=remedy), stacklevel=4)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        errors = args[-1]
        names = self.state_dict()
        for name, own in names.items():
            value = state_dict.get(prefix + name)
            least, most = self.buffer_limits.get(name, (-math.inf, math.inf))
            if not isinstance(value, Tensor) or value.is_meta or value.shape != own.shape:
                continue
            fits = (value >= least) & (value <= most) & value.isfinite()
            if not fits.all():
                must = f"{prefix}{name} must be finite and in [{least:g}, {most:g}]"
                errors.append(refusal(_OWNER, must, validation.shown(value)))
                return
            state_dict[prefix + name] = value.to(own)  # `assign` would take its dtype
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not errors and all(prefix + name in state_dict for name in names):
            with torch.inference_mode():  # allows writes to every buffer
                self.synced.copy_(self.sums())  # every process loads the same statistics


def differences_from(reference: Tensor, rows: Tensor) -> Tensor:
    """Returns rows - reference, which is exact for integers."""
    if rows.dtype not in (torch.int32, torch.int64):
        return rows - reference
    lower = rows & 0xFFFF  # float64 has 53 bits, which hold each of the parts
    return (rows - lower).double() - reference + lower


def sync_statistics(env: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Merges the running statistics of all processes, as if each had seen the rows of all.

    Call it once per rollout, on every process of the group, in train() and eval() alike. One
    collective gathers what each process has counted since the last call. Counts are exact, and sums
    equal a single process's up to the order of addition. Compiled envs and CUDA graphs stay valid.
    Without an initialized process group, the call does nothing.

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
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size(group) > 1:
            _sync(env, group)
    elif os.environ.get("WORLD_SIZE", "1") != "1":  # set by torchrun
        fault = f"there are {os.environ['WORLD_SIZE']} processes, but no process group"
        remedy = "Call torch.distributed.init_process_group() first"
        raise RuntimeError(refusal("sync_statistics", fault, remedy=remedy))


@torch.inference_mode()  # allows writes to every buffer
def _sync(env: nn.Module, group: dist.ProcessGroup | None) -> None:
    modules = {}
    shared = []  # must be the same on all processes
    sums = {}
    for name, module in env.named_modules():
        if isinstance(module, RunningMeanStd):
            reference = module.reference.double()
            common = torch.where(module.synced[2] > 0, reference, 0)
            known = torch.stack([*module.synced, common]).numpy(force=True)
            modules[name] = module
            shared.append((name, known.shape, known.tobytes()))
            sums[name] = torch.stack([*module.sums(), reference]).cpu()
    rank = dist.get_rank(group)
    number = dist.get_world_size(group)
    processes: list[Any] = [None] * number
    # NCCL gathers on the current CUDA device. By default that is the first one on every process.
    on_cuda = (buffer for buffer in env.buffers() if buffer.is_cuda)
    try:
        with torch.cuda.device_of(next(on_cuda, torch.empty(0))):
            dist.all_gather_object(processes, (shared, sums), group)
    except RuntimeError as error:
        fault = f"the collective failed on rank {rank}: {error}"
        raise RuntimeError(refusal("sync_statistics", fault)) from error
    if any(others != shared for others, _ in processes):
        must = f"statistics must have the same names, shapes and loaded values on {number} ranks"
        got = f"others than on rank {rank}"
        remedy = "Make the same env on each, and load the same state_dict on each or on none"
        raise RuntimeError(refusal("sync_statistics", must, got, remedy))
    for name, module in modules.items():
        _merge(module, torch.stack([sums[name] for _, sums in processes]))


def _merge(module: RunningMeanStd, sums: Tensor) -> None:
    """Adds the values that each process has counted since the last sync.

    Args:
        module: statistics, whose sums were the same on all processes after the last sync.
        sums: totals, squares, counts and reference of each process: `(num_processes, 4, *shape)`.
    """
    total, squares, count, reference = sums.to(module.total.device).unbind(1)
    # The lowest rank with a value has the common reference. After a sync all have the same.
    has_value = count > 0
    lowest = has_value.int().argmax(0, keepdim=True)
    common = reference.take_along_dim(lowest, 0)
    shift = torch.where(has_value, reference - common, 0)
    squares = squares + 2 * shift * total + shift.square() * count
    total = total + shift * count
    added = torch.stack([total, squares, count], 1) - module.synced
    module.set_sums(module.synced + added.sum(0), common[0])
