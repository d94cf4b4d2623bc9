"""MountainCar-v0 and MountainCarContinuous-v0: Gymnasium's envs, after Moore (1990)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import Continuous_MountainCarEnv, MountainCarEnv
from torch import Tensor

from torchwrap._core import validation
from torchwrap.envs.classic import ClassicControl, State
from torchwrap.random import Key


class MountainCar(ClassicControl):
    """A weak car in a valley, which is pushed left (0), not at all (1) or right (2).

    The episode ends on top of the right hill. The reward is -1 per step.

    Args:
        goal_velocity: minimum velocity at the goal.
        dtype: of the state. With float64, each step is identical to Gymnasium's up to rounding.

    Shape: observations `(num_envs, 2)` float32 (position, velocity), actions `(num_envs,)` int64.
    The reset options `low` and `high` bound the initial position; the initial velocity is 0.

    >>> import torchwrap as tw
    >>> tw.make("MountainCar-v0", num_envs=2, goal_velocity=0.01)
    <MountainCar-v0(num_envs=2, device=cpu)>
    """

    force = 0.001
    gravity = 0.0025
    max_speed = 0.07
    min_position = -1.2
    max_position = 0.6
    goal_position = 0.5

    renderer: ClassVar[Any] = MountainCarEnv
    fields = ("position", "velocity")
    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def __init__(
        self,
        goal_velocity: float = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(dtype)
        low = np.array([self.min_position, -self.max_speed], np.float32)
        high = np.array([self.max_position, self.max_speed], np.float32)
        self.observation_space = spaces.Box(low, high)
        self.goal_velocity = validation.number(type(self).__name__, "goal_velocity", goal_velocity)

    def initial(
        self,
        rng: Key,
        params: Any = None,
        low: float = -0.6,
        high: float = -0.4,
    ) -> State:
        position = self.between(low, high, rng)
        return {"position": position, "velocity": torch.zeros_like(position)}

    def transition(
        self,
        state: State,
        action: Tensor,
        rng: Key,
        params: Any = None,
    ) -> State:
        push = (action - 1).to(self.dtype) * self.force
        pull = self.gravity * torch.cos(3 * state["position"])
        return self._integrate(state, push - pull)

    def _integrate(self, state: State, acceleration: Tensor) -> State:
        velocity = state["velocity"] + acceleration
        velocity = velocity.clamp(-self.max_speed, self.max_speed)
        position = state["position"] + velocity
        position = position.clamp(self.min_position, self.max_position)
        hits_left_wall = (position <= self.min_position) & (velocity < 0)
        return {"position": position, "velocity": velocity.masked_fill(hits_left_wall, 0)}

    def reward(
        self,
        state: State,
        action: Tensor,
        next_state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        return -torch.ones_like(next_state["position"])

    def terminal(
        self,
        state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        is_at_goal = state["position"] >= self.goal_position
        is_fast = state["velocity"] >= self.goal_velocity
        return is_at_goal & is_fast


class MountainCarContinuous(MountainCar):
    """A weak car in a valley, which is pushed by a continuous force.

    The episode ends on top of the right hill, with a reward of 100. Each step costs 0.1 times the
    square of the action.

    Args:
        goal_velocity: minimum velocity at the goal.
        dtype: of cosines, clipped forces and rewards. The state is always float32, as Gymnasium's
            is from the second state of an episode on. With torch.float64, each step from there is
            bit-identical to Gymnasium's.

    Shape: observations `(num_envs, 2)` float32 (position, velocity), actions `(num_envs, 1)`
    float32: the force. The dynamics clip it to [-1, 1], the cost does not. The reset options `low`
    and `high` bound the initial position; the initial velocity is 0.

    >>> import torchwrap as tw
    >>> tw.make("MountainCarContinuous-v0", num_envs=2, goal_velocity=0.01)
    <MountainCarContinuous-v0(num_envs=2, device=cpu)>
    """

    force = 0.0015
    goal_position = 0.45

    renderer = Continuous_MountainCarEnv
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def initial(
        self,
        rng: Key,
        params: Any = None,
        low: float = -0.6,
        high: float = -0.4,
    ) -> State:
        state = super().initial(rng, params, low, high)
        return {field: value.float() for field, value in state.items()}

    def transition(
        self,
        state: State,
        action: Tensor,
        rng: Key,
        params: Any = None,
    ) -> State:
        requested = action.squeeze(-1)
        force = requested.clamp(-1, 1)
        angle = 3 * state["position"]
        pull = self.gravity * torch.cos(angle.to(self.dtype))
        # Gymnasium subtracts in float32. If it clips, the force is a Python float, and it subtracts
        # in float64.
        unclipped = self.force * force - pull.float()
        clipped = self.force * force.to(self.dtype) - pull
        is_clipped = requested.abs() > 1
        acceleration = torch.where(is_clipped, clipped.float(), unclipped)
        return self._integrate(state, acceleration)

    def reward(
        self,
        state: State,
        action: Tensor,
        next_state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        force = action.squeeze(-1).to(self.dtype)
        cost = 0.1 * torch.square(force)
        is_solved = self.terminal(next_state, rng).to(self.dtype)
        return 100 * is_solved - cost
