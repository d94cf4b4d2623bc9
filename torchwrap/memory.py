"""Recycled: memory for rollouts on the CPU."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_PIECES = 4


def keep_freed() -> None:
    """Lets the C library keep up to 64 MiB of freed memory for the next step, instead of having it mapped and zeroed again.

    glibc takes the largest piece of up to 32 MiB that was freed so far for the measure of what comes and goes.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


class Recycled:
    """Tensors of one shape, in memory that is used again as soon as nobody holds it any more, by any view.

    PyTorch has no cache of memory on the CPU, and the C library hands large pieces back to the operating system: for 16,384
    envs, to have each page mapped and zeroed again takes half of a compiled step. Here NumPy owns the memory. A tensor's
    storage holds a reference to the array it lies in until its last view is gone, so the array's count of references tells.
    Views of its rows are made once for each piece of memory, for a view costs as much as a small operator.

    Args:
        shape, dtype, device: of the tensors, which have rows. Those on another device are allocated as ever.

    >>> recycled = Recycled((2**18,), torch.float32)
    >>> first, second = recycled.empty(), recycled.empty()
    >>> place, view = first.data_ptr(), first[7:]
    >>> del first
    >>> recycled.empty().data_ptr() == place  # the view is still there
    False
    >>> del view
    >>> recycled.empty().data_ptr() == place
    True
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self.pieces: list[np.ndarray[Any, Any]] = []
        self.rows_at: dict[int, list[Tensor]] = {}
        self.unheld = 0  # references to a piece that nobody uses, before it is in the list

    def empty(self) -> Tensor:
        """A tensor of memory that nobody else holds."""
        if self.device.type != "cpu" or not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for piece in self.pieces:  # held by the list, by its own rows and here
            if sys.getrefcount(piece) == self.unheld + 1:
                return self._tensor(piece)
        if len(self.pieces) == _MOST_PIECES:  # the caller collects them: they will not come back soon
            return torch.empty(self.shape, dtype=self.dtype)
        piece = np.empty(self.num_bytes, np.uint8)
        with torch.inference_mode(False):  # views that were made in it can be written to in it alone
            own = self._tensor(piece)
            self.rows_at[own.data_ptr()] = _rows(own)
        self.unheld = sys.getrefcount(piece)
        self.pieces.append(piece)
        return self._tensor(piece)

    def rows(self, tensor: Tensor) -> list[Tensor]:
        """The rows of a tensor from here, to write to; bools as bytes, which compilers store in vectors."""
        return self.rows_at.get(tensor.data_ptr()) or _rows(tensor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pieces": [], "rows_at": {}}

    def _tensor(self, piece: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(piece).view(self.dtype).view(self.shape)


def _rows(tensor: Tensor) -> list[Tensor]:
    return list((tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor).unbind(0))
