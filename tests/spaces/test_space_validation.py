import numpy as np
import pytest
import torch
from gymnasium import spaces
from space_cases import BOX, DISCRETE_HAS_DTYPE, batch, every_space
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

import torchwrap as tw
from torchwrap import RowMask, Signature
from torchwrap import spaces as tensors
from torchwrap.random import Stream

CPU = torch.device("cpu")

# Membership.


@every_space
def test_contains_accepts_samples_of_gymnasium(space):
    assert tensors.contains(space, tensors.from_numpy(space, batch(space)[1]))


@pytest.mark.parametrize(
    "space, members, others",
    [
        (
            spaces.Box(-1, 2, (2,), np.float32),
            [[-1, 2], [0, 0]],
            [[-1.001, 0], [0, 2.001], [np.nan, 0], [0, np.inf]],
        ),
        (
            spaces.Box(np.float32([-np.inf, 0]), np.float32([0, np.inf])),
            [[-1e30, 1e30]],
            [[1, 0], [0, -1]],
        ),
        (spaces.Box(3, 7, (1,), np.uint8), [[3], [7]], [[2], [8], [255]]),
        (spaces.Discrete(3), [0, 2], [-1, 3]),
        (spaces.Discrete(3, start=5), [5, 7], [4, 8, 0]),
        (
            spaces.MultiDiscrete([2, 3], start=[5, -1]),
            [[5, -1], [6, 1]],
            [[4, 0], [7, 0], [5, -2], [5, 2]],
        ),
        (spaces.MultiDiscrete([68], start=[60], dtype=np.int8), [[60], [127]], [[59], [0]]),
        (spaces.MultiBinary(2), [[0, 1]], [[0, 2], [-1, 0]]),
    ],
    ids=repr,
)
def test_contains_and_check_match_gymnasium(space, members, others):
    for row in [*members, *others]:
        value = np.asarray([row, members[0]]).astype(space.dtype)
        assert space.contains(value[0]) is (row in members)
        assert tensors.contains(space, torch.from_numpy(value)) is (row in members)
        if row in members or isinstance(space, spaces.Box):  # whose bounds are not checked
            tensors.check("E", "it", space, torch.from_numpy(value), 2, CPU)
        else:
            with pytest.raises(ValueError, match=r"E needs it in .*, but got values from"):
                tensors.check("E", "it", space, torch.from_numpy(value), 2, CPU)


def test_contains_rejects_another_shape_dtype_or_structure():
    dictionary = spaces.Dict({"a": BOX})
    for space, value in (
        (BOX, torch.zeros(2, 4)),
        (BOX, torch.zeros(2)),
        (BOX, torch.zeros(2, 3, dtype=torch.float64)),
        (BOX, np.zeros((2, 3), np.float32)),
        (BOX, TensorDict({}, [2])),
        (spaces.Discrete(3), torch.zeros(2, 1, dtype=torch.int64)),
        (spaces.Discrete(3), torch.zeros(2, dtype=torch.int32)),
        (dictionary, torch.zeros(2, 3)),
        (dictionary, TensorDict({"b": torch.zeros(2, 3)}, [2])),
        (dictionary, TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, [2])),
        (dictionary, TensorDict({"a": torch.full((2, 3), 2.0)}, [2])),
        (spaces.Tuple([BOX]), TensorDict({"a": torch.zeros(2, 3)}, [2])),
    ):
        assert tensors.contains(space, value) is False


# Spaces that are not supported.


def assert_refused(space, error, match):
    """As an observation or an action, wherever it is nested; and by what reads its dtype."""
    for part in (space, spaces.Dict({"a": BOX, "b": space}), spaces.Tuple([BOX, space])):
        for use in (
            lambda space: Signature(2, space, BOX),
            lambda space: Signature(2, BOX, space),
            lambda space: tensors.zeros(space, 2),
            lambda space: tensors.sample(space, Stream(2)),
            lambda space: tensors.contains(
                space, tensors.build(space, lambda path, leaf: torch.zeros(2, 3), 2)
            ),
        ):
            with pytest.raises(error, match=match):
                use(part)


def test_unsupported_space_raises_wherever_it_is_nested():
    match = r"A space needs to be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, but got {}\("
    for space in (
        spaces.Text(5),
        spaces.Graph(BOX, None),
        spaces.Sequence(BOX),
        spaces.OneOf([BOX]),
    ):
        assert_refused(space, TypeError, match.format(type(space).__name__))


def test_space_of_an_unsupported_dtype_raises():
    match = "A space needs a dtype that PyTorch computes with, but got {}.* of dtype {}"
    for space in (
        spaces.Box(-1, 1, (2,), np.longdouble),
        spaces.Box(0, 60_000, (2,), np.uint16),
        spaces.Box(0, 2**32 - 1, (2,), np.uint32),
        spaces.Box(0, 2**64 - 1, (2,), np.uint64),
        *([spaces.Discrete(3, dtype=np.uint16)] if DISCRETE_HAS_DTYPE else []),
        spaces.MultiDiscrete([3, 5], dtype=np.uint32),
    ):
        assert_refused(space, TypeError, match.format(type(space).__name__, space.dtype))


def test_empty_space_raises():
    for space in (spaces.Dict({}), spaces.Tuple([]), spaces.Dict({"a": spaces.Tuple([])})):
        with pytest.raises(ValueError, match="A Dict or Tuple space needs at least one subspace"):
            Signature(2, space, BOX)


# Signatures.


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "cpu", "meta"])
def test_device_of_a_signature_equals_that_of_its_tensors(device):
    with FakeTensorMode():  # which has CUDA without a GPU
        signature, tensor = Signature(2, BOX, BOX, device), torch.empty(2, device=device)
        assert signature.device == signature.replace(num_envs=3).device == tensor.device
    assert signature.device.index == (0 if signature.device.type == "cuda" else None)


def test_signature_with_invalid_values_raises():
    for arguments, match in (
        ({"num_envs": 0}, "num_envs as an integer of at least 1, but got 0"),
        ({"num_envs": True}, "num_envs as an integer of at least 1, but got True"),
        ({"num_envs": 2.0}, "num_envs as an integer of at least 1, but got 2.0"),
        ({"num_envs": "2"}, "num_envs as an integer of at least 1, but got '2'"),
        ({"first_index": -1}, "first_index as an integer of at least 0, but got -1"),
        ({"first_index": None}, "first_index as an integer of at least 0, but got None"),
        ({"single_observation_space": None}, "A space needs to be Box, .* but got None"),
        ({"single_action_space": (3,)}, "A space needs to be Box, .* but got"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            Signature(
                **{
                    "num_envs": 2,
                    "single_observation_space": BOX,
                    "single_action_space": BOX,
                    **arguments,
                }
            )
        with pytest.raises((ValueError, TypeError), match=match):
            Signature(2, BOX, BOX).replace(**arguments)


def test_signature_is_frozen_and_replace_returns_another():
    signature = Signature(2, BOX, spaces.Discrete(2), max_episode_steps=9)
    other = signature.replace(single_observation_space=spaces.Discrete(4))
    with pytest.raises(AttributeError):
        signature.num_envs = 3
    assert (signature.single_observation_space, other.single_observation_space) == (
        BOX,
        spaces.Discrete(4),
    )
    assert (other.num_envs, other.single_action_space, other.max_episode_steps) == (
        2,
        spaces.Discrete(2),
        9,
    )


def test_signature_stream_is_independent_of_all_others():
    signature, words = Signature(3, BOX, BOX, first_index=5), []
    for _ in range(4):
        stream, signature = signature.stream()
        stream.seed(1, RowMask.full(3))
        assert stream.env.tolist() == [5, 6, 7]
        words.append(tensors.sample(BOX, stream))
    env = tw.FunctionalEnv(tw.envs.cartpole.CartPole(), 3, first_index=5)
    assert len({env.stream.tag, env.action_stream.tag, *range(2, 6)}) == 6
    assert len(torch.cat(words).unique(dim=0)) == 12
