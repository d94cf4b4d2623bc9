from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from torchwrap import random
from torchwrap.random import Key, Stream

WORD = 0xFFFFFFFF
COUNT = 2**19


def reference(key, counter):
    # Philox4x32-10 in Python's own integers, after the paper's definition: ten rounds, the key bumped between them.
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for number in range(10):
        if number > 0:
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def words_of(text):
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ("0 0", "0 0 0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_vectors(key, counter, expected):
    given = random.philox(words_of(key), words_of(counter))
    assert " ".join(f"{int(word):08x}" for word in given) == expected
    assert reference([int(w) for w in words_of(key)], [int(w) for w in words_of(counter)]) == tuple(int(w) for w in given)
    # A few numbers are Python's, many are NumPy's, and where there are no values they are PyTorch's.
    many = random.philox(words_of(key), tuple(word.expand(50) for word in words_of(counter)))
    assert all(torch.equal(word.expand(50), others) for word, others in zip(given, many, strict=True))
    batched = torch.vmap(lambda *words: random.philox(words[:2], words[2:]))(*words_of(key), *words_of(counter))
    assert all(torch.equal(word, others) for word, others in zip(given, batched, strict=True))


def test_philox_equals_python_integers_on_random_input():
    inputs = torch.randint(0, 2**32, (2000, 6), generator=torch.Generator().manual_seed(0))
    inputs[:8] = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, WORD - 1, WORD, 5]).unsqueeze(-1)
    k0, k1, *counter = inputs.unbind(-1)
    given = torch.stack(random.philox((k0, k1), tuple(counter)), -1)
    assert given.tolist() == [list(reference(row[:2], row[2:])) for row in inputs.tolist()]


def test_bits_are_philox_of_seed_env_episode_and_draw():
    stream = Stream(3, first_index=5, tag=2, seed=0x0123456789ABCDEF)
    stream.next_episode(torch.tensor([True, True, False]))
    stream.next_draw()
    given = random.bits(stream.key(), 6)
    for row, episode in enumerate(stream.episode.tolist()):
        blocks = [reference((0x89ABCDEF, 0x01234567), (1, (16 << 24) + block, 5 + row, episode % 2**32)) for block in (0, 1)]
        assert given[row].tolist() == [word for block in blocks for word in block][:6]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 4099])
def test_the_first_bits_do_not_depend_on_how_many_are_asked_for(count):
    key = Stream(3, seed=1).key()
    words = random.bits(key, count)
    assert words.shape == (3, count)
    assert torch.equal(words, random.bits(key, 5000)[:, :count])


def test_no_two_words_of_a_stream_are_the_same_block():
    words = random.bits(Stream(1, seed=1).key(), 4 * 50_000).view(-1, 4)
    assert len(words.unique(dim=0)) == 50_000


P = [0.1, 0.2, 0.0, 0.3, 0.4]


def p_of_each_env(key):
    weights = key.env.unsqueeze(-1) * torch.tensor([1.0, 0.0, 2.0, 3.0], device=key.env.device).double() + 2
    return weights / weights.sum(-1, keepdim=True)


DRAWS = {
    "uniform": lambda key: random.uniform(key, (5, 2)),
    "uniform float64": lambda key: random.uniform(key, (5, 2), torch.float64),
    "normal": lambda key: random.normal(key, (5, 2)),
    "exponential": lambda key: random.exponential(key, (5, 2)),
    "integers": lambda key: random.integers(key, 10, (5, 2)),
    "integers with counts": lambda key: random.integers(key, torch.tensor([3, 2**31]), (5, 2)),
    "scalar uniform": random.uniform,
    "scalar uniform float64": lambda key: random.uniform(key, (), torch.float64),
    "scalar normal": random.normal,
    "scalar exponential": random.exponential,
    "scalar integers": lambda key: random.integers(key, 10),
    "bits": lambda key: random.bits(key, 7),
    "permutation": lambda key: random.permutation(key, 7),
    "choice": lambda key: random.choice(key, 10, (5, 2)),
    "choice with p": lambda key: random.choice(key, 5, (5, 2), torch.tensor(P, device=key.env.device)),
    "choice with p of each env": lambda key: random.choice(key, 4, (5, 2), p_of_each_env(key)),
    "scalar choice with p": lambda key: random.choice(key, 5, (), torch.tensor(P, device=key.env.device)),
}
ROUNDED = ("normal", "exponential", "scalar normal", "scalar exponential")
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def vmapped(draw, key):
    *words, tag = key
    return torch.vmap(lambda *words: draw(Key(*words, tag)))(*words)


@every_draw
def test_vmap_gives_the_same_numbers(draw):
    key = Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()
    assert torch.equal(vmapped(draw, key), draw(key))


@every_draw
def test_a_scalar_key_gives_the_numbers_of_its_row(draw):
    key = Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()
    *words, tag = key
    assert torch.equal(draw(Key(*(word[4] for word in words), tag)), draw(key)[4])


@every_draw
def test_compiled_gives_the_same_numbers(draw):
    key = Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()
    torch.compiler.reset()
    assert torch.equal(torch.compile(draw, fullgraph=True, backend="aot_eager")(key), draw(key))


def assert_the_same(given, expected):
    for name, numbers in expected.items():
        tolerance = 1e-6 if name in ROUNDED else 0
        assert given[name].dtype == numbers.dtype and torch.allclose(given[name].cpu(), numbers, rtol=0, atol=tolerance), name


def numbers_of(key, names):
    return {name: DRAWS[name](key) for name in names}


def draws_of_eight_words(key):
    # Of the same words, which a compiler finds once: every other count is another kernel, that takes seconds to compile.
    return {
        "bits": random.bits(key, 8),
        "integers": random.integers(key, 10, (8,)),
        "uniform": random.uniform(key, (8,)),
        "uniform float64": random.uniform(key, (4,), torch.float64),
        "normal": random.normal(key, (4,)),
        "permutation": random.permutation(key, 8),
        "choice with p of each env": random.choice(key, 4, (4,), p_of_each_env(key)),
    }


def test_inductor_gives_the_same_numbers():
    key = Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()
    torch.compiler.reset()
    compiled = torch.compile(draws_of_eight_words, fullgraph=True, backend="inductor")
    assert_the_same(compiled(key), draws_of_eight_words(key))


def test_without_numpy_the_numbers_are_the_same(monkeypatch):
    key = Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()
    expected = numbers_of(key, DRAWS)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_the_same(numbers_of(key, DRAWS), expected)


def test_a_compiled_stream_moves_as_an_eager_one():
    def three(stream, mask):
        drawn = []
        for _ in range(3):
            drawn.append(random.normal(stream.key(), (2,)))
            stream.next_draw()
            stream.next_episode(mask)
        return torch.stack(drawn)

    eager, compiled, mask = Stream(4, seed=3), Stream(4, seed=3), torch.tensor([True, False, True, False])
    torch.compiler.reset()
    assert torch.equal(torch.compile(three, fullgraph=True, backend="aot_eager")(compiled, mask), three(eager, mask))
    assert all(torch.equal(one, other) for one, other in zip(eager.buffers(), compiled.buffers(), strict=True))


@every_draw
def test_shapes_are_the_keys_and_then_ones_own(draw):
    shape = draw(Stream(7, seed=0).key()).shape
    assert shape in [(7,), (7, 5, 2), (7, 7)]
    assert draw(Stream(1, seed=0).key()).shape == (1, *shape[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["uniform", "normal", "exponential"])
def test_every_float_dtype_gives_finite_numbers_of_that_dtype(name, dtype):
    drawn = getattr(random, name)(Stream(1, seed=0).key(), (10_000,), dtype)
    assert drawn.dtype == dtype
    assert drawn.isfinite().all()
    assert abs(drawn.double().mean() - {"uniform": 0.5, "normal": 0.0, "exponential": 1.0}[name]) < 0.05
    if name == "uniform":
        assert (drawn >= 0).all() and (drawn < 1).all()


# Distributions, from half a million numbers of one env, and one number of half a million envs.


def many(draw):
    return torch.stack([draw(Stream(1, seed=1).key(), (COUNT,))[0], draw(Stream(COUNT, seed=2).key(), (1,))[:, 0]]).double()


def ks_distance(sample, cdf):
    ordered, count = cdf(sample.sort().values), len(sample)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return max((steps[1:] - ordered).max().item(), (ordered - steps[:-1]).max().item())


CDFS = {
    "uniform": lambda x: x,
    "normal": torch.special.ndtr,
    "exponential": lambda x: 1 - torch.exp(-x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CDFS)
def test_numbers_follow_their_distribution(name, dtype):
    for sample in many(lambda key, shape: getattr(random, name)(key, shape, dtype)):
        assert ks_distance(sample, CDFS[name]) < 1.95 / math.sqrt(COUNT)  # exceeded once in a thousand


@pytest.mark.parametrize(
    "name, mean, variance, fourth", [("uniform", 0.5, 1 / 12, 1 / 80), ("normal", 0, 1, 3), ("exponential", 1, 1, 9)]
)
def test_moments_are_those_of_the_distribution(name, mean, variance, fourth):
    for sample in many(getattr(random, name)):
        error = 5 / math.sqrt(COUNT)
        assert abs(sample.mean() - mean) < error * math.sqrt(variance)
        assert abs(sample.var() - variance) < error * math.sqrt(fourth - variance**2)
        centred = (sample - sample.mean()) ** 4
        assert abs(centred.mean() - fourth) < error * centred.std()


def test_uniform_numbers_reach_zero_and_never_one():
    for sample in many(random.uniform):
        assert 0 <= sample.min() < 3e-5
        assert 1 - 3e-5 < sample.max() < 1
        assert torch.equal(sample * 2**24, (sample * 2**24).round())


def test_uniform_numbers_are_the_upper_bits_of_their_words():
    key = Stream(3, seed=1).key()
    words = random.bits(key, 200).tolist()
    assert (random.uniform(key, (200,)) * 2**24).tolist() == [[word >> 8 for word in row] for row in words]
    pairs = [[(high >> 5) * 2**26 + (low >> 6) for high, low in zip(row[::2], row[1::2], strict=True)] for row in words]
    assert (random.uniform(key, (100,), torch.float64) * 2**53).tolist() == pairs


def test_float64_uniform_numbers_have_53_bits():
    sample = random.uniform(Stream(1, seed=1).key(), (COUNT,), torch.float64)
    assert sample.min() >= 0 and sample.max() < 1
    multiples = sample * 2.0**53
    assert torch.equal(multiples, multiples.floor())
    assert (multiples.long() % 2).double().mean() == pytest.approx(0.5, abs=0.003)


def test_the_tails_of_normal_and_exponential_are_there_and_finite():
    normal, exponential = many(random.normal).flatten(), many(random.exponential).flatten()
    assert normal.isfinite().all() and exponential.isfinite().all()
    assert normal.min() < -4.4 and normal.max() > 4.4
    assert exponential.min() >= 0 and exponential.max() > 12


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97, 1000])
def test_integers_are_equally_frequent(count):
    for sample in many(lambda key, shape: random.integers(key, count, shape)):
        frequency = torch.bincount(sample.long(), minlength=count).double()
        assert len(frequency) == count
        expected = COUNT / count
        chi_square = ((frequency - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (count - 1)) <= 4 * math.sqrt(2 * count)


@pytest.mark.parametrize("count", [2**31, 2**31 - 1, 2**30 + 1])
def test_integers_reach_over_large_counts(count):
    drawn = random.integers(Stream(1, seed=1).key(), count, (COUNT,))
    assert drawn.dtype == torch.int64
    assert 0 <= drawn.min() < count * 3e-5
    assert count * (1 - 3e-5) < drawn.max() < count


def test_integers_take_a_count_for_each_place():
    counts = torch.tensor([[1, 2, 3], [10, 100, 2**31]])
    drawn = random.integers(Stream(50_000, seed=1).key(), counts, (2, 3))
    assert (drawn >= 0).all() and (drawn < counts).all()
    assert torch.allclose(drawn.double().mean(0), (counts.double() - 1) / 2, rtol=0.02)


# The same from ten million numbers of many envs, episodes, steps and words.

EPISODES, STEPS, ENVS, WORDS = 10, 10, 1000, 100


def ten_million(draw, num_envs=ENVS, **what):
    """Numbers of shape `(EPISODES, STEPS, *draw's own)`; `draw` takes a key."""
    stream, drawn = Stream(num_envs, **{"seed": 1, **what}), []
    for _ in range(EPISODES):
        stream.next_episode(torch.ones(num_envs, dtype=torch.bool))
        for _ in range(STEPS):
            drawn.append(draw(stream.key()))
            stream.next_draw()
    return torch.stack(drawn).unflatten(0, (EPISODES, STEPS))


def assert_likely(p, what):
    assert 1e-4 < p < 1 - 1e-4, (what, p)


def chi_square_p(chi_square, freedom):
    return torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.as_tensor(chi_square / 2).double()).item()


def assert_frequencies(values, expected, what=None):
    """Values in [0, len(expected)), whose probabilities are `expected`."""
    expected = torch.as_tensor(expected).double()
    frequency = torch.bincount(values.flatten(), minlength=len(expected)).double()
    assert len(frequency) == len(expected) and not frequency[expected == 0].any()
    frequency, expected = frequency[expected > 0], expected[expected > 0] * values.numel()
    chi_square = ((frequency - expected) ** 2 / expected).sum().item()
    assert_likely(chi_square_p(chi_square, len(expected) - 1), what)


def kolmogorov_p(distance, count):
    # The asymptotic distribution, with Stephens' correction (1970).
    x = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    return 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))


@pytest.fixture(scope="module")
def words():
    return ten_million(lambda key: random.bits(key, WORDS))


def frequencies_of_bytes(words):
    return torch.stack([torch.bincount((words >> shift & 0xFF).flatten(), minlength=256) for shift in (0, 8, 16, 24)])


def ones_of_bits(words):
    return (frequencies_of_bytes(words) @ (torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1)).flatten()


def test_every_byte_of_ten_million_words_is_equally_frequent(words):
    expected = words.numel() / 256
    for number, frequency in enumerate(frequencies_of_bytes(words)):
        assert_likely(chi_square_p(((frequency - expected) ** 2 / expected).sum().item(), 255), number)


def test_every_bit_of_ten_million_words_is_set_half_the_time(words):
    squares = (2 * ones_of_bits(words) - words.numel()).double() ** 2 / words.numel()
    assert squares.max() < 5**2
    assert_likely(chi_square_p(squares.sum().item(), 32), "all bits")


def test_neighbouring_bits_are_uncorrelated(words):
    flat = words.flatten()
    for differing in (flat ^ flat >> 1, flat[1:] ^ flat[:-1]):  # within a word, from word to word
        r = 1 - 2 * ones_of_bits(differing)[:31] / len(differing)
        assert r.abs().max() < 4 / math.sqrt(len(differing))


@pytest.mark.parametrize("dim", range(4), ids=["episodes", "draws", "envs", "words"])
def test_neighbours_among_ten_million_are_uncorrelated(words, dim):
    centred = words.double() / 2**32 - 0.5
    length = centred.shape[dim] - 1
    r = 12 * (centred.narrow(dim, 0, length) * centred.narrow(dim, 1, length)).mean().item()
    assert abs(r) < 4 / math.sqrt(words.numel() * length / (length + 1))


OTHERS = {
    "part 1": (lambda key: key.part(1), {}),
    "part 255": (lambda key: key.part(255), {}),
    "next tag": (lambda key: key._replace(tag=key.tag + 1), {}),
    "next stream": (lambda key: key, dict(tag=1)),
    "next seed": (lambda key: key, dict(seed=2)),
    "seed's upper half": (lambda key: key, dict(seed=1 + 2**32)),
}


@pytest.mark.parametrize("other, what", OTHERS.values(), ids=OTHERS)
def test_ten_million_numbers_are_uncorrelated_with_others(words, other, what):
    others = ten_million(lambda key: random.bits(other(key), WORDS), **what)
    r = 12 * ((words.double() / 2**32 - 0.5) * (others.double() / 2**32 - 0.5)).mean().item()
    assert abs(r) < 4 / math.sqrt(words.numel())


@pytest.mark.parametrize(
    "name, dtype", [("uniform", torch.float32), ("uniform", torch.float64), ("normal", None), ("exponential", None)]
)
def test_ten_million_numbers_follow_their_distribution(name, dtype):
    sample = ten_million(lambda key: getattr(random, name)(key, (WORDS,), dtype or torch.float32)).flatten().double()
    sample = torch.from_numpy(np.sort(sample.numpy()))
    assert_likely(kolmogorov_p(ks_distance(sample, CDFS[name]), len(sample)), name)


@pytest.mark.parametrize("count", [2, 3, 6, 10, 1000])
def test_ten_million_integers_are_equally_frequent(count):
    assert_frequencies(ten_million(lambda key: random.integers(key, count, (WORDS,))), [1 / count] * count, count)


def test_ten_million_choices_follow_their_probabilities():
    p = torch.tensor(P, dtype=torch.float64)
    assert_frequencies(ten_million(lambda key: random.choice(key, 5, (WORDS,), p)), P)


def test_choices_follow_the_probabilities_of_each_env():
    key = Stream(4, seed=1).key()
    drawn = random.choice(key, 4, (10**6,), p_of_each_env(key))
    for row, p in zip(drawn, p_of_each_env(key), strict=True):
        assert_frequencies(row, p)


@pytest.mark.parametrize("n, num_envs", [(3, 33_334), (5, 20_000)])
def test_every_order_is_equally_frequent(n, num_envs):
    drawn = ten_million(lambda key: random.permutation(key, n), num_envs).reshape(-1, n)
    codes = (drawn * n ** torch.arange(n)).sum(-1)
    orders = torch.tensor([sum(value * n**place for place, value in enumerate(o)) for o in itertools.permutations(range(n))])
    assert_frequencies(torch.searchsorted(orders.sort().values, codes), [1 / len(orders)] * len(orders))
    assert torch.isin(codes, orders).all()
    for place in range(n):
        assert_frequencies(drawn[:, place], [1 / n] * n, place)


# What permutation and choice promise at the edges.


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_a_permutation_holds_each_number_once(n):
    drawn = random.permutation(Stream(3, seed=1).key(), n)
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn.sort(-1).values, torch.arange(n).expand(3, n))


def test_equal_words_of_a_permutation_keep_their_order(monkeypatch):
    key = Stream(3, seed=1).key()
    coarse = random.bits(key, 5000) >> 30
    monkeypatch.setattr(random, "bits", lambda key, count: coarse[:, :count])
    assert np.array_equal(random.permutation(key, 5000).numpy(), np.argsort(coarse.numpy(), -1, kind="stable"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("word, index", [(0, 1), (WORD, 3)])
def test_the_ends_of_uniform_choose_what_has_a_probability(monkeypatch, word, index, dtype):
    monkeypatch.setattr(random, "_bits", lambda key, count: torch.full((*key.env.shape, count), word))
    p = torch.tensor([0, 0.25, 0, 0.75, 0, 0], dtype=dtype)
    rounding = math.sqrt(torch.finfo(dtype).eps) / 2
    for one in (p, p * (1 - rounding), p * (1 + rounding), p + torch.tensor([0, 0, 0, 0, 1e-30, 0], dtype=dtype)):
        assert random.choice(Stream(2, seed=1).key(), 6, (3,), one).unique().tolist() == [index]


def test_a_choice_at_the_sum_of_two_probabilities_is_the_second(monkeypatch):
    monkeypatch.setattr(
        random, "_bits", lambda key, count: torch.full((*key.env.shape, count), 2**31) * (torch.arange(count) % 2 == 0)
    )
    assert random.choice(Stream(1, seed=1).key(), 3, (2,), torch.tensor([0.5, 0.0, 0.5])).tolist() == [[2, 2]]


def test_choice_without_p_is_integers():
    key = Stream(3, seed=1).key()
    assert torch.equal(random.choice(key, 7, (4,)), random.integers(key, 7, (4,)))


@pytest.mark.parametrize(
    "n, p, message",
    [
        (0, None, "choice needs n in \\[1, 2\\*\\*31\\], but got 0"),
        (2**31 + 1, None, "choice needs n in"),
        (2, [0.5, 0.5], "choice needs p as a tensor of floating point, but got \\[0.5, 0.5\\]"),
        (2, torch.tensor([1, 0]), "choice needs p as a tensor of floating point"),
        (2, torch.ones(3) / 3, "choice needs p of shape \\(2,\\) or \\(4, 2\\), but got \\(3,\\)"),
        (2, torch.ones(3, 2) / 2, "but got \\(3, 2\\)"),
        (2, torch.tensor([0.5, 0.501]), "choice needs p nonnegative and of sum 1, but got \\[0.5"),
        (2, torch.tensor([0.5, 0.499]), "choice needs p nonnegative and of sum 1"),
        (2, torch.tensor([1.5, -0.5]), "choice needs p nonnegative and of sum 1, but got \\[ 1.5 -0.5\\]"),
        (2, torch.tensor([math.nan, 1.0]), "choice needs p nonnegative and of sum 1"),
        (2, torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 0.5]]), "but got \\[0.  0.5\\]"),
    ],
)
def test_choice_refuses_what_are_no_probabilities(n, p, message):
    with pytest.raises((TypeError, ValueError), match=message):
        random.choice(Stream(4, seed=1).key(), n, (), p)


@pytest.mark.parametrize("n", [-1, 2**26 + 1])
def test_a_permutation_beyond_the_counter_is_refused(n):
    with pytest.raises(ValueError, match=f"permutation needs n in .*, but got {n}"):
        random.permutation(Stream(1, seed=1).key(), n)


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
def test_neighbouring_streams_are_uncorrelated(one, other):
    first, second = (random.normal(Stream(1, **what).key(), (100_000,))[0] for what in (one, other))
    assert abs((first * second).mean()) < 5 / math.sqrt(100_000)


def test_neighbouring_envs_episodes_and_draws_are_uncorrelated():
    stream = Stream(100_000, seed=1)
    first = random.normal(stream.key())
    stream.next_draw()
    second = random.normal(stream.key())
    stream.next_episode(torch.ones(100_000, dtype=torch.bool))
    third = random.normal(stream.key())
    for a, b in ((first, second), (first, third), (second, third), (first[1:], first[:-1])):
        assert abs((a * b).mean()) < 5 / math.sqrt(100_000)


# Streams.


@pytest.mark.parametrize("num_envs, first_index", [(1, 0), (1, 63), (7, 20), (64, 0)])
def test_a_stream_depends_on_its_global_index_alone(num_envs, first_index):
    whole, shard = Stream(64, seed=9), Stream(num_envs, first_index, seed=9)
    for stream in (whole, shard):
        stream.next_episode(torch.ones(len(stream.env), dtype=torch.bool))
        stream.next_draw()
    assert torch.equal(
        random.uniform(whole.key(), (3,))[first_index : first_index + num_envs], random.uniform(shard.key(), (3,))
    )


def state(stream):
    return {name: buffer.clone() for name, buffer in stream.named_buffers()}


def moved(stream, before):
    return {
        name: (buffer != before[name]).tolist() for name, buffer in stream.named_buffers() if (buffer != before[name]).any()
    }


@pytest.fixture
def used_stream():
    stream = Stream(3, first_index=4, seed=9)
    for mask in ([True, True, True], [True, False, False]):
        stream.next_episode(torch.tensor(mask))
    for _ in range(5):
        stream.next_draw()
    return stream


def test_next_draw_moves_the_draw_of_every_env(used_stream):
    before, numbers = state(used_stream), random.uniform(used_stream.key())
    used_stream.next_draw()
    assert moved(used_stream, before) == {"draw": [True] * 3}
    assert (random.uniform(used_stream.key()) != numbers).all()


def test_next_episode_moves_the_masked_envs_to_the_start_of_their_next_episode(used_stream):
    before, numbers = state(used_stream), random.uniform(used_stream.key())
    used_stream.next_episode(torch.tensor([True, False, True]))
    assert moved(used_stream, before) == {"episode": [True, False, True], "draw": [True, False, True]}
    assert torch.equal(used_stream.episode, before["episode"] + torch.tensor([1, 0, 1]))
    assert used_stream.draw.tolist() == [0, 5, 0]
    assert (random.uniform(used_stream.key()) != numbers).tolist() == [True, False, True]


def test_a_seeded_stream_is_before_its_first_episode_and_next_episode_begins_it(used_stream):
    assert Stream(3, seed=9).episode.tolist() == [-1, -1, -1]
    used_stream.seed(9, torch.tensor([True, True, False]))
    assert used_stream.episode.tolist() == [-1, -1, 0] and used_stream.draw.tolist() == [0, 0, 5]
    used_stream.next_episode(torch.tensor([True, False, False]))
    assert used_stream.episode.tolist() == [0, -1, 0]


def test_seed_begins_the_masked_envs_afresh_and_leaves_the_others(used_stream):
    numbers, fresh = random.uniform(used_stream.key()), Stream(3, first_index=4, seed=77)
    used_stream.seed(77, torch.tensor([True, False, True]))
    for name, buffer in used_stream.named_buffers():
        assert torch.equal(buffer[[0, 2]], dict(fresh.named_buffers())[name][[0, 2]])
    drawn = random.uniform(used_stream.key())
    assert torch.equal(drawn[[0, 2]], random.uniform(fresh.key())[[0, 2]])
    assert torch.equal(drawn[1], numbers[1])


def test_a_key_draws_the_same_numbers_whenever_it_is_used(used_stream):
    before = state(used_stream)
    first, second = (random.normal(used_stream.key(), (3,)) for _ in range(2))
    assert torch.equal(first, second)
    assert moved(used_stream, before) == {}


def test_another_tag_gives_other_numbers(used_stream):
    key = used_stream.key()
    assert (random.uniform(key, (100,)) != random.uniform(key._replace(tag=key.tag + 1), (100,))).float().mean() > 0.99


def test_the_eight_tags_of_each_of_the_32_streams_are_its_own():
    tags = [Stream(1, tag=tag, seed=0).key().tag + offset for tag in range(32) for offset in range(8)]
    assert sorted(tags) == list(range(256))


def test_without_a_seed_two_streams_differ():
    assert (random.uniform(Stream(3).key()) != random.uniform(Stream(3).key())).all()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_64_bit_seed_is_taken_whole(seed):
    stream = Stream(2, seed=seed)
    assert stream.seed_low.tolist() == [seed % 2**32] * 2
    assert stream.seed_high.tolist() == [seed >> 32] * 2


def test_streams_are_state_of_running_episodes_and_not_learned():
    assert Stream(2).state_dict() == {}


def test_the_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    stream = Stream(4)
    for draw in DRAWS.values():
        draw(stream.key())
    stream.seed(3, torch.ones(4, dtype=torch.bool))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", [name for name in DRAWS if name not in ROUNDED])
def test_on_cuda_the_numbers_are_those_of_the_cpu(name):
    cpu, cuda = (Stream(64, first_index=3, tag=2, device=device, seed=2**63 + 5).key() for device in ("cpu", "cuda"))
    draw = (lambda key: random.integers(key, 2**31, (5, 2))) if name == "integers with counts" else DRAWS[name]
    assert torch.equal(draw(cuda).cpu(), draw(cpu))
    assert torch.equal(vmapped(draw, cuda).cpu(), draw(cpu))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_inductor_gives_the_numbers_of_the_cpu():
    cpu, cuda = (Stream(7, device=device, seed=2**63 + 5).key() for device in ("cpu", "cuda"))
    torch.compiler.reset()
    given, expected = torch.compile(draws_of_eight_words, fullgraph=True)(cuda), draws_of_eight_words(cpu)
    assert torch.allclose(given.pop("normal").cpu(), expected.pop("normal"), atol=1e-5)
    assert_the_same(given, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_equal_words_of_a_permutation_keep_their_order():
    cpu, cuda = (Stream(1, device=device, seed=1).key() for device in ("cpu", "cuda"))
    assert torch.equal(random.permutation(cuda, 2**20).cpu(), random.permutation(cpu, 2**20))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["normal", "exponential"])
def test_on_cuda_transformed_numbers_agree_to_rounding(name):
    cpu, cuda = (Stream(64, device=device, seed=5).key() for device in ("cpu", "cuda"))
    assert torch.allclose(getattr(random, name)(cuda, (1000,)).cpu(), getattr(random, name)(cpu, (1000,)), atol=1e-5)


def test_the_parts_of_a_key_draw_numbers_of_their_own():
    key = Stream(100, seed=3).key()
    draws = [random.uniform(one, (50,)).flatten() for one in (key, key.part(1), key.part(2), key.part(255))]
    assert (torch.corrcoef(torch.stack(draws)) - torch.eye(4)).abs().max() < 0.06
    for tag in range(256):
        assert not torch.equal(random.bits(key._replace(tag=tag), 4), random.bits(key.part(1), 4))


@pytest.mark.parametrize("number", [0, 256, -1])
def test_a_key_has_parts_1_to_255(number):
    with pytest.raises(ValueError, match=f"Key.part needs a number from 1 to 255, but got {number}"):
        Stream(1, seed=0).key().part(number)


@pytest.mark.parametrize("arguments", [dict(num_envs=1, tag=32), dict(num_envs=2, first_index=2**24 - 1)])
def test_a_stream_beyond_the_counter_is_refused(arguments):
    with pytest.raises(ValueError, match="Stream needs"):
        Stream(**arguments)
