"""Names of PyTorch that are not public: entry points of Inductor, guards, `scan`, lazy tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

inductor: Any = None
list_options: Any = list
try:
    from torch import _inductor

    list_options = _inductor.list_options
    # 2.7 fails if its cache on disk has the graph.
    if torch.__version__ >= (2, 8):  # type: ignore[operator]
        inductor = _inductor.compile
except (ImportError, AttributeError):
    pass
try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards: Any = None  # type: ignore[no-redef]
is_mapped: Any = None
"""Of a tensor: whether `torch.vmap` maps it, which then is one of several."""
scan_operator: Any = None
flat_scan_operator: Any = None
"""Of a function of the tensors of the carry, of a slice, and of those that stay the same."""
# Earlier ones have an operator that cannot be compiled again.
if torch.__version__ >= (2, 11):  # type: ignore[operator]
    try:
        from torch._C._functorch import is_batchedtensor
        from torch._higher_order_ops.scan import scan, scan_op
    except ImportError:
        pass
    else:
        is_mapped = is_batchedtensor
        scan_operator = scan
        flat_scan_operator = scan_op


def layout(tensor: Tensor) -> tuple[object, ...]:
    """What a graph takes for granted when it reads a tensor."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def layout_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Returns a function of the same tensors: whether they still have the layouts of now.

    It may say no for another reason, such as inference mode.
    """
    if TensorGuards is not None:
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return guards.check  # type: ignore[no-any-return]
    before = list(map(layout, tensors))
    return lambda *now: list(map(layout, now)) == before


def is_lazy(tensor: Tensor) -> bool:
    """True if memory holds other values, because an operation has been put off."""
    is_zero: bool = tensor._is_zerotensor()
    return is_zero or tensor.is_neg() or tensor.is_conj()
