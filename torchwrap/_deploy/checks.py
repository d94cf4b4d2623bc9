"""Checks of what a deployed policy is called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tensor(what: str, value: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises unless the value is a tensor `(batch, *shape)` of this dtype."""
    fits = isinstance(value, Tensor) and value.dtype == dtype and value.dim() == 1 + len(shape)
    if not fits or tuple(value.shape[1:]) != tuple(shape):
        got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
        needed = ", ".join(map(str, ("batch", *shape)))
        raise ValueError(f"This deployed policy needs {what} of shape ({needed}) {dtype}, but got {got}.")


def sizes(given: Mapping[str, Tensor]) -> None:
    """Raises unless all tensors have the same number of rows."""
    found = {name: value.shape[0] for name, value in given.items()}
    (_, first), *others = found.items()
    if any(size != first for _, size in others):
        raise ValueError(f"This deployed policy needs inputs with the same number of rows, but got {found}.")
