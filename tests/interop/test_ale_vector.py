"""ALE's own vector env in the bridge, against vector envs of one game each, stepped by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from helpers import mostly_full
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


def make_games(num_envs, game="pong", mode=SAME_STEP, **kwargs):
    return AtariVectorEnv(game, num_envs, autoreset_mode=mode, **kwargs)


def by_hand(num_envs, seeds, **kwargs):
    """Games in `NEXT_STEP`: their steps return final observations, and the next one resets."""
    games = [make_games(1, mode=NEXT_STEP, **kwargs) for _ in range(num_envs)]
    continues = kwargs.get("life_loss_info", False)
    space = games[0].single_observation_space
    return ByHand(games, space, seeds, lambda info: continues and info["lives"] > 0)


SHORT_PONG = {"game": "pong", "max_num_frames_per_episode": 60}
GAMES = {  # arguments, steps, and the least number of ends in them
    "truncated": (SHORT_PONG, 40, 6),
    "episodic_life": ({"game": "breakout", "episodic_life": True}, 60, 4),
    "life_loss_info": (
        {"game": "breakout", "life_loss_info": True},
        140,
        12,
    ),
    "color, continuous": (
        {**SHORT_PONG, "grayscale": False, "continuous": True},
        20,
        3,
    ),
}


@pytest.mark.parametrize("case", mostly_full(GAMES, "life_loss_info"))
def test_transitions_match_ale_stepped_by_hand(case):
    kwargs, steps, ends = GAMES[case]
    env = tw.from_gymnasium(make_games(3, **kwargs))
    games = by_hand(3, [5, 6, 7], **kwargs)
    td = env.reset(seed=5)
    assert_equal_trees(td["observation"], games.observation())
    assert follow_by_hand(env, games, td, steps)[1].sum() >= ends


def test_game_that_goes_on_after_a_lost_life_has_its_own_info():
    env = tw.from_gymnasium(make_games(2, "breakout", life_loss_info=True), info_keys=["lives"])
    games = by_hand(2, [0, 1], game="breakout", life_loss_info=True)
    td = env.reset(seed=0)
    seen = set()
    for _ in range(60):
        transition, td = sample_and_step(env, td)
        games.step(transition["action"].numpy())
        lives = np.concatenate([info["lives"] for info in games.infos])
        np.testing.assert_array_equal(transition["next", "info", "lives"].flatten(), lives)
        seen |= {*lives}
    assert len(seen) >= 3


def test_full_reset_after_a_lost_life_starts_the_game_that_ales_own_reset_starts():
    kwargs = {"game": "breakout", "life_loss_info": True}
    env = tw.from_gymnasium(make_games(2, **kwargs), info_keys=["lives"])
    theirs = make_games(2, **kwargs)
    td = env.reset(seed=0)
    theirs.reset(seed=np.arange(2))
    done = np.zeros(2, bool)
    while not done.any():
        transition, td = env.step_without_reset(td.set("action", torch.zeros(2).long()))
        _, _, *flags, info = theirs.step(np.zeros(2, int))
        done = np.logical_or(*flags)
        assert_equal_trees(transition["next", "done"].flatten(), done)
    assert info["lives"].min() == 4
    td = env.reset()
    expected, info = theirs.reset()
    assert td["info", "lives"].flatten().tolist() == info["lives"].tolist() == [5, 5]
    assert_equal_trees(td["observation"], expected)


LIVES = (
    {"life_loss_info": True},
    {"episodic_life": True},
    {"max_num_frames_per_episode": 200},
)


@pytest.mark.full
@pytest.mark.parametrize("lives", LIVES, ids=str)
def test_game_is_over_where_no_life_is_left_or_it_is_truncated(lives):
    kwargs = {"game": "breakout", **lives}
    env = tw.from_gymnasium(make_games(2, **kwargs), info_keys=["game_over"])
    games = by_hand(2, [3, 4], **kwargs)
    td = env.reset(seed=3)
    num_games = 0
    for _ in range(400):
        transition, td = sample_and_step(env, td)
        expected = games.step(transition["action"].numpy())
        over = expected["done"].flatten()  # with episodic_life, a lost life ends the game
        if "life_loss_info" in lives:
            left = np.concatenate([info["lives"] for info in games.infos])
            over = (left == 0) | expected["truncated"].flatten()
        np.testing.assert_array_equal(transition["next", "info", "game_over"].flatten(), over)
        num_games += over.sum()
    assert num_games >= 2


@pytest.mark.full
def test_masked_reset_starts_episodes_in_its_rows_only():
    kwargs = {"game": "pong", "max_num_frames_per_episode": 48}
    env = tw.from_gymnasium(make_games(4, **kwargs))
    games = by_hand(4, range(3, 7), **kwargs)
    td, _ = follow_by_hand(env, games, env.reset(seed=3), 3)
    check_masked_resets(env, games, td, 14)
    games.reset([2], range(77, 81))
    follow_by_hand(env, games, env.reset(seed=77, mask=torch.arange(4) == 2), 2)


def test_seed_of_env_i_is_seed_plus_its_global_index_modulo_two_to_the_31():
    env = tw.from_gymnasium(make_games(2), info_keys=["frame_number"], first_index=2)
    for seed, expected in ((2**31 - 1, 1), (2**31 + 8, 10)):
        games = by_hand(2, [expected, expected + 1])
        transition, _ = sample_and_step(env, env.reset(seed=seed))
        games.step(transition["action"].numpy())
        given = transition["next", "info", "frame_number"]
        assert (transition["info", "frame_number"] < given).all()
        # The seed decides how many frames were skipped.
        frames = np.stack([info["frame_number"] for info in games.infos])
        np.testing.assert_array_equal(given, frames)


def test_make_and_its_spec_make_games_whose_bits_depend_on_seed_and_index_alone():
    kwargs = {"life_loss_info": True, "stack_num": 2}
    env = tw.make("ALE/Breakout-v5", 2, backend="ale", **kwargs)
    one = tw.make(EnvSpec.from_json(env.spec.to_json()), num_envs=1, first_index=1)
    by_id = {"game": "breakout", "repeat_action_probability": 0.25}
    games = by_hand(2, [7, 8], **by_id, **kwargs)
    td = env.reset(seed=7)
    one.reset(seed=7)
    assert_equal_trees(td["observation"], games.observation())
    for _ in range(150):
        transition, td = sample_and_step(env, td)
        assert_equal_trees(transition["next"], games.step(transition["action"].numpy()))
        alone = one.step(transition["action"][1:])[1]
        assert torch.equal(td["observation"][1:], alone["observation"])


UNFIT = {
    "ALE/Pog-v5": {"id": "ALE/Pog-v5"},
    "CartPole-v1": {"id": "CartPole-v1"},
    "PongNoFrameskip-v4": {"id": "PongNoFrameskip-v4"},
    "TimeLimit": {"max_episode_steps": 9},
    "render_mode": {"render_mode": "rgb_array"},
    "seed": {"seed": 1},
    "frameskip": {"frameskip": 0},
    "autoreset_mode": {"autoreset_mode": "NextStep"},
    "vectorization_mode": {"vectorization_mode": "sync"},
}


@pytest.mark.parametrize("match", UNFIT)
def test_make_with_an_argument_that_ale_does_not_take_raises(match):
    with pytest.raises(ValueError, match=match):
        tw.make(
            **{
                "id": "ALE/Pong-v5",
                "num_envs": 2,
                "backend": "ale",
                **UNFIT[match],
            }
        )


def test_spec_keeps_the_limit_of_a_transform():
    env = tw.make("ALE/Pong-v5", 2, backend="ale", max_episode_steps=-1)
    limited = tw.TransformedEnv(env, T.TimeLimit(9))
    assert tw.make(limited.spec, num_envs=3).signature.max_episode_steps == 9


@pytest.mark.parametrize("mode", [NEXT_STEP, AutoresetMode.DISABLED])
def test_other_modes_than_same_step_raise(mode):
    vector_env = make_games(2, mode=NEXT_STEP)
    make_games(2)  # writes its mode into the metadata of the other one
    assert vector_env.metadata["autoreset_mode"] is SAME_STEP
    vector_env.autoreset_mode = mode
    with pytest.raises(ValueError, match=f"autoreset_mode .*{mode.name}"):
        tw.from_gymnasium(vector_env)


def test_games_that_step_in_parts_raise():
    with pytest.raises(ValueError, match="observation"):
        tw.from_gymnasium(make_games(4, batch_size=2)).reset()


def test_options_raise():
    with pytest.raises(ValueError, match="options"):
        tw.from_gymnasium(make_games(2)).reset(options={"mode": 1})


def test_call_after_an_interrupted_one_raises_and_asks_for_a_new_env(
    monkeypatch,
):
    interrupt_a_call(tw.from_gymnasium(make_games(2)), monkeypatch)
