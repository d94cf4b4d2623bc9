"""The scripted env of every side: observations of 17 numbers, actions of 6, 200 steps."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from torch import Tensor

from torchwrap.testing import ScriptedEnv

LENGTH = 200
OBSERVATION = 17
ACTION = 6


def elapsed(num_envs: int) -> Tensor:
    """The initial `elapsed` of each env: ends of episodes are spread evenly over the steps."""
    return torch.arange(num_envs) * LENGTH // num_envs


def actions(num_envs: int) -> Tensor:
    """Actions in [-2, 2], precomputed so that sampling is not measured."""
    return torch.linspace(-2, 2, num_envs * ACTION).view(num_envs, ACTION)


def scripted(num_envs: int, device: str = "cpu") -> ScriptedEnv:
    return ScriptedEnv(num_envs, (OBSERVATION,), LENGTH, device=device)


BOX = Box(-1, 1, (OBSERVATION,))
PARTS = {"a": BOX, "b": Box(0, 255, (8,), np.uint8), "c": Discrete(5), "d": MultiBinary(3)}
SPACES = {"Box": BOX, "Dict": Dict(PARTS), "image": Box(0, 255, (84, 84, 1), np.uint8)}


class Still(gymnasium.Env[Any, Any]):
    """Does nothing, so that a step costs what is around it."""

    action_space = Box(-1, 1, (ACTION,))

    def __init__(self, space: str) -> None:
        self.observation_space = SPACES[space]
        self.observation = self.observation_space.sample()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.observation, {}

    def step(self, action: Any) -> Any:
        return self.observation, 1.0, False, False, {}


STILL = "TorchwrapBenchmarks/Still-v0"
gymnasium.register(STILL, Still, disable_env_checker=True)


class NumpyScript:
    """`ScriptedEnv` in NumPy, with identical values."""

    def __init__(self, num_envs: int) -> None:
        env = scripted(num_envs)
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.index = np.arange(num_envs)
        self.offsets = 10 * np.arange(OBSERVATION)
        self.elapsed = np.zeros(num_envs, np.int64)
        self.episode = np.full(num_envs, -1)

    def step(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Observation, reward, terminated, truncated."""
        self.elapsed += 1
        ended = self.elapsed >= LENGTH
        kind = (self.index + self.episode) % 3
        reward = self.elapsed.astype(np.float32)
        return self.observation(), reward, ended & (kind != 1), ended & (kind != 0)

    def reset(self, mask: np.ndarray[Any, Any]) -> None:
        self.elapsed[mask] = 0
        self.episode[mask] += 1

    def observation(self) -> np.ndarray[Any, Any]:
        first = 1000 * self.index + self.elapsed
        return (first[:, None] + self.offsets).astype(np.float32)
