"""Random numbers follow their distributions and are independent, in samples of half a million."""

import math

import pytest
import torch
from helpers import ks_distance

from torchwrap import random
from torchwrap.random import Stream

COUNT = 2**19


def one_key(**arguments):
    return Stream(1, **{"seed": 1, **arguments}).key()


# The CDF; mean, variance and fourth central moment; and bounds that the sample has to cross.
UNIFORM = (
    lambda x: x,
    (0.5, 1 / 12, 1 / 80),
    (3e-5, 1 - 3e-5),
)
NORMAL = (
    torch.special.ndtr,
    (0, 1, 3),
    (-4.4, 4.4),
)
EXPONENTIAL = (
    lambda x: 1 - torch.exp(-x),
    (1, 1, 9),
    (3e-5, 12),
)
DISTRIBUTIONS = {"uniform": UNIFORM, "normal": NORMAL, "exponential": EXPONENTIAL}


@pytest.mark.parametrize("source", ["one env", "many envs"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_their_cdf_and_have_its_moments(name, source):
    cdf, (mean, variance, fourth), (low, high) = DISTRIBUTIONS[name]
    draw = getattr(random, name)
    if source == "one env":
        sample = draw(one_key(), shape=(COUNT,)).double().flatten()
    else:
        sample = draw(Stream(COUNT, seed=2).key()).double()
    assert ks_distance(sample, cdf) < 1.95 / math.sqrt(COUNT)  # exceeded once in a thousand
    error = 5 / math.sqrt(COUNT)
    centred = (sample - sample.mean()) ** 4
    assert abs(sample.mean() - mean) < error * math.sqrt(variance)
    assert abs(sample.var() - variance) < error * math.sqrt(fourth - variance**2)
    assert abs(centred.mean() - fourth) < error * centred.std()
    assert sample.min() < low and sample.max() > high and sample.isfinite().all()
    assert name == "normal" or sample.min() >= 0
    assert name != "uniform" or sample.max() < 1


def test_uniform_draws_are_the_upper_bits_of_their_words():
    key = Stream(3, seed=1).key()
    words = random.bits(key, 200)
    single = random.uniform(key, shape=(200,))
    assert torch.equal(single * 2**24, (words >> 8).float())
    double = random.uniform(key, shape=(100,), dtype=torch.float64)
    for numbers, row in zip(double.tolist(), words.tolist(), strict=True):
        pairs = zip(row[::2], row[1::2], strict=True)
        expected = [(high >> 5) * 2**26 + (low >> 6) for high, low in pairs]
        assert [number * 2**53 for number in numbers] == expected
