"""Pendulum-v1: Gymnasium's `PendulumEnv`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv
from torch import Tensor

from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap.envs.classic import ClassicControl, State
from torchwrap.random import Key


class Pendulum(ClassicControl):
    """A pendulum that a weak torque swings up and holds upright, where theta is 0.

    Episodes never terminate. The reward is -(theta^2 + 0.1 theta_dot^2 + 0.001 torque^2), with
    theta in [-pi, pi).

    Args:
        g: gravitational acceleration, in metres per second squared.
        dtype: of the state. With float64, each step is identical to Gymnasium's up to rounding; the
            torque stays float32.

    Shape: observations `(num_envs, 3)` float32 (cos and sin of theta, theta_dot, in radians and
    seconds), actions `(num_envs, 1)` float32: the torque in newton metres, clipped to [-2, 2]. The
    reset options `x_init` and `y_init` bound the absolute values of theta and theta_dot in the
    initial state. `make(id, num_envs, params=...)` takes `g`, `mass` and `length` of each env,
    `(num_envs,)`.

    >>> import torchwrap as tw
    >>> tw.make("Pendulum-v1", num_envs=2, g=9.81)
    <Pendulum-v1(num_envs=2, device=cpu)>
    """

    mass = 1.0
    length = 1.0
    tau = 0.05
    max_speed = 8.0
    max_torque = 2.0

    renderer = PendulumEnv
    parameters = ("g", "mass", "length")
    fields = ("theta", "theta_dot")
    action_space = spaces.Box(-max_torque, max_torque, (1,), np.float32)

    def __init__(
        self,
        g: float = 10.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(dtype)
        high = np.array([1.0, 1.0, self.max_speed], np.float32)
        self.observation_space = spaces.Box(-high, high)
        self.g = validation.number("Pendulum", "g", g)

    def initial(
        self,
        rng: Key,
        params: Any = None,
        x_init: float = math.pi,
        y_init: float = 1.0,
    ) -> State:
        if not (0 <= x_init < math.inf and 0 <= y_init < math.inf):
            must = "x_init and y_init must be finite and at least 0"
            raise ValueError(refusal("Pendulum", must, [x_init, y_init]))
        unit = self.uniform_state(-1, 1, rng)
        return {
            "theta": x_init * unit["theta"],
            "theta_dot": y_init * unit["theta_dot"],
        }

    def transition(
        self,
        state: State,
        action: Tensor,
        rng: Key,
        params: Any = None,
    ) -> State:
        theta = state["theta"]
        length = self.constant("length", params)
        gravity = 3 * self.constant("g", params) / (2 * length)
        gain = 3 / (self.constant("mass", params) * length**2)
        theta_acc = gravity * torch.sin(theta) + gain * self._torque(action)
        theta_dot = state["theta_dot"] + theta_acc * self.tau
        theta_dot = theta_dot.clamp(-self.max_speed, self.max_speed)
        # Semi-implicit Euler: the angle moves with the new velocity.
        return {"theta": theta + self.tau * theta_dot, "theta_dot": theta_dot}

    def observation(
        self,
        state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        theta = state["theta"]
        columns = [torch.cos(theta), torch.sin(theta), state["theta_dot"]]
        return torch.stack(columns, -1).to(torch.float32)

    def reward(
        self,
        state: State,
        action: Tensor,
        next_state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        # The angle before the action counts, wrapped into [-pi, pi).
        theta = torch.remainder(state["theta"] + math.pi, 2 * math.pi) - math.pi
        deviation = torch.square(theta) + 0.1 * torch.square(state["theta_dot"])
        effort = 0.001 * torch.square(self._torque(action))
        return -(deviation + effort)

    def terminal(
        self,
        state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        return torch.zeros_like(state["theta"], dtype=torch.bool)

    def _torque(self, action: Tensor) -> Tensor:
        return action.squeeze(-1).clamp(-self.max_torque, self.max_torque)
