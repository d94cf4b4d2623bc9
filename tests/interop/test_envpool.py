"""EnvPool's envs in the bridge, step by step against pools of one env each that are stepped by hand through EnvPool's API."""

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
    "Breakout-v5 with episodic_life": ({"episodic_life": True}, 200, (10, 0)),
}


@pytest.mark.parametrize("task", TASKS)
def test_transitions_match_envpool_stepped_by_hand(task):
    kwargs, steps, (terminations, truncations) = TASKS[task]
    id = task.partition(" ")[0]
    env = tw.from_gymnasium(make_pool(id, 3, seed=5, **kwargs))
    pools, td = by_hand(id, 3, seed=5, **kwargs), env.reset()
    assert_equal_trees(td["observation"], pools.observation())
    _, ends = follow_by_hand(env, pools, td, steps)
    assert ends[0] >= terminations and ends[1] >= truncations
    assert env.signature.max_episode_steps == env.vector_env.config["max_episode_steps"]


@pytest.mark.parametrize("id", ["CartPole-v1", "WalkerWalk-v1"])
def test_masked_reset_starts_episodes_in_its_rows_only(id):
    env = tw.from_gymnasium(make_pool(id, 4, seed=3, max_episode_steps=11))
    pools, held, td = by_hand(id, 4, seed=3, max_episode_steps=11), Held(), env.reset()
    held.add(td)
    td, _ = follow_by_hand(env, pools, td, 5)
    held.add(td)
    check_masked_resets(env, pools, td, 20)
    held.assert_unchanged()


def test_reset_of_finished_rows_keeps_lives_whatever_other_rows_do():
    env = tw.from_gymnasium(
        make_pool("Breakout-v5", 2, seed=5, episodic_life=True), info_keys=["lives"]
    )
    td, done = env.reset(), torch.ones(2, dtype=torch.bool)
    while done.all() or not done.any():
        td = env.reset(mask=done)
        transition, td = env.step_without_reset(td.set("action", env.sample_action()))
        done, lives = (
            transition["next", "done"].flatten(),
            transition["next", "info", "lives"].flatten(),
        )
    td = env.reset(mask=torch.ones(2, dtype=torch.bool))
    after = sample_and_step(env, td)[0]["next", "info", "lives"].flatten()
    assert 0 < lives[done].item() == after[done].item() < 5 == after[~done].item()


def test_second_reset_of_a_finished_row_starts_another_episode():
    env, pools = (
        tw.from_gymnasium(make_pool("CartPole-v1", 3, seed=1)),
        by_hand("CartPole-v1", 3, seed=1),
    )
    td, done = env.reset(), torch.zeros(3, dtype=torch.bool)
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
    env, same = [
        tw.make("CartPole-v1", 2, backend="envpool", seed=seed, first_index=2) for _ in range(2)
    ]
    assert torch.equal(env.reset(seed=seed)["observation"], same.reset()["observation"])


def test_seed_of_a_pool_that_was_made_elsewhere_is_reported():
    env = tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=12), first_index=2)
    wrapped = tw.TransformedEnv(env, T.StickyAction(0.5))
    wrapped.reset()
    assert wrapped.np_random_seed == 10
    assert tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=[3, 9])).reset().batch_size == (2,)


def test_seed_of_a_reset_before_the_first_step_makes_the_pool_with_it():
    for earlier in ([], [None], [7, 40]):
        env = tw.TransformedEnv(
            tw.make("CartPole-v1", 3, backend="envpool", seed=4, first_index=2), T.TimeLimit(500)
        )
        for seed in earlier:
            env.reset(seed=seed)
        pools, td = by_hand("CartPole-v1", 3, 42), env.reset(seed=40)
        assert_equal_trees(td["observation"], pools.observation())
        assert env.np_random_seed == 40 and env.unwrapped.vector_env.config["seed"] == 42
        follow_by_hand(env, pools, td, 60)
    env.close()


@pytest.mark.parametrize("act, mask", [(True, None), (False, [True, False])], ids=str)
def test_seed_that_envpool_would_ignore_raises_and_changes_nothing(act, mask):
    env, same = [tw.make("CartPole-v1", 2, backend="envpool", seed=4) for _ in range(2)]
    tds = [each.reset() for each in (env, same)]
    if act:
        tds = [each.step(torch.tensor([0, 1]))[1] for each in (env, same)]
    mask = None if mask is None else torch.tensor(mask)
    match = r"needs a seed for all envs before their first step, or none, but got 5\. .*make\(.*backend=\"envpool\", seed=5\)"
    with pytest.raises(ValueError, match=match):
        env.reset(seed=5, mask=mask)
    for each, td in zip((env, same), tds, strict=True):
        each.step(td.set("action", torch.tensor([1, 0])))
    assert torch.equal(*[each.reset()["observation"] for each in (env, same)])


def test_seed_of_a_pool_that_was_made_elsewhere_raises():
    env = tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=4))
    for seed in (5, 4):
        with pytest.raises(
            ValueError,
            match=rf"needs seed=4, with which the pool was made.*but got {seed}\. .*seed={seed}\)",
        ):
            env.reset(seed=seed)
        env.reset()


# With the rest of torchwrap.


def test_info_of_final_steps_is_that_of_the_transition_and_of_roots_that_of_resets():
    env = tw.make(
        "CartPole-v1",
        3,
        backend="envpool",
        seed=1,
        max_episode_steps=12,
        info_keys=["elapsed_step"],
    )
    pools, td = by_hand("CartPole-v1", 3, 1, max_episode_steps=12), env.reset()
    for _ in range(30):
        transition, td = sample_and_step(env, td)
        pools.step(transition["action"].numpy())
        elapsed = np.stack([info["elapsed_step"] for info in pools.infos])
        np.testing.assert_array_equal(transition["next", "info", "elapsed_step"], elapsed)
        elapsed = np.stack([info["elapsed_step"] for info in pools.root_infos])
        np.testing.assert_array_equal(td["info", "elapsed_step"], elapsed)


GAMES = {"lives": {"episodic_life": True, "reward_clip": True}, "limit": {"max_episode_steps": 150}}


@pytest.mark.parametrize("case", mostly_full(GAMES, "lives"))
def test_return_of_a_game_is_the_sum_of_the_rewards_of_its_lives(case):
    kwargs = GAMES[case]
    env = tw.make(
        "Qbert-v5", 3, backend="envpool", seed=2, info_keys=["game_return", "game_over"], **kwargs
    )
    pools, td, returns, games = by_hand("Qbert-v5", 3, 2, **kwargs), env.reset(), np.zeros(3), []
    for step in range(500):
        transition, td = sample_and_step(env, td)
        truncated = pools.step(transition["action"].numpy())["truncated"].flatten()
        returns += np.concatenate([info["reward"] for info in pools.infos])
        over = (np.concatenate([info["lives"] for info in pools.infos]) == 0) | truncated
        np.testing.assert_array_equal(transition["next", "info", "game_return"].flatten(), returns)
        np.testing.assert_array_equal(transition["next", "info", "game_over"].flatten(), over)
        games, returns = [*games, *returns[over]], np.where(over, 0, returns)
        if (
            step == 250
        ):  # in the middle of games; a reset goes on with those whose episodes have ended
            pools.reset([1])
            td, returns[1] = env.reset(mask=torch.arange(3) == 1), 0
    assert games and max(games) >= 50


def test_spec_makes_the_same_env_again():
    env = tw.TransformedEnv(
        tw.make("Pong-v5", 2, backend="envpool", seed=3, noop_max=5), T.ClipReward(-1, 1)
    )
    again = tw.make(env.spec)
    assert (
        repr(again) == repr(env)
        and again.unwrapped.vector_env.config == env.unwrapped.vector_env.config
    )
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


def test_make_with_invalid_arguments_raises():
    for arguments, match in (
        (
            {"id": "NoSuchTask-v0"},
            r"needs an id that EnvPool has .*'NoSuchTask-v0': `envpool.list_all_envs\(\)` lists them",
        ),
        ({"id": "ALE/Pong-v5"}, r"needs an id that EnvPool has .*'ALE/Pong-v5': pass 'Pong-v5'"),
        ({"gravity": 3.0}, "needs arguments that EnvPool's CartPole-v1 takes: .*gravity"),
        (
            {"vectorization_mode": "async"},
            "make takes no vectorization_mode for '.*' with backend=.envpool.",
        ),
        ({"batch_size": 1}, "needs EnvPool to step all 2 envs together, but got batch_size=1"),
        ({"seed": -1}, "needs seed as an integer of at least 0, but got -1"),
    ):
        with pytest.raises(ValueError, match=match):
            tw.make(**{"id": "CartPole-v1", "num_envs": 2, "backend": "envpool", **arguments})


def test_make_without_envpool_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(
        ImportError,
        match=r"needs the package envpool for backend=\"envpool\".*torchwrap\[envpool\]",
    ):
        tw.make("CartPole-v1", 2, backend="envpool")


def test_wrapper_of_gymnasium_around_envpool_raises():
    with pytest.raises(
        ValueError, match="needs EnvPool's env itself, but got RecordEpisodeStatistics around it"
    ):
        tw.from_gymnasium(
            gymnasium.wrappers.vector.RecordEpisodeStatistics(make_pool("CartPole-v1", 2))
        )


def test_options_raise_and_after_an_interrupted_call_all_later_ones_do(monkeypatch):
    env = tw.make("CartPole-v1", 2, backend="envpool")
    with pytest.raises(
        ValueError, match=r"CartPole-v1.reset takes no options, but got \{'low': 0\}"
    ):
        env.reset(options={"low": 0})
    interrupt_a_call(env, monkeypatch)
