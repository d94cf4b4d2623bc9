"""ppo.py in several processes, which divide the envs and average their gradients.

torchrun --nproc-per-node 2 examples/ppo_distributed.py
torchrun --nproc-per-node 2 --max-restarts 10 examples/ppo_distributed.py --resume

Flags and results are those of ppo.py. The process of rank 0 writes and evaluates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import ppo
import torch
import torch.distributed as dist
import tyro
from ppo import Agent, Args, Batch, Curve, Make
from ppo_output import Checkpoint, Scalars
from torch import Tensor, nn, optim
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T


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
    loss.backward()
    gradients = [parameter.grad for parameter in agent.parameters()]
    average([*gradients, stats["approx_kl"]])
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return stats


def gather(value: object, rank: int) -> list[Any]:
    """The values of all processes, on rank 0."""
    values = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(value, values)
    return values or []


def train(args: Args, make: Make, rank: int, world_size: int) -> dict[str, Any]:
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)
    ppo.fill_in(args, make)
    num_envs = args.num_envs // world_size
    if num_envs * world_size != args.num_envs:
        fault = f"--num-envs must be a multiple of {world_size} processes, got {args.num_envs}"
        raise ValueError(f"ppo_distributed.py: {fault}.")
    env = ppo.make_env(args, num_envs, make, first_index=rank * num_envs)
    returns_of = T.RecordEpisodeStatistics.of(env)[0]
    agent = Agent(env, args.hidden_size, args.log_std).to(args.device)
    if rank > 0:  # the same network, but other actions
        torch.manual_seed(args.seed + 1_000_003 * rank)
    optimizer = optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    collect = ppo.make_collector(env, agent, args)
    to_batch = ppo.make_batch
    gradients = compute_gradients
    if args.compile:
        to_batch, gradients = ppo.compiled(collect, ppo.make_batch, compute_gradients)
    train_minibatch = partial(ppo.train_minibatch, agent, optimizer, args, gradients)
    env.reset(seed=args.seed)
    curve = Curve()
    parts = {"agent": agent, "optimizer": optimizer, "curve": curve}
    checkpoint = Checkpoint(args, env, args.out, parts, world_size)
    if args.resume:
        checkpoint.load(rank)
    scalars = None
    if args.tensorboard and rank == 0:
        scalars = Scalars(args, env, len(curve))
    window = -(-100 // world_size)  # 100 episodes of all processes
    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)
    start -= curve[-1][3] if curve else 0
    for iteration in tqdm(range(len(curve), num_iterations), disable=rank > 0):
        remaining = 1.0 - iteration / num_iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        data = collect()
        tw.sync_statistics(env)
        batch = to_batch(agent, data.to_dict(), args)
        stats = ppo.update(batch, args, train_minibatch)

        returns = gather(returns_of.return_queue[-window:].cpu(), rank)
        number = iteration + 1
        is_due = number % args.save_every == 0 or number == num_iterations
        is_save = args.resume and is_due
        states = gather(checkpoint.process_state(), rank) if is_save else []
        if rank > 0:
            continue
        latest = torch.cat(returns).double()
        mean = latest.mean().item()
        deviation = (latest - mean).square().mean().sqrt().item()
        curve.append((number * batch_size, mean, deviation, time.perf_counter() - start))
        if scalars is not None:
            stats["learning_rate"] = optimizer.param_groups[0]["lr"]
            scalars.write(curve[-1], data, batch, stats)
        if is_save:
            checkpoint.save(states)
    if rank > 0:
        env.close()
        return {}
    return ppo.finish(args, env, agent, curve, make)


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
        return train(args, make, rank, world_size)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args))
