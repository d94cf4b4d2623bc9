"""CartPole-v1: Gymnasium's `CartPoleEnv`, after Barto, Sutton and Anderson (1983)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from torch import Tensor

from torchwrap.envs.classic import ClassicControl, State
from torchwrap.random import Key


class CartPole(ClassicControl):
    """A pole on a cart, which is pushed left (0) or right (1).

    The episode ends when the pole leaves +-12 degrees or the cart leaves +-2.4 metres. The reward
    is 1 per step.

    Args:
        sutton_barto_reward: instead rewards each step with 0, and the last step of an episode with
            -1.
        dtype: of the state. With float64, each step is identical to Gymnasium's up to rounding.

    Shape: observations `(num_envs, 4)` float32 (x, x_dot, theta, theta_dot, in metres, radians and
    seconds), actions `(num_envs,)` int64. The reset options `low` and `high` bound all four
    components of the initial state. `make(id, num_envs, params=...)` takes `gravity`, `cart_mass`,
    `pole_mass`, `half_length` and `force` of each env, `(num_envs,)`.

    >>> import torchwrap as tw
    >>> tw.make("CartPole-v1", num_envs=2, sutton_barto_reward=True)
    <CartPole-v1(num_envs=2, device=cpu)>
    """

    gravity = 9.8
    cart_mass = 1.0
    pole_mass = 0.1
    half_length = 0.5
    force = 10.0
    tau = 0.02
    x_limit = 2.4
    theta_limit = 12 * 2 * math.pi / 360

    renderer = CartPoleEnv
    parameters = ("gravity", "cart_mass", "pole_mass", "half_length", "force")
    fields = ("x", "x_dot", "theta", "theta_dot")
    action_space = spaces.Discrete(2)

    def __init__(
        self, sutton_barto_reward: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(dtype)
        limits = [2 * self.x_limit, np.inf, 2 * self.theta_limit, np.inf]
        high = np.array(limits, np.float32)
        self.observation_space = spaces.Box(-high, high)
        self.sutton_barto_reward = sutton_barto_reward

    def initial(
        self,
        rng: Key,
        params: Any = None,
        low: float = -0.05,
        high: float = 0.05,
    ) -> State:
        return self.uniform_state(low, high, rng)

    def transition(
        self,
        state: State,
        action: Tensor,
        rng: Key,
        params: Any = None,
    ) -> State:
        theta = state["theta"]
        x_dot = state["x_dot"]
        theta_dot = state["theta_dot"]
        pole_mass = self.constant("pole_mass", params)
        half_length = self.constant("half_length", params)
        strength = self.constant("force", params)
        total_mass = pole_mass + self.constant("cart_mass", params)
        pole_moment = pole_mass * half_length
        force = action.to(self.dtype) * (2 * strength) - strength
        cos = torch.cos(theta)
        sin = torch.sin(theta)
        centrifugal = pole_moment * (theta_dot * theta_dot) * sin
        push = (force + centrifugal) / total_mass
        inertia = half_length * (4.0 / 3.0 - pole_mass * (cos * cos) / total_mass)
        theta_acc = (self.constant("gravity", params) * sin - cos * push) / inertia
        x_acc = push - pole_moment * theta_acc * cos / total_mass
        return {  # explicit Euler: the positions move with the old velocities
            "x": state["x"] + self.tau * x_dot,
            "x_dot": x_dot + self.tau * x_acc,
            "theta": theta + self.tau * theta_dot,
            "theta_dot": theta_dot + self.tau * theta_acc,
        }

    def reward(
        self,
        state: State,
        action: Tensor,
        next_state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        if self.sutton_barto_reward:
            return -self.terminal(next_state, rng).to(self.dtype)
        return torch.ones_like(next_state["x"])

    def terminal(
        self,
        state: State,
        rng: Key,
        params: Any = None,
    ) -> Tensor:
        is_outside = state["x"].abs() > self.x_limit
        has_fallen = state["theta"].abs() > self.theta_limit
        return is_outside | has_fallen
