"""Statistics of several processes, which each step a shard of the envs."""

from __future__ import annotations

import os
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchwrap.transforms.normalize import RunningMeanStd


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
        raise TypeError(f"sync_statistics needs an Env or another nn.Module, but got {type(env).__name__}.")
    if _world_size(group) == 1:
        if not (dist.is_available() and dist.is_initialized()) and os.environ.get("WORLD_SIZE", "1") != "1":  # of torchrun
            fault = f"sync_statistics runs in one of {os.environ['WORLD_SIZE']} processes, which have no process group"
            raise RuntimeError(f"{fault}: call torch.distributed.init_process_group() first.")
        return
    found = {name: part for name, part in env.named_modules() if isinstance(part, RunningMeanStd) and part.total.numel()}
    own = next(iter(found.values())).total.device if found else torch.device("cpu")
    backends = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    device = own if own.type in backends else torch.device(backends[0])  # NCCL reduces nothing on the CPU
    shapes = {name: tuple(part.total.shape) for name, part in found.items()}
    shared = [torch.cat([m.synced, torch.where(m.synced[2:] > 0, m.reference.view(1, -1), 0)]) for m in found.values()]
    content = b"".join([part.cpu().numpy().tobytes() for part in shared])
    code = zlib.crc32(f"{shapes} {device.type}".encode() + content)
    # Reducing tensors of different sizes or device types would end a process. These two integers are reduced first, because
    # their size and device type are the same on every process.
    common = device if device.type == backends[0] else torch.device(backends[0])
    extremes = _reduce(torch.tensor([code, -code], device=common), group, dist.ReduceOp.MAX)
    if extremes.sum():
        needed = f"the same names, shapes, order and loaded values on all {_world_size(group)} processes"
        got = f"others differ from those of rank {dist.get_rank(group)}, {shapes} on {device.type}"
        remedy = "make the same env on each process, and load the same state_dict on each, or on none"
        raise RuntimeError(f"sync_statistics needs statistics with {needed}, but {got}: {remedy}.")
    if found:
        _sync(list(found.values()), device, group)


@torch.inference_mode()  # in which every buffer can be written to
def _sync(modules: list[RunningMeanStd], device: torch.device, group: dist.ProcessGroup | None) -> None:
    world_size, rank, own = dist.get_world_size(group), dist.get_rank(group), modules[0].total.device
    synced, sums, reference = (
        torch.cat([part.to(device) for part in parts], -1)
        for parts in zip(*((m.synced, m.sums(), m.reference.flatten().double()) for m in modules), strict=True)
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
    for module, part, common in zip(modules, merged.split(sizes, -1), reference.split(sizes), strict=True):
        module.set_sums(part, common)


def _recentered(sums: Tensor, shift: Tensor) -> Tensor:
    """Sums of differences from a reference that is lower by `shift`."""
    total, squares, count = sums
    return torch.stack([total + count * shift, squares + 2 * shift * total + count * shift * shift, count])


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _reduce(values: Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    try:
        dist.all_reduce(values, operation, group=group)
    except RuntimeError as error:
        number, reason = dist.get_world_size(group), "another process has ended, waits elsewhere, or has other tensors"
        got = f"the collective failed on rank {dist.get_rank(group)}: {reason}. {error}"
        raise RuntimeError(f"sync_statistics needs all {number} processes of the group, but {got}") from error
    return values
