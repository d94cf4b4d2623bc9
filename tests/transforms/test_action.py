"""Action transforms against Gymnasium's wrappers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import RandomEnv, quick, scripted
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T

# Gymnasium warns about the bounds it rounds to the space's dtype.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")

PER_DIMENSION = spaces.Box(np.float32([-2, 0, 5]), np.float32([2, 0.5, 1000]))
STEERING = spaces.Box(np.float32([-1, 0, 0]), np.float32([1, 1, 1]))  # CarRacing's
ONE_SIDED = spaces.Box(np.float32([-np.inf, 0, -1]), np.float32([1, np.inf, 1]))


def single(action_space):
    # One env of Gymnasium with this action space.
    return RandomEnv(spaces.Discrete(1), action_space=action_space)


def acting(action_space, *transforms, num_envs=2):
    return scripted(*transforms, num_envs=num_envs, observation_shape=(1,), action_space=action_space)


def arrived(env, action):
    # The action that reaches the inner env.
    transition, _ = env.step(env.reset().set("action", torch.as_tensor(action)))
    return transition["next", "info", "action"].numpy()


def random_actions(space, num_envs=16):
    rows = np.random.default_rng(0).normal(0, 3, (num_envs, *space.shape))
    return rows.astype(space.dtype)


BOXES = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(-2, 7, (2, 2), np.float32),
    spaces.Box(0, 1, (1,), np.float64),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Box(-1, 1, (2,), np.float16),
    PER_DIMENSION,
]


@pytest.mark.parametrize("flip", [1, -1], ids=["low varies", "high varies"])
def test_clip_action_with_one_uniform_bound_equals_numpys_clip(flip):
    low, high = sorted([STEERING.low * flip, STEERING.high * flip], key=np.sum)
    env, actions = acting(spaces.Box(low, high), T.ClipAction(), num_envs=16), random_actions(STEERING)
    np.testing.assert_array_equal(arrived(env, actions), np.clip(actions, low, high))


def test_clip_action_set_up_again_for_another_space_clips_to_its_bounds():
    transform = T.ClipAction()
    for space in (STEERING, spaces.Box(-1, 1, (3,)), STEERING, spaces.Box(0, 1, (0, 2)), spaces.Box(0, 1, ())):
        with pytest.raises(ValueError, match="a user's error"):
            acting(space, transform, T.TransformAction(fail))
        action = torch.full((2, *space.shape), 9.0)
        assert torch.equal(transform.action(action), torch.from_numpy(space.high).expand_as(action))


def fail(action):
    raise ValueError("a user's error")


@pytest.mark.parametrize("space", [*BOXES, ONE_SIDED, STEERING, spaces.Box(-np.inf, np.inf, (2,))], ids=str)
def test_clip_action_equals_gymnasiums_in_values_and_space(space):
    env, oracle = acting(space, T.ClipAction(), num_envs=16), wrappers.ClipAction(single(space))
    actions = random_actions(space)
    assert env.single_action_space == oracle.action_space
    ours = arrived(env, actions)
    assert ours.dtype == space.dtype
    np.testing.assert_array_equal(ours, np.stack([oracle.action(action) for action in actions]))


@pytest.mark.parametrize("space", BOXES, ids=str)
@pytest.mark.parametrize("bounds", [(-1, 1), (-1.0, 0.5), (0, 3), (np.float64(-1), np.float64(2)), (100, 101)])
def test_rescale_action_equals_gymnasiums_in_values_and_space(space, bounds):
    env, oracle = acting(space, T.RescaleAction(*bounds), num_envs=16), wrappers.RescaleAction(single(space), *bounds)
    actions = random_actions(space)
    assert env.single_action_space == oracle.action_space
    ours, theirs = arrived(env, actions), np.stack([oracle.action(action) for action in actions])
    assert ours.dtype == space.dtype
    rounding = 4 * np.finfo(space.dtype).eps * (1 + np.abs(theirs).max() + np.max(np.abs(bounds)) * np.ptp(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=rounding)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), shape=st.sampled_from([(1,), (4,), (2, 3)]))
def test_rescale_action_of_random_boxes_with_bounds_per_dimension_equals_gymnasiums(seed, shape):
    rng = np.random.default_rng(seed)
    low, agent_low = rng.uniform(-9, 9, (2, *shape))
    box = spaces.Box(low.astype(np.float32), (low + rng.uniform(0.1, 20, shape)).astype(np.float32))
    agent_high = agent_low + rng.uniform(0.1, 20, shape)
    env = acting(box, T.RescaleAction(agent_low, agent_high), num_envs=5)
    oracle = wrappers.RescaleAction(single(box), agent_low, agent_high)
    actions = rng.uniform(agent_low, agent_high, (5, *shape)).astype(np.float32)
    assert env.single_action_space == oracle.action_space
    expected = np.stack([oracle.action(action) for action in actions])
    np.testing.assert_allclose(arrived(env, actions), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("space", BOXES, ids=str)
def test_rescale_action_maps_bounds_to_bounds_and_the_middle_to_the_middle(space):
    env = acting(space, T.RescaleAction(-3, 5), num_envs=3)
    actions = np.stack([np.full(space.shape, value, space.dtype) for value in (-3, 1, 5)])
    middle = (space.low.astype(np.float64) + space.high) / 2
    tolerance = 1e-2 if space.dtype == np.float16 else 1e-5
    np.testing.assert_allclose(
        arrived(env, actions), np.stack([space.low, middle, space.high]), rtol=tolerance, atol=tolerance
    )


def test_rescale_action_does_not_clip():
    env = acting(spaces.Box(-2, 2, (1,)), T.RescaleAction(-1, 1), num_envs=1)
    np.testing.assert_allclose(arrived(env, [[3.0]]), [[6]])


def test_clip_action_over_rescale_action_clips_to_the_agents_bounds_as_gymnasiums():
    space = spaces.Box(0, 10, (1,))
    env = acting(space, T.RescaleAction(-1, 1), T.ClipAction(), num_envs=3)
    oracle = wrappers.ClipAction(wrappers.RescaleAction(single(space), -1, 1))
    actions = np.float32([[-3], [0.5], [3]])
    np.testing.assert_allclose(arrived(env, actions), [oracle.env.action(oracle.action(a)) for a in actions])


@pytest.mark.parametrize("transform", [T.ClipAction, lambda: T.RescaleAction(-3, 3)])
def test_action_transforms_do_not_change_the_agents_action(transform):
    env = acting(spaces.Box(-1, 1, (2,)), transform())
    action = torch.tensor([[-2.5, 0.5], [0.0, 3.0]])
    transition, _ = env.step(env.reset().set("action", action))
    assert transition["action"].tolist() == action.tolist() == [[-2.5, 0.5], [0, 3]]


@pytest.mark.parametrize("transform", [T.ClipAction, lambda: T.RescaleAction(-3, 3)])
def test_action_transforms_do_not_change_the_envs_space(transform):
    space = spaces.Box(-1, 1, (2,))
    env = acting(space, transform())
    arrived(env, np.float32([[9, 9], [9, 9]]))
    assert env.env.single_action_space == spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize("transform", [T.ClipAction, lambda: T.RescaleAction(-3, 3)])
def test_action_transforms_do_not_change_observations_rewards_and_flags(transform):
    space = spaces.Box(-1, 1, (2,))
    ours, _ = tw.rollout(acting(space, transform()), None, 7)
    plain, _ = tw.rollout(acting(space), None, 7)
    for key in ("observation", "reward", "terminated", "truncated"):
        assert torch.equal(ours["next", key], plain["next", key])


@pytest.mark.parametrize("batch", [(), (4,), (2, 5)])
def test_action_transforms_standalone_take_any_batch_size_and_keep_their_input(batch):
    transform = T.ClipAction()
    acting(spaces.Box(-1, 1, (3,)), transform)
    td = TensorDict({"action": torch.full((*batch, 3), 5.0)}, batch)
    assert torch.equal(transform(td)["action"], torch.ones(*batch, 3))
    assert torch.equal(td["action"], torch.full((*batch, 3), 5.0))


def test_action_transforms_state_dict_is_empty():
    assert acting(spaces.Box(-1, 1, (2,)), T.RescaleAction(-3, 3), T.ClipAction()).state_dict() == {}


@pytest.mark.parametrize(
    ("bounds", "error", "match"),
    [
        ((1, -1), ValueError, "RescaleAction needs finite min_action < max_action, but got 1 and -1"),
        ((1, 1), ValueError, "RescaleAction needs finite min_action < max_action, but got 1 and 1"),
        ((-np.inf, 1), ValueError, "RescaleAction needs finite .* but got -inf and 1"),
        ((0, np.inf), ValueError, "RescaleAction needs finite .* but got 0 and inf"),
        ((float("nan"), 1), ValueError, "RescaleAction needs finite .* but got nan and 1"),
        ((None, 1), (TypeError, ValueError), "RescaleAction needs .* but got None and 1"),
        (("a", 1), (TypeError, ValueError), "RescaleAction needs .* but got '?a"),
        ((np.array([0, 2]), np.array([1, 1])), ValueError, "RescaleAction needs finite min_action < max_action"),
        ((np.zeros(2), np.ones(3)), ValueError, "RescaleAction needs "),
    ],
)
def test_rescale_action_wrong_arguments_raise(bounds, error, match):
    with pytest.raises(error, match=match):
        T.RescaleAction(*bounds)


@pytest.mark.parametrize(
    ("space", "transform", "error", "match"),
    [
        (spaces.Discrete(3), T.ClipAction(), TypeError, r"ClipAction needs a Box action space .* but got Discrete\(3\)"),
        (spaces.MultiBinary(3), T.ClipAction(), TypeError, "ClipAction needs a Box action space .* but got MultiBinary"),
        (spaces.Dict(a=PER_DIMENSION), T.ClipAction(), TypeError, "ClipAction needs a Box action space .* but got Dict"),
        (spaces.Discrete(3), T.RescaleAction(-1, 1), TypeError, "RescaleAction needs a Box action space .* but got Discrete"),
        (spaces.Tuple([PER_DIMENSION]), T.RescaleAction(-1, 1), TypeError, "RescaleAction needs a Box .* but got Tuple"),
        (spaces.Box(0, 9, (1,), np.int32), T.RescaleAction(-1, 1), TypeError, "RescaleAction needs .* floats, but got Box"),
        (ONE_SIDED, T.RescaleAction(-1, 1), ValueError, "RescaleAction needs .* finite bounds, low < high, but got .*inf"),
        (PER_DIMENSION, T.RescaleAction(np.zeros(2), 1), ValueError, r"RescaleAction needs .* \(3,\), but got \(2,\)"),
        (PER_DIMENSION, T.RescaleAction(np.zeros((2, 3)), 1), ValueError, r"RescaleAction needs .* but got \(2, 3\)"),
        (spaces.Box(np.float32([0, 1]), np.float32([1, 1])), T.RescaleAction(-1, 1), ValueError, "RescaleAction needs .* Box"),
    ],
)
def test_action_transforms_wrong_spaces_raise(space, transform, error, match):
    with pytest.raises(error, match=match):
        acting(space, transform)


@pytest.mark.parametrize("shape", [(3,), (2, 2), ()])
def test_clip_action_of_a_wrong_shape_raises_before_anything_changed(shape):
    env = acting(spaces.Box(-1, 1, (2,)), T.ClipAction())
    td = env.reset()
    with pytest.raises((TypeError, ValueError), match=r"ScriptedEnv|TransformedEnv"):
        env.step(td.set("action", torch.zeros(2, *shape)))
    assert env.unwrapped.elapsed.tolist() == [0, 0]


def test_transform_action_equals_gymnasiums():
    space, wider = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-9, 9, (3,), np.float32)
    env = acting(space, T.TransformAction(lambda action: action / 9, wider), num_envs=16)
    oracle = wrappers.TransformAction(single(space), lambda action: action / 9, wider)
    assert env.single_action_space == oracle.action_space
    actions = random_actions(wider)
    np.testing.assert_array_equal(arrived(env, actions), np.stack([oracle.action(action) for action in actions]))


def test_transform_action_maps_discrete_to_continuous_actions():
    moves = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    env = acting(spaces.Box(-1, 1, (2,)), T.TransformAction(lambda action: moves[action], spaces.Discrete(4)), num_envs=3)
    assert arrived(env, torch.tensor([3, 0, 2])).tolist() == [[0, -1], [1, 0], [-1, 0]]


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: T.TransformAction(3), TypeError, "TransformAction needs a callable func, but got 3"),
        (lambda: T.TransformAction(abs, 3), TypeError, "TransformAction needs a gymnasium Space as action_space, but got 3"),
        (
            lambda: acting(spaces.Box(-1, 1, (2,)), T.TransformAction(lambda action: action[:, :1])),
            ValueError,
            r"TransformAction needs func to return actions of shape \(2, 2\)",
        ),
        (
            lambda: acting(spaces.Box(-1, 1, (2,)), T.TransformAction(lambda action: action.double())),
            TypeError,
            "TransformAction needs func to return actions of dtype torch.float32",
        ),
    ],
)
def test_transform_action_wrong_arguments_and_functions_raise(build, error, match):
    with pytest.raises(error, match=match):
        build()


# StickyAction


class Recording(T.StickyAction):
    def action(self, action):
        key = self.stream.key()
        count = self.longest - self.shortest + 1
        self.drawn = random.uniform(key), random.integers(key.fold_in(1), count) + self.shortest
        return super().action(action)


class Replayed:
    # A NumPy generator for Gymnasium that returns the numbers that our transform has drawn.
    def uniform(self):
        return self.drawn[0]

    def integers(self, low, high):
        assert low <= self.drawn[1] < high
        return self.drawn[1]


@pytest.mark.parametrize("duration", quick([1, 3, (1, 4), (2, 2)], 1, (1, 4)))
@pytest.mark.parametrize("probability", quick([0, 0.25, 0.9], 0.25))
@pytest.mark.parametrize("lengths", [(1,), (7, 3, 1), None])
def test_sticky_action_equals_gymnasiums_for_the_same_draws(probability, duration, lengths):
    sticky = Recording(probability, duration)
    env = scripted(sticky, num_envs=5, action_space=spaces.Discrete(1000), episode_lengths=lengths)
    oracles = [wrappers.StickyAction(single(spaces.Discrete(1000)), probability, duration) for _ in range(5)]
    for oracle in oracles:
        oracle.unwrapped._np_random = Replayed()
    td, repeated = env.reset(seed=0), 0
    for _ in range(40):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        for row, oracle in enumerate(oracles):
            oracle.unwrapped._np_random.drawn = [numbers[row].item() for numbers in sticky.drawn]
            expected = oracle.action(action[row].item())
            assert transition["next", "info", "action"][row] == expected
            repeated += expected != action[row].item()
            if transition["next", "done"][row]:
                oracle.last_action, oracle.is_sticky_actions, oracle.num_repeats, oracle.repeats_taken = None, False, 0, 0
    assert (repeated > 0) == (probability > 0 and lengths != (1,))


def test_sticky_action_of_a_dict_repeats_all_parts_together():
    space = spaces.Dict(a=spaces.Discrete(1000), b=spaces.Tuple([spaces.Box(-1, 1, (2,))]))
    env = scripted(T.StickyAction(0.5), num_envs=50, action_space=space, episode_lengths=None)
    td = env.reset(seed=0)
    before = env.sample_action()
    _, td = env.step(td.set("action", before.clone()))
    chosen = env.sample_action()
    given = env.step(td.set("action", chosen.clone()))[0]["next", "info", "action"]
    stuck = given["a"] == before["a"]
    assert 10 < stuck.sum() < 40 and (given["a"] == torch.where(stuck, before["a"], chosen["a"])).all()
    assert (given["b", "0"] == torch.where(stuck.unsqueeze(1), before["b", "0"], chosen["b", "0"])).all()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((1,), ValueError, r"StickyAction needs repeat_action_probability in \[0, 1\), but got 1"),
        ((-0.1,), ValueError, r"StickyAction needs repeat_action_probability in \[0, 1\), but got -0.1"),
        (("0.5",), TypeError, "repeat_action_probability in .*, but got '0.5'"),
        ((0.5, 0), ValueError, "repeat_action_duration of at least 1, but got 0"),
        ((0.5, 1.5), TypeError, "integer repeat_action_duration of at least 1, but got 1.5"),
        ((0.5, (3, 2)), ValueError, "repeat_action_duration of at least 3, but got 2"),
        ((0.5, (1, 2, 3)), ValueError, r"repeat_action_duration as one number or two, but got \(1, 2, 3\)"),
    ],
)
def test_sticky_action_wrong_arguments_raise(arguments, error, match):
    with pytest.raises(error, match=match):
        T.StickyAction(*arguments)
