"""Acrobot-v1: constants and equations of Gymnasium's `AcrobotEnv`, after Sutton (1996) and Sutton and Barto's book."""

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

    The reward is -1 per step, and 0 when the free end rises one link length above the joint, which ends the episode.

    Args:
        book_or_nips: the source of the equations: "book" (Sutton and Barto) or "nips" (Sutton 1996).
        torque_noise_max: adds uniform noise in [-torque_noise_max, torque_noise_max) to each torque, in newton metres.
        dtype: of the state. With float64, each step is identical to Gymnasium's up to rounding, which grows with the episode.

    Shape: observations `(num_envs, 6)` float32 (cos and sin of each angle, then the angular velocities in radians per second),
    actions `(num_envs,)` int64. The reset options `low` and `high` bound all four components of the initial state.

    >>> import torchwrap as tw
    >>> tw.make("Acrobot-v1", num_envs=2, book_or_nips="nips")
    <Acrobot-v1(num_envs=2, device=cpu)>
    """

    gravity, tau, max_speed_1, max_speed_2 = 9.8, 0.2, 4 * math.pi, 9 * math.pi
    mass, length, centre, inertia = 1.0, 1.0, 0.5, 1.0  # of each link

    renderer, fields = AcrobotEnv, ("theta_1", "theta_2", "theta_1_dot", "theta_2_dot")
    action_space = spaces.Discrete(3)

    def __init__(
        self,
        book_or_nips: Literal["book", "nips"] = "book",
        torque_noise_max: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(dtype)
        if book_or_nips not in ("book", "nips"):
            raise ValueError(
                f'Acrobot needs book_or_nips="book" or "nips", but got {book_or_nips!r}.'
            )
        high = np.array([1.0, 1.0, 1.0, 1.0, self.max_speed_1, self.max_speed_2], np.float32)
        self.observation_space = spaces.Box(-high, high)
        self.book_or_nips = book_or_nips
        name, needed = "torque_noise_max", "a finite torque_noise_max of at least 0"
        self.torque_noise_max = validation.number(
            "Acrobot", name, torque_noise_max, 0, sys.float_info.max, needed
        )

    def initial(self, rng: Key, params: Any = None, low: float = -0.1, high: float = 0.1) -> State:
        return dict(zip(self.fields, self.between(low, high, rng, (4,)).unbind(-1), strict=True))

    def transition(self, state: State, action: Tensor, rng: Key, params: Any = None) -> State:
        torque = (action - 1).to(self.dtype)
        if self.torque_noise_max > 0:
            torque = torque + self.between(-self.torque_noise_max, self.torque_noise_max, rng)
        y, tau = torch.stack([state[field] for field in self.fields]), self.tau
        k1 = self._slope(y, torque)  # the classical Runge-Kutta method
        k2 = self._slope(y + tau / 2 * k1, torque)
        k3 = self._slope(y + tau / 2 * k2, torque)
        k4 = self._slope(y + tau * k3, torque)
        angles, speeds = (y + tau / 6 * (k1 + 2 * k2 + 2 * k3 + k4)).split(2)
        turns = torch.ceil(
            (angles.abs() - math.pi) / (2 * math.pi)
        )  # 0 or -0 for angles in [-pi, pi]
        angles = angles - torch.copysign(turns, angles) * (2 * math.pi)
        limits = (self.max_speed_1, self.max_speed_2)
        speeds = [
            speed.clamp(-limit, limit) for speed, limit in zip(speeds.unbind(), limits, strict=True)
        ]
        return dict(zip(self.fields, (*angles.unbind(), *speeds), strict=True))

    def _slope(self, y: Tensor, torque: Tensor) -> Tensor:
        theta_1, theta_2, dot_1, dot_2 = y.unbind()
        mass, length, centre, inertia = self.mass, self.length, self.centre, self.inertia
        cos, sin = torch.cos(theta_2), torch.sin(theta_2)
        d1 = (
            mass * centre**2
            + mass * (length**2 + centre**2 + 2 * length * centre * cos)
            + inertia
            + inertia
        )
        d2 = mass * (centre**2 + length * centre * cos) + inertia
        coupling = mass * length * centre * sin
        phi2 = mass * centre * self.gravity * torch.cos(theta_1 + theta_2 - math.pi / 2)
        weight = (mass * centre + mass * length) * self.gravity * torch.cos(theta_1 - math.pi / 2)
        phi1 = -coupling * torch.square(dot_2) - 2 * coupling * dot_2 * dot_1 + weight + phi2
        drive = torque + d2 / d1 * phi1
        if self.book_or_nips == "book":
            drive = drive - coupling * torch.square(dot_1)
        acc_2 = (drive - phi2) / (mass * centre**2 + inertia - torch.square(d2) / d1)
        acc_1 = -(d2 * acc_2 + phi1) / d1
        return torch.stack([dot_1, dot_2, acc_1, acc_2])

    def observation(self, state: State, rng: Key, params: Any = None) -> Tensor:
        theta_1, theta_2, *speeds = (state[field] for field in self.fields)
        angles = [torch.cos(theta_1), torch.sin(theta_1), torch.cos(theta_2), torch.sin(theta_2)]
        return torch.stack([*angles, *speeds], -1).to(torch.float32)

    def reward(
        self, state: State, action: Tensor, next_state: State, rng: Key, params: Any = None
    ) -> Tensor:
        return self.terminal(next_state, rng).to(self.dtype) - 1

    def terminal(self, state: State, rng: Key, params: Any = None) -> Tensor:
        return -torch.cos(state["theta_1"]) - torch.cos(state["theta_2"] + state["theta_1"]) > 1
