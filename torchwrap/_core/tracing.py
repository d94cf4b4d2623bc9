"""What code can ask about a tensor: whether it is traced, and whether the host can read it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class _Thread(threading.local):
    traces = False


_thread = _Thread()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """This thread traces a graph: it computes with tensors that have no values, whatever it finds in modules."""
    _thread.traces = True
    try:
        yield
    finally:
        _thread.traces = False


def is_tracing(tensor: Tensor) -> bool:
    """True if nothing is computed with the values of this tensor, because a graph is traced from it."""
    return _thread.traces or isinstance(tensor, FakeTensor) or torch.compiler.is_compiling()


def is_host_readable(tensor: Tensor) -> bool:
    """True if the host can read this tensor without a device sync: it is on the CPU and not being traced."""
    return tensor.is_cpu and not is_tracing(tensor)
