"""What code can ask about a tensor: whether it is traced, and whether the host can read it."""

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
