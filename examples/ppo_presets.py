"""Hyperparameters by environment, and the networks of ppo.py and its variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

import torchwrap as tw

PRESETS = {
    "CartPole-v1": dict(
        total_timesteps=150_000,
        learning_rate=3e-3,
        num_envs=64,
        num_steps=32,
        gamma=0.98,
        gae_lambda=0.95,
        num_minibatches=4,
        update_epochs=8,
        clip_vloss=False,
        normalize=False,
    ),
    "Acrobot-v1": dict(
        total_timesteps=400_000,
        learning_rate=3e-3,
        num_envs=32,
        num_steps=128,
        gamma=0.99,
        gae_lambda=0.9,
        num_minibatches=4,
        update_epochs=10,
        clip_vloss=False,
        normalize=True,
    ),
    "MountainCar-v0": dict(
        total_timesteps=1_000_000,
        learning_rate=3e-3,
        num_envs=64,
        num_steps=128,
        gamma=0.99,
        gae_lambda=0.98,
        num_minibatches=16,
        update_epochs=10,
        clip_vloss=False,
        normalize=True,
    ),
    "MountainCarContinuous-v0": dict(
        total_timesteps=1_000_000,
        learning_rate=1e-3,
        num_envs=64,
        num_steps=256,
        gamma=0.9999,
        gae_lambda=0.9,
        num_minibatches=16,
        update_epochs=10,
        clip_vloss=False,
        normalize=True,
    ),
    "Pendulum-v1": dict(
        total_timesteps=400_000,
        learning_rate=1e-3,
        num_envs=32,
        num_steps=128,
        gamma=0.9,
        gae_lambda=0.95,
        num_minibatches=16,
        update_epochs=10,
        clip_vloss=False,
        normalize=True,
    ),
    # as CleanRL's ppo.py, but without an entropy bonus
    "any other env with discrete actions": dict(
        total_timesteps=500_000,
        learning_rate=2.5e-4,
        num_envs=4,
        num_steps=128,
        gamma=0.99,
        gae_lambda=0.95,
        num_minibatches=4,
        update_epochs=4,
        clip_vloss=True,
        normalize=False,
    ),
    # as CleanRL's ppo_continuous_action.py
    "any other env with continuous actions": dict(
        total_timesteps=1_000_000,
        learning_rate=3e-4,
        num_envs=1,
        num_steps=2048,
        gamma=0.99,
        gae_lambda=0.95,
        num_minibatches=32,
        update_epochs=10,
        clip_vloss=True,
        normalize=True,
    ),
}


Make = Callable[..., tw.Env]  # takes the arguments of tw.make

DISCRETE = gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete


def fill_in(args: Any, make: Make) -> None:
    """Sets the backend, and the hyperparameters and the target return that are None.

    A given number of envs keeps the preset's batch, with another number of steps.
    """
    probe = make(args.env_id, 1, backend=args.backend)
    is_discrete = isinstance(probe.single_action_space, DISCRETE)
    actions = "discrete" if is_discrete else "continuous"
    defaults = PRESETS[f"any other env with {actions} actions"]
    values = dict(PRESETS.get(args.env_id, defaults))
    if args.num_envs is not None:
        batch_size = values["num_envs"] * values["num_steps"]
        values["num_steps"] = max(1, batch_size // args.num_envs)
    values["target_return"] = getattr(probe.spec, "reward_threshold", None)
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    is_native = isinstance(probe.unwrapped, tw.FunctionalEnv)
    args.backend = "torch" if is_native else "gymnasium"
    probe.close()


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, std: float) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(inputs, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, outputs), std),
    )


class Choices:
    """The distribution of a MultiDiscrete action, whose components are independent."""

    def __init__(self, logits: Sequence[Tensor]) -> None:
        self.components = [Categorical(logits=each, validate_args=False) for each in logits]

    def sample(self) -> Tensor:
        return torch.stack([each.sample() for each in self.components], -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        pairs = zip(self.components, actions.unbind(-1), strict=True)
        return sum(component.log_prob(action) for component, action in pairs)

    def entropy(self) -> Tensor:
        return sum(each.entropy() for each in self.components)


class Agent(nn.Module):
    def __init__(self, env: tw.Env) -> None:
        super().__init__()
        action_space = env.single_action_space
        self.discrete = isinstance(action_space, DISCRETE)
        self.sizes = None  # numbers of choices of a MultiDiscrete action
        if isinstance(action_space, gymnasium.spaces.MultiDiscrete):
            self.sizes = action_space.nvec.tolist()
        inputs = env.single_observation_space.shape[0]
        outputs = gymnasium.spaces.flatdim(action_space)  # logits, or means of a Box
        self.critic = mlp(inputs, 1, std=1.0)
        self.actor = mlp(inputs, outputs, std=0.01)
        if not self.discrete:
            self.actor_logstd = nn.Parameter(torch.zeros(outputs))

    def get_value(self, observation: Tensor) -> Tensor:
        return self.critic(observation.float()).squeeze(-1)

    def get_distribution(self, observation: Tensor) -> Distribution | Choices:
        out = self.actor(observation.float())
        if self.sizes is not None:
            return Choices(out.split(self.sizes, -1))
        if self.discrete:
            return Categorical(logits=out, validate_args=False)
        normal = Normal(out, self.actor_logstd.exp(), validate_args=False)
        # Independent sums log probability and entropy over the dimensions of an action.
        return Independent(normal, 1, validate_args=False)

    def act(self, td: TensorDict) -> TensorDict:
        return td.set("action", self.get_distribution(td["observation"]).sample())
