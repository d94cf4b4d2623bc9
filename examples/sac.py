"""SAC, after CleanRL's sac_continuous_action.py: continuous actions, torchwrap's own envs and Gymnasium's.

python examples/sac.py                                      swings Pendulum-v1 up
python examples/sac.py --env-id HalfCheetah-v5 --total-timesteps 1000000 --hidden-size 256 --batch-size 256 --policy-lr 3e-4
python examples/sac.py --compile                            the collection and the updates as graphs
python examples/sac.py --torchrl-buffer                     with TorchRL's replay buffer instead of replay.py's

Writes metrics.json, with the learning curve, and checkpoint.pt into --out.

The algorithm is that of Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with targets that bootstrap
after a truncation.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from dqn import adam_step, write_metrics
from gymnasium.spaces import Box
from ppo import adam_tensors
from replay import ReplayBuffer, TorchRLReplayBuffer
from tensordict import TensorDict
from torch import Tensor, nn, optim
from tqdm import tqdm

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args:
    """Flags are CleanRL's where it has the same."""

    env_id: str = "Pendulum-v1"
    """the id of the environment"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    device: str = "cpu"
    """device of the environments, of the replay buffer and of the agent"""
    compile: bool = False
    """compile the collection (the transforms if Gymnasium steps the env) and the updates"""
    num_threads: int = 1
    """PyTorch's threads on the CPU"""
    torchrl_buffer: bool = False
    """store transitions in TorchRL's replay buffer"""
    out: Path | None = None
    """folder of the results; None is runs/sac-<env_id>"""

    total_timesteps: int = 10_000
    """total number of env steps, with a gradient step for each of them"""
    num_envs: int = 4
    """number of parallel environments"""
    num_steps: int = 4
    """number of steps of each environment between two training phases"""
    buffer_size: int = 100_000
    """number of transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    n_step: int = 1
    """number of rewards in a return"""
    tau: float = 0.005
    """update rate of the target networks"""
    batch_size: int = 128
    """number of transitions per gradient step"""
    hidden_size: int = 64
    """width of the two hidden layers of each network"""
    learning_starts: int = 1_000
    """number of env steps with random actions before the first gradient step"""
    policy_lr: float = 1e-3
    """learning rate of the policy"""
    q_lr: float = 1e-3
    """learning rate of the Q networks and of the entropy coefficient"""
    policy_frequency: int = 2
    """number of gradient steps of the Q networks before as many of the policy"""
    target_network_frequency: int = 1
    """number of gradient steps per update of the target networks"""
    alpha: float = 0.2
    """entropy coefficient without autotune"""
    autotune: bool = True
    """learn the entropy coefficient, for an entropy of -1 per dimension of an action"""


def make_env(args: Args, num_envs: int) -> tw.Env:
    env = tw.make(args.env_id, num_envs, device=args.device)
    if not isinstance(env.single_action_space, Box):
        raise ValueError(
            f"sac.py needs an env with actions in a Box, but got {env.single_action_space}: dqn.py takes Discrete."
        )
    return tw.TransformedEnv(
        env, T.RescaleAction(-1, 1), T.RecordEpisodeStatistics(), T.FlattenObservation()
    )


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    layers = (
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )
    return nn.Sequential(*layers)


class Actor(nn.Module):
    """A normal distribution, squashed into [-1, 1] by tanh."""

    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        self.shape = env.single_action_space.shape
        self.network = mlp(
            env.single_observation_space.shape[0], args.hidden_size, 2 * math.prod(self.shape)
        )

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions `(n, *shape)` and their log probabilities `(n,)`."""
        mean, log_std = self.network(observation.float()).chunk(2, -1)
        log_std = -5 + 3.5 * (log_std.tanh() + 1)  # from -5 to 2
        noise = torch.randn_like(mean)
        sample = mean + log_std.exp() * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        # The logarithm of the derivative of tanh, 1 - tanh(x)**2, without its loss of precision.
        log_prob = log_prob - 2 * (math.log(2) - sample - nn.functional.softplus(-2 * sample))
        return sample.tanh().view(-1, *self.shape), log_prob.sum(-1)

    def act(self, td: TensorDict) -> Tensor:
        return self(td["observation"])[0]

    def greedy(self, td: TensorDict) -> Tensor:
        return self.network(td["observation"].float()).chunk(2, -1)[0].tanh().view(-1, *self.shape)


class Critic(nn.Module):
    """Two Q networks."""

    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        inputs = env.single_observation_space.shape[0] + math.prod(env.single_action_space.shape)
        self.networks = nn.ModuleList(mlp(inputs, args.hidden_size, 1) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """The values of both, `(2, n)`."""
        inputs = torch.cat([observation.float(), action.flatten(1)], -1)
        return torch.stack([network(inputs).squeeze(-1) for network in self.networks])


class Agent(nn.Module):
    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        self.actor, self.critic = Actor(env, args), Critic(env, args)
        self.target_critic = copy.deepcopy(self.critic)
        self.log_alpha = nn.Parameter(
            torch.tensor(0.0 if args.autotune else math.log(args.alpha)), args.autotune
        )
        self.target_entropy = -math.prod(env.single_action_space.shape)


def critic_loss(agent: Agent, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        action, log_prob = agent.actor(batch["next_observation"])
        value = (
            agent.target_critic(batch["next_observation"], action).amin(0)
            - agent.log_alpha.exp() * log_prob
        )
        # `discount` is 0 where the episode terminated. Where it was truncated, the next observation is its final one.
        target = batch["reward"] + batch["discount"] * value
    return (agent.critic(batch["observation"], batch["action"]) - target).square().mean(1).sum()


def actor_loss(agent: Agent, batch: dict[str, Tensor]) -> Tensor:
    action, log_prob = agent.actor(batch["observation"])
    alpha = agent.log_alpha.exp()
    policy_loss = alpha.detach() * log_prob - agent.critic(batch["observation"], action).amin(0)
    return (policy_loss - alpha * (log_prob.detach() + agent.target_entropy)).mean()


def update_critic(
    agent: Agent, tensors: dict[str, Any], batch: dict[str, Tensor], syncs: bool, args: Args
) -> None:
    """One gradient step of the Q networks, and one of their targets if `syncs`."""
    adam_step(
        tensors, torch.autograd.grad(critic_loss(agent, batch), tensors["params"]), args.compile
    )
    if syncs:
        with torch.no_grad():
            for target, parameter in zip(agent.target_critic.parameters(), tensors["params"]):
                target.lerp_(parameter, args.tau)


def update_actor(
    agent: Agent, groups: list[dict[str, Any]], batch: dict[str, Tensor], args: Args
) -> None:
    """One gradient step of the policy, and one of the entropy coefficient if it is learned."""
    loss = actor_loss(agent, batch)
    grads = iter(
        torch.autograd.grad(loss, [parameter for group in groups for parameter in group["params"]])
    )
    for group in groups:
        adam_step(group, [next(grads) for _ in group["params"]], args.compile)


def main(args: Args) -> dict[str, object]:
    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)
    out = args.out or Path("runs") / f"sac-{args.env_id}"
    out.mkdir(parents=True, exist_ok=True)

    env = make_env(args, args.num_envs)
    agent = Agent(env, args).to(args.device)
    # Learning rates are tensors, as PyTorch's compiled Adam wants them.
    q_lr, policy_lr = (torch.tensor(lr, device=args.device) for lr in (args.q_lr, args.policy_lr))
    q_tensors = adam_tensors(optim.Adam(agent.critic.parameters(), q_lr))
    groups = [adam_tensors(optim.Adam(agent.actor.parameters(), policy_lr))]
    groups += [adam_tensors(optim.Adam([agent.log_alpha], q_lr))] if args.autotune else []
    buffer_class = TorchRLReplayBuffer if args.torchrl_buffer else ReplayBuffer
    buffer = buffer_class(args.buffer_size, args.gamma, args.n_step, args.device)

    # ("next", "observation") is the true successor in every step, so nothing has to be done where an episode ended.
    keys = [
        "observation",
        "action",
        *(("next", name) for name in ("observation", "reward", "terminated", "done")),
    ]
    collect = tw.Collector(env, agent.actor.act, args.num_steps, keys=keys)
    critic_step, actor_step = update_critic, update_actor
    if args.compile:
        tw.compile(collect if isinstance(env.unwrapped, tw.FunctionalEnv) else env)
        torch._dynamo.config.trace_autograd_ops = True  # else autograd.grad would end a graph
        critic_step, actor_step = (
            torch.compile(step, fullgraph=True, dynamic=False) for step in (critic_step, actor_step)
        )

    td = env.reset(seed=args.seed)
    curve, updates, global_step = [], 0, 0
    progress = tqdm(total=args.total_timesteps, unit=" steps", unit_scale=True)
    while global_step < args.total_timesteps:
        data, td = (
            collect(td)
            if global_step >= args.learning_starts
            else tw.rollout(env, None, args.num_steps, td)
        )
        buffer.extend(data)
        global_step += data.numel()
        progress.update(data.numel())

        due = global_step - args.learning_starts - updates
        samples = buffer.sample(due * args.batch_size).split(args.batch_size) if due > 0 else ()
        for batch in (sample.to_dict() for sample in samples):
            updates += 1
            critic_step(agent, q_tensors, batch, updates % args.target_network_frequency == 0, args)
            for _ in range(args.policy_frequency if updates % args.policy_frequency == 0 else 0):
                actor_step(agent, groups, batch, args)

        returns = env.transforms[1].return_queue
        if len(returns) > 0:
            curve.append(
                (global_step, returns[-10:].mean().item(), time.perf_counter() - start_time)
            )
            progress.set_postfix({"return": f"{curve[-1][1]:.1f}"}, refresh=False)
    progress.close()
    seconds = time.perf_counter() - start_time
    torch.save(agent.state_dict(), out / "checkpoint.pt")

    eval_returns = tw.evaluate(
        make_env(args, 20), agent.actor.greedy, 20, seed=args.seed + 1_000_000
    )["episode_return"]
    return write_metrics(out, args, global_step, updates, seconds, curve, eval_returns)


if __name__ == "__main__":
    main(tyro.cli(Args))
