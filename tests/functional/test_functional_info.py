"""Optional functions (`transition_info`, `state_info`, `truncated`), and limits that differ between envs."""

import numpy as np
import pytest
import torch
from func_envs import BroadcastWalk, Walk, equal, odd, play, some_actions
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from helpers import assert_no_overlap

from torchwrap import FunctionalEnv, random
from torchwrap.wrappers import RepeatAction


class Telling(Walk):
    """Says where it is (a vector), and how far it came in this step (a scalar)."""

    def transition_info(self, state, action, next_state, params=None):
        return {"moved": next_state["position"][0] - state["position"][0], "asked": action}

    def state_info(self, state, params=None):
        return {"count": state["count"], "position": state["position"]}


class BroadcastTelling(BroadcastWalk):
    def transition_info(self, state, action, next_state, params=None):
        return {"moved": (next_state["position"] - state["position"])[:, 0], "asked": action}

    state_info = Telling.state_info


class ScalarTelling(FuncEnv):
    """Scalar fields, several of which are told as they are. It ends at 3, and is truncated below -1."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-9, 9, (1,), np.float32)
    broadcasts = True

    def initial(self, rng, params=None):
        draw = random.uniform(rng)
        return {"x": 0 * draw, "luck": draw}

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] + action.squeeze(-1), "luck": state["luck"]}

    def observation(self, state, rng, params=None):
        return torch.stack([state["x"] + state["luck"]], -1)

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["x"] - state["x"]

    def terminal(self, state, rng, params=None):
        return state["x"] >= 3

    def truncated(self, state, rng, params=None):
        return state["x"] < -1

    def transition_info(self, state, action, next_state, params=None):
        return {"from": state["x"], "reward": torch.stack([state["x"], next_state["x"]], -1)}

    def state_info(self, state, params=None):
        return {"luck": state["luck"], "twice": state["luck"], "far": state["x"] > 1}


all_telling = pytest.mark.parametrize(
    "func_env", [Telling(), BroadcastTelling()], ids=["vmap", "broadcast"]
)


# Info.


@all_telling
def test_info_matches_values_computed_by_hand(func_env):
    env = FunctionalEnv(func_env, 2)
    td = env.reset(seed=0)
    expected = [  # moved, count, position of the next state; env 0 ends with its second step
        ([[2.0], [0.5]], [[1], [1]], [[2.0, 0.0], [0.5, 0.0]]),
        ([[1.0], [0.5]], [[2], [2]], [[3.0, 2.0], [1.0, 0.5]]),
        ([[-1.0], [1.0]], [[1], [3]], [[-1.0, 0.0], [2.0, 1.0]]),
    ]
    for moved, count, position in expected:
        transition, td = env.step(td.set("action", torch.tensor(moved)))
        info = transition["next", "info"]
        assert info["moved"].tolist() == info["asked"].tolist() == moved
        assert info["count"].tolist() == count and info["count"].dtype == torch.int64
        assert info["position"].tolist() == position
        assert sorted(info.keys()) == ["asked", "count", "moved", "position"]
        assert set(td.keys()) == {"observation"}


def test_info_that_no_class_overrides_is_left_out():
    for func_env in (Walk(), odd(state_info=lambda state: {})):
        env = FunctionalEnv(func_env, 2)
        transition, _ = env.step(env.reset().set("action", torch.zeros(2, 1)))
        assert set(transition["next"].keys()) == {
            "observation",
            "reward",
            "terminated",
            "truncated",
            "done",
        }


def test_info_belongs_to_the_caller():
    for func_env in (Telling(), BroadcastTelling(), ScalarTelling()):
        env, other = FunctionalEnv(func_env, 3), FunctionalEnv(func_env, 3)
        td, other_td = env.reset(seed=0), other.reset(seed=0)
        for action in some_actions(env, 5):
            transition, td = env.step(td.set("action", action))
            erased, other_td = other.step(other_td.set("action", action.clone()))
            assert equal(transition["next"].clone(), erased["next"])
            assert_no_overlap(erased["next", "info"], erased["next"].exclude("info"))


def test_entries_of_one_tensor_do_not_share_memory():
    def state_info(state):
        double = state["count"] + state["count"]
        return {"one": double, "other": double}

    for base in (Walk, BroadcastWalk):
        env = FunctionalEnv(odd(base, state_info=state_info), 2)
        assert_no_overlap(env.step(env.reset().set("action", torch.zeros(2, 1)))[0]["next"])


@all_telling
def test_info_of_a_repeated_action_is_that_of_the_last_step_taken_or_a_declared_sum(func_env):
    env = RepeatAction(FunctionalEnv(func_env, 2), 3, summed_info=["asked", "position"])
    transition, _ = env.step(
        env.reset(seed=0).set("action", torch.tensor([[2.0], [0.5]]))
    )  # env 0 ends after two
    info = transition["next", "info"]
    assert info["count"].tolist() == [[2], [3]]
    assert info["asked"].tolist() == [[4], [1.5]] and info["position"].tolist() == [
        [6, 2],
        [3, 1.5],
    ]


def test_params_reach_the_optional_functions():
    weighing = odd(
        state_info=lambda state, params: {"weight": params["weight"]},
        transition_info=lambda state, action, next_state, params: {
            "twice": params["weight"] + params["weight"]
        },
        truncated=lambda state, rng, params: params["weight"] > 1,
    )
    env = FunctionalEnv(weighing, 2, params={"weight": torch.tensor([1.0, 2.0])})
    transition, _ = env.step(env.reset().set("action", torch.zeros(2, 1)))
    following = transition["next"]
    assert following["info", "weight"].tolist() == [[1], [2]] and following[
        "info", "twice"
    ].tolist() == [[2], [4]]
    assert following["truncated"].tolist() == [[False], [True]]


# Truncation by a function.


def test_truncated_counts_besides_the_limit_and_terminal():
    env = FunctionalEnv(
        odd(truncated=lambda state, rng: state["position"][0] <= -2), 3, max_episode_steps=3
    )
    td = env.reset(seed=0)
    expected = [  # terminated and truncated of each env, which go by -1, 0 and 1.5
        ([False, False, False], [False, False, False]),
        ([False, False, True], [True, False, False]),
        ([False, False, False], [False, True, False]),
        ([False, False, True], [True, False, False]),
    ]
    for terminated, truncated in expected:
        transition, td = env.step(td.set("action", torch.tensor([[-1.0], [0.0], [1.5]])))
        assert transition["next", "terminated"].flatten().tolist() == terminated
        assert transition["next", "truncated"].flatten().tolist() == truncated
        ended = torch.tensor(terminated) | torch.tensor(truncated)
        assert (td["observation"][ended] == 0).all()  # new episodes


# Limits that differ between envs.


@pytest.mark.parametrize("base", [Walk, BroadcastWalk])
def test_each_env_is_truncated_at_a_limit_of_its_own(base):
    kind = odd(base, truncated=lambda state, rng, params: rng.draw >= params["limit"])
    env = FunctionalEnv(kind, 4, params={"limit": torch.tensor([1, 2, 5, 2])})
    out, _ = play(env, env.reset(seed=0), torch.zeros(11, 4, 1))
    assert out[:, 0]["truncated"].squeeze(-1).tolist() == [
        [step % n == 0 for n in (1, 2, 5, 2)] for step in range(1, 12)
    ]
    assert not out[:, 0]["terminated"].any()
