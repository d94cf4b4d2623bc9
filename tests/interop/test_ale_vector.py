"""ALE's own vector env in the bridge, step by step against vector envs of one game each that are stepped by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from helpers import mostly_full
from single_envs import ByHand, assert_equal_trees, check_masked_resets, follow_by_hand, interrupt_a_call, sample_and_step

import torchwrap as tw

SAME_STEP, NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


def make_games(num_envs, game="pong", mode=SAME_STEP, **kwargs):
    return AtariVectorEnv(game, num_envs, autoreset_mode=mode, **kwargs)


def by_hand(num_envs, seeds, **kwargs):
    """Games in `NEXT_STEP`: their steps return final observations, and the next one resets."""
    games = [make_games(1, mode=NEXT_STEP, **kwargs) for _ in range(num_envs)]
    goes_on = kwargs.get("life_loss_info", False)
    return ByHand(games, games[0].single_observation_space, seeds, lambda info: goes_on and info["lives"] > 0)


GAMES = {
    "truncated": ({"game": "pong", "max_num_frames_per_episode": 60}, 40, 6),
    "episodic_life": ({"game": "breakout", "episodic_life": True}, 60, 4),
    "life_loss_info": ({"game": "breakout", "life_loss_info": True}, 140, 12),
    "color, continuous": ({"game": "pong", "grayscale": False, "continuous": True, "max_num_frames_per_episode": 60}, 20, 3),
}


@pytest.mark.parametrize("case", mostly_full(GAMES, "life_loss_info"))
def test_transitions_match_ale_stepped_by_hand(case):
    kwargs, steps, ends = GAMES[case]
    env, games = tw.from_gymnasium(make_games(3, **kwargs)), by_hand(3, [5, 6, 7], **kwargs)
    td = env.reset(seed=5)
    assert_equal_trees(td["observation"], games.observation())
    assert follow_by_hand(env, games, td, steps)[1].sum() >= ends


def test_game_that_goes_on_after_a_lost_life_has_its_own_info():
    env = tw.from_gymnasium(make_games(2, "breakout", life_loss_info=True), info_keys=["lives"])
    games, td, seen = by_hand(2, [0, 1], game="breakout", life_loss_info=True), env.reset(seed=0), set()
    for _ in range(60):
        transition, td = sample_and_step(env, td)
        games.step(transition["action"].numpy())
        lives = np.concatenate([info["lives"] for info in games.infos])
        np.testing.assert_array_equal(transition["next", "info", "lives"].flatten(), lives)
        seen |= {*lives}
    assert len(seen) >= 3


def test_masked_reset_starts_episodes_in_its_rows_only():
    kwargs = {"game": "pong", "max_num_frames_per_episode": 48}
    env, games = tw.from_gymnasium(make_games(4, **kwargs)), by_hand(4, range(3, 7), **kwargs)
    check_masked_resets(env, games, follow_by_hand(env, games, env.reset(seed=3), 3)[0], 14)
    games.reset([2], range(77, 81))
    follow_by_hand(env, games, env.reset(seed=77, mask=torch.arange(4) == 2), 2)


def test_seed_of_env_i_is_seed_plus_its_global_index_modulo_two_to_the_31():
    env = tw.from_gymnasium(make_games(2), info_keys=["frame_number"], first_index=2)
    for seed, expected in ((2**31 - 1, 1), (2**31 + 8, 10)):
        games = by_hand(2, [expected, expected + 1])
        transition, _ = sample_and_step(env, env.reset(seed=seed))
        games.step(transition["action"].numpy())
        assert (transition["info", "frame_number"] < transition["next", "info", "frame_number"]).all()
        frames = np.stack([info["frame_number"] for info in games.infos])  # the seed decides how many were skipped
        np.testing.assert_array_equal(transition["next", "info", "frame_number"], frames)


def test_other_modes_part_of_a_batch_and_options_raise():
    vector_env = make_games(2, mode=NEXT_STEP)
    make_games(2)  # writes its mode into the metadata of the other one
    assert vector_env.metadata["autoreset_mode"] is SAME_STEP
    for mode in (NEXT_STEP, AutoresetMode.DISABLED):
        vector_env.autoreset_mode = mode
        match = rf"in AutoresetMode.SAME_STEP, but got .*{mode.name}.* Pass autoreset_mode=gymnasium.vector.AutoresetMode.SAME"
        with pytest.raises(ValueError, match=match):
            tw.from_gymnasium(vector_env)
    with pytest.raises(ValueError, match="needs ALE's vector env to step all 4 envs at once, but got batch_size=2"):
        tw.from_gymnasium(make_games(4, batch_size=2))
    with pytest.raises(ValueError, match=r"reset takes no options, but got \{'mode': 1\}"):
        tw.from_gymnasium(make_games(2)).reset(options={"mode": 1})


def test_call_after_an_interrupted_one_raises_and_asks_for_a_new_env(monkeypatch):
    interrupt_a_call(tw.from_gymnasium(make_games(2)), monkeypatch)
