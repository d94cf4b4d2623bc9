"""BufferPool: storage for collectors on the CPU, reused once nothing references it."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MAX_PIECES = 4


def raise_mmap_threshold() -> None:
    """Lets the C library keep up to 64 MiB of freed memory for the next step, instead of mapping and zeroing it again.

    glibc takes the largest block of up to 32 MiB that was freed so far as its threshold, and twice that as its limit.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


class BufferPool:
    """A pool of same-shaped tensors whose storage is reused once no tensor or view references it.

    PyTorch does not cache memory on the CPU, and the C library returns large blocks to the operating system: with 16,384 envs,
    mapping and zeroing each page again takes half of a compiled step. Here NumPy owns the memory. A tensor's storage holds a
    reference to its array until the last view is gone, so the array's reference count tells whether it is free. Views of the
    rows are made once per piece of memory, because a view costs as much as a small operator.

    Args:
        shape: of the tensors; the first dimension is their rows.
        dtype: of the tensors.
        device: of the tensors. On other devices than the CPU each tensor is allocated when it is asked for.

    >>> pool = BufferPool((2**18,), torch.float32)
    >>> first, second = pool.empty(), pool.empty()
    >>> address, view = first.data_ptr(), first[7:]
    >>> del first
    >>> pool.empty().data_ptr() == address  # the view still references it
    False
    >>> del view
    >>> pool.empty().data_ptr() == address
    True
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self.pieces: list[np.ndarray[Any, Any]] = []
        self.rows_at: dict[int, list[Tensor]] = {}
        self.base_count = 0  # references to a piece that is free, before it is in the list

    def empty(self) -> Tensor:
        """Returns a tensor whose memory nothing else references."""
        if self.device.type != "cpu" or not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for piece in self.pieces:  # referenced by the list, by its own rows and here
            if sys.getrefcount(piece) == self.base_count + 1:
                return self._tensor(piece)
        if len(self.pieces) == _MAX_PIECES:  # the caller keeps them all, so they will not be free soon
            return torch.empty(self.shape, dtype=self.dtype)
        piece = np.empty(self.num_bytes, np.uint8)
        with torch.inference_mode(False):  # views made in inference mode could be written to in inference mode only
            own = self._tensor(piece)
            self.rows_at[own.data_ptr()] = _rows(own)
        self.base_count = sys.getrefcount(piece)
        self.pieces.append(piece)
        return self._tensor(piece)

    def rows(self, tensor: Tensor) -> list[Tensor]:
        """The rows of a tensor of this pool, to write to; bools as bytes, which compilers store in vectors."""
        return self.rows_at.get(tensor.data_ptr()) or _rows(tensor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pieces": [], "rows_at": {}}

    def _tensor(self, piece: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(piece).view(self.dtype).view(self.shape)


def _rows(tensor: Tensor) -> list[Tensor]:
    return list((tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor).unbind(0))
