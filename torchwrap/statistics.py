"""RunningMeanStd: mean and variance of all rows seen so far, and their merge over processes."""

from __future__ import annotations

import math
import os
import warnings
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchwrap._core import validation
from torchwrap._core.buffers import BatchedModule
from torchwrap._core.rows import materialize, no_zero


class RunningMeanStd(BatchedModule):
    """Mean and variance of each component over all rows seen. Each finite value counts exactly once.

    NaN and infinite values are left out, each by itself: the other components of the row count. `count` is the number of
    values, per component. There is no pseudo-count prior: before its first value, the mean of a component is 0 and the
    variance 1.

    The module keeps float64 sums of differences from a reference, the first row that was counted, and int64 counts. With
    R = (mean - reference)^2 / variance, the variance has R times the rounding error of the sums. A reference among n rows has
    R <= n, so even 1e12 rows leave four digits. The variance of a feature that never changes is exactly 0.

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

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        shape = validation.sizes("RunningMeanStd", "shape", shape, at_least=0)
        device = validation.device("RunningMeanStd", device)
        if not shape:
            raise ValueError(
                f"RunningMeanStd needs a shape of at least one dimension, but got {shape}."
            )
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"RunningMeanStd needs dtype torch.float32 or torch.float64, but got {dtype!r}."
            )
        # Never 0-dim: torch 2.13 loses in-place updates of a 0-dim float64 CPU buffer under torch.compile.
        dtypes = {
            "reference": dtype,
            "total": torch.float64,
            "squares": torch.float64,
            "count": torch.int64,
        }
        for name, dtype in dtypes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))
        # The sums that all processes of a group had after their last sync, or loaded; see `torchwrap.sync_statistics`.
        self.register_state_buffer("synced", torch.zeros_like(self.sums()))

    @property
    def mean(self) -> Tensor:
        """The mean, float64, of `shape`."""
        return self.reference + self._moments()[0]

    @property
    def var(self) -> Tensor:
        """The population variance, float64, of `shape`."""
        return self._moments()[1]

    def update(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Counts the finite values of `rows` `(n, *shape)`, or of those where `mask` (bool, `(n,)`) is set."""
        if len(rows) == 0:
            return
        reference = self.reference
        if not no_zero(self.count):  # the reference of a component is the first row that is counted
            first, unseen = rows[0], self.count == 0
            if mask is not None:
                index = torch.where(
                    mask, torch.arange(len(rows), device=rows.device), len(rows) - 1
                ).amin(0, keepdim=True)
                first, unseen = rows.index_select(0, index)[0], unseen & mask.index_select(0, index)
            reference = materialize(
                torch.where(unseen & (first.abs() < math.inf), first, reference)
            )
            self.reference.copy_(reference)
        differences = rows - reference
        # Of float64, what is too large to be squared is left out as well.
        counts = differences.abs() < (1e150 if differences.dtype == torch.float64 else math.inf)
        if mask is not None:
            counts &= mask.view(-1, *(1,) * (rows.dim() - 1))
        kept = torch.where(counts, differences, 0).double()
        self.total.add_(kept.sum(0))
        self.squares.add_(kept.square_().sum(0))
        self.count.add_(counts.sum(0, dtype=torch.int32))

    def normalize(self, rows: Tensor, epsilon: float) -> Tensor:
        """Returns (rows - mean) / sqrt(var + epsilon), float32."""
        mean, var = self._moments()
        differences = rows - self.reference
        mean = materialize(mean.to(differences.dtype))
        scale = materialize((var + epsilon).rsqrt().to(differences.dtype))
        return ((differences - mean) * scale).float()

    def scale(self, epsilon: float) -> Tensor:
        """Returns 1 / sqrt(var + epsilon), float32, of `shape`."""
        return (self.var + epsilon).rsqrt().float()

    def frozen(self, epsilon: float) -> Tensor:
        """The constants of `normalize`, in the dtype of the reference: reference, mean - reference, and scale."""
        mean, var = self._moments()
        return torch.stack(
            [
                self.reference,
                *(each.to(self.reference.dtype) for each in (mean, (var + epsilon).rsqrt())),
            ]
        )

    def sums(self) -> Tensor:
        """All that is added up: totals, squares and counts, float64, `(3, size)`."""
        return torch.stack(
            [part.flatten().double() for part in (self.total, self.squares, self.count)]
        )

    def set_sums(self, sums: Tensor, reference: Tensor) -> None:
        """Writes sums of differences from a reference `(size,)`, which all processes share from now on."""
        buffers = (self.reference, self.total, self.squares, self.count)
        for buffer, value in zip(buffers, (reference, *sums), strict=True):
            buffer.copy_(value.view_as(buffer))
        self.synced.copy_(sums)

    @torch.inference_mode()  # in which every buffer can be written to
    def set_moments(self, mean: Any, var: Any, count: Any) -> None:
        """Goes on from statistics of another library, as if it had counted `count` values of this mean and variance.

        Args:
            mean, var: tensors or arrays of `shape`, or a number for all components. `var` is the population variance.
            count: one number, or one per component, rounded to an integer of at least 1.

        >>> statistics = RunningMeanStd((2,))
        >>> statistics.set_moments([1.0, 2.0], [4.0, 9.0], count=100)
        >>> statistics.mean, statistics.var, statistics.count
        (tensor([1., 2.], dtype=torch.float64), tensor([4., 9.], dtype=torch.float64), tensor([100, 100]))
        """
        shape, found = self.count.shape, []
        for name, value, low in (("mean", mean, -math.inf), ("var", var, 0), ("count", count, 1)):
            needed = f"RunningMeanStd needs {name} of shape {tuple(shape)}"
            try:
                given = torch.as_tensor(value, dtype=torch.float64, device=self.count.device)
            except (RuntimeError, TypeError, ValueError):
                raise TypeError(
                    f"{needed} as numbers, but got {validation.shown(value)}."
                ) from None
            if given.dim() and given.shape != shape:
                raise ValueError(f"{needed}, but got {tuple(given.shape)}.")
            given = given.round() if name == "count" else given
            limit = torch.finfo(self.reference.dtype if name == "mean" else given.dtype).max
            if not ((given >= low) & (given.abs() <= limit)).all():
                raise ValueError(
                    f"{needed}, finite{f' and at least {low}' * (low >= 0)}, but got {validation.shown(value)}."
                )
            found.append(given.expand(shape).flatten())
        mean, var, count = found
        reference = mean.to(self.reference.dtype).double()
        shift = mean - reference
        self.set_sums(
            torch.stack([shift * count, (var + shift.square()) * count, count]), reference
        )

    def _warn_untrained(self, owner: str) -> None:
        if not self.count.is_meta and not self.count.any():
            remedy = "load those of a trained env with load_state_dict(), or learn them in train()"
            warnings.warn(
                f"{owner} normalizes in eval() with statistics that have no samples: {remedy}.",
                stacklevel=4,
            )

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        state_dict, prefix, errors = args[0], args[1], args[-1]
        if not errors and all(prefix + name in state_dict for name in self.state_dict()):
            with torch.inference_mode():  # in which every buffer can be written to
                self.synced.copy_(self.sums())  # every process loads the same statistics

    def _moments(self) -> tuple[Tensor, Tensor]:
        # The mean as a difference from the reference, and the variance.
        number = self.count.clamp(min=1)
        mean = self.total / number
        var = (
            self.squares / number - mean.square()
        ).relu()  # a reference of 0 may leave less than nothing
        return mean, var + (self.count == 0)


def sync_statistics(env: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Merges the running statistics of all processes. Each process then has the statistics of the rows that all have seen.

    Call it once per rollout, on every process of the group, in train() and eval() alike. One float64 all-reduce adds what each
    process has counted since the last call. Counts are exact, and sums equal a single process's up to the order of addition.
    Compiled envs and CUDA graphs stay valid. Without an initialized process group, the call does nothing.

    What `load_state_dict` has loaded counts as shared: every process has to load the same. A snapshot holds what was shared.

    Args:
        env: an `Env`, or any other module that contains statistics.
        group: the processes; None takes all of them.

    Raises:
        TypeError: if `env` is no module.
        RuntimeError: if torchrun has started several processes without a process group; if they have statistics of other
            names, shapes or order, or have loaded different ones (on each of them, before anything has changed); if the
            collective fails, because a process has ended.

    >>> import torchwrap as tw
    >>> env = tw.TransformedEnv(tw.make("CartPole-v1", num_envs=4, first_index=0), tw.transforms.NormalizeObservation())
    >>> td = env.reset(seed=0)
    >>> tw.sync_statistics(env)  # of one process: nothing to merge
    """
    if not isinstance(env, nn.Module):
        raise TypeError(
            f"sync_statistics needs an Env or another nn.Module, but got {type(env).__name__}."
        )
    if _world_size(group) == 1:
        if (
            not (dist.is_available() and dist.is_initialized())
            and os.environ.get("WORLD_SIZE", "1") != "1"
        ):  # of torchrun
            fault = f"sync_statistics runs in one of {os.environ['WORLD_SIZE']} processes, which have no process group"
            raise RuntimeError(f"{fault}: call torch.distributed.init_process_group() first.")
        return
    found = {
        name: part
        for name, part in env.named_modules()
        if isinstance(part, RunningMeanStd) and part.total.numel()
    }
    own = next(iter(found.values())).total.device if found else torch.device("cpu")
    backends = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    device = (
        own if own.type in backends else torch.device(backends[0])
    )  # NCCL reduces nothing on the CPU
    shapes = {name: tuple(part.total.shape) for name, part in found.items()}
    shared = [
        torch.cat([m.synced, torch.where(m.synced[2:] > 0, m.reference.view(1, -1), 0)])
        for m in found.values()
    ]
    content = b"".join([part.cpu().numpy().tobytes() for part in shared])
    code = zlib.crc32(f"{shapes} {device.type}".encode() + content)
    # Reducing tensors of different sizes or device types would end a process. These two integers are reduced first, because
    # their size and device type are the same on every process.
    common = device if device.type == backends[0] else torch.device(backends[0])
    extremes = _reduce(torch.tensor([code, -code], device=common), group, dist.ReduceOp.MAX)
    if extremes.sum():
        needed = (
            f"the same names, shapes, order and loaded values on all {_world_size(group)} processes"
        )
        got = f"others differ from those of rank {dist.get_rank(group)}, {shapes} on {device.type}"
        remedy = (
            "make the same env on each process, and load the same state_dict on each, or on none"
        )
        raise RuntimeError(f"sync_statistics needs statistics with {needed}, but {got}: {remedy}.")
    if found:
        _sync(list(found.values()), device, group)


@torch.inference_mode()  # in which every buffer can be written to
def _sync(
    modules: list[RunningMeanStd], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    world_size, rank, own = (
        dist.get_world_size(group),
        dist.get_rank(group),
        modules[0].total.device,
    )
    synced, sums, reference = (
        torch.cat([part.to(device) for part in parts], -1)
        for parts in zip(
            *((m.synced, m.sums(), m.reference.flatten().double()) for m in modules), strict=True
        )
    )
    has_value, agreed = sums[2] > 0, synced[2] > 0
    added = _reduce(sums - synced, group)
    if (~agreed & (added[2] > 0)).any():
        # The components that have their first values take the reference of the lowest rank that has one.
        owner = torch.where(has_value, rank, world_size).double()
        owner = _reduce(owner, group, dist.ReduceOp.MIN)
        common = _reduce(torch.where(owner == rank, reference, 0), group)
        sums, reference = _recentered(sums, torch.where(has_value, reference - common, 0)), common
        added = _reduce(sums - synced, group)
    sizes = [module.total.numel() for module in modules]
    merged, reference = (synced + added).to(own), reference.to(own)
    for module, part, common in zip(
        modules, merged.split(sizes, -1), reference.split(sizes), strict=True
    ):
        module.set_sums(part, common)


def _recentered(sums: Tensor, shift: Tensor) -> Tensor:
    """Sums of differences from a reference that is lower by `shift`."""
    total, squares, count = sums
    return torch.stack(
        [total + count * shift, squares + 2 * shift * total + count * shift * shift, count]
    )


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _reduce(
    values: Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM
) -> Tensor:
    try:
        dist.all_reduce(values, operation, group=group)
    except RuntimeError as error:
        number, reason = (
            dist.get_world_size(group),
            "another process has ended, waits elsewhere, or has other tensors",
        )
        got = f"the collective failed on rank {dist.get_rank(group)}: {reason}. {error}"
        raise RuntimeError(
            f"sync_statistics needs all {number} processes of the group, but {got}"
        ) from error
    return values
