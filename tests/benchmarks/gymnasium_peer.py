"""Gymnasium's side: three of its vector wrappers on the same script in NumPy, in its default auto-reset mode."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward, RecordEpisodeStatistics

from . import script
from .measure import Step


class Script(VectorEnv):
    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.script = script.NumpyScript(num_envs)
        self.single_observation_space = self.script.observation_space
        self.single_action_space = self.script.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.ended = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        self.script.reset(np.ones(self.num_envs, bool))
        self.ended[:] = False
        return self.script.observation(), {}

    def step(self, actions: np.ndarray):
        # An env that ended sits out the next step, in which it is reset: an action ignored, a reward of 0.
        began = self.ended
        self.script.reset(began)
        self.script.elapsed -= began
        observation, reward, terminated, truncated = self.script.step()
        self.ended = terminated | truncated
        return observation, reward, terminated, truncated, {}


def bare(num_envs: int) -> Step:
    return _stepper(Script(num_envs))


def whole(num_envs: int) -> Step:
    return _stepper(NormalizeReward(NormalizeObservation(RecordEpisodeStatistics(Script(num_envs)))))


def _stepper(env: VectorEnv) -> Step:
    action = script.actions(env.num_envs).numpy()
    env.reset()
    env.unwrapped.script.elapsed[:] = script.elapsed(env.num_envs)

    def step():
        _, _, terminated, truncated, _ = env.step(action)
        return terminated | truncated

    return step
