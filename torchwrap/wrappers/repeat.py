"""Wrappers that repeat each action for several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.rows import RowMask
from torchwrap.env import Env
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper, layers


def repeat(
    step: Callable[[Any], TensorDict], action: Any, times: int, reset: Callable[[RowMask], object] | None = None
) -> TensorDict:
    """The successor of `times` steps with one action: the latest of each env's episode, with the sum of its rewards.

    An env whose episode is over is stepped too, because a batch is stepped as a whole, and what it returns is ignored: an
    auto-reset follows. A simulator that refuses to step an episode that is over needs `reset`. Every step is taken, whatever
    the other envs do, so that the random numbers of an env do not depend on them.
    """
    latest = whole = step(action.clone())  # which may write to it
    mask: Tensor | None = None
    for _ in range(times - 1):
        over = RowMask(latest["terminated"] | latest["truncated"], synchronize=reset is not None)
        mask = ~over.column if mask is None else mask & ~over.column
        alive = RowMask(mask)
        if reset is not None and over.any():
            reset(over)
        latest = step(action.clone())
        reward = whole["reward"] + torch.where(alive.column, latest["reward"], 0)
        whole = alive.where(latest, whole).set("reward", reward)
    return whole


class _Repeat(Wrapper):
    """Base for wrappers that step the env below several times."""

    repeats: int
    """Steps of the env below per action."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        if any(isinstance(layer, TransformedEnv) for layer in layers(env)):
            # Transforms would count and learn from the steps that an env takes after its end, while others continue.
            raise ValueError(f"{type(self).__name__} needs an env without transforms, but got {env!r}: put them on top of it.")
        self._reset_between = env._reset if env.host_stepped else None  # a simulator refuses to step an episode that is over

    def _read_clock(self) -> Tensor | None:
        steps = super()._read_clock()
        return None if steps is None else -(-steps // self.repeats)

    def _write_clock(self, steps: Tensor) -> None:
        super()._write_clock(steps * self.repeats)


class RepeatAction(_Repeat):
    """Repeats each action, until the episode ends at most, and sums the rewards.

    Observation, flags and info are those of the last step taken. The env's own limit of steps counts each step.

    Args:
        env: the env to wrap, without transforms.
        num_repeats: steps per action.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = RepeatAction(ScriptedEnv(1, episode_lengths=3), 2)
    >>> td = env.reset()
    >>> for _ in range(2):  # rewards 1 + 2, and 3
    ...     transition, td = env.step(td.set("action", env.sample_action()))
    >>> transition["next", "reward"], transition["next", "done"]
    (tensor([[3.]]), tensor([[True]]))
    """

    def __init__(self, env: Env, num_repeats: int) -> None:
        super().__init__(env)
        self.num_repeats = self.repeats = validation.integer("RepeatAction", "num_repeats", num_repeats, at_least=1)

    def _step(self, action: spaces.Value) -> TensorDict:
        return repeat(super()._step, action, self.num_repeats, self._reset_between)


class MaxAndSkipObservation(_Repeat):
    """Repeats each action `skip` times, sums the rewards, and returns the maximum of the last two observations.

    If an episode ends in between, these are the last two observations of that episode. Initial observations stay as they are.

    Args:
        env: the env to wrap, without transforms.
        skip: steps per action, at least 2.

    Shape: a Box of any shape, unchanged.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = MaxAndSkipObservation(ScriptedEnv(1, observation_shape=(1,)), skip=4)
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"]
    tensor([[4.]])
    """

    def __init__(self, env: Env, skip: int = 4) -> None:
        super().__init__(env)
        self.skip = self.repeats = validation.integer("MaxAndSkipObservation", "skip", skip, at_least=2)
        spaces.box("MaxAndSkipObservation", "observation", env.single_observation_space)

    def _step(self, action: spaces.Value) -> TensorDict:
        below, previous = super()._step, None

        def step(action: spaces.Value) -> TensorDict:
            nonlocal previous
            successor = below(action)
            observation = successor["observation"]
            # In an env whose episode is over, the successor that `repeat` keeps holds the one before.
            successor.set("previous_observation", observation if previous is None else previous)
            previous = observation
            return successor

        successor = repeat(step, action, self.skip, self._reset_between)
        before: Any = successor.pop("previous_observation")
        return successor.set("observation", torch.maximum(successor["observation"], before))
