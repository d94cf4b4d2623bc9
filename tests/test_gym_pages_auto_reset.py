"""`auto_reset_step` of examples/gym_pages.py shows the last step of an episode and the first of the next."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import load_example

import torchwrap as tw
import torchwrap.testing
from torchwrap.testing import ScriptedEnv


@pytest.fixture(scope="module")
def pages():
    return load_example("gym_pages")


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
def test_auto_reset_step_matches_values_computed_by_hand(pages, ending):
    # By hand: episode e of env i has (2, 1, 3)[(i + e) % 3] steps, and observations are 1000 * i and the step.
    env = ScriptedEnv(3, (1,), episode_lengths=(2, 1, 3), ending=ending)
    env.reset()
    for new, reward, done, terminal in [
        ([1, 1000, 2001], [1, 1, 1], [False, True, False], [1, 1001, 2001]),
        ([0, 1001, 2002], [2, 1, 2], [True, False, False], [2, 1001, 2002]),
        ([0, 1002, 2000], [1, 2, 3], [True, False, True], [1, 1002, 2003]),
        ([1, 1000, 2001], [1, 3, 1], [False, True, False], [1, 1003, 2001]),
        ([2, 1001, 2000], [2, 1, 2], [False, False, True], [2, 1001, 2002]),
    ]:
        action = env.sample_action()
        new_obs, terminal_reward, terminal_done, info = pages.auto_reset_step(env, action)
        shown = (new_obs, terminal_reward, terminal_done, info["terminal_observation"])
        assert [value.flatten().tolist() for value in shown] == [new, reward, done, terminal]
        assert info["terminal_info"]["action"].equal(action)


@pytest.mark.parametrize(("length", "ends"), [(1, [0, 1, 2, 3, 4, 5]), (3, [2, 5])])
@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
def test_auto_reset_step_shows_all_envs_ending_at_once(pages, length, ends, ending):
    env = ScriptedEnv(2, (1,), episode_lengths=length, ending=ending)
    env.reset()
    for step in range(6):
        elapsed = step % length + 1
        new_obs, reward, done, info = pages.auto_reset_step(env, env.sample_action())
        assert done.tolist() == [[step in ends]] * 2 and reward.tolist() == [[elapsed]] * 2
        assert info["terminal_observation"].tolist() == [[elapsed], [1000 + elapsed]]
        assert new_obs.tolist() == ([[0], [1000]] if step in ends else [[elapsed], [1000 + elapsed]])


TERMINATED, TRUNCATED, BOTH = (True, False), (False, True), (True, True)


@pytest.mark.parametrize(("backend", "tolerance"), [("gymnasium", 0), ("torch", 1e-6)])
@pytest.mark.parametrize(
    ("limit", "endings"),
    [(500, {TERMINATED}), (5, {TRUNCATED}), (1, {TRUNCATED}), (14, {TERMINATED, TRUNCATED, BOTH})],
)
def test_auto_reset_step_of_cartpole_matches_single_envs(pages, backend, tolerance, limit, endings):
    native = {"dtype": torch.float64} if backend == "torch" else {}
    env = tw.make("CartPole-v1", 4, backend=backend, max_episode_steps=limit, **native)
    singles = [gymnasium.make("CartPole-v1", max_episode_steps=limit) for _ in range(4)]

    def reset(row, **seed):
        initial, _ = singles[row].reset(**seed)
        if not native:
            return initial
        # torchwrap's env draws another initial state: the single env continues from that.
        singles[row].unwrapped.state = torch.stack([env.unwrapped.state[name][row] for name in env.unwrapped.fields]).numpy()
        return singles[row].unwrapped.state.astype(np.float32)

    td, ends = env.reset(seed=0), []
    for row in range(4):
        assert reset(row, seed=row) == pytest.approx(td["observation"][row].numpy(), abs=tolerance)
    for _ in range(120):
        action = env.sample_action()
        new_obs, terminal_reward, terminal_done, info = pages.auto_reset_step(env, action)
        for row, single in enumerate(singles):
            observation, reward, terminated, truncated, _ = single.step(action[row].item())
            assert info["terminal_observation"][row].numpy() == pytest.approx(observation, abs=tolerance)
            assert (terminal_reward[row].item(), terminal_done[row].item()) == (reward, terminated or truncated)
            if terminated or truncated:
                ends.append((terminated, truncated))
                assert new_obs[row].abs().max() <= 0.05 and not np.allclose(new_obs[row], observation, atol=1e-3)
                observation = reset(row)
            assert new_obs[row].numpy() == pytest.approx(observation, abs=tolerance)
    assert set(ends) == endings and len(ends) >= 12
    assert list(info["terminal_info"].keys()) == []  # CartPole has none


def test_auto_reset_step_shows_the_final_info(pages):
    limits = (3, 2)
    singles = [gymnasium.make("Reacher-v5", max_episode_steps=limit) for limit in limits]
    makers = [functools.partial(gymnasium.make, "Reacher-v5", max_episode_steps=limit) for limit in limits]
    vector_env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    env = tw.from_gymnasium(vector_env, info_keys=["reward_dist"])
    env.reset(seed=0)
    for row, single in enumerate(singles):
        single.reset(seed=row)
    for step in range(1, 8):
        action = env.sample_action()
        *_, done, info = pages.auto_reset_step(env, action)
        for row, single in enumerate(singles):
            *_, truncated, expected = single.step(action[row].numpy())
            assert done[row].item() == truncated == (step % limits[row] == 0)
            assert info["terminal_info"]["reward_dist"][row, 0].item() == np.float32(expected["reward_dist"])
            if truncated:
                single.reset()
