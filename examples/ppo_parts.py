"""Parts for ppo.py and its variants: networks for images, multi-discrete actions, epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from ppo import layer_init, mlp
from torch import Tensor, nn
from torch.distributions import Categorical

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
    if image_shape(space) is not None:
        return ImageNetwork(space, outputs, std)
    flat = gymnasium.spaces.flatten_space(space)
    return nn.Sequential(nn.Flatten(-len(space.shape)), mlp(flat, outputs, std, hidden_size))


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
