"""Gymnasium's classic control envs, stepped from given states next to torchwrap's."""

import math

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

ANYWHERE = {  # bounds that include states beyond the limits, and speeds that cross them in one step
    "CartPole-v1": [(-2.6, 2.6), (-3, 3), (-0.24, 0.24), (-3, 3)],
    "Pendulum-v1": [(-12, 12), (-8, 8)],
    "Acrobot-v1": [(-math.pi, math.pi)] * 2
    + [(-4 * math.pi, 4 * math.pi), (-9 * math.pi, 9 * math.pi)],
    "MountainCar-v0": [(-1.2, 0.6), (-0.07, 0.07)],
    "MountainCarContinuous-v0": [(-1.2, 0.6), (-0.07, 0.07)],
}


def sample_states(bounds, count, random):
    low, high = np.array(bounds, np.float64).T
    return random.uniform(low, high, (count, len(bounds)))


def as_state(id, state):
    """A state as Gymnasium keeps it: float64, or float32 for MountainCarContinuous after its first step."""
    return np.array(state, np.float32 if id == "MountainCarContinuous-v0" else np.float64)


class ComputesAsUnderNumpy2(gymnasium.Wrapper):
    """Float32 actions make float64 forces under NumPy 1, which differ in the eighth digit."""

    def step(self, action):
        with numpy_2_promotion():
            return self.env.step(action)


def make_gymnasium(id, max_episode_steps=None, book_or_nips=None, **kwargs):
    single = gymnasium.make(
        id, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs
    )
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
    skilled = random.random() < skill
    if id == "CartPole-v1":
        return int(observation @ [0.3, 0.6, 9.0, 3.0] > 0) if skilled else int(random.integers(2))
    if id == "Pendulum-v1":
        cos, sin, speed = observation
        torque = -8 * sin - 2 * speed if cos > 0.7 else 2 * np.sign(speed)
        return np.float32([torque if skilled else random.uniform(-3, 3)])
    if id == "Acrobot-v1":
        return 2 * int(observation[5] > 0) if skilled else int(random.integers(3))
    if id == "MountainCar-v0":
        return 2 * int(observation[1] > 0) if skilled else int(random.integers(3))
    return np.float32([np.copysign(0.9, observation[1]) if skilled else random.uniform(-1.3, 1.3)])


def play_gymnasium(single, id, initial, skill, random):
    """A whole episode from a state: a tuple per step of the action, the state and what `step` returned."""
    observation, _ = single.reset()
    single.unwrapped.state = as_state(id, initial)
    episode, over = [], False
    while not over:
        action = choose_action(id, skill, random, observation)
        observation, reward, terminated, truncated, _ = single.step(action)
        state = np.array(single.unwrapped.state, np.float64)
        episode.append((action, state, np.array(observation), reward, terminated, truncated))
        over = terminated or truncated
    return episode


def deviations(env, id, initial, episodes, resync=None):
    """The largest differences from episodes of Gymnasium with the same initial states and actions.

    Args:
        env: torchwrap's env.
        id: its id.
        initial: the initial states.
        episodes: of `play_gymnasium`.
        resync: every so many steps the env is put into Gymnasium's state. None never does.
    """
    env.reset(seed=0)
    inject(env, as_state(id, initial))
    off = dict.fromkeys(("state", "observation", "reward"), 0.0)
    for step in range(max(map(len, episodes))):
        alive = [i for i, episode in enumerate(episodes) if step < len(episode)]
        if resync is not None and step and step % resync == 0:
            inject(
                env, as_state(id, [episode[min(step, len(episode)) - 1][1] for episode in episodes])
            )
        successor, states = step_all(
            env, [episode[min(step, len(episode) - 1)][0] for episode in episodes]
        )
        theirs = zip(*(episodes[i][step] for i in alive), strict=True)
        _, state, observation, reward, terminated, truncated = map(np.array, theirs)
        for name, ours, other in (
            ("state", states, state),
            ("observation", successor["observation"], observation),
            ("reward", successor["reward"].squeeze(-1), reward.astype(np.float32)),
        ):
            off[name] = max(off[name], np.abs(ours[alive].astype(np.float64) - other).max())
        for name, other in (("terminated", terminated), ("truncated", truncated)):
            assert (successor[name].squeeze(-1)[alive] == other).all(), f"{name} at step {step}"
    return off


def step_each(id, states, actions, **kwargs):
    """One step of Gymnasium from each state: states, observations, rewards and flags, as arrays."""
    single, results = make_gymnasium(id, **kwargs), []
    for state, action in zip(states, actions, strict=True):
        single.reset()
        single.unwrapped.state = as_state(id, state)
        observation, reward, terminated, _, _ = single.step(action)
        results.append(
            (
                np.array(single.unwrapped.state, np.float64),
                np.array(observation),
                reward,
                terminated,
            )
        )
    return map(np.array, zip(*results, strict=True))
