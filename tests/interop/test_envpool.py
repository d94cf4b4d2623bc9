"""EnvPool's envs in the bridge, step by step against pools of one env each, stepped by hand."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Held, mostly_full
from single_envs import (
    ByHand,
    assert_equal_trees,
    check_masked_resets,
    follow_by_hand,
    interrupt_a_call,
    sample_and_step,
)

import torchwrap as tw
from torchwrap import transforms as T

envpool = pytest.importorskip("envpool")

# EnvPool's spaces have bounds in float64.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


def make_pool(id, num_envs, seed=0, **kwargs):
    return envpool.make(id, env_type="gymnasium", num_envs=num_envs, seed=seed, **kwargs)


def by_hand(id, num_envs, seed, **kwargs):
    pools = [make_pool(id, 1, seed + i, **kwargs) for i in range(num_envs)]
    return ByHand(pools, pools[0].observation_space)


TASKS = {  # steps, and the least number of terminations and truncations in them
    "CartPole-v1 with a limit": ({"max_episode_steps": 14}, 100, (1, 5)),
    "Pendulum-v1": ({"max_episode_steps": 7}, 40, (0, 15)),
    "HalfCheetah-v5": ({"max_episode_steps": 7}, 30, (0, 12)),
    "WalkerWalk-v1": ({"max_episode_steps": 9}, 30, (0, 9)),
    "Pong-v5": ({"max_episode_steps": 30}, 70, (0, 6)),
    "Breakout-v5 with episodic_life": (
        {"episodic_life": True},
        200,
        (10, 0),
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_transitions_match_envpool_stepped_by_hand(task):
    kwargs, steps, least = TASKS[task]
    id = task.partition(" ")[0]
    env = tw.from_gymnasium(make_pool(id, 3, seed=5, **kwargs))
    pools = by_hand(id, 3, seed=5, **kwargs)
    td = env.reset()
    assert_equal_trees(td["observation"], pools.observation())
    _, ends = follow_by_hand(env, pools, td, steps)
    assert (ends >= least).all()
    assert env.signature.max_episode_steps == env.vector_env.config["max_episode_steps"]


@pytest.mark.parametrize("id", ["CartPole-v1", "WalkerWalk-v1"])
def test_masked_reset_starts_episodes_in_its_rows_only(id):
    arguments = {"num_envs": 4, "seed": 3, "max_episode_steps": 11}
    env = tw.from_gymnasium(make_pool(id, **arguments))
    pools = by_hand(id, **arguments)
    held = Held()
    td = env.reset()
    held.add(td)
    td, _ = follow_by_hand(env, pools, td, 5)
    held.add(td)
    check_masked_resets(env, pools, td, 20)
    held.assert_unchanged()


def test_reset_of_finished_rows_keeps_lives_whatever_other_rows_do():
    pool = make_pool("Breakout-v5", 2, seed=5, episodic_life=True)
    env = tw.from_gymnasium(pool, info_keys=["lives"])
    td = env.reset()
    done = torch.ones(2, dtype=torch.bool)
    while done.all() or not done.any():
        td = env.reset(mask=done)
        transition, td = env.step_without_reset(td.set("action", env.sample_action()))
        successor = transition["next"]
        done = successor["done"].flatten()
    before = successor["info", "lives"].flatten()
    td = env.reset(mask=torch.ones(2, dtype=torch.bool))
    after = sample_and_step(env, td)[0]["next", "info", "lives"].flatten()
    assert 0 < before[done] == after[done] < 5
    assert after[~done] == 5


def lose_a_life(env):
    """Steps until an episode ends, and resets no row."""
    td = env.reset()
    done = torch.zeros(env.num_envs, dtype=torch.bool)
    while not done.any():
        transition, td = env.step_without_reset(td.set("action", torch.zeros_like(done).long()))
        done = transition["next", "done"].flatten()
    return done


@pytest.mark.parametrize("num_envs", [1, 2])
def test_full_reset_after_a_lost_life_is_that_of_envpool(num_envs):
    arguments = {"num_envs": num_envs, "seed": 5, "episodic_life": True}
    env = tw.from_gymnasium(make_pool("Breakout-v5", **arguments), info_keys=["lives"])
    pool = make_pool("Breakout-v5", **arguments)
    pool.reset()
    done = np.zeros(num_envs, bool)
    lose_a_life(env)
    while not done.any():
        _, _, terminated, truncated, _ = pool.step(np.zeros(num_envs, int))
        done = terminated | truncated
    expected, info = pool.reset()
    td = env.reset()
    assert td["info", "lives"].flatten().tolist() == info["lives"].tolist() == [5] * num_envs
    assert_equal_trees(td["observation"], expected)


def reset_all(env, done):
    return env.reset(mask=torch.ones_like(done))


def reset_by_gymnasium(env, done):
    infos = tw.to_gymnasium(env).reset(options={"reset_mask": np.ones(len(done), bool)})[1]
    return {"info": {"lives": torch.as_tensor(infos["lives"])}}


@pytest.mark.parametrize("reset", [reset_all, reset_by_gymnasium], ids=["mask", "to_gymnasium"])
def test_reset_of_a_mask_of_all_rows_keeps_lives(reset):
    pool = make_pool("Breakout-v5", 1, seed=5, episodic_life=True)
    env = tw.from_gymnasium(pool, info_keys=["lives"])
    assert reset(env, lose_a_life(env))["info"]["lives"].flatten().tolist() == [4]


def test_second_reset_of_a_finished_row_starts_another_episode():
    env = tw.from_gymnasium(make_pool("CartPole-v1", 3, seed=1))
    pools = by_hand("CartPole-v1", 3, seed=1)
    td = env.reset()
    done = torch.zeros(3, dtype=torch.bool)
    while not done.any():
        transition, td = sample_and_step(env, td)
        pools.step(transition["action"].numpy())
        done = transition["next", "done"].flatten()
    pools.reset(np.flatnonzero(done))
    td = env.reset(mask=done)
    assert_equal_trees(td["observation"], pools.observation())
    follow_by_hand(env, pools, td, 5)


# Seeds.


def test_seed_of_env_i_is_the_seed_of_make_plus_its_global_index():
    env = tw.make("Pendulum-v1", 2, backend="envpool", seed=40, first_index=3)
    expected = np.concatenate([make_pool("Pendulum-v1", 1, 43 + i).reset()[0] for i in range(2)])
    assert_equal_trees(env.reset()["observation"], expected)
    assert env.np_random_seed == 40


@pytest.mark.parametrize("seed", [7, 2**31 + 7, 2**64 - 1])
def test_first_reset_takes_the_seed_of_make(seed):
    arguments = {"backend": "envpool", "seed": seed, "first_index": 2}
    given = tw.make("CartPole-v1", 2, **arguments).reset(seed=seed)
    drawn = tw.make("CartPole-v1", 2, **arguments).reset()
    assert torch.equal(given["observation"], drawn["observation"])


def test_seed_of_a_pool_that_was_made_elsewhere_is_reported():
    env = tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=12), first_index=2)
    wrapped = tw.TransformedEnv(env, T.StickyAction(0.5))
    wrapped.reset()
    assert wrapped.np_random_seed == 10
    assert tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=[3, 9])).reset().batch_size == (2,)


@pytest.mark.parametrize("seed", [4, 5])
def test_seed_of_a_later_reset_raises_and_changes_nothing(seed):
    env = tw.make("CartPole-v1", 2, backend="envpool", seed=4)
    same = tw.make("CartPole-v1", 2, backend="envpool", seed=4)
    actions = torch.tensor([0, 1])
    for each in (env, same):
        each.step(each.reset().set("action", actions))
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=seed)
    for each in (env, same):
        each.step(actions)
    assert torch.equal(env.reset()["observation"], same.reset()["observation"])


@pytest.mark.parametrize("owner", ["make", "from_gymnasium"])
def test_first_reset_takes_no_other_seed_than_that_of_the_pool(owner):
    if owner == "make":
        env = tw.make("CartPole-v1", 2, backend="envpool", seed=4)
    else:
        env = tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=4))
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=5)
    env.reset(seed=4)


# With the rest of torchwrap.


def test_info_of_final_steps_is_that_of_the_transition_and_of_roots_that_of_resets():
    arguments = {"seed": 1, "max_episode_steps": 12}
    keys = ["elapsed_step"]
    env = tw.make("CartPole-v1", 3, backend="envpool", info_keys=keys, **arguments)
    pools = by_hand("CartPole-v1", 3, **arguments)
    td = env.reset()
    for _ in range(30):
        transition, td = sample_and_step(env, td)
        pools.step(transition["action"].numpy())
        for infos, given in (
            (pools.infos, transition["next"]),
            (pools.root_infos, td),
        ):
            elapsed = np.stack([info["elapsed_step"] for info in infos])
            np.testing.assert_array_equal(given["info", "elapsed_step"], elapsed)


GAMES = {
    "lives": {"episodic_life": True, "reward_clip": True},
    "limit": {"max_episode_steps": 150},
}


@pytest.mark.parametrize("case", mostly_full(GAMES, "lives"))
def test_game_is_over_where_no_life_is_left_or_it_is_truncated(case):
    kwargs = GAMES[case]
    env = tw.make("Qbert-v5", 3, backend="envpool", seed=2, info_keys=["game_over"], **kwargs)
    pools = by_hand("Qbert-v5", 3, 2, **kwargs)
    td = env.reset()
    games = 0
    for _ in range(500):
        transition, td = sample_and_step(env, td)
        truncated = pools.step(transition["action"].numpy())["truncated"].flatten()
        lives = np.concatenate([info["lives"] for info in pools.infos])
        over = (lives == 0) | truncated
        np.testing.assert_array_equal(transition["next", "info", "game_over"].flatten(), over)
        games += over.sum()
    assert games >= 2


def test_spec_makes_the_same_env_again():
    pong = tw.make("Pong-v5", 2, backend="envpool", seed=3, noop_max=5)
    env = tw.TransformedEnv(pong, T.ClipReward(-1, 1))
    again = tw.make(env.spec)
    assert repr(again) == repr(env)
    assert again.unwrapped.vector_env.config == pong.vector_env.config
    assert torch.equal(again.reset()["observation"], env.reset()["observation"])
    assert tw.make(env.spec, num_envs=3).num_envs == 3


@pytest.mark.parametrize("given, limit", [(None, 500), (9, 9), (-1, None)])
def test_max_episode_steps_replaces_the_limit_of_envpool(given, limit):
    env = tw.make("CartPole-v1", 2, backend="envpool", max_episode_steps=given)
    assert env.signature.max_episode_steps == env.spec.max_episode_steps == limit
    assert env.vector_env.config["max_episode_steps"] == (limit or 2**31 - 1)


def test_render_returns_a_frame_of_each_env():
    env = tw.make("CartPole-v1", 3, backend="envpool", render_mode="rgb_array", seed=1)
    env.reset()
    frames = env.render()
    assert len(frames) == 3 and (frames[0] != frames[1]).any()
    np.testing.assert_array_equal(env.render([2])[0], frames[2])


# Refusals.


UNFIT = {
    "NoSuchTask-v0": {"id": "NoSuchTask-v0"},
    "ALE/Pong-v5": {"id": "ALE/Pong-v5"},
    "gravity": {"gravity": 3.0},
    "vectorization_mode": {"vectorization_mode": "async"},
    "seed": {"seed": -1},
}


@pytest.mark.parametrize("match", UNFIT)
def test_make_with_an_invalid_argument_raises_with_its_name(match):
    with pytest.raises(ValueError, match=match):
        tw.make(
            **{
                "id": "CartPole-v1",
                "num_envs": 2,
                "backend": "envpool",
                **UNFIT[match],
            }
        )


def test_pool_that_steps_a_part_of_its_envs_raises():
    env = tw.make("CartPole-v1", 2, backend="envpool", batch_size=1)
    with pytest.raises(ValueError, match="observation"):
        env.reset()


def test_make_without_envpool_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ImportError, match=r"torchwrap\[envpool\]"):
        tw.make("CartPole-v1", 2, backend="envpool")


def test_wrapper_of_gymnasium_around_envpool_raises():
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(make_pool("CartPole-v1", 2))
    with pytest.raises(ValueError, match="vector_env"):
        tw.from_gymnasium(wrapped)


def test_options_raise():
    with pytest.raises(ValueError, match="options"):
        tw.make("CartPole-v1", 2, backend="envpool").reset(options={"low": 0})


def test_calls_after_an_interrupted_one_ask_for_a_new_env(monkeypatch):
    interrupt_a_call(tw.make("CartPole-v1", 2, backend="envpool"), monkeypatch)


def test_step_of_a_row_that_the_next_step_would_reset_raises():
    env = tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=3, max_episode_steps=3))
    env.reset()
    for _ in range(3):
        env.step_without_reset(torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match=r"reset .*\[0, 1\]"):
        env.step(torch.tensor([0, 1]))
