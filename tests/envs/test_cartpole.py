from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap.envs.cartpole import CartPole

FIELDS = ("x", "x_dot", "theta", "theta_dot")


def inject(env, states):
    for field, column in zip(FIELDS, np.asarray(states).T, strict=True):
        env.state[field].copy_(torch.from_numpy(column.copy()))


def state_of(env):
    return torch.stack([env.state[field] for field in FIELDS], -1).numpy()


def wide_states(count, seed=0):
    # Beyond the limits too, and fast enough to cross them in one step.
    limits = np.array([2.6, 3.0, 0.24, 3.0])
    return np.random.default_rng(seed).uniform(-limits, limits, (count, 4))


def step_gymnasium(state, action, **kwargs):
    single = CartPoleEnv(**kwargs)
    single.reset(seed=0)
    single.state = tuple(state)
    observation, reward, terminated, _, _ = single.step(int(action))
    return single.state, observation, reward, terminated


def hold_up(observation):
    # Pushes against the fall: balances for thousands of steps.
    return (observation @ torch.tensor([0.3, 0.6, 9.0, 3.0]) > 0).long()


def play_gymnasium(first, act, **kwargs):
    # A whole episode through make's wrappers, from a given state.
    single = gymnasium.make("CartPole-v1", **kwargs)
    single.reset(seed=0)
    single.unwrapped.state = tuple(first)
    episode, observation, over = [], np.array(first, np.float32), False
    while not over:
        action = int(act(len(episode), observation))
        observation, reward, terminated, truncated, _ = single.step(action)
        episode.append((action, np.array(single.unwrapped.state), observation, reward, terminated, truncated))
        over = terminated or truncated
    return episode


def step_all(env, td, actions):
    # The state before auto-reset is not to be had from outside, so it is read between the two halves of a step.
    td["action"] = torch.as_tensor(actions)
    successor = env._step(td)
    return successor, state_of(env)


@pytest.mark.parametrize("limit, count, longest", [(500, 220, 500), (12, 220, 12), (1, 3, 1)])
def test_whole_float64_episodes_are_gymnasiums(limit, count, longest):
    random = np.random.default_rng(1)
    first = random.uniform(-0.05, 0.05, (count, 4))

    def act(i):  # at random; every tenth env balances, but for some random pushes
        noise = 0.3 if i % 10 == 0 else 1.0
        return lambda _, observation: (
            random.integers(2) if random.random() < noise else hold_up(torch.from_numpy(observation)).item()
        )

    episodes = [play_gymnasium(first[i], act(i), max_episode_steps=limit) for i in range(count)]
    assert max(map(len, episodes)) == longest
    env = FunctionalEnv(CartPole(dtype=torch.float64), count, max_episode_steps=limit)
    td = env.reset(seed=0)
    inject(env, first)
    for step in range(longest):
        alive = [i for i in range(count) if step < len(episodes[i])]
        actions = [episode[step][0] if step < len(episode) else 0 for episode in episodes]
        successor, states = step_all(env, td, actions)
        for i in alive:
            _, state, observation, *flags = episodes[i][step]
            np.testing.assert_allclose(states[i], state, rtol=0, atol=1e-12)
            np.testing.assert_allclose(successor["observation"][i].numpy(), observation, rtol=2e-7, atol=1e-12)
            assert [successor[key][i].item() for key in ("reward", "terminated", "truncated")] == flags, (
                f"env {i}, step {step}"
            )


def test_auto_reset_episodes_end_where_gymnasiums_do():
    # Ours runs on; each of its episodes is replayed in Gymnasium from the state it began with.
    env = FunctionalEnv(CartPole(dtype=torch.float64), 16, max_episode_steps=30)
    td, random, ended = env.reset(seed=3), np.random.default_rng(2), 0
    began, actions = state_of(env), [[] for _ in range(16)]
    for _ in range(120):
        td["action"] = torch.from_numpy(random.integers(2, size=16))
        for i in range(16):
            actions[i].append(td["action"][i].item())
        transition, td = env.step(td)
        for i in transition["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist():
            episode = play_gymnasium(began[i], lambda step, _, i=i: actions[i][step], max_episode_steps=30)
            assert len(episode) == len(actions[i])
            np.testing.assert_allclose(transition["next", "observation"][i].numpy(), episode[-1][2], rtol=2e-7, atol=1e-12)
            assert transition["next", "terminated"][i].item() == episode[-1][4]
            assert transition["next", "truncated"][i].item() == episode[-1][5]
            began[i], actions[i], ended = state_of(env)[i], [], ended + 1
    assert ended > 60


def test_one_float32_step_is_gymnasiums_to_1e_5():
    states = wide_states(2000).astype(np.float32)
    actions = np.random.default_rng(1).integers(2, size=2000)
    env = FunctionalEnv(CartPole(), 2000)
    td = env.reset(seed=0)
    inject(env, states)
    successor, after = step_all(env, td, actions)
    for i in range(2000):
        state, observation, _, terminated = step_gymnasium(states[i].astype(np.float64), actions[i])
        np.testing.assert_allclose(after[i], state, rtol=0, atol=1e-5)
        np.testing.assert_allclose(successor["observation"][i].numpy(), observation, rtol=0, atol=1e-5)
        if min(abs(abs(state[0]) - 2.4), abs(abs(state[2]) - 12 * 2 * math.pi / 360)) > 1e-5:
            assert successor["terminated"][i].item() == terminated


@pytest.mark.parametrize("sutton_barto_reward", [False, True])
def test_rewards_are_gymnasiums(sutton_barto_reward):
    states, actions = wide_states(300), np.random.default_rng(1).integers(2, size=300)
    env = FunctionalEnv(CartPole(sutton_barto_reward, dtype=torch.float64), 300)
    td = env.reset(seed=0)
    inject(env, states)
    successor, _ = step_all(env, td, actions)
    singles = [step_gymnasium(s, a, sutton_barto_reward=sutton_barto_reward) for s, a in zip(states, actions, strict=True)]
    assert successor["reward"].squeeze(-1).tolist() == [reward for _, _, reward, _ in singles]
    assert successor["terminated"].squeeze(-1).tolist() == [terminated for _, _, _, terminated in singles]
    assert 50 < successor["terminated"].sum() < 250


@pytest.mark.parametrize("field, limit", [("x", 2.4), ("theta", 12 * 2 * math.pi / 360)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_limits_themselves_are_still_inside(field, limit, sign):
    env = FunctionalEnv(CartPole(dtype=torch.float64), 2)
    env.reset(seed=0)
    inject(env, np.zeros((2, 4)))
    env.state[field].copy_(sign * torch.tensor([limit, np.nextafter(limit, 9)], dtype=torch.float64))
    assert env.func_env.terminal(env.state, rng=None).tolist() == [False, True]


def test_spaces_are_gymnasiums():
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


def ks_distance(sample, low, high):
    ordered = np.sort(np.asarray(sample, np.float64).ravel())
    cdf, count = (ordered - low) / (high - low), len(ordered)
    return max((np.arange(1, count + 1) / count - cdf).max(), (cdf - np.arange(count) / count).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_states_are_uniform(dtype):
    env = tw.make("CartPole-v1", 20_000, dtype=dtype)
    for observation in (env.reset(seed=0)["observation"], env.reset()["observation"]):
        assert observation.abs().max() <= np.float32(0.05)
        for column in observation.unbind(-1):
            assert ks_distance(column, -0.05, 0.05) < 1.95 / math.sqrt(20_000)  # exceeded once in a thousand
        correlation = np.corrcoef(observation.numpy().T) - np.eye(4)
        assert np.abs(correlation).max() < 5 / math.sqrt(20_000)


def test_first_states_differ_between_envs_episodes_and_seeds():
    env = tw.make("CartPole-v1", 50)
    firsts = [env.reset(seed=0), env.reset(), env.reset(), env.reset(seed=1)]
    rows = torch.cat([first["observation"] for first in firsts])
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
def test_reset_options_bound_the_first_state_as_gymnasiums_do(options, low, high):
    observation = tw.make("CartPole-v1", 500).reset(seed=0, options=options)["observation"]
    single, _ = CartPoleEnv().reset(seed=0, options=options)
    for first in (observation, torch.from_numpy(single)):
        assert first.min() >= low - 1e-7 and first.max() <= high + 1e-7
    assert observation.max() - observation.min() >= 0.97 * (high - low)


def test_reset_options_are_for_one_reset():
    env = tw.make("CartPole-v1", 100)
    env.reset(seed=0, options={"low": 1.0, "high": 2.0})
    assert env.reset()["observation"].abs().max() <= np.float32(0.05)


def test_reset_options_reach_the_masked_rows_alone():
    env = tw.make("CartPole-v1", 4)
    first = env.reset(seed=0)["observation"].clone()
    mask = torch.tensor([True, False, True, False])
    observation = env.reset(mask=mask, options={"low": 0.1, "high": 0.2})["observation"]
    assert torch.equal(observation[~mask], first[~mask])
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
def test_bad_reset_options_are_refused_and_nothing_has_changed(options, match, seed):
    env = tw.make("CartPole-v1", 3)
    env.step(env.reset(seed=0).set("action", torch.tensor([0, 1, 0])))
    before = env.snapshot()
    with pytest.raises((ValueError, TypeError), match=match):
        env.reset(seed=seed, options=options)
    after = env.snapshot()
    assert [name for name, value in before["buffers"].items() if not torch.equal(value, after["buffers"][name])] == []


@pytest.mark.parametrize("limit, kwargs", [(500, {}), (37, {"max_episode_steps": 37})])
def test_truncation_comes_at_the_limit_exactly(limit, kwargs):
    env = tw.make("CartPole-v1", 8, **kwargs)
    td = env.reset(seed=0)
    for step in range(1, 2 * limit + 1):
        transition, td = env.step(td.set("action", hold_up(td["observation"])))
        assert not transition["next", "terminated"].any()
        assert transition["next", "truncated"].all() == (step % limit == 0)
        assert transition["next", "truncated"].any() == (step % limit == 0)


def test_an_episode_may_terminate_and_be_truncated_in_the_same_step():
    env = tw.make("CartPole-v1", 2, max_episode_steps=1)
    td = env.reset(seed=0)
    inject(env, [[0, 0, 0, 0], [2.39, 3.0, 0, 0]])
    transition, td = env.step(td.set("action", torch.tensor([1, 1])))
    assert transition["next", "truncated"].squeeze(-1).tolist() == [True, True]
    assert transition["next", "terminated"].squeeze(-1).tolist() == [False, True]
    assert (td["observation"].abs() <= np.float32(0.05)).all()


def test_without_a_limit_nothing_is_truncated():
    env = FunctionalEnv(CartPole(), 1)
    td = env.reset(seed=0)
    for _ in range(510):
        transition, td = env.step(td.set("action", hold_up(td["observation"])))
        assert not transition["next", "done"].any()


def test_steps_begin_at_zero_again_after_a_reset_in_mid_episode():
    env = tw.make("CartPole-v1", 2, max_episode_steps=3)
    td = env.reset(seed=0)
    for _ in range(2):
        _, td = env.step(td.set("action", hold_up(td["observation"])))
    td = env.reset(mask=torch.tensor([True, False]))
    transition, _ = env.step(td.set("action", hold_up(td["observation"])))
    assert transition["next", "truncated"].squeeze(-1).tolist() == [False, True]


@pytest.mark.parametrize("bad", [[2, 0], [0, -1]])
def test_an_action_out_of_range_is_refused_and_nothing_has_changed(bad):
    env = tw.make("CartPole-v1", 2)
    td = env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(ValueError, match=r"CartPole-v1 needs an action in Discrete\(2\), but got values from"):
        env.step(td.set("action", torch.tensor(bad)))
    after = env.snapshot()
    assert all(torch.equal(value, after["buffers"][name]) for name, value in before["buffers"].items())


def test_one_bad_row_does_not_reach_the_others():
    env, same = (FunctionalEnv(CartPole(), 3, first_index=0) for _ in range(2))
    td, expected = env.reset(seed=0), same.reset(seed=0)
    env.state["x_dot"][1] = float("nan")
    for _ in range(30):
        action = hold_up(expected["observation"])
        _, td = env.step(td.set("action", action))
        _, expected = same.step(expected.set("action", action))
    assert torch.equal(td["observation"][[0, 2]], expected["observation"][[0, 2]])
