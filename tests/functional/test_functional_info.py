"""Optional functions (`transition_info`, `state_info`, `truncated`), and limits by env."""

import pytest
import torch
from func_envs import (
    BroadcastWalk,
    Walk,
    both_styles,
    each_base,
    equal,
    one_step,
    play,
    variant,
)
from helpers import assert_no_overlap

from torchwrap import FunctionalEnv
from torchwrap.wrappers import RepeatAction


class Telling(Walk):
    """Says where it is (a vector), and how far it came in this step (a scalar)."""

    def transition_info(self, state, action, next_state):
        return {"moved": next_state["position"][0] - state["position"][0], "asked": action}

    def state_info(self, state):
        return {"count": state["count"], "position": state["position"]}


class BroadcastTelling(BroadcastWalk):
    state_info = Telling.state_info

    def transition_info(self, state, action, next_state):
        moved = next_state["position"] - state["position"]
        return {"moved": moved[:, 0], "asked": action}


both_telling = both_styles(Telling(), BroadcastTelling())
ZEROS = torch.zeros(2, 1)

# Info.


@both_telling
def test_info_matches_values_computed_by_hand(func_env):
    env = FunctionalEnv(func_env, 2)
    moves = torch.tensor(
        [
            [[2.0], [0.5]],
            [[1.0], [0.5]],
            [[-1.0], [1.0]],
        ]
    )
    out, td = play(env, env.reset(seed=0), moves)  # env 0 ends with its second step
    info = out["next", "info"]
    assert sorted(info.keys()) == ["asked", "count", "moved", "position"]
    assert equal(info["moved"], moves) and equal(info["asked"], moves)
    assert info["count"].tolist() == [
        [[1], [1]],
        [[2], [2]],
        [[1], [3]],
    ]
    assert info["count"].dtype == torch.int64
    assert info["position"].tolist() == [
        [[2.0, 0.0], [0.5, 0.0]],
        [[3.0, 2.0], [1.0, 0.5]],
        [[-1.0, 0.0], [2.0, 1.0]],
    ]
    assert set(td.keys()) == {"observation"}


@pytest.mark.parametrize(
    "func_env",
    [
        Walk(),
        variant(state_info=lambda state: {}),
    ],
    ids=["none", "empty"],
)
def test_no_info_leaves_out_the_entry(func_env):
    assert "info" not in one_step(FunctionalEnv(func_env, 2), ZEROS).keys()


@each_base
def test_entries_of_one_tensor_do_not_share_memory(base):
    def state_info(state):
        double = state["count"] + state["count"]
        return {"one": double, "other": double}

    assert_no_overlap(one_step(FunctionalEnv(variant(base, state_info=state_info), 2), ZEROS))


@both_telling
def test_info_of_a_repeated_action_is_that_of_the_last_step(func_env):
    env = RepeatAction(FunctionalEnv(func_env, 2), 3)
    info = one_step(env, torch.tensor([[2.0], [0.5]]))["info"]  # env 0 ends after two
    assert info["count"].tolist() == [[2], [3]]
    assert info["asked"].tolist() == [[2], [0.5]]


def test_params_reach_the_optional_functions():
    weighing = variant(
        state_info=lambda state, params: {"weight": params["weight"]},
        transition_info=lambda *_, params: {"twice": 2 * params["weight"]},
        truncated=lambda state, rng, params: params["weight"] > 1,
    )
    env = FunctionalEnv(weighing, 2, params={"weight": torch.tensor([1.0, 2.0])})
    successor = one_step(env, ZEROS)
    assert successor["info", "weight"].tolist() == [[1], [2]]
    assert successor["info", "twice"].tolist() == [[2], [4]]
    assert successor["truncated"].tolist() == [[False], [True]]


# Truncation by a function.


def test_truncated_adds_to_the_limit_and_terminal():
    func_env = variant(truncated=lambda state, rng: state["position"][0] <= -2)
    env = FunctionalEnv(func_env, 3, max_episode_steps=3)
    actions = torch.tensor(
        [
            [-1.0],
            [0.0],
            [1.5],
        ]
    ).expand(4, 3, 1)
    out, _ = play(env, env.reset(seed=0), actions)
    successor = out["next"]
    terminated = [
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 0],
        [0, 0, 1],
    ]
    truncated = [
        [0, 0, 0],
        [1, 0, 0],
        [0, 1, 0],
        [1, 0, 0],
    ]
    assert successor["terminated"].squeeze(-1).int().tolist() == terminated
    assert successor["truncated"].squeeze(-1).int().tolist() == truncated
    new_episodes = successor["done"].squeeze(-1)
    assert equal(out["root", "observation"][new_episodes], torch.zeros(2))


@each_base
def test_each_env_is_truncated_at_its_own_limit(base):
    limits = [1, 2, 5, 2]
    func_env = variant(base, truncated=lambda state, rng, params: rng.draw >= params["limit"])
    env = FunctionalEnv(func_env, 4, params={"limit": torch.tensor(limits)})
    out, _ = play(env, env.reset(seed=0), torch.zeros(11, 4, 1))
    expected = [[step % limit == 0 for limit in limits] for step in range(1, 12)]
    assert out["next", "truncated"].squeeze(-1).tolist() == expected
    assert not out["next", "terminated"].any()
