"""Acrobot-v1: Gymnasium's `AcrobotEnv`, after Sutton (1996) and the book of Sutton and Barto."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import AcrobotEnv
from torch import Tensor

from torchwrap._core import validation
from torchwrap.envs.classic import ClassicControl, State
from torchwrap.random import Key


class Acrobot(ClassicControl):
    """Two links that hang from a joint, with a torque of -1, 0 or 1 between them.

    The reward is -1 per step. The episode ends when the free end rises one link length above the
    joint; that step's reward is 0.

    Args:
        book_or_nips: the source of the equations: "book" (Sutton and Barto) or "nips" (Sutton
            1996).
        torque_noise_max: adds uniform noise in [-torque_noise_max, torque_noise_max) to each
            torque, in newton metres.
        dtype: of the state. With float64, each step is identical to Gymnasium's up to rounding,
            which grows with the episode.

    Shape: observations `(num_envs, 6)` float32 (cos and sin of each angle, then the angular
    velocities in radians per second), actions `(num_envs,)` int64. The reset options `low` and
    `high` bound all four components of the initial state.

    >>> import torchwrap as tw
    >>> tw.make("Acrobot-v1", num_envs=2, book_or_nips="nips")
    <Acrobot-v1(num_envs=2, device=cpu)>
    """

    gravity = 9.8
    tau = 0.2
    max_speed_1 = 4 * math.pi
    max_speed_2 = 9 * math.pi

    # The same for both links. `centre` is the distance from a link's joint to its centre of mass.
    mass = 1.0
    length = 1.0
    centre = 0.5
    inertia = 1.0

    renderer = AcrobotEnv
    fields = ("theta_1", "theta_2", "theta_1_dot", "theta_2_dot")
    action_space = spaces.Discrete(3)

    def __init__(
        self,
        book_or_nips: Literal["book", "nips"] = "book",
        torque_noise_max: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(dtype)
        limits = [1.0, 1.0, 1.0, 1.0, self.max_speed_1, self.max_speed_2]
        high = np.array(limits, np.float32)
        self.observation_space = spaces.Box(-high, high)
        name = "book_or_nips"
        self.book_or_nips = validation.choice("Acrobot", name, book_or_nips, "book", "nips")
        self.torque_noise_max = validation.number(
            "Acrobot", "torque_noise_max", torque_noise_max, 0, sys.float_info.max
        )

    def initial(
        self,
        rng: Key,
        params: Any = None,
        low: float = -0.1,
        high: float = 0.1,
    ) -> State:
        return self.uniform_state(low, high, rng)

    def transition(
        self,
        state: State,
        action: Tensor,
        rng: Key,
        params: Any = None,
    ) -> State:
        torque = (action - 1).to(self.dtype)
        if self.torque_noise_max > 0:
            torque = torque + self.between(-self.torque_noise_max, self.torque_noise_max, rng)
        start = torch.stack([state[field] for field in self.fields])
        tau = self.tau
        # The classical Runge-Kutta method.
        k1 = self._slope(start, torque)
        k2 = self._slope(start + tau / 2 * k1, torque)
        k3 = self._slope(start + tau / 2 * k2, torque)
        k4 = self._slope(start + tau * k3, torque)
        end = start + tau / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles, speeds = end.split(2)
        turn = 2 * math.pi
        turns = torch.ceil((angles.abs() - math.pi) / turn)  # 0 or -0 in [-pi, pi]
        angles = angles - torch.copysign(turns, angles) * turn
        theta_1, theta_2 = angles.unbind()
        speed_1, speed_2 = speeds.unbind()
        return {
            "theta_1": theta_1,
            "theta_2": theta_2,
            "theta_1_dot": speed_1.clamp(-self.max_speed_1, self.max_speed_1),
            "theta_2_dot": speed_2.clamp(-self.max_speed_2, self.max_speed_2),
        }

    def _slope(self, state: Tensor, torque: Tensor) -> Tensor:
        """The time derivative of the fields, with Sutton and Barto's names for the terms."""
        theta_1, theta_2, speed_1, speed_2 = state.unbind()
        mass = self.mass
        length = self.length
        centre = self.centre
        cos = torch.cos(theta_2)
        sin = torch.sin(theta_2)

        squared_distance = length**2 + centre**2 + 2 * length * centre * cos
        d1 = mass * centre**2 + mass * squared_distance + self.inertia + self.inertia
        d2 = mass * (centre**2 + length * centre * cos) + self.inertia

        coupling = mass * length * centre * sin
        centrifugal = -coupling * torch.square(speed_2)
        coriolis = 2 * coupling * speed_2 * speed_1
        lever_1 = torch.cos(theta_1 - math.pi / 2)
        lever_2 = torch.cos(theta_1 + theta_2 - math.pi / 2)
        moment = mass * centre + mass * length
        weight = moment * self.gravity * lever_1
        phi2 = mass * centre * self.gravity * lever_2
        phi1 = centrifugal - coriolis + weight + phi2

        drive = torque + d2 / d1 * phi1
        if self.book_or_nips == "book":
            drive = drive - coupling * torch.square(speed_1)
        link_moment = mass * centre**2 + self.inertia
        acceleration_2 = (drive - phi2) / (link_moment - torch.square(d2) / d1)
        acceleration_1 = -(d2 * acceleration_2 + phi1) / d1
        return torch.stack([speed_1, speed_2, acceleration_1, acceleration_2])

    def observation(
        self,
        state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        theta_1 = state["theta_1"]
        theta_2 = state["theta_2"]
        columns = [
            torch.cos(theta_1),
            torch.sin(theta_1),
            torch.cos(theta_2),
            torch.sin(theta_2),
            state["theta_1_dot"],
            state["theta_2_dot"],
        ]
        return torch.stack(columns, -1).to(torch.float32)

    def reward(
        self,
        state: State,
        action: Tensor,
        next_state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        return self.terminal(next_state, rng).to(self.dtype) - 1

    def terminal(
        self,
        state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        theta_1 = state["theta_1"]
        height = -torch.cos(theta_1) - torch.cos(state["theta_2"] + theta_1)
        return height > 1
