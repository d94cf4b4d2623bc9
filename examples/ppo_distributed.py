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
from typing import Any

import ppo
import torch
import torch.distributed as dist
import tyro
from ppo import Args, Batch
from ppo_output import Checkpoint, Log
from ppo_presets import Agent, Make, fill_in
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
    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)
    fill_in(args, make)
    num_envs = args.num_envs // world_size
    if num_envs * world_size != args.num_envs:
        fault = f"--num-envs must be a multiple of {world_size} processes, got {args.num_envs}"
        raise ValueError(f"ppo_distributed.py: {fault}.")
    env = ppo.make_env(args, num_envs, make, first_index=rank * num_envs)
    agent = ppo.make_agent(args, env)
    if rank > 0:  # the same network, but other actions
        torch.manual_seed(args.seed + 1_000_003 * rank)
    optimizer = ppo.make_optimizer(agent, args)
    collect = ppo.make_collector(env, agent, args)
    log = Log(args, env, start_time)
    to_batch = ppo.make_batch
    gradients = compute_gradients
    if args.compile:
        to_batch, gradients = ppo.compiled(collect, ppo.make_batch, compute_gradients)
        log.compile_seconds = log.seconds()
    env.reset(seed=args.seed)
    parts = {"agent": agent, "optimizer": optimizer, "log": log}
    checkpoint = Checkpoint(args, env, log.out, parts, world_size)
    if args.resume:
        checkpoint.load(rank)
    if rank == 0:
        log.start()
    window = -(-100 // world_size)  # 100 episodes of all processes
    for iteration in range(log.first_iteration, log.num_iterations):
        lr = args.learning_rate
        if args.anneal_lr:
            lr *= 1.0 - iteration / log.num_iterations
        optimizer.param_groups[0]["lr"] = lr
        data = collect()
        tw.sync_statistics(env)
        batch = to_batch(agent, data.to_dict(), args)
        stats = ppo.update(agent, optimizer, batch, args, gradients)

        returns = gather(log.statistics.return_queue[-window:].cpu(), rank)
        is_save = log.is_save(iteration)
        states = gather(checkpoint.process_state(), rank) if is_save else []
        if rank == 0:
            log.record(iteration, torch.cat(returns))
            log.write_scalars(iteration, data, batch, stats, lr)
            if is_save:
                checkpoint.save(states)
    metrics = {}
    if rank == 0:
        metrics = log.close(world_size)
        metrics["eval_mean_return"] = ppo.evaluate(args, env, agent, make)
        log.write(metrics)
    env.close()
    return metrics


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
