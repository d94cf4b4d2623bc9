"""PPO after CleanRL's ppo.py, for discrete, multi-discrete and continuous actions.

python examples/ppo.py                                  solves CartPole-v1
python examples/ppo.py --env-id HalfCheetah-v5          trains on a Gymnasium env
python examples/ppo.py --env-id module:Id               trains on your own env, once registered
python examples/ppo.py --tensorboard                    also writes CleanRL's TensorBoard scalars
python examples/ppo.py --resume                         continues a run that was killed

Writes metrics.json, learning_curve.png and checkpoint.pt into --out. ppo_presets.py holds
hyperparameters and networks, ppo_output.py what is written; ppo_distributed.py trains in processes.

The algorithm is Schulman et al. (2017) with the details of Huang et al., "The 37 Implementation
Details of Proximal Policy Optimization" (2022), with one difference: a truncated episode is
bootstrapped from its final observation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from ppo_output import Checkpoint, Log, find_statistics, results_folder
from ppo_presets import DISCRETE, Agent, Make, fill_in, image_shape
from torch import Tensor, nn, optim
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T

# A tanh by exp: Inductor's own takes three times as long.
INDUCTOR = {"cpp.use_decompose_tanh": True}

Batch = dict[str, Tensor]
Function = Callable[..., Batch]


@dataclass
class Args:
    """Flags have CleanRL's names. Those that are None take the env's values in ppo_presets.py."""

    env_id: str = "CartPole-v1"
    """the id of the environment"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    backend: Literal["torch", "gymnasium"] | None = None
    """whose env to take; None takes torchwrap's own if there is one"""
    device: str = "cpu"
    """device of the environments and of the agent"""
    compile: bool = False
    """compile the rollout (the transforms if Gymnasium steps the env) and the whole update"""
    num_threads: int = 1
    """PyTorch's threads on the CPU; small minibatches are faster on one"""
    out: Path | None = None
    """folder of the results; None is runs/ppo-<env_id>"""
    tensorboard: bool = False
    """write TensorBoard scalars into the folder of the results"""
    metrics: dict[str, str] | None = None
    """infos to record by episode, such as `--metrics success max energy sum`"""
    resume: bool = False
    """continue from the checkpoint in the folder of the results, if there is one"""
    save_every: int = 10
    """number of iterations between two checkpoints"""
    target_return: float | None = None
    """mean return of 100 episodes that counts as solved; None is the env's own threshold"""

    total_timesteps: int | None = None
    """total number of env steps"""
    learning_rate: float | None = None
    """learning rate of the optimizer"""
    num_envs: int | None = None
    """number of parallel environments"""
    num_steps: int | None = None
    """number of steps of each environment per rollout; None keeps the batch, with 16 or more"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to zero"""
    gamma: float | None = None
    """discount factor"""
    gae_lambda: float | None = None
    """lambda of generalized advantage estimation"""
    num_minibatches: int | None = None
    """number of minibatches per epoch"""
    update_epochs: int | None = None
    """number of epochs per iteration"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """clipping coefficient of the surrogate objective"""
    clip_vloss: bool | None = None
    """clip the change of the value function as well, to the same coefficient"""
    ent_coef: float = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""
    target_kl: float | None = None
    """end an iteration early if the approximate KL divergence exceeds this; None disables it"""
    normalize: bool | None = None
    """normalize observations and rewards by running statistics, and clip them to [-10, 10]"""
    hidden_size: int | None = None
    """units of each of the two hidden layers of the networks, unless observations are images"""
    log_std: float | None = None
    """logarithm of the initial standard deviation of continuous actions"""


def make_env(
    args: Args,
    num_envs: int,
    make: Make = tw.make,
    **arguments: Any,
) -> tw.Env:
    if args.metrics and args.backend == "gymnasium":
        arguments["info_keys"] = list(args.metrics)
    env = make(args.env_id, num_envs, backend=args.backend, device=args.device, **arguments)
    transforms = []
    if not isinstance(env.single_action_space, DISCRETE):
        transforms += [T.ClipAction()]
    transforms += [T.RecordEpisodeStatistics(metrics=args.metrics)]
    if image_shape(env.single_observation_space) is None:
        transforms += [T.FlattenObservation()]
        if args.normalize:
            transforms += [T.NormalizeObservation(), T.ClipObservation(-10, 10)]
    if args.normalize:
        transforms += [T.NormalizeReward(gamma=args.gamma), T.ClipReward(-10, 10)]
    return tw.TransformedEnv(env, *transforms)


def make_agent(args: Args, env: tw.Env) -> Agent:
    return Agent(env, args.hidden_size, args.log_std).to(args.device)


def load(args: Args, num_envs: int = 1, make: Make = tw.make) -> tuple[tw.Env, Agent]:
    """A new env and the agent of a finished run with `args`, with all that they learned."""
    fill_in(args, make)
    env = make_env(args, num_envs, make)
    agent = make_agent(args, env)
    path = results_folder(args) / "checkpoint.pt"
    checkpoint = torch.load(path, map_location=args.device, weights_only=True)
    env.load_state_dict(checkpoint["env"])
    agent.load_state_dict(checkpoint["agent"])
    return env, agent


def make_collector(env: tw.Env, agent: Agent, args: Args) -> tw.Collector:
    statistics = find_statistics(env).keys.values()
    successor = ["observation", "reward", "terminated", "done", *statistics]
    keys = ["observation", "action", *(("next", key) for key in successor)]
    return tw.Collector(env, agent.act, args.num_steps, keys=keys)


def gae(delta: Tensor, decay: Tensor) -> Tensor:
    """Generalized advantage estimation: `advantage[t] = delta[t] + decay[t] * advantage[t + 1]`.

    Arguments and result have shape `(num_envs, num_steps)`. Each pass doubles the number of steps
    that an advantage looks ahead, so 128 steps take 7 passes. Where `decay` is 0, the sum ends,
    even if NaN follows.
    """
    ahead = 1
    while ahead < delta.shape[1]:
        padding = (0, ahead)
        following = nn.functional.pad(delta[:, ahead:], padding)
        delta = delta + torch.where(decay > 0, decay * following, 0)
        decay = decay * nn.functional.pad(decay[:, ahead:], padding)
        ahead *= 2
    return delta


def estimate_advantages(data: Any, values: Tensor, next_values: Tensor, args: Any) -> Tensor:
    """Advantages of a rollout, from the values of observations and of their successors.

    A terminated episode may end in NaN, and NaN * 0 is NaN.
    """
    successor = data["next"]
    done = successor["done"].squeeze(-1)
    next_values = torch.where(successor["terminated"].squeeze(-1), 0, next_values)
    delta = successor["reward"].squeeze(-1) + args.gamma * next_values - values
    return gae(delta, args.gamma * args.gae_lambda * ~done)


@torch.no_grad()
def make_batch(agent: Agent, data: dict[str, Any], args: Args) -> Batch:
    """Flatten a rollout `(num_envs, num_steps)`, with log probabilities, advantages and returns."""
    values = agent.get_value(data["observation"])
    # Where an episode ended, the successor's observation is the final one. So a truncated episode
    # is bootstrapped from it.
    next_values = agent.get_value(data["next"]["observation"])
    advantages = estimate_advantages(data, values, next_values, args)
    batch = {
        "observation": data["observation"],
        "action": data["action"],
        "logprob": agent.get_distribution(data["observation"]).log_prob(data["action"]),
        "advantage": advantages,
        "value": values,
        "ret": advantages + values,
    }
    return {name: value.flatten(0, 1) for name, value in batch.items()}


def ppo_loss(agent: Agent, mb: Batch, args: Args) -> tuple[Tensor, Batch]:
    """The loss of a minibatch, and the figures that CleanRL logs."""
    distribution = agent.get_distribution(mb["observation"])
    logratio = distribution.log_prob(mb["action"]) - mb["logprob"]
    ratio = logratio.exp()

    advantages = mb["advantage"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    clipped_ratio = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()

    values = agent.get_value(mb["observation"])
    squares = (values - mb["ret"]) ** 2
    if args.clip_vloss:
        change = torch.clamp(values - mb["value"], -args.clip_coef, args.clip_coef)
        squares = torch.max(squares, (mb["value"] + change - mb["ret"]) ** 2)
    v_loss = 0.5 * squares.mean()

    entropy = distribution.entropy().mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    with torch.no_grad():
        is_clipped = (ratio - 1).abs() > args.clip_coef
        stats = {
            "value_loss": v_loss,
            "policy_loss": pg_loss,
            "entropy": entropy,
            "old_approx_kl": -logratio.mean(),
            "approx_kl": ((ratio - 1) - logratio).mean(),  # http://joschu.net/blog/kl-approx.html
            "clipfrac": is_clipped.float().mean(),
        }
    return loss, {name: value.detach() for name, value in stats.items()}


def make_optimizer(agent: Agent, args: Args) -> optim.Adam:
    return optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)


def compute_gradients(agent: Agent, batch: Batch, rows: Tensor, args: Args) -> Batch:
    """Clipped gradients of a minibatch; one graph if compiled. Returns CleanRL's figures."""
    minibatch = {name: value[rows] for name, value in batch.items()}
    loss, stats = ppo_loss(agent, minibatch, args)
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return stats


def update(
    agent: Agent,
    optimizer: optim.Optimizer,
    batch: Batch,
    args: Args,
    gradients: Function,
) -> Batch:
    """Epochs over a batch. Returns the last minibatch's figures, and the mean clipfrac."""
    clipfracs = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["ret"]), device=args.device)
        for rows in order.chunk(args.num_minibatches):
            # In a graph, it would stop PyTorch 2.13 from compiling later functions.
            optimizer.zero_grad()
            stats = gradients(agent, batch, rows, args)
            optimizer.step()
            clipfracs.append(stats["clipfrac"])
        if args.target_kl is not None and stats["approx_kl"] > args.target_kl:
            break
    return {**stats, "clipfrac": torch.stack(clipfracs).mean()}


def train_epochs(agent: nn.Module, optimizer: Any, batch: Batch, args: Any, loss: Any) -> Tensor:
    """Epochs of `loss(agent, minibatch, args)`, for variants of this file. Returns its mean."""
    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["ret"]), device=batch["ret"].device)
        for rows in order.chunk(args.num_minibatches):
            minibatch = {name: value[rows] for name, value in batch.items()}
            value = loss(agent, minibatch, args)
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            losses.append(value.detach())
    return torch.stack(losses).mean()


def compiled(collect: tw.Collector, *functions: Function) -> list[Function]:
    """Compiles the rollout, and returns compiled functions of the update."""
    tqdm.write("compiling the rollout; the first iteration compiles the update")
    is_native = isinstance(collect.env.unwrapped, tw.FunctionalEnv)
    # A simulator on the host runs as it is, and its transforms are compiled.
    tw.compile(collect if is_native else collect.env, options=INDUCTOR)
    torch._dynamo.config.trace_autograd_ops = True  # backward() becomes part of a graph
    options = dict(fullgraph=True, dynamic=False, options=INDUCTOR)
    return [torch.compile(function, **options) for function in functions]


def evaluate(args: Args, env: tw.Env, agent: Agent, make: Make) -> float:
    """The mean return of 20 fresh episodes, with the statistics that the transforms learned."""
    test_env = make_env(args, 20, make)
    test_env.load_state_dict(env.state_dict())
    # Actions are sampled: early in training, the mode of the policy can be far worse.
    episodes = tw.evaluate(test_env, agent.act, 20, seed=args.seed + 1_000_000)
    test_env.close()
    return episodes["episode_return"].mean().item()


def main(args: Args, make: Make = tw.make) -> dict[str, Any]:
    if "LOCAL_RANK" in os.environ:
        raise RuntimeError("ppo.py: must be one process. Give torchrun ppo_distributed.py.")
    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)
    fill_in(args, make)
    env = make_env(args, args.num_envs, make)
    agent = make_agent(args, env)
    optimizer = make_optimizer(agent, args)
    collect = make_collector(env, agent, args)
    log = Log(args, env, start_time)
    to_batch = make_batch
    gradients = compute_gradients
    if args.compile:
        to_batch, gradients = compiled(collect, make_batch, compute_gradients)
        log.compile_seconds = log.seconds()
    env.reset(seed=args.seed)
    parts = {"agent": agent, "optimizer": optimizer, "log": log}
    checkpoint = Checkpoint(args, env, log.out, parts)
    if args.resume:
        checkpoint.load()
    log.start()
    for iteration in range(log.first_iteration, log.num_iterations):
        lr = args.learning_rate
        if args.anneal_lr:
            lr *= 1.0 - iteration / log.num_iterations
        optimizer.param_groups[0]["lr"] = lr
        data = collect()
        batch = to_batch(agent, data.to_dict(), args)
        stats = update(agent, optimizer, batch, args, gradients)
        log.record(iteration, log.statistics.return_queue)
        log.write_scalars(iteration, data, batch, stats, lr)

        if log.is_save(iteration):
            checkpoint.save([checkpoint.process_state()])
    metrics = log.close()
    metrics["eval_mean_return"] = evaluate(args, env, agent, make)
    log.write(metrics)
    env.close()
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
