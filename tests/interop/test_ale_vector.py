"""ALE's own vector env in the bridge, step by step against vector envs of one game each that are stepped by hand."""

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

SAME_STEP, NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


def make_games(num_envs, game="pong", mode=SAME_STEP, **kwargs):
    return AtariVectorEnv(game, num_envs, autoreset_mode=mode, **kwargs)


def by_hand(num_envs, seeds, **kwargs):
    """Games in `NEXT_STEP`: their steps return final observations, and the next one resets."""
    games = [make_games(1, mode=NEXT_STEP, **kwargs) for _ in range(num_envs)]
    goes_on = kwargs.get("life_loss_info", False)
    return ByHand(
        games, games[0].single_observation_space, seeds, lambda info: goes_on and info["lives"] > 0
    )


GAMES = {
    "truncated": ({"game": "pong", "max_num_frames_per_episode": 60}, 40, 6),
    "episodic_life": ({"game": "breakout", "episodic_life": True}, 60, 4),
    "life_loss_info": ({"game": "breakout", "life_loss_info": True}, 140, 12),
    "color, continuous": (
        {"game": "pong", "grayscale": False, "continuous": True, "max_num_frames_per_episode": 60},
        20,
        3,
    ),
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
    games, td, seen = (
        by_hand(2, [0, 1], game="breakout", life_loss_info=True),
        env.reset(seed=0),
        set(),
    )
    for _ in range(60):
        transition, td = sample_and_step(env, td)
        games.step(transition["action"].numpy())
        lives = np.concatenate([info["lives"] for info in games.infos])
        np.testing.assert_array_equal(transition["next", "info", "lives"].flatten(), lives)
        seen |= {*lives}
    assert len(seen) >= 3


LIVES = {"life_loss_info": True}, {"episodic_life": True}, {"max_num_frames_per_episode": 200}


@pytest.mark.full
@pytest.mark.parametrize("lives", LIVES, ids=str)
def test_return_of_a_game_is_the_sum_of_the_rewards_of_its_lives(lives):
    kwargs, best = {"game": "breakout", "reward_clipping": False, **lives}, 0
    env = tw.from_gymnasium(make_games(2, **kwargs), info_keys=["game_return", "game_over"])
    games, td, returns = by_hand(2, [3, 4], **kwargs), env.reset(seed=3), np.zeros(2)
    for step in range(400):
        transition, td = sample_and_step(env, td)
        expected = {
            name: value.flatten()
            for name, value in games.step(transition["action"].numpy()).items()
        }
        returns += expected["reward"]
        left = np.concatenate([info["lives"] for info in games.infos])
        # With episodic_life, ALE starts another game where a life is lost.
        over = (
            (left == 0) | expected["truncated"] if "life_loss_info" in lives else expected["done"]
        )
        np.testing.assert_array_equal(transition["next", "info", "game_return"].flatten(), returns)
        np.testing.assert_array_equal(transition["next", "info", "game_over"].flatten(), over)
        best, returns = max(best, returns[over].max(initial=0)), np.where(over, 0, returns)
        if step == 200:  # in the middle of a game
            games.reset([1])
            td, returns[1] = env.reset(mask=torch.arange(2) == 1), 0
    assert best >= 1


@pytest.mark.full
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
        assert (
            transition["info", "frame_number"] < transition["next", "info", "frame_number"]
        ).all()
        frames = np.stack(
            [info["frame_number"] for info in games.infos]
        )  # the seed decides how many were skipped
        np.testing.assert_array_equal(transition["next", "info", "frame_number"], frames)


def test_make_and_its_spec_make_games_whose_bits_depend_on_seed_and_index_alone():
    kwargs = {"life_loss_info": True, "stack_num": 2}
    env = tw.make("ALE/Breakout-v5", 2, backend="ale", **kwargs)
    one = tw.make(EnvSpec.from_json(env.spec.to_json()), num_envs=1, first_index=1)
    games = by_hand(
        2, [7, 8], game="breakout", repeat_action_probability=0.25, **kwargs
    )  # as the id says
    td, alone = env.reset(seed=7), one.reset(seed=7)
    assert_equal_trees(td["observation"], games.observation())
    for _ in range(150):
        transition, td = sample_and_step(env, td)
        assert_equal_trees(transition["next"], games.step(transition["action"].numpy()))
        alone = one.step(transition["action"][1:])[1]
        assert torch.equal(td["observation"][1:], alone["observation"])


def test_make_with_what_ale_does_not_take_raises():
    for arguments, match in (
        (
            {"id": "ALE/Pog-v5"},
            "make needs a registered id, but got 'ALE/Pog-v5'.*Did you mean: `Pong`",
        ),
        (
            {"id": "CartPole-v1"},
            'needs the id of a game, such as "ALE/Pong-v5", for backend="ale", but got .CartPole-v1',
        ),
        ({"id": "PongNoFrameskip-v4"}, "make needs the id of a game"),
        (
            {"max_episode_steps": 9},
            "vector env takes: .*For max_episode_steps, put transforms.TimeLimit on the env",
        ),
        ({"render_mode": "rgb_array"}, 'For render_mode, pass backend="gymnasium"'),
        ({"seed": 1}, r"For seed, call env.reset\(seed=0\)"),
        ({"frameskip": 0}, "vector env takes: Invalid frameskip"),
        (
            {"autoreset_mode": "NextStep"},
            "Pass autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP",
        ),
        (
            {"vectorization_mode": "sync"},
            "make takes no vectorization_mode for 'ALE/Pong-v5' with backend=.ale.",
        ),
        (
            {"info_keys": ["game_return"]},
            "but got clipped ones: pass reward_clipping=False, and put transforms.ClipReward",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            tw.make(**{"id": "ALE/Pong-v5", "num_envs": 2, "backend": "ale", **arguments})
    env = tw.TransformedEnv(
        tw.make("ALE/Pong-v5", 2, backend="ale", max_episode_steps=-1), T.TimeLimit(9)
    )
    assert tw.make(env.spec, num_envs=3).signature.max_episode_steps == 9


def test_other_modes_part_of_a_batch_and_options_raise():
    vector_env = make_games(2, mode=NEXT_STEP)
    make_games(2)  # writes its mode into the metadata of the other one
    assert vector_env.metadata["autoreset_mode"] is SAME_STEP
    for mode in (NEXT_STEP, AutoresetMode.DISABLED):
        vector_env.autoreset_mode = mode
        match = rf"in AutoresetMode.SAME_STEP, but got .*{mode.name}.* Pass autoreset_mode=gymnasium.vector.AutoresetMode.SAME"
        with pytest.raises(ValueError, match=match):
            tw.from_gymnasium(vector_env)
    with pytest.raises(
        ValueError, match="needs ALE's vector env to step all 4 envs together, but got batch_size=2"
    ):
        tw.from_gymnasium(make_games(4, batch_size=2))
    with pytest.raises(ValueError, match=r"reset takes no options, but got \{'mode': 1\}"):
        tw.from_gymnasium(make_games(2)).reset(options={"mode": 1})


def test_call_after_an_interrupted_one_raises_and_asks_for_a_new_env(monkeypatch):
    interrupt_a_call(tw.from_gymnasium(make_games(2)), monkeypatch)
