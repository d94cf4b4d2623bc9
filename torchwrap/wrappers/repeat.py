"""Wrappers that repeat each action for several steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.env import Env
from torchwrap.transforms.transform import Transform
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper, layers


class _Repeat(Wrapper):
    """Base for wrappers that step the env below several times."""

    def __init__(self, env: Env, repeats: int, summed_info: Sequence[str]) -> None:
        super().__init__(env)
        owner = type(self).__name__
        if any(map(_transforms_steps, layers(env))):
            # They would count and learn from the steps of finished envs, while others continue.
            must = "env must have transforms of actions only"
            raise ValueError(refusal(owner, must, repr(env), "Put others on top of the wrapper"))
        if not env.unwrapped.can_repeat and env.num_envs > 1:
            must = "env must have a simulator whose finished envs can wait for the others"
            remedy = (
                "Let the simulator repeat actions, such as with Gymnasium's wrapper around each "
                "of its envs, make(id, wrappers=[...])"
            )
            raise ValueError(refusal(owner, must, repr(env), remedy))
        self.repeats = repeats  # steps of the env below per action
        self.buffers_below = env._paths("_env_buffer_names")
        self.summed_info = validation.names(owner, "summed_info", summed_info)
        if repeats > 1:
            summed = frozenset(self.summed_info)
            if env.signature.summed_info is not None:
                summed &= env.signature.summed_info
            last: frozenset[str] | None = None
            if env.unwrapped.info_names is not None:
                last = frozenset(env.unwrapped.info_names) - summed
            limit = env.signature.max_episode_steps
            if limit is not None:
                limit = math.ceil(limit / repeats)
            self.signature = env.signature.replace(
                summed_info=summed, last_info=last, max_episode_steps=limit
            )

    def _repeat(
        self,
        step: Callable[[Any], TensorDict],
        action: spaces.Value,
    ) -> TensorDict:
        """Takes several steps with one action.

        Returns the last successor of each env's episode, with the sums of its rewards and
        `summed_info`. Native envs take every repeat, so that env *i*'s random numbers do not depend
        on the others, but finished envs keep the last state of their episode. Simulators stop if
        all are finished.
        """
        whole = step(action.clone())  # which may write to it
        keys: list[Any] = ["reward"]
        infos = spaces.infos("summed_info", whole, self.summed_info)
        for name, value in zip(self.summed_info, infos, strict=True):
            keys.append(("info", name))
            whole.set(("info", name), value.float())
        for _ in range(self.repeats - 1):
            done = whole["terminated"] | whole["truncated"]
            alive = RowMask(~done, synchronize=self.host_stepped)
            if self.host_stepped and not alive.any():
                break
            finished = RowMask(done)
            last_rows = self._clone_below() if finished.any() else {}
            latest = self._step_rows(alive, step, action.clone())
            for path, value in last_rows.items():
                finished.assign_(self.env.get_buffer(path), value)
            sums = [whole[key] + alive.where(latest[key], 0) for key in keys]
            whole = alive.where(latest, whole)
            for key, value in zip(keys, sums, strict=True):
                whole.set(key, value)
        masks = getattr(self.unwrapped, "successor_info_masks", {})
        for name in self.summed_info:
            masks.pop(name, None)  # every env has a sum
        return whole

    def _step_rows(
        self,
        alive: RowMask,
        step: Callable[[Any], TensorDict],
        action: spaces.Value,
    ) -> TensorDict:
        """Takes a step in which simulators and videos may leave out the other rows."""
        status = self.unwrapped._status
        outer = status.alive
        status.alive = alive
        try:
            return step(action)
        finally:
            status.alive = outer

    def _clone_below(self) -> dict[str, Tensor]:
        return {path: self.env.get_buffer(path).clone() for path in self.buffers_below}

    def _read_clock(self) -> Tensor | None:
        steps = super()._read_clock()
        return None if steps is None else -(-steps // self.repeats)

    def _move_clocks(self, steps: Tensor, observation: Any) -> Any:
        return super()._move_clocks(steps * self.repeats, observation)


def _transforms_steps(layer: Env) -> bool:
    transforms = layer.transforms.flat() if isinstance(layer, TransformedEnv) else ()
    return any(type(part).step is not Transform.step for part in transforms)


class RepeatAction(_Repeat):
    """Repeats each action, until the episode ends at most, and sums the rewards.

    Observation, flags and other infos come from the last step taken. The env's own limit of steps
    counts each step.

    Args:
        env: the env to wrap. Transforms of actions may be on it, such as a `DelayAction` that
            counts steps of the env; others go on top of this wrapper.
        num_repeats: steps per action.
        summed_info: names of infos to sum like the rewards, as float32, such as `metrics` of
            `RecordEpisodeStatistics`.

    Raises:
        ValueError: for several envs of a simulator that cannot leave out those whose episode is
            over: Gymnasium's `AsyncVectorEnv`, EnvPool, ALE.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = RepeatAction(ScriptedEnv(2, episode_lengths=(2, 1)), 2)
    >>> transition, td = env.step(env.reset().set("action", env.sample_action()))
    >>> transition["next", "reward"].flatten()  # 1 + 2, and 1
    tensor([3., 1.])
    """

    def __init__(
        self,
        env: Env,
        num_repeats: int,
        *,
        summed_info: Sequence[str] = (),
    ) -> None:
        repeats = validation.integer("RepeatAction", "num_repeats", num_repeats, at_least=1)
        super().__init__(env, repeats, summed_info)
        self.num_repeats = repeats

    def _step(self, action: spaces.Value) -> TensorDict:
        return self._repeat(super()._step, action)


class MaxAndSkipObservation(_Repeat):
    """Repeats each action, sums the rewards, and returns the maximum of the last two observations.

    If an episode ends in between, these are the last two observations of that episode. Initial
    observations stay unchanged.

    Args:
        env: the env to wrap, with transforms of actions only.
        skip: steps per action, at least 2.
        summed_info: as for `RepeatAction`.

    Shape: a Box of any shape, unchanged.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = MaxAndSkipObservation(ScriptedEnv(1, observation_shape=(1,)), skip=4)
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"]
    tensor([[4.]])
    """

    def __init__(
        self,
        env: Env,
        skip: int = 4,
        *,
        summed_info: Sequence[str] = (),
    ) -> None:
        skip = validation.integer("MaxAndSkipObservation", "skip", skip, at_least=2)
        super().__init__(env, skip, summed_info)
        self.skip = skip
        spaces.box("MaxAndSkipObservation", "observation", env.single_observation_space)
        spec = env.unwrapped.spec
        skips = [] if spec is None else [spec.kwargs.get("frameskip", 1)]
        if env.has_wrapper_attr("_frameskip"):  # ALE's name
            skips += env.get_wrapper_attr("_frameskip")
        if any(skip != 1 for skip in skips):
            must = "env must skip no frames itself"
            got = f"frameskip={skips[-1]}"
            remedy = "Pass frameskip=1 to torchwrap.make"
            raise ValueError(refusal("MaxAndSkipObservation", must, got, remedy))

    def _step(self, action: spaces.Value) -> TensorDict:
        step_below = super()._step
        latest: spaces.Value | None = None

        def step(action: spaces.Value) -> TensorDict:
            nonlocal latest
            successor = step_below(action)
            previous = latest
            latest = successor["observation"]
            # For finished envs, `_repeat` keeps the last successor, with its predecessor.
            return successor.set("previous", latest if previous is None else previous)

        successor = self._repeat(step, action)
        previous: Any = successor.pop("previous")
        return successor.set("observation", torch.maximum(successor["observation"], previous))
