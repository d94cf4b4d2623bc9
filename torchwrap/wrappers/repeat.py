"""Wrappers that do one action for several steps."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchwrap import arguments, masks, repeat, spaces
from torchwrap.env import Env
from torchwrap.wrappers.base import TransformedEnv, Wrapper


class _Repeat(Wrapper):
    """Base for wrappers that step the env under them several times."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        layer = env
        while isinstance(layer, Wrapper):
            if isinstance(layer, TransformedEnv):
                # They would see, count and learn the steps that an env does after its end, while others go on.
                raise ValueError(
                    f"{type(self).__name__} needs an env without transforms, but got {env!r}: put them on top of it."
                )
            layer = layer.env
        self._between = None if env.can_snapshot else env._reset


class RepeatAction(_Repeat):
    """Does each action several times, or until the episode ends, and sums the rewards.

    What else comes out is that of the last step that was done: observation, flags, info. An env that ends in between waits
    for the others. The env's own limit of steps counts each of them.

    Args:
        env: the env below, without transforms.
        num_repeats: how often.

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
        self.num_repeats = arguments.integer("RepeatAction", "num_repeats", num_repeats, at_least=1)

    def _step(self, td: TensorDict) -> TensorDict:
        return repeat.repeat(self.env._step, td, self.num_repeats, self._between)


class MaxAndSkipObservation(_Repeat):
    """Does each action `skip` times, sums the rewards, and gives the maximum of the last two observations.

    Where an episode ends in between, those are the last two that it had. First observations are as they come.

    Args:
        env: the env below, without transforms.
        skip: how often, at least 2.

    Shape: a Box of any shape, and unchanged.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = MaxAndSkipObservation(ScriptedEnv(1, observation_shape=(1,)), skip=4)
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"]
    tensor([[4.]])
    """

    def __init__(self, env: Env, skip: int = 4) -> None:
        super().__init__(env)
        self.skip = arguments.integer("MaxAndSkipObservation", "skip", skip, at_least=2)
        spaces.box("MaxAndSkipObservation", "observation", env.single_observation_space)

    def _step(self, td: TensorDict) -> TensorDict:
        for successor, alive in repeat.successors(self.env._step, td, self.skip, self._between):
            if alive is None:
                whole, previous = successor, successor["observation"]
            else:
                previous = masks.where(alive, whole["observation"], previous)
                whole = repeat.join(whole, successor, alive)
        return whole.set("observation", torch.maximum(whole["observation"], previous))
