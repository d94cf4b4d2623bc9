from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from classic_oracle import inject, state_of
from gymnasium.envs.classic_control import CartPoleEnv
from helpers import ks_distance

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap.envs.cartpole import CartPole


def wide_states(count, seed=0):
    """Float64 states `(count, 4)`, some beyond the limits, some fast enough to cross them in one step."""
    limits = np.array([2.6, 3.0, 0.24, 3.0])
    return np.random.default_rng(seed).uniform(-limits, limits, (count, 4))


def step_gymnasium(state, action, **kwargs):
    single = CartPoleEnv(**kwargs)
    single.reset(seed=0)
    single.state = tuple(state)
    observation, reward, terminated, _, _ = single.step(int(action))
    return single.state, observation, reward, terminated


def balance(observation):
    """Actions that balance the pole for thousands of steps."""
    return (observation @ torch.tensor([0.3, 0.6, 9.0, 3.0]) > 0).long()


def play_gymnasium(initial, act, **kwargs):
    """A whole episode from a given state, in an env of `gymnasium.make`."""
    single = gymnasium.make("CartPole-v1", **kwargs)
    single.reset(seed=0)
    single.unwrapped.state = tuple(initial)
    episode, observation, over = [], np.array(initial, np.float32), False
    while not over:
        action = int(act(len(episode), observation))
        observation, reward, terminated, truncated, _ = single.step(action)
        episode.append((action, np.array(single.unwrapped.state), observation, reward, terminated, truncated))
        over = terminated or truncated
    return episode


def step_all(env, actions):
    """One step without auto-reset: the successor, and the state."""
    successor = env._step(torch.as_tensor(actions))
    return successor, state_of(env)


# Dynamics.


@pytest.mark.parametrize(
    "limit, count, longest", [pytest.param(500, 220, 500, marks=pytest.mark.full), (12, 220, 12), (1, 3, 1)]
)
def test_float64_episodes_match_gymnasium(limit, count, longest):
    random = np.random.default_rng(1)
    initial = random.uniform(-0.05, 0.05, (count, 4))

    def act(i):  # every tenth env mostly balances; the others act at random
        noise = 0.3 if i % 10 == 0 else 1.0
        return lambda _, observation: (
            random.integers(2) if random.random() < noise else balance(torch.from_numpy(observation)).item()
        )

    episodes = [play_gymnasium(initial[i], act(i), max_episode_steps=limit) for i in range(count)]
    assert max(map(len, episodes)) == longest
    env = FunctionalEnv(CartPole(dtype=torch.float64), count, max_episode_steps=limit)
    env.reset(seed=0)
    inject(env, initial)
    for step in range(longest):
        if step and step % 50 == 0:
            # PyTorch's sin and cos differ from NumPy's in the last bit, how often depends on the CPU, and the pole amplifies
            # that 50 times in 50 steps. So both start from the same state again.
            inject(env, [episode[min(step, len(episode)) - 1][1] for episode in episodes])
        alive = [i for i in range(count) if step < len(episodes[i])]
        actions = [episode[step][0] if step < len(episode) else 0 for episode in episodes]
        successor, states = step_all(env, actions)
        for i in alive:
            _, state, observation, *flags = episodes[i][step]
            np.testing.assert_allclose(states[i], state, rtol=0, atol=1e-13)
            np.testing.assert_allclose(successor["observation"][i].numpy(), observation, rtol=2e-7, atol=1e-12)
            assert [successor[key][i].item() for key in ("reward", "terminated", "truncated")] == flags, (
                f"env {i}, step {step}"
            )


def test_auto_reset_episodes_end_as_in_gymnasium():
    # Each episode of torchwrap's env is replayed in Gymnasium from its initial state.
    env = FunctionalEnv(CartPole(dtype=torch.float64), 16, max_episode_steps=30)
    td, random, ended = env.reset(seed=3), np.random.default_rng(2), 0
    initial, actions = state_of(env), [[] for _ in range(16)]
    for _ in range(120):
        td["action"] = torch.from_numpy(random.integers(2, size=16))
        for i in range(16):
            actions[i].append(td["action"][i].item())
        transition, td = env.step(td)
        for i in transition["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist():
            episode = play_gymnasium(initial[i], lambda step, _, i=i: actions[i][step], max_episode_steps=30)
            assert len(episode) == len(actions[i])
            np.testing.assert_allclose(transition["next", "observation"][i].numpy(), episode[-1][2], rtol=2e-7, atol=1e-12)
            assert transition["next", "terminated"][i].item() == episode[-1][4]
            assert transition["next", "truncated"][i].item() == episode[-1][5]
            initial[i], actions[i], ended = state_of(env)[i], [], ended + 1
    assert ended > 60


def test_float32_step_matches_gymnasium_to_1e_5():
    states = wide_states(2000).astype(np.float32)
    actions = np.random.default_rng(1).integers(2, size=2000)
    env = FunctionalEnv(CartPole(), 2000)
    env.reset(seed=0)
    inject(env, states)
    successor, after = step_all(env, actions)
    for i in range(2000):
        state, observation, _, terminated = step_gymnasium(states[i].astype(np.float64), actions[i])
        np.testing.assert_allclose(after[i], state, rtol=0, atol=1e-5)
        np.testing.assert_allclose(successor["observation"][i].numpy(), observation, rtol=0, atol=1e-5)
        if min(abs(abs(state[0]) - 2.4), abs(abs(state[2]) - 12 * 2 * math.pi / 360)) > 1e-5:
            assert successor["terminated"][i].item() == terminated


@pytest.mark.parametrize("sutton_barto_reward", [False, True])
def test_rewards_match_gymnasium(sutton_barto_reward):
    states, actions = wide_states(300), np.random.default_rng(1).integers(2, size=300)
    env = FunctionalEnv(CartPole(sutton_barto_reward, dtype=torch.float64), 300)
    env.reset(seed=0)
    inject(env, states)
    successor, _ = step_all(env, actions)
    singles = [step_gymnasium(s, a, sutton_barto_reward=sutton_barto_reward) for s, a in zip(states, actions, strict=True)]
    assert successor["reward"].squeeze(-1).tolist() == [reward for _, _, reward, _ in singles]
    assert successor["terminated"].squeeze(-1).tolist() == [terminated for _, _, _, terminated in singles]
    assert 50 < successor["terminated"].sum() < 250


@pytest.mark.parametrize("field, limit", [("x", 2.4), ("theta", 12 * 2 * math.pi / 360)])
@pytest.mark.parametrize("sign", [1, -1])
def test_states_at_the_limits_are_not_terminal(field, limit, sign):
    env = FunctionalEnv(CartPole(dtype=torch.float64), 2)
    env.reset(seed=0)
    inject(env, np.zeros((2, 4)))
    env.state[field].copy_(sign * torch.tensor([limit, np.nextafter(limit, 9)], dtype=torch.float64))
    assert env.func_env.terminal(env.state, rng=None).tolist() == [False, True]


# Spaces and outputs.


def test_spaces_match_gymnasium():
    env, single = tw.make("CartPole-v1", 3), gymnasium.make("CartPole-v1")
    assert env.single_observation_space == single.observation_space
    assert env.single_observation_space.dtype == single.observation_space.dtype
    assert env.single_action_space == single.action_space
    assert env.observation_space.shape == (3, 4)
    assert env.action_space.shape == (3,)
    assert env.signature.max_episode_steps == single.spec.max_episode_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_have_the_declared_shapes_and_dtypes(dtype):
    env = tw.make("CartPole-v1", 3, dtype=dtype)
    td = env.reset(seed=0)
    transition, td = env.step(td.set("action", env.sample_action()))
    assert td["observation"].shape == (3, 4) and td["observation"].dtype == torch.float32
    assert transition["next", "reward"].shape == (3, 1) and transition["next", "reward"].dtype == torch.float32
    for flag in ("terminated", "truncated", "done"):
        assert transition["next", flag].shape == (3, 1) and transition["next", flag].dtype == torch.bool


# Resets.


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.full)])
def test_initial_states_are_uniform_and_independent(dtype):
    env = tw.make("CartPole-v1", 20_000, dtype=dtype)
    for observation in (env.reset(seed=0)["observation"], env.reset()["observation"]):
        assert observation.abs().max() <= np.float32(0.05)
        for column in observation.unbind(-1):
            assert ks_distance(column, lambda x: (x + 0.05) / 0.1) < 1.95 / math.sqrt(20_000)  # exceeded once in a thousand
        correlation = np.corrcoef(observation.numpy().T) - np.eye(4)
        assert np.abs(correlation).max() < 5 / math.sqrt(20_000)


def test_initial_states_differ_between_envs_episodes_and_seeds():
    env = tw.make("CartPole-v1", 50)
    roots = [env.reset(seed=0), env.reset(), env.reset(), env.reset(seed=1)]
    rows = torch.cat([root["observation"] for root in roots])
    assert len(rows.unique(dim=0)) == 200
    assert torch.equal(env.reset(seed=0)["observation"], rows[:50])


@pytest.mark.parametrize(
    "options, low, high",
    [
        (None, -0.05, 0.05),
        ({}, -0.05, 0.05),
        ({"low": 0.01}, 0.01, 0.05),
        ({"high": -0.04}, -0.05, -0.04),
        ({"low": -1.0, "high": 1.0}, -1.0, 1.0),
        ({"low": 0.5, "high": 0.5}, 0.5, 0.5),
        ({"low": 1, "high": 2}, 1, 2),
    ],
)
def test_reset_options_bound_the_initial_state_as_in_gymnasium(options, low, high):
    observation = tw.make("CartPole-v1", 500).reset(seed=0, options=options)["observation"]
    single, _ = CartPoleEnv().reset(seed=0, options=options)
    for initial in (observation, torch.from_numpy(single)):
        assert initial.min() >= low - 1e-7 and initial.max() <= high + 1e-7
    assert observation.max() - observation.min() >= 0.97 * (high - low)


def test_reset_options_apply_to_one_reset():
    env = tw.make("CartPole-v1", 100)
    env.reset(seed=0, options={"low": 1.0, "high": 2.0})
    assert env.reset()["observation"].abs().max() <= np.float32(0.05)


def test_reset_options_with_a_mask_apply_to_its_rows():
    env = tw.make("CartPole-v1", 4)
    before = env.reset(seed=0)["observation"].clone()
    mask = torch.tensor([True, False, True, False])
    observation = env.reset(mask=mask, options={"low": 0.1, "high": 0.2})["observation"]
    assert torch.equal(observation[~mask], before[~mask])
    assert (observation[mask] >= 0.1).all()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    "options, match",
    [
        ({"low": 1.0, "high": 0.0}, "low <= high, but got low=1.0 and high=0.0"),
        ({"low": 0.06}, "low <= high, but got low=0.06 and high=0.05"),
        ({"hihg": 1.0}, r"needs options among \['low', 'high'\], but got \['hihg'\]"),
        ({"rng": 1.0}, r"needs options among \['low', 'high'\], but got \['rng'\]"),
        ({"low": "a"}, "low"),
    ],
)
def test_invalid_reset_options_raise_and_change_nothing(options, match, seed):
    env = tw.make("CartPole-v1", 3)
    env.step(env.reset(seed=0).set("action", torch.tensor([0, 1, 0])))
    before = env.snapshot()
    with pytest.raises((ValueError, TypeError), match=match):
        env.reset(seed=seed, options=options)
    after = env.snapshot()
    assert [name for name, value in before["buffers"].items() if not torch.equal(value, after["buffers"][name])] == []


# Ends of episodes.


@pytest.mark.parametrize("limit, kwargs", [(500, {}), (37, {"max_episode_steps": 37})])
def test_truncation_after_several_episodes_occurs_exactly_at_the_limit(limit, kwargs):
    env = tw.make("CartPole-v1", 8, **kwargs)
    td = env.reset(seed=0)
    for step in range(1, 2 * limit + 1):
        transition, td = env.step(td.set("action", balance(td["observation"])))
        assert not transition["next", "terminated"].any()
        assert transition["next", "truncated"].all() == (step % limit == 0)
        assert transition["next", "truncated"].any() == (step % limit == 0)


def test_episode_may_terminate_and_be_truncated_in_one_step():
    env = tw.make("CartPole-v1", 2, max_episode_steps=1)
    td = env.reset(seed=0)
    inject(env, [[0, 0, 0, 0], [2.39, 3.0, 0, 0]])
    transition, td = env.step(td.set("action", torch.tensor([1, 1])))
    assert transition["next", "truncated"].squeeze(-1).tolist() == [True, True]
    assert transition["next", "terminated"].squeeze(-1).tolist() == [False, True]
    assert (td["observation"].abs() <= np.float32(0.05)).all()


def test_env_without_a_limit_never_truncates():
    env = FunctionalEnv(CartPole(), 1)
    td = env.reset(seed=0)
    for _ in range(510):
        transition, td = env.step(td.set("action", balance(td["observation"])))
        assert not transition["next", "done"].any()


def test_reset_in_mid_episode_restarts_the_step_count():
    env = tw.make("CartPole-v1", 2, max_episode_steps=3)
    td = env.reset(seed=0)
    for _ in range(2):
        _, td = env.step(td.set("action", balance(td["observation"])))
    td = env.reset(mask=torch.tensor([True, False]))
    transition, _ = env.step(td.set("action", balance(td["observation"])))
    assert transition["next", "truncated"].squeeze(-1).tolist() == [False, True]


@pytest.mark.parametrize("bad", [[2, 0], [0, -1]])
def test_action_out_of_range_raises_and_changes_nothing(bad):
    env = tw.make("CartPole-v1", 2)
    td = env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(ValueError, match=r"CartPole-v1 needs an action in Discrete\(2\), but got values from"):
        env.step(td.set("action", torch.tensor(bad)))
    after = env.snapshot()
    assert all(torch.equal(value, after["buffers"][name]) for name, value in before["buffers"].items())


def test_nan_in_one_row_does_not_reach_the_others():
    env, same = (FunctionalEnv(CartPole(), 3, first_index=0) for _ in range(2))
    td, expected = env.reset(seed=0), same.reset(seed=0)
    env.state["x_dot"][1] = float("nan")
    for _ in range(30):
        action = balance(expected["observation"])
        _, td = env.step(td.set("action", action))
        _, expected = same.step(expected.set("action", action))
    assert torch.equal(td["observation"][[0, 2]], expected["observation"][[0, 2]])
