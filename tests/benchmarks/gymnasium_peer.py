"""Gymnasium's side: its vector wrappers on the scripted env, CartPole and HalfCheetah."""

import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import vector as wrappers

from . import loops, script
from .bridge import FOUR
from .worker import Timed


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
        # The step after an end resets the env, ignores the action and returns a reward of 0.
        began = self.ended
        self.script.reset(began)
        self.script.elapsed -= began
        observation, reward, terminated, truncated = self.script.step()
        self.ended = terminated | truncated
        return observation, reward, terminated, truncated, {}


def scripted(num_envs: int, transforms: Sequence[str] | None = None) -> Timed:
    env = _build(Script(num_envs), transforms)
    env.reset()
    env.unwrapped.script.elapsed[:] = script.elapsed(num_envs).numpy()
    return _stepper(env, [script.actions(num_envs).numpy()])


def cartpole(num_envs: int, transforms: Sequence[str] | None) -> Timed:
    """Gymnasium's CartPole in NumPy, all envs at once."""
    env = gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")
    env = _build(env, transforms)
    env.reset(seed=0)
    random = np.random.default_rng(0)
    return _stepper(env, random.integers(0, 2, (16, num_envs)))


def half_cheetah(mode: str, transforms: Sequence[str] | None, num_envs: int = 8) -> Timed:
    env = gymnasium.make_vec("HalfCheetah-v5", num_envs, vectorization_mode=mode)
    env = _build(env, transforms)
    env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1.5, 1.5, (16, num_envs, 6))
    return _stepper(env, actions.astype(np.float32))


class FinalObservation(VectorWrapper):
    def step(self, actions):
        obs, reward, terminated, truncated, infos = super().step(actions)
        return obs, reward, terminated, truncated, {**infos, "final_obs": obs}


def cleanrl(num_envs: int) -> dict[str, float]:
    """A step of cleanrl_style.py."""

    def make_envs(args: Any) -> VectorEnv:
        # NormalizeObservation demands next-step auto-reset, where a step ends in the final one.
        env = gymnasium.make_vec(loops.ENV_ID, num_envs, vectorization_mode="sync")
        return FinalObservation(_build(env, FOUR))

    return loops.cleanrl(num_envs, make_envs)


def _build(env: VectorEnv, transforms: Sequence[str] | None) -> VectorEnv:
    for name in transforms or ():
        env = getattr(wrappers, name)(env)
    return env


def _stepper(env: VectorEnv, actions: Sequence[np.ndarray]) -> Timed:
    turns = itertools.cycle(actions)
    return Timed(lambda: env.step(next(turns)))
