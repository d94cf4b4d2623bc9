"""DQN, after CleanRL's dqn.py: discrete actions, torchwrap's own envs and Gymnasium's.

python examples/dqn.py                                  solves CartPole-v1
python examples/dqn.py --env-id Acrobot-v1 --n-step 1   another env, one-step targets
python examples/dqn.py --compile                        with graphs of collection and gradients
python examples/dqn.py --resume                         continues a run that was killed

Writes metrics.json, with the learning curve, and checkpoint.pt into --out.

The algorithm is Mnih et al. (2015), with n-step returns, and targets that bootstrap after a
truncation.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from gymnasium.spaces import Discrete
from ppo import Flags
from ppo_output import Checkpoint
from ppo_parts import agent_actions, one_line
from replay import ReplayBuffer, td_target
from tensordict import TensorDict
from torch import Tensor, nn, optim
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args(Flags):
    """Flags have CleanRL's names. Frequencies count the steps of all envs together."""

    env_id: str = "CartPole-v1"
    """the id of the environment"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    device: str = "cpu"
    """device of the environments, of the replay buffer and of the agent"""
    compile: bool = False
    """compile the collection (the transforms if Gymnasium steps the env) and the gradients"""
    num_threads: int = 1
    """PyTorch's threads on the CPU"""
    out: Path | None = None
    """folder of the results; None is runs/dqn-<env_id>"""
    resume: bool = False
    """continue from the checkpoint in the folder of the results, if there is one"""
    save_every: int = 10_000
    """number of env steps between two checkpoints, which hold the replay buffer"""

    total_timesteps: int = 80_000
    """total number of env steps"""
    learning_rate: float = 2.3e-3
    """learning rate of the optimizer"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to zero"""
    num_envs: int = 32
    """number of parallel environments"""
    num_steps: int = 4
    """number of steps of each environment between two training phases"""
    buffer_size: int = 50_000
    """number of transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    n_step: int = 3
    """number of rewards in a return"""
    tau: float = 0.01
    """update rate of the target network"""
    target_network_frequency: int = 2
    """number of env steps per update of the target network"""
    batch_size: int = 128
    """number of transitions per gradient step"""
    start_e: float = 1.0
    """probability of a random action at the start"""
    end_e: float = 0.04
    """probability of a random action at the end"""
    exploration_fraction: float = 0.1
    """fraction of total_timesteps that it takes to go from start_e to end_e"""
    learning_starts: int = 1_024
    """number of env steps with random actions before the first gradient step"""
    train_frequency: int = 2
    """number of env steps per gradient step"""


def make_env(args: Any, num_envs: int, make: Callable[..., tw.Env] = tw.make) -> tw.Env:
    env = make(args.env_id, num_envs, device=args.device)
    space = env.single_action_space
    if not isinstance(space, Discrete):
        fault = f"env must have Discrete actions, got {one_line(space)}"
        raise ValueError(f"dqn.py: {fault}. Use sac.py for a Box, ppo.py for others.")
    transforms = [*agent_actions(space), T.RecordEpisodeStatistics(), T.FlattenObservation()]
    return tw.TransformedEnv(env, *transforms)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    first = nn.Linear(inputs, 120)
    second = nn.Linear(120, 84)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(84, outputs))


class QNetwork(nn.Module):
    epsilon: Tensor

    def __init__(self, env: tw.Env, network: nn.Module | None = None) -> None:
        super().__init__()
        self.num_actions = int(env.single_action_space.n)
        self.network = network or mlp(env.single_observation_space.shape[0], self.num_actions)
        # A buffer, because a number would be a constant of a graph.
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, observation: Tensor) -> Tensor:
        return self.network(observation.float())

    def greedy(self, td: TensorDict) -> Tensor:
        return self(td["observation"]).argmax(-1)

    def act(self, td: TensorDict) -> Tensor:
        greedy = self.greedy(td)
        random = torch.randint_like(greedy, self.num_actions)
        is_random = torch.rand(greedy.shape, device=greedy.device) < self.epsilon
        return torch.where(is_random, random, greedy)


def td_loss(q_network: QNetwork, target_network: QNetwork, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        next_value = target_network(batch["next_observation"]).amax(-1)
        # `discount` is 0 where the episode terminated. Where it was truncated, the next
        # observation is its final one.
        target = td_target(batch, next_value)
    action = batch["action"].unsqueeze(-1)
    value = q_network(batch["observation"]).gather(-1, action).squeeze(-1)
    return nn.functional.mse_loss(value, target)


Function = Callable[..., Any]


def compute_gradients(
    q_network: QNetwork,
    target_network: QNetwork,
    batch: dict[str, Tensor],
) -> None:
    loss = td_loss(q_network, target_network, batch)
    loss.backward()


def make_buffer(args: Any) -> ReplayBuffer:
    return ReplayBuffer(args.buffer_size, args.gamma, args.n_step, args.device)


def make_collector(env: tw.Env, policy: Callable[..., Tensor], args: Any) -> tw.Collector:
    # The successor is always the true one, so nothing has to be done where an episode ended.
    successor = ("observation", "reward", "terminated", "done")
    keys = ["observation", "action", *(("next", name) for name in successor)]
    return tw.Collector(env, policy, args.num_steps, keys=keys)


def compiled(collect: tw.Collector, *functions: Function) -> list[Function]:
    """Compiles the collection, and returns compiled functions of the update."""
    is_native = isinstance(collect.env.unwrapped, tw.FunctionalEnv)
    tw.compile(collect if is_native else collect.env)
    torch._dynamo.config.trace_autograd_ops = True  # backward() becomes part of a graph
    return [torch.compile(each, fullgraph=True, dynamic=False) for each in functions]


def update_target(target: nn.Module, network: nn.Module, tau: float) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([*target.parameters()], [*network.parameters()], tau)


class Log:
    """Progress, learning curve and metrics."""

    def __init__(self, args: Any, name: str) -> None:
        self.args = args
        self.out = args.out or Path("runs") / f"{name}-{args.env_id.replace('/', '-')}"
        self.out.mkdir(parents=True, exist_ok=True)
        self.start_time = time.perf_counter()
        self.global_step = 0  # env steps
        self.updates = 0  # gradient steps
        self.curve: list[tuple[int, float, float]] = []  # env steps, mean return, seconds

    def state_dict(self) -> dict[str, Any]:
        return {
            "global_step": self.global_step,
            "updates": self.updates,
            "curve": self.curve,
            "seconds": self.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.global_step = state["global_step"]
        self.updates = state["updates"]
        self.curve = state["curve"]
        self.start_time -= state["seconds"]

    def start(self) -> None:
        total = self.args.total_timesteps
        self.progress = tqdm(total=total, initial=self.global_step, unit=" steps", unit_scale=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.start_time

    def count(self, num_steps: int) -> None:
        """Counts env steps, and decides whether to save after the updates."""
        before = self.global_step // self.args.save_every
        self.global_step += num_steps
        is_last = self.global_step >= self.args.total_timesteps
        self.is_save = is_last or self.global_step // self.args.save_every > before
        self.progress.update(num_steps)

    def record(self, returns: Tensor) -> None:
        """Adds the mean return of the latest episodes to the curve."""
        if len(returns) > 0:
            mean = returns.mean().item()
            self.curve.append((self.global_step, mean, self.seconds()))
            self.progress.set_postfix({"return": f"{mean:.1f}"}, refresh=False)

    def close(self) -> None:
        self.wall_seconds = self.seconds()
        self.progress.close()

    def write(self, returns: Tensor) -> dict[str, object]:
        """Writes the metrics, with the mean of the returns of an evaluation."""
        metrics = {
            "env": self.args.env_id,
            "seed": self.args.seed,
            "env_steps": self.global_step,
            "gradient_steps": self.updates,
            "wall_seconds": round(self.wall_seconds, 1),
            "final_mean_return": round(self.curve[-1][1], 2) if self.curve else None,
            "eval_mean_return": round(returns.mean().item(), 2),
        }
        short = []
        for step, value, at in self.curve[:: max(1, len(self.curve) // 50)]:
            short.append((step, round(value, 2), round(at, 1)))
        (self.out / "metrics.json").write_text(json.dumps({**metrics, "curve": short}) + "\n")
        print(json.dumps(metrics, indent=2))
        print(f"results in {self.out}")
        return metrics


def evaluate(args: Args, q_network: QNetwork) -> Tensor:
    """The returns of 20 greedy episodes."""
    env = make_env(args, 20)
    seed = args.seed + 1_000_000
    return tw.evaluate(env, q_network.greedy, 20, seed=seed)["episode_return"]


def main(args: Args) -> dict[str, object]:
    torch.manual_seed(args.seed)
    env = make_env(args, args.num_envs)
    return train(args, env, QNetwork(env), make_buffer(args), evaluate)


def train(
    args: Args,
    env: tw.Env,
    q_network: QNetwork,
    buffer: Any,
    evaluate: Function,
) -> dict[str, object]:
    log = Log(args, "dqn")
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)

    statistics = T.RecordEpisodeStatistics.of(env)[0]
    q_network.to(args.device)
    target_network = copy.deepcopy(q_network)
    optimizer = optim.Adam(q_network.parameters(), args.learning_rate, fused=True)
    collect = make_collector(env, q_network.act, args)
    gradients = compute_gradients
    if args.compile:
        (gradients,) = compiled(collect, compute_gradients)

    env.reset(seed=args.seed)
    parts = {
        "q_network": q_network,
        "target_network": target_network,
        "optimizer": optimizer,
        "buffer": buffer,
        "log": log,
    }
    checkpoint = Checkpoint(args, env, log.out, parts)
    if args.resume:
        checkpoint.load()
    learning_starts = args.learning_starts
    if buffer.num_steps == 0:  # also if checkpoints lack it
        learning_starts += log.global_step - log.updates * args.train_frequency
    exploration_steps = max(1, args.exploration_fraction * args.total_timesteps)
    log.start()
    while log.global_step < args.total_timesteps:
        explored = max(0, log.global_step - args.learning_starts) / exploration_steps
        epsilon = args.start_e + (args.end_e - args.start_e) * explored
        q_network.epsilon.fill_(max(args.end_e, epsilon))
        if args.anneal_lr:
            remaining = 1 - log.global_step / args.total_timesteps
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        data = collect()
        buffer.extend(data)
        log.count(data.numel())

        due = (log.global_step - learning_starts) // args.train_frequency - log.updates
        samples = []
        if due > 0:
            samples = buffer.sample(due * args.batch_size).split(args.batch_size)
        for batch in samples:
            # In a graph, it would stop PyTorch 2.13 from compiling later functions.
            optimizer.zero_grad()
            gradients(q_network, target_network, batch.to_dict())
            optimizer.step()
            log.updates += 1
            env_steps = log.updates * args.train_frequency
            if env_steps % args.target_network_frequency < args.train_frequency:
                update_target(target_network, q_network, args.tau)

        log.record(statistics.return_queue)
        if log.is_save:
            checkpoint.save([checkpoint.process_state()])
    log.close()
    return log.write(evaluate(args, q_network))


if __name__ == "__main__":
    main(tyro.cli(Args))
