"""Philox4x32-10, the counter-based generator, in plain integer operators.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. PyTorch uses the same generator on CUDA.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchwrap._core.rows import is_host_readable

WORD = 0xFFFFFFFF  # mask of a 32-bit word

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.int64)
_WEYL = np.array([[0xBB67AE85], [0x9E3779B9]], np.int64)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
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
