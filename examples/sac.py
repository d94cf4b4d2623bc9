"""SAC, after CleanRL's sac_continuous_action.py: continuous actions.

python examples/sac.py                          swings Pendulum-v1 up
python examples/sac.py --env-id HalfCheetah-v5 --total-timesteps 1000000 \\
    --hidden-size 256 --batch-size 256 --policy-lr 3e-4
python examples/sac.py --compile                with graphs of collection and gradients
python examples/sac.py --resume                 continues a run that was killed

Writes metrics.json, with the learning curve, and checkpoint.pt into --out.

The algorithm is Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), with
targets that bootstrap after a truncation.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from dqn import Log, compiled, make_buffer, make_collector, update_target
from gymnasium.spaces import Box
from ppo import Flags
from ppo_output import Checkpoint
from ppo_parts import agent_actions, one_line
from replay import td_target
from tensordict import TensorDict
from torch import Tensor, nn, optim

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args(Flags):
    """Flags have CleanRL's names."""

    env_id: str = "Pendulum-v1"
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
    """folder of the results; None is runs/sac-<env_id>"""
    resume: bool = False
    """continue from the checkpoint in the folder of the results, if there is one"""
    save_every: int = 5_000
    """number of env steps between two checkpoints, which hold the replay buffer"""

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
    space = env.single_action_space
    is_box = isinstance(space, Box) and space.dtype.kind == "f"
    if not is_box or not space.is_bounded() or not (space.low < space.high).all():
        fault = f"env must have actions in a bounded Box of floats, got {one_line(space)}"
        raise ValueError(f"sac.py: {fault}. Use ppo.py, or dqn.py for Discrete actions.")
    rescaled = Box(-1, 1, space.shape, space.dtype)
    actions = [T.RescaleAction(-1, 1), *agent_actions(rescaled)]
    return tw.TransformedEnv(env, *actions, T.RecordEpisodeStatistics(), T.FlattenObservation())


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


class Actor(nn.Module):
    """A normal distribution, squashed into [-1, 1] by tanh."""

    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        self.shape = env.single_action_space.shape
        inputs = env.single_observation_space.shape[0]
        self.network = mlp(inputs, args.hidden_size, 2 * math.prod(self.shape))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions `(n, *shape)` and their log probabilities `(n,)`."""
        mean, log_std = self.network(observation.float()).chunk(2, -1)
        log_std = -5 + 3.5 * (log_std.tanh() + 1)  # from -5 to 2
        noise = torch.randn_like(mean)
        sample = mean + log_std.exp() * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        # The logarithm of the derivative of tanh, 1 - tanh(x)**2, without its loss of precision.
        log_derivative = 2 * (math.log(2) - sample - nn.functional.softplus(-2 * sample))
        actions = sample.tanh().view(-1, *self.shape)
        return actions, (log_prob - log_derivative).sum(-1)

    def act(self, td: TensorDict) -> Tensor:
        return self(td["observation"])[0]

    def greedy(self, td: TensorDict) -> Tensor:
        mean, _ = self.network(td["observation"].float()).chunk(2, -1)
        return mean.tanh().view(-1, *self.shape)


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
        self.actor = Actor(env, args)
        self.critic = Critic(env, args)
        self.target_critic = copy.deepcopy(self.critic)
        alpha = torch.tensor(1.0 if args.autotune else args.alpha)
        self.log_alpha = nn.Parameter(alpha.log(), requires_grad=args.autotune)
        self.target_entropy = -math.prod(env.single_action_space.shape)


def critic_loss(agent: Agent, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        action, log_prob = agent.actor(batch["next_observation"])
        value = agent.target_critic(batch["next_observation"], action).amin(0)
        soft_value = value - agent.log_alpha.exp() * log_prob
        # `discount` is 0 where the episode terminated. Where it was truncated, the next
        # observation is its final one.
        target = td_target(batch, soft_value)
    values = agent.critic(batch["observation"], batch["action"])
    return (values - target).square().mean(1).sum()


def actor_loss(agent: Agent, batch: dict[str, Tensor]) -> Tensor:
    action, log_prob = agent.actor(batch["observation"])
    alpha = agent.log_alpha.exp()
    value = agent.critic(batch["observation"], action).amin(0)
    policy_loss = alpha.detach() * log_prob - value
    alpha_loss = -alpha * (log_prob.detach() + agent.target_entropy)
    return (policy_loss + alpha_loss).mean()


def critic_gradients(agent: Agent, batch: dict[str, Tensor]) -> None:
    loss = critic_loss(agent, batch)
    loss.backward()


def actor_parameters(agent: Agent) -> list[nn.Parameter]:
    parameters = list(agent.actor.parameters())
    if agent.log_alpha.requires_grad:
        parameters.append(agent.log_alpha)
    return parameters


def actor_gradients(agent: Agent, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(actor_loss(agent, batch), actor_parameters(agent))


def main(args: Args) -> dict[str, object]:
    log = Log(args, "sac")
    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)

    env = make_env(args, args.num_envs)
    statistics = T.RecordEpisodeStatistics.of(env)[0]
    agent = Agent(env, args).to(args.device)
    critic_optimizer = optim.Adam(agent.critic.parameters(), args.q_lr, fused=True)
    actor_optimizer = optim.Adam(agent.actor.parameters(), args.policy_lr, fused=True)
    actor_optimizer.add_param_group({"params": [agent.log_alpha], "lr": args.q_lr})
    buffer = make_buffer(args)
    collect = make_collector(env, agent.actor.act, args)
    set_critic = critic_gradients
    compute_actor = actor_gradients
    if args.compile:
        set_critic, compute_actor = compiled(collect, critic_gradients, actor_gradients)

    env.reset(seed=args.seed)
    parts = {
        "agent": agent,
        "critic_optimizer": critic_optimizer,
        "actor_optimizer": actor_optimizer,
        "buffer": buffer,
        "log": log,
    }
    checkpoint = Checkpoint(args, env, log.out, parts)
    if args.resume:
        checkpoint.load()
    log.start()
    while log.global_step < args.total_timesteps:
        if log.global_step < args.learning_starts:
            data = tw.rollout(env, None, args.num_steps)
        else:
            data = collect()
        buffer.extend(data)
        log.count(data.numel())

        due = log.global_step - args.learning_starts - log.updates
        samples = []
        if due > 0:
            samples = buffer.sample(due * args.batch_size).split(args.batch_size)
        for sample in samples:
            batch = sample.to_dict()
            log.updates += 1
            critic_optimizer.zero_grad()  # not in the graph, as in dqn.py
            set_critic(agent, batch)
            critic_optimizer.step()
            if log.updates % args.target_network_frequency == 0:
                update_target(agent.target_critic, agent.critic, args.tau)
            if log.updates % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):
                    gradients = compute_actor(agent, batch)
                    for parameter, gradient in zip(actor_parameters(agent), gradients):
                        parameter.grad = gradient
                    actor_optimizer.step()

        log.record(statistics.return_queue[-10:])
        if log.is_save:
            checkpoint.save([checkpoint.process_state()])
    log.close()

    test_env = make_env(args, 20)
    episodes = tw.evaluate(test_env, agent.actor.greedy, 20, seed=args.seed + 1_000_000)
    return log.write(episodes["episode_return"])


if __name__ == "__main__":
    main(tyro.cli(Args))
