"""MountainCarContinuous-v0: constants and equations of Gymnasium's `Continuous_MountainCarEnv`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import Continuous_MountainCarEnv
from torch import Tensor

from torchwrap.envs.classic import State
from torchwrap.envs.mountain_car import MountainCar
from torchwrap.random import Key


class MountainCarContinuous(MountainCar):
    """A weak car in a valley, which is pushed by a continuous force.

    The episode ends on top of the right hill, with a reward of 100. Each step costs 0.1 times the square of the action.

    Args:
        goal_velocity: minimum velocity at the goal.
        dtype: of cosines, clipped forces and rewards. The state is always float32. Gymnasium's state is float32 too from the
            second state of an episode on, and with torch.float64 each step from there is bit-identical to Gymnasium's. Its
            initial state is float64, so it differs from ours by up to 3e-8, and by up to 1e-5 at the end of an episode.

    Raises:
        TypeError, ValueError: for an invalid argument.

    Shape: observations `(num_envs, 2)` float32 (position, velocity), actions `(num_envs, 1)` float32, the force, which is
    clipped to [-1, 1] in the dynamics but not in the cost. The reset options `low` and `high` bound the initial position; the
    initial velocity is 0.

    >>> import torchwrap as tw
    >>> tw.make("MountainCarContinuous-v0", num_envs=2, goal_velocity=0.01)
    <MountainCarContinuous-v0(num_envs=2, device=cpu)>
    """

    force, goal_position = 0.0015, 0.45

    renderer = Continuous_MountainCarEnv
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def initial(self, rng: Key, params: Any = None, low: float = -0.6, high: float = -0.4) -> State:
        return {field: value.float() for field, value in super().initial(rng, params, low, high).items()}

    def transition(self, state: State, action: Tensor, rng: Key, params: Any = None) -> State:
        requested = action.squeeze(-1)
        force = requested.clamp(-1, 1)
        pull = self.gravity * torch.cos((3 * state["position"]).to(self.dtype))
        # Gymnasium rounds to float32 before the subtraction. If it clips, the force is a Python float, and it rounds after it.
        unclipped, clipped = self.force * force - pull.float(), (self.force * force.to(self.dtype) - pull).float()
        return self._integrate(state, torch.where(requested.abs() > 1, clipped, unclipped))

    def reward(self, state: State, action: Tensor, next_state: State, rng: Key, params: Any = None) -> Tensor:
        cost = 0.1 * torch.square(action.squeeze(-1).to(self.dtype))
        return 100 * self.terminal(next_state, rng).to(self.dtype) - cost
