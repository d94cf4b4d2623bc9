"""Observation transforms against Gymnasium's wrappers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from oracles import RandomEnv, assert_agrees, make, quick, scripted
from tensordict import TensorDict

from torchwrap import transforms as T

VECTOR = spaces.Box(-2, 2, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 5, 3), np.uint8)
FREE = spaces.Box(-np.inf, np.inf, (2, 3), np.float32)
TREE = spaces.Dict(position=VECTOR, kind=spaces.Discrete(3, start=-1), pair=spaces.Tuple([IMAGE, spaces.MultiBinary(2)]))
GRID = spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[0, 1], [-2, 5]]))


@pytest.mark.parametrize(
    ("space", "func", "numpy_func", "new_space"),
    [
        (VECTOR, lambda x: x / 2, lambda x: x / 2, None),
        (VECTOR, lambda x: x[..., :2], lambda x: x[..., :2], spaces.Box(-2, 2, (2,), np.float32)),
        (IMAGE, lambda x: x.flip(1), lambda x: x[::-1], None),
        (IMAGE, lambda x: x.double() / 255, lambda x: x.astype(np.float64) / 255, spaces.Box(0, 1, IMAGE.shape, np.float64)),
        (spaces.Discrete(4), lambda x: 3 - x, lambda x: 3 - x, None),
        (TREE, lambda x: x["position"], lambda x: x["position"], VECTOR),
        (TREE, lambda x: x["pair", "0"], lambda x: x["pair"][0], IMAGE),
    ],
)
def test_transform_observation_equals_gymnasiums(space, func, numpy_func, new_space):
    oracles = [wrappers.TransformObservation(RandomEnv(space), numpy_func, new_space) for _ in range(3)]
    assert_agrees(make(space, T.TransformObservation(func, new_space)), oracles)


def test_transform_observation_func_of_a_dict_space_receives_a_tensordict():
    space = spaces.Dict(a=VECTOR, b=spaces.Discrete(3))
    env = make(space, T.TransformObservation(lambda td: td.copy().set("a", -td["a"]), space))
    plain = make(space)
    td, raw = env.reset(seed=1), plain.reset(seed=1)
    torch.testing.assert_close(td["observation", "a"], -raw["observation", "a"], rtol=0, atol=0)
    assert torch.equal(td["observation", "b"], raw["observation", "b"])


def test_transform_observation_func_receives_the_whole_batch():
    shapes = []
    make(VECTOR, T.TransformObservation(lambda x: shapes.append(x.shape) or x), num_envs=7).reset()
    assert set(shapes) == {(7, 3)}


@pytest.mark.parametrize(
    "bounds", quick([(-1, 1), (-1.5, 0.5), (0, 0), (-np.inf, 1), (0, np.inf), (5, 6), (-1e6, 1e6)], (-1, 1), (0, np.inf))
)
@pytest.mark.parametrize("space", [VECTOR, FREE, spaces.Box(-2, 2, (), np.float64), spaces.Box(-2, 2, (3,), np.float16)])
def test_clip_observation_equals_numpys_clip_in_values_and_declared_bounds(space, bounds):
    clip = lambda x: np.clip(x, *(np.array(bound, space.dtype) for bound in bounds))  # noqa: E731
    with np.errstate(over="ignore"):
        box = spaces.Box(clip(space.low), clip(space.high), space.shape, space.dtype)
        oracles = [wrappers.TransformObservation(RandomEnv(space), clip, box) for _ in range(3)]
        assert_agrees(make(space, T.ClipObservation(*bounds)), oracles)


@pytest.mark.parametrize("dtype", quick([np.uint8, np.int8, np.int16, np.int32, np.int64], np.uint8, np.int64))
@pytest.mark.parametrize("bounds", [(3, 9), (3.0, 9.0)])
def test_clip_observation_of_integers_keeps_the_dtype(dtype, bounds):
    space = spaces.Box(0, 12, (4,), dtype)
    clip = lambda x: np.clip(x, 3, 9)  # noqa: E731
    oracles = [wrappers.TransformObservation(RandomEnv(space), clip, spaces.Box(3, 9, (4,), dtype)) for _ in range(3)]
    assert_agrees(make(space, T.ClipObservation(*bounds)), oracles)


@pytest.mark.parametrize(("bounds", "low", "high"), [((-10, 10), 0, 10), ((9.5, np.inf), 10, 255), ((-np.inf, 1e9), 0, 255)])
def test_clip_observation_bounds_outside_an_integer_dtype_are_rounded_inwards(bounds, low, high):
    env = make(IMAGE, T.ClipObservation(*bounds))
    assert (env.single_observation_space.low.min(), env.single_observation_space.high.max()) == (low, high)
    observation = env.reset()["observation"]
    assert observation.dtype == torch.uint8 and observation.min() >= low and observation.max() <= high


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
    spaces.Tuple([spaces.Tuple([IMAGE, spaces.MultiBinary(3)]), spaces.Dict(x=spaces.Box(-9, 9, (2,), np.int32))]),
    spaces.Tuple([IMAGE, spaces.Box(-1, 1, (2,), np.float64)]),
]


@pytest.mark.parametrize("space", FLAT, ids=str)
def test_flatten_observation_equals_gymnasiums_in_values_dtype_and_space(space):
    oracles = [wrappers.FlattenObservation(RandomEnv(space)) for _ in range(3)]
    assert_agrees(make(space, T.FlattenObservation()), oracles)


@pytest.mark.parametrize("space", [VECTOR, spaces.Discrete(3), GRID, IMAGE], ids=str)
@pytest.mark.parametrize("batch", [(), (1,), (7,), (2, 5)])
def test_flatten_observation_standalone_takes_any_batch_size(space, batch):
    transform = T.FlattenObservation()
    make(space, transform)
    rows = [np.asarray(space.sample()) for _ in range(int(np.prod(batch)))]
    observation = torch.as_tensor(np.stack(rows)).reshape((*batch, *space.shape))
    flat = transform(TensorDict({"observation": observation}, batch))["observation"]
    expected = np.stack([spaces.flatten(space, row) for row in rows])
    np.testing.assert_array_equal(flat.reshape(-1, spaces.flatdim(space)), expected)
    assert flat.shape == (*batch, spaces.flatdim(space))


@pytest.mark.parametrize("batch", [(), (4,), (2, 5)])
def test_clip_observation_standalone_takes_any_batch_size_and_keeps_its_input(batch):
    td = TensorDict({"observation": torch.full((*batch, 3), 5.0), "other": torch.zeros(batch)}, batch)
    clipped = T.ClipObservation(-1, 1)(td)
    assert torch.equal(clipped["observation"], torch.ones(*batch, 3))
    assert torch.equal(td["observation"], torch.full((*batch, 3), 5.0))
    assert clipped["other"] is td["other"]


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: T.TransformObservation(3), TypeError, "TransformObservation needs a callable func, but got 3"),
        (lambda: T.TransformObservation(None), TypeError, "TransformObservation needs a callable func, but got None"),
        (lambda: T.TransformObservation(torch.tanh, (3,)), TypeError, r"TransformObservation needs a .* Space .* got \(3,\)"),
        (lambda: T.ClipObservation(1, -1), ValueError, r"ClipObservation needs max_obs in \[1, inf\], but got -1"),
        (lambda: T.ClipObservation(float("nan"), 1), ValueError, "ClipObservation needs .* min_obs, but got nan"),
        (lambda: T.ClipObservation(0, float("nan")), ValueError, "ClipObservation needs .*max_obs .* but got nan"),
        (lambda: T.ClipObservation(None, 1), (TypeError, ValueError), "ClipObservation needs .* but got None"),
        (lambda: T.ClipObservation("a", "b"), (TypeError, ValueError), "ClipObservation needs .* but got '?a"),
    ],
)
def test_observation_transforms_wrong_arguments_raise(build, error, match):
    with pytest.raises(error, match=match):
        build()


@pytest.mark.parametrize(
    ("space", "transform", "error", "match"),
    [
        (VECTOR, T.TransformObservation(lambda x: x[:, :1]), ValueError, r"TransformObservation needs .* \(2, 3\).* \(2, 1\)"),
        (VECTOR, T.TransformObservation(lambda x: x.double()), TypeError, "TransformObservation needs .*32.* got .*float64"),
        (VECTOR, T.TransformObservation(lambda x: x, IMAGE), ValueError, r"TransformObservation needs .* but got \(2, 3\)"),
        (VECTOR, T.TransformObservation(lambda x: None), TypeError, "TransformObservation needs .* but got NoneType"),
        (VECTOR, T.TransformObservation(lambda x: {"a": x}), TypeError, "TransformObservation needs .* but got dict"),
        (VECTOR, T.TransformObservation(lambda x: x, TREE), TypeError, "TransformObservation needs .* but got Tensor"),
        (TREE, T.TransformObservation(lambda x: x.select("kind")), TypeError, r"TransformObservation needs .*\['kind'\]"),
        (spaces.Discrete(3), T.TransformObservation(lambda x: x + 7), ValueError, "TransformObservation needs .* got values"),
        (spaces.Discrete(3), T.ClipObservation(0, 1), TypeError, r"ClipObservation needs a Box .* but got Discrete\(3\)"),
        (TREE, T.ClipObservation(0, 1), TypeError, "ClipObservation needs a Box .* but got Dict"),
        (IMAGE, T.ClipObservation(300, 400), ValueError, "ClipObservation needs .* uint8 .*min_obs=300, max_obs=400"),
        (IMAGE, T.ClipObservation(1.2, 1.8), ValueError, "ClipObservation needs .* uint8 .*min_obs=1.2, max_obs=1.8"),
    ],
)
def test_observation_transforms_wrong_spaces_and_functions_raise(space, transform, error, match):
    with pytest.raises(error, match=match):
        scripted(transform, observation_space=space, num_envs=2)


def both(space, transform, wrapper):
    return make(space, transform), [wrapper(RandomEnv(space)) for _ in range(3)]


@pytest.mark.parametrize("dtype", quick([np.float32, np.float64, "int64", np.dtype(np.uint8)], np.float32, "int64"))
@pytest.mark.parametrize(
    "space", [spaces.Box(0, 9, (2, 3), np.float32), IMAGE, spaces.Discrete(4, start=2), spaces.MultiBinary(3)]
)
def test_dtype_observation_equals_gymnasiums(space, dtype):
    with np.errstate(over="ignore"):
        assert_agrees(*both(space, T.DtypeObservation(dtype), lambda env: wrappers.DtypeObservation(env, dtype)))


@pytest.mark.parametrize("low", [-np.inf, 0])
@pytest.mark.parametrize("dtype", ["int8", torch.int64])
def test_dtype_observation_that_raises_does_not_change_the_envs_space(low, dtype):
    space = spaces.Box(low, np.inf, (3,))
    with pytest.raises(TypeError, match=r"but got .*: it has infinite bounds"):
        make(space, T.DtypeObservation(dtype))
    assert (space.low == low).all() and (space.high == np.inf).all()


def test_dtype_observation_bounds_are_rounded_without_a_warning():
    space = spaces.Box(np.array([-0.1, -np.inf]), np.array([0.1, np.inf]), dtype=np.float64)
    env = scripted(T.DtypeObservation("float32"), observation_space=space)
    assert env.single_observation_space.high.tolist() == [float(np.float32(0.1)), np.inf]
    with pytest.raises(TypeError, match="DtypeObservation needs a space whose values fit float32"):
        make(spaces.Box(-1e300, 1e300, (2,), np.float64), T.DtypeObservation("float32"))


@pytest.mark.parametrize("dtype", [bool, int, float, np.int16, np.dtype("f2"), "uint8", "f", torch.float64])
def test_dtype_observation_accepts_dtypes_and_their_names(dtype):
    expected = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    assert make(spaces.MultiBinary(2), T.DtypeObservation(dtype)).single_observation_space.dtype == expected


def test_dtype_observation_of_multi_discrete_equals_gymnasiums():
    space = spaces.MultiDiscrete([2, 5], start=[1, 7])
    assert_agrees(*both(space, T.DtypeObservation(np.int32), lambda env: wrappers.DtypeObservation(env, np.int32)))


def test_dtype_observation_of_a_torch_dtype_gives_that_dtype():
    assert make(IMAGE, T.DtypeObservation(torch.float16)).reset()["observation"].dtype == torch.float16


@pytest.mark.parametrize("keys", [["kind"], ["pair", "kind"], ("position", "kind", "pair")])
def test_filter_observation_equals_gymnasiums(keys):
    assert_agrees(*both(TREE, T.FilterObservation(keys), lambda env: wrappers.FilterObservation(env, keys)))


@pytest.mark.parametrize("keys", [[1], [2, 0], (0, 1, 2)])
def test_filter_observation_of_tuples_equals_gymnasiums(keys):
    space = spaces.Tuple([VECTOR, spaces.Discrete(3), IMAGE])
    assert_agrees(*both(space, T.FilterObservation(keys), lambda env: wrappers.FilterObservation(env, keys)))


@pytest.mark.parametrize("shape", [(60,), (5, 12), (1, 60, 1)])
def test_reshape_observation_equals_gymnasiums(shape):
    assert_agrees(*both(IMAGE, T.ReshapeObservation(shape), lambda env: wrappers.ReshapeObservation(env, shape)))


def test_reshape_observation_standalone_takes_any_batch_size():
    env = make(IMAGE, T.ReshapeObservation((20, 3)))
    td = TensorDict({"observation": torch.zeros(2, 7, *IMAGE.shape, dtype=torch.uint8)}, [2, 7])
    assert env.transforms(td)["observation"].shape == (2, 7, 20, 3)


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (
            lambda: T.DtypeObservation("float31"),
            TypeError,
            "DtypeObservation needs a dtype of NumPy or PyTorch .*, but got 'float31'",
        ),
        (
            lambda: make(TREE, T.DtypeObservation("float32")),
            TypeError,
            "DtypeObservation needs a space whose values fit float32",
        ),
        (lambda: T.DtypeObservation("U3"), TypeError, "DtypeObservation needs a dtype of NumPy or PyTorch .*, but got 'U3'"),
        (
            lambda: T.FilterObservation("kind"),
            TypeError,
            "FilterObservation needs filter_keys as a list of strings or integers, but got 'kind'",
        ),
        (
            lambda: T.FilterObservation(3),
            TypeError,
            "FilterObservation needs filter_keys as a list of strings or integers, but got 3",
        ),
        (lambda: T.FilterObservation([]), ValueError, r"FilterObservation needs filter_keys, each once, but got \[\]"),
        (lambda: T.FilterObservation([1, 1]), ValueError, r"FilterObservation needs filter_keys, each once, but got \[1, 1\]"),
        (
            lambda: make(TREE, T.FilterObservation(["no"])),
            ValueError,
            r"among \['kind', 'pair', 'position'\], but got \['no'\]",
        ),
        (lambda: make(TREE, T.FilterObservation([0])), ValueError, r"among \['kind', 'pair', 'position'\], but got \[0\]"),
        (
            lambda: make(VECTOR, T.FilterObservation([0])),
            TypeError,
            "FilterObservation needs a Dict or Tuple observation space",
        ),
        (lambda: make(spaces.Tuple([VECTOR]), T.FilterObservation([1])), ValueError, r"among \[0\], but got \[1\]"),
        (lambda: T.FilterObservation([False]), TypeError, r"as a list of strings or integers, but got \[False\]"),
        (lambda: T.ReshapeObservation(4), TypeError, "ReshapeObservation needs shape as a tuple, but got 4"),
        (lambda: T.ReshapeObservation((2, -1)), ValueError, "ReshapeObservation needs shape of at least 1, but got -1"),
        (
            lambda: T.ReshapeObservation((2.0,)),
            TypeError,
            "ReshapeObservation needs an integer shape of at least 1, but got 2.0",
        ),
        (lambda: make(VECTOR, T.ReshapeObservation((2, 2))), ValueError, r"needs a shape with 3 elements, but got \(2, 2\)"),
        (lambda: make(TREE, T.ReshapeObservation((2, 2))), TypeError, "ReshapeObservation needs a Box observation space"),
    ],
)
def test_structural_transforms_wrong_arguments_and_spaces_raise(build, error, match):
    with pytest.raises(error, match=match):
        build()
