"""BufferPool: storage for collectors on the CPU, reused once nothing references it."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MAX_PIECES = 4
_LINE = 64  # bytes


def raise_mmap_threshold() -> None:
    """Lets the C library keep up to 64 MiB of freed memory for the next step, instead of mapping and zeroing it again.

    glibc takes the largest block of up to 32 MiB that was freed so far as its threshold, and twice that as its limit.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")


class _Piece:
    """Memory, and a weak reference to the view of it that was lent last."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self.lent: Any = lambda: None

    def lend(self) -> np.ndarray[Any, Any]:
        view = self.memory.view()
        self.lent = weakref.ref(view)
        return view


class BufferPool:
    """A pool of same-shaped tensors whose storage is reused once no tensor or view references it.

    PyTorch does not cache memory on the CPU, and the C library returns large blocks to the operating system: with 16,384 envs,
    mapping and zeroing each page again takes half of a compiled step. Here NumPy owns the memory. Each tensor is made from a
    NumPy view of its own, to which its storage holds a reference until the last tensor, view or array of it is gone. A weak
    reference to that view tells whether the memory is free. Views of the rows are made once per piece of memory, because a
    view costs as much as a small operator.

    A thread takes a piece out of the list while it looks at it, so two threads never lend the same one. There is no lock,
    because an interrupt could come between its release and the end of the block. One that comes here costs a piece at most.

    Args:
        shape: of the tensors; the first dimension is their rows.
        dtype: of the tensors.
        device: of the tensors. On other devices than the CPU each tensor is allocated when it is asked for.

    >>> pool = BufferPool((2**18,), torch.float32)
    >>> first, second = pool.empty(), pool.empty()
    >>> address, view = first.data_ptr(), first[7:]
    >>> del first
    >>> third = pool.empty()
    >>> third.data_ptr() == address  # the view still references it
    False
    >>> del view
    >>> pool.empty().data_ptr() == address
    True
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self.pieces: list[_Piece] = []  # the one that was lent last at the end
        self.rows_at: dict[int, list[Tensor]] = {}

    def empty(self) -> Tensor:
        """Returns a tensor whose memory nothing else references."""
        if self.device.type != "cpu" or not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        busy: list[_Piece] = []
        found = None
        while found is None and len(busy) < _MAX_PIECES:
            try:
                piece = self.pieces.pop()
            except IndexError:
                found = self._new()
            else:
                if piece.lent() is None:
                    found = piece
                else:
                    busy.append(piece)
        tensor = None if found is None else self._tensor(found.lend())
        self.pieces += [*reversed(busy), *([] if found is None else [found])]
        del self.pieces[:-_MAX_PIECES]  # of several threads
        if tensor is None:  # the caller keeps them all, so they will not be free soon
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return tensor

    def _new(self) -> _Piece:
        try:
            dtype = torch.empty(0, dtype=self.dtype, device="cpu").numpy().dtype
            piece = _Piece(_aligned(self.num_bytes).view(dtype).reshape(self.shape))
        except TypeError:  # NumPy has no such dtype
            piece = _Piece(_aligned(self.num_bytes))
        with torch.inference_mode(False):  # views made in inference mode could be written to in inference mode only
            own = self._tensor(piece.memory)
            self.rows_at[own.data_ptr()] = _rows(own)
        return piece

    def rows(self, tensor: Tensor) -> list[Tensor]:
        """The rows of a tensor of this pool, to write to; bools as bytes, which compilers store in vectors."""
        return self.rows_at.get(tensor.data_ptr()) or _rows(tensor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pieces": [], "rows_at": {}}

    def _tensor(self, piece: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(piece)
        return tensor if tensor.dtype == self.dtype else tensor.view(self.dtype).view(self.shape)


def references(tensor: Tensor) -> int:
    """The number of references to a tensor's storage, which each other tensor, view or array of it raises."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined, no-any-return]


def _aligned(num_bytes: int) -> np.ndarray[Any, Any]:
    # From the beginning of a line of the cache on, so that no vector lies in two.
    memory = np.empty(num_bytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + num_bytes]


def _rows(tensor: Tensor) -> list[Tensor]:
    return list((tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor).unbind(0))
