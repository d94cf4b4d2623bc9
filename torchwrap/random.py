"""Random numbers as pure functions of a key: (seed, env, episode, draw).

Philox4x32-10 gives the same bits in eager mode, compiled, in CUDA graphs and under `torch.vmap`, on
CPU and CUDA. No global generator is read or advanced. The six input words of Philox hold all
coordinates of a number, so no hashing is needed:

    key      seed (64 bits)
    counter  draw | tag and block | fold and env index | episode

The distributions take a key and the `shape` of the numbers of one env. A result has shape
`(*key_shape, *shape)` and is on the device of the key.
"""

from __future__ import annotations

import math
import secrets
import zlib
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchwrap._core import generators, validation
from torchwrap._core.buffers import BatchedModule, EnvBuffer
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask, is_host_readable

Number: TypeAlias = "Tensor | float"
"""A number, or a tensor that broadcasts to the result."""

WORD = 0xFFFFFFFF  # mask of a 32-bit word

# Two counter words hold two coordinates each. These are the bits of the lower one.
_ENV_BITS = 24  # below the 8 bits of the fold
_BLOCK_BITS = 24  # below the 8 bits of the tag
_FUNCTION_BITS = 3  # within the tag, below the 5 bits of the stream


class Key(NamedTuple):
    """The coordinates of random numbers: the same key always gives the same numbers.

    All tensors are int64 and of one shape, `key_shape`: `(num_envs,)`, or `()` under `torch.vmap`.

    Args:
        seed_low, seed_high: lower and upper 32 bits of the seed.
        env, episode, draw: global index of the env, number of its episode, and number of the step
            within the episode.
        tag: distinguishes the streams of an env, and the functions that draw in one step.
        fold: distinguishes the draws of one function.

    >>> from torchwrap.random import Stream, uniform
    >>> key = Stream(2, seed=0).key()
    >>> bool((uniform(key) == uniform(key)).all())
    True
    >>> bool((uniform(key) == uniform(key.fold_in(1))).any())
    False
    """

    seed_low: Tensor
    seed_high: Tensor
    env: Tensor
    episode: Tensor
    draw: Tensor
    tag: int = 0
    fold: int = 0

    def fold_in(self, number: int) -> Key:
        """Returns the key of an independent draw in the same step.

        Args:
            number: 1 to 255. Repeated calls add up.
        """
        if not 0 < number < 256:
            raise ValueError(refusal("Key.fold_in", "number must be from 1 to 255", number))
        return self._replace(fold=self.fold + number)

    def hold(self, period: int | None) -> Key:
        """Returns a key that changes every `period` steps of an episode only; with None, never.

        Args:
            period: at least 1.

        >>> key = Stream(1, seed=0).key()
        >>> [key._replace(draw=torch.tensor([step])).hold(3).draw.item() for step in range(7)]
        [0, 0, 0, 3, 3, 3, 6]
        """
        period = validation.period("Key.hold", period)
        steps_held = self.draw if period is None else self.draw % period
        draw = self.draw - steps_held
        generators.note_held(draw, self.draw)
        return self._replace(draw=draw)

    def select(self, rows: Tensor) -> Key:
        """Returns the keys of some envs only, by their row indices (int64, `(n,)`)."""
        words: Any = [word.index_select(0, rows) for word in self[:5]]
        return Key(*words, self.tag, self.fold)  # type: ignore[call-arg]


class Stream(BatchedModule):
    """The RNG streams of a batch of envs, one per env, independent of each other and of `num_envs`.

    A stream is a clock: the env's seed, index, episode and step determine the numbers, so no draw
    shifts another. An env advances its own streams, and `TransformedEnv` the streams of its
    transforms. A transform that draws only reads `key()`.

    Args:
        num_envs: number of streams.
        first_index: global index of the first env. The shards of a run differ only in this. The
            last index is below 2**24.
        tag: distinguishes the streams of one env, 0 to 31: 0 for the env, 1 for `sample_action`,
            others for transforms.
        device: of the buffers.
        seed: a seed in [0, 2**64). None draws one from the operating system.

    >>> from torchwrap.random import uniform
    >>> whole, shard = Stream(4, seed=7), Stream(2, first_index=2, seed=7)
    >>> bool((uniform(whole.key())[2:] == uniform(shard.key())).all())
    True
    """

    seed_low = EnvBuffer((), torch.int64)
    seed_high = EnvBuffer((), torch.int64)
    env = EnvBuffer((), torch.int64)
    episode = EnvBuffer((), torch.int64)
    draw = EnvBuffer((), torch.int64)

    def __init__(
        self,
        num_envs: int,
        first_index: int = 0,
        tag: int = 0,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        end = first_index + num_envs
        if not 0 <= tag < 32:
            raise ValueError(refusal("Stream", "tag must be from 0 to 31, one per stream", tag))
        if end > 1 << _ENV_BITS:
            must = f"first_index + num_envs must be at most 2**{_ENV_BITS}"
            raise ValueError(refusal("Stream", must, end))
        self.tag = tag
        self.allocate(num_envs, device)
        self.env.copy_(torch.arange(first_index, end, device=device))
        if seed is None:
            seed = secrets.randbits(64)
        self.seed(seed, RowMask.full(num_envs, device))

    def seed(self, seed: Tensor | int, mask: RowMask, name: str = "") -> None:
        """Sets the rows of `mask` to before the first episode of a seed.

        Args:
            seed: an int in [0, 2**64), or an int64 tensor `()` with the same bits.
            mask: the rows.
            name: distinguishes streams of one tag, by a checksum in the upper word of the seed.
        """
        mask.fill_(self.seed_low, seed & WORD)
        high = (seed >> 32) & WORD
        mask.fill_(self.seed_high, high ^ zlib.crc32(name.encode()))
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
        """Returns the key of the current step, valid until the stream advances.

        Args:
            function: distinguishes up to 8 functions that draw in the same step, 0 to 7.
        """
        tag = (self.tag << _FUNCTION_BITS) + function
        return Key(self.seed_low, self.seed_high, self.env, self.episode, self.draw, tag)


def fresh_seed() -> int:
    """Draws a seed in [0, 2**31), as every simulator accepts it, from the operating system."""
    return secrets.randbits(31)


# Philox. Its paper calls the constants M and W.

_M0 = 0xD2511F53
_M1 = 0xCD9E8D57
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
_M01 = np.array([[_M0], [_M1]], np.int64)
_W10 = np.array([[_W1], [_W0]], np.int64)


def philox(
    key: tuple[Tensor, Tensor],
    counter: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random 32-bit words from a 64-bit key and a 128-bit counter.

    All words are int64 tensors in [0, 2**32), and broadcast against each other.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox((zero, zero), (zero, zero, zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    arrays = as_arrays(*key, *counter)
    if arrays is not None:
        return tuple(map(torch.from_numpy, _philox_in_numpy(*arrays)))
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # The product of two words fits into 64 bits. int64 wraps around, and the mask undoes the
        # sign extension of the shift. c1 and c3 are masked a round later, in c0 and c2.
        product_0 = c0 * _M0
        product_1 = c2 * _M1
        c0 = ((product_1 >> 32) ^ c1 ^ k0) & WORD
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & WORD
        c1 = product_1
        c3 = product_0
        k0 = k0 + _W0
        k1 = k1 + _W1
    return c0, c1 & WORD, c2, c3 & WORD


def as_arrays(*tensors: Tensor) -> list[NDArray[Any]] | None:
    """The tensors as NumPy arrays; None if the host cannot read them, or under `torch.vmap`."""
    if not all(map(is_host_readable, tensors)):
        return None
    try:
        return list(map(Tensor.numpy, tensors))
    except RuntimeError:  # PyTorch has no public test for `torch.vmap`
        return None


def _philox_in_numpy(
    *words: NDArray[Any],
) -> tuple[NDArray[np.int64], ...]:
    # In eager mode on the CPU, the 120 operators of PyTorch would take longer than the rest of a
    # step. NumPy's take less time, and each of these computes a pair of words.
    k0, k1, c0, c1, c2, c3 = words
    shape = np.broadcast(*words).shape
    pairs = np.empty((6, *shape), np.int64)
    for row, word in enumerate((c0, c2, c3, c1, k1, k0)):
        pairs[row] = word
    c02, c31, k10 = pairs.reshape(3, 2, -1)
    for _ in range(10):
        product = c02 * _M01
        c20 = ((product >> 32) ^ c31 ^ k10) & WORD
        c02 = c20[::-1]
        c31 = product
        k10 = k10 + _W10
    c2, c0 = c20
    c3, c1 = c31 & WORD
    return tuple([word.reshape(shape) for word in (c0, c1, c2, c3)])


# Distributions.


def bits(key: Key, count: int) -> Tensor:
    """Random 32-bit words: int64 in [0, 2**32), shape `(*key_shape, count)`.

    The number of words per env is at most 2**26. The first words do not depend on it.
    """
    *words, tag, fold = key
    low, high, env, episode, draw = [word.unsqueeze(-1) for word in words]
    if fold:
        env = env + (fold << _ENV_BITS)
    first_block = tag << _BLOCK_BITS
    num_blocks = (count + 3) // 4
    blocks = torch.arange(first_block, first_block + num_blocks, device=env.device)
    generators.note(tuple(words), tag, fold)
    block = philox((low, high), (draw, blocks, env, episode))
    needed = block[: max(count, 1)]  # sliced first, so that a compiler drops unused words
    return torch.stack(needed, -1).flatten(-2)[..., :count]


def uniform(
    key: Key,
    low: Number = 0.0,
    high: Number = 1.0,
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniform numbers in [low, high): low + (high - low) * u, which can be rounded to `high`.

    u is a multiple of 2**-24 in torch.float32, or of 2**-53 in torch.float64. No other dtype is
    valid. The arguments have NumPy's order.

    >>> from torchwrap.random import Stream
    >>> uniform(Stream(2, seed=0).key(), -1, 1, (3,)).shape
    torch.Size([2, 3])
    """
    _check_arguments("uniform", shape, low, high)
    count = math.prod(shape)
    if dtype == torch.float32:
        integer = bits(key, count) >> 8
        unit = 2.0**-24
    elif dtype == torch.float64:
        # 53 bits from a pair of words, as in NumPy and in genrand_res53 of MT19937ar.
        words = bits(key, 2 * count)
        upper = words[..., 0::2] >> 5
        lower = words[..., 1::2] >> 6
        integer = upper * 2**26 + lower
        unit = 2.0**-53
    else:
        must = "dtype must be torch.float32 or torch.float64"
        raise TypeError(refusal("uniform", must, dtype))
    numbers = integer.reshape((*key.env.shape, *shape)).to(dtype)
    return _affine(numbers * unit, low, high - low)


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
    pairs = uniform(key, shape=(2, *shape), dtype=dtype)
    first, second = pairs.unbind(key.env.dim())
    radius = torch.sqrt(-2 * torch.log1p(-first))
    cosine = torch.cos(2 * math.pi * second)
    return _affine(radius * cosine, mean, std)


def exponential(
    key: Key,
    scale: Number = 1.0,
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Exponential numbers of mean `scale` by inversion, in a dtype of `uniform`.

    >>> exponential(Stream(2, seed=0).key(), shape=(3,)).shape
    torch.Size([2, 3])
    """
    _check_arguments("exponential", shape, scale)
    numbers = uniform(key, shape=shape, dtype=dtype)
    return _affine(-torch.log1p(-numbers), 0.0, scale)


def _affine(
    values: Tensor,
    offset: Number,
    factor: Number,
) -> Tensor:
    result = values
    if isinstance(factor, Tensor) or factor != 1:
        result = factor * result
    if isinstance(offset, Tensor) or offset != 0:
        result = offset + result
    if result.shape != values.shape:  # otherwise a number would be drawn once for all elements
        raise ValueError(
            refusal("torchwrap.random", "`shape` must be that of the tensors", result.shape)
        )
    return result


def _check_arguments(
    function: str,
    shape: object,
    *numbers: object,
) -> None:
    if isinstance(shape, int):
        remedy = f"Pass `shape=({shape},)`"
        raise TypeError(refusal(function, "shape must be a tuple", shape, remedy))
    for number in numbers:
        if isinstance(number, (tuple, list, np.ndarray)):
            remedy = f"Pass `shape={number}`, or a number or a tensor"
            raise TypeError(refusal(function, "shape comes last, as in NumPy", number, remedy))


def integers(
    key: Key,
    low: Tensor | int,
    high: Tensor | int | None = None,
    shape: tuple[int, ...] = (),
) -> Tensor:
    """Uniform integers in [low, high), or in [0, low) without `high`: int64.

    A random word is multiplied and shifted (Lemire 2019) without rejection, so the bias is below
    (high - low) / 2**32. The arguments have NumPy's order.

    Args:
        key: the coordinates of the numbers.
        low, high: ints, or int64 tensors that broadcast to the result. They differ by 1 to 2**31;
            the difference of ints is checked.
        shape: of the numbers of one env.

    >>> from torchwrap.random import Stream
    >>> integers(Stream(2, seed=0).key(), 5, 6)
    tensor([5, 5])
    """
    _check_arguments("integers", shape, low, high)
    if high is None:
        high = low
        low = 0
    count = high - low
    is_outside = isinstance(count, int) and not 1 <= count <= 2**31
    if is_outside or isinstance(count, float):
        raise ValueError(refusal("integers", "high - low must be an int in [1, 2**31]", count))
    words = bits(key, math.prod(shape))
    numbers = _affine(words.reshape((*key.env.shape, *shape)), 0, count)
    return _affine(numbers >> 32, low, 1)


def permutation(key: Key, n: int) -> Tensor:
    """Random permutations of 0 to n - 1, int64, shape `(*key_shape, n)`, for an `n` of 0 to 2**26.

    They are the order of n random words. Ties are broken by index, the same on every device, with a
    bias below n**2 / 2**33.

    >>> from torchwrap.random import Stream
    >>> permutation(Stream(2, seed=0).key(), 5)
    tensor([[2, 3, 4, 0, 1],
            [0, 4, 2, 3, 1]])
    """
    if not 0 <= n <= 2**26:
        raise ValueError(refusal("permutation", "n must be in [0, 2**26]", n))
    # With the index in its lower bits no two words are equal, so every sort gives the same result.
    indices = torch.arange(n, device=key.env.device)
    words = (bits(key, n) << 31) + indices
    return words.sort(-1).values & (2**31 - 1)


def choice(
    key: Key,
    n: int,
    shape: tuple[int, ...] = (),
) -> Tensor:
    """Random indices in [0, n), with replacement and equally likely, int64, for an `n` to 2**31.

    >>> from torchwrap.random import Stream
    >>> choice(Stream(2, seed=0).key(), 3, (4,))
    tensor([[2, 2, 0, 0],
            [0, 2, 0, 0]])
    """
    if not isinstance(n, int):
        remedy = "To choose a value, write `values[choice(key, len(values))]`"
        raise TypeError(refusal("choice", "n must be an integer", repr(n), remedy))
    return integers(key, n, shape=shape)
