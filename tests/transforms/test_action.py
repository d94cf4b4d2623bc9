"""Action transforms against Gymnasium's wrappers."""

import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.spaces import Box, Discrete
from numpy.testing import assert_allclose, assert_array_equal
from oracles import RandomEnv, quick, scripted

from torchwrap import random
from torchwrap import transforms as T

# Gymnasium warns about the bounds that it rounds to the space's dtype.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")

BOXES = [
    Box(-1, 1, (3,)),
    Box(-2, 7, (2, 2)),
    Box(0, 1, (1,), np.float64),
    Box(-1, 1, ()),
    Box(-1, 1, (2,), np.float16),
    Box(
        np.float32([-2, 0, 5]),
        np.float32([2, 0.5, 1000]),
    ),
]
STEERING = [  # one bound is the same in each dimension, and the other is not
    Box(
        np.float32([-1, 0, 0]),
        np.float32([1, 1, 1]),
    ),
    Box(
        np.float32([-1, -1, -1]),
        np.float32([1, 0, 0]),
    ),
]
ONE_SIDED = Box(
    np.float32([-np.inf, 0, -1]),
    np.float32([1, np.inf, 1]),
)


def single(action_space):
    """One env of Gymnasium with this action space."""
    return RandomEnv(Discrete(1), action_space=action_space)


def received(env, action):
    """The action that the inner env gets."""
    transition, _ = env.step(
        env.reset().set("action", torch.as_tensor(action)),
    )
    return transition["next", "info", "action"].numpy()


def play(space, transforms, oracle):
    """The actions of our stack and of Gymnasium's for random actions."""
    env = scripted(*transforms, num_envs=16, action_space=space)
    assert env.single_action_space == oracle.action_space
    shape = (16, *oracle.action_space.shape)
    actions = np.random.default_rng(0).normal(0, 3, shape).astype(space.dtype)
    ours = received(env, actions)
    assert ours.dtype == space.dtype
    return ours, np.stack([oracle.action(action) for action in actions])


@pytest.mark.parametrize(
    "space", [*BOXES, *STEERING, ONE_SIDED, Box(-np.inf, np.inf, (2,))], ids=str
)
def test_clip_action_equals_gymnasiums(space):
    ours, theirs = play(space, [T.ClipAction()], wrappers.ClipAction(single(space)))
    assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "bounds",
    [
        (-1, 1),
        (0, 3),
        (np.float64(-1), 0.5),
        (100, 101),
    ],
    ids=str,
)
@pytest.mark.parametrize("space", BOXES, ids=str)
def test_rescale_action_equals_gymnasiums(space, bounds):
    oracle = wrappers.RescaleAction(single(space), *bounds)
    ours, theirs = play(
        space,
        [T.RescaleAction(*bounds)],
        oracle,
    )
    largest = 1 + np.abs(theirs).max() + np.max(np.abs(bounds)) * np.ptp(theirs)
    rounding = 4 * np.finfo(space.dtype).eps * largest
    assert_allclose(ours, theirs, rtol=1e-6, atol=rounding)


def test_transform_action_maps_discrete_to_continuous_actions():
    moves = torch.cat([torch.eye(2), -torch.eye(2)])
    transform = T.TransformAction(
        lambda action: moves[action],
        Discrete(4),
    )
    env = scripted(
        transform,
        action_space=Box(-1, 1, (2,)),
    )
    assert received(env, torch.tensor([3, 0, 2])).tolist() == [
        [0, -1],
        [1, 0],
        [-1, 0],
    ]


class Recording(T.StickyAction):
    """Keeps the key of its last draws."""

    def action(self, action):
        key = self.stream.key()
        words = [word.clone() for word in key[:5]]
        copies = dict(zip(key._fields[:5], words, strict=True))
        self.key = key._replace(**copies)
        return super().action(action)

    @property
    def drawn(self):
        """The numbers of the last step."""
        duration = random.integers(self.key.fold_in(1), self.shortest, self.longest + 1)
        return torch.stack([random.uniform(self.key), duration], 1)


class Replayed:
    """A generator of Gymnasium's wrapper that returns the numbers that our transform has drawn."""

    def uniform(self):
        return self.drawn[0]

    def integers(self, low, high):
        assert low <= self.drawn[1] < high
        return int(self.drawn[1])


@pytest.mark.parametrize(
    "duration",
    [3, (1, 4)],
    ids=str,
)
@pytest.mark.parametrize("probability", quick([0, 0.25, 0.9], 0.25))
@pytest.mark.parametrize(
    "lengths",
    [(1,), (7, 3, 1), None],
    ids=str,
)
def test_sticky_action_equals_gymnasiums_for_the_same_draws(probability, duration, lengths):
    space = Discrete(1000)
    sticky = Recording(probability, duration)
    env = scripted(
        sticky,
        num_envs=5,
        action_space=space,
        episode_lengths=lengths,
    )
    oracles = []
    for _ in range(5):
        oracle = wrappers.StickyAction(single(space), probability, duration)
        oracle.unwrapped._np_random = Replayed()
        oracles.append(oracle)
    td = env.reset(seed=0)
    repeated = 0
    for _ in range(40):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        for row, oracle in enumerate(oracles):
            oracle.unwrapped._np_random.drawn = sticky.drawn[row].tolist()
            expected = oracle.action(action[row].item())
            assert transition["next", "info", "action"][row] == expected
            repeated += expected != action[row].item()
            if transition["next", "done"][row]:
                oracle.last_action = None
                oracle.is_sticky_actions = False
                oracle.num_repeats = 0
                oracle.repeats_taken = 0
    assert (repeated > 0) == (probability > 0 and lengths != (1,))


def test_affine_action_equals_numpys_beyond_the_bounds_below():
    space = Box(
        np.float32([-1, 0, 0]),
        np.float32([1, 1, 1]),
    )
    scale = [0.5, -2, 0]
    offset = [0.1, 0, 3]
    env = scripted(T.AffineAction(scale, offset), num_envs=4, action_space=space)
    assert env.single_action_space == Box(-np.inf, np.inf, (3,))
    actions = np.random.default_rng(0).normal(0, 5, (4, 3)).astype(np.float32)
    expected = np.float64(scale) * actions + offset
    assert_allclose(received(env, actions), expected, rtol=1e-6, atol=1e-6)


KEEP_INSIDE = {
    "RescaleAction": lambda: T.RescaleAction(-1, 1),
    "LowPassAction": lambda: T.LowPassAction([0.1, 0.3, 0.75, 1]),
    "RateLimitAction": lambda: T.RateLimitAction([0.1, 0.3, 1, 9]),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("make", KEEP_INSIDE.values(), ids=KEEP_INSIDE)
def test_actions_inside_of_their_space_reach_the_env_inside_of_its_own(make, dtype):
    rng = np.random.default_rng(0)
    for _ in range(15):
        bounds = rng.uniform(-3, 3, (2, 4)).astype(dtype)
        low, high = np.sort(bounds, 0)
        env = scripted(make(), num_envs=2, action_space=Box(low, high, dtype=dtype))
        above = env.single_action_space
        env.reset()
        for weight in rng.choice([0, 0.3, 1], (5, 2, 4)):
            action = torch.from_numpy((above.low + weight * (above.high - above.low)).astype(dtype))
            action = action.clamp(*map(torch.from_numpy, (above.low, above.high)))
            found = env.step(action)[0]["next", "info", "action"].numpy()
            assert all(map(env.unwrapped.single_action_space.contains, found))


@pytest.mark.parametrize(
    ("space", "bins", "centers"),
    [
        (Box(3e4, 6e4, (), np.float16), 2, [37504, 52480]),
        (
            Box(2**60 + 1, 2**60 + 100, (), np.int64),
            1,
            [2**60 + 1],
        ),
    ],
    ids=str,
)
def test_centers_of_bins_are_inside_of_a_wide_or_narrow_box(space, bins, centers):
    env = scripted(T.DiscretizeAction(bins), num_envs=bins, action_space=space)
    assert received(env, np.arange(bins)).tolist() == centers


def test_low_pass_action_of_weight_1_is_the_identity():
    env = scripted(
        T.LowPassAction(1),
        num_envs=1,
        action_space=Box(-1e9, 1e9, (1,)),
    )
    env.reset()
    actions = torch.tensor([1e8, 1, 0.3])
    for action in actions.view(3, 1, 1):
        assert env.step(action)[0]["next", "info", "action"] == action


COEFFICIENTS = {
    "scale": lambda values: T.AffineAction(values),
    "offset": lambda values: T.AffineAction(1, values),
    "alpha": lambda values: T.LowPassAction(values),
    "max_change": lambda values: T.RateLimitAction(values),
}


@pytest.mark.parametrize("argument", COEFFICIENTS)
def test_argument_of_another_shape_is_refused_by_name(argument):
    transform = COEFFICIENTS[argument]([0.1, 0.2])
    with pytest.raises(ValueError, match=rf"{argument} .*\(3,\)"):
        scripted(transform, action_space=Box(-1, 1, (3,)))
