"""Random numbers as pure functions of a key: (seed, env, episode, draw).

Philox4x32-10 gives the same bits in eager mode, compiled, in CUDA graphs and under `torch.vmap`, on CPU and CUDA. No global
generator is read or advanced. The six input words of Philox hold all coordinates of a number, so no hashing is needed:

    key      seed (64 bits)
    counter  draw | tag and block | fold and env index | episode

The distributions take a key and the `shape` of the numbers of one env. A result has shape `(*key_shape, *shape)` and is on the
device of the key.
"""

from __future__ import annotations

import math
import secrets
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchwrap._core.buffers import BatchedModule, EnvBuffer
from torchwrap._core.rows import RowMask, is_host_readable

_ENV_BITS = 24  # of the third counter word; the 8 bits above are the number that was folded in


class Key(NamedTuple):
    """The coordinates of random numbers: the same key always gives the same numbers.

    All tensors are int64 and of one shape, `key_shape`: `(num_envs,)`, or `()` under `torch.vmap`.

    Args:
        seed_low, seed_high: lower and upper 32 bits of the seed.
        env, episode, draw: global index of the env, number of its episode, and number of the step within the episode.
        tag: distinguishes the streams of an env, and the functions that draw in one step.

    >>> from torchwrap.random import Stream, uniform
    >>> key = Stream(2, seed=0).key()
    >>> bool((uniform(key) == uniform(key)).all()), bool((uniform(key) == uniform(key.fold_in(1))).any())
    (True, False)
    """

    seed_low: Tensor
    seed_high: Tensor
    env: Tensor
    episode: Tensor
    draw: Tensor
    tag: int = 0

    def fold_in(self, number: int) -> Key:
        """Returns the key of an independent draw in the same step. Fold in one number, 1 to 255; repeated calls add up."""
        if not 0 < number < 256:
            raise ValueError(f"Key.fold_in needs a number from 1 to 255, but got {number}.")
        return self._replace(env=self.env + (number << _ENV_BITS))

    def select(self, rows: Tensor) -> Key:
        """Returns the keys of some envs only, by their row indices (int64, `(n,)`)."""
        low, high, env, episode, draw = (word.index_select(0, rows) for word in self[:5])
        return Key(low, high, env, episode, draw, self.tag)


class Stream(BatchedModule):
    """The RNG streams of a batch of envs, one per env, independent of each other and of `num_envs`.

    A stream is a clock: the env's seed, index, episode and step determine the numbers, so no draw shifts another. An env
    advances its own streams, and `TransformedEnv` the streams of its transforms. A transform that draws only reads `key()`.

    Args:
        num_envs: number of streams.
        first_index: global index of the first env. The shards of a run differ only in this. The last index is below 2**24.
        tag: distinguishes the streams of one env (resets, actions, each transform that draws), 0 to 31.
        device: of the buffers.
        seed: a seed in [0, 2**64). None draws one from the operating system.

    >>> from torchwrap.random import uniform
    >>> whole, shard = Stream(4, seed=7), Stream(2, first_index=2, seed=7)
    >>> bool((uniform(whole.key())[2:] == uniform(shard.key())).all())
    True
    """

    seed_low, seed_high, env, episode, draw = (EnvBuffer((), torch.int64) for _ in range(5))

    def __init__(
        self,
        num_envs: int,
        first_index: int = 0,
        tag: int = 0,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= tag < 32:
            raise ValueError(
                f"Stream needs a tag from 0 to 31, one per stream of an env, but got {tag}."
            )
        if first_index + num_envs > 1 << _ENV_BITS:
            raise ValueError(
                f"Stream needs env indices below 2**{_ENV_BITS}, but got {first_index=} and {num_envs=}."
            )
        self.tag = tag
        self.allocate(num_envs, device)
        self.env.copy_(torch.arange(first_index, first_index + num_envs, device=device))
        self.seed(secrets.randbits(64) if seed is None else seed, RowMask.full(num_envs, device))

    def seed(self, seed: int, mask: RowMask) -> None:
        """Sets the streams in the rows of `mask` to before the first episode of `seed`, an int in [0, 2**64)."""
        mask.fill_(self.seed_low, seed & WORD)
        mask.fill_(self.seed_high, seed >> 32)
        mask.fill_(self.episode, -1)
        mask.fill_(self.draw, 0)

    def next_episode(self, mask: RowMask) -> None:
        """Advances the streams in the rows of `mask` to the start of their next episode."""
        self.episode.add_(mask.tensor)
        mask.fill_(self.draw, 0)

    def next_draw(self) -> None:
        """Advances every stream to its next step."""
        self.draw.add_(1)

    def key(self, function: int = 0) -> Key:
        """Returns the key of the current step, valid until the stream advances, for one of 8 functions that draw (0 to 7)."""
        return Key(
            self.seed_low,
            self.seed_high,
            self.env,
            self.episode,
            self.draw,
            (self.tag << 3) + function,
        )


def fresh_seed() -> int:
    """Draws a seed in [0, 2**31) from the operating system; every simulator accepts a seed of that size."""
    return secrets.randbits(31)


WORD = 0xFFFFFFFF  # mask of a 32-bit word

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.int64)
_WEYL = np.array([[0xBB67AE85], [0x9E3779B9]], np.int64)


def philox(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random 32-bit words from a 64-bit key and a 128-bit counter.

    All words are int64 tensors in [0, 2**32), and broadcast against each other.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox((zero, zero), (zero, zero, zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    if (arrays := as_arrays(*key, *counter)) is not None:
        return tuple([torch.from_numpy(word) for word in _rounds_in_numpy(*arrays)])
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        # The product of two words fits 64 bits; int64 wraps, and the mask undoes the sign extension of the shift. The words
        # c1 and c3 keep garbage above bit 32 until the next round masks them as part of c0 and c2.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) ^ c1 ^ k0) & WORD, p1, ((p0 >> 32) ^ c3 ^ k1) & WORD, p0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1 & WORD, c2, c3 & WORD


def as_arrays(*tensors: Tensor) -> list[NDArray[Any]] | None:
    """The tensors as NumPy arrays, or None if the host cannot read them: traced, under `torch.vmap`, or not on the CPU."""
    if not all(map(is_host_readable, tensors)):
        return None
    try:
        return [tensor.numpy() for tensor in tensors]
    except RuntimeError:  # under `torch.vmap`, for which PyTorch has no public test
        return None


def _rounds_in_numpy(*words: NDArray[Any]) -> tuple[NDArray[np.int64], ...]:
    # For eager mode on the CPU, where the 120 operators of the rounds in PyTorch would take longer than the rest of a step.
    # NumPy's take less time, and half as many compute the words in pairs.
    shape = np.broadcast(*words).shape
    pairs = np.empty((6, *shape), np.int64)
    for row, index in enumerate((2, 4, 5, 3, 1, 0)):
        pairs[row] = words[index]
    c02, c31, k10 = pairs.reshape(3, 2, -1)
    for _ in range(10):
        product = c02 * _MULTIPLIERS
        c02, c31 = (((product >> 32) ^ c31 ^ k10) & WORD)[::-1], product
        k10 = k10 + _WEYL
    return tuple([word.reshape(shape) for word in (c02[0], c31[1] & WORD, c02[1], c31[0] & WORD)])


_BLOCK_BITS = 24  # of the second counter word; the 8 bits above are the tag


def bits(key: Key, count: int) -> Tensor:
    """Random 32-bit words: int64 in [0, 2**32), shape `(*key_shape, count)`.

    The number of words per env is at most 2**26. The first words do not depend on it.
    """
    low, high, env, episode, draw = (word.unsqueeze(-1) for word in key[:5])
    first = key.tag << _BLOCK_BITS
    blocks = torch.arange(first, first + (count + 3) // 4, device=env.device)
    words = philox((low, high), (draw, blocks, env, episode))
    needed = words[: max(count, 1)]  # sliced first, so that a compiler drops unused words
    return torch.stack(needed, -1).flatten(-2)[..., :count]


Number: TypeAlias = "Tensor | float"
"""A number, or a tensor that broadcasts to the result."""


def uniform(
    key: Key,
    low: Number = 0.0,
    high: Number = 1.0,
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniform numbers in [low, high), by arguments in NumPy's order: low + (high - low) * u, which can be rounded to `high`.

    u is a multiple of 2**-24 in torch.float32, or of 2**-53 in torch.float64. No other dtype is valid.

    >>> from torchwrap.random import Stream
    >>> uniform(Stream(2, seed=0).key(), -1, 1, (3,)).shape
    torch.Size([2, 3])
    """
    _check_arguments("uniform", shape, low, high)
    count = math.prod(shape)
    if dtype == torch.float32:
        integer, scale = bits(key, count) >> 8, 2.0**-24
    elif dtype == torch.float64:
        # 53 bits from a pair of words, as in NumPy and in genrand_res53 of MT19937ar.
        words, scale = bits(key, 2 * count), 2.0**-53
        integer = (words[..., 0::2] >> 5) * 2**26 + (words[..., 1::2] >> 6)
    else:
        raise TypeError(
            f"uniform needs a dtype of torch.float32 or torch.float64, but got {dtype}."
        )
    return _affine(integer.reshape((*key.env.shape, *shape)).to(dtype) * scale, low, high - low)


def normal(
    key: Key,
    mean: Number = 0.0,
    std: Number = 1.0,
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Normal numbers by the Box-Muller transform, in a dtype of `uniform`.

    >>> normal(Stream(2, seed=0).key(), shape=(3,)).shape
    torch.Size([2, 3])
    """
    _check_arguments("normal", shape, mean, std)
    first, second = uniform(key, shape=(2, *shape), dtype=dtype).unbind(key.env.dim())
    return _affine(
        torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second), mean, std
    )


def exponential(
    key: Key, scale: Number = 1.0, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Exponential numbers of mean `scale` by inversion, in a dtype of `uniform`.

    >>> exponential(Stream(2, seed=0).key(), shape=(3,)).shape
    torch.Size([2, 3])
    """
    _check_arguments("exponential", shape, scale)
    return _affine(-torch.log1p(-uniform(key, shape=shape, dtype=dtype)), 0.0, scale)


def _affine(values: Tensor, offset: Number, factor: Number) -> Tensor:
    values = values if isinstance(factor, int | float) and factor == 1 else factor * values
    return values if isinstance(offset, int | float) and offset == 0 else offset + values


def _check_arguments(function: str, shape: object, *numbers: object) -> None:
    if isinstance(shape, int):
        raise TypeError(
            f"{function} needs the shape as a tuple, but got {shape}: pass `shape=({shape},)`."
        )
    for number in numbers:
        if isinstance(number, tuple):
            raise TypeError(
                f"{function} needs the shape last, as in NumPy, but got {number} before: pass `shape={number}`."
            )
        if isinstance(number, (list, np.ndarray)):
            raise TypeError(
                f"{function} needs numbers or tensors, but got {number!r}: convert it with `torch.tensor`."
            )


def integers(
    key: Key, low: Tensor | int, high: Tensor | int | None = None, shape: tuple[int, ...] = ()
) -> Tensor:
    """Uniform integers in [low, high), or in [0, low) without `high`: int64, by arguments in NumPy's order.

    A random word is multiplied and shifted (Lemire 2019) without rejection, so the bias is below (high - low) / 2**32.

    Args:
        key: the coordinates of the numbers.
        low, high: ints, which are checked, or int64 tensors that broadcast to the result. They differ by 1 to 2**31.
        shape: of the numbers of one env.

    >>> from torchwrap.random import Stream
    >>> integers(Stream(2, seed=0).key(), 5, 6)
    tensor([5, 5])
    """
    start, stop = (0, low) if high is None else (low, high)
    _check_arguments("integers", shape, start, stop)
    count = stop - start
    if isinstance(count, float) or (isinstance(count, int) and not 1 <= count <= 2**31):
        raise ValueError(f"integers needs high - low as an int in [1, 2**31], but got {count}.")
    return _affine(
        (bits(key, math.prod(shape)).reshape((*key.env.shape, *shape)) * count) >> 32, start, 1
    )


def permutation(key: Key, n: int) -> Tensor:
    """Random permutations of 0 to n - 1, int64, shape `(*key_shape, n)`, for an `n` of 0 to 2**26.

    They are the order of n random words. Ties are broken by index, the same on every device, with a bias below n**2 / 2**33.

    >>> from torchwrap.random import Stream
    >>> permutation(Stream(2, seed=0).key(), 5)
    tensor([[2, 3, 4, 0, 1],
            [0, 4, 2, 3, 1]])
    """
    if not 0 <= n <= 2**26:
        raise ValueError(f"permutation needs n in [0, 2**26], but got {n}.")
    # Word and index in one integer: no two are equal, so stable and unstable sorts give the same result.
    return ((bits(key, n) << 31) + torch.arange(n, device=key.env.device)).sort(-1).values & (
        2**31 - 1
    )


def choice(key: Key, n: int, shape: tuple[int, ...] = (), p: Tensor | None = None) -> Tensor:
    """Random indices in [0, n), with replacement, int64.

    Args:
        key: the coordinates of the indices.
        n: number of alternatives, 1 to 2**31.
        shape: of the indices of one env.
        p: probabilities, `(n,)` or `(*key_shape, n)`, equal by default; nonnegative, and summing to 1 up to rounding. Those
            below 2**-52 count as 0, an index of which is never drawn. The values are checked only in eager mode on the CPU.

    >>> from torchwrap.random import Stream
    >>> choice(Stream(2, seed=0).key(), 3, (4,), torch.tensor([0.3, 0.0, 0.7]))
    tensor([[2, 0, 2, 2],
            [0, 0, 0, 2]])
    """
    if not isinstance(n, int):
        remedy = "choose one with `values[choice(key, len(values))]`"
        raise TypeError(f"choice needs the number of alternatives, but got {n!r}: {remedy}.")
    if not 1 <= n <= 2**31:
        raise ValueError(f"choice needs n in [1, 2**31], but got {n}.")
    if p is None:
        return integers(key, n, shape=shape)
    if not (isinstance(p, Tensor) and p.is_floating_point()):
        raise TypeError(f"choice needs p as a floating-point tensor, but got {p!r}.")
    if p.shape not in ((n,), (*key.env.shape, n)):
        raise ValueError(
            f"choice needs p of shape {(n,)} or {(*key.env.shape, n)}, but got {tuple(p.shape)}."
        )
    if (values := as_arrays(p.detach().double())) is not None:
        rows = values[0].reshape(-1, n)
        error = math.sqrt(torch.finfo(p.dtype).eps)  # as in numpy.random.Generator.choice
        wrong = ~((rows >= 0).all(-1) & (abs(rows.sum(-1) - 1) <= error))
        if wrong.any():
            raise ValueError(
                f"choice needs p to be nonnegative and sum to 1, but got {rows[wrong][0]}."
            )
    # Sums of integers are exact in any order, so every device gives the same result. The total is below 2**53, so its product
    # with a uniform number below 1 is rounded to less than the total. With `right=True`, the search skips probabilities of 0.
    sums = (p.double() * 2**52).long().cumsum(-1)
    thresholds = (
        uniform(key, shape=(math.prod(shape),), dtype=torch.float64) * sums[..., -1:]
    ).long()
    return torch.searchsorted(sums, thresholds.contiguous(), right=True).reshape(
        (*key.env.shape, *shape)
    )
