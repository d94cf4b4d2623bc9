import functools

import numpy as np
import pytest
import torch
from helpers import AT_RELEASES

from torchwrap import random
from torchwrap.random import Key, Stream

WORDS = {"least": 0, "greatest": 0xFFFFFFFF}
FLOATS = [random.uniform, random.normal, random.exponential]
partial = functools.partial


def with_counts(key):
    return random.integers(key, torch.tensor([3, 2**31], device=key.env.device), shape=(5, 2))


DRAWS = {
    "uniform": partial(random.uniform, shape=(5, 2)),
    "uniform float64": partial(random.uniform, shape=(5, 2), dtype=torch.float64),
    "normal": partial(random.normal, shape=(5, 2)),
    "exponential": partial(random.exponential, shape=(5, 2)),
    "integers": partial(random.integers, low=10, shape=(5, 2)),
    "integers with counts": with_counts,
    "choice": partial(random.choice, n=10, shape=(5, 2)),
    "scalar uniform": random.uniform,
    "scalar normal": random.normal,
    "scalar integers": partial(random.integers, low=10),
    "bits": partial(random.bits, count=7),
    "permutation": partial(random.permutation, n=7),
}
ROUNDED = ("normal", "exponential", "scalar normal")


def all_draws(*words):
    """Every draw, for the words of a key with tag 2."""
    return {name: draw(Key(*words, 2)) for name, draw in DRAWS.items()}


@pytest.fixture
def key():
    return (
        Stream(
            7,
            first_index=3,
            tag=0,
            seed=2**63 + 5,
        )
        .key()
        ._replace(tag=2)
    )


def assert_equal_draws(result, expected):
    for name, numbers in expected.items():
        tolerance = 1e-5 if name in ROUNDED else 0
        torch.testing.assert_close(
            result[name].cpu(),
            numbers,
            rtol=0,
            atol=tolerance,
        )


# The same numbers in every mode.


@pytest.mark.parametrize("name", DRAWS)
def test_draw_under_vmap_and_of_a_scalar_key_is_bit_identical(key, name):
    draw = DRAWS[name]
    expected = draw(key)
    assert torch.equal(torch.vmap(lambda *words: draw(Key(*words, 2)))(*key[:5]), expected)
    scalar = [word[4] for word in key[:5]]
    assert torch.equal(draw(Key(*scalar, 2)), expected[4])


def some_draws(key):
    # All of these use the same words, so Inductor compiles one kernel. Each further count would
    # take seconds to compile.
    return {
        "bits": random.bits(key, 8),
        "uniform": random.uniform(key, shape=(8,)),
        "uniform float64": random.uniform(key, shape=(4,), dtype=torch.float64),
        "permutation": random.permutation(key, 8),
        **two_draws(key),
    }


def two_draws(key):
    normal = random.normal(key, shape=(4,))
    return {"integers": random.integers(key, 10, shape=(8,)), "normal": normal}


COMPILED = [
    (two_draws, "aot_eager"),
    pytest.param(some_draws, "inductor", marks=AT_RELEASES),
]


@pytest.mark.compiles
@pytest.mark.parametrize(("draws", "backend"), COMPILED)
def test_draws_when_compiled_match_eager_draws(draws, backend, key):
    torch.compiler.reset()
    compiled = torch.compile(draws, fullgraph=True, backend=backend)
    assert_equal_draws(compiled(key), draws(key))


# Dtypes.

each_float = pytest.mark.parametrize("draw", FLOATS, ids=lambda draw: draw.__name__)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@each_float
@each_dtype
def test_float_draws_have_the_requested_dtype(draw, dtype):
    drawn = draw(Stream(1, seed=0).key(), shape=(1000,), dtype=dtype)
    assert drawn.dtype == dtype and drawn.isfinite().all()


@each_float
def test_float_draws_in_another_dtype_raise(draw, key):
    with pytest.raises(TypeError, match="dtype"):
        draw(key, dtype=torch.float16)


@pytest.fixture
def set_bits(monkeypatch):
    """Makes every draw use given words."""

    def set_to(words):
        def bits(key, count):
            return torch.as_tensor(words).expand(*key.env.shape, count)

        monkeypatch.setattr(random, "bits", bits)

    return set_to


@each_float
@each_dtype
@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_float_draws_of_extreme_words_are_finite(set_bits, draw, dtype, word):
    set_bits(word)
    assert draw(Stream(2, seed=1).key(), shape=(3,), dtype=dtype).isfinite().all()


# Permutation.


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_permutation_of_any_size_contains_each_number_once(n):
    drawn = random.permutation(Stream(3, seed=1).key(), n)
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn.sort(-1).values, torch.arange(n).expand(3, n))


def test_permutation_with_equal_words_is_stable(set_bits, key):
    coarse = random.bits(key, 5000) >> 20 << 20
    set_bits(coarse)
    expected = np.argsort(coarse.numpy(), -1, kind="stable")
    assert np.array_equal(random.permutation(key, 5000).numpy(), expected)


# Arguments.


def test_arguments_have_numpys_order_and_may_be_tensors(key):
    low = torch.tensor([0.0, -3.0])
    high = torch.tensor([2.0, 5.0])
    start = torch.tensor([5, -7])
    shape = (2,)
    uniform = random.uniform(key, low, high, shape)
    assert torch.equal(uniform, low + (high - low) * random.uniform(key, shape=shape))
    normal = random.normal(key, low, high, shape)
    assert torch.equal(normal, low + high * random.normal(key, shape=shape))
    exponential = random.exponential(key, high, shape)
    assert torch.equal(exponential, high * random.exponential(key, shape=shape))
    integers = random.integers(key, start, start + 3, shape)
    assert torch.equal(integers, random.integers(key, 3, shape=shape) + start)


INVALID_N = [
    (random.choice, torch.ones(2)),
    *[(random.permutation, n) for n in (-1, 2**26 + 1)],
    *[(random.integers, n) for n in (0, 2**31 + 1, 2.5)],
]


@pytest.mark.parametrize(("draw", "n"), INVALID_N)
def test_draw_with_an_invalid_number_raises(draw, n, key):
    with pytest.raises((TypeError, ValueError), match=draw.__name__):
        draw(key, n)


@pytest.mark.parametrize("draw", [*FLOATS, random.integers])
def test_draw_with_a_shape_that_is_no_last_tuple_raises(draw, key):
    for call in (
        partial(draw, key, (3,)),
        partial(draw, key, [1]),
        partial(draw, key, 1, shape=3),
    ):
        with pytest.raises(TypeError, match="shape"):
            call()


@pytest.mark.parametrize("draw", [*FLOATS, random.integers])
def test_draw_of_more_numbers_than_its_shape_raises(draw, key):
    with pytest.raises(ValueError, match="shape"):
        draw(key, torch.tensor([[1], [2]]))


# On a GPU.


@pytest.mark.cuda
def test_draws_on_cuda_match_the_cpu():
    devices = ("cpu", "cuda")
    cpu, cuda = [
        Stream(
            64,
            3,
            device=device,
            seed=2**63 + 5,
        ).key()
        for device in devices
    ]
    expected = all_draws(*cpu[:5])
    assert_equal_draws(all_draws(*cuda[:5]), expected)
    assert_equal_draws(torch.vmap(all_draws)(*cuda[:5]), expected)
    torch.compiler.reset()
    assert_equal_draws(torch.compile(some_draws, fullgraph=True)(cuda), some_draws(cpu))
    many = random.permutation(cuda, 2**20)  # with equal words
    assert torch.equal(many.cpu(), random.permutation(cpu, 2**20))
