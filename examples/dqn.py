"""DQN, after CleanRL's dqn.py: discrete actions, torchwrap's own envs and Gymnasium's.

python examples/dqn.py                                      solves CartPole-v1
python examples/dqn.py --env-id Acrobot-v1 --n-step 1       another env, one-step targets
python examples/dqn.py --compile                            the collection and the whole update as graphs
python examples/dqn.py --torchrl-buffer                     with TorchRL's replay buffer instead of replay.py's

Writes metrics.json, with the learning curve, and checkpoint.pt into --out.

The algorithm is that of Mnih et al. (2015), with n-step returns, and targets that bootstrap after a truncation.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from gymnasium.spaces import Discrete
from ppo import adam_tensors
from replay import ReplayBuffer, TorchRLReplayBuffer
from tensordict import TensorDict
from torch import Tensor, nn, optim
from torch.optim.adam import adam
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args:
    """Flags are CleanRL's where it has the same. Frequencies count env steps, those of all envs together."""

    env_id: str = "CartPole-v1"
    """the id of the environment"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    device: str = "cpu"
    """device of the environments, of the replay buffer and of the agent"""
    compile: bool = False
    """compile the collection (the transforms if Gymnasium steps the env) and the whole update"""
    num_threads: int = 1
    """PyTorch's threads on the CPU"""
    torchrl_buffer: bool = False
    """store transitions in TorchRL's replay buffer"""
    out: Path | None = None
    """folder of the results; None is runs/dqn-<env_id>"""

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


def make_env(args: Args, num_envs: int) -> tw.Env:
    env = tw.make(args.env_id, num_envs, device=args.device)
    if not isinstance(env.single_action_space, Discrete):
        raise ValueError(
            f"dqn.py needs an env with Discrete actions, but got {env.single_action_space}: sac.py takes a Box."
        )
    return tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.FlattenObservation())


class QNetwork(nn.Module):
    epsilon: Tensor

    def __init__(self, env: tw.Env) -> None:
        super().__init__()
        self.num_actions = int(env.single_action_space.n)
        self.network = nn.Sequential(
            nn.Linear(env.single_observation_space.shape[0], 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, self.num_actions),
        )
        self.register_buffer(
            "epsilon", torch.ones(())
        )  # a buffer, because a graph would keep the value of a number

    def forward(self, observation: Tensor) -> Tensor:
        return self.network(observation.float())

    def greedy(self, td: TensorDict) -> Tensor:
        return self(td["observation"]).argmax(-1)

    def act(self, td: TensorDict) -> Tensor:
        greedy = self.greedy(td)
        is_random = torch.rand(greedy.shape, device=greedy.device) < self.epsilon
        return torch.where(is_random, torch.randint_like(greedy, self.num_actions), greedy)


def td_loss(q_network: QNetwork, target_network: QNetwork, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        # `discount` is 0 where the episode terminated. Where it was truncated, the next observation is its final one.
        target = batch["reward"] + batch["discount"] * target_network(
            batch["next_observation"]
        ).amax(-1)
    value = q_network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    return nn.functional.mse_loss(value, target)


def adam_step(tensors: dict[str, Any], grads: Sequence[Tensor], compiled: bool) -> None:
    """One step of Adam. No optimizer object and no backward(), so that one graph can hold a whole update."""
    implementation = dict(foreach=True, capturable=True) if compiled else dict(fused=True)
    settings = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0, amsgrad=False, maximize=False)
    state = [
        tensors[name] for name in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
    ]
    with torch.no_grad():
        adam(tensors["params"], list(grads), *state, lr=tensors["lr"], **settings, **implementation)


def update(
    q_network: QNetwork,
    target_network: QNetwork,
    tensors: dict[str, Any],
    batch: dict[str, Tensor],
    syncs: bool,
    args: Args,
) -> None:
    """One gradient step, and one of the target network if `syncs`."""
    loss = td_loss(q_network, target_network, batch)
    adam_step(tensors, torch.autograd.grad(loss, tensors["params"]), args.compile)
    if syncs:
        with torch.no_grad():
            for target, parameter in zip(target_network.parameters(), tensors["params"]):
                target.lerp_(parameter, args.tau)


def write_metrics(
    out: Path,
    args: Any,
    env_steps: int,
    updates: int,
    seconds: float,
    curve: list[tuple[int, float, float]],
    returns: Tensor,
) -> dict[str, object]:
    metrics = {
        "env": args.env_id,
        "seed": args.seed,
        "env_steps": env_steps,
        "gradient_steps": updates,
        "wall_seconds": round(seconds, 1),
        "final_mean_return": round(curve[-1][1], 2) if curve else None,
        "eval_mean_return": round(returns.mean().item(), 2),
    }
    short = [
        (step, round(value, 2), round(at, 1))
        for step, value, at in curve[:: max(1, len(curve) // 50)]
    ]
    (out / "metrics.json").write_text(json.dumps({**metrics, "curve": short}) + "\n")
    print(json.dumps(metrics, indent=2))
    return metrics


def main(args: Args) -> dict[str, object]:
    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)
    out = args.out or Path("runs") / f"dqn-{args.env_id}"
    out.mkdir(parents=True, exist_ok=True)

    env = make_env(args, args.num_envs)
    q_network = QNetwork(env).to(args.device)
    target_network = copy.deepcopy(q_network)
    # The learning rate is a tensor because a graph would keep the value of a number.
    lr = torch.tensor(args.learning_rate, device=args.device)
    tensors = adam_tensors(optim.Adam(q_network.parameters(), lr))
    buffer_class = TorchRLReplayBuffer if args.torchrl_buffer else ReplayBuffer
    buffer = buffer_class(args.buffer_size, args.gamma, args.n_step, args.device)

    # ("next", "observation") is the true successor in every step, so nothing has to be done where an episode ended.
    keys = [
        "observation",
        "action",
        *(("next", name) for name in ("observation", "reward", "terminated", "done")),
    ]
    collect, step = tw.Collector(env, q_network.act, args.num_steps, keys=keys), update
    if args.compile:
        tw.compile(collect if isinstance(env.unwrapped, tw.FunctionalEnv) else env)
        torch._dynamo.config.trace_autograd_ops = True  # else autograd.grad would end a graph
        step = torch.compile(update, fullgraph=True, dynamic=False)

    td = env.reset(seed=args.seed)
    curve, updates, global_step = [], 0, 0
    progress = tqdm(total=args.total_timesteps, unit=" steps", unit_scale=True)
    while global_step < args.total_timesteps:
        done = max(0, global_step - args.learning_starts) / (
            args.exploration_fraction * args.total_timesteps
        )
        q_network.epsilon.fill_(max(args.end_e, args.start_e + (args.end_e - args.start_e) * done))
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - global_step / args.total_timesteps))
        data, td = collect(td)
        buffer.extend(data)
        global_step += data.numel()
        progress.update(data.numel())

        due = (global_step - args.learning_starts) // args.train_frequency - updates
        samples = buffer.sample(due * args.batch_size).split(args.batch_size) if due > 0 else ()
        for batch in samples:
            updates += 1
            syncs = (
                updates * args.train_frequency % args.target_network_frequency
                < args.train_frequency
            )
            step(q_network, target_network, tensors, batch.to_dict(), syncs, args)

        returns = env.transforms[0].return_queue
        if len(returns) > 0:
            curve.append((global_step, returns.mean().item(), time.perf_counter() - start_time))
            progress.set_postfix({"return": f"{curve[-1][1]:.1f}"}, refresh=False)
    progress.close()
    seconds = time.perf_counter() - start_time
    torch.save({"q_network": q_network.state_dict()}, out / "checkpoint.pt")

    eval_returns = tw.evaluate(
        make_env(args, 20), q_network.greedy, 20, seed=args.seed + 1_000_000
    )["episode_return"]
    return write_metrics(out, args, global_step, updates, seconds, curve, eval_returns)


if __name__ == "__main__":
    main(tyro.cli(Args))
