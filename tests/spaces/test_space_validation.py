from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from space_cases import BOX, DISCRETE_HAS_DTYPE, NESTED, batch, every_space
from tensordict import TensorDict

from torchwrap import Signature
from torchwrap import spaces as tensors
from torchwrap.random import Stream

# Membership.


@every_space
def test_contains_accepts_samples_of_gymnasium(space):
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
def test_contains_matches_gymnasium(space, members, others):
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
def test_contains_rejects_another_shape_dtype_or_structure(space, value):
    assert tensors.contains(space, value) is False


@pytest.mark.parametrize(
    "space, value, error, match",
    [
        (BOX, torch.zeros(2, 3), None, ""),
        (BOX, torch.full((2, 3), 9.0), None, ""),  # bounds of a Box are not checked
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
def test_check_message_states_needed_and_given_value(space, value, error, match):
    if error is None:
        tensors.check("E", "it", space, value, 2, torch.device("cpu"))
    else:
        with pytest.raises(error, match=match):
            tensors.check("E", "it", space, value, 2, torch.device("cpu"))


# Spaces that are not supported.


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
def test_unsupported_space_raises_wherever_it_is_nested(use, nest, unsupported):
    with pytest.raises(TypeError, match=LEAF):
        use(nest(unsupported))


@pytest.mark.parametrize("unsupported", [spaces.Text(5), spaces.Graph(BOX, None), spaces.Sequence(BOX)])
def test_contains_of_an_unsupported_space_raises(unsupported):
    with pytest.raises(TypeError, match=LEAF):
        tensors.contains(unsupported, torch.zeros(2))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,), np.longdouble),
        spaces.Box(0, 60_000, (2,), np.uint16),
        spaces.Box(0, 2**32 - 1, (2,), np.uint32),
        spaces.Box(0, 2**64 - 1, (2,), np.uint64),
        *([spaces.Discrete(3, dtype=np.uint16)] if DISCRETE_HAS_DTYPE else []),
        spaces.MultiDiscrete([3, 5], dtype=np.uint32),
    ],
    ids=lambda space: f"{type(space).__name__}-{space.dtype}",
)
def test_space_of_an_unsupported_dtype_raises(space):
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
def test_empty_space_raises(space):
    with pytest.raises(ValueError, match="A Dict or Tuple space needs at least one subspace"):
        Signature(2, space, BOX)
