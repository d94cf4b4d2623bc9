"""Philox4x32-10, the counter-based generator, in plain integer operators.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. PyTorch uses the same generator on CUDA.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchwrap._core.rows import is_host_readable

WORD = 0xFFFFFFFF  # mask of a 32-bit word

_SCALAR_LIMIT = 8  # up to so many counters, Python's integers are faster than NumPy's arrays

_MULTIPLIERS, _WEYL = np.array([[[0xD2511F53], [0xCD9E8D57]], [[0xBB67AE85], [0x9E3779B9]]], np.uint64)

_MASK, _SHIFT = np.uint64(WORD), np.uint64(32)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random 32-bit words from a 64-bit key and a 128-bit counter.

    Args:
        key: two words. All words are int64 tensors in [0, 2**32), and broadcast against each other.
        counter: four words.

    Returns:
        Four words of the broadcast shape.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox((zero, zero), (zero, zero, zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    words = as_arrays(k0, k1, c0, c1, c2, c3)
    if words is None:
        return _rounds(k0, k1, c0, c1, c2, c3)
    return tuple([torch.from_numpy(word) for word in philox_of_arrays(*words)])


def as_arrays(*tensors: Tensor) -> list[np.ndarray[Any, Any]] | None:
    """The tensors as NumPy arrays, or None if the host cannot read them: traced, under `torch.vmap`, or not on the CPU."""
    if not all(map(is_host_readable, tensors)):
        return None
    try:
        return [tensor.numpy() for tensor in tensors]
    except RuntimeError:
        return None


def _rounds(k0: Any, k1: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple[Any, ...]:
    for _ in range(10):
        # The product of two words fits 64 bits; int64 wraps, and the mask undoes the sign extension of the shift. The words
        # c1 and c3 keep garbage above bit 32 until the next round masks them as part of c0 and c2.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) ^ c1 ^ k0) & WORD, p1, ((p0 >> 32) ^ c3 ^ k1) & WORD, p0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1 & WORD, c2, c3 & WORD


def philox_of_arrays(*words: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Philox4x32-10 of NumPy arrays, for eager mode on the CPU: the key's two words, then the counter's four.

    The 120 PyTorch operators of `philox` would take longer than the rest of a step of a few envs. NumPy's operators take half
    as long, and half as many are needed, because the two products of a round are computed as one product of pairs.
    """
    shape = np.broadcast(*words).shape
    pairs = np.empty((6, *shape), np.int64)
    for row, word in enumerate((2, 4, 5, 3, 1, 0)):
        pairs[row] = words[word]
    if pairs[0].size <= _SCALAR_LIMIT:
        rows = [_rounds(k0, k1, c0, c1, c2, c3) for c0, c2, c3, c1, k1, k0 in pairs.reshape(6, -1).T.tolist()]
        return list(np.array(rows, np.int64).T.reshape(4, *shape))
    c02, c31, k10 = pairs.view(np.uint64).reshape(3, 2, -1)
    for index in range(10):
        product = c02 * _MULTIPLIERS
        c20 = (product >> _SHIFT) ^ c31
        c20 ^= k10 + np.uint64(index) * _WEYL  # the mask below clears the garbage above bit 32
        c20 &= _MASK
        c02, c31 = c20[::-1], product
    return [word.view(np.int64).reshape(shape) for word in (c02[0], c31[1] & _MASK, c02[1], c31[0] & _MASK)]
