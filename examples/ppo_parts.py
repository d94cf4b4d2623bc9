"""Parts for ppo.py and other scripts: spaces of actions, masks, networks for images, epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from ppo import layer_init
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.wrappers import MaxAndSkipObservation, RepeatAction

REPEATS = (RepeatAction, MaxAndSkipObservation)

# Spaces of actions and observations


def agent_space(space: gymnasium.Space) -> gymnasium.Space:
    """The same actions as indices from 0, of Discrete or MultiDiscrete, or as a float32 vector."""
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec.flatten())
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete([2] * math.prod(space.shape))
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        with np.errstate(over="ignore"):
            low, high = np.float32([space.low.flatten(), space.high.flatten()])
        return spaces.Box(low, high)
    must = "actions must be Discrete, MultiDiscrete, MultiBinary or a Box of floats"
    raise ValueError(f"Agent: {must}, got {one_line(space)}.")


def one_line(space: gymnasium.Space) -> str:
    return " ".join(str(space).split())


class AgentAction(T.ActionTransform):
    """Turns actions of `agent_space` into those of the env."""

    offset: Tensor

    def setup(self, signature: tw.Signature) -> tw.Signature:
        space = signature.single_action_space
        smallest = tw.spaces.zeros(space, 1, signature.device)[0]
        is_box = isinstance(space, spaces.Box)
        self.register_buffer("offset", 0 * smallest if is_box else smallest, persistent=False)
        return signature.replace(single_action_space=agent_space(space))

    def action(self, action: Tensor) -> Tensor:
        offset = self.offset
        return action.reshape(-1, *offset.shape).to(offset.dtype) + offset


def agent_actions(space: gymnasium.Space) -> list[T.Transform]:
    """The transforms that give an env with these actions an `agent_space`."""
    above = agent_space(space)
    is_same = above == space and above.dtype == space.dtype
    return [] if is_same else [AgentAction()]


class MaskObservation(tw.Wrapper):
    """Adds masks of actions to observations: the env's info "action_masks", or its method.

    They are those of sb3-contrib: one number per action, and 0 if it is not allowed.
    """

    def __init__(self, env: tw.Env) -> None:
        masks = spaces.MultiBinary(spaces.flatdim(agent_space(env.single_action_space)))
        both = spaces.Dict(action_masks=masks, observation=env.single_observation_space)
        super().__init__(env, env.signature.replace(single_observation_space=both))

    def _step(self, action: Any) -> TensorDict:
        return self.with_masks(super()._step(action))

    def _reset(self, mask: tw.RowMask, options: Any = None) -> TensorDict:
        return self.with_masks(super()._reset(mask, options))

    def with_masks(self, td: TensorDict) -> TensorDict:
        simulator = self.unwrapped
        if "action_masks" in simulator.info_spaces:
            masks = simulator._root_info()["info"]["action_masks"]
        else:
            masks = self.env.get_wrapper_attr("action_masks")()
        if not isinstance(masks, Tensor):
            masks = torch.as_tensor(np.stack(masks), device=self.device)
        masks = masks.to(torch.int8, copy=True)
        both = {"action_masks": masks, "observation": td["observation"]}
        return td.set("observation", TensorDict(both, td.batch_size))


class MasksFirst(T.FlattenObservation):
    """One vector of the entries "action_masks" and "observation"."""

    masks_first = True


def put_below(env: tw.Env, transform: T.Transform) -> tw.Env:
    """The env with a transform below its other layers, but above repeated actions."""
    if env.is_compiled:
        raise ValueError(f"put_below: env must not be compiled yet, got {env}.")
    layers = [env]
    while isinstance(layers[-1], tw.Wrapper) and not isinstance(layers[-1], REPEATS):
        layers.append(layers[-1].env)
    inner = tw.TransformedEnv(layers.pop(), transform)
    if not layers:
        return inner
    layers[-1].env = inner
    return env


def record_own_rewards(env: tw.Env, metrics: dict[str, str] | None) -> tw.Env:
    """Puts RecordEpisodeStatistics below the layers that may change an env's rewards."""
    env = put_below(env, T.RecordEpisodeStatistics(stats_key="own"))
    if metrics:  # of infos that the layers may add
        statistics = T.RecordEpisodeStatistics(stats_key="agent", metrics=metrics)
        env = tw.TransformedEnv(env, statistics)
    return env


def plain(env: tw.Env, metrics: dict[str, str] | None = None) -> tw.Env:
    """An env that reports its own rewards, and takes actions of an `agent_space`."""
    if isinstance(env, tw.Wrapper):
        env = record_own_rewards(env, metrics)
    transforms = agent_actions(env.single_action_space)
    if transforms and isinstance(env.single_action_space, spaces.Box):
        transforms = [T.ClipAction(), *transforms]  # in the dtype of the bounds
    return tw.TransformedEnv(env, *transforms) if transforms else env


def to_vector(space: gymnasium.Space) -> list[T.Transform]:
    """The transforms that make a vector of numbers of observations."""
    if spaces.flatten_space(space).dtype == bool:
        return [T.FlattenObservation(), T.DtypeObservation("float32")]
    return [T.FlattenObservation()]


def has_masks(space: gymnasium.Space) -> bool:
    return isinstance(space, spaces.Dict) and "action_masks" in space.spaces


def adapt(
    env: tw.Env, vector: list[T.Transform], metrics: dict[str, str] | None
) -> tuple[tw.Env, list[T.Transform]]:
    """A `plain` env for an agent, and the transforms of vectors, beside its masks if it has any."""
    env = plain(env, metrics)
    if not has_masks(env.single_observation_space):
        in_info = "action_masks" in env.unwrapped.info_spaces
        if in_info or env.has_wrapper_attr("action_masks"):
            env = MaskObservation(env)
    space = env.single_observation_space
    if not has_masks(space):
        is_array = len(space.shape or ()) > 1 and image_shape(space) is None
        if is_array or spaces.flatten_space(space).dtype == bool:
            env = tw.TransformedEnv(env, *to_vector(space))
        return env, vector
    parts = {name: part for name, part in space.items() if name != "action_masks"}
    others = [T.FilterObservation([*parts]), *to_vector(spaces.Dict(parts)), *vector]
    masks = [T.FilterObservation(["action_masks"]), T.FlattenObservation()]
    groups = T.ObservationGroups({"action_masks": masks, "observation": others})
    return env, [groups, MasksFirst()]


# By network: channels, size and stride of each convolution; the linear layer that follows
CONVOLUTIONS = {
    "minatar": [(16, 3, 1)],  # Young and Tian (2019), for grids of 10 x 10 cells
    "small": [(16, 8, 4), (32, 4, 2)],  # Mnih et al. (2013)
    "nature": [(32, 8, 4), (64, 4, 2), (64, 3, 1)],  # Mnih et al. (2015)
}
FEATURES = {"minatar": 128, "small": 256, "nature": 512}


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

    def __init__(self, space: spaces.Box, outputs: int, std: float, *others: Any) -> None:
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


@torch.compiler.assume_constant_result
def sizes(space: spaces.MultiDiscrete) -> list[int]:
    """The number of values of each component, also in a graph."""
    return space.nvec.tolist()


class Choices:
    """The distribution of a MultiDiscrete action, whose components are independent."""

    def __init__(self, logits: Sequence[Tensor]) -> None:
        self.components = [Categorical(logits=each, validate_args=False) for each in logits]

    def sample(self) -> Tensor:
        return torch.stack([each.sample() for each in self.components], -1)

    @property
    def mode(self) -> Tensor:
        return torch.stack([each.mode for each in self.components], -1)

    @property
    def probs(self) -> Tensor:
        return torch.cat([each.probs for each in self.components], -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        pairs = zip(self.components, actions.unbind(-1), strict=True)
        return sum(component.log_prob(action) for component, action in pairs)

    def entropy(self) -> Tensor:
        return sum(each.entropy() for each in self.components)


def distribution(space: gymnasium.Space, out: Tensor, log_std: Tensor | None) -> Any:
    """The distribution of actions of an `agent_space`, from logits, or from means of a Box."""
    if isinstance(space, spaces.Discrete):
        return Categorical(logits=out, validate_args=False)
    if isinstance(space, spaces.MultiDiscrete):
        return Choices(out.split(sizes(space), -1))
    normal = Normal(out, log_std.exp(), validate_args=False)
    return Independent(normal, 1, validate_args=False)


def mlp(inputs: int, outputs: int, std: float) -> nn.Sequential:
    """As that of ppo.py, drawn in another order."""
    first = nn.Linear(inputs, 64)
    second = nn.Linear(64, 64)
    last = nn.Linear(64, outputs)
    for layer, gain in zip((first, second, last), (2**0.5, 2**0.5, std)):
        layer_init(layer, gain)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def largest(space: gymnasium.Space, scores: Tensor) -> Tensor:
    """The discrete action with the largest scores, one for each component."""
    if isinstance(space, spaces.Discrete):
        return scores.argmax(-1)
    parts = scores.split(sizes(space), -1)
    return torch.stack([part.argmax(-1) for part in parts], -1)


class NormalizeReward(T.NormalizeReward):
    """Its gamma is part of the env's state, so that each of several trainings has its own."""

    def setup(self, signature: tw.Signature) -> tw.Signature:
        gamma = torch.full((1,), self.gamma, dtype=torch.float64, device=signature.device)
        del self.gamma
        self.register_state_buffer("gamma", gamma)
        return super().setup(signature)


def train_epochs(
    agent: nn.Module, optimizer: Any, batch: dict[str, Tensor], args: Any, loss: Any
) -> Tensor:
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
