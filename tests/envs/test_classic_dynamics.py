"""States, observations, rewards and flags match Gymnasium's classic control envs step by step."""

import math

import numpy as np
import pytest
import torch
from classic_oracle import (
    ANYWHERE,
    IDS,
    INITIAL,
    choose_action,
    deviations,
    inject,
    make_gymnasium,
    play_gymnasium,
    sample_states,
    state_of,
    step_all,
    step_each,
)
from gymnasium.envs.classic_control import AcrobotEnv
from helpers import ks_distance, params

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap.envs.acrobot import Acrobot
from torchwrap.envs.cartpole import CartPole
from torchwrap.envs.mountain_car import MountainCar, MountainCarContinuous

VARIANTS = [  # arguments that change the dynamics
    *[(id, {}) for id in IDS],
    ("CartPole-v1", {"sutton_barto_reward": True}),
    ("Pendulum-v1", {"g": 9.81}),
    ("Acrobot-v1", {"book_or_nips": "nips"}),
    ("MountainCar-v0", {"goal_velocity": 0.02}),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.02}),
]


# Every so many steps both envs are put into the same state again, because PyTorch's sin and cos differ from NumPy's in the
# last bit, in a way that depends on the CPU, and unstable dynamics amplify this: CartPole 50 times in 50 steps, Acrobot more
# when it spins.
RESYNC = {"CartPole-v1": 50, "Acrobot-v1": 5}
# The largest deviations of states and of observations in float64, the latter in the last bit of float32.
DEVIATIONS = {id: (1e-12, 2e-6) for id in IDS} | {"CartPole-v1": (1e-13, 5e-7)}


EPISODES = {  # bounds of initial states, number of episodes, limit, skills of the policies, and steps to resync
    "whole": (INITIAL, 100, None, (0, 0.7, 1), RESYNC),
    "anywhere": (ANYWHERE, 900, 40, (0, 0.7, 1), RESYNC),
    "random": (INITIAL, 30, 200, (0,), {}),
}


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("setting", params(EPISODES, quick=["random"]))
def test_float64_episodes_match_gymnasium(id, setting):
    bounds, count, limit, skills, resync = setting
    random = np.random.default_rng(1)
    initial, single = sample_states(bounds[id], count, random), make_gymnasium(id, limit)
    episodes = [
        play_gymnasium(single, id, initial[i], skills[i % len(skills)], random)
        for i in range(count)
    ]
    env = tw.make(id, count, dtype=torch.float64, max_episode_steps=limit)
    off = deviations(env, id, initial, episodes, resync.get(id))
    state, observation = DEVIATIONS[id]
    assert off["state"] < (1e-10 if id == "Acrobot-v1" and resync else state)
    assert off["observation"] < observation and off["reward"] < 2e-6
    ends = [episode[-1][4:] for episode in episodes]
    assert any(truncated for _, truncated in ends) or skills == (0,)
    assert any(terminated for terminated, _ in ends) or id == "Pendulum-v1" or skills == (0,)


@pytest.mark.parametrize(("id", "kwargs"), VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_step_from_any_state_matches_gymnasium(id, kwargs, dtype):
    random = np.random.default_rng(2)
    states = sample_states(ANYWHERE[id], 600, random).astype(np.float32)
    if id == "Acrobot-v1" and dtype == torch.float32:
        states[:, 2:] /= 4  # because at high speeds it accelerates by hundreds
    actions = [choose_action(id, 0, random, np.zeros(3)) for _ in states]
    state, observation, reward, terminated = step_each(id, states, actions, **kwargs)
    env = tw.make(id, len(states), dtype=dtype, **kwargs)
    env.reset(seed=0)
    inject(env, states)
    successor, after = step_all(env, actions)
    off = np.abs(after - state)
    if id == "Acrobot-v1":  # just below pi and just above -pi are almost the same angle
        off[:, :2] = np.minimum(off[:, :2], 2 * math.pi - off[:, :2])
    assert off.max() < (1e-12 if dtype == torch.float64 else 1e-5)
    np.testing.assert_allclose(successor["observation"], observation, rtol=0, atol=1e-5)
    np.testing.assert_allclose(successor["reward"].squeeze(-1), reward, rtol=2e-6, atol=1e-6)
    assert (successor["terminated"].squeeze(-1) == terminated).all()
    assert 0 < terminated.sum() < 600 or id == "Pendulum-v1"
    assert successor["reward"].dtype == successor["observation"].dtype == np.float32


# CartPole.


def test_auto_reset_episodes_end_as_in_gymnasium():
    # Each episode of torchwrap's env is replayed in Gymnasium from its initial state.
    env, single = (
        FunctionalEnv(CartPole(dtype=torch.float64), 16, max_episode_steps=30),
        make_gymnasium("CartPole-v1", 30),
    )
    td, random, ended = env.reset(seed=3), np.random.default_rng(2), 0
    initial, actions = state_of(env), [[] for _ in range(16)]
    for _ in range(120):
        td["action"] = torch.from_numpy(random.integers(2, size=16))
        for i in range(16):
            actions[i].append(td["action"][i].item())
        transition, td = env.step(td)
        for i in transition["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist():
            single.reset()
            single.unwrapped.state = tuple(initial[i])
            *before, (observation, _, *flags, _) = [single.step(action) for action in actions[i]]
            assert not any(terminated or truncated for _, _, terminated, truncated, _ in before)
            np.testing.assert_allclose(
                transition["next", "observation"][i].numpy(), observation, rtol=2e-7, atol=1e-12
            )
            assert [
                transition["next", key][i].item() for key in ("terminated", "truncated")
            ] == flags and any(flags)
            initial[i], actions[i], ended = state_of(env)[i], [], ended + 1
    assert ended > 60


def test_states_at_the_limits_are_not_terminal():
    env = FunctionalEnv(CartPole(dtype=torch.float64), 2)
    env.reset(seed=0)
    for field, limit in (("x", 2.4), ("theta", 12 * 2 * math.pi / 360)):
        for sign in (1, -1):
            inject(env, np.zeros((2, 4)))
            env.state[field].copy_(
                sign * torch.tensor([limit, np.nextafter(limit, 9)], dtype=torch.float64)
            )
            assert env.func_env.terminal(env.state, rng=None).tolist() == [False, True]


def test_nan_in_one_row_does_not_reach_the_others():
    env, same = FunctionalEnv(CartPole(), 3), FunctionalEnv(CartPole(), 3)
    td, expected = env.reset(seed=0), same.reset(seed=0)
    env.state["x_dot"][1] = float("nan")
    for _ in range(30):
        action = env.sample_action()
        _, td = env.step(td.set("action", action))
        _, expected = same.step(expected.set("action", action))
    assert torch.equal(td["observation"][[0, 2]], expected["observation"][[0, 2]])


# Acrobot.


def test_acrobot_angles_wrap_as_in_gymnasium():
    above, below = np.nextafter(math.pi, 4), np.nextafter(-math.pi, -4)
    angles = [
        (math.pi, 0),
        (-math.pi, 0),
        (0, math.pi),
        (0, -math.pi),
        (math.pi, math.pi),
        (-math.pi, math.pi),
        (above, 0),
    ]
    angles += [
        (below, 0),
        (0, above),
        (6.5, 0),
        (-6.5, 0),
        (10, -10),
        (-17.5, 23.25),
        (100.0, -1000.0),
    ]
    initial = np.array([[*each, 0.0, 0.0] for each in angles])
    state, *_ = step_each("Acrobot-v1", initial, [1] * len(angles))
    env = FunctionalEnv(Acrobot(dtype=torch.float64), len(angles))
    env.reset(seed=0)
    inject(env, initial)
    _, after = step_all(env, [1] * len(angles))
    np.testing.assert_allclose(after, state, rtol=0, atol=1e-11)


def test_acrobot_torque_noise_is_uniform_and_independent_between_steps():
    count = 5_000
    single, env = (
        AcrobotEnv(),
        FunctionalEnv(Acrobot(torque_noise_max=0.5, dtype=torch.float64), count),
    )
    single.reset(seed=0)
    torques, speeds = np.linspace(0.4, 1.6, 200), []
    for torque in torques:
        single.AVAIL_TORQUE, single.state = [torque] * 3, np.zeros(4)
        single.step(2)
        speeds.append(single.state[3])
    env.reset(seed=0)
    noise = []
    for _ in range(2):
        inject(env, np.zeros((count, 4)))
        noise.append(np.interp(step_all(env, [2] * count)[1][:, 3], speeds, torques))
        assert noise[-1].min() >= 0.5 - 1e-4 and noise[-1].max() <= 1.5 + 1e-4
        assert ks_distance(noise[-1], lambda torque: torque - 0.5) < 1.95 / math.sqrt(count)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.05


# Mountain cars.


@pytest.mark.parametrize(
    ("functions", "goal"),
    [(MountainCar, 0.5), (MountainCarContinuous, float(np.float32(0.45)))],
    ids=["discrete", "continuous"],
)
def test_mountain_car_goal_includes_its_bounds(functions, goal):
    below = (
        np.nextafter(np.float32(goal), np.float32(0))
        if functions is MountainCarContinuous
        else np.nextafter(goal, 0)
    )
    func_env = functions(goal_velocity=0.03125, dtype=torch.float64)
    env = FunctionalEnv(func_env, 4)
    env.reset(seed=0)
    slow = np.nextafter(np.float32(0.03125), np.float32(0))
    inject(env, np.array([[goal, 0.03125], [below, 0.03125], [goal, slow], [below, slow]]))
    assert func_env.terminal(env.state, rng=None).tolist() == [True, False, False, False]


def test_mountain_car_continuous_in_float32_stays_near_gymnasiums_float64():
    id, random = "MountainCarContinuous-v0", np.random.default_rng(0)
    initial, single = sample_states(INITIAL[id], 30, random), make_gymnasium(id)
    episodes = [play_gymnasium(single, "from float64", state, 0.7, random) for state in initial]
    env = tw.make(id, 30, dtype=torch.float64)
    assert all(value.dtype == torch.float32 for value in env.state.values())
    assert 1e-8 < deviations(env, id, initial, episodes)["state"] < 1e-5
