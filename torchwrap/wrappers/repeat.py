"""Wrappers that repeat each action for several steps."""

from __future__ import annotations

import math
from collections.abc import Callable
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

    def __init__(self, env: Env, repeats: int) -> None:
        super().__init__(env)
        if any(map(_transforms_steps, layers(env))):
            # They would count and learn from the steps of finished envs, while others continue.
            must = "env must have transforms of actions only"
            owner = type(self).__name__
            raise ValueError(refusal(owner, must, repr(env), "Put others on top of the wrapper"))
        # A simulator that cannot leave out finished envs raises, and says what to write instead.
        env._leave_out(RowMask(torch.zeros(env.num_envs, dtype=torch.bool)))
        self.repeats = repeats  # steps of the env below per action
        self.buffers_below = env._paths("_env_buffer_names")
        limit = env.signature.max_episode_steps
        if limit is not None:
            self.signature = env.signature.replace(max_episode_steps=math.ceil(limit / repeats))

    def _repeat(
        self,
        step: Callable[[Any], TensorDict],
        action: spaces.Value,
    ) -> TensorDict:
        """Takes several steps with one action.

        Returns the last successor of each env's episode, with the sum of its rewards. Native envs
        take every repeat, so that env *i*'s random numbers do not depend on the others, but
        finished envs keep the last state of their episode. Gymnasium's envs are left out instead.
        """
        successor = step(action.clone())  # which may write to it
        for _ in range(self.repeats - 1):
            done = successor["terminated"] | successor["truncated"]
            finished = RowMask(done, synchronize=self.host_stepped)
            last_rows = {}
            if finished.any():
                last_rows = {path: self.env.get_buffer(path).clone() for path in self.buffers_below}
                self.env._leave_out(finished)
            latest = step(action.clone())
            for path, value in last_rows.items():
                finished.assign_(self.env.get_buffer(path), value)
            latest.set("reward", successor["reward"] + latest["reward"])
            successor = finished.where(successor, latest)
        return successor

    def _clocks(self) -> list[Tensor]:
        fault = "elapsed_steps does not count repeated actions"
        raise RuntimeError(refusal(type(self).__name__, fault))


def _transforms_steps(layer: Env) -> bool:
    transforms = layer.transforms.flat() if isinstance(layer, TransformedEnv) else ()
    return any(type(part).step is not Transform.step for part in transforms)


class RepeatAction(_Repeat):
    """Repeats each action, until the episode ends at most, and sums the rewards.

    Observation, flags and infos come from the last step taken. The env's own limit of steps counts
    each step.

    Args:
        env: the env to wrap. Transforms of actions may be on it, such as a `DelayAction` that
            counts steps of the env; others go on top of this wrapper.
        num_repeats: steps per action.

    Raises:
        ValueError: for a simulator that cannot leave out envs whose episode is over: EnvPool, ALE's
            vector env, an `AsyncVectorEnv` that `torchwrap.make` did not make, functions that
            reset. The message says how they repeat actions.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = RepeatAction(ScriptedEnv(2, episode_lengths=(2, 1)), 2)
    >>> transition, td = env.step(env.reset().set("action", env.sample_action()))
    >>> transition["next", "reward"].flatten()  # 1 + 2, and 1
    tensor([3., 1.])
    """

    def __init__(self, env: Env, num_repeats: int) -> None:
        repeats = validation.integer("RepeatAction", "num_repeats", num_repeats, at_least=1)
        super().__init__(env, repeats)
        self.num_repeats = repeats

    def _step(self, action: spaces.Value) -> TensorDict:
        return self._repeat(super()._step, action)


class MaxAndSkipObservation(_Repeat):
    """Repeats each action, sums the rewards, and returns the maximum of the last two observations.

    If an episode ends in between, these are the last two observations of that episode. Initial
    observations stay unchanged.

    Args:
        env: the env to wrap, as for `RepeatAction`.
        skip: steps per action, at least 2.

    Shape: a Box of any shape, unchanged.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = MaxAndSkipObservation(ScriptedEnv(1, observation_shape=(1,)), skip=4)
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"]
    tensor([[4.]])
    """

    def __init__(self, env: Env, skip: int = 4) -> None:
        skip = validation.integer("MaxAndSkipObservation", "skip", skip, at_least=2)
        super().__init__(env, skip)
        self.skip = skip
        spaces.box("MaxAndSkipObservation", "observation", env.single_observation_space)
        spec = env.unwrapped.spec
        frameskip = 1 if spec is None else spec.kwargs.get("frameskip", 1)
        if frameskip != 1:  # of ALE
            must = "env must skip no frames itself"
            got = f"frameskip={frameskip}"
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
