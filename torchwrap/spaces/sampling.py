"""Sampling: random members of a space."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from torchwrap import random
from torchwrap._core.env_buffers import ConstantBuffer
from torchwrap.spaces.values import Path, Value, build, counts, dtype, leaves


class Sampler(nn.Module):
    """Draws a random member of a space for each env of a stream, distributed as Gymnasium's `Space.sample`.

    >>> Sampler(spaces.Discrete(3))(random.Stream(5, seed=0)).shape
    torch.Size([5])
    """

    def __init__(self, space: Space[Any], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.space = space
        self.parts = nn.ModuleList(
            _Box(leaf, device) if isinstance(leaf, spaces.Box) else _Counted(leaf, device) for _, leaf in leaves(space)
        )

    def forward(self, stream: random.Stream) -> Value:
        """Draws from the stream, which advances by one step per leaf of the space."""
        parts = iter(self.parts)

        def make(path: Path, leaf: Space[Any]) -> Tensor:
            stream.next_draw()
            return next(parts)(stream.key())

        return build(self.space, make, len(stream.env))


def sample(space: Space[Any], stream: random.Stream) -> Value:
    """Draws with a new `Sampler`, on the device of the stream."""
    return Sampler(space, stream.env.device)(stream)


class _Leaf(nn.Module):
    """Draws members of a leaf. Its numbers are buffers, because a captured step cannot copy them from the host."""

    def __init__(self, space: Space[Any], device: torch.device | str, **numbers: Any) -> None:
        super().__init__()
        self.shape, self.dtype = space.shape or (), dtype(space)
        for name, number in numbers.items():
            self.register_buffer(name, torch.tensor(number, device=device), persistent=False)


class _Counted(_Leaf):
    count, start = ConstantBuffer(), ConstantBuffer()

    def __init__(self, space: Space[Any], device: torch.device | str) -> None:
        count, start = counts(space)
        super().__init__(space, device, count=count, start=start)

    def forward(self, key: random.Key) -> Tensor:
        return (random.integers(key, self.count, self.shape) + self.start).to(self.dtype)


class _Box(_Leaf):
    low, high, below, above = (ConstantBuffer() for _ in range(4))

    def __init__(self, space: spaces.Box, device: torch.device | str) -> None:
        work = np.float32 if space.dtype in (np.float32, np.float16) else np.float64
        low, high = space.low.astype(work), space.high.astype(work)
        super().__init__(space, device, low=low, high=high, below=space.bounded_below, above=space.bounded_above)
        self.is_integral, self.is_bounded = not self.dtype.is_floating_point, space.is_bounded()

    def forward(self, key: random.Key) -> Tensor:
        # As Gymnasium: uniform between two bounds, exponential from one, normal without any. Integers are rounded down.
        low, high, shape = self.low, self.high, self.shape
        end = high + 1 if self.is_integral else high
        fraction = random.uniform(key, shape, low.dtype)
        value = low * (1 - fraction) + end * fraction  # end - low could overflow
        if not self.is_bounded:
            distance = random.exponential(key.fold_in(1), shape, low.dtype)
            unbounded = random.normal(key.fold_in(2), shape, low.dtype)
            from_bound = torch.where(self.below, low + distance, torch.where(self.above, end - distance, unbounded))
            value = torch.where(self.below & self.above, value, from_bound)
        return (value.floor() if self.is_integral else value).clamp(low, high).to(self.dtype)
