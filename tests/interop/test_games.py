"""The engines in C++, step by step against vector envs of one env each, stepped by hand.

EnvPool has other tasks than games, too.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from helpers import Held, load_example, mostly_full
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

SAME_STEP = AutoresetMode.SAME_STEP
NEXT_STEP = AutoresetMode.NEXT_STEP

# EnvPool's spaces have bounds in float64.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


class Ale:
    """Its games take seeds in resets."""

    lives = {"life_loss_info": True, "reward_clipping": False}
    limit = {"max_num_frames_per_episode": 60}

    @staticmethod
    def make(id, num_envs, seed=0, mode=SAME_STEP, **kwargs):
        game = id.partition("-")[0].lower()
        return AtariVectorEnv(game, num_envs, autoreset_mode=mode, **kwargs)

    @classmethod
    def by_hand(cls, id, seeds, **kwargs):
        """Games in `NEXT_STEP`: their steps return final observations, and the next one resets."""
        games = [cls.make(id, 1, mode=NEXT_STEP, **kwargs) for _ in seeds]
        continues = "life_loss_info" in kwargs
        space = games[0].single_observation_space
        return ByHand(games, space, seeds, lambda info: continues and info["lives"] > 0)


class EnvPool:
    """It seeds its envs when it makes them."""

    lives = {"episodic_life": True}
    limit = {"max_episode_steps": 15}

    @staticmethod
    def make(id, num_envs, seed=0, **kwargs):
        envpool = pytest.importorskip("envpool")
        return envpool.make(id, env_type="gymnasium", num_envs=num_envs, seed=seed, **kwargs)

    @classmethod
    def by_hand(cls, id, seeds, **kwargs):
        pools = [cls.make(id, 1, seed, **kwargs) for seed in seeds]
        return ByHand(pools, pools[0].observation_space)


each_engine = pytest.mark.parametrize("engine", [Ale, EnvPool])


def pool(id="CartPole-v1", num_envs=2, seed=0, **kwargs):
    return tw.from_gymnasium(EnvPool.make(id, num_envs, seed, **kwargs))


def made(id="CartPole-v1", num_envs=2, **kwargs):
    pytest.importorskip("envpool")
    return tw.make(id, num_envs, backend="envpool", **kwargs)


COLORS = {**Ale.limit, "grayscale": False, "continuous": True}
CASES = {  # engine, id, arguments, steps, and the least number of ends in them
    "ale-life_loss_info": (Ale, "Breakout-v5", Ale.lives, 140, 12),
    "ale-episodic_life": (Ale, "Breakout-v5", {"episodic_life": True}, 60, 4),
    "ale-limit": (Ale, "Pong-v5", Ale.limit, 40, 6),
    "ale-color, continuous": (Ale, "Pong-v5", COLORS, 20, 3),
    "envpool-episodic_life": (EnvPool, "Breakout-v5", EnvPool.lives, 200, 10),
    "envpool-limit": (EnvPool, "Pong-v5", EnvPool.limit, 40, 6),
    "envpool-CartPole": (EnvPool, "CartPole-v1", EnvPool.limit, 100, 15),
    "envpool-HalfCheetah": (EnvPool, "HalfCheetah-v5", EnvPool.limit, 35, 6),
    "envpool-WalkerWalk": (EnvPool, "WalkerWalk-v1", EnvPool.limit, 35, 6),
}


@pytest.mark.parametrize("case", mostly_full(CASES, "ale-limit"))
def test_transitions_equal_those_stepped_by_hand(case):
    engine, id, kwargs, steps, least = CASES[case]
    env = tw.from_gymnasium(engine.make(id, 3, 5, **kwargs))
    games = engine.by_hand(id, [5, 6, 7], **kwargs)
    td = env.reset(seed=5)
    assert_equal_trees(td["observation"], games.observation())
    assert follow_by_hand(env, games, td, steps)[1].sum() >= least


@pytest.mark.full
@pytest.mark.parametrize("id", ["Pong-v5", "CartPole-v1", "WalkerWalk-v1"])
def test_masked_reset_starts_episodes_in_its_rows_only(id):
    engine = Ale if id == "Pong-v5" else EnvPool
    env = tw.from_gymnasium(engine.make(id, 4, 3, **engine.limit))
    games = engine.by_hand(id, range(3, 7), **engine.limit)
    held = Held()
    td = env.reset(seed=3)
    held.add(td)
    td, _ = follow_by_hand(env, games, td, 3)
    check_masked_resets(env, games, td, 20)
    if engine is Ale:
        games.reset([2], range(77, 81))
        follow_by_hand(env, games, env.reset(seed=77, mask=torch.arange(4) == 2), 2)
    held.assert_unchanged()


# Lives.


def breakout(engine, num_envs=2, kwargs=None, keys=("lives",)):
    kwargs = engine.lives if kwargs is None else kwargs
    return tw.from_gymnasium(engine.make("Breakout-v5", num_envs, 5, **kwargs), info_keys=keys)


@each_engine
@pytest.mark.parametrize("kind", mostly_full(["lives", "limit"], "limit"))
def test_game_ends_where_no_life_is_left_or_it_is_truncated(engine, kind):
    kwargs = getattr(engine, kind)
    score = load_example("atari_game").GameReturn()
    env = tw.TransformedEnv(breakout(engine, 2, kwargs, ["game_over"]), score)
    games = engine.by_hand("Breakout-v5", [5, 6], **kwargs)
    td = env.reset(seed=5)
    returns = np.zeros(2)
    num_games = 0
    for _ in range(220 if kind == "lives" else 40):
        transition, td = sample_and_step(env, td)
        expected = games.step(transition["action"].numpy())
        returns += expected["reward"].flatten()
        lives = np.concatenate([info["lives"] for info in games.infos])
        over = (lives == 0) | expected["truncated"].flatten()
        info = transition["next", "info"]
        np.testing.assert_array_equal(info["game_over"].flatten(), over)
        given = transition["next", "episode_return"].flatten()
        np.testing.assert_array_equal(given, returns)
        returns[over] = 0
        num_games += over.sum()
    assert num_games >= 1


@pytest.mark.full
@each_engine
@pytest.mark.parametrize("num_envs", [2, 1])
def test_full_reset_after_a_lost_life_starts_the_game_of_the_engines_own_reset(engine, num_envs):
    env = breakout(engine, num_envs)
    theirs = engine.make("Breakout-v5", num_envs, 5, **engine.lives)
    env.reset(seed=5)
    theirs.reset(**({"seed": 5 + np.arange(num_envs)} if engine is Ale else {}))
    done = np.zeros(num_envs, bool)
    while not done.any():
        transition, _ = env.step_without_reset(torch.zeros(num_envs).long())
        _, _, *flags, _ = theirs.step(np.zeros(num_envs, int))
        done = np.logical_or(*flags)
        assert_equal_trees(transition["next", "done"].flatten(), done)
    expected, info = theirs.reset()
    td = env.reset()
    assert td["info", "lives"].flatten().tolist() == info["lives"].tolist() == [5] * num_envs
    assert_equal_trees(td["observation"], expected)


def lives_after_reset(env):
    return env.reset(mask=torch.ones(2, dtype=torch.bool))["info", "lives"]


def lives_after_gymnasiums_reset(env):
    infos = tw.to_gymnasium(env).reset(options={"reset_mask": np.ones(2, bool)})[1]
    return torch.as_tensor(infos["lives"])


@each_engine
@pytest.mark.parametrize(
    "lives_after", mostly_full([lives_after_reset, lives_after_gymnasiums_reset], lives_after_reset)
)
def test_reset_of_a_mask_goes_on_after_a_lost_life_and_starts_running_games_again(
    engine, lives_after
):
    env = breakout(engine)
    td = env.reset(seed=5)
    done = torch.zeros(2, dtype=torch.bool)
    lives = torch.zeros(2)
    while done.sum() != 1 or lives.min() == 0 or lives[~done] == 5:
        td = env.reset(mask=done)
        transition, td = env.step_without_reset(td.set("action", env.sample_action()))
        done = transition["next", "done"].flatten()
        lives = transition["next", "info", "lives"].flatten()
    after = lives_after(env).flatten()
    assert after[done] == lives[done] < 5
    assert after[~done] == 5


# Infos and seeds.


def test_info_of_final_steps_is_that_of_the_transition_and_of_roots_that_of_resets():
    env = made(num_envs=3, seed=1, info_keys=["elapsed_step"], **EnvPool.limit)
    pools = EnvPool.by_hand("CartPole-v1", [1, 2, 3], **EnvPool.limit)
    td = env.reset()
    for _ in range(30):
        transition, td = sample_and_step(env, td)
        pools.step(transition["action"].numpy())
        for infos, given in ((pools.infos, transition["next"]), (pools.root_infos, td)):
            elapsed = np.stack([info["elapsed_step"] for info in infos])
            np.testing.assert_array_equal(given["info", "elapsed_step"], elapsed)


@pytest.mark.full
def test_seed_of_a_game_is_seed_plus_its_global_index_modulo_two_to_the_31():
    games = Ale.make("Pong-v5", 2)
    env = tw.from_gymnasium(games, info_keys=["frame_number"], first_index=2)
    for seed, expected in ((2**31 - 1, 1), (2**31 + 8, 10)):
        games = Ale.by_hand("Pong-v5", [expected, expected + 1])
        transition, _ = sample_and_step(env, env.reset(seed=seed))
        games.step(transition["action"].numpy())
        given = transition["next", "info", "frame_number"]
        assert (transition["info", "frame_number"] < given).all()
        # The seed decides how many frames were skipped.
        frames = np.stack([info["frame_number"] for info in games.infos])
        np.testing.assert_array_equal(given, frames)


def test_seed_of_env_i_is_the_seed_of_make_plus_its_global_index():
    env = made("Pendulum-v1", seed=40, first_index=3)
    pools = EnvPool.by_hand("Pendulum-v1", [43, 44])
    assert_equal_trees(env.reset()["observation"], pools.observation())
    assert env.np_random_seed == 40


@pytest.mark.parametrize("seed", [7, 2**31 + 7, 2**64 - 1])
def test_first_reset_takes_the_seed_of_make(seed):
    given, drawn = [made(seed=seed, first_index=2) for _ in range(2)]
    first = given.reset(seed=seed)["observation"]
    assert torch.equal(first, drawn.reset()["observation"])


def test_seed_of_a_pool_that_was_made_elsewhere_is_reported():
    env = tw.from_gymnasium(EnvPool.make("CartPole-v1", 2, seed=12), first_index=2)
    wrapped = tw.TransformedEnv(env, T.StickyAction(0.5))
    wrapped.reset()
    assert wrapped.np_random_seed == 10
    assert pool(seed=[3, 9]).reset().batch_size == (2,)


@pytest.mark.parametrize("seed", [4, 5])
def test_seed_of_a_later_reset_raises_and_changes_nothing(seed):
    env, same = [made(seed=4) for _ in range(2)]
    actions = torch.tensor([0, 1])
    for each in (env, same):
        each.step(each.reset().set("action", actions))
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=seed)
    for each in (env, same):
        each.step(actions)
    assert torch.equal(env.reset()["observation"], same.reset()["observation"])


@pytest.mark.parametrize("make", [made, pool])
def test_first_reset_takes_no_other_seed_than_that_of_the_pool(make):
    env = make(seed=4)
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=5)
    env.reset(seed=4)


# Specs.


@pytest.mark.full
def test_make_and_its_spec_make_games_whose_bits_depend_on_seed_and_index_alone():
    kwargs = {"life_loss_info": True, "stack_num": 2}
    env = tw.make("ALE/Breakout-v5", 2, backend="ale", **kwargs)
    one = tw.make(EnvSpec.from_json(env.spec.to_json()), num_envs=1, first_index=1)
    games = Ale.by_hand("Breakout-v5", [7, 8], repeat_action_probability=0.25, **kwargs)
    td = env.reset(seed=7)
    one.reset(seed=7)
    assert_equal_trees(td["observation"], games.observation())
    for _ in range(150):
        transition, td = sample_and_step(env, td)
        assert_equal_trees(transition["next"], games.step(transition["action"].numpy()))
        alone = one.step(transition["action"][1:])[1]
        assert torch.equal(td["observation"][1:], alone["observation"])


def test_spec_makes_the_same_pool_again():
    pong = made("Pong-v5", seed=3, noop_max=5)
    env = tw.TransformedEnv(pong, T.ClipReward(-1, 1))
    again = tw.make(env.spec)
    assert repr(again) == repr(env)
    assert again.unwrapped.vector_env.config == pong.vector_env.config
    assert torch.equal(again.reset()["observation"], env.reset()["observation"])
    assert tw.make(env.spec, num_envs=3).num_envs == 3


def test_spec_keeps_the_limit_of_a_transform():
    env = tw.make("ALE/Pong-v5", 2, backend="ale", max_episode_steps=-1)
    limited = tw.TransformedEnv(env, T.TimeLimit(9))
    assert tw.make(limited.spec, num_envs=3).signature.max_episode_steps == 9


@pytest.mark.parametrize("given, limit", [(None, 500), (9, 9), (-1, None)])
def test_max_episode_steps_replaces_the_limit_of_envpool(given, limit):
    env = made(max_episode_steps=given)
    assert env.signature.max_episode_steps == env.spec.max_episode_steps == limit
    assert env.vector_env.config["max_episode_steps"] == (limit or 2**31 - 1)


def test_render_returns_a_frame_of_each_env():
    env = made(num_envs=3, render_mode="rgb_array", seed=1)
    env.reset()
    frames = env.render()
    assert len(frames) == 3 and (frames[0] != frames[1]).any()
    np.testing.assert_array_equal(env.render([2])[0], frames[2])


# Refusals.


UNFIT = {
    "ale": {
        "ALE/Pog-v5": {"id": "ALE/Pog-v5"},
        "CartPole-v1": {"id": "CartPole-v1"},
        "PongNoFrameskip-v4": {"id": "PongNoFrameskip-v4"},
        "max_episode_steps": {"max_episode_steps": 9},
        "render_mode": {"render_mode": "rgb_array"},
        "seed": {"seed": 1},
        "frameskip": {"frameskip": 0},
        "autoreset_mode": {"autoreset_mode": "NextStep"},
        "vectorization_mode": {"vectorization_mode": "sync"},
    },
    "envpool": {
        "NoSuchTask-v0": {"id": "NoSuchTask-v0"},
        "ALE/Pong-v5": {"id": "ALE/Pong-v5"},
        "gravity": {"gravity": 3.0},
        "vectorization_mode": {"vectorization_mode": "async"},
        "seed": {"seed": -1},
    },
}
PAIRS = [(backend, match) for backend, cases in UNFIT.items() for match in cases]


@pytest.mark.parametrize("backend, match", PAIRS)
def test_make_with_an_invalid_argument_raises_with_its_name(backend, match):
    if backend == "envpool":
        pytest.importorskip("envpool")
    id = "ALE/Pong-v5" if backend == "ale" else "CartPole-v1"
    arguments = {"id": id, "num_envs": 2, "backend": backend}
    with pytest.raises(ValueError, match=match):
        tw.make(**{**arguments, **UNFIT[backend][match]})


def test_make_without_envpool_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ImportError, match="envpool"):
        tw.make("CartPole-v1", 2, backend="envpool")


@pytest.mark.parametrize("mode", mostly_full([NEXT_STEP, AutoresetMode.DISABLED], NEXT_STEP))
def test_other_modes_of_ale_than_same_step_raise(mode):
    vector_env = Ale.make("Pong-v5", 2, mode=NEXT_STEP)
    Ale.make("Pong-v5", 2)  # writes its mode into the metadata of the other one
    assert vector_env.metadata["autoreset_mode"] is SAME_STEP
    vector_env.autoreset_mode = mode
    with pytest.raises(ValueError, match=f"autoreset_mode .*{mode.name}"):
        tw.from_gymnasium(vector_env)


@pytest.mark.full
@each_engine
def test_engine_that_steps_a_part_of_its_envs_raises(engine):
    with pytest.raises(ValueError, match="observation"):
        tw.from_gymnasium(engine.make("Pong-v5", 4, batch_size=2)).reset()


@each_engine
def test_options_raise(engine):
    with pytest.raises(ValueError, match="options"):
        breakout(engine).reset(options={"mode": 1})


@each_engine
def test_repeated_actions_raise_and_name_the_engines_argument(engine):
    with pytest.raises(ValueError, match=r"frame_?skip"):
        tw.wrappers.RepeatAction(breakout(engine, 1), 2)


@each_engine
def test_call_after_an_interrupted_one_raises_and_asks_for_a_new_env(engine, monkeypatch):
    interrupt_a_call(breakout(engine), monkeypatch)


def test_step_of_a_row_that_the_next_step_would_reset_raises():
    env = pool(seed=3, max_episode_steps=3)
    env.reset()
    for _ in range(3):
        env.step_without_reset(torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match=r"reset .*\[0, 1\]"):
        env.step(torch.tensor([0, 1]))
