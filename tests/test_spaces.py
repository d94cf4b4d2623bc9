from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from gymnasium.wrappers.utils import create_zero_array
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import Signature, masks
from torchwrap import spaces as tensors
from torchwrap.random import Stream

BOX = spaces.Box(-1, 1, (3,), np.float32)
LEAVES = {
    "float32": spaces.Box(-1, 1, (2, 3), np.float32),
    "float64": spaces.Box(-1e100, 1e100, (2,), np.float64),
    "float16": spaces.Box(-1, 1, (2,), np.float16),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "each its own": spaces.Box(np.array([-1, 2, -np.inf, 5, -np.inf]), np.array([1, 3, -5, np.inf, np.inf]), dtype=np.float64),
    "uint8": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "int8": spaces.Box(-128, 127, (3,), np.int8),
    "int64": spaces.Box(-3, 9, (2,), np.int64),
    "int above zero": spaces.Box(4, 9, (2,), np.int32),
    "int64 unbounded": spaces.Box(-np.inf, np.inf, (2,), np.int64),
    "Discrete": spaces.Discrete(3),
    "Discrete start": spaces.Discrete(3, start=-5),
    "Discrete int32": spaces.Discrete(3, start=2, dtype=np.int32),
    "MultiDiscrete": spaces.MultiDiscrete([3, 5]),
    "MultiDiscrete start": spaces.MultiDiscrete([3, 5, 1], start=[-2, 7, 100]),
    "MultiDiscrete 2d": spaces.MultiDiscrete([[3, 5], [2, 4]], start=[[1, 0], [0, -9]]),
    "MultiDiscrete int8": spaces.MultiDiscrete([68], start=[60], dtype=np.int8),
    "MultiBinary": spaces.MultiBinary(4),
    "MultiBinary 2d": spaces.MultiBinary((2, 3)),
}
NESTED = {
    "Dict": spaces.Dict({"b": BOX, "a": spaces.Discrete(3), "c.d": spaces.MultiBinary(2)}),
    "Tuple": spaces.Tuple([spaces.Discrete(100 + i) for i in range(12)]),
    "deep": spaces.Dict(
        {"x": spaces.Tuple([spaces.Dict({"y": BOX}), spaces.Discrete(3, start=4)]), "z": spaces.MultiDiscrete([2, 3])}
    ),
}
SPACES = {**LEAVES, **NESTED}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
every_leaf = pytest.mark.parametrize("space", LEAVES.values(), ids=LEAVES)


def batch(space, count=6, seed=0):
    space.seed(seed)
    members = [space.sample() for _ in range(count)]
    return members, concatenate(space, members, create_empty_array(space, count))


def arrays(value):
    if isinstance(value, TensorDict):
        return {key: arrays(part) for key, part in value.items()}
    return value.numpy()


def assert_same(actual, expected):
    if isinstance(expected, tuple):
        expected = {str(position): part for position, part in enumerate(expected)}
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    else:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(actual, expected)


def leaves_of(value):
    return list(value.values(True, True)) if isinstance(value, TensorDict) else [value]


# From and to Gymnasium.


@every_leaf
def test_the_dtype_is_the_spaces_own(space):
    assert tensors.dtype(space) == torch.from_numpy(np.empty(0, space.dtype)).dtype


@every_space
def test_from_numpy_is_gymnasiums_batch_in_tensors(space):
    _, value = batch(space)
    given = tensors.from_numpy(space, value)
    assert_same(arrays(given), value)
    assert given.shape[0] == 6 and (isinstance(given, torch.Tensor) or given.batch_size == (6,))


@every_space
def test_from_numpy_copies(space):
    _, value = batch(space)
    given = tensors.from_numpy(space, value)
    kept = given.clone()
    concatenate(space, batch(space, seed=1)[0], value)
    assert_same(arrays(given), arrays(kept))


@every_space
def test_to_numpy_is_the_way_back(space):
    _, value = batch(space)
    given = tensors.to_numpy(space, tensors.from_numpy(space, value))
    assert isinstance(given, type(value)) and given in batch_space(space, 6)
    back = tensors.from_numpy(space, given)
    assert_same(arrays(back), value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(3, 2).T.copy(order="F"),
        np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
        np.arange(6, dtype=np.float32)[::-1].reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.broadcast_to(np.float32(3), (2, 3)),
        np.frombuffer(bytes(24), np.float32).reshape(2, 3),
        [[0, 1, 2], [3, 4, 5]],
    ],
    ids=["float64", "Fortran", "strided", "reversed", "int", "broadcast", "read-only", "list"],
)
def test_from_numpy_takes_any_layout_and_casts_to_the_spaces_dtype(value):
    given = tensors.from_numpy(spaces.Box(-9, 9, (3,), np.float32), value)
    assert given.dtype == torch.float32 and given.is_contiguous()
    np.testing.assert_array_equal(given.numpy(), np.asarray(value))
    given.zero_()


@every_space
def test_zeros_are_gymnasiums_in_memory_of_their_own(space):
    zero, given = create_zero_array(space), tensors.zeros(space, 3)
    expected = concatenate(space, [zero] * 3, create_empty_array(space, 3))
    assert_same(arrays(given), expected)
    for leaf in leaves_of(given):
        leaf[0] = 1 if leaf.dtype.is_floating_point else 7
    assert_same(arrays(given[1:]), arrays(tensors.zeros(space, 2)))


@every_space
def test_flatten_is_gymnasiums_row_by_row(space):
    members, value = batch(space)
    given = tensors.flatten(space, tensors.from_numpy(space, value), torch.float64)
    assert given.dtype == torch.float64
    expected = np.stack([spaces.flatten(space, member) for member in members])
    np.testing.assert_array_equal(given.numpy(), expected.astype(np.float64))


def test_leaves_come_in_order_with_their_paths():
    paths = [path for path, _ in tensors.leaves(NESTED["deep"])]
    assert paths == [("x", "0", "y"), ("x", "1"), ("z",)]
    assert [path for path, _ in tensors.leaves(BOX)] == [()]
    assert [path for path, _ in tensors.leaves(NESTED["Tuple"])] == [(str(i),) for i in range(12)]


def test_build_makes_each_leaf_with_its_path():
    seen = []

    def make(path, leaf):
        seen.append((path, leaf))
        return torch.zeros(2)

    value = tensors.build(NESTED["deep"], make, 2)
    assert seen == list(tensors.leaves(NESTED["deep"]))
    assert value.batch_size == (2,) and value["x"].batch_size == (2,) and value["x", "0"].batch_size == (2,)


# Membership.


@every_space
def test_what_gymnasium_samples_is_contained(space):
    _, value = batch(space)
    assert tensors.contains(space, tensors.from_numpy(space, value))


@pytest.mark.parametrize(
    "space, members, others",
    [
        (spaces.Box(-1, 2, (2,), np.float32), [[-1, 2], [0, 0]], [[-1.001, 0], [0, 2.001], [np.nan, 0], [0, np.inf]]),
        (spaces.Box(np.float32([-np.inf, 0]), np.float32([0, np.inf])), [[-1e30, 1e30]], [[1, 0], [0, -1]]),
        (spaces.Box(3, 7, (1,), np.uint8), [[3], [7]], [[2], [8], [255]]),
        (spaces.Discrete(3), [0, 2], [-1, 3]),
        (spaces.Discrete(3, start=5), [5, 7], [4, 8, 0]),
        (spaces.MultiDiscrete([2, 3], start=[5, -1]), [[5, -1], [6, 1]], [[4, 0], [7, 0], [5, -2], [5, 2]]),
        (spaces.MultiDiscrete([68], start=[60], dtype=np.int8), [[60], [127]], [[59], [0]]),
        (spaces.MultiBinary(2), [[0, 1]], [[0, 2], [-1, 0]]),
    ],
    ids=repr,
)
def test_membership_is_gymnasiums(space, members, others):
    for rows, inside in ((members, True), (others, False)):
        for row in rows:
            value = np.asarray([row, members[0]]).astype(space.dtype)
            assert space.contains(value[0]) is inside
            assert tensors.contains(space, torch.from_numpy(value)) is inside


@pytest.mark.parametrize(
    "space, value",
    [
        (BOX, torch.zeros(2, 4)),
        (BOX, torch.zeros(2)),
        (BOX, torch.zeros(2, 3, 1)),
        (BOX, torch.zeros(2, 3, dtype=torch.float64)),
        (BOX, np.zeros((2, 3), np.float32)),
        (BOX, TensorDict({}, [2])),
        (spaces.Discrete(3), torch.zeros(2, 1, dtype=torch.int64)),
        (spaces.Discrete(3), torch.zeros(2, dtype=torch.int32)),
        (spaces.Dict({"a": BOX}), torch.zeros(2, 3)),
        (spaces.Dict({"a": BOX}), TensorDict({"b": torch.zeros(2, 3)}, [2])),
        (spaces.Dict({"a": BOX}), TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, [2])),
        (spaces.Dict({"a": BOX}), TensorDict({"a": torch.full((2, 3), 2.0)}, [2])),
        (spaces.Tuple([BOX]), TensorDict({"a": torch.zeros(2, 3)}, [2])),
    ],
)
def test_another_shape_dtype_or_structure_is_not_contained(space, value):
    assert tensors.contains(space, value) is False


@pytest.mark.parametrize(
    "space, value, error, match",
    [
        (BOX, torch.zeros(2, 3), None, ""),
        (BOX, torch.full((2, 3), 9.0), None, ""),  # a Box's bounds are not looked at
        (BOX, torch.zeros(3, 3), ValueError, r"E needs it of shape \(2, 3\) \(num_envs first\), but got \(3, 3\)"),
        (BOX, torch.zeros(2), ValueError, r"of shape \(2, 3\)"),
        (BOX, torch.zeros(2, 3, dtype=torch.float64), TypeError, "of dtype torch.float32 for Box.*but got torch.float64"),
        (BOX, np.zeros((2, 3)), TypeError, "as a torch.Tensor, but got ndarray"),
        (BOX, None, TypeError, "as a torch.Tensor, but got NoneType"),
        (BOX, TensorDict({}, [2]), TypeError, "as a torch.Tensor, but got TensorDict"),
        (BOX, torch.zeros(2, 3, device="meta"), ValueError, "on device cpu, but got meta"),
        (spaces.Discrete(3, start=1), torch.tensor([1, 3]), None, ""),
        (
            spaces.Discrete(3, start=1),
            torch.tensor([1, 4]),
            ValueError,
            r"in Discrete\(3, start=1\), but got values from 1 to 4",
        ),
        (spaces.Discrete(3), torch.tensor([0.0, 1.0]), TypeError, "of dtype torch.int64"),
        (spaces.MultiBinary(2), torch.zeros(2, 2, dtype=torch.int8), None, ""),
        (spaces.MultiBinary(2), torch.full((2, 2), 2, dtype=torch.int8), ValueError, "but got values from 2 to 2"),
        (spaces.MultiDiscrete([68], start=[60], dtype=np.int8), torch.tensor([[60], [127]], dtype=torch.int8), None, ""),
        (NESTED["deep"], tensors.zeros(NESTED["deep"], 2), None, ""),
        (NESTED["deep"], tensors.zeros(NESTED["deep"], 3), ValueError, r"E needs it\['x'\]\['0'\]\['y'\] of shape \(2, 3\)"),
        (spaces.Dict({"a": BOX}), torch.zeros(2, 3), TypeError, r"as a TensorDict with keys \['a'\], but got Tensor"),
        (spaces.Dict({"a": BOX}), {"a": torch.zeros(2, 3)}, TypeError, r"as a TensorDict with keys \['a'\], but got dict"),
        (spaces.Dict({"a": BOX}), TensorDict({"b": torch.zeros(2)}, [2]), TypeError, r"with keys \['a'\], but got \['b'\]"),
    ],
)
def test_check_says_what_is_needed_and_what_came(space, value, error, match):
    if error is None:
        tensors.check("E", "it", space, value, 2, torch.device("cpu"))
    else:
        with pytest.raises(error, match=match):
            tensors.check("E", "it", space, value, 2, torch.device("cpu"))


# Sampling.


def draws(space, count=20_000, seed=1):
    return tensors.sample(space, Stream(count, seed=seed))


@every_space
def test_samples_are_members(space):
    value = draws(space, 2000)
    assert tensors.contains(space, value)
    assert value.shape[0] == 2000


@every_space
def test_two_samples_of_one_stream_differ_and_a_seed_repeats_them(space):
    stream, again = Stream(50, seed=1), Stream(50, seed=1)
    first, second = tensors.sample(space, stream), tensors.sample(space, stream)
    assert (tensors.flatten(space, first, torch.float64) != tensors.flatten(space, second, torch.float64)).any()
    assert_same(arrays(tensors.sample(space, again)), arrays(first))
    assert_same(arrays(tensors.sample(space, again)), arrays(second))


@every_space
def test_a_sample_does_not_depend_on_num_envs(space):
    whole, shard = draws(space, 50), tensors.sample(space, Stream(7, first_index=20, seed=1))
    assert_same(arrays(whole[20:27]), arrays(shard))


def ks_distance(one, other):
    both = np.concatenate([one, other])
    both.sort()
    return np.abs(np.searchsorted(np.sort(one), both, "right") - np.searchsorted(np.sort(other), both, "right")).max() / len(
        one
    )


@every_leaf
def test_samples_are_distributed_as_gymnasiums(space):
    count = 5000
    ours = draws(space, count).double().reshape(count, -1).numpy()
    space.seed(0)
    theirs = np.stack([space.sample() for _ in range(count)]).astype(np.float64).reshape(count, -1)
    for column in range(min(ours.shape[1], 5)):
        assert ks_distance(ours[:, column], theirs[:, column]) < 1.95 * math.sqrt(2 / count)  # once in a thousand


@pytest.mark.parametrize(
    "low, high, mean, deviation, lowest, highest",
    [
        (-2, 6, 2, 8 / math.sqrt(12), -2, 6),
        (-np.inf, np.inf, 0, 1, -np.inf, np.inf),
        (3, np.inf, 4, 1, 3, np.inf),
        (-np.inf, -3, -4, 1, -np.inf, -3),
        (5, 5, 5, 0, 5, 5),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_kind_of_bound_has_its_distribution(low, high, mean, deviation, lowest, highest, dtype):
    value = draws(spaces.Box(low, high, (4,), dtype), 50_000).double()
    assert torch.allclose(value.mean(0), torch.tensor(float(mean), dtype=torch.float64), atol=0.03)
    assert torch.allclose(value.std(0), torch.tensor(float(deviation), dtype=torch.float64), atol=0.03)
    assert value.min() >= lowest and value.max() <= highest
    assert value.min() < (mean - 3 if np.isinf(low) else low + 1e-3)
    assert value.max() > (mean + 3 if np.isinf(high) else high - 1e-3)
    correlation = torch.corrcoef(value.T).nan_to_num(1.0 if deviation == 0 else math.nan) - torch.eye(4)
    assert deviation == 0 or correlation.abs().max() < 0.03


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-3e38, 3e38, (3,), np.float32),
        spaces.Box(-6e4, 6e4, (3,), np.float16),
        spaces.Box(-1e300, 1e300, (3,), np.float64),
    ],
    ids=repr,
)
def test_samples_of_a_very_wide_box_are_members(space):
    value = draws(space, 1000)
    assert tensors.contains(space, value)
    assert len(value.unique()) > 500


@pytest.mark.parametrize(
    "space, values",
    [
        (spaces.Box(-2, 3, (2,), np.int64), range(-2, 4)),
        (spaces.Box(250, 255, (2,), np.uint8), range(250, 256)),
        (spaces.Box(-128, 127, (2,), np.int8), range(-128, 128)),
        (spaces.Discrete(4), range(4)),
        (spaces.Discrete(4, start=-6), range(-6, -2)),
        (spaces.Discrete(1, start=9), [9]),
        (spaces.MultiDiscrete([3, 3], start=[2, 2]), range(2, 5)),
        (spaces.MultiBinary(3), [0, 1]),
    ],
    ids=repr,
)
def test_every_value_of_a_finite_space_is_equally_frequent(space, values):
    value = draws(space, 50_000).flatten().long()
    found, frequency = value.unique(return_counts=True)
    assert found.tolist() == list(values)
    expected = len(value) / len(found)
    chi_square = ((frequency - expected) ** 2 / expected).sum().item()
    assert chi_square < len(found) - 1 + 4 * math.sqrt(2 * len(found))


def test_parts_of_a_nested_space_are_drawn_independently():
    value = draws(spaces.Dict({"a": spaces.Box(0, 1), "b": spaces.Tuple([spaces.Box(0, 1), spaces.Box(0, 1)])}))
    columns = torch.cat([value["a"], value["b", "0"], value["b", "1"]], -1)
    assert (torch.corrcoef(columns.T) - torch.eye(3)).abs().max() < 0.04


# Rows.


@every_space
def test_where_takes_rows_of_the_one_or_the_other(space):
    mask = torch.tensor([True, False, False, True, False, True])
    first, second = (tensors.from_numpy(space, batch(space, seed=seed)[1]) for seed in (0, 1))
    kept = first.clone()
    mixed = masks.where(mask, first, second)
    assert_same(arrays(mixed[mask]), arrays(first[mask]))
    assert_same(arrays(mixed[~mask]), arrays(second[~mask]))
    for leaf in leaves_of(mixed):
        leaf.zero_()
    assert_same(arrays(first), arrays(kept))


# What is not supported.

LEAF = r"A space needs to be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, but got (Text|Graph|Sequence|OneOf)\("


@pytest.mark.parametrize(
    "unsupported",
    [spaces.Text(5), spaces.Graph(BOX, None), spaces.Sequence(BOX), spaces.OneOf([BOX])],
    ids=lambda space: type(space).__name__,
)
@pytest.mark.parametrize("nest", [lambda s: s, lambda s: spaces.Dict({"a": BOX, "b": s}), lambda s: spaces.Tuple([BOX, s])])
@pytest.mark.parametrize(
    "use",
    [
        lambda space: Signature(2, space, BOX),
        lambda space: Signature(2, BOX, space),
        lambda space: tensors.zeros(space, 2),
        lambda space: tensors.sample(space, Stream(2)),
    ],
    ids=["observation", "action", "zeros", "sample"],
)
def test_an_unsupported_space_is_refused(use, nest, unsupported):
    with pytest.raises(TypeError, match=LEAF):
        use(nest(unsupported))


@pytest.mark.parametrize("unsupported", [spaces.Text(5), spaces.Graph(BOX, None), spaces.Sequence(BOX)])
def test_membership_in_an_unsupported_space_is_refused(unsupported):
    with pytest.raises(TypeError, match=LEAF):
        tensors.contains(unsupported, torch.zeros(2))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,), np.longdouble),
        spaces.Box(0, 60_000, (2,), np.uint16),
        spaces.Box(0, 2**32 - 1, (2,), np.uint32),
        spaces.Box(0, 2**64 - 1, (2,), np.uint64),
        spaces.Discrete(3, dtype=np.uint16),
        spaces.MultiDiscrete([3, 5], dtype=np.uint32),
    ],
    ids=lambda space: f"{type(space).__name__}-{space.dtype}",
)
def test_a_dtype_that_torch_does_not_compute_with_is_refused(space):
    match = rf"A space needs a dtype that PyTorch computes with, but got {type(space).__name__}.* of dtype {space.dtype}"
    for use in (tensors.dtype, lambda space: tensors.zeros(space, 2), lambda space: tensors.sample(space, Stream(2))):
        with pytest.raises(TypeError, match=match):
            use(space)
    for part in (space, spaces.Dict({"a": BOX, "b": space}), spaces.Tuple([BOX, space])):
        with pytest.raises(TypeError, match=match):
            Signature(2, part, BOX)
        with pytest.raises(TypeError, match=match):
            Signature(2, BOX, part)


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple([]), spaces.Dict({"a": spaces.Tuple([])})], ids=repr)
def test_an_empty_space_is_refused_or_comes_through(space):
    try:
        Signature(2, space, BOX)
    except (TypeError, ValueError) as error:
        assert "needs" in str(error)
    else:
        assert tensors.from_numpy(space, batch(space, 2)[1]).batch_size == (2,)


# Signature.


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({}, None),
        ({"num_envs": 1, "first_index": 7, "max_episode_steps": 3}, None),
        ({"num_envs": 0}, "num_envs of at least 1, but got 0"),
        ({"num_envs": -1}, "num_envs of at least 1, but got -1"),
        ({"num_envs": True}, "num_envs of at least 1, but got True"),
        ({"num_envs": 2.0}, "num_envs of at least 1, but got 2.0"),
        ({"num_envs": "2"}, "num_envs of at least 1, but got '2'"),
        ({"num_envs": None}, "num_envs of at least 1, but got None"),
        ({"first_index": -1}, "first_index of at least 0, but got -1"),
        ({"first_index": 0.0}, "first_index of at least 0, but got 0.0"),
        ({"first_index": None}, "first_index of at least 0, but got None"),
        ({"single_observation_space": None}, "A space needs to be Box, .* but got None"),
        ({"single_action_space": (3,)}, "A space needs to be Box, .* but got"),
    ],
    ids=str,
)
def test_a_signature_refuses_bad_values(arguments, match):
    arguments = {"num_envs": 2, "single_observation_space": BOX, "single_action_space": BOX, **arguments}
    if match is None:
        assert Signature(**arguments).num_envs == arguments["num_envs"]
    else:
        with pytest.raises((ValueError, TypeError), match=match):
            Signature(**arguments)
        with pytest.raises((ValueError, TypeError), match=match):
            Signature(2, BOX, BOX).replace(**arguments)


def test_a_signature_is_frozen_and_replaced():
    signature = Signature(2, BOX, spaces.Discrete(2), max_episode_steps=9)
    other = signature.replace(single_observation_space=spaces.Discrete(4))
    with pytest.raises(AttributeError):
        signature.num_envs = 3
    assert (signature.single_observation_space, other.single_observation_space) == (BOX, spaces.Discrete(4))
    assert (other.num_envs, other.single_action_space, other.max_episode_steps) == (2, spaces.Discrete(2), 9)


def test_each_stream_of_a_signature_is_another():
    signature, words = Signature(3, BOX, BOX, first_index=5), []
    for _ in range(4):
        stream, signature = signature.stream()
        stream.seed(1, torch.ones(3, dtype=torch.bool))
        assert stream.env.tolist() == [5, 6, 7]
        words.append(tensors.sample(BOX, stream))
    env = tw.FunctionalEnv(tw.envs.cartpole.CartPole(), 3, first_index=5)
    assert len({env.stream.tag, env.action_stream.tag, *range(2, 6)}) == 6
    assert len(torch.cat(words).unique(dim=0)) == 12


def test_the_spaces_of_an_env_are_gymnasiums_batched():
    env = tw.make("CartPole-v1", 3)
    assert env.observation_space == batch_space(env.single_observation_space, 3)
    assert env.action_space == batch_space(env.single_action_space, 3)
    assert env.sample_action().numpy() in env.action_space


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_space
def test_on_cuda_values_are_those_of_the_cpu(space):
    _, value = batch(space)
    there = tensors.from_numpy(space, value, "cuda")
    assert_same(arrays(there.cpu()), value)
    assert_same(arrays(tensors.zeros(space, 3, "cuda").cpu()), arrays(tensors.zeros(space, 3)))
    here = tensors.from_numpy(space, value)
    flat = tensors.flatten(space, here, torch.float64)
    assert torch.equal(tensors.flatten(space, there, torch.float64).cpu(), flat)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_space
def test_on_cuda_samples_are_those_of_the_cpu(space):
    there, here = (tensors.sample(space, Stream(100, device=device, seed=1)) for device in ("cuda", "cpu"))
    assert torch.allclose(
        tensors.flatten(space, there, torch.float64).cpu(), tensors.flatten(space, here, torch.float64), rtol=1e-5, atol=1e-5
    )
