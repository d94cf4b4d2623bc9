"""Random numbers follow their distributions and are independent, in samples of half a million and of ten million."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import ks_distance

from torchwrap import RowMask, random
from torchwrap.random import Stream

COUNT = 2**19
P = [0.1, 0.2, 0.0, 0.3, 0.4]


def half_a_million(draw):
    return torch.stack([draw(Stream(1, seed=1).key(), (COUNT,))[0], draw(Stream(COUNT, seed=2).key(), (1,))[:, 0]]).double()


CDFS = {
    "uniform": lambda x: x,
    "normal": torch.special.ndtr,
    "exponential": lambda x: 1 - torch.exp(-x),
}


# Half a million numbers of one env, and one number of each of half a million envs.


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CDFS)
def test_draws_follow_their_cdf(name, dtype):
    for sample in half_a_million(lambda key, shape: getattr(random, name)(key, shape, dtype)):
        assert ks_distance(sample, CDFS[name]) < 1.95 / math.sqrt(COUNT)  # exceeded once in a thousand


@pytest.mark.parametrize(
    "name, mean, variance, fourth",
    [
        ("normal", 0, 1, 3),
        pytest.param("uniform", 0.5, 1 / 12, 1 / 80, marks=pytest.mark.full),
        pytest.param("exponential", 1, 1, 9, marks=pytest.mark.full),
    ],
)
def test_draws_have_the_moments_of_their_distribution(name, mean, variance, fourth):
    for sample in half_a_million(getattr(random, name)):
        error = 5 / math.sqrt(COUNT)
        assert abs(sample.mean() - mean) < error * math.sqrt(variance)
        assert abs(sample.var() - variance) < error * math.sqrt(fourth - variance**2)
        centred = (sample - sample.mean()) ** 4
        assert abs(centred.mean() - fourth) < error * centred.std()


def test_uniform_draws_reach_zero_but_not_one():
    for sample in half_a_million(random.uniform):
        assert 0 <= sample.min() < 3e-5
        assert 1 - 3e-5 < sample.max() < 1
        assert torch.equal(sample * 2**24, (sample * 2**24).round())


def test_uniform_draws_are_the_upper_bits_of_their_words():
    key = Stream(3, seed=1).key()
    words = random.bits(key, 200).tolist()
    assert (random.uniform(key, (200,)) * 2**24).tolist() == [[word >> 8 for word in row] for row in words]
    pairs = [[(high >> 5) * 2**26 + (low >> 6) for high, low in zip(row[::2], row[1::2], strict=True)] for row in words]
    assert (random.uniform(key, (100,), torch.float64) * 2**53).tolist() == pairs


def test_uniform_draws_in_float64_have_53_bits():
    sample = random.uniform(Stream(1, seed=1).key(), (COUNT,), torch.float64)
    assert sample.min() >= 0 and sample.max() < 1
    multiples = sample * 2.0**53
    assert torch.equal(multiples, multiples.floor())
    assert (multiples.long() % 2).double().mean() == pytest.approx(0.5, abs=0.003)


def test_normal_and_exponential_draws_have_finite_tails():
    normal, exponential = half_a_million(random.normal).flatten(), half_a_million(random.exponential).flatten()
    assert normal.isfinite().all() and exponential.isfinite().all()
    assert normal.min() < -4.4 and normal.max() > 4.4
    assert exponential.min() >= 0 and exponential.max() > 12


@pytest.mark.parametrize("count", [10, *(pytest.param(count, marks=pytest.mark.full) for count in (1, 2, 3, 97, 1000))])
def test_integers_are_equally_frequent(count):
    for sample in half_a_million(lambda key, shape: random.integers(key, count, shape)):
        frequency = torch.bincount(sample.long(), minlength=count).double()
        assert len(frequency) == count
        expected = COUNT / count
        chi_square = ((frequency - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (count - 1)) <= 4 * math.sqrt(2 * count)


@pytest.mark.parametrize("count", [2**31, 2**31 - 1, 2**30 + 1])
def test_integers_of_large_counts_cover_the_range(count):
    drawn = random.integers(Stream(1, seed=1).key(), count, (COUNT,))
    assert drawn.dtype == torch.int64
    assert 0 <= drawn.min() < count * 3e-5
    assert count * (1 - 3e-5) < drawn.max() < count


def test_integers_with_a_tensor_of_counts_stay_below_each_count():
    counts = torch.tensor([[1, 2, 3], [10, 100, 2**31]])
    drawn = random.integers(Stream(50_000, seed=1).key(), counts, (2, 3))
    assert (drawn >= 0).all() and (drawn < counts).all()
    assert torch.allclose(drawn.double().mean(0), (counts.double() - 1) / 2, rtol=0.02)


@pytest.mark.parametrize(
    "one, other",
    [
        (dict(seed=1), dict(seed=2)),
        (dict(seed=1), dict(seed=1, tag=1)),
        (dict(seed=1), dict(seed=1, first_index=1)),
        (dict(seed=1), dict(seed=1 + 2**32)),
        (dict(seed=0), dict(seed=2**63)),
    ],
    ids=str,
)
def test_draws_of_neighbouring_streams_are_uncorrelated(one, other):
    first, second = (random.normal(Stream(1, **what).key(), (100_000,))[0] for what in (one, other))
    assert abs((first * second).mean()) < 5 / math.sqrt(100_000)


def test_draws_of_neighbouring_envs_episodes_and_steps_are_uncorrelated():
    stream = Stream(100_000, seed=1)
    first = random.normal(stream.key())
    stream.next_draw()
    second = random.normal(stream.key())
    stream.next_episode(RowMask.full(100_000))
    third = random.normal(stream.key())
    for a, b in ((first, second), (first, third), (second, third), (first[1:], first[:-1])):
        assert abs((a * b).mean()) < 5 / math.sqrt(100_000)


# Ten million numbers of half_a_million envs, episodes, steps and words.


EPISODES, STEPS, ENVS, WORDS = 10, 10, 1000, 100


def ten_million(draw, num_envs=ENVS, **what):
    """Numbers `(EPISODES, STEPS, *shape)`, where `draw(key)` returns `shape`."""
    stream, drawn = Stream(num_envs, **{"seed": 1, **what}), []
    for _ in range(EPISODES):
        stream.next_episode(RowMask.full(num_envs))
        for _ in range(STEPS):
            drawn.append(draw(stream.key()))
            stream.next_draw()
    return torch.stack(drawn).unflatten(0, (EPISODES, STEPS))


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
    return ten_million(lambda key: random.bits(key, WORDS))


def frequencies_of_bytes(words):
    return torch.stack([torch.bincount((words >> shift & 0xFF).flatten(), minlength=256) for shift in (0, 8, 16, 24)])


def ones_of_bits(words):
    return (frequencies_of_bytes(words) @ (torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1)).flatten()


@pytest.mark.full
def test_bytes_of_ten_million_words_are_equally_frequent(words):
    expected = words.numel() / 256
    for number, frequency in enumerate(frequencies_of_bytes(words)):
        assert_likely(chi_square_p(((frequency - expected) ** 2 / expected).sum().item(), 255), number)


@pytest.mark.full
def test_bits_of_ten_million_words_are_set_half_the_time(words):
    squares = (2 * ones_of_bits(words) - words.numel()).double() ** 2 / words.numel()
    assert squares.max() < 5**2
    assert_likely(chi_square_p(squares.sum().item(), 32), "all bits")


@pytest.mark.full
def test_bits_of_ten_million_words_are_uncorrelated_with_their_neighbours(words):
    flat = words.flatten()
    for differing in (flat ^ flat >> 1, flat[1:] ^ flat[:-1]):  # within a word, from word to word
        r = 1 - 2 * ones_of_bits(differing)[:31] / len(differing)
        assert r.abs().max() < 4 / math.sqrt(len(differing))


@pytest.mark.full
@pytest.mark.parametrize("dim", range(4), ids=["episodes", "draws", "envs", "words"])
def test_ten_million_words_are_uncorrelated_with_their_neighbours(words, dim):
    centred = words.double() / 2**32 - 0.5
    length = centred.shape[dim] - 1
    r = 12 * (centred.narrow(dim, 0, length) * centred.narrow(dim, 1, length)).mean().item()
    assert abs(r) < 4 / math.sqrt(words.numel() * length / (length + 1))


OTHERS = {
    "fold_in(1)": (lambda key: key.fold_in(1), {}),
    "fold_in(255)": (lambda key: key.fold_in(255), {}),
    "next tag": (lambda key: key._replace(tag=key.tag + 1), {}),
    "next stream": (lambda key: key, dict(tag=1)),
    "next seed": (lambda key: key, dict(seed=2)),
    "seed's upper half": (lambda key: key, dict(seed=1 + 2**32)),
}


@pytest.mark.full
@pytest.mark.parametrize("other, what", OTHERS.values(), ids=OTHERS)
def test_ten_million_words_are_uncorrelated_with_other_keys(words, other, what):
    others = ten_million(lambda key: random.bits(other(key), WORDS), **what)
    r = 12 * ((words.double() / 2**32 - 0.5) * (others.double() / 2**32 - 0.5)).mean().item()
    assert abs(r) < 4 / math.sqrt(words.numel())


@pytest.mark.full
@pytest.mark.parametrize(
    "name, dtype", [("uniform", torch.float32), ("uniform", torch.float64), ("normal", None), ("exponential", None)]
)
def test_ten_million_draws_follow_their_cdf(name, dtype):
    sample = ten_million(lambda key: getattr(random, name)(key, (WORDS,), dtype or torch.float32)).flatten().double()
    sample = torch.from_numpy(np.sort(sample.numpy()))
    assert_likely(kolmogorov_p(ks_distance(sample, CDFS[name]), len(sample)), name)


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3, 6, 10, 1000])
def test_ten_million_integers_are_equally_frequent(count):
    assert_frequencies(ten_million(lambda key: random.integers(key, count, (WORDS,))), [1 / count] * count, count)


@pytest.mark.full
def test_ten_million_choices_follow_their_probabilities():
    p = torch.tensor(P, dtype=torch.float64)
    assert_frequencies(ten_million(lambda key: random.choice(key, 5, (WORDS,), p)), P)


@pytest.mark.full
def test_choices_follow_the_probabilities_of_each_env():
    key = Stream(4, seed=1).key()
    weights = torch.tensor([[2.0, 2, 2, 2], [3, 2, 4, 5], [4, 2, 6, 8], [5, 2, 8, 11]], dtype=torch.float64)
    p_of_each_env = weights / weights.sum(-1, keepdim=True)
    drawn = random.choice(key, 4, (10**6,), p_of_each_env)
    for row, p in zip(drawn, p_of_each_env, strict=True):
        assert_frequencies(row, p)


@pytest.mark.full
@pytest.mark.parametrize("n, num_envs", [(3, 33_334), (5, 20_000)])
def test_ten_million_permutations_have_equally_frequent_orders(n, num_envs):
    drawn = ten_million(lambda key: random.permutation(key, n), num_envs).reshape(-1, n)
    codes = (drawn * n ** torch.arange(n)).sum(-1)
    orders = torch.tensor(
        [sum(value * n**position for position, value in enumerate(o)) for o in itertools.permutations(range(n))]
    )
    assert_frequencies(torch.searchsorted(orders.sort().values, codes), [1 / len(orders)] * len(orders))
    assert torch.isin(codes, orders).all()
    for position in range(n):
        assert_frequencies(drawn[:, position], [1 / n] * n, position)
