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


def make_gymnasium(id, max_episode_steps=None, book_or_nips=None, **kwargs):
    kwargs |= {"max_episode_steps": max_episode_steps, "disable_env_checker": True}
    single = gymnasium.make(id, **kwargs)
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


def choose_action(id, skill, random, observation):
    """An action that helps to solve the task, with probability `skill`, or else a random one."""
    is_skilled = random.random() < skill
    if id == "Pendulum-v1":
        if not is_skilled:
            return random.uniform(-3, 3, 1).astype(np.float32)
        cos, sin, speed = observation
        torque = -8 * sin - 2 * speed if cos > 0.7 else 2 * np.sign(speed)
        return np.float32([torque])
    if id == "CartPole-v1":
        if not is_skilled:
            return int(random.integers(2))
        return int(observation @ [0.3, 0.6, 9.0, 3.0] > 0)
    if id in ("Acrobot-v1", "MountainCar-v0"):
        if not is_skilled:
            return int(random.integers(3))
        speed = observation[5 if id == "Acrobot-v1" else 1]
        return 2 * int(speed > 0)
    if not is_skilled:
        return random.uniform(-1.3, 1.3, 1).astype(np.float32)
    return np.float32([np.copysign(0.9, observation[1])])


class Step(NamedTuple):
    """A step of Gymnasium's env, or of several as arrays."""

    action: Any
    state: Any
    observation: Any
    reward: Any
    terminated: Any
    truncated: Any


def gymnasium_step(single, action):
    observation, reward, terminated, truncated, _ = single.step(action)
    state = np.array(single.unwrapped.state, np.float64)
    return Step(action, state, np.array(observation), reward, terminated, truncated)


def play_gymnasium(single, id, initial, skill, random):
    """The steps of a whole episode from a state."""
    observation, _ = single.reset()
    single.unwrapped.state = as_state(id, initial)
    episode = []
    is_over = False
    while not is_over:
        step = gymnasium_step(single, choose_action(id, skill, random, observation))
        observation = step.observation
        is_over = step.terminated or step.truncated
        episode.append(step)
    return episode


def deviations(env, id, initial, episodes, resync=None):
    """The largest differences from episodes of Gymnasium with the same initial states and actions.

    Args:
        env: torchwrap's env.
        id: its id.
        initial: the initial states.
        episodes: of `play_gymnasium`.
        resync: number of steps after which the env is put into Gymnasium's state. None never does.
    """
    env.reset(seed=0)
    inject(env, as_state(id, initial))
    off = dict.fromkeys(("state", "observation", "reward"), 0.0)
    for number in range(max(map(len, episodes))):
        if resync is not None and number and number % resync == 0:
            last = [episode[min(number, len(episode)) - 1].state for episode in episodes]
            inject(env, as_state(id, last))
        actions = [episode[min(number, len(episode) - 1)].action for episode in episodes]
        successor, states = step_all(env, actions)
        alive = [row for row, episode in enumerate(episodes) if number < len(episode)]
        theirs = Step(*map(np.array, zip(*[episodes[row][number] for row in alive], strict=True)))
        pairs = {
            "state": (states, theirs.state),
            "observation": (successor["observation"], theirs.observation),
            "reward": (
                successor["reward"].squeeze(-1),
                theirs.reward.astype(np.float32),
            ),
        }
        for name, (ours, other) in pairs.items():
            difference = np.abs(ours[alive].astype(np.float64) - other).max()
            off[name] = max(off[name], difference)
        for name in ("terminated", "truncated"):
            flags = successor[name].squeeze(-1)[alive]
            assert (flags == getattr(theirs, name)).all(), f"{name} at step {number}"
    return off


def step_each(id, states, actions, **kwargs):
    """One step of Gymnasium from each state, as arrays."""
    single = make_gymnasium(id, **kwargs)
    steps = []
    for state, action in zip(states, actions, strict=True):
        single.reset()
        single.unwrapped.state = as_state(id, state)
        steps.append(gymnasium_step(single, action))
    return Step(*map(np.array, zip(*steps, strict=True)))
