"""Counter-based random numbers: a pure function of (seed, env, episode, draw). The only file that draws.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the one
PyTorch itself uses on CUDA, written in plain int64 tensor operators: it gives the same bits in eager mode, compiled, captured,
under `torch.vmap`, on CPU and CUDA. Its six input words hold a whole coordinate, so nothing has to be hashed beforehand:

    key      seed (64 bits)
    counter  draw | tag and block | part and env index | episode
"""

from __future__ import annotations

import math
import secrets
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchwrap.buffer import Buffer, Module

_WORD = 0xFFFFFFFF
_FEW = 8
_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}
_MULTIPLIERS, _WEYL = np.array([[[0xD2511F53], [0xCD9E8D57]], [[0xBB67AE85], [0x9E3779B9]]], np.uint64)
_MASK, _SHIFT = np.uint64(_WORD), np.uint64(32)
_BLOCK_BITS = 24  # of the second counter word; the 8 bits above it are the tag
_ENV_BITS = 24  # of the third counter word; the 8 bits above it are the part


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random 32-bit words from a 64-bit key and a 128-bit counter.

    All words are int64 tensors with values in [0, 2**32) that broadcast against each other.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox((zero, zero), (zero, zero, zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    words = _arrays(k0, k1, c0, c1, c2, c3)
    if words is None:
        return _rounds(k0, k1, c0, c1, c2, c3)
    return tuple([torch.from_numpy(word) for word in _philox_of_arrays(*words)])


def _arrays(*tensors: Tensor) -> list[np.ndarray[Any, Any]] | None:
    # What the tensors hold, where the host may look: on the CPU, unless a graph is traced or a function is batched.
    if torch.compiler.is_compiling() or not all([tensor.is_cpu for tensor in tensors]):
        return None
    try:
        return [tensor.numpy() for tensor in tensors]
    except RuntimeError:
        return None


def _rounds(k0: Any, k1: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple[Any, ...]:
    for _ in range(10):
        # The product of two words fits 64 bits; int64 wraps, and the mask below undoes the arithmetic shift. The words
        # c1 and c3 keep garbage above bit 32 until they are masked together with the next c0 and c2.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) ^ c1 ^ k0) & _WORD, p1, ((p0 >> 32) ^ c3 ^ k1) & _WORD, p0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1 & _WORD, c2, c3 & _WORD


def _philox_of_arrays(*words: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    # The same for eager mode on the CPU, where PyTorch's 120 operators would cost more than the rest of a step of few envs.
    # NumPy's cost half of that, and half as many do: the two products of a round are one, of pairs.
    shape = np.broadcast(*words).shape
    pairs = np.empty((6, *shape), np.int64)
    for place, number in enumerate((2, 4, 5, 3, 1, 0)):
        pairs[place] = words[number]
    if pairs[0].size <= _FEW:  # Python's own numbers are sooner done
        few = [_rounds(k0, k1, c0, c1, c2, c3) for c0, c2, c3, c1, k1, k0 in pairs.reshape(6, -1).T.tolist()]
        return list(np.array(few, np.int64).T.reshape(4, *shape))
    c02, c31, k10 = pairs.view(np.uint64).reshape(3, 2, -1)
    for number in range(10):
        product = c02 * _MULTIPLIERS
        c20 = (product >> _SHIFT) ^ c31
        c20 ^= k10 + np.uint64(number) * _WEYL  # garbage above bit 32 goes with the mask
        c20 &= _MASK
        c02, c31 = c20[::-1], product
    return [word.view(np.int64).reshape(shape) for word in (c02[0], c31[1] & _MASK, c02[1], c31[0] & _MASK)]


class Key(NamedTuple):
    """Where a random number lives: whose it is, and which. Fields are int64 tensors of one shape, `(num_envs,)` or `()`.

    A key always gives the same numbers; `key.part(1)` is another one, for an independent draw at the same place.
    """

    seed_low: Tensor
    seed_high: Tensor
    env: Tensor
    episode: Tensor
    draw: Tensor
    tag: int = 0

    def part(self, number: int) -> Key:
        """A key of its own for another draw, by number, 1 to 255."""
        if not 0 < number < 256:
            raise ValueError(f"Key.part needs a number from 1 to 255, but got {number}.")
        return self._replace(env=self.env + (number << _ENV_BITS))

    def at(self, places: Tensor) -> Key:
        """The keys of some envs alone, by their places (int64)."""
        low, high, env, episode, draw = (word.index_select(0, places) for word in self[:5])
        return Key(low, high, env, episode, draw, self.tag)


def fresh_seed() -> int:
    """A seed from the operating system, small enough for every simulator."""
    return secrets.randbits(31)


def bits(key: Key, count: int) -> Tensor:
    """`count` random 32-bit words of each env, int64 in [0, 2**32), shape `(*key_shape, count)`; 2**26 at most.

    The first words do not depend on `count`.
    """
    words = _bits(key, count)
    return words if isinstance(words, Tensor) else torch.from_numpy(words)


def _bits(key: Key, count: int) -> Tensor | np.ndarray[Any, Any]:
    # NumPy's where the host may look. Component by component in memory: who takes them apart again reads what lies together.
    blocks, tag, arrays = (count + 3) // 4, key.tag << _BLOCK_BITS, _arrays(*key[:5])
    if arrays is None:
        low, high, env, episode, draw = (word.unsqueeze(-1) for word in key[:5])
        words = philox((low, high), (draw, tag + torch.arange(blocks, device=env.device), env, episode))
        return torch.stack(words[:count]).movedim(0, -1).flatten(-2)[..., :count]  # words that nobody asks for are not drawn
    k0, k1, c2, c3, c0 = (array[..., None] for array in arrays)
    found = np.array(_philox_of_arrays(k0, k1, c0, tag + np.arange(blocks), c2, c3))
    return np.moveaxis(found, 0, -1).reshape(*key.env.shape, 4 * blocks)[..., :count]


def uniform(key: Key, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2**-24 (2**-53 in float64), shape `(*key_shape, *shape)`.

    >>> uniform(Stream(2, seed=0).key(), (3,)).shape
    torch.Size([2, 3])
    """
    count = math.prod(shape)
    if dtype == torch.float64:
        # 53 bits from a pair of words, as NumPy and MT19937ar's genrand_res53 build them.
        words, share = _bits(key, 2 * count), 2.0**-53
        whole = (words[..., 0::2] >> 5) * 2**26 + (words[..., 1::2] >> 6)
    elif dtype == torch.float32:
        whole, share = _bits(key, count) >> 8, 2.0**-24
    else:
        raise TypeError(f"uniform needs a dtype of torch.float32 or torch.float64, but got {dtype}.")
    whole = whole.reshape((*key.env.shape, *shape))
    number = whole.to(dtype) if isinstance(whole, Tensor) else torch.from_numpy(whole.astype(_FLOATS[dtype]))
    return number.mul_(share)


def normal(key: Key, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by Box and Muller's transform, shape `(*key_shape, *shape)`."""
    number = uniform(key, (2, *shape), dtype)
    first, second = number.unbind(len(key.env.shape))
    return torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)


def exponential(key: Key, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Exponential numbers of rate 1 by inversion, shape `(*key_shape, *shape)`."""
    return -torch.log1p(-uniform(key, shape, dtype))


def integers(key: Key, count: Tensor | int, shape: tuple[int, ...] = ()) -> Tensor:
    """Integers in [0, count), int64, shape `(*key_shape, *shape)`; `count` may be a tensor of that shape, up to 2**31.

    The word is multiplied and shifted (Lemire 2019) without rejection: the bias is below count / 2**32.
    """
    if isinstance(count, int) and not 1 <= count <= 2**31:
        raise ValueError(f"integers needs a count in [1, 2**31], but got {count}.")
    words = bits(key, math.prod(shape)).reshape((*key.env.shape, *shape))
    return (words * count) >> 32


def permutation(key: Key, n: int) -> Tensor:
    """0 to n - 1 in a random order for each env, int64, shape `(*key_shape, n)`; n up to 2**26.

    Sorts random words; equal ones keep their order, everywhere. The bias that gives is below n**2 / 2**33.

    >>> permutation(Stream(2, seed=0).key(), 5)
    tensor([[2, 3, 4, 0, 1],
            [0, 4, 2, 3, 1]])
    """
    if not 0 <= n <= 2**26:
        raise ValueError(f"permutation needs n in [0, 2**26], but got {n}.")
    # A word and its place in one number: no two are equal, so that every sort gives the same.
    return ((bits(key, n) << 31) + torch.arange(n, device=key.env.device)).sort(-1).values & (2**31 - 1)


def choice(key: Key, n: int, shape: tuple[int, ...] = (), p: Tensor | None = None) -> Tensor:
    """Indices in [0, n) with replacement, int64, shape `(*key_shape, *shape)`.

    Args:
        key: where the indices live.
        n: number of alternatives, up to 2**31.
        shape: shape of one env's indices.
        p: their probabilities, nonnegative and of sum 1 up to rounding, `(n,)` or, for each env its own, `(*key_shape, n)`;
            equal where it is None. Those below 2**-52 count as 0, and what has probability 0 is never chosen. The values are
            checked on the CPU in eager mode alone.

    >>> choice(Stream(2, seed=0).key(), 3, (8,), torch.tensor([0.3, 0.0, 0.7]))
    tensor([[2, 0, 2, 2, 2, 2, 2, 2],
            [0, 0, 0, 2, 0, 0, 0, 2]])
    """
    if not 1 <= n <= 2**31:
        raise ValueError(f"choice needs n in [1, 2**31], but got {n}.")
    if p is None:
        return integers(key, n, shape)
    _check_probabilities(p, n, key.env.shape)
    # In whole numbers sums are exact and have no order, so that every device gives the same. A total below 2**53 times a
    # uniform number, rounded, stays below the total; counting the sums up to there passes over every probability of 0.
    sums = (p.double() * 2**52).long().cumsum(-1)
    places = (uniform(key, (math.prod(shape),), torch.float64) * sums[..., -1:]).long()
    return torch.searchsorted(sums, places.contiguous(), right=True).reshape((*key.env.shape, *shape))


def _check_probabilities(p: Tensor, n: int, key_shape: torch.Size) -> None:
    if not (isinstance(p, Tensor) and p.is_floating_point()):
        raise TypeError(f"choice needs p as a tensor of floating point, but got {p!r}.")
    if p.shape not in ((n,), (*key_shape, n)):
        raise ValueError(f"choice needs p of shape {(n,)} or {(*key_shape, n)}, but got {tuple(p.shape)}.")
    values = _arrays(p.detach().double())
    if values is not None:
        rows = values[0].reshape(-1, n)
        error = math.sqrt(torch.finfo(p.dtype).eps)  # NumPy's
        wrong = ~((rows >= 0).all(-1) & (abs(rows.sum(-1) - 1) <= error))
        if wrong.any():
            raise ValueError(f"choice needs p nonnegative and of sum 1, but got {rows[wrong][0]}.")


class Stream(Module):
    """The random streams of `num_envs` envs, one each, that do not depend on `num_envs` or on each other.

    A stream is a clock: the env's seed, index, episode and step say what is drawn, so that no draw shifts another. Envs move
    the clocks, `TransformedEnv` those of its transforms: a transform that draws only reads `key()`.

    Args:
        num_envs: number of streams.
        first_index: global index of the first one; shards of one run differ in this alone.
        tag: tells the streams of one env apart (resets, actions, each transform that draws); 0 to 31.
        seed: a seed in [0, 2**64); from the operating system where it is None.

    >>> whole, shard = Stream(4, seed=7), Stream(2, first_index=2, seed=7)
    >>> bool((uniform(whole.key())[2:] == uniform(shard.key())).all())
    True
    """

    seed_low = Buffer()
    seed_high = Buffer()
    env = Buffer()
    episode = Buffer()
    draw = Buffer()

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
            raise ValueError(f"Stream needs a tag from 0 to 31, one for each of an env's streams, but got {tag}.")
        if first_index + num_envs > 1 << _ENV_BITS:
            raise ValueError(f"Stream needs env indices below 2**{_ENV_BITS}, but got {first_index} + {num_envs}.")
        self.tag = tag
        for name in ("seed_low", "seed_high", "episode", "draw"):
            self.register_rows(name, torch.zeros(num_envs, dtype=torch.int64, device=device))
        env = torch.arange(first_index, first_index + num_envs, device=device)
        self.register_rows("env", env)
        self.seed(secrets.randbits(64) if seed is None else seed, torch.ones_like(env, dtype=torch.bool))

    def seed(self, seed: int, mask: Tensor) -> None:
        """Puts the streams in `mask` (bool, `(num_envs,)`) before their first episode of `seed`."""
        self.seed_low.masked_fill_(mask, seed & _WORD)
        self.seed_high.masked_fill_(mask, seed >> 32)
        self.episode.masked_fill_(mask, -1)
        self.draw.masked_fill_(mask, 0)

    def next_episode(self, mask: Tensor) -> None:
        """Moves the streams in `mask` to the start of their next episode."""
        self.episode.add_(mask)
        self.draw.masked_fill_(mask, 0)

    def next_draw(self) -> None:
        """Moves every stream to its next step."""
        self.draw.add_(1)

    def key(self, function: int = 0) -> Key:
        """The key of the present step: a view, good until the stream moves on. Up to 8 functions of a step have one each."""
        return Key(self.seed_low, self.seed_high, self.env, self.episode, self.draw, (self.tag << 3) + function)
