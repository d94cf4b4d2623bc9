"""Hints to Inductor, which change how a traced graph computes a value, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from torchwrap._core.tracing import is_tracing

# PyTorch 2.11's Inductor cannot view bytes as bools.
_STORES_BYTES = torch.__version__ >= "2.13"


def realize(tensor: Tensor) -> Tensor:
    """Forces Inductor to compute a small tensor once, instead of again for each element that it is combined with.

    Inductor realizes the input of a view by strides. Bools pass through floats, because on CPUs it loads and stores a vector
    of bools element by element. Outside a trace the tensor is returned as it is.
    """
    if not is_tracing(tensor):
        return tensor
    if tensor.dtype == torch.bool:
        return realize(tensor.float()) != 0
    return tensor.as_strided(tensor.shape, tensor.stride())


def as_bytes(tensor: Tensor) -> Tensor:
    """Bools as uint8 0 and 1, in a graph through floats (see `realize`). Other tensors are returned as they are."""
    if tensor.dtype != torch.bool:
        return tensor
    return tensor.float().to(torch.uint8) if is_tracing(tensor) else tensor.view(torch.uint8)


def stored(tensor: Tensor) -> Tensor:
    """A result of a graph. Bools are stored as bytes, if Inductor can."""
    if tensor.dtype == torch.bool and not _STORES_BYTES:
        return tensor.float() != 0
    return as_bytes(tensor).view(tensor.dtype)
