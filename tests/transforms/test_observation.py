"""Observation transforms against Gymnasium's wrappers."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from oracles import RandomEnv, assert_agrees, make, quick, scripted

from torchwrap import transforms as T

VECTOR = spaces.Box(-2, 2, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 5, 3), np.uint8)
FREE = spaces.Box(-np.inf, np.inf, (2, 3), np.float32)
TREE = spaces.Dict(
    position=VECTOR,
    kind=spaces.Discrete(3, start=-1),
    pair=spaces.Tuple([IMAGE, spaces.MultiBinary(2)]),
)
GRID = spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[0, 1], [-2, 5]]))


def test_transform_observation_equals_gymnasiums():
    for space, func, numpy_func, new_space in (
        (VECTOR, lambda x: x / 2, lambda x: x / 2, None),
        (VECTOR, lambda x: x[..., :2], lambda x: x[..., :2], spaces.Box(-2, 2, (2,), np.float32)),
        (IMAGE, lambda x: x.flip(1), lambda x: x[::-1], None),
        (
            IMAGE,
            lambda x: x.double() / 255,
            lambda x: x.astype(np.float64) / 255,
            spaces.Box(0, 1, IMAGE.shape, np.float64),
        ),
        (spaces.Discrete(4), lambda x: 3 - x, lambda x: 3 - x, None),
        (TREE, lambda x: x["position"], lambda x: x["position"], VECTOR),
        (TREE, lambda x: x["pair", "0"], lambda x: x["pair"][0], IMAGE),
    ):
        oracles = [
            wrappers.TransformObservation(RandomEnv(space), numpy_func, new_space) for _ in range(2)
        ]
        assert_agrees(
            make(space, T.TransformObservation(func, new_space), num_envs=2), oracles, num_steps=12
        )


def test_transform_observation_func_receives_the_whole_batch():
    shapes = []
    make(VECTOR, T.TransformObservation(lambda x: shapes.append(x.shape) or x), num_envs=7).reset()
    assert set(shapes) == {(7, 3)}


@pytest.mark.parametrize(
    "bounds",
    quick(
        [(-1, 1), (-1.5, 0.5), (0, 0), (-np.inf, 1), (0, np.inf), (5, 6), (-1e6, 1e6)],
        (-1, 1),
        (0, np.inf),
    ),
)
def test_clip_observation_equals_numpys_clip_in_values_and_declared_bounds(bounds):
    for space in (
        VECTOR,
        FREE,
        spaces.Box(-2, 2, (), np.float64),
        spaces.Box(-2, 2, (3,), np.float16),
    ):
        clip = lambda x, dtype=space.dtype: np.clip(  # noqa: E731
            x, *(np.array(bound, dtype) for bound in bounds)
        )
        with np.errstate(over="ignore"):
            box = spaces.Box(clip(space.low), clip(space.high), space.shape, space.dtype)
            oracles = [wrappers.TransformObservation(RandomEnv(space), clip, box) for _ in range(3)]
            assert_agrees(make(space, T.ClipObservation(*bounds)), oracles)


def test_clip_observation_of_integers_keeps_the_dtype():
    for dtype, bounds in itertools.product(
        (np.uint8, np.int8, np.int16, np.int32, np.int64), ((3, 9), (3.0, 9.0))
    ):
        space, clipped = spaces.Box(0, 12, (4,), dtype), spaces.Box(3, 9, (4,), dtype)
        oracles = [
            wrappers.TransformObservation(RandomEnv(space), lambda x: np.clip(x, 3, 9), clipped)
            for _ in range(2)
        ]
        assert_agrees(make(space, T.ClipObservation(*bounds), num_envs=2), oracles, num_steps=12)


def test_clip_observation_bounds_outside_an_integer_dtype_are_rounded_inwards():
    for bounds, low, high in (
        ((-10, 10), 0, 10),
        ((9.5, np.inf), 10, 255),
        ((-np.inf, 1e9), 0, 255),
    ):
        env = make(IMAGE, T.ClipObservation(*bounds))
        assert (
            env.single_observation_space.low.min(),
            env.single_observation_space.high.max(),
        ) == (low, high)
        observation = env.reset()["observation"]
        assert (
            observation.dtype == torch.uint8
            and observation.min() >= low
            and observation.max() <= high
        ), bounds


FLAT = [
    VECTOR,
    IMAGE,
    FREE,
    spaces.Box(np.float32([-1, 0]), np.float32([1, 5])),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Box(0, 9, (), np.int64),
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.Discrete(1),
    spaces.MultiDiscrete([2, 5, 3]),
    spaces.MultiDiscrete([2, 5, 3], start=[1, -4, 7]),
    GRID,
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    TREE,
    spaces.Dict(time=spaces.Box(0, 1, (), np.float32), goal=VECTOR),
    spaces.Dict(b=spaces.Discrete(2), a=spaces.Dict(d=GRID, c=FREE)),
    spaces.Tuple([spaces.Discrete(3), VECTOR]),
    spaces.Tuple(
        [
            spaces.Tuple([IMAGE, spaces.MultiBinary(3)]),
            spaces.Dict(x=spaces.Box(-9, 9, (2,), np.int32)),
        ]
    ),
    spaces.Tuple([IMAGE, spaces.Box(-1, 1, (2,), np.float64)]),
]


def test_flatten_observation_equals_gymnasiums_in_values_dtype_and_space():
    for space in FLAT:
        oracles = [wrappers.FlattenObservation(RandomEnv(space)) for _ in range(2)]
        assert_agrees(make(space, T.FlattenObservation(), num_envs=2), oracles, num_steps=8)


def assert_equals(space, transform, wrapper, *arguments):
    env, oracles = (
        make(space, transform(*arguments), num_envs=2),
        [wrapper(RandomEnv(space), *arguments) for _ in range(2)],
    )
    assert_agrees(env, oracles, num_steps=12)


def test_noise_has_the_moments_and_bounds_of_its_distribution_and_none_in_eval_if_asked():
    scale = np.array([0.0, 1.0, 3.0])
    for distribution, deviation in (("normal", 1.0), ("uniform", 3**-0.5)):
        silence, noisy = (
            T.TransformObservation(torch.zeros_like),
            T.AddNoise(scale, distribution, in_eval=False),
        )
        env = scripted(silence, noisy, num_envs=20_000, observation_shape=(3,))
        noise = env.reset(seed=0)["observation"]
        bounded = (noise.abs().amax(0).numpy() <= scale).tolist()
        assert bounded == [True, distribution == "uniform", distribution == "uniform"]
        assert noise.mean(0).numpy() == pytest.approx(np.zeros(3), abs=0.1)
        assert noise.std(0).numpy() == pytest.approx(scale * deviation, abs=0.1)
        assert np.corrcoef(noise.numpy().T[1:])[0, 1] == pytest.approx(0, abs=0.05)
        env.eval()
        assert (env.reset(seed=0)["observation"] == 0).all()


def test_dtype_observation_equals_gymnasiums():
    numbers = (
        spaces.Box(0, 9, (2, 3), np.float32),
        IMAGE,
        spaces.Discrete(4, start=2),
        spaces.MultiBinary(3),
    )
    for dtype, space in itertools.product(
        (np.float32, np.float64, "int64", np.dtype(np.uint8)), numbers
    ):
        with np.errstate(over="ignore"):
            assert_equals(space, T.DtypeObservation, wrappers.DtypeObservation, dtype)
    assert_equals(
        spaces.MultiDiscrete([2, 5], start=[1, 7]),
        T.DtypeObservation,
        wrappers.DtypeObservation,
        np.int32,
    )


def test_dtype_observation_that_raises_does_not_change_the_envs_space():
    for low, dtype in itertools.product((-np.inf, 0), ("int8", torch.int64)):
        space = spaces.Box(low, np.inf, (3,))
        with pytest.raises(TypeError, match=r"but got .*: it has infinite bounds"):
            make(space, T.DtypeObservation(dtype))
        assert (space.low == low).all() and (space.high == np.inf).all(), (low, dtype)


def test_dtype_observation_bounds_are_rounded_without_a_warning():
    space = spaces.Box(np.array([-0.1, -np.inf]), np.array([0.1, np.inf]), dtype=np.float64)
    env = scripted(T.DtypeObservation("float32"), observation_space=space)
    assert env.single_observation_space.high.tolist() == [float(np.float32(0.1)), np.inf]
    with pytest.raises(TypeError, match="DtypeObservation needs a space whose values fit float32"):
        make(spaces.Box(-1e300, 1e300, (2,), np.float64), T.DtypeObservation("float32"))


def test_dtype_observation_accepts_dtypes_and_their_names():
    for dtype in (bool, int, float, np.int16, np.dtype("f2"), "uint8", "f", torch.float64):
        expected = (
            torch.empty(0, dtype=dtype).numpy().dtype
            if isinstance(dtype, torch.dtype)
            else np.dtype(dtype)
        )
        assert (
            make(spaces.MultiBinary(2), T.DtypeObservation(dtype)).single_observation_space.dtype
            == expected
        ), dtype
    assert (
        make(IMAGE, T.DtypeObservation(torch.float16)).reset()["observation"].dtype == torch.float16
    )


def test_filter_observation_equals_gymnasiums():
    triple = spaces.Tuple([VECTOR, spaces.Discrete(3), IMAGE])
    for keys in (["kind"], ["pair", "kind"], ("position", "kind", "pair"), [1], [2, 0], (0, 1, 2)):
        assert_equals(
            TREE if isinstance(keys[0], str) else triple,
            T.FilterObservation,
            wrappers.FilterObservation,
            keys,
        )


def test_reshape_observation_equals_gymnasiums():
    for shape in ((60,), (5, 12), (1, 60, 1)):
        assert_equals(IMAGE, T.ReshapeObservation, wrappers.ReshapeObservation, shape)


INF = np.inf
BOX = spaces.Box(-2, 7, (3,), np.float32)
RESCALED = [
    (BOX, -1.0, 1.0),
    (BOX, np.float32([-1, 0, 5]), np.float32([0, 1, 1000])),
    (spaces.Box(np.float32([-2, 0.1, 5]), np.float32([2, 0.5, 1000])), 0.0, 1.0),
    (spaces.Box(0, 255, (2, 2), np.float64), 0.0, 1.0),
    (spaces.Box(np.float32([0.1, -1e-3, -0.7, 3]), np.float32([0.7, 1e3, 1e-5, 3.1])), -0.3, 0.9),
    (spaces.Box(-1, 1, (), np.float32), 0.0, 3.0),
    (
        spaces.Box(np.float32([-INF, 0, -1]), np.float32([1, INF, 1])),
        np.float32([-INF, 3, 0]),
        np.float32([5, INF, 1]),
    ),
    (spaces.Box(-INF, INF, (2,), np.float32), -INF, INF),
]


@pytest.mark.filterwarnings(
    "ignore:.*precision lowered by casting"
)  # Gymnasium's, of bounds that it rounds to the dtype
def test_rescale_observation_equals_gymnasiums():
    for space, low, high in RESCALED:
        oracles = [wrappers.RescaleObservation(RandomEnv(space), low, high) for _ in range(3)]
        assert_agrees(make(space, T.RescaleObservation(low, high)), oracles)
