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

COLUMNS = (
    "total_timesteps",
    "learning_rate",
    "num_envs",
    "num_steps",
    "gamma",
    "gae_lambda",
    "num_minibatches",
    "update_epochs",
    "clip_vloss",
    "normalize",
    "hidden_size",
    "log_std",
)
# as CleanRL's ppo.py, but without an entropy bonus
DISCRETE_ACTIONS = (500_000, 2.5e-4, 4, 128, 0.99, 0.95, 4, 4, True, False, 64, 0.0)
# as CleanRL's ppo_continuous_action.py
CONTINUOUS_ACTIONS = (10**6, 3e-4, 1, 2048, 0.99, 0.95, 32, 10, True, True, 64, 0.0)
PRESETS = {
    "CartPole-v1": (150_000, 3e-3, 64, 32, 0.98, 0.95, 4, 8, False, False, 64, 0.0),
    "Acrobot-v1": (400_000, 3e-3, 32, 128, 0.99, 0.9, 4, 10, False, True, 64, 0.0),
    "MountainCar-v0": (10**6, 3e-3, 64, 128, 0.99, 0.98, 16, 10, False, True, 64, 0.0),
    "MountainCarContinuous-v0": (10**6, 1e-3, 64, 256, 0.9999, 0.9, 16, 10, False, True, 64, 0.0),
    "Pendulum-v1": (400_000, 5e-4, 32, 128, 0.95, 0.95, 16, 10, False, True, 64, 0.0),
    "InvertedPendulum-v5": (10**6, 1e-3, 16, 128, 0.99, 0.95, 16, 10, False, True, 64, 0.0),
    "HalfCheetah-v5": (10**6, 3e-4, 8, 256, 0.98, 0.95, 32, 10, False, True, 256, -1.0),
    "Hopper-v5": (10**6, 3e-4, 8, 256, 0.99, 0.95, 32, 10, False, True, 256, -1.0),
    "Walker2d-v5": (10**6, 3e-4, 8, 256, 0.99, 0.95, 32, 10, False, True, 256, -1.0),
    "Ant-v5": (10**6, 3e-4, 8, 256, 0.98, 0.9, 8, 10, False, True, 256, -1.0),
    "Humanoid-v5": (10**6, 3e-4, 8, 256, 0.95, 0.9, 8, 10, False, True, 256, -1.0),
}

# By network: channels, size and stride of each convolution; the linear layer that follows
CONVOLUTIONS = {
    "minatar": [(16, 3, 1)],  # Young and Tian (2019), for grids of 10 x 10 cells
    "small": [(16, 8, 4), (32, 4, 2)],  # Mnih et al. (2013)
    "nature": [(32, 8, 4), (64, 4, 2), (64, 3, 1)],  # Mnih et al. (2015)
}
FEATURES = {"minatar": 128, "small": 256, "nature": 512}

Make = Callable[..., tw.Env]  # takes the arguments of tw.make

DISCRETE = gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete


def fill_in(args: Any, make: Make) -> None:
    """Sets the backend, and the hyperparameters and the target return that are None.

    A given number of envs keeps the preset's batch, with another number of steps. It is at least
    16, because PPO does not learn CartPole from rollouts of one step.
    """
    probe = make(args.env_id, 1, backend=args.backend)
    is_discrete = isinstance(probe.single_action_space, DISCRETE)
    defaults = DISCRETE_ACTIONS if is_discrete else CONTINUOUS_ACTIONS
    values = dict(zip(COLUMNS, PRESETS.get(args.env_id, defaults)))
    if args.num_envs is not None:
        batch_size = values["num_envs"] * values["num_steps"]
        values["num_steps"] = max(16, batch_size // args.num_envs)
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


def cnn(shape: Sequence[int], name: str) -> tuple[nn.Sequential, int]:
    """A network of `CONVOLUTIONS` for images `(n, *shape)`, and its number of features."""
    network = nn.Sequential()
    channels = shape[0]
    for outputs, size, stride in CONVOLUTIONS[name]:
        network.extend([layer_init(nn.Conv2d(channels, outputs, size, stride)), nn.ReLU()])
        channels = outputs
    pixels = network(torch.zeros(1, *shape)).numel()
    features = FEATURES[name]
    network.extend([nn.Flatten(), layer_init(nn.Linear(pixels, features)), nn.ReLU()])
    return network, features


def mlp(inputs: int, outputs: int, std: float, hidden_size: int) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(inputs, hidden_size)),
        nn.Tanh(),
        layer_init(nn.Linear(hidden_size, hidden_size)),
        nn.Tanh(),
        layer_init(nn.Linear(hidden_size, outputs), std),
    )


def image_shape(space: gymnasium.Space) -> tuple[int, ...] | None:
    """`(C, H, W)` of an image `(H, W, C)`, `(C, H, W)` or, of integers, `(H, W)`; None for others.

    H and W are the neighbors that are closest in size. A grid of the kinds 0 to 63 is made one-hot.
    """
    if not isinstance(space, gymnasium.spaces.Box):
        return None
    shape = space.shape
    if len(shape) == 2 and space.dtype.kind in "iu":
        kinds = int(space.high.max()) + 1
        is_one_hot = space.low.min() >= 0 and kinds <= 64
        shape = (kinds if is_one_hot else 1, *shape)
    elif len(shape) == 3 and abs(shape[0] - shape[1]) < abs(shape[1] - shape[2]):
        shape = (shape[2], *shape[:2])
    is_image = len(shape) == 3 and min(shape[1:]) >= 3
    return shape if is_image else None


class ImageNetwork(nn.Module):
    """`cnn` and a linear layer, for observations that have an `image_shape`."""

    def __init__(self, space: gymnasium.spaces.Box, outputs: int, std: float) -> None:
        super().__init__()
        self.shape = image_shape(space)
        self.is_grid = len(space.shape) == 2
        self.is_channels_last = space.shape != self.shape
        limit = max(-float(space.low.min()), float(space.high.max()))
        self.scale = limit if space.is_bounded() and limit > 0 else 1.0
        name = "minatar" if min(self.shape[1:]) < 36 else "small"
        self.network, features = cnn(self.shape, name)
        self.network.append(layer_init(nn.Linear(features, outputs), std))

    def to_images(self, observation: Tensor) -> Tensor:
        if self.is_grid:
            observation = observation.unsqueeze(-3)
            kinds = torch.arange(self.shape[0], device=observation.device)
            if len(kinds) > 1:
                return (observation == kinds.view(-1, 1, 1)).float()
        elif self.is_channels_last:
            observation = observation.movedim(-1, -3)
        return observation / self.scale

    def forward(self, observation: Tensor) -> Tensor:
        images = self.to_images(observation)
        outputs = self.network(images.reshape(-1, *self.shape))
        return outputs.view(*images.shape[:-3], -1)


def make_network(space: gymnasium.Space, outputs: int, std: float, hidden_size: int) -> nn.Module:
    if image_shape(space) is None:
        return mlp(space.shape[0], outputs, std, hidden_size)
    return ImageNetwork(space, outputs, std)


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
    def __init__(self, env: tw.Env, hidden_size: int = 64, log_std: float = 0.0) -> None:
        super().__init__()
        action_space = env.single_action_space
        self.discrete = isinstance(action_space, DISCRETE)
        self.sizes = None  # numbers of choices of a MultiDiscrete action
        if isinstance(action_space, gymnasium.spaces.MultiDiscrete):
            self.sizes = action_space.nvec.tolist()
        space = env.single_observation_space
        outputs = gymnasium.spaces.flatdim(action_space)  # logits, or means of a Box
        self.critic = make_network(space, 1, 1.0, hidden_size)
        self.actor = make_network(space, outputs, 0.01, hidden_size)
        if not self.discrete:
            self.actor_logstd = nn.Parameter(log_std * torch.ones(outputs))

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
