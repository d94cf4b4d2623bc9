"""Sampling: random members of a space."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from torchwrap import random
from torchwrap._core.env_buffers import ConstantBuffer
from torchwrap.spaces.constants import Constants
from torchwrap.spaces.conversion import dtype
from torchwrap.spaces.traversal import Value, build, leaves
from torchwrap.spaces.validation import counts


class Sampler(nn.Module):
    """Draws a random member of a space for each env of a stream, distributed as Gymnasium's `Space.sample`.

    What it computes with is on the device from the start, because a captured step cannot copy it from the host.

    Args:
        space: of a single env.
        device: of the streams.

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

        def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
            stream.next_draw()
            return next(parts).draw(stream.key())  # type: ignore[no-any-return]

        return build(self.space, make, len(stream.env))


def sample(space: Space[Any], stream: random.Stream) -> Value:
    """Draws with a new `Sampler`, on the device of the stream.

    >>> sample(spaces.Discrete(3), random.Stream(5, seed=0)).shape
    torch.Size([5])
    """
    return Sampler(space, stream.env.device)(stream)


class _Leaf(Constants):
    def __init__(self, space: Space[Any]) -> None:
        super().__init__()
        self.shape, self.dtype = space.shape or (), dtype(space)


class _Counted(_Leaf):
    count, start = ConstantBuffer(), ConstantBuffer()

    def __init__(self, space: Space[Any], device: torch.device | str) -> None:
        super().__init__(space)
        count, start = counts(space)
        self.set_constants(device, count=count, start=start)

    def draw(self, key: random.Key) -> Tensor:
        return (random.integers(key, self.count, self.shape) + self.start).to(self.dtype)


class _Box(_Leaf):
    low, high, end, below, above = (ConstantBuffer() for _ in range(5))

    def __init__(self, space: spaces.Box, device: torch.device | str) -> None:
        super().__init__(space)
        self.is_integral, self.is_bounded = not self.dtype.is_floating_point, space.is_bounded()
        self.work_dtype = torch.float32 if self.dtype in (torch.float32, torch.float16) else torch.float64
        work = np.float32 if self.work_dtype == torch.float32 else np.float64
        low, high = space.low.astype(work), space.high.astype(work)
        end = high + self.is_integral
        self.set_constants(device, low=low, high=high, end=end, below=space.bounded_below, above=space.bounded_above)

    def draw(self, key: random.Key) -> Tensor:
        # As Gymnasium: uniform between two bounds, exponential from one, normal without any. Integers are rounded down.
        low, end, shape, work_dtype = self.low, self.end, self.shape, self.work_dtype
        fraction = random.uniform(key, shape, work_dtype)
        value = low * (1 - fraction) + end * fraction  # end - low could overflow
        if not self.is_bounded:
            distance = random.exponential(key.fold_in(1), shape, work_dtype)
            unbounded = random.normal(key.fold_in(2), shape, work_dtype)
            below, above = self.below, self.above
            value = _where(below & above, value, _where(below, low + distance, end - distance))
            value = _where(below | above, value, unbounded)
        return (value.floor() if self.is_integral else value).clamp(low, self.high).to(self.dtype)


def _where(condition: Any, first: Tensor, second: Tensor) -> Tensor:
    if isinstance(condition, Tensor):
        return torch.where(condition, first, second)
    return first if condition else second
