import gymnasium
import numpy as np
import pytest
import torch
from func_envs import (
    BroadcastItself,
    BroadcastNested,
    BroadcastNoisy,
    BroadcastWalk,
    Itself,
    NestedTensorDict,
    Noisy,
    Walk,
    both_aliasing,
    both_walks,
    equal,
    play,
    some_actions,
)

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap import transforms as T
from torchwrap.envs.cartpole import CartPole


@both_walks
def test_episode_matches_values_computed_by_hand(func_env):
    env = FunctionalEnv(func_env, 2, max_episode_steps=3)
    td = env.reset(seed=0)
    assert td["observation"].tolist() == [
        [0, 0],
        [0, 0],
    ]
    # Env 0 is at 2, then at 3, where its episode ends; then a new episode starts.
    actions = torch.tensor(
        [
            [2, 0.5],
            [1, 0.5],
            [-1, 2],
            [4, 1],
        ]
    ).unsqueeze(-1)
    out, _ = play(env, td, actions)
    successor = out["next"]
    assert successor["observation"].tolist() == [
        [[20, 0], [5, 0]],
        [[30, 20], [10, 5]],
        [[-10, 0], [30, 10]],
        [[30, -10], [10, 0]],
    ]
    assert successor["reward"].squeeze(-1).tolist() == [
        [2, 0.5],
        [-1, 0],
        [-1, 1],
        [5, 1],
    ]
    assert successor["terminated"].squeeze(-1).int().tolist() == [
        [0, 0],
        [1, 0],
        [0, 1],
        [1, 0],
    ]
    assert successor["truncated"].squeeze(-1).int().tolist() == [
        [0, 0],
        [0, 0],
        [0, 1],
        [0, 0],
    ]
    assert equal(successor["done"], successor["terminated"] | successor["truncated"])
    assert out["root", "observation"].tolist() == [
        [[20, 0], [5, 0]],
        [[0, 0], [10, 5]],
        [[-10, 0], [0, 0]],
        [[0, 0], [10, 0]],
    ]


PAIRS = {
    "walk": (Walk, BroadcastWalk),
    "noisy": (Noisy, BroadcastNoisy),
    "nested": (NestedTensorDict, BroadcastNested),
    "itself": (Itself, BroadcastItself),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_vmap_and_broadcasting_are_bit_identical(pair):
    played = []
    for kind in pair:
        env = FunctionalEnv(kind(), 5, max_episode_steps=7)
        out, _ = play(env, env.reset(seed=4), some_actions(env, 30))
        played.append(out)
    first, second = played
    assert equal(first, second) and first["next", "done"].any()


@both_walks
def test_reset_options_are_passed_to_initial(func_env):
    env = FunctionalEnv(func_env, 2)
    assert env.reset(options={"start": 1.5})["observation"].tolist() == [[15, 15]] * 2
    td = env.reset(mask=torch.tensor([True, False]))
    assert td["observation"].tolist() == [
        [0, 0],
        [15, 15],
    ]


class RecordsRows(BroadcastWalk):
    def initial(self, rng, start=0.0):
        self.rows = rng.env.tolist()
        return super().initial(rng, start=start)


def test_initial_in_broadcasting_style_gets_only_the_reset_rows():
    func_env = RecordsRows()
    env = FunctionalEnv(func_env, 4)
    td = env.reset()
    assert func_env.rows == [0, 1, 2, 3]
    env.step(
        td.set(
            "action",
            torch.tensor(
                [
                    [0.0],
                    [3],
                    [0],
                    [3],
                ]
            ),
        )
    )
    assert func_env.rows == [1, 3]
    func_env.rows = None
    nothing = env.reset(mask=torch.zeros(4, dtype=torch.bool))
    assert equal(nothing, td.select("observation")) and func_env.rows is None
    mask = torch.tensor([False, False, True, False])
    td = env.reset(mask=mask, options={"start": 7.0})
    assert td["observation"].tolist() == [
        [0, 0],
        [0, 0],
        [70, 70],
        [0, 0],
    ]


@both_aliasing
def test_functions_may_return_fields_of_the_state(func_env):
    # The transition moves a field to another, and the reward is a field of the previous state.
    env = FunctionalEnv(func_env, 2)
    td = env.reset(seed=0)
    for now in (2, 4, 6):
        transition, td = env.step(td.set("action", torch.full((2, 1), 2.0)))
        successor = transition["next"]
        assert successor["observation"].tolist() == [[now - 2]] * 2
        assert successor["reward"].tolist() == [[now - 2]] * 2
        assert env.state["now"].tolist() == [now] * 2
        assert env.state["before"].tolist() == [now - 2] * 2


# Given states.

START = torch.tensor(
    [
        [0.5, 0, 2.3],
        [1, 0, 0],
        [0.1, 0, 0],
        [0, 0, 2],
    ]
)
GIVEN = dict(zip(CartPole.fields, START, strict=True))


def test_partial_reset_to_given_states_starts_new_episodes():
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 3),
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.FrameStackObservation(2),
    )
    env.reset(seed=0)
    for _ in range(4):
        env.step(torch.ones(3, dtype=torch.int64))
    counted = env.transforms[1].statistics.count.clone()
    rows = torch.tensor([True, False, True])
    stack = env.reset(mask=rows, options={"state": GIVEN})["observation"][rows]
    assert equal(stack[:, 0], stack[:, 1])
    assert equal(env.unwrapped.state["theta"][rows], GIVEN["theta"][rows])
    assert equal(env.transforms[1].statistics.count - counted, torch.tensor(2))
    assert env.elapsed_steps.tolist() == [0, 4, 0]


@pytest.mark.parametrize("row", [0, 2])
def test_episode_from_a_given_state_equals_gymnasiums(row):
    env = FunctionalEnv(CartPole(), 1, max_episode_steps=500)
    state = {name: value[row : row + 1] for name, value in GIVEN.items()}
    start = env.reset(options={"state": state})["observation"]
    assert equal(start[0], START[:, row])
    oracle = gymnasium.make("CartPole-v1").unwrapped
    oracle.reset()
    oracle.state = START[:, row].double().numpy()
    done = False
    number = 0
    while not done:
        action = number % 3 % 2
        observation, _, done, *_ = oracle.step(action)
        transition, _ = env.step(torch.tensor([action]))
        successor = transition["next"]
        np.testing.assert_allclose(successor["observation"][0], observation, atol=1e-4)
        assert successor["done"].item() == done
        number += 1


def test_reset_to_the_envs_own_state_keeps_values_written_to_it():
    env = FunctionalEnv(CartPole(), 3)
    env.reset(seed=0)
    env.state["theta"].fill_(0.05)
    td = env.reset(options={"state": env.state})
    assert td["observation"][:, 2].tolist() == [torch.tensor(0.05).item()] * 3


def test_states_in_part_are_completed_by_initial():
    env = FunctionalEnv(CartPole(), 2)
    drawn = env.reset(seed=3)["observation"]
    mixed = env.reset(seed=3, options={"state": {"x": torch.tensor([1.0, 2.0])}})["observation"]
    assert mixed[:, 0].tolist() == [1, 2]
    assert equal(mixed[:, 1:], drawn[:, 1:])
