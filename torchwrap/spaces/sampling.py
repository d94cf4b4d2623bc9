"""Sampling: random members of a space."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import Space, spaces
from torch import Tensor

from torchwrap import random
from torchwrap.spaces.conversion import dtype
from torchwrap.spaces.traversal import Value, build
from torchwrap.spaces.validation import counts


def sample(space: Space[Any], stream: random.Stream) -> Value:
    """Draws a random member of the space for each env of the stream, distributed as Gymnasium's `Space.sample`.

    Args:
        space: of a single env.
        stream: the random stream, which advances by one step per leaf of the space. The value is drawn on its device.

    >>> sample(spaces.Discrete(3), random.Stream(5, seed=0)).shape
    torch.Size([5])
    """

    def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
        key = stream.key()
        stream.next_draw()
        return _sample_leaf(leaf, key)

    return build(space, make, len(stream.env))


def _sample_leaf(space: Space[Any], key: random.Key) -> Tensor:
    device, shape, to = key.env.device, space.shape or (), dtype(space)
    if isinstance(space, spaces.Box):
        integral = not to.is_floating_point
        work_dtype = torch.float32 if to in (torch.float32, torch.float16) else torch.float64
        low, high = (torch.as_tensor(bound, device=device).to(work_dtype) for bound in (space.low, space.high))
        # As Gymnasium: uniform between two bounds, exponential from one, normal without any. Integers are rounded down.
        fraction = random.uniform(key, shape, work_dtype)
        value = low * (1 - fraction) + (high + integral) * fraction  # high - low could overflow
        if not space.is_bounded():
            distance = random.exponential(key.fold_in(1), shape, work_dtype)
            unbounded = random.normal(key.fold_in(2), shape, work_dtype)
            below, above = (torch.as_tensor(bound, device=device) for bound in (space.bounded_below, space.bounded_above))
            value = torch.where(below & above, value, torch.where(below, low + distance, high + integral - distance))
            value = torch.where(below | above, value, unbounded)
        value = (value.floor() if integral else value).clamp(low, high)
        return value.to(to)
    count, start = counts(space, device)
    return (random.integers(key, count, shape) + start).to(to)
