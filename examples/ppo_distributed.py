"""ppo.py in several processes, which divide the envs and average their gradients.

torchrun --nproc-per-node 2 examples/ppo_distributed.py
torchrun --nproc-per-node 2 --max-restarts 10 examples/ppo_distributed.py --resume

Flags and results are those of ppo.py. The process of rank 0 writes and evaluates.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ppo
import torch
import torch.distributed as dist
import tyro
from ppo import Args, Batch
from ppo_presets import Agent, Make
from torch import Tensor, nn

import torchwrap as tw


def average(tensors: Sequence[Tensor]) -> None:
    """Replaces tensors by their means over all processes, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, mean in zip(tensors, flat.split(sizes)):
        tensor.copy_(mean.view_as(tensor))


def compute_gradients(agent: Agent, batch: Batch, rows: Tensor, args: Args) -> Batch:
    """Averaged gradients, then clipped. Early stopping takes the averaged KL divergence."""
    minibatch = {name: value[rows] for name, value in batch.items()}
    loss, stats = ppo.ppo_loss(agent, minibatch, args)
    agent.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in agent.parameters()]
    average([*gradients, stats["approx_kl"]])
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return stats


class Processes(ppo.Processes):
    compute_gradients = staticmethod(compute_gradients)

    def __init__(self, rank: int, number: int) -> None:
        self.rank = rank
        self.number = number

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.number if self.rank == 0 else None
        dist.gather_object(value, values)
        return values or []


def main(args: Args, make: Make = tw.make) -> dict[str, Any]:
    if "LOCAL_RANK" not in os.environ:
        raise RuntimeError("ppo_distributed.py: must be started by torchrun. ppo.py needs none.")
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    timeout = timedelta(minutes=5)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun's store outlives a restart: without a prefix, a process may look for another one
    # where it was before.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"restart {restart}", store)
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        return ppo.train(args, make, Processes(rank, world_size))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args))
