import pytest
import torch
from gymnasium import spaces
from space_cases import BOX
from torch._subclasses.fake_tensor import FakeTensorMode

import torchwrap as tw
from torchwrap import RowMask, Signature
from torchwrap import spaces as tensors


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "cpu", "meta"])
def test_device_of_a_signature_equals_that_of_its_tensors(device):
    with FakeTensorMode():  # which has CUDA without a GPU
        signature, tensor = Signature(2, BOX, BOX, device), torch.empty(2, device=device)
        assert signature.device == signature.replace(num_envs=3).device == tensor.device
    assert signature.device.index == (0 if signature.device.type == "cuda" else None)


def test_signature_with_invalid_values_raises():
    for arguments, match in (
        ({"num_envs": 0}, "num_envs of at least 1, but got 0"),
        ({"num_envs": True}, "num_envs of at least 1, but got True"),
        ({"num_envs": 2.0}, "num_envs of at least 1, but got 2.0"),
        ({"num_envs": "2"}, "num_envs of at least 1, but got '2'"),
        ({"first_index": -1}, "first_index of at least 0, but got -1"),
        ({"first_index": None}, "first_index of at least 0, but got None"),
        ({"single_observation_space": None}, "A space needs to be Box, .* but got None"),
        ({"single_action_space": (3,)}, "A space needs to be Box, .* but got"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            Signature(**{"num_envs": 2, "single_observation_space": BOX, "single_action_space": BOX, **arguments})
        with pytest.raises((ValueError, TypeError), match=match):
            Signature(2, BOX, BOX).replace(**arguments)


def test_signature_is_frozen_and_replace_returns_another():
    signature = Signature(2, BOX, spaces.Discrete(2), max_episode_steps=9)
    other = signature.replace(single_observation_space=spaces.Discrete(4))
    with pytest.raises(AttributeError):
        signature.num_envs = 3
    assert (signature.single_observation_space, other.single_observation_space) == (BOX, spaces.Discrete(4))
    assert (other.num_envs, other.single_action_space, other.max_episode_steps) == (2, spaces.Discrete(2), 9)


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
