"""Repeated steps: one action for several steps, in each env until its episode ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict

from torchwrap._core.rows import RowMask

Step = Callable[[Any], TensorDict]
Reset = Callable[[RowMask], object]


def repeat(step: Step, action: Any, times: int, reset: Reset | None = None) -> TensorDict:
    """The successor of `times` steps with one action: the latest of each env, with the sum of its rewards."""
    if times == 1:
        return step(action)
    whole: Any = None
    for successor, alive in repeated_steps(step, action, times, reset):
        whole = successor if alive is None else merge_repeated(whole, successor, alive)
    return whole


def repeated_steps(
    step: Step, action: Any, times: int, reset: Reset | None = None
) -> Iterator[tuple[TensorDict, RowMask | None]]:
    """Yields one successor after the other, each with the rows whose episode had not ended before; None for all rows.

    The other rows are stepped too, because a batch is stepped as a whole, and what they return is ignored: an auto-reset
    follows. A simulator that refuses to step an episode that is over needs `reset`. Every step is taken, whatever the other
    envs do, so that the random numbers of an env do not depend on them.
    """
    alive: RowMask | None = None
    for left in reversed(range(times)):
        successor = step(action)
        yield successor, alive
        over = RowMask(successor["terminated"] | successor["truncated"], synchronize=reset is not None)
        alive = ~over if alive is None else alive & ~over.tensor
        if reset is not None and left and over.any():
            reset(over)


def merge_repeated(whole: TensorDict, successor: TensorDict, alive: RowMask) -> TensorDict:
    """The later successor in the rows of `alive`, with the sum of rewards."""
    reward = whole["reward"] + torch.where(alive.column, successor["reward"], 0)
    merged: TensorDict = alive.where(successor, whole)
    return merged.set("reward", reward)
