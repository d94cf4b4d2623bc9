"""Resets and ends of episodes, in CartPole. Its dynamics are compared in test_classic_dynamics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from classic_oracle import inject, make_gymnasium, state_of

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap.envs.cartpole import CartPole


def balance(observation):
    """Actions that balance the pole for thousands of steps."""
    return (observation @ torch.tensor([0.3, 0.6, 9.0, 3.0]) > 0).long()


def test_auto_reset_episodes_end_as_in_gymnasium():
    # Each episode of torchwrap's env is replayed in Gymnasium from its initial state.
    env, single = FunctionalEnv(CartPole(dtype=torch.float64), 16, max_episode_steps=30), make_gymnasium("CartPole-v1", 30)
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
            np.testing.assert_allclose(transition["next", "observation"][i].numpy(), observation, rtol=2e-7, atol=1e-12)
            assert [transition["next", key][i].item() for key in ("terminated", "truncated")] == flags and any(flags)
            initial[i], actions[i], ended = state_of(env)[i], [], ended + 1
    assert ended > 60


def test_states_at_the_limits_are_not_terminal():
    env = FunctionalEnv(CartPole(dtype=torch.float64), 2)
    env.reset(seed=0)
    for field, limit in (("x", 2.4), ("theta", 12 * 2 * math.pi / 360)):
        for sign in (1, -1):
            inject(env, np.zeros((2, 4)))
            env.state[field].copy_(sign * torch.tensor([limit, np.nextafter(limit, 9)], dtype=torch.float64))
            assert env.func_env.terminal(env.state, rng=None).tolist() == [False, True]


def test_initial_states_differ_between_envs_episodes_and_seeds():
    env = tw.make("CartPole-v1", 50)
    roots = [env.reset(seed=0), env.reset(), env.reset(), env.reset(seed=1)]
    rows = torch.cat([root["observation"] for root in roots])
    assert len(rows.unique(dim=0)) == 200
    assert torch.equal(env.reset(seed=0)["observation"], rows[:50])


def test_reset_options_with_a_mask_apply_to_its_rows():
    env = tw.make("CartPole-v1", 4)
    before = env.reset(seed=0)["observation"].clone()
    mask = torch.tensor([True, False, True, False])
    observation = env.reset(mask=mask, options={"low": 0.1, "high": 0.1})["observation"]
    assert torch.equal(observation[~mask], before[~mask])
    torch.testing.assert_close(observation[mask], torch.full((2, 4), 0.1))


def test_truncation_after_several_episodes_occurs_exactly_at_the_limit():
    env = tw.make("CartPole-v1", 8, max_episode_steps=37)
    td = env.reset(seed=0)
    for step in range(1, 75):
        transition, td = env.step(td.set("action", balance(td["observation"])))
        assert not transition["next", "terminated"].any()
        assert transition["next", "truncated"].tolist() == [[step % 37 == 0]] * 8


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


def test_action_out_of_range_raises_and_changes_nothing():
    env = tw.make("CartPole-v1", 2)
    td = env.reset(seed=0)
    before = env.snapshot()["buffers"]
    for bad in ([2, 0], [0, -1]):
        with pytest.raises(ValueError, match=r"CartPole-v1 needs an action in Discrete\(2\), but got values from"):
            env.step(td.set("action", torch.tensor(bad)))
    assert all(torch.equal(value, before[name]) for name, value in env.snapshot()["buffers"].items())


def test_nan_in_one_row_does_not_reach_the_others():
    env, same = FunctionalEnv(CartPole(), 3), FunctionalEnv(CartPole(), 3)
    td, expected = env.reset(seed=0), same.reset(seed=0)
    env.state["x_dot"][1] = float("nan")
    for _ in range(30):
        action = balance(expected["observation"])
        _, td = env.step(td.set("action", action))
        _, expected = same.step(expected.set("action", action))
    assert torch.equal(td["observation"][[0, 2]], expected["observation"][[0, 2]])
