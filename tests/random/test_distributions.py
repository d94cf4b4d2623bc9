from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import params

from torchwrap import RowMask, random
from torchwrap.random import Key, Stream, distributions

WORD = 0xFFFFFFFF
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


@pytest.fixture
def key():
    return Stream(7, first_index=3, tag=2, seed=2**63 + 5).key()


# The same numbers in every mode.


@every_draw
def test_draw_under_vmap_is_bit_identical(draw, key):
    assert torch.equal(vmapped(draw, key), draw(key))


@every_draw
def test_draw_with_a_scalar_key_equals_the_row_of_a_batch(draw, key):
    *words, tag = key
    assert torch.equal(draw(Key(*(word[4] for word in words), tag)), draw(key)[4])


@pytest.mark.compiles
@pytest.mark.parametrize("draw", params(DRAWS, quick=["scalar normal", "integers"]))
def test_draw_compiled_with_aot_eager_is_bit_identical(draw, key):
    torch.compiler.reset()
    assert torch.equal(torch.compile(draw, fullgraph=True, backend="aot_eager")(key), draw(key))


def assert_equal_draws(result, expected):
    for name, numbers in expected.items():
        tolerance = 1e-6 if name in ROUNDED else 0
        assert result[name].dtype == numbers.dtype, name
        assert torch.allclose(result[name].cpu(), numbers, rtol=0, atol=tolerance), name


def numbers_of(key, names):
    return {name: DRAWS[name](key) for name in names}


def draws_of_eight_words(key):
    # All of these use the same words, so Inductor compiles one kernel. Each further count would take seconds to compile.
    return {
        "bits": random.bits(key, 8),
        "integers": random.integers(key, 10, (8,)),
        "uniform": random.uniform(key, (8,)),
        "uniform float64": random.uniform(key, (4,), torch.float64),
        "normal": random.normal(key, (4,)),
        "permutation": random.permutation(key, 8),
        "choice with p of each env": random.choice(key, 4, (4,), p_of_each_env(key)),
    }


@pytest.mark.compiles
@pytest.mark.full
def test_draws_through_inductor_match_eager_draws(key):
    torch.compiler.reset()
    compiled = torch.compile(draws_of_eight_words, fullgraph=True, backend="inductor")
    assert_equal_draws(compiled(key), draws_of_eight_words(key))


def test_draws_without_numpy_match_draws_with_it(monkeypatch, key):
    expected = numbers_of(key, DRAWS)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_equal_draws(numbers_of(key, DRAWS), expected)


# Shapes and dtypes.


@every_draw
def test_draw_shape_is_key_shape_followed_by_own_shape(draw):
    shape = draw(Stream(7, seed=0).key()).shape
    assert shape in [(7,), (7, 5, 2), (7, 7)]
    assert draw(Stream(1, seed=0).key()).shape == (1, *shape[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["uniform", "normal", "exponential"])
def test_float_draws_have_the_requested_dtype_and_are_finite(name, dtype):
    drawn = getattr(random, name)(Stream(1, seed=0).key(), (10_000,), dtype)
    assert drawn.dtype == dtype
    assert drawn.isfinite().all()
    assert abs(drawn.double().mean() - {"uniform": 0.5, "normal": 0.0, "exponential": 1.0}[name]) < 0.05
    if name == "uniform":
        assert (drawn >= 0).all() and (drawn < 1).all()


# Permutation and choice.


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_permutation_of_any_size_contains_each_number_once(n):
    drawn = random.permutation(Stream(3, seed=1).key(), n)
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn.sort(-1).values, torch.arange(n).expand(3, n))


def test_permutation_with_equal_words_is_stable(monkeypatch):
    key = Stream(3, seed=1).key()
    coarse = random.bits(key, 5000) >> 30
    monkeypatch.setattr(distributions, "bits", lambda key, count: coarse[:, :count])
    assert np.array_equal(random.permutation(key, 5000).numpy(), np.argsort(coarse.numpy(), -1, kind="stable"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("word, index", [(0, 1), (WORD, 3)])
def test_choice_at_the_ends_of_uniform_has_nonzero_probability(monkeypatch, word, index, dtype):
    monkeypatch.setattr(distributions, "bits", lambda key, count: torch.full((*key.env.shape, count), word))
    p = torch.tensor([0, 0.25, 0, 0.75, 0, 0], dtype=dtype)
    rounding = math.sqrt(torch.finfo(dtype).eps) / 2
    for one in (p, p * (1 - rounding), p * (1 + rounding), p + torch.tensor([0, 0, 0, 0, 1e-30, 0], dtype=dtype)):
        assert random.choice(Stream(2, seed=1).key(), 6, (3,), one).unique().tolist() == [index]


def test_choice_at_a_cumulative_probability_is_the_next_alternative(monkeypatch):
    monkeypatch.setattr(
        distributions, "bits", lambda key, count: torch.full((*key.env.shape, count), 2**31) * (torch.arange(count) % 2 == 0)
    )
    assert random.choice(Stream(1, seed=1).key(), 3, (2,), torch.tensor([0.5, 0.0, 0.5])).tolist() == [[2, 2]]


def test_choice_without_p_equals_integers():
    key = Stream(3, seed=1).key()
    assert torch.equal(random.choice(key, 7, (4,)), random.integers(key, 7, (4,)))


@pytest.mark.parametrize(
    "n, p, message",
    [
        (0, None, "choice needs n in \\[1, 2\\*\\*31\\], but got 0"),
        (2**31 + 1, None, "choice needs n in"),
        (2, [0.5, 0.5], "choice needs p as a floating-point tensor, but got \\[0.5, 0.5\\]"),
        (2, torch.tensor([1, 0]), "choice needs p as a floating-point tensor"),
        (2, torch.ones(3) / 3, "choice needs p of shape \\(2,\\) or \\(4, 2\\), but got \\(3,\\)"),
        (2, torch.ones(3, 2) / 2, "but got \\(3, 2\\)"),
        (2, torch.tensor([0.5, 0.501]), "choice needs p nonnegative and summing to 1, but got \\[0.5"),
        (2, torch.tensor([0.5, 0.499]), "choice needs p nonnegative and summing to 1"),
        (2, torch.tensor([1.5, -0.5]), "choice needs p nonnegative and summing to 1, but got \\[ 1.5 -0.5\\]"),
        (2, torch.tensor([math.nan, 1.0]), "choice needs p nonnegative and summing to 1"),
        (2, torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 0.5]]), "but got \\[0.  0.5\\]"),
    ],
)
def test_choice_with_invalid_probabilities_raises(n, p, message):
    with pytest.raises((TypeError, ValueError), match=message):
        random.choice(Stream(4, seed=1).key(), n, (), p)


@pytest.mark.parametrize("n", [-1, 2**26 + 1])
def test_permutation_beyond_the_counter_raises(n):
    with pytest.raises(ValueError, match=f"permutation needs n in .*, but got {n}"):
        random.permutation(Stream(1, seed=1).key(), n)


def test_draws_leave_the_global_generator_unchanged():
    before = torch.get_rng_state()
    stream = Stream(4)
    for draw in DRAWS.values():
        draw(stream.key())
    stream.seed(3, RowMask.full(4))
    assert torch.equal(torch.get_rng_state(), before)


# On a GPU.


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in DRAWS if name not in ROUNDED])
def test_draw_on_cuda_is_bit_identical_to_the_cpu(name):
    cpu, cuda = (Stream(64, first_index=3, tag=2, device=device, seed=2**63 + 5).key() for device in ("cpu", "cuda"))
    draw = (lambda key: random.integers(key, 2**31, (5, 2))) if name == "integers with counts" else DRAWS[name]
    assert torch.equal(draw(cuda).cpu(), draw(cpu))
    assert torch.equal(vmapped(draw, cuda).cpu(), draw(cpu))


@pytest.mark.cuda
def test_draws_on_cuda_through_inductor_match_the_cpu():
    cpu, cuda = (Stream(7, device=device, seed=2**63 + 5).key() for device in ("cpu", "cuda"))
    torch.compiler.reset()
    result, expected = torch.compile(draws_of_eight_words, fullgraph=True)(cuda), draws_of_eight_words(cpu)
    assert torch.allclose(result.pop("normal").cpu(), expected.pop("normal"), atol=1e-5)
    assert_equal_draws(result, expected)


@pytest.mark.cuda
def test_permutation_on_cuda_with_equal_words_is_stable():
    cpu, cuda = (Stream(1, device=device, seed=1).key() for device in ("cpu", "cuda"))
    assert torch.equal(random.permutation(cuda, 2**20).cpu(), random.permutation(cpu, 2**20))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["normal", "exponential"])
def test_normal_and_exponential_on_cuda_match_the_cpu_to_rounding(name):
    cpu, cuda = (Stream(64, device=device, seed=5).key() for device in ("cpu", "cuda"))
    assert torch.allclose(getattr(random, name)(cuda, (1000,)).cpu(), getattr(random, name)(cpu, (1000,)), atol=1e-5)
