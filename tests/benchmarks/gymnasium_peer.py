"""Gymnasium's side: its vector wrappers on the scripted env in NumPy, on its own CartPole, and on HalfCheetah."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from gymnasium.wrappers import vector as wrappers

from . import script
from .worker import Timed

WRAPPERS: dict[str, Callable[[VectorEnv], VectorEnv]] = {
    "ClipAction": wrappers.ClipAction,
    "RescaleAction": lambda env: wrappers.RescaleAction(env, np.float32(-2), np.float32(2)),
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "NormalizeObservation": wrappers.NormalizeObservation,
    "FlattenObservation": wrappers.FlattenObservation,
    "TransformObservation": lambda env: wrappers.TransformObservation(
        env, lambda observation: observation * 0.5, single_observation_space=env.single_observation_space
    ),
    "DtypeObservation": lambda env: wrappers.DtypeObservation(env, np.float64),
    "ReshapeObservation": lambda env: wrappers.ReshapeObservation(env, (1, script.OBSERVATION)),
    "TransformAction": lambda env: wrappers.TransformAction(env, lambda action: action * 0.5),
    "NormalizeReward": wrappers.NormalizeReward,
    "ClipReward": lambda env: wrappers.ClipReward(env, -10, 10),
    "TransformReward": lambda env: wrappers.TransformReward(env, lambda reward: reward * 0.1),
}


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
        # A finished env is reset in the next step, which ignores its action and returns a reward of 0.
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
    return _stepper(env, [random.integers(0, 2, num_envs) for _ in range(16)])


def half_cheetah(mode: str, transforms: Sequence[str] | None, num_envs: int = 8) -> Timed:
    env = _build(gymnasium.make_vec("HalfCheetah-v5", num_envs, vectorization_mode=mode), transforms)
    env.reset(seed=0)
    random = np.random.default_rng(0)
    return _stepper(env, [random.uniform(-1.5, 1.5, (num_envs, 6)).astype(np.float32) for _ in range(16)])


def atari_stack(env: gymnasium.Env) -> gymnasium.Env:
    """Skips four frames, takes the maximum of the last two, in gray, and resizes it to 84x84."""
    return AtariPreprocessing(env, noop_max=30, frame_skip=4)


def vector_pong(num_envs: int, mode: AutoresetMode) -> VectorEnv:
    """The Atari stack and its frames in C++, ALE's own vector env, which has threads."""
    threads = int(os.environ.get("OMP_NUM_THREADS", 0))  # 0: one per core
    arguments = {"num_threads": threads, "reward_clipping": False, "use_fire_reset": False, "autoreset_mode": mode}
    return _pong(num_envs, "vector_entry_point", **arguments)


def pong(num_envs: int, vector: bool = False) -> Timed:
    """A step of ALE's Pong through the Atari stack, with four frames."""
    if vector:
        env = vector_pong(num_envs, AutoresetMode.NEXT_STEP)
    else:
        each = [atari_stack, lambda env: FrameStackObservation(env, 4)]
        env = _pong(num_envs, "sync", wrappers=each, **RAW)
    env.reset(seed=0)
    random = np.random.default_rng(0)
    return _stepper(env, [random.integers(0, 6, num_envs) for _ in range(16)])


RAW = {"frameskip": 1, "repeat_action_probability": 0.0}


def _pong(num_envs: int, mode: str, **arguments: Any) -> VectorEnv:
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make_vec("ALE/Pong-v5", num_envs, vectorization_mode=mode, **arguments)


def returns(id: str, episodes: int) -> dict[str, list[float]]:
    """Returns of episodes of a random policy."""
    env, found = gymnasium.make(id), []
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(episodes):
        env.reset()
        over, total = False, 0.0
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            over, total = terminated or truncated, total + float(reward)
        found.append(total)
    return {"returns": found}


def _build(env: VectorEnv, transforms: Sequence[str] | None) -> VectorEnv:
    for name in transforms or ():
        env = WRAPPERS[name](env)
    return env


def _stepper(env: VectorEnv, actions: Sequence[np.ndarray]) -> Timed:
    turns = itertools.cycle(actions)
    return Timed(lambda: env.step(next(turns)))
