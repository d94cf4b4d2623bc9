"""One action for several steps, in each env until its episode ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import masks

Step = Callable[[TensorDict], TensorDict]


def repeat(step: Step, td: TensorDict, times: int, reset: Callable[[Tensor], object] | None = None) -> TensorDict:
    """The successor of `times` steps with the action of `td`: the latest of each env, with the sum of its rewards."""
    if times == 1:
        return step(td)
    whole: Any = None
    for successor, alive in successors(step, td, times, reset):
        whole = successor if alive is None else join(whole, successor, alive)
    return whole


def successors(
    step: Step, td: TensorDict, times: int, reset: Callable[[Tensor], object] | None = None
) -> Iterator[tuple[TensorDict, Tensor | None]]:
    """One step after the other, each with a mask of the envs whose episode had not ended before; None for all.

    The others are stepped too, for a batch is one, and what comes of it does not count: a reset follows. A simulator that
    refuses to step an episode that is over gets a `reset` of its own first, and as many steps whatever the other envs do, so
    that each env's random numbers are its own affair.
    """
    alive = None
    for left in reversed(range(times)):
        successor = step(td.copy())
        yield successor, alive
        over = (successor["terminated"] | successor["truncated"]).squeeze(-1)
        alive = ~over if alive is None else alive & ~over
        if reset is None and masks.free_to_look(over) and not alive.any():
            return
        if reset is not None and left and over.any():
            reset(over)


def join(whole: TensorDict, successor: TensorDict, alive: Tensor) -> TensorDict:
    """The later successor where `alive` (bool, `(num_envs,)`), and the sum of rewards."""
    reward = whole["reward"] + torch.where(alive.unsqueeze(-1), successor["reward"], 0)
    return masks.where(alive, successor, whole).set("reward", reward)
