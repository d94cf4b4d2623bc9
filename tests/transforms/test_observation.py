"""Observation transforms against Gymnasium's wrappers."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from helpers import mostly_full
from numpy.testing import assert_allclose
from oracles import RandomEnv, assert_agrees, assert_equals_wrapper, make, scripted

import torchwrap as tw
from torchwrap import transforms as T

INF = np.inf
VECTOR = Box(-2, 2, (3,))
IMAGE = Box(
    0,
    255,
    (4, 5, 3),
    np.uint8,
)
FREE = Box(-INF, INF, (2, 3))
GRID = MultiDiscrete(
    np.array([[2, 3], [4, 2]]),
    start=np.array([[0, 1], [-2, 5]]),
)
TREE = Dict(
    position=VECTOR,
    kind=Discrete(3, start=-1),
    pair=Tuple([IMAGE, MultiBinary(2)]),
)
TRIPLE = Tuple([VECTOR, Discrete(3), IMAGE])


# A space, functions of tensors and of arrays, and the new space.
FUNCTIONS = {
    "same space": (VECTOR, lambda x: x / 2, lambda x: x / 2, None),
    "part": (VECTOR, lambda x: x[..., :2], lambda x: x[..., :2], Box(-2, 2, (2,))),
    "image": (IMAGE, lambda x: x.flip(1), lambda x: x[::-1], None),
    "dtype": (IMAGE, torch.Tensor.double, np.float64, Box(0, 255, IMAGE.shape, np.float64)),
    "discrete": (Discrete(4), lambda x: 3 - x, lambda x: 3 - x, None),
    "key": (TREE, lambda x: x["position"], lambda x: x["position"], VECTOR),
    "path": (TREE, lambda x: x["pair", "0"], lambda x: x["pair"][0], IMAGE),
}


def assert_equals_function(space, transform, func, above):
    oracles = [wrappers.TransformObservation(RandomEnv(space), func, above) for _ in range(2)]
    assert_agrees(
        make(space, transform, num_envs=2),
        oracles,
        num_steps=12,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transform_observation_equals_gymnasiums(name):
    space, func, numpy_func, above = FUNCTIONS[name]
    assert_equals_function(space, T.TransformObservation(func, above), numpy_func, above)


BOUNDS = [(-1.5, 0.5), (0, 0), (-INF, 1), (5, 6), (-1e6, 1e6)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "space", [VECTOR, FREE, Box(-2, 2, (), np.float64), Box(-2, 2, (3,), np.float16)], ids=str
)
def test_clip_observation_equals_numpys_clip(space, bounds):
    with np.errstate(over="ignore"):
        low, high = np.array(bounds).astype(space.dtype)
        clipped = space.low.clip(low, high), space.high.clip(low, high)
        above = Box(*clipped, space.shape, space.dtype)
        transform = T.ClipObservation(*bounds)
        assert_equals_function(
            space,
            transform,
            lambda x: np.clip(x, low, high),
            above,
        )


@pytest.mark.parametrize(
    "dtype",
    [np.uint8, np.int8, np.int16, np.int32, np.int64],
)
def test_clip_observation_of_integers_keeps_the_dtype(dtype):
    space = Box(0, 12, (4,), dtype)
    above = Box(3, 9, (4,), dtype)
    assert_equals_function(
        space,
        T.ClipObservation(3, 9.0),
        lambda x: x.clip(3, 9),
        above,
    )


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [((-10, 10), 0, 10), ((9.5, INF), 10, 255), ((-INF, 1e9), 0, 255)],
    ids=str,
)
def test_clip_observation_bounds_outside_an_integer_dtype_are_rounded_inwards(bounds, low, high):
    env = make(IMAGE, T.ClipObservation(*bounds))
    observation = env.reset()["observation"]
    assert env.single_observation_space == Box(low, high, IMAGE.shape, np.uint8)
    assert observation.dtype == torch.uint8
    assert low <= observation.min() <= observation.max() <= high


FLAT = [
    VECTOR,
    IMAGE,
    Box(-1, 1, ()),
    Box(0, 9, (), np.int64),
    Discrete(4, start=-2),
    MultiDiscrete([2, 5, 3], start=[1, -4, 7]),
    GRID,
    MultiBinary([2, 3]),
    TREE,
    Dict(b=Discrete(2), a=Dict(d=GRID, c=FREE)),
    Tuple([Tuple([IMAGE, MultiBinary(3)]), Dict(x=Box(-9, 9, (2,), np.int32))]),
    Tuple([IMAGE, Box(-1, 1, (2,), np.float64)]),
]


INF_PAIR = np.float32([-INF, 3, 0]), np.float32([5, INF, 1])
UNEVEN = Box(
    np.float32([0.1, -1e-3, -0.7, 3]),
    np.float32([0.7, 1e3, 1e-5, 3.1]),
)
ONE_SIDED = Box(
    np.float32([-INF, 0, -1]),
    np.float32([1, INF, 1]),
)
CASES = [
    *[("FlattenObservation", space) for space in FLAT],
    *[("DtypeObservation", IMAGE, dtype) for dtype in (np.float32, "int64", np.dtype("f8"))],
    ("DtypeObservation", Box(0, 9, (2, 3)), np.uint8),
    ("DtypeObservation", Discrete(4, start=2), np.float64),
    ("DtypeObservation", MultiBinary(3), np.float32),
    ("DtypeObservation", MultiDiscrete([2, 5], start=[1, 7]), np.int32),
    *[("FilterObservation", TREE, keys) for keys in (["kind"], ["pair", "kind"], tuple(TREE))],
    *[("FilterObservation", TRIPLE, keys) for keys in ([1], [2, 0], (0, 1, 2))],
    *[("ReshapeObservation", IMAGE, shape) for shape in ((60,), (5, 12), (1, 60, 1))],
    ("RescaleObservation", VECTOR, -1.0, 1.0),
    ("RescaleObservation", VECTOR, np.float32([-1, 0, 5]), np.float32([0, 1, 1000])),
    ("RescaleObservation", Box(0, 255, (2, 2), np.float64), 0.0, 1.0),
    ("RescaleObservation", UNEVEN, -0.3, 0.9),
    ("RescaleObservation", Box(-1, 1, ()), 0.0, 3.0),
    ("RescaleObservation", ONE_SIDED, *INF_PAIR),
    ("RescaleObservation", FREE, -INF, INF),
]


# Gymnasium warns about bounds that it rounds to the dtype.
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_transform_equals_gymnasiums_in_values_dtype_and_space(case):
    name, space, *arguments = case
    with np.errstate(over="ignore"):
        assert_equals_wrapper(space, name, *arguments)


@pytest.mark.newest
@pytest.mark.parametrize("dtype", mostly_full([np.float16, np.float32, np.float64], np.float16))
def test_rescaled_bounds_are_the_new_bounds_also_when_deployed(dtype):
    bounds = np.sort(np.random.default_rng(0).uniform(0.1, 3, (2, 99)).astype(dtype), 0)
    env = scripted(
        T.RescaleObservation(-1, 1),
        num_envs=1,
        observation_space=Box(*bounds, dtype=dtype),
        action_space=Box(-9, 9, (99,), dtype),
    )
    deployed = tw.deploy(env, lambda td: td["observation"])
    for function in (env.transforms[0].observation, deployed):
        assert function(torch.from_numpy(bounds)).abs().max() == 1


def noise(distribution, in_eval=True, training=True):
    silence = T.TransformObservation(torch.zeros_like)
    noisy = T.AddNoise(
        [0.0, 1.0, 3.0],
        distribution,
        in_eval=in_eval,
    )
    env = scripted(
        silence,
        noisy,
        num_envs=20_000,
        observation_shape=(3,),
    )
    return env.train(training).reset(seed=0)["observation"].numpy()


@pytest.mark.parametrize(
    ("distribution", "deviation"),
    [("normal", 1), ("uniform", 3**-0.5)],
)
def test_add_noise_has_the_moments_of_its_distribution(distribution, deviation):
    drawn = noise(distribution)
    assert_allclose(drawn.mean(0), 0, atol=0.1)
    assert_allclose(
        drawn.std(0),
        np.array([0, 1, 3]) * deviation,
        atol=0.1,
    )
    assert np.corrcoef(drawn[:, 1], drawn[:, 2])[0, 1] == pytest.approx(0, abs=0.05)


LENGTHS = {"staggered": (5, 1, 3), "together": 4, "one step": 1}
each_length = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
each_period = pytest.mark.parametrize("period", [None, 1, 2])


@each_length
@each_period
def test_noise_changes_with_commands_of_the_same_period(period, lengths):
    env = scripted(
        T.TransformObservation(torch.zeros_like),
        T.AddNoise(1.0, period=period),
        T.CommandObservation([-1], [1], period, flatten=False),
        observation_space=Box(-1, 1, (2,)),
        episode_lengths=lengths,
    )
    td = env.reset(seed=0)
    seen = [td["observation"]]
    for _ in range(12):
        transition, td = env.step(td.set("action", env.sample_action()))
        seen += [transition["next", "observation"], td["observation"]]
    for before, after in pairwise(seen):
        is_new = after["command"] != before["command"]
        assert ((after["obs"] != before["obs"]) == is_new).all()


def test_add_noise_in_eval_mode_is_zero_if_asked():
    assert (noise("normal", in_eval=False, training=False) == 0).all()
    assert (noise("normal", training=False)[:, 1] != 0).any()


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda flatten: T.CommandObservation(-1, 1, None, flatten=flatten, key="obs"),
        lambda flatten: T.LastActionObservation(flatten, key="obs"),
    ],
    ids=["command", "last action"],
)
def test_key_of_the_observation_itself_raises(make, flatten):
    with pytest.raises(ValueError, match="key"):
        scripted(make(flatten))


def test_command_whose_info_a_layer_below_has_set_raises():
    env = scripted(T.CommandObservation(-1, 1, None), T.CommandObservation(-2, 2, None))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="CommandObservation: key"):
        env.step(env.sample_action())


@each_length
@each_period
def test_command_is_drawn_every_period_steps_and_the_info_has_the_one_before(period, lengths):
    low, high = [-3, 10], [-1, 20]
    env = scripted(T.CommandObservation(low, high, period, flatten=False), episode_lengths=lengths)
    td = env.reset(seed=0)
    elapsed = np.zeros(3, int)
    drawn = {tuple(command) for command in td["observation", "command"].tolist()}
    count = 3
    for _ in range(12):
        before = td["observation", "command"].numpy()
        transition, td = env.step(td.set("action", env.sample_action()))
        elapsed += 1
        assert_allclose(transition["next", "info", "command"], before, atol=0)
        after = transition["next", "observation", "command"].numpy()
        done = transition["next", "done"][:, 0].numpy()
        changes = elapsed % (period or 99) == 0
        assert ((after != before).all(1) == changes).all()
        initial = td["observation", "command"].numpy()
        assert ((initial != after).all(1) == done).all()
        assert (initial >= low).all() and (initial <= high).all()
        drawn |= {tuple(command) for command in [*after.tolist(), *initial.tolist()]}
        count += changes.sum() + done.sum()
        elapsed *= ~done
    assert len(drawn) == count
