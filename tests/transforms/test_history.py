"""Stacks and delays against Gymnasium's wrappers, and against values computed by hand."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.testing import assert_allclose, assert_array_equal
from oracles import RandomEnv, assert_equals_wrapper, make, scripted, step
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from torchwrap import transforms as T
from torchwrap.spaces import contains

FREE = Box(
    -np.inf,
    np.inf,
    (3,),
)
IMAGE = Box(
    0,
    255,
    (4, 5, 3),
    np.uint8,
)
ABOVE_ZERO = Box(
    np.float32([2, -9]),
    np.float32([5, -7]),
)
COUNT = Discrete(4, start=-2)
GRID = MultiDiscrete(
    [3, 4],
    start=[1, -2],
)
PAIR = Tuple([ABOVE_ZERO, Discrete(3, start=1)])
TREE = Dict(image=IMAGE, grid=GRID, pair=PAIR)
PAIR_MEMBER = (np.float32([3, -8]), np.int64(2))
MEMBER = {"image": np.full((4, 5, 3), 7, np.uint8), "grid": np.array([2, 0]), "pair": PAIR_MEMBER}
STACKS = [
    (FREE, "reset"),
    (FREE, "zero"),
    (FREE, np.float32([1, -1, 5])),
    (IMAGE, np.full((4, 5, 3), 255, np.uint8)),
    (ABOVE_ZERO, "zero"),
    (Box(-1, 1, (), np.float64), "zero"),
    (Box(-1, 1, (2, 2), np.float16), "zero"),
    (COUNT, "reset"),
    (COUNT, -1),
    (GRID, np.array([3, 1])),
    (MultiBinary([2, 3]), "zero"),
    (TREE, "reset"),
    (TREE, "zero"),
    (TREE, MEMBER),
]
ENDINGS = ["terminated", "truncated", "both"]
PADDINGS = [("reset", 0), ("zero", 0), (np.float32([7]), 7)]


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize(
    ("space", "padding"),
    STACKS,
    ids=str,
)
def test_frame_stack_equals_gymnasiums_in_every_frame_and_space(space, padding, stack_size):
    assert_equals_wrapper(space, "FrameStackObservation", stack_size, padding_type=padding)


def test_frame_stack_along_an_axis_equals_stable_baselines_vec_frame_stack():
    env = make(
        IMAGE,
        T.FrameStackObservation(4, padding_type="zero", axis=-1),
    )
    vec = VecFrameStack(
        DummyVecEnv([lambda: RandomEnv(IMAGE)] * 3),
        4,
        channels_order="last",
    )
    vec.seed(3)
    td = env.reset(seed=3)
    assert_array_equal(td["observation"], vec.reset())
    for _ in range(20):
        successor, td = step(env, td)
        observation, _, done, infos = vec.step(np.zeros(3, np.int64))
        assert_array_equal(td["observation"], observation)
        for row in np.flatnonzero(done):
            final = infos[row]["terminal_observation"]
            assert_array_equal(successor["observation"][row], final)


@pytest.mark.parametrize("delay", [0, 2, 7])
@pytest.mark.parametrize(
    "space",
    [FREE, IMAGE, ABOVE_ZERO, COUNT, GRID, TREE],
    ids=str,
)
def test_delay_observation_equals_gymnasiums(space, delay):
    assert_equals_wrapper(space, "DelayObservation", delay, num_steps=20)


@pytest.mark.parametrize(
    ("padding", "pad"),
    PADDINGS[::2],
    ids=str,
)
def test_delay_drawn_for_each_episode_covers_its_range_and_shifts_observations(padding, pad):
    delay = T.DelayObservation((1, 3), padding_type=padding)
    env = scripted(
        delay,
        num_envs=50,
        observation_shape=(1,),
        episode_lengths=6,
    )
    td = env.reset(seed=0)
    drawn = []
    for _ in range(4):
        observations = [td["observation"][:, 0]]
        for _ in range(6):
            successor, td = step(env, td)
            observations.append(successor["observation"][:, 0])
        shifted = torch.stack(observations, 1) % 1000  # the step, in any env
        delays = 6 - shifted[:, -1].long()
        steps = torch.arange(7) - delays.unsqueeze(1)
        assert torch.equal(shifted, torch.where(steps < 0, pad, steps).float())
        drawn.append(delays)
    assert torch.cat(drawn).unique().tolist() == [1, 2, 3]
    assert not torch.equal(drawn[0], drawn[1])


def test_tensor_of_delays_is_copied():
    delay = torch.tensor([1, 2])
    transform = T.DelayObservation(delay)
    delay.fill_(0)
    assert transform.delay.tolist() == [1, 2]


def test_delay_action_equals_values_by_hand_at_the_ends_of_episodes():
    delay = T.DelayAction(2, padding_type=9)
    env = scripted(
        delay,
        num_envs=2,
        action_space=Discrete(10),
        episode_lengths=(3, 4),
    )
    td = env.reset()
    received = []
    for number in range(6):
        transition, td = env.step(td.set("action", torch.full((2,), number)))
        received.append(transition["next", "info", "action"])
    received = torch.stack(received, 1).tolist()
    assert received == [[9, 9, 0, 9, 9, 3], [9, 9, 0, 1, 9, 9]]


# The last action, and filters of actions.

LENGTHS = {"staggered": (3, 1, 2), "all at once": 3, "of one step": 1}
lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def play(env, actions):
    """The initial root, and the successor and root of each step."""
    td = env.reset(seed=0)
    steps = []
    for action in actions:
        transition, root = env.step(td.set("action", torch.as_tensor(action)))
        steps.append((transition["next"], root))
        td = root.clone()
    return steps


def random_actions(num_steps, num_envs=3, size=2):
    return np.random.default_rng(0).normal(0, 1, (num_steps, num_envs, size)).astype(np.float32)


@lengths
@pytest.mark.parametrize("ending", ENDINGS)
def test_last_action_is_that_of_the_agent_and_the_padding_in_initial_observations(lengths, ending):
    env = scripted(
        T.ClipAction(),
        T.LastActionObservation(padding_type=np.float32([0.5, -0.5])),
        observation_shape=(3,),
        action_space=Box(-1, 1, (2,)),
        episode_lengths=lengths,
        ending=ending,
    )
    assert env.single_observation_space == Box(-np.inf, np.inf, (5,))
    assert_array_equal(env.reset()["observation"][:, 3:], [[0.5, -0.5]] * 3)
    actions = random_actions(12)
    assert abs(actions).max() > 1
    for action, (successor, root) in zip(actions, play(env, actions), strict=True):
        assert_array_equal(successor["observation"][:, 3:], action)
        initial = np.where(successor["done"], np.float32([0.5, -0.5]), action)
        assert_array_equal(root["observation"][:, 3:], initial)
        assert_array_equal(root["observation"][:, 0] % 1000 == 0, successor["done"][:, 0])


def test_last_discrete_action_is_one_hot_in_a_flat_observation():
    env = scripted(
        T.LastActionObservation(), observation_shape=(1,), action_space=Discrete(3, start=5)
    )
    [(successor, _)] = play(env, [[5, 6, 7]])
    assert successor["observation"][:, 1:].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("below", "key"),
    [(FREE, "last_action"), (Dict(a=FREE), "last_action"), (PAIR, "2")],
    ids=str,
)
def test_last_action_of_a_tree_is_an_entry_of_the_observation(below, key):
    env = scripted(
        T.LastActionObservation(False),
        observation_space=below,
        action_space=Dict(grid=GRID, pair=PAIR),
    )
    action = env.sample_action()
    transition, _ = env.step(env.reset().set("action", action))
    last = transition["next", "observation", key]
    assert (last == action).all()
    assert contains(env.single_observation_space, transition["next", "observation"])


def filtered(transform, lengths, actions):
    """The env's actions, and the flags `done`: `(num_steps, num_envs, ...)`."""
    env = scripted(transform, action_space=Box(-9, 9, (2,)), episode_lengths=lengths)
    steps = [successor for successor, _ in play(env, actions)]
    received = np.stack([step["info", "action"].numpy() for step in steps])
    return received, np.stack([step["done"][:, 0].numpy() for step in steps])


def episodes(done):
    """Slices of the steps of each whole episode, with its row."""
    for row, ends in enumerate(done.T):
        starts = [0, *(np.flatnonzero(ends) + 1)]
        for start, stop in zip(starts, [*starts[1:], len(ends)], strict=True):
            yield row, slice(start, stop)


@lengths
@pytest.mark.parametrize("padding", [0, 2])
def test_low_pass_action_equals_its_impulse_response_in_every_episode(padding, lengths):
    alpha = np.float64([0.25, 1])
    actions = random_actions(12)
    low_pass = T.LowPassAction(alpha, padding_type=np.float32([padding, padding]))
    received, done = filtered(low_pass, lengths, actions)
    for row, steps in episodes(done):
        inputs = actions[steps, row].astype(np.float64)
        for number in range(len(inputs)):
            ages = np.arange(number, -1, -1)[:, None]
            expected = (alpha * (1 - alpha) ** ages * inputs[: number + 1]).sum(0)
            expected += (1 - alpha) ** (number + 1) * padding
            assert_allclose(received[steps, row][number], expected, rtol=1e-5, atol=1e-6)


@lengths
def test_rate_limit_action_equals_numpys_in_every_episode(lengths):
    actions = random_actions(12)
    received, done = filtered(T.RateLimitAction([0.5, 0.1]), lengths, actions)
    for row, steps in episodes(done):
        last = np.zeros(2)
        for action, given in zip(actions[steps, row], received[steps, row], strict=True):
            last = last + np.clip(action.astype(np.float64) - last, [-0.5, -0.1], [0.5, 0.1])
            assert_allclose(given, last, atol=1e-6)
