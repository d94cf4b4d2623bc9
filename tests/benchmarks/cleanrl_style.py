"""PPO on a Gymnasium vector env, in the structure of CleanRL's scripts.

python tests/benchmarks/cleanrl_style.py                        CartPole-v1, discrete actions
python tests/benchmarks/cleanrl_style.py --env-id Pendulum-v1   continuous, with normalization

Only `make_envs` uses torchwrap: the rest takes any `gymnasium.vector.VectorEnv` in same-step
auto-reset with episode statistics. A truncated episode is bootstrapped from `infos["final_obs"]`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
import tyro
from torch import Tensor, nn, optim
from torch.distributions import Categorical, Distribution, Independent, Normal

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args:
    """Hyperparameters that are None take a value in DEFAULTS."""

    env_id: str = "CartPole-v1"
    """the id of the environment"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    total_timesteps: int | None = None
    """total number of env steps"""
    num_envs: int | None = None
    """number of parallel environments"""
    num_steps: int | None = None
    """number of steps of each environment per rollout; None keeps the batch, with 16 or more"""
    learning_rate: float | None = None
    """learning rate of the optimizer, annealed linearly to zero"""
    gamma: float | None = None
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int | None = None
    """number of minibatches per epoch"""
    update_epochs: int | None = None
    """number of epochs per iteration"""
    clip_coef: float = 0.2
    """clipping coefficient of the surrogate objective"""
    ent_coef: float = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """maximum norm of the gradient"""


DEFAULTS = {
    "discrete": dict(
        total_timesteps=150_000,
        num_envs=32,
        num_steps=64,
        learning_rate=2e-3,
        gamma=0.98,
        num_minibatches=4,
        update_epochs=8,
    ),
    "continuous": dict(
        total_timesteps=200_000,
        num_envs=32,
        num_steps=64,
        learning_rate=1e-3,
        gamma=0.9,
        num_minibatches=8,
        update_epochs=10,
    ),
}


def make_envs(args: Args) -> gymnasium.vector.VectorEnv:
    env = tw.make(args.env_id, args.num_envs)
    transforms = [T.RecordEpisodeStatistics(), T.FlattenObservation()]
    if isinstance(env.single_action_space, gymnasium.spaces.Box):
        transforms += [T.ClipAction(), T.NormalizeObservation(), T.ClipObservation(-10, 10)]
        transforms += [T.NormalizeReward(gamma=args.gamma), T.ClipReward(-10, 10)]
    return tw.to_gymnasium(tw.TransformedEnv(env, *transforms))


def mlp(inputs: int, outputs: int, std: float) -> nn.Sequential:
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    layers = [*hidden, nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, std), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    def __init__(self, envs: gymnasium.vector.VectorEnv) -> None:
        super().__init__()
        inputs = envs.single_observation_space.shape[0]
        space = envs.single_action_space
        self.discrete = isinstance(space, gymnasium.spaces.Discrete)
        outputs = int(space.n) if self.discrete else space.shape[0]
        self.critic = mlp(inputs, 1, std=1.0)
        self.actor = mlp(inputs, outputs, std=0.01)
        self.logstd = nn.Parameter(torch.zeros(outputs))

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def policy(self, obs: Tensor) -> Distribution:
        out = self.actor(obs)
        if self.discrete:
            return Categorical(logits=out, validate_args=False)
        normal = Normal(out, self.logstd.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)


def to_tensor(array: np.ndarray) -> Tensor:
    return torch.as_tensor(array, dtype=torch.float32)


def main(args: Args) -> dict[str, float]:
    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # small minibatches are faster on one thread

    probe = gymnasium.make(args.env_id)
    is_discrete = isinstance(probe.action_space, gymnasium.spaces.Discrete)
    probe.close()
    defaults = dict(DEFAULTS["discrete" if is_discrete else "continuous"])
    if args.num_envs is not None:
        default_batch = defaults["num_envs"] * defaults["num_steps"]
        defaults["num_steps"] = max(16, default_batch // args.num_envs)
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    batch_size = args.num_envs * args.num_steps
    num_iterations = -(-args.total_timesteps // batch_size)

    envs = make_envs(args)
    agent = Agent(envs)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, *envs.single_observation_space.shape)
    actions = torch.zeros(*shape, *envs.single_action_space.shape)
    if agent.discrete:
        actions = actions.long()
    logprobs, rewards, values = torch.zeros(3, *shape)
    dones = torch.zeros(shape, dtype=torch.bool)
    returns: deque[float] = deque(maxlen=100)  # of the latest episodes

    next_obs, _ = envs.reset(seed=args.seed)
    for iteration in range(num_iterations):
        remaining = 1.0 - iteration / num_iterations
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate

        for step in range(args.num_steps):
            obs[step] = to_tensor(next_obs)
            with torch.no_grad():
                policy = agent.policy(obs[step])
                actions[step] = policy.sample()
                logprobs[step] = policy.log_prob(actions[step])
                values[step] = agent.value(obs[step])
            next_obs, reward, terminated, truncated, infos = envs.step(actions[step].numpy())
            rewards[step] = to_tensor(reward)
            dones[step] = torch.from_numpy(terminated | truncated)
            cut = np.flatnonzero(truncated & ~terminated)
            if len(cut) > 0:  # there, next_obs belongs to a new episode
                final_obs = np.stack(infos["final_obs"][cut])
                with torch.no_grad():
                    final_values = agent.value(to_tensor(final_obs))
                rewards[step, torch.from_numpy(cut)] += args.gamma * final_values
            if "episode" in infos:
                returns.extend(infos["episode"]["r"][infos["_episode"]].tolist())

        with torch.no_grad():
            advantages = torch.zeros(shape)
            ahead = torch.zeros(args.num_envs)
            next_value = agent.value(to_tensor(next_obs))
            for step in reversed(range(args.num_steps)):
                next_value = torch.where(dones[step], 0, next_value)
                ahead = torch.where(dones[step], 0, ahead)
                delta = rewards[step] + args.gamma * next_value - values[step]
                ahead = delta + args.gamma * args.gae_lambda * ahead
                advantages[step] = ahead
                next_value = values[step]
            targets = advantages + values

        batch = [value.flatten(0, 1) for value in (obs, actions, logprobs, advantages, targets)]
        for _ in range(args.update_epochs):
            for rows in torch.randperm(batch_size).chunk(args.num_minibatches):
                minibatch = [value[rows] for value in batch]
                mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_targets = minibatch
                policy = agent.policy(mb_obs)
                ratio = (policy.log_prob(mb_actions) - mb_logprobs).exp()
                std = mb_advantages.std(correction=0) + 1e-8
                mb_advantages = (mb_advantages - mb_advantages.mean()) / std
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = -torch.min(mb_advantages * ratio, mb_advantages * clipped).mean()
                v_loss = 0.5 * (agent.value(mb_obs) - mb_targets).square().mean()
                loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        if returns and (iteration % 10 == 9 or iteration + 1 == num_iterations):
            steps = (iteration + 1) * batch_size
            speed = steps / (time.perf_counter() - start_time)
            print(f"global_step={steps}, episodic_return={np.mean(returns):.1f}, SPS={speed:.0f}")
    envs.close()
    return {
        "mean_return": float(np.mean(returns)) if returns else float("nan"),
        "env_steps": num_iterations * batch_size,
        "seconds": time.perf_counter() - start_time,
    }


if __name__ == "__main__":
    main(tyro.cli(Args))
