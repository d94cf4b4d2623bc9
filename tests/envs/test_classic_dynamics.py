"""States, observations, rewards and flags match Gymnasium's classic control envs step by step."""

import math

import numpy as np
import pytest
import torch
from classic_oracle import (
    ANYWHERE,
    IDS,
    inject,
    make_gymnasium,
    random_actions,
    sample_states,
    step_all,
    step_each,
)
from gymnasium.envs.classic_control import AcrobotEnv
from helpers import ks_distance

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


@pytest.mark.parametrize(("id", "kwargs"), VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_step_from_any_state_matches_gymnasium(id, kwargs, dtype):
    random = np.random.default_rng(2)
    states = sample_states(ANYWHERE[id], 600, random).astype(np.float32)
    if id == "Acrobot-v1" and dtype == torch.float32:
        states[:, 2:] /= 4  # because at high speeds it accelerates by hundreds
    actions = random_actions(id, len(states), random)
    expected = step_each(id, states, actions, **kwargs)
    env = tw.make(id, len(states), dtype=dtype, **kwargs)
    env.reset(seed=0)
    inject(env, states)
    successor, after = step_all(env, actions)
    off = np.abs(after - expected.state)
    if id == "Acrobot-v1":  # just below pi and just above -pi are almost the same angle
        off[:, :2] = np.minimum(off[:, :2], 2 * math.pi - off[:, :2])
    assert off.max() < (1e-12 if dtype == torch.float64 else 1e-5)
    observation = successor["observation"]
    reward = successor["reward"].squeeze(-1)
    np.testing.assert_allclose(observation, expected.observation, rtol=0, atol=1e-5)
    np.testing.assert_allclose(reward, expected.reward, rtol=2e-6, atol=1e-6)
    assert (successor["terminated"].squeeze(-1) == expected.terminated).all()
    assert 0 < expected.terminated.sum() < 600 or id == "Pendulum-v1"
    assert reward.dtype == observation.dtype == np.float32


PHYSICS = {  # params, and Gymnasium's attributes for those of one env
    "CartPole-v1": (
        {"gravity": 9.0, "cart_mass": 1.5, "pole_mass": 0.2, "half_length": 0.7, "force": 8.0},
        lambda g, cart, pole, length, force: {
            "gravity": g,
            "total_mass": cart + pole,
            "masspole": pole,
            "length": length,
            "polemass_length": pole * length,
            "force_mag": force,
        },
    ),
    "Pendulum-v1": (
        {"g": 9.0, "mass": 1.5, "length": 0.8},
        lambda g, mass, length: {"g": g, "m": mass, "l": length},
    ),
}


@pytest.mark.parametrize("id", PHYSICS)
def test_params_give_each_env_the_physics_of_a_gymnasium_env(id):
    random = np.random.default_rng(3)
    standard, attributes = PHYSICS[id]
    states = sample_states(ANYWHERE[id], 4, random)
    actions = random_actions(id, len(states), random)
    values = {name: value * random.uniform(0.8, 1.2, 4) for name, value in standard.items()}
    columns = {name: torch.from_numpy(value) for name, value in values.items()}
    env = tw.make(id, 4, dtype=torch.float64, params=columns)
    env.reset(seed=0)
    inject(env, states)
    _, after = step_all(env, actions)
    for row, action in enumerate(actions):
        single = make_gymnasium(id)
        own = attributes(*(value[row] for value in values.values()))
        for name, value in own.items():
            assert hasattr(single.unwrapped, name)
            setattr(single.unwrapped, name, value)
        single.unwrapped.state = states[row]
        single.step(action)
        np.testing.assert_allclose(after[row], single.unwrapped.state, rtol=0, atol=1e-12)


# CartPole.


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("x", 2.4),
        ("theta", 12 * 2 * math.pi / 360),
    ],
)
def test_states_at_the_limits_are_not_terminal(field, limit, sign):
    env = FunctionalEnv(CartPole(dtype=torch.float64), 2)
    env.reset(seed=0)
    inject(env, np.zeros((2, 4)))
    values = [sign * limit, sign * np.nextafter(limit, 9)]
    env.state[field].copy_(torch.tensor(values, dtype=torch.float64))
    assert env.func_env.terminal(env.state, rng=None).tolist() == [False, True]


# Acrobot.

ABOVE = np.nextafter(math.pi, 4)
ANGLES = [
    (math.pi, 0),
    (-math.pi, 0),
    (0, math.pi),
    (0, -math.pi),
    (math.pi, math.pi),
    (-math.pi, math.pi),
    (ABOVE, 0),
    (-ABOVE, 0),
    (0, ABOVE),
    (6.5, 0),
    (-6.5, 0),
    (10, -10),
    (-17.5, 23.25),
    (100.0, -1000.0),
]


def test_acrobot_angles_wrap_as_in_gymnasium():
    initial = np.array([[*angles, 0.0, 0.0] for angles in ANGLES])
    actions = [1] * len(initial)
    env = FunctionalEnv(Acrobot(dtype=torch.float64), len(initial))
    env.reset(seed=0)
    inject(env, initial)
    _, after = step_all(env, actions)
    expected = step_each("Acrobot-v1", initial, actions)
    np.testing.assert_allclose(after, expected.state, rtol=0, atol=1e-11)


def test_acrobot_torque_noise_is_uniform_and_independent_between_steps():
    count = 5_000
    torques = np.linspace(0.4, 1.6, 200)
    speeds = []
    single = AcrobotEnv()
    single.reset(seed=0)
    for torque in torques:
        single.AVAIL_TORQUE = [torque] * 3
        single.state = np.zeros(4)
        single.step(2)
        speeds.append(single.state[3])
    env = FunctionalEnv(Acrobot(torque_noise_max=0.5, dtype=torch.float64), count)
    env.reset(seed=0)
    noise = []
    for _ in range(2):
        inject(env, np.zeros((count, 4)))
        _, after = step_all(env, [2] * count)
        noise.append(np.interp(after[:, 3], speeds, torques))
        assert noise[-1].min() >= 0.5 - 1e-4 and noise[-1].max() <= 1.5 + 1e-4
        assert ks_distance(noise[-1], lambda torque: torque - 0.5) < 1.95 / math.sqrt(count)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.05


# Mountain cars.

GOALS = {
    "discrete": (MountainCar, np.float64(0.5)),
    "continuous": (MountainCarContinuous, np.float32(0.45)),
}


@pytest.mark.parametrize(("functions", "goal"), GOALS.values(), ids=GOALS)
def test_mountain_car_goal_includes_its_bounds(functions, goal):
    func_env = functions(goal_velocity=0.03125, dtype=torch.float64)
    env = FunctionalEnv(func_env, 4)
    env.reset(seed=0)
    below = np.nextafter(goal, type(goal)(0))
    fast = 0.03125
    slow = np.nextafter(np.float32(fast), np.float32(0))
    inject(
        env,
        np.array(
            [
                [goal, fast],
                [below, fast],
                [goal, slow],
                [below, slow],
            ]
        ),
    )
    assert func_env.terminal(env.state, rng=None).tolist() == [True, False, False, False]
