import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import ks_distance, params
from space_cases import SPACES, assert_equal_arrays, every_space

from torchwrap import spaces as tensors
from torchwrap.random import Stream
from torchwrap.testing import ScriptedEnv

NESTED = ("Dict", "Tuple", "deep")
LEAVES = {name: space for name, space in SPACES.items() if name not in NESTED}


def draw(space, count):
    return tensors.sample(space, Stream(count, seed=1))


@every_space
def test_samples_are_members_that_a_seed_repeats_in_every_shard(space):
    stream = Stream(500, seed=1)
    shard = Stream(7, first_index=20, seed=1)
    samples = [tensors.sample(space, stream) for _ in range(2)]
    for sample in samples:
        assert tensors.contains(space, sample) and sample.shape[0] == 500
        assert_equal_arrays(tensors.sample(space, shard), sample[20:27])
    first, second = [tensors.flatten(space, sample, torch.float64) for sample in samples]
    assert (first != second).any()


def two_sample_distance(one, other):
    """The Kolmogorov-Smirnov distance of two samples of one size."""
    both = np.sort(np.concatenate([one, other]))
    ranks = [np.searchsorted(np.sort(sample), both, "right") for sample in (one, other)]
    return np.abs(ranks[0] - ranks[1]).max() / len(one)


QUICK = ["each its own", "int64", "Discrete start", "MultiBinary"]


@pytest.mark.parametrize("space", params(LEAVES, quick=QUICK))
def test_sample_has_the_distribution_of_gymnasium(space):
    count = 20_000
    ours = draw(space, count).double().reshape(count, -1).numpy()
    space.seed(0)
    theirs = [space.sample() for _ in range(count)]
    theirs = np.array(theirs, np.float64).reshape(count, -1)
    bound = 1.95 * math.sqrt(2 / count)  # exceeded once in a thousand
    for column in range(min(ours.shape[1], 5)):
        assert two_sample_distance(ours[:, column], theirs[:, column]) < bound


FINITE = [
    (
        spaces.Box(-2, 3, (2,), np.int64),
        range(-2, 4),
    ),
    (
        spaces.Box(250, 255, (2,), np.uint8),
        range(250, 256),
    ),
    (
        spaces.Box(-128, 127, (2,), np.int8),
        range(-128, 128),
    ),
    (
        spaces.Discrete(4, start=-6),
        range(-6, -2),
    ),
    (spaces.Discrete(1, start=9), [9]),
    (spaces.Box(5, 5, (2,)), [5]),
    (
        spaces.Box(2**60 + 1, 2**60 + 3, (2,), np.int64),
        range(2**60 + 1, 2**60 + 4),
    ),
    (
        spaces.MultiDiscrete([3, 3], start=[2, 2]),
        range(2, 5),
    ),
    (spaces.MultiBinary(3), [0, 1]),
]


@pytest.mark.parametrize(("space", "values"), FINITE, ids=str)
def test_sample_of_a_finite_space_has_equally_frequent_values(space, values):
    found, frequency = draw(space, 50_000).flatten().long().unique(return_counts=True)
    assert found.tolist() == list(values)
    expected = frequency.sum() / len(found)
    chi_square = ((frequency - expected) ** 2 / expected).sum().item()
    degrees = len(found) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * (degrees + 1))


# The allowed values of each component, and a mask of them in the layout of sb3-contrib
MASKED = [
    (spaces.Discrete(4, start=3), [[3, 6]], [1, 0, 0, 1]),
    (spaces.MultiDiscrete([3, 2], start=[1, -1]), [[2, 3], [-1]], [0, 1, 1, 1, 0]),
    (spaces.MultiBinary(2), [[0, 1], [1]], [1, 1, 0, 1]),
]


@pytest.mark.parametrize(("space", "allowed", "mask"), MASKED, ids=str)
def test_masked_sample_has_equally_frequent_allowed_values(space, allowed, mask):
    env = ScriptedEnv(4000, action_space=space)
    env.reset(seed=0)
    actions = env.sample_action(torch.tensor(mask).expand(4000, -1))
    for component, values in zip(actions.view(4000, -1).unbind(1), allowed, strict=True):
        found, counts = component.unique(return_counts=True)
        assert found.tolist() == values
        assert (counts - 4000 / len(values)).abs().max() < 150


def test_mask_of_another_number_of_actions_is_refused():
    env = ScriptedEnv(2, action_space=spaces.Discrete(4))
    with pytest.raises(ValueError, match="action_masks"):
        env.sample_action(torch.ones(2, 3))


WIDE = [
    spaces.Discrete(3_000_000_000),
    spaces.Discrete(2**32, start=-5),
    spaces.Box(-(2**63), 2**63 - 1, (), np.int64),
]


@pytest.mark.parametrize("space", WIDE, ids=str)
def test_sample_of_a_wide_space_is_inside_and_uniform(space):
    sample = draw(space, 20_000)
    assert tensors.contains(space, sample)
    lowest, count = getattr(space, "start", -(2.0**63)), getattr(space, "n", 2.0**64)
    fractions = (sample.double() - float(lowest)) / float(count)
    assert ks_distance(fractions, lambda value: value) < 1.95 / math.sqrt(len(sample))


@pytest.mark.cuda
@every_space
def test_sample_on_cuda_matches_the_cpu(space):
    flat = []
    for device in ("cuda", "cpu"):
        sample = tensors.sample(space, Stream(100, device=device, seed=1))
        flat.append(tensors.flatten(space, sample, torch.float64).cpu())
    assert torch.allclose(*flat, rtol=1e-5, atol=1e-5)


def test_sampler_keeps_constants_that_move_and_are_no_state():
    env = ScriptedEnv(2, action_space=spaces.Box(-1, np.float32([1, 2])))
    assert dict(env.action_sampler.named_buffers()) and not env.state_dict()
    env.reset()
    assert "action_sampler" not in " ".join(env.snapshot()["buffers"].keys())
    buffers = env.to("meta").action_sampler.buffers()
    assert {buffer.device.type for buffer in buffers} == {"meta"}
