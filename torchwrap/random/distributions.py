"""Distributions: pure functions of a key.

`shape` is that of the numbers of one env. A result has shape `(*key_shape, *shape)` and is on the device of the key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchwrap.random.generator import as_arrays, philox
from torchwrap.random.stream import Key

_BLOCK_BITS = 24  # of the second counter word; the 8 bits above are the tag


def bits(key: Key, count: int) -> Tensor:
    """Random 32-bit words: int64 in [0, 2**32), shape `(*key_shape, count)`.

    The number of words per env is at most 2**26. The first words do not depend on it.

    >>> from torchwrap.random import Stream
    >>> bits(Stream(2, seed=0).key(), 5).shape
    torch.Size([2, 5])
    """
    low, high, env, episode, draw = (word.unsqueeze(-1) for word in key[:5])
    first = key.tag << _BLOCK_BITS
    blocks = torch.arange(first, first + (count + 3) // 4, device=env.device)
    words = philox((low, high), (draw, blocks, env, episode))
    needed = words[: max(count, 1)]  # sliced first, so that a compiler drops unused words
    return torch.stack(needed, -1).flatten(-2)[..., :count]


def uniform(key: Key, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1): multiples of 2**-24 in torch.float32, or of 2**-53 in torch.float64. No other dtype is valid.

    >>> from torchwrap.random import Stream
    >>> uniform(Stream(2, seed=0).key(), (3,)).shape
    torch.Size([2, 3])
    """
    count = math.prod(shape)
    if dtype == torch.float32:
        integer, scale = bits(key, count) >> 8, 2.0**-24
    elif dtype == torch.float64:
        # 53 bits from a pair of words, as in NumPy and in genrand_res53 of MT19937ar.
        words, scale = bits(key, 2 * count), 2.0**-53
        integer = (words[..., 0::2] >> 5) * 2**26 + (words[..., 1::2] >> 6)
    else:
        raise TypeError(f"uniform needs a dtype of torch.float32 or torch.float64, but got {dtype}.")
    return integer.reshape((*key.env.shape, *shape)).to(dtype) * scale


def normal(key: Key, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by the Box-Muller transform, in a dtype of `uniform`."""
    first, second = uniform(key, (2, *shape), dtype).unbind(key.env.dim())
    return torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)


def exponential(key: Key, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Exponential numbers of rate 1 by inversion, in a dtype of `uniform`."""
    return -torch.log1p(-uniform(key, shape, dtype))


def integers(key: Key, count: Tensor | int, shape: tuple[int, ...] = ()) -> Tensor:
    """Uniform integers in [0, count), int64.

    A random word is multiplied and shifted (Lemire 2019) without rejection, so the bias is below count / 2**32.

    Args:
        key: the coordinates of the numbers.
        count: number of alternatives, 1 to 2**31; an int, or an int64 tensor that broadcasts to the shape of the result. Only
            an int is checked.
        shape: of the numbers of one env.

    >>> from torchwrap.random import Stream
    >>> integers(Stream(2, seed=0).key(), 1)
    tensor([0, 0])
    """
    if isinstance(count, int) and not 1 <= count <= 2**31:
        raise ValueError(f"integers needs a count in [1, 2**31], but got {count}.")
    return (bits(key, math.prod(shape)).reshape((*key.env.shape, *shape)) * count) >> 32


def permutation(key: Key, n: int) -> Tensor:
    """Random permutations of 0 to n - 1, int64, shape `(*key_shape, n)`, for an `n` of 0 to 2**26.

    They are the order of n random words. Ties are broken by index, so that every device gives the same order; the bias that
    results is below n**2 / 2**33.

    >>> from torchwrap.random import Stream
    >>> permutation(Stream(2, seed=0).key(), 5)
    tensor([[2, 3, 4, 0, 1],
            [0, 4, 2, 3, 1]])
    """
    if not 0 <= n <= 2**26:
        raise ValueError(f"permutation needs n in [0, 2**26], but got {n}.")
    # Word and index in one integer: no two are equal, so stable and unstable sorts give the same result.
    return ((bits(key, n) << 31) + torch.arange(n, device=key.env.device)).sort(-1).values & (2**31 - 1)


def choice(key: Key, n: int, shape: tuple[int, ...] = (), p: Tensor | None = None) -> Tensor:
    """Random indices in [0, n), with replacement, int64.

    Args:
        key: the coordinates of the indices.
        n: number of alternatives, 1 to 2**31.
        shape: of the indices of one env.
        p: probabilities, `(n,)` or `(*key_shape, n)`; nonnegative, and summing to 1 up to rounding. Probabilities below 2**-52
            count as 0, and an index of probability 0 is never drawn. The values are checked only in eager mode on the CPU.
            Defaults to equal probabilities.

    >>> from torchwrap.random import Stream
    >>> choice(Stream(2, seed=0).key(), 3, (4,), torch.tensor([0.3, 0.0, 0.7]))
    tensor([[2, 0, 2, 2],
            [0, 0, 0, 2]])
    """
    if not 1 <= n <= 2**31:
        raise ValueError(f"choice needs n in [1, 2**31], but got {n}.")
    if p is None:
        return integers(key, n, shape)
    if not (isinstance(p, Tensor) and p.is_floating_point()):
        raise TypeError(f"choice needs p as a floating-point tensor, but got {p!r}.")
    if p.shape not in ((n,), (*key.env.shape, n)):
        raise ValueError(f"choice needs p of shape {(n,)} or {(*key.env.shape, n)}, but got {tuple(p.shape)}.")
    if (values := as_arrays(p.detach().double())) is not None:
        rows = values[0].reshape(-1, n)
        error = math.sqrt(torch.finfo(p.dtype).eps)  # as in numpy.random.Generator.choice
        wrong = ~((rows >= 0).all(-1) & (abs(rows.sum(-1) - 1) <= error))
        if wrong.any():
            raise ValueError(f"choice needs p nonnegative and summing to 1, but got {rows[wrong][0]}.")
    # Sums of integers are exact in any order, so every device gives the same result. The total is below 2**53, so its product
    # with a uniform number below 1 is rounded to less than the total. With `right=True`, the search skips probabilities of 0.
    sums = (p.double() * 2**52).long().cumsum(-1)
    thresholds = (uniform(key, (math.prod(shape),), torch.float64) * sums[..., -1:]).long()
    return torch.searchsorted(sums, thresholds.contiguous(), right=True).reshape((*key.env.shape, *shape))
