"""What code can ask about a trace, and hints that only a traced graph reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_tracing(tensor: Tensor) -> bool:
    """True for a tensor without values, from which a graph is traced."""
    return isinstance(tensor, FakeTensor) or torch.compiler.is_compiling()


def is_host_readable(tensor: Tensor) -> bool:
    """True if the host can read this tensor without a device sync: it is on the CPU and not being traced."""
    return tensor.is_cpu and not is_tracing(tensor)


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
