import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import params
from space_cases import SPACES, assert_equal_arrays, every_space

from torchwrap import spaces as tensors
from torchwrap.random import Stream
from torchwrap.testing import ScriptedEnv

LEAVES = {
    name: space
    for name, space in SPACES.items()
    if not isinstance(space, spaces.Dict | spaces.Tuple)
}


def draws(space, count, seed=1):
    return tensors.sample(space, Stream(count, seed=seed))


@every_space
def test_samples_are_members_that_a_seed_repeats_in_every_shard(space):
    stream, shard = Stream(500, seed=1), Stream(7, first_index=20, seed=1)
    first, second = tensors.sample(space, stream), tensors.sample(space, stream)
    assert tensors.contains(space, first) and first.shape[0] == 500
    assert (
        tensors.flatten(space, first, torch.float64)
        != tensors.flatten(space, second, torch.float64)
    ).any()
    assert_equal_arrays(tensors.sample(space, shard), first[20:27])
    assert_equal_arrays(tensors.sample(space, shard), second[20:27])


def two_sample_distance(one, other):
    """The Kolmogorov-Smirnov distance of two samples of one size."""
    both = np.sort(np.concatenate([one, other]))
    return np.abs(
        np.searchsorted(np.sort(one), both, "right")
        - np.searchsorted(np.sort(other), both, "right")
    ).max() / len(one)


@pytest.mark.parametrize(
    "space", params(LEAVES, quick=["each its own", "int64", "Discrete start", "MultiBinary"])
)
def test_sample_has_the_distribution_of_gymnasium(space):
    count = 5000
    ours = draws(space, count).double().reshape(count, -1).numpy()
    space.seed(0)
    theirs = np.stack([space.sample() for _ in range(count)]).astype(np.float64).reshape(count, -1)
    for column in range(min(ours.shape[1], 5)):
        assert two_sample_distance(ours[:, column], theirs[:, column]) < 1.95 * math.sqrt(
            2 / count
        )  # once in a thousand


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sample_of_a_box_has_the_moments_of_its_kind_of_bound(dtype):
    for low, high, mean, deviation in (
        (-2, 6, 2, 8 / math.sqrt(12)),
        (-np.inf, np.inf, 0, 1),
        (3, np.inf, 4, 1),
        (-np.inf, -3, -4, 1),
        (5, 5, 5, 0),
    ):
        value = draws(spaces.Box(low, high, (4,), dtype), 50_000).double()
        assert torch.allclose(
            value.mean(0), torch.tensor(float(mean), dtype=torch.float64), atol=0.03
        )
        assert torch.allclose(
            value.std(0), torch.tensor(float(deviation), dtype=torch.float64), atol=0.03
        )
        assert value.min() >= low and value.max() <= high
        assert value.min() < (mean - 3 if np.isinf(low) else low + 1e-3)
        assert value.max() > (mean + 3 if np.isinf(high) else high - 1e-3)
        assert deviation == 0 or (torch.corrcoef(value.T) - torch.eye(4)).abs().max() < 0.03


def test_sample_of_a_very_wide_box_is_a_member():
    for limit, dtype in ((3e38, np.float32), (6e4, np.float16), (1e300, np.float64)):
        space = spaces.Box(-limit, limit, (3,), dtype)
        value = draws(space, 1000)
        assert tensors.contains(space, value) and len(value.unique()) > 500


def test_sample_of_a_finite_space_has_equally_frequent_values():
    for space, values in (
        (spaces.Box(-2, 3, (2,), np.int64), range(-2, 4)),
        (spaces.Box(250, 255, (2,), np.uint8), range(250, 256)),
        (spaces.Box(-128, 127, (2,), np.int8), range(-128, 128)),
        (spaces.Discrete(4, start=-6), range(-6, -2)),
        (spaces.Discrete(1, start=9), [9]),
        (spaces.MultiDiscrete([3, 3], start=[2, 2]), range(2, 5)),
        (spaces.MultiBinary(3), [0, 1]),
    ):
        found, frequency = draws(space, 50_000).flatten().long().unique(return_counts=True)
        assert found.tolist() == list(values)
        expected = frequency.sum() / len(found)
        chi_square = ((frequency - expected) ** 2 / expected).sum().item()
        assert chi_square < len(found) - 1 + 4 * math.sqrt(2 * len(found))


def test_sample_of_a_nested_space_has_independent_leaves():
    value = draws(
        spaces.Dict(
            {"a": spaces.Box(0, 1), "b": spaces.Tuple([spaces.Box(0, 1), spaces.Box(0, 1)])}
        ),
        20_000,
    )
    columns = torch.cat([value["a"], value["b", "0"], value["b", "1"]], -1)
    assert (torch.corrcoef(columns.T) - torch.eye(3)).abs().max() < 0.04


@pytest.mark.cuda
@every_space
def test_sample_on_cuda_matches_the_cpu(space):
    on_cuda, on_cpu = (
        tensors.sample(space, Stream(100, device=device, seed=1)) for device in ("cuda", "cpu")
    )
    flat = tensors.flatten(space, on_cpu, torch.float64)
    assert torch.allclose(
        tensors.flatten(space, on_cuda, torch.float64).cpu(), flat, rtol=1e-5, atol=1e-5
    )


def test_sampler_keeps_constants_that_move_and_are_no_state():
    env = ScriptedEnv(2, action_space=spaces.Box(-1, np.float32([1, 2])))
    assert dict(env.action_sampler.named_buffers()) and not env.state_dict()
    env.reset()
    assert not [
        name for name in env.snapshot()["buffers"].keys() if name.startswith("action_sampler")
    ]
    assert {buffer.device.type for buffer in env.to("meta").action_sampler.buffers()} == {"meta"}
