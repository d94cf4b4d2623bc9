import itertools
import math

import numpy as np
import pytest
import torch

from torchwrap import random
from torchwrap import random as distributions
from torchwrap.random import Key, Stream

WORD = 0xFFFFFFFF
P = [0.1, 0.2, 0.0, 0.3, 0.4]


def p_of_each_env(key):
    weights = (
        key.env.unsqueeze(-1) * torch.tensor([1.0, 0.0, 2.0, 3.0], device=key.env.device).double()
        + 2
    )
    return weights / weights.sum(-1, keepdim=True)


DRAWS = {
    "uniform": lambda key: random.uniform(key, shape=(5, 2)),
    "uniform float64": lambda key: random.uniform(key, shape=(5, 2), dtype=torch.float64),
    "normal": lambda key: random.normal(key, shape=(5, 2)),
    "exponential": lambda key: random.exponential(key, shape=(5, 2)),
    "integers": lambda key: random.integers(key, 10, shape=(5, 2)),
    "integers with counts": lambda key: random.integers(
        key, torch.tensor([3, 2**31], device=key.env.device), shape=(5, 2)
    ),
    "scalar uniform": random.uniform,
    "scalar normal": random.normal,
    "scalar integers": lambda key: random.integers(key, 10),
    "bits": lambda key: random.bits(key, 7),
    "permutation": lambda key: random.permutation(key, 7),
    "choice": lambda key: random.choice(key, 10, (5, 2)),
    "choice with p": lambda key: random.choice(
        key, 5, (5, 2), torch.tensor(P, device=key.env.device)
    ),
    "choice with p of each env": lambda key: random.choice(key, 4, (5, 2), p_of_each_env(key)),
    "scalar choice with p": lambda key: random.choice(
        key, 5, (), torch.tensor(P, device=key.env.device)
    ),
}
ROUNDED = ("normal", "exponential", "scalar normal")


def all_draws(*words):
    """Every draw, for the words of a key with tag 2."""
    return {name: draw(Key(*words, 2)) for name, draw in DRAWS.items()}


@pytest.fixture
def key():
    return Stream(7, first_index=3, tag=0, seed=2**63 + 5).key()._replace(tag=2)


def assert_equal_draws(result, expected):
    for name, numbers in expected.items():
        tolerance = 1e-5 if name in ROUNDED else 0
        assert result[name].dtype == numbers.dtype, name
        assert torch.allclose(result[name].cpu(), numbers, rtol=0, atol=tolerance), name


# The same numbers in every mode.


def test_draws_under_vmap_and_of_a_scalar_key_are_bit_identical(key):
    expected, vmapped = all_draws(*key[:5]), torch.vmap(all_draws)(*key[:5])
    scalar = all_draws(*(word[4] for word in key[:5]))
    for name, numbers in expected.items():
        assert torch.equal(vmapped[name], numbers), name
        assert torch.equal(scalar[name], numbers[4]), name


def some_draws(key):
    # All of these use the same words, so Inductor compiles one kernel. Each further count would take seconds to compile.
    return {
        "bits": random.bits(key, 8),
        "integers": random.integers(key, 10, shape=(8,)),
        "uniform": random.uniform(key, shape=(8,)),
        "uniform float64": random.uniform(key, shape=(4,), dtype=torch.float64),
        "normal": random.normal(key, shape=(4,)),
        "permutation": random.permutation(key, 8),
        "choice with p of each env": random.choice(key, 4, (4,), p_of_each_env(key)),
    }


def two_draws(key):
    return {
        "integers": random.integers(key, 10, shape=(8,)),
        "normal": random.normal(key, shape=(4,)),
    }


@pytest.mark.compiles
@pytest.mark.parametrize(
    "draws, backend",
    [(two_draws, "aot_eager"), pytest.param(some_draws, "inductor", marks=pytest.mark.full)],
)
def test_draws_when_compiled_match_eager_draws(draws, backend, key):
    torch.compiler.reset()
    assert_equal_draws(torch.compile(draws, fullgraph=True, backend=backend)(key), draws(key))


# Shapes and dtypes.


def test_draw_shape_is_key_shape_followed_by_own_shape(key):
    shapes = {"bits": (7,), "permutation": (7,)}
    for num_envs in (7, 1):
        for name, numbers in all_draws(*(word[:num_envs] for word in key[:5])).items():
            own = () if name.startswith("scalar") else shapes.get(name, (5, 2))
            assert numbers.shape == (num_envs, *own), name


def test_float_draws_have_the_requested_dtype():
    for dtype in (torch.float64, torch.float32):
        for draw in (random.uniform, random.normal, random.exponential):
            drawn = draw(Stream(1, seed=0).key(), shape=(1000,), dtype=dtype)
            assert drawn.dtype == dtype and drawn.isfinite().all()
    with pytest.raises(
        TypeError,
        match=r"uniform needs a dtype of torch.float32 or torch.float64, but got torch.float16",
    ):
        random.normal(Stream(1).key(), shape=(), dtype=torch.float16)


def test_float_draws_of_the_least_and_the_greatest_words_are_finite(monkeypatch):
    draws = random.uniform, random.normal, random.exponential
    for word, draw, dtype in itertools.product((0, WORD), draws, (torch.float32, torch.float64)):
        monkeypatch.setattr(
            distributions, "bits", lambda key, n, word=word: torch.full((*key.env.shape, n), word)
        )
        assert draw(Stream(2, seed=1).key(), shape=(3,), dtype=dtype).isfinite().all(), (
            draw,
            dtype,
            word,
        )


# Permutation and choice.


def test_permutation_of_any_size_contains_each_number_once():
    for n in (0, 1, 2, 1000):
        drawn = random.permutation(Stream(3, seed=1).key(), n)
        assert drawn.dtype == torch.int64
        assert torch.equal(drawn.sort(-1).values, torch.arange(n).expand(3, n))


def test_permutation_with_equal_words_is_stable(monkeypatch):
    key = Stream(3, seed=1).key()
    coarse = random.bits(key, 5000) >> 30
    monkeypatch.setattr(distributions, "bits", lambda key, count: coarse[:, :count])
    assert np.array_equal(
        random.permutation(key, 5000).numpy(), np.argsort(coarse.numpy(), -1, kind="stable")
    )


def test_choice_at_the_ends_of_uniform_has_nonzero_probability(monkeypatch):
    for word, index in ((0, 1), (WORD, 3)):
        monkeypatch.setattr(
            distributions, "bits", lambda key, n, word=word: torch.full((*key.env.shape, n), word)
        )
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            p = torch.tensor([0, 0.25, 0, 0.75, 0, 0], dtype=dtype)
            rounding = math.sqrt(torch.finfo(dtype).eps) / 2
            for one in (
                p,
                p * (1 - rounding),
                p * (1 + rounding),
                p + torch.tensor([0, 0, 0, 0, 1e-30, 0], dtype=dtype),
            ):
                assert random.choice(Stream(2, seed=1).key(), 6, (3,), one).unique().tolist() == [
                    index
                ]


def test_choice_at_a_cumulative_probability_is_the_next_alternative(monkeypatch):
    half = torch.tensor([[2**31, 0, 2**31, 0]])  # words of two numbers, each 0.5
    monkeypatch.setattr(distributions, "bits", lambda key, count: half)
    assert random.choice(
        Stream(1, seed=1).key(), 3, (2,), torch.tensor([0.5, 0.0, 0.5])
    ).tolist() == [[2, 2]]


def test_draws_with_invalid_arguments_raise():
    key = Stream(4, seed=1).key()
    for n, p, message in (
        (0, None, r"choice needs n in \[1, 2\*\*31\], but got 0"),
        (2**31 + 1, None, "choice needs n in"),
        (
            torch.ones(2),
            None,
            r"choice needs the number of alternatives, but got tensor.*`values\[choice\(key, len\(values\)\)\]`",
        ),
        (2, [0.5, 0.5], r"choice needs p as a floating-point tensor, but got \[0.5, 0.5\]"),
        (2, torch.tensor([1, 0]), "choice needs p as a floating-point tensor"),
        (2, torch.ones(3) / 3, r"choice needs p of shape \(2,\) or \(4, 2\), but got \(3,\)"),
        (2, torch.ones(3, 2) / 2, r"but got \(3, 2\)"),
        (
            2,
            torch.tensor([0.5, 0.501]),
            r"choice needs p to be nonnegative and sum to 1, but got \[0.5",
        ),
        (2, torch.tensor([0.5, 0.499]), "choice needs p to be nonnegative and sum to 1"),
        (
            2,
            torch.tensor([1.5, -0.5]),
            r"choice needs p to be nonnegative and sum to 1, but got \[ 1.5 -0.5\]",
        ),
        (2, torch.tensor([math.nan, 1.0]), "choice needs p to be nonnegative and sum to 1"),
        (2, torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 0.5]]), r"but got \[0.  0.5\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            random.choice(key, n, (), p)
    for n in (-1, 2**26 + 1):
        with pytest.raises(ValueError, match=f"permutation needs n in .*, but got {n}"):
            random.permutation(key, n)
    for count in (0, 2**31 + 1, 2.5):
        with pytest.raises(
            ValueError, match=f"integers needs high - low as an int in .*, but got {count}"
        ):
            random.integers(key, count)


def test_arguments_are_numpys_in_order_and_may_be_tensors(key):
    low, high, start = torch.tensor([0.0, -3.0]), torch.tensor([2.0, 5.0]), torch.tensor([5, -7])
    unit, plain = random.uniform(key, shape=(2,)), random.normal(key, shape=(2,))
    assert torch.equal(random.uniform(key, low, high, (2,)), low + (high - low) * unit)
    assert torch.equal(random.normal(key, low, high, (2,)), low + high * plain)
    assert torch.equal(
        random.exponential(key, high, (2,)), high * random.exponential(key, shape=(2,))
    )
    assert torch.equal(
        random.integers(key, start, start + 3, (2,)), random.integers(key, 3, shape=(2,)) + start
    )
    for draw in (random.uniform, random.normal, random.exponential, random.integers):
        with pytest.raises(
            TypeError,
            match=r"needs the shape last, as in NumPy, but got \(3,\) before: pass `shape=\(3,\)`",
        ):
            draw(key, (3,))
        with pytest.raises(
            TypeError,
            match=rf"{draw.__name__} needs the shape as a tuple, but got 3: pass `shape=\(3,\)`",
        ):
            draw(key, 1, shape=3)
        with pytest.raises(
            TypeError, match=rf"{draw.__name__} needs numbers or tensors, but got \[1\]"
        ):
            draw(key, [1])


# On a GPU.


@pytest.mark.cuda
def test_draws_on_cuda_match_the_cpu():
    cpu, cuda = (
        Stream(64, first_index=3, device=device, seed=2**63 + 5).key() for device in ("cpu", "cuda")
    )
    expected = all_draws(*cpu[:5])
    assert_equal_draws(all_draws(*cuda[:5]), expected)
    assert_equal_draws(torch.vmap(all_draws)(*cuda[:5]), expected)
    torch.compiler.reset()
    assert_equal_draws(torch.compile(some_draws, fullgraph=True)(cuda), some_draws(cpu))
    assert torch.equal(
        random.permutation(cuda, 2**20).cpu(), random.permutation(cpu, 2**20)
    )  # with equal words
