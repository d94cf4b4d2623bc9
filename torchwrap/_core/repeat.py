"""Repeated steps: one action for several steps, in each env until its episode ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap._core.rows import RowMask


def repeat(
    step: Callable[[Any], TensorDict], action: Any, times: int, reset: Callable[[RowMask], object] | None = None
) -> TensorDict:
    """The successor of `times` steps with one action: the latest of each env's episode, with the sum of its rewards.

    An env whose episode is over is stepped too, because a batch is stepped as a whole, and what it returns is ignored: an
    auto-reset follows. A simulator that refuses to step an episode that is over needs `reset`. Every step is taken, whatever
    the other envs do, so that the random numbers of an env do not depend on them.
    """
    latest = whole = step(action)
    mask: Tensor | None = None
    for _ in range(times - 1):
        over = RowMask(latest["terminated"] | latest["truncated"], synchronize=reset is not None)
        mask = ~over.column if mask is None else mask & ~over.column
        alive = RowMask(mask)
        if reset is not None and over.any():
            reset(over)
        latest = step(action)
        reward = whole["reward"] + torch.where(alive.column, latest["reward"], 0)
        whole = alive.where(latest, whole).set("reward", reward)
    return whole
