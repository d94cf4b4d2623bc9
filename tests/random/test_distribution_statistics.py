"""Random numbers follow their distributions and are independent, in samples of half a million and more."""

import itertools
import math

import pytest
import torch
from helpers import ks_distance

from torchwrap import RowMask, random
from torchwrap.random import Stream

COUNT = 2**19
P = [0.1, 0.2, 0.0, 0.3, 0.4]
CDFS = {
    "uniform": lambda x: x,
    "normal": torch.special.ndtr,
    "exponential": lambda x: 1 - torch.exp(-x),
}


def half_a_million(draw):
    """Half a million numbers of one env, and one number of each of half a million envs."""
    one, many = (
        draw(Stream(1, seed=1).key(), shape=(COUNT,)),
        draw(Stream(COUNT, seed=2).key(), shape=(1,)),
    )
    return torch.stack([one[0], many[:, 0]]).double()


@pytest.mark.parametrize(
    "name, mean, variance, fourth",
    [("uniform", 0.5, 1 / 12, 1 / 80), ("normal", 0, 1, 3), ("exponential", 1, 1, 9)],
)
def test_draws_follow_their_cdf_and_have_its_moments(name, mean, variance, fourth):
    error = 5 / math.sqrt(COUNT)
    for sample in half_a_million(getattr(random, name)):
        assert ks_distance(sample, CDFS[name]) < 1.95 / math.sqrt(
            COUNT
        )  # exceeded once in a thousand
        assert abs(sample.mean() - mean) < error * math.sqrt(variance)
        assert abs(sample.var() - variance) < error * math.sqrt(fourth - variance**2)
        centred = (sample - sample.mean()) ** 4
        assert abs(centred.mean() - fourth) < error * centred.std()
        low, high = {"uniform": (3e-5, 1 - 3e-5), "normal": (-4.4, 4.4), "exponential": (3e-5, 12)}[
            name
        ]
        assert sample.min() < low and sample.max() > high and sample.isfinite().all()
        assert name == "normal" or sample.min() >= 0
        assert name != "uniform" or sample.max() < 1


def test_uniform_draws_are_the_upper_bits_of_their_words():
    key = Stream(3, seed=1).key()
    words = random.bits(key, 200).tolist()
    assert (random.uniform(key, shape=(200,)) * 2**24).tolist() == [
        [word >> 8 for word in row] for row in words
    ]
    pairs = [
        [(high >> 5) * 2**26 + (low >> 6) for high, low in zip(row[::2], row[1::2], strict=True)]
        for row in words
    ]
    assert (random.uniform(key, shape=(100,), dtype=torch.float64) * 2**53).tolist() == pairs


def test_integers_are_equally_frequent():
    for count in (1, 2, 3, 10, 97, 1000):
        drawn = random.integers(Stream(1, seed=1).key(), count, shape=(COUNT,))[0]
        frequency = torch.bincount(drawn, minlength=count).double()
        assert len(frequency) == count
        expected = COUNT / count
        chi_square = ((frequency - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (count - 1)) <= 4 * math.sqrt(2 * count)


def test_integers_of_large_and_of_several_counts_cover_their_ranges():
    for count in (2**31, 2**31 - 1, 2**30 + 1):
        drawn = random.integers(Stream(1, seed=1).key(), count, shape=(COUNT,))
        assert drawn.dtype == torch.int64
        assert 0 <= drawn.min() < count * 3e-5 and count * (1 - 3e-5) < drawn.max() < count
    counts = torch.tensor([[1, 2, 3], [10, 100, 2**31]])
    drawn = random.integers(Stream(50_000, seed=1).key(), counts, shape=(2, 3))
    assert (drawn >= 0).all() and (drawn < counts).all()
    assert torch.allclose(drawn.double().mean(0), (counts.double() - 1) / 2, rtol=0.02)


def test_draws_of_neighbouring_streams_envs_episodes_and_steps_are_uncorrelated():
    count = 100_000
    one = random.normal(Stream(1, seed=1).key(), shape=(count,))[0]
    others = [
        dict(seed=2),
        dict(seed=1, tag=1),
        dict(seed=1, first_index=1),
        dict(seed=1 + 2**32),
        dict(seed=1 + 2**63),
    ]
    pairs = [(one, random.normal(Stream(1, **what).key(), shape=(count,))[0]) for what in others]
    stream = Stream(count, seed=1)
    first = random.normal(stream.key())
    stream.next_draw()
    second = random.normal(stream.key())
    stream.next_episode(RowMask.full(count))
    third = random.normal(stream.key())
    for a, b in [*pairs, (first, second), (first, third), (second, third), (first[1:], first[:-1])]:
        assert abs((a * b).mean()) < 5 / math.sqrt(count)


def assert_frequencies(values, expected):
    """Values in [0, len(expected)) occur with these probabilities: a chi-square test."""
    expected = torch.as_tensor(expected).double()
    frequency = torch.bincount(values.flatten(), minlength=len(expected)).double()
    assert len(frequency) == len(expected) and not frequency[expected == 0].any()
    frequency, expected = frequency[expected > 0], expected[expected > 0] * values.numel()
    half = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    p = torch.special.gammaincc(half, ((frequency - expected) ** 2 / expected).sum() / 2)
    assert 1e-4 < p < 1 - 1e-4


def test_choices_follow_their_probabilities():
    assert_frequencies(
        random.choice(Stream(10, seed=1).key(), 5, (10**5,), torch.tensor(P, dtype=torch.float64)),
        P,
    )
    weights = torch.tensor(
        [[2.0, 2, 2, 2], [3, 2, 4, 5], [4, 2, 6, 8], [5, 2, 8, 11]], dtype=torch.float64
    )
    p_of_each_env = weights / weights.sum(-1, keepdim=True)
    for row, p in zip(
        random.choice(Stream(4, seed=1).key(), 4, (2 * 10**5,), p_of_each_env),
        p_of_each_env,
        strict=True,
    ):
        assert_frequencies(row, p)


def test_permutations_have_equally_frequent_orders():
    for n in (3, 5):
        drawn = random.permutation(Stream(200_000, seed=1).key(), n)
        orders = torch.tensor(
            [
                sum(v * n**i for i, v in enumerate(order))
                for order in itertools.permutations(range(n))
            ]
        )
        index = torch.searchsorted(orders.sort().values, (drawn * n ** torch.arange(n)).sum(-1))
        assert_frequencies(index, [1 / len(orders)] * len(orders))
