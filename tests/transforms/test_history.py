"""FrameStackObservation and DelayObservation against Gymnasium's wrappers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from helpers import assert_same, buffers
from oracles import RandomEnv, assert_agrees, make, quick, scripted, step
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

FREE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 5, 3), np.uint8)
ABOVE_ZERO = spaces.Box(np.float32([2, -9]), np.float32([5, -7]))
GRID = spaces.MultiDiscrete([3, 4], start=[1, -2])
PAIR = spaces.Tuple([ABOVE_ZERO, spaces.Discrete(3, start=1)])
TREE = spaces.Dict(image=IMAGE, grid=GRID, pair=PAIR)
MEMBER = {"image": np.full((4, 5, 3), 7, np.uint8), "grid": np.array([2, 0]), "pair": (np.float32([3, -8]), np.int64(2))}


def advance(env, td, num_steps=1):
    successor, td = step(env, td, num_steps)
    return successor["observation"], td


def stacked(padding_type="reset", **arguments):
    return scripted(T.FrameStackObservation(3, padding_type=padding_type), observation_shape=(1,), **arguments)


CASES = [
    (FREE, "reset"),
    (FREE, "zero"),
    (FREE, np.float32([1, -1, 5])),
    (IMAGE, "reset"),
    (IMAGE, "zero"),
    (IMAGE, np.full((4, 5, 3), 255, np.uint8)),
    (ABOVE_ZERO, "reset"),
    (ABOVE_ZERO, "zero"),
    (ABOVE_ZERO, np.float32([3, -8])),
    (spaces.Box(-1, 1, (), np.float64), "zero"),
    (spaces.Box(-1, 1, (2, 2), np.float16), "zero"),
    (spaces.Discrete(4), "reset"),
    (spaces.Discrete(4, start=-2), "zero"),
    (spaces.Discrete(4, start=-2), -1),
    (GRID, "zero"),
    (GRID, np.array([3, 1])),
    (spaces.MultiBinary(3), "reset"),
    (spaces.MultiBinary([2, 3]), "zero"),
    (PAIR, "reset"),
    (TREE, "reset"),
    (TREE, "zero"),
    (TREE, MEMBER),
]


@pytest.mark.parametrize(("space", "padding_type"), CASES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stack_size", quick([1, 3], 3))
def test_frame_stack_equals_gymnasiums_in_every_frame_and_in_its_space(space, padding_type, stack_size):
    oracles = [wrappers.FrameStackObservation(RandomEnv(space), stack_size, padding_type=padding_type) for _ in range(3)]
    flags = assert_agrees(make(space, T.FrameStackObservation(stack_size, padding_type=padding_type)), oracles)
    assert flags.any(1).sum() > 10


@pytest.mark.parametrize("space", [FREE, IMAGE], ids=str)
def test_frame_stack_with_zeros_equals_stable_baselines_vec_frame_stack(space):
    env = make(space, T.FrameStackObservation(4, padding_type="zero"))
    vec = VecFrameStack(DummyVecEnv([lambda: RandomEnv(space)] * 3), 4, channels_order="last")
    vec.seed(3)
    last = lambda frames: frames.movedim(1, -2).flatten(-2).numpy()  # noqa: E731
    td = env.reset(seed=3)
    np.testing.assert_array_equal(last(td["observation"]), vec.reset())
    for _ in range(20):
        successor, td = advance(env, td)
        observation, _, done, infos = vec.step(np.zeros(3, np.int64))
        np.testing.assert_array_equal(last(td["observation"]), observation)
        for row in np.flatnonzero(done):
            np.testing.assert_array_equal(last(successor)[row], infos[row]["terminal_observation"])


def test_frame_stack_of_a_new_episode_holds_copies_of_its_initial_observation():
    env = stacked(num_envs=2, episode_lengths=(2, 9))
    _, td = advance(env, env.reset(), 2)
    assert td["observation"][..., 0].tolist() == [[0, 0, 0], [1000, 1001, 1002]]


def test_frame_stack_of_a_final_observation_holds_frames_of_its_own_episode():
    env = stacked(num_envs=1, episode_lengths=4)
    final, td = advance(env, env.reset(), 4)
    assert final[..., 0].tolist() == [[2, 3, 4]]
    assert td["observation"][..., 0].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
@pytest.mark.parametrize(("padding_type", "pad"), [("reset", 0), ("zero", 0), (np.float32([7]), 7)])
def test_frame_stack_one_step_episodes_are_padded_each(ending, padding_type, pad):
    env = stacked(padding_type, num_envs=2, episode_lengths=1, ending=ending)
    td = env.reset()
    for _ in range(3):
        final, td = advance(env, td)
        assert final[0, :, 0].tolist() == [pad, 0, 1]
        assert td["observation"][0, :, 0].tolist() == [pad, pad, 0]


def test_frame_stack_of_a_long_episode_holds_the_latest_frames():
    env = stacked(num_envs=2, episode_lengths=None)
    successor, td = advance(env, env.reset(), 50)
    assert successor[..., 0].tolist() == [[48, 49, 50], [1048, 1049, 1050]]
    assert torch.equal(td["observation"], successor)


def test_frame_stack_all_envs_finishing_at_once_are_all_reset():
    env = stacked(num_envs=3, episode_lengths=2, ending="truncated")
    final, td = advance(env, env.reset(), 2)
    assert final[..., 0].tolist() == [[0, 1, 2], [1000, 1001, 1002], [2000, 2001, 2002]]
    assert td["observation"][..., 0].tolist() == [[0, 0, 0], [1000, 1000, 1000], [2000, 2000, 2000]]


@pytest.mark.parametrize("padding_type", ["reset", "zero", np.float32([7])])
def test_frame_stack_masked_reset_keeps_the_other_rows(padding_type):
    env = stacked(padding_type, num_envs=3, episode_lengths=None)
    advance(env, env.reset(), 2)
    initial = TensorDict({"observation": torch.full((3, 1), -5.0)}, [3])
    env.transforms[0].reset(initial, tw.RowMask(torch.tensor([False, True, False])))
    following = env.transforms[0].step(TensorDict({"observation": torch.full((3, 1), -6.0)}, [3]))["observation"][..., 0]
    assert following[[0, 2]].tolist() == [[1, 2, -6], [2001, 2002, -6]]
    assert following[1, 1:].tolist() == [-5, -6]


def test_frame_stack_reset_with_an_empty_mask_changes_nothing():
    env = stacked(num_envs=2, episode_lengths=None)
    advance(env, env.reset(), 2)
    before = buffers(env.transforms[0])
    initial = TensorDict({"observation": torch.full((2, 1), -5.0)}, [2])
    env.transforms[0].reset(initial, tw.RowMask(torch.zeros(2, dtype=torch.bool)))
    assert_same(buffers(env.transforms[0]), before)


def test_frame_stack_reset_by_the_caller_in_mid_episode_equals_an_auto_reset():
    env = stacked(num_envs=2, episode_lengths=None)
    advance(env, env.reset(), 2)
    td = env.reset(mask=torch.tensor([True, False]))
    assert td["observation"][..., 0].tolist() == [[0, 0, 0], [1000, 1001, 1002]]


def test_frame_stack_returned_stacks_are_not_changed_by_later_steps():
    env = stacked(num_envs=1, episode_lengths=None)
    td = env.reset()
    given = td["observation"]
    successor, td = advance(env, td, 1)
    copies = given.clone(), successor.clone()
    advance(env, td, 3)
    assert torch.equal(given, copies[0])
    assert torch.equal(successor, copies[1])


def test_frame_stack_a_stack_modified_by_the_caller_does_not_change_later_ones():
    env = stacked(num_envs=1, episode_lengths=None)
    successor, td = advance(env, env.reset(), 1)
    successor.fill_(-1)
    td["observation"].fill_(-1)
    assert advance(env, td)[0][..., 0].tolist() == [[0, 1, 2]]


def test_frame_stack_padding_modified_by_the_caller_does_not_change_the_stacks():
    padding = np.float32([7])
    env = stacked(padding, num_envs=1)
    padding[:] = 9
    assert env.reset()["observation"][..., 0].tolist() == [[7, 7, 0]]


def test_frame_stack_state_dict_is_empty():
    env = stacked(num_envs=2)
    advance(env, env.reset(), 3)
    assert env.state_dict() == {}


def test_frame_stack_of_a_frame_stack_equals_gymnasiums():
    env = make(FREE, T.FrameStackObservation(2), T.FrameStackObservation(3))
    wrap = wrappers.FrameStackObservation
    assert_agrees(env, [wrap(wrap(RandomEnv(FREE), 2), 3) for _ in range(3)], num_steps=12)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"stack_size": 0}, ValueError, "FrameStackObservation needs stack_size of at least 1, but got 0"),
        ({"stack_size": -1}, ValueError, "FrameStackObservation needs stack_size of at least 1, but got -1"),
        ({"stack_size": 2.0}, TypeError, "FrameStackObservation needs an integer stack_size .* but got 2.0"),
        ({"stack_size": True}, ValueError, "FrameStackObservation needs stack_size of at least 1, but got True"),
        ({"stack_size": None}, TypeError, "FrameStackObservation needs an integer stack_size .* but got None"),
        ({"stack_size": "4"}, TypeError, "FrameStackObservation needs an integer stack_size .* but got '4'"),
        ({"stack_size": 4, "padding_type": "rest"}, ValueError, "FrameStackObservation needs padding_type .* but got 'rest'"),
        ({"stack_size": 4, "padding_type": ""}, ValueError, "FrameStackObservation needs padding_type .* but got ''"),
    ],
)
def test_frame_stack_wrong_arguments_raise(arguments, error, match):
    with pytest.raises(error, match=match):
        T.FrameStackObservation(**arguments)


def test_frame_stack_stack_size_as_a_numpy_integer_is_accepted():
    assert make(FREE, T.FrameStackObservation(np.int64(2))).single_observation_space.shape == (2, 3)


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")  # Gymnasium's, from Box.contains
@pytest.mark.parametrize(
    ("space", "padding_type", "member"),
    [
        (PAIR, [np.float32([3, -8]), 2], (np.float32([3, -8]), np.int64(2))),
        (FREE, torch.tensor([1.0, 2.0, 3.0]), np.float32([1, 2, 3])),
        (FREE, [1, 2, 3], np.float32([1, 2, 3])),
    ],
)
def test_frame_stack_padding_in_other_forms_gives_the_same_stacks(space, padding_type, member):
    one, other = (make(space, T.FrameStackObservation(2, padding_type=padding)) for padding in (padding_type, member))
    values, others = one.reset(seed=0)["observation"], other.reset(seed=0)["observation"]
    assert bool((values == others).all())


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")  # Gymnasium's, from Box.contains
@pytest.mark.parametrize(
    ("space", "padding_type", "error", "match"),
    [
        (spaces.Dict(a=FREE), {"b": np.zeros(3, np.float32)}, ValueError, "needs a padding_type in Dict.* but got {'b'"),
        (ABOVE_ZERO, np.float32([0, 0]), ValueError, r"FrameStackObservation needs a padding_type in Box.* but got array"),
        (FREE, np.float32([1]), ValueError, r"FrameStackObservation needs a padding_type in Box.* but got array\(\[1"),
        (FREE, None, ValueError, "FrameStackObservation needs a padding_type in Box.* but got None"),
        (FREE, 3, ValueError, "FrameStackObservation needs a padding_type in Box.* but got 3"),
        (spaces.Discrete(3), 3, ValueError, r"FrameStackObservation needs a padding_type in Discrete\(3\), but got 3"),
        (spaces.Discrete(3), None, ValueError, r"FrameStackObservation needs a padding_type in .* but got None"),
    ],
)
def test_frame_stack_padding_outside_the_space_raises(space, padding_type, error, match):
    with pytest.raises(error, match=match):
        scripted(T.FrameStackObservation(2, padding_type=padding_type), observation_space=space)


@pytest.mark.parametrize("delay", quick([0, 1, 2, 3, 7], 2))
@pytest.mark.parametrize(
    "space", [FREE, IMAGE, ABOVE_ZERO, spaces.Discrete(4, start=-2), GRID, PAIR, TREE], ids=lambda s: str(s)[:30]
)
def test_delay_observation_equals_gymnasiums(space, delay):
    oracles = [wrappers.DelayObservation(RandomEnv(space), delay) for _ in range(3)]
    assert_agrees(make(space, T.DelayObservation(delay)), oracles, num_steps=40)


def test_delay_observation_of_long_episodes_equals_hand_computed_values():
    env = scripted(T.DelayObservation(2), num_envs=2, observation_shape=(1,), episode_lengths=(4, 3))
    td, rows = env.reset(), []
    for _ in range(6):
        successor, td = advance(env, td)
        rows.append((successor.flatten().tolist(), td["observation"].flatten().tolist()))
    assert [first for (first, _), _ in rows] == [0, 0, 1, 2, 0, 0]
    assert [second for (_, second), _ in rows] == [0, 1000, 1001, 0, 1000, 1001]
    assert [second for _, (_, second) in rows] == [0, 1000, 0, 0, 1000, 1001]


@pytest.mark.parametrize(("delay", "error"), [(-1, ValueError), (1.5, TypeError), (None, TypeError), (True, ValueError)])
def test_delay_observation_wrong_delay_raises(delay, error):
    with pytest.raises(error, match="DelayObservation needs"):
        T.DelayObservation(delay)


def test_frame_stack_a_step_writes_one_frame_and_moves_no_others():
    env = stacked(num_envs=2, episode_lengths=None)
    frames = env.transforms[0].histories[0].frames
    _, td = advance(env, env.reset(), 2)
    for _ in range(4):
        before = frames.clone()
        _, td = advance(env, td)
        assert (frames != before).flatten(2).any(2).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("padding_type", ["reset", "zero"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_frame_stack_reset_at_any_position_of_the_ring_gives_the_same_stacks(padding_type, steps):
    env = stacked(padding_type, num_envs=2, episode_lengths=None)
    td = env.reset() if steps == 0 else advance(env, env.reset(), steps)[1]
    td = env.reset(mask=torch.tensor([True, False]))
    stacks = [td["observation"][0, :, 0].tolist()]
    for _ in range(3):
        successor, td = advance(env, td)
        stacks.append(successor[0, :, 0].tolist())
    assert stacks == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]
