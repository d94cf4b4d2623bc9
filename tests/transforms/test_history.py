"""FrameStackObservation and DelayObservation against Gymnasium's wrappers."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from oracles import RandomEnv, assert_agrees, make, quick, scripted, step
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from torchwrap import transforms as T

FREE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 5, 3), np.uint8)
ABOVE_ZERO = spaces.Box(np.float32([2, -9]), np.float32([5, -7]))
GRID = spaces.MultiDiscrete([3, 4], start=[1, -2])
PAIR = spaces.Tuple([ABOVE_ZERO, spaces.Discrete(3, start=1)])
TREE = spaces.Dict(image=IMAGE, grid=GRID, pair=PAIR)
MEMBER = {
    "image": np.full((4, 5, 3), 7, np.uint8),
    "grid": np.array([2, 0]),
    "pair": (np.float32([3, -8]), np.int64(2)),
}


def advance(env, td, num_steps=1):
    successor, td = step(env, td, num_steps)
    return successor["observation"], td


def stacked(padding_type="reset", **arguments):
    return scripted(
        T.FrameStackObservation(3, padding_type=padding_type), observation_shape=(1,), **arguments
    )


CASES = [  # spaces, and paddings of each
    (FREE, ("reset", "zero", np.float32([1, -1, 5]))),
    (IMAGE, ("reset", "zero", np.full((4, 5, 3), 255, np.uint8))),
    (ABOVE_ZERO, ("reset", "zero", np.float32([3, -8]))),
    (spaces.Box(-1, 1, (), np.float64), ("zero",)),
    (spaces.Box(-1, 1, (2, 2), np.float16), ("zero",)),
    (spaces.Discrete(4), ("reset",)),
    (spaces.Discrete(4, start=-2), ("zero", -1)),
    (GRID, ("zero", np.array([3, 1]))),
    (spaces.MultiBinary(3), ("reset",)),
    (spaces.MultiBinary([2, 3]), ("zero",)),
    (PAIR, ("reset",)),
    (TREE, ("reset", "zero", MEMBER)),
]


@pytest.mark.parametrize("stack_size", quick([1, 3], 3))
def test_frame_stack_equals_gymnasiums_in_every_frame_and_in_its_space(stack_size):
    wrap = wrappers.FrameStackObservation
    for space, padding_type in (
        (space, padding) for space, paddings in CASES for padding in paddings
    ):
        oracles = [wrap(RandomEnv(space), stack_size, padding_type=padding_type) for _ in range(2)]
        env = make(
            space, T.FrameStackObservation(stack_size, padding_type=padding_type), num_envs=2
        )
        assert_agrees(env, oracles, num_steps=12)


@pytest.mark.parametrize("space", quick([FREE, IMAGE], IMAGE), ids=str)
def test_frame_stack_with_zeros_equals_stable_baselines_vec_frame_stack(space):
    env = make(space, T.FrameStackObservation(4, padding_type="zero", axis=-1))
    vec = VecFrameStack(DummyVecEnv([lambda: RandomEnv(space)] * 3), 4, channels_order="last")
    vec.seed(3)
    td = env.reset(seed=3)
    np.testing.assert_array_equal(td["observation"], vec.reset())
    for _ in range(20):
        successor, td = advance(env, td)
        observation, _, done, infos = vec.step(np.zeros(3, np.int64))
        np.testing.assert_array_equal(td["observation"], observation)
        for row in np.flatnonzero(done):
            np.testing.assert_array_equal(successor[row], infos[row]["terminal_observation"])


def test_frame_stack_one_step_episodes_are_padded_each():
    paddings = ("reset", 0), ("zero", 0), (np.float32([7]), 7)
    for ending, (padding_type, pad) in itertools.product(
        ("terminated", "truncated", "both"), paddings
    ):
        env = stacked(padding_type, num_envs=2, episode_lengths=1, ending=ending)
        td = env.reset()
        for _ in range(3):
            final, td = advance(env, td)
            assert final[0, :, 0].tolist() == [pad, 0, 1], (ending, padding_type)
            assert td["observation"][0, :, 0].tolist() == [pad, pad, 0], (ending, padding_type)


def test_frame_stack_padding_modified_by_the_caller_does_not_change_the_stacks():
    padding = np.float32([7])
    env = stacked(padding, num_envs=1)
    padding[:] = 9
    assert env.reset()["observation"][..., 0].tolist() == [[7, 7, 0]]


@pytest.mark.filterwarnings(
    "ignore:.*Casting input x to numpy array"
)  # Gymnasium's, from Box.contains
def test_frame_stack_padding_in_other_forms_gives_the_same_stacks():
    for space, padding_type, member in (
        (PAIR, [np.float32([3, -8]), 2], (np.float32([3, -8]), np.int64(2))),
        (FREE, torch.tensor([1.0, 2.0, 3.0]), np.float32([1, 2, 3])),
        (FREE, [1, 2, 3], np.float32([1, 2, 3])),
    ):
        one, other = (
            make(space, T.FrameStackObservation(2, padding_type=padding))
            for padding in (padding_type, member)
        )
        values, others = one.reset(seed=0)["observation"], other.reset(seed=0)["observation"]
        assert bool((values == others).all()), (space, padding_type)


@pytest.mark.parametrize("delay", quick([0, 1, 2, 3, 7], 2))
def test_delay_observation_equals_gymnasiums(delay):
    for space in (FREE, IMAGE, ABOVE_ZERO, spaces.Discrete(4, start=-2), GRID, PAIR, TREE):
        oracles = [wrappers.DelayObservation(RandomEnv(space), delay) for _ in range(2)]
        assert_agrees(make(space, T.DelayObservation(delay), num_envs=2), oracles, num_steps=20)


def test_delay_of_each_env_equals_gymnasiums_with_that_delay():
    oracles = [wrappers.DelayObservation(RandomEnv(TREE), delay) for delay in (0, 3, 1)]
    assert_agrees(make(TREE, T.DelayObservation(torch.tensor([0, 3, 1]))), oracles, num_steps=20)


def test_delays_drawn_for_each_episode_cover_their_range_and_shift_its_values():
    for padding_type, pad in (("reset", 0), (np.float32([7]), 7)):
        transform = T.DelayObservation((1, 3), padding_type=padding_type)
        env = scripted(transform, num_envs=50, observation_shape=(1,), episode_lengths=6)
        td, seen = env.reset(seed=0), []
        for _ in range(4):
            values = [td["observation"][:, 0]]
            for _ in range(6):
                successor, td = advance(env, td)
                values.append(successor[:, 0])
            late = torch.stack(values, 1) % 1000
            delays = 6 - late[:, -1].long()
            hand = [[pad] * int(delay) + list(range(7 - int(delay))) for delay in delays]
            assert late.tolist() == [[float(value % 1000) for value in row] for row in hand]
            seen.append(delays)
        assert set(torch.cat(seen).tolist()) == {1, 2, 3} and not torch.equal(seen[0], seen[1])


def test_delayed_actions_equal_hand_computed_values_at_the_ends_of_episodes():
    env = scripted(
        T.DelayAction(2, padding_type=9),
        num_envs=2,
        action_space=spaces.Discrete(10),
        episode_lengths=(3, 4),
    )
    td, received = env.reset(), []
    for number in range(6):
        transition, td = env.step(td.set("action", torch.full((2,), number)))
        received.append(transition["next", "info", "action"].tolist())
    assert torch.tensor(received).T.tolist() == [[9, 9, 0, 9, 9, 3], [9, 9, 0, 1, 9, 9]]


def test_frame_stack_reset_by_the_caller_after_any_number_of_steps_gives_the_same_stacks():
    for padding_type, steps in itertools.product(("reset", "zero"), range(4)):
        env = stacked(padding_type, num_envs=2, episode_lengths=None)
        td = env.reset() if steps == 0 else advance(env, env.reset(), steps)[1]
        td = env.reset(mask=torch.tensor([True, False]))
        stacks = [td["observation"][0, :, 0].tolist()]
        for _ in range(3):
            successor, td = advance(env, td)
            stacks.append(successor[0, :, 0].tolist())
        assert stacks == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]], (padding_type, steps)
        assert env.state_dict() == {}
