import numpy as np
import pytest
import torch
from gymnasium import spaces
from space_cases import BOX, DISCRETE_HAS_DTYPE, INF, batch, every_space
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
    _, value = batch(space)
    assert tensors.contains(space, tensors.from_numpy(space, value))


HALF_BOUNDED = spaces.Box(np.float32([-INF, 0]), np.float32([0, INF]))
SHIFTED = spaces.MultiDiscrete([2, 3], start=[5, -1])
MEMBERS = [  # a space, members, and others
    (spaces.Box(-1, 2, (2,)), [[-1, 2], [0, 0]], [[-1.1, 0], [np.nan, 0], [0, INF]]),
    (HALF_BOUNDED, [[-1e30, 1e30]], [[1, 0], [0, -1]]),
    (spaces.Box(3, 7, (1,), np.uint8), [[3], [7]], [[2], [8], [255]]),
    (spaces.Discrete(3, start=5), [5, 7], [4, 8, 0]),
    (SHIFTED, [[5, -1], [6, 1]], [[4, 0], [7, 0], [5, -2], [5, 2]]),
    (spaces.MultiBinary(2), [[0, 1]], [[0, 2], [-1, 0]]),
]


def is_accepted(space, value):
    try:
        tensors.check("E", "it", space, value, 2, CPU)
    except ValueError as error:
        assert "it" in str(error)
        return False
    return True


@pytest.mark.parametrize(("space", "members", "others"), MEMBERS, ids=str)
def test_contains_and_check_match_gymnasium(space, members, others):
    for row in [*members, *others]:
        array = np.asarray([row, members[0]]).astype(space.dtype)
        value = torch.from_numpy(array)
        is_member = row in members
        assert space.contains(array[0]) is is_member
        assert tensors.contains(space, value) is is_member
        # The bounds of a Box are not checked.
        assert is_accepted(space, value) is (is_member or isinstance(space, spaces.Box))


DICT = spaces.Dict({"a": BOX})
ROWS = torch.zeros(2, 3)
STRANGERS = {
    "last shape": (BOX, torch.zeros(2, 4)),
    "dtype": (BOX, ROWS.double()),
    "array": (BOX, ROWS.numpy()),
    "column": (spaces.Discrete(3), torch.zeros(2, 1, dtype=torch.int64)),
    "no TensorDict": (DICT, ROWS),
    "further key": (DICT, TensorDict({"a": ROWS, "b": ROWS}, [2])),
    "key of a Tuple": (spaces.Tuple([BOX]), TensorDict({"a": ROWS}, [2])),
}


@pytest.mark.parametrize(("space", "value"), STRANGERS.values(), ids=STRANGERS)
def test_contains_rejects_another_shape_dtype_or_structure(space, value):
    assert tensors.contains(space, value) is False


# Spaces that are not supported.

USES = {
    "observation": lambda space: Signature(2, space, BOX),
    "action": lambda space: Signature(2, BOX, space),
    "zeros": lambda space: tensors.zeros(space, 2),
    "sample": lambda space: tensors.sample(space, Stream(2)),
    "contains": lambda space: tensors.contains(space, tensors.build(space, lambda *_: ROWS, 2)),
}
UNSUPPORTED = [
    spaces.Text(5),
    spaces.Graph(BOX, None),
    spaces.Sequence(BOX),
    spaces.OneOf([BOX]),
    spaces.Box(-1, 1, (2,), np.longdouble),
    spaces.Box(0, 60_000, (2,), np.uint16),
    spaces.Box(0, 2**32 - 1, (2,), np.uint32),
    spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    spaces.MultiDiscrete([3, 5], dtype=np.uint32),
]
if DISCRETE_HAS_DTYPE:
    UNSUPPORTED.append(spaces.Discrete(3, dtype=np.uint16))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("space", UNSUPPORTED, ids=str)
def test_unsupported_space_raises_wherever_it_is_nested(space, use):
    for nested in (
        space,
        spaces.Dict({"a": BOX, "b": space}),
        spaces.Tuple([BOX, space]),
    ):
        with pytest.raises(TypeError, match=f"space.*{type(space).__name__}"):
            use(nested)


EMPTY = [
    spaces.Dict({}),
    spaces.Tuple([]),
    spaces.Dict({"a": spaces.Tuple([])}),
]


@pytest.mark.parametrize("space", EMPTY, ids=str)
def test_empty_space_raises(space):
    with pytest.raises(ValueError, match="subspace"):
        Signature(2, space, BOX)


# Signatures.


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "cpu", "meta"])
def test_device_of_a_signature_equals_that_of_its_tensors(device):
    with FakeTensorMode():  # has CUDA without a GPU
        signature = Signature(2, BOX, BOX, device)
        tensor = torch.empty(2, device=device)
        assert signature.device == signature.replace(num_envs=3).device == tensor.device
    assert signature.device.index == (0 if signature.device.type == "cuda" else None)


INVALID = [
    *[("num_envs", value) for value in (0, True, 2.0, "2")],
    *[("first_index", value) for value in (-1, None)],
    *[("single_observation_space", value) for value in (None, (3,))],
    ("single_action_space", None),
]


@pytest.mark.parametrize(("name", "value"), INVALID, ids=str)
def test_signature_with_an_invalid_value_raises(name, value):
    valid = Signature(2, BOX, BOX)
    with pytest.raises((ValueError, TypeError), match=name.rpartition("_")[2]):
        valid.replace(**{name: value})


def test_signature_is_frozen_and_replace_returns_another():
    signature = Signature(2, BOX, spaces.Discrete(2), max_episode_steps=9)
    with pytest.raises(AttributeError):
        signature.num_envs = 3
    other = signature.replace(single_observation_space=spaces.Discrete(4))
    assert signature.single_observation_space == BOX
    assert other == Signature(
        2,
        spaces.Discrete(4),
        spaces.Discrete(2),
        max_episode_steps=9,
    )


def test_signature_stream_is_independent_of_all_others():
    signature = Signature(3, BOX, BOX, first_index=5)
    words = []
    for name in ("first", "second", "third", "fourth"):
        stream, signature = signature.stream()
        stream.seed(1, RowMask.full(3), name)
        assert stream.env.tolist() == [5, 6, 7]
        words.append(tensors.sample(BOX, stream))
    assert len(torch.cat(words).unique(dim=0)) == 12
    env = tw.FunctionalEnv(tw.envs.cartpole.CartPole(), 3, first_index=5)
    assert len({env.stream.tag, env.action_stream.tag, stream.tag}) == 3
