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
    """A weak car in a valley, pushed by a force; the episode ends up on the right hill, for 100 less what the force cost.

    Args:
        goal_velocity: which the car needs there at least.
        dtype: of cosines, clipped forces and rewards. The state is of float32 whatever it is, as Gymnasium's is from an
            episode's second state on, and with float64 the same to the last bit. Gymnasium's first state is of float64:
            where it begins, the car is up to 3e-8 beside ours, and up to 1e-5 by the end of an episode.

    Shape: observations `(num_envs, 2)` float32 (position, velocity), actions `(num_envs, 1)` float32, the force, which is
    clipped to +-1, but costs what it is. The reset options `low` and `high` bound where it begins, with velocity 0.
    """

    force, goal_position = 0.0015, 0.45

    painter = Continuous_MountainCarEnv
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def initial(self, rng: Key, params: Any = None, low: float = -0.6, high: float = -0.4) -> State:
        return {field: value.float() for field, value in super().initial(rng, params, low, high).items()}

    def transition(self, state: State, action: Tensor, rng: Key, params: Any = None) -> State:
        wanted = action.squeeze(-1)
        force = wanted.clamp(-1, 1)
        pull = self.gravity * torch.cos((3 * state["position"]).to(self.dtype))
        # Gymnasium rounds to float32 before the difference, but where it clips, which makes a Python float, after it.
        within, beyond = self.force * force - pull.float(), (self.force * force.to(self.dtype) - pull).float()
        return self._roll(state, torch.where(wanted.abs() > 1, beyond, within))

    def reward(self, state: State, action: Tensor, next_state: State, rng: Key, params: Any = None) -> Tensor:
        cost = 0.1 * torch.square(action.squeeze(-1).to(self.dtype))
        return 100 * self.terminal(next_state, rng).to(self.dtype) - cost
