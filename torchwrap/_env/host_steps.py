"""HostSteps: the steps and resets of a small batch on the CPU, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from torchwrap._env.host_function import Attributes, Function, HostFunction, Views
from torchwrap._env.initial_states import UpcomingStates
from torchwrap._env.translation import Array
from torchwrap.random import Key

_ONE = np.array(1)  # as an operand, a number takes twice as long as an array

Draw: TypeAlias = Callable[[Key], list[Tensor]]


class HostSteps:
    """Steps and resets a batch of envs in NumPy, each operator of which takes a quarter of the time of PyTorch's.

    A copy starts empty.

    Args:
        func_env: the functions of the env. What they return depends on their arguments and on its attributes alone.
    """

    def __init__(self, func_env: object) -> None:
        self.func_env = func_env
        self._attributes, self._views, self._upcoming = Attributes(func_env), Views(), UpcomingStates()
        self._advance, self._advance_and_finish = HostFunction(), HostFunction()

    def step(self, function: Function, tensors: list[Tensor], action: Any) -> list[Array] | None:
        """Advances the clock by a step, and calls a function of `(*state, draw, action)`; see `HostFunction`.

        Args:
            function: gives the next state, and the successor.
            tensors: the fields of the state, what else the function reads, and the words of the clock, as in `Key`.
            action: of all envs.

        Returns:
            The successor. None if it cannot be computed in NumPy; then nothing has changed.
        """
        return self._step(self._advance, function, self._attributes.version(), self._views(tensors), action)

    def step_and_reset(self, function: Function, tensors: list[Tensor], action: Any, draw: Draw) -> list[Array] | None:
        """As `step`, for a function that gives `done` and the observation to act on as well, and begins the next episodes.

        Args:
            function, tensors, action: as for `step`.
            draw: as for `reset`.

        Returns:
            The successor, with `done`, and the observation, in which initial ones are where an episode ended; or None.
        """
        arrays, version = self._views(tensors), self._attributes.version()
        results = self._step(self._advance_and_finish, function, version, arrays, action)
        if results is not None:
            *_, done, observation = results
            rows = done.nonzero()[0]
            if len(rows):
                observation[rows] = self._begin(rows, version, arrays, draw)
        return results

    def reset(self, rows: Array, tensors: list[Tensor], draw: Draw) -> Array:
        """Begins the next episode in some rows: advances the clock, and writes initial states.

        Args:
            rows: indices, at least one.
            tensors: as for `step`.
            draw: returns the initial state of each row of a key, whose tag is not set: the fields, and the observation.

        Returns:
            The initial observations of these rows.
        """
        return self._begin(rows, self._attributes.version(), self._views(tensors), draw)

    def _step(
        self, host: HostFunction, function: Function, version: int, arrays: list[Array], action: Any
    ) -> list[Array] | None:
        if not isinstance(action, Tensor):
            return None
        *state, _, _, _, _, draw = arrays
        arguments = (*state, draw, action.numpy())
        run = host.translated(function, version, arguments)
        if run is None:
            return None
        draw += 1
        return run(*arguments)

    def _begin(self, rows: Array, version: int, arrays: list[Array], draw: Draw) -> Array:
        *state, low, high, env, episode, step = arrays
        episode[rows] += _ONE
        step[rows] = 0
        *values, observation = self._upcoming.take([low, high, env, episode], rows, version, draw)
        for array, value in zip(state, values, strict=False):  # what the function only reads stays
            array[rows] = value
        return observation  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return HostSteps, (self.func_env,)
