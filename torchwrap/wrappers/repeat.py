"""Wrappers that repeat each action for several steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.rows import RowMask
from torchwrap.env import Env
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper, layers


class _Repeat(Wrapper):
    """Base for wrappers that step the env below several times."""

    def __init__(self, env: Env, repeats: int, summed_info: Sequence[str]) -> None:
        super().__init__(env)
        name, self.repeats = type(self).__name__, repeats  # steps of the env below per action
        if any(isinstance(layer, TransformedEnv) for layer in layers(env)):
            # Transforms would count and learn from the steps that an env takes after its end, while others continue.
            raise ValueError(
                f"{name} needs an env without transforms, but got {env!r}: put them on top of it."
            )
        if not env.unwrapped.can_repeat and env.num_envs > 1:
            remedy = "let the simulator repeat actions, such as with Gymnasium's wrapper around each of its envs"
            raise ValueError(
                f"{name} needs a simulator that can step some of its envs alone, but got {env!r}: {remedy}."
            )
        self.summed_info = validation.names(name, "summed_info", summed_info)
        below, own, limit = (
            env.signature.summed_info,
            frozenset(self.summed_info),
            env.signature.max_episode_steps,
        )
        if repeats > 1:
            summed = own if below is None else own & below
            self.signature = env.signature.replace(
                summed_info=summed, max_episode_steps=limit and -(-limit // repeats)
            )

    def _repeat(self, step: Callable[[Any], TensorDict], action: spaces.Value) -> TensorDict:
        """The successor of several steps with one action: the latest of each env's episode, with the sum of its rewards.

        A batch is stepped as a whole. What an env returns after the end of its episode is ignored. Every step is taken, so
        that the random numbers of an env do not depend on the other envs. A simulator on the host leaves out the envs whose
        episode is over, where it can, because its random numbers do not belong to episodes.
        """
        simulator = self.unwrapped if self.host_stepped else None
        whole = step(action.clone())  # which may write to it
        keys: list[Any] = ["reward", *(("info", name) for name in self.summed_info)]
        for key, value in zip(
            keys[1:], spaces.infos("summed_info", whole, self.summed_info), strict=True
        ):
            whole.set(key, value.float())
        outer = None if simulator is None else simulator._live
        try:
            for _ in range(self.repeats - 1):
                alive = RowMask(
                    ~(whole["terminated"] | whole["truncated"]), synchronize=simulator is not None
                )
                if simulator is not None:
                    if not alive.any():
                        break
                    simulator._live = alive
                latest = step(action.clone())
                sums = [whole[key] + alive.where(latest[key], 0) for key in keys]
                whole = alive.where(latest, whole)
                for key, value in zip(keys, sums, strict=True):
                    whole.set(key, value)
        finally:
            if simulator is not None:
                simulator._live = outer
        return whole

    def _read_clock(self) -> Tensor | None:
        steps = super()._read_clock()
        return None if steps is None else -(-steps // self.repeats)

    def _write_clock(self, steps: Tensor) -> None:
        super()._write_clock(steps * self.repeats)


class RepeatAction(_Repeat):
    """Repeats each action, until the episode ends at most, and sums the rewards.

    Observation, flags and other infos come from the last step taken. The env's own limit of steps counts each step.

    Args:
        env: the env to wrap, without transforms.
        num_repeats: steps per action.
        summed_info: names of infos to sum like the rewards, as float32, such as `metrics` of `RecordEpisodeStatistics`.

    Raises:
        ValueError: for a simulator of several envs that cannot leave out those whose episode is over.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = RepeatAction(ScriptedEnv(2, episode_lengths=(2, 1)), 2)
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "reward"].flatten()  # 1 + 2, and 1
    tensor([3., 1.])
    """

    def __init__(self, env: Env, num_repeats: int, *, summed_info: Sequence[str] = ()) -> None:
        super().__init__(
            env,
            validation.integer("RepeatAction", "num_repeats", num_repeats, at_least=1),
            summed_info,
        )
        self.num_repeats = self.repeats

    def _step(self, action: spaces.Value) -> TensorDict:
        return self._repeat(super()._step, action)


class MaxAndSkipObservation(_Repeat):
    """Repeats each action `skip` times, sums the rewards, and returns the maximum of the last two observations.

    If an episode ends in between, these are the last two observations of that episode. Initial observations stay as they are.

    Args:
        env: the env to wrap, without transforms.
        skip: steps per action, at least 2.
        summed_info: as for `RepeatAction`.

    Shape: a Box of any shape, unchanged.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = MaxAndSkipObservation(ScriptedEnv(1, observation_shape=(1,)), skip=4)
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"]
    tensor([[4.]])
    """

    def __init__(self, env: Env, skip: int = 4, *, summed_info: Sequence[str] = ()) -> None:
        super().__init__(
            env, validation.integer("MaxAndSkipObservation", "skip", skip, at_least=2), summed_info
        )
        self.skip = self.repeats
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

        successor = self._repeat(step, action)
        before: Any = successor.pop("previous_observation")
        return successor.set("observation", torch.maximum(successor["observation"], before))
