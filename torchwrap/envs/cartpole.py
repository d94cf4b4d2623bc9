"""CartPole-v1: constants and equations of Gymnasium's `CartPoleEnv`, after Barto, Sutton and Anderson (1983)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.experimental.functional import FuncEnv
from torch import Tensor

from torchwrap import random
from torchwrap.random import Key

State = dict[str, Tensor]


class CartPole(FuncEnv[State, Tensor, Tensor, Tensor, Tensor, Any, Any]):
    """A pole on a cart, pushed left (0) or right (1); the episode ends when it leaves +-12 degrees or +-2.4 metres.

    Args:
        sutton_barto_reward: 0 a step and -1 at the end, instead of 1 a step.
        dtype: of the state; float64 follows Gymnasium's own to the last bit or so.

    Shape: observations `(num_envs, 4)` float32 (x, x_dot, theta, theta_dot; metres, radians, seconds), actions
    `(num_envs,)` int64. The reset options `low` and `high` bound all four components of the first state.
    """

    broadcasts = True
    gravity, cart_mass, pole_mass, half_length, force, tau = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    x_limit, theta_limit = 2.4, 12 * 2 * math.pi / 360

    action_space = spaces.Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 50}

    def __init__(self, sutton_barto_reward: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        high = np.array([2 * self.x_limit, np.inf, 2 * self.theta_limit, np.inf], np.float32)
        self.observation_space = spaces.Box(-high, high)
        self.sutton_barto_reward = sutton_barto_reward
        self.dtype = dtype

    def initial(self, rng: Key, params: Any = None, low: float = -0.05, high: float = 0.05) -> State:
        if low > high:
            raise ValueError(f"CartPole needs reset options with low <= high, but got low={low} and high={high}.")
        numbers = low + (high - low) * random.uniform(rng, (4,), self.dtype)
        return dict(zip(("x", "x_dot", "theta", "theta_dot"), numbers.unbind(-1), strict=True))

    def transition(self, state: State, action: Tensor, rng: Key, params: Any = None) -> State:
        x, x_dot, theta, theta_dot = state["x"], state["x_dot"], state["theta"], state["theta_dot"]
        total_mass, pole_moment = self.pole_mass + self.cart_mass, self.pole_mass * self.half_length
        force = torch.where(action == 1, self.force, -self.force).to(self.dtype)
        cos, sin = torch.cos(theta), torch.sin(theta)
        temp = (force + pole_moment * torch.square(theta_dot) * sin) / total_mass
        inertia = self.half_length * (4.0 / 3.0 - self.pole_mass * torch.square(cos) / total_mass)
        theta_acc = (self.gravity * sin - cos * temp) / inertia
        x_acc = temp - pole_moment * theta_acc * cos / total_mass
        return {  # explicit Euler: positions move with the old velocities
            "x": x + self.tau * x_dot,
            "x_dot": x_dot + self.tau * x_acc,
            "theta": theta + self.tau * theta_dot,
            "theta_dot": theta_dot + self.tau * theta_acc,
        }

    def observation(self, state: State, rng: Key, params: Any = None) -> Tensor:
        return torch.stack([state["x"], state["x_dot"], state["theta"], state["theta_dot"]], -1).to(torch.float32)

    def reward(self, state: State, action: Tensor, next_state: State, rng: Key, params: Any = None) -> Tensor:
        if self.sutton_barto_reward:
            return -self.terminal(next_state, rng).to(self.dtype)
        return torch.ones_like(next_state["x"])

    def terminal(self, state: State, rng: Key, params: Any = None) -> Tensor:
        return (state["x"].abs() > self.x_limit) | (state["theta"].abs() > self.theta_limit)

    def render_init(self, params: Any = None, **kwargs: Any) -> CartPoleEnv:
        return CartPoleEnv(render_mode="rgb_array")

    def render_image(self, state: State, render_state: CartPoleEnv, params: Any = None) -> tuple[CartPoleEnv, Any]:
        # Gymnasium draws it, from the state that it is handed.
        render_state.state = np.array([float(state[name]) for name in ("x", "x_dot", "theta", "theta_dot")])
        return render_state, render_state.render()

    def render_close(self, render_state: CartPoleEnv, params: Any = None) -> None:
        render_state.close()
