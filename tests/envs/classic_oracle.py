"""Gymnasium's classic control envs, stepped from given states next to torchwrap's."""

import math
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from helpers import numpy_2_promotion

from torchwrap.envs.acrobot import Acrobot
from torchwrap.envs.cartpole import CartPole
from torchwrap.envs.mountain_car import MountainCar, MountainCarContinuous
from torchwrap.envs.pendulum import Pendulum

FUNCTIONS = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
}

IDS = list(FUNCTIONS)

INITIAL = {  # bounds of initial states, by field
    "CartPole-v1": [(-0.05, 0.05)] * 4,
    "Pendulum-v1": [(-math.pi, math.pi), (-1, 1)],
    "Acrobot-v1": [(-0.1, 0.1)] * 4,
    "MountainCar-v0": [(-0.6, -0.4), (0, 0)],
    "MountainCarContinuous-v0": [(-0.6, -0.4), (0, 0)],
}


def within(*limits):
    return [(-limit, limit) for limit in limits]


ANYWHERE = {  # bounds that include states beyond the limits, and speeds that cross them in one step
    "CartPole-v1": within(2.6, 3, 0.24, 3),
    "Pendulum-v1": within(12, 8),
    "Acrobot-v1": within(
        math.pi,
        math.pi,
        4 * math.pi,
        9 * math.pi,
    ),
    "MountainCar-v0": [(-1.2, 0.6), (-0.07, 0.07)],
    "MountainCarContinuous-v0": [(-1.2, 0.6), (-0.07, 0.07)],
}


def sample_states(bounds, count, random):
    low, high = np.array(bounds, np.float64).T
    return random.uniform(low, high, (count, len(bounds)))


def as_state(id, state):
    """A state in Gymnasium's dtype: MountainCarContinuous has float32 after its first step."""
    return np.array(state, np.float32 if id == "MountainCarContinuous-v0" else np.float64)


class ComputesAsUnderNumpy2(gymnasium.Wrapper):
    """Float32 actions make float64 forces under NumPy 1, which differ in the eighth digit."""

    def step(self, action):
        with numpy_2_promotion():
            return self.env.step(action)


def make_gymnasium(id, book_or_nips=None, **kwargs):
    single = gymnasium.make(id, disable_env_checker=True, **kwargs)
    if book_or_nips is not None:
        single.unwrapped.book_or_nips = book_or_nips
    single.reset(seed=0)
    return ComputesAsUnderNumpy2(single)


def inject(env, states):
    """Overwrites the state of every env."""
    for field, column in zip(env.func_env.fields, np.asarray(states).T, strict=True):
        env.state[field].copy_(torch.from_numpy(column.copy()))


def state_of(env):
    return torch.stack([env.state[field] for field in env.func_env.fields], -1).numpy()


def step_all(env, actions):
    """One step without auto-reset: the successor as arrays, and the state."""
    successor = env._step(torch.from_numpy(np.stack(actions)))
    return {key: value.numpy() for key, value in successor.items()}, state_of(env)


def random_actions(id, count, random):
    """Actions, some of them beyond the bounds of a Box."""
    if id == "Pendulum-v1":
        return random.uniform(-3, 3, (count, 1)).astype(np.float32)
    if id == "MountainCarContinuous-v0":
        return random.uniform(-1.3, 1.3, (count, 1)).astype(np.float32)
    return random.integers(2 if id == "CartPole-v1" else 3, size=count)


class Step(NamedTuple):
    """A step of Gymnasium's env, or of several as arrays."""

    state: Any
    observation: Any
    reward: Any
    terminated: Any


def step_each(id, states, actions, **kwargs):
    """One step of Gymnasium from each state, as arrays."""
    single = make_gymnasium(id, **kwargs)
    steps = []
    for state, action in zip(states, actions, strict=True):
        single.reset()
        single.unwrapped.state = as_state(id, state)
        observation, reward, terminated, *_ = single.step(action)
        after = np.array(single.unwrapped.state, np.float64)
        steps.append(Step(after, np.array(observation), reward, terminated))
    return Step(*map(np.array, zip(*steps, strict=True)))
