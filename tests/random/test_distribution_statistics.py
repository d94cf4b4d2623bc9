"""Random numbers follow their distributions and are independent, in samples of half a million and of ten million."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import ks_distance

from torchwrap import RowMask, random
from torchwrap.random import Stream

COUNT = 2**19
P = [0.1, 0.2, 0.0, 0.3, 0.4]
CDFS = {"uniform": lambda x: x, "normal": torch.special.ndtr, "exponential": lambda x: 1 - torch.exp(-x)}


def half_a_million(draw):
    """Half a million numbers of one env, and one number of each of half a million envs."""
    return torch.stack([draw(Stream(1, seed=1).key(), (COUNT,))[0], draw(Stream(COUNT, seed=2).key(), (1,))[:, 0]]).double()


@pytest.mark.parametrize(
    "name, mean, variance, fourth", [("uniform", 0.5, 1 / 12, 1 / 80), ("normal", 0, 1, 3), ("exponential", 1, 1, 9)]
)
def test_draws_follow_their_cdf_and_have_its_moments(name, mean, variance, fourth):
    error = 5 / math.sqrt(COUNT)
    for sample in half_a_million(getattr(random, name)):
        assert ks_distance(sample, CDFS[name]) < 1.95 / math.sqrt(COUNT)  # exceeded once in a thousand
        assert abs(sample.mean() - mean) < error * math.sqrt(variance)
        assert abs(sample.var() - variance) < error * math.sqrt(fourth - variance**2)
        centred = (sample - sample.mean()) ** 4
        assert abs(centred.mean() - fourth) < error * centred.std()
        low, high = {"uniform": (3e-5, 1 - 3e-5), "normal": (-4.4, 4.4), "exponential": (3e-5, 12)}[name]
        assert sample.min() < low and sample.max() > high and sample.isfinite().all()
        assert name == "normal" or sample.min() >= 0
        assert name != "uniform" or sample.max() < 1


def test_uniform_draws_are_the_upper_bits_of_their_words():
    key = Stream(3, seed=1).key()
    words = random.bits(key, 200).tolist()
    assert (random.uniform(key, (200,)) * 2**24).tolist() == [[word >> 8 for word in row] for row in words]
    pairs = [[(high >> 5) * 2**26 + (low >> 6) for high, low in zip(row[::2], row[1::2], strict=True)] for row in words]
    assert (random.uniform(key, (100,), torch.float64) * 2**53).tolist() == pairs


def test_integers_are_equally_frequent():
    for count in (1, 2, 3, 10, 97, 1000):
        frequency = torch.bincount(random.integers(Stream(1, seed=1).key(), count, (COUNT,))[0], minlength=count).double()
        assert len(frequency) == count
        expected = COUNT / count
        chi_square = ((frequency - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (count - 1)) <= 4 * math.sqrt(2 * count)


def test_integers_of_large_and_of_several_counts_cover_their_ranges():
    for count in (2**31, 2**31 - 1, 2**30 + 1):
        drawn = random.integers(Stream(1, seed=1).key(), count, (COUNT,))
        assert drawn.dtype == torch.int64
        assert 0 <= drawn.min() < count * 3e-5 and count * (1 - 3e-5) < drawn.max() < count
    counts = torch.tensor([[1, 2, 3], [10, 100, 2**31]])
    drawn = random.integers(Stream(50_000, seed=1).key(), counts, (2, 3))
    assert (drawn >= 0).all() and (drawn < counts).all()
    assert torch.allclose(drawn.double().mean(0), (counts.double() - 1) / 2, rtol=0.02)


def test_draws_of_neighbouring_streams_envs_episodes_and_steps_are_uncorrelated():
    count = 100_000
    one = random.normal(Stream(1, seed=1).key(), (count,))[0]
    others = [dict(seed=2), dict(seed=1, tag=1), dict(seed=1, first_index=1), dict(seed=1 + 2**32), dict(seed=1 + 2**63)]
    pairs = [(one, random.normal(Stream(1, **what).key(), (count,))[0]) for what in others]
    stream = Stream(count, seed=1)
    first = random.normal(stream.key())
    stream.next_draw()
    second = random.normal(stream.key())
    stream.next_episode(RowMask.full(count))
    third = random.normal(stream.key())
    for a, b in [*pairs, (first, second), (first, third), (second, third), (first[1:], first[:-1])]:
        assert abs((a * b).mean()) < 5 / math.sqrt(count)


# Ten million numbers of a thousand envs, ten episodes, ten steps and a hundred words.


def ten_million(draw, num_envs=1000, **what):
    """Numbers `(episodes, steps, *shape)`, where `draw(key)` returns `shape`."""
    stream, drawn = Stream(num_envs, **{"seed": 1, **what}), []
    for _ in range(10):
        stream.next_episode(RowMask.full(num_envs))
        for _ in range(10):
            drawn.append(draw(stream.key()))
            stream.next_draw()
    return torch.stack(drawn).unflatten(0, (10, 10))


def assert_likely(p, what):
    assert 1e-4 < p < 1 - 1e-4, (what, p)


def chi_square_p(chi_square, freedom):
    return torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.as_tensor(chi_square / 2).double()).item()


def assert_frequencies(values, expected, what=None):
    """Values in [0, len(expected)) occur with these probabilities."""
    expected = torch.as_tensor(expected).double()
    frequency = torch.bincount(values.flatten(), minlength=len(expected)).double()
    assert len(frequency) == len(expected) and not frequency[expected == 0].any()
    frequency, expected = frequency[expected > 0], expected[expected > 0] * values.numel()
    chi_square = ((frequency - expected) ** 2 / expected).sum().item()
    assert_likely(chi_square_p(chi_square, len(expected) - 1), what)


def kolmogorov_p(distance, count):
    # The asymptotic distribution with the correction of Stephens (1970).
    x = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    return 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))


@pytest.fixture(scope="module")
def words():
    return ten_million(lambda key: random.bits(key, 100))


def ones_of_bits(words):
    counts = [torch.bincount((words >> shift & 0xFF).flatten(), minlength=256) for shift in (0, 8, 16, 24)]
    return (torch.stack(counts) @ (torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1)).flatten()


@pytest.mark.full
def test_bytes_and_bits_of_ten_million_words_are_equally_frequent_and_uncorrelated(words):
    for shift in (0, 8, 16, 24):
        assert_frequencies(words >> shift & 0xFF, [1 / 256] * 256, shift)
    squares = (2 * ones_of_bits(words) - words.numel()).double() ** 2 / words.numel()
    assert squares.max() < 5**2
    assert_likely(chi_square_p(squares.sum().item(), 32), "all bits")
    flat = words.flatten()
    for differing in (flat ^ flat >> 1, flat[1:] ^ flat[:-1]):  # within a word, from word to word
        r = 1 - 2 * ones_of_bits(differing)[:31] / len(differing)
        assert r.abs().max() < 4 / math.sqrt(len(differing))


@pytest.mark.full
def test_ten_million_words_are_uncorrelated_with_their_neighbours_and_with_other_keys(words):
    centred = words.double() / 2**32 - 0.5
    for dim in range(4):  # episodes, draws, envs, words
        length = centred.shape[dim] - 1
        r = 12 * (centred.narrow(dim, 0, length) * centred.narrow(dim, 1, length)).mean().item()
        assert abs(r) < 4 / math.sqrt(words.numel() * length / (length + 1)), dim
    others = [lambda key: key.fold_in(1), lambda key: key.fold_in(255), lambda key: key._replace(tag=key.tag + 1)]
    streams = [dict(tag=1), dict(seed=2), dict(seed=1 + 2**32)]
    for other, what in [*[(other, {}) for other in others], *[(lambda key: key, what) for what in streams]]:
        drawn = ten_million(lambda key, other=other: random.bits(other(key), 100), **what)
        r = 12 * (centred * (drawn.double() / 2**32 - 0.5)).mean().item()
        assert abs(r) < 4 / math.sqrt(words.numel())


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CDFS)
def test_ten_million_draws_follow_their_cdf(name, dtype):
    sample = ten_million(lambda key: getattr(random, name)(key, (100,), dtype)).flatten()
    assert_likely(kolmogorov_p(ks_distance(sample, CDFS[name]), len(sample)), name)


@pytest.mark.full
def test_ten_million_integers_and_choices_follow_their_probabilities():
    for count in (2, 3, 6, 10, 1000):
        drawn = ten_million(lambda key, count=count: random.integers(key, count, (100,)))
        assert_frequencies(drawn, [1 / count] * count, count)
    p = torch.tensor(P, dtype=torch.float64)
    assert_frequencies(ten_million(lambda key: random.choice(key, 5, (100,), p)), P)
    weights = torch.tensor([[2.0, 2, 2, 2], [3, 2, 4, 5], [4, 2, 6, 8], [5, 2, 8, 11]], dtype=torch.float64)
    p_of_each_env = weights / weights.sum(-1, keepdim=True)
    for row, p in zip(random.choice(Stream(4, seed=1).key(), 4, (10**6,), p_of_each_env), p_of_each_env, strict=True):
        assert_frequencies(row, p)


@pytest.mark.full
@pytest.mark.parametrize("n, num_envs", [(3, 33_334), (5, 20_000)])
def test_ten_million_permutations_have_equally_frequent_orders(n, num_envs):
    drawn = ten_million(lambda key: random.permutation(key, n), num_envs).reshape(-1, n)
    codes = (drawn * n ** torch.arange(n)).sum(-1)
    orders = torch.tensor([sum(v * n**i for i, v in enumerate(order)) for order in itertools.permutations(range(n))])
    assert torch.isin(codes, orders).all()
    assert_frequencies(torch.searchsorted(orders.sort().values, codes), [1 / len(orders)] * len(orders))
    for position in range(n):
        assert_frequencies(drawn[:, position], [1 / n] * n, position)
