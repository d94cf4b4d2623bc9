"""Gradients are not recorded in the calls of an env."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])

_set_grad_enabled = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


def without_grad(function: AnyCallable) -> AnyCallable:
    """As `torch.no_grad()`, in a third of its time, which a step of a few envs notices.

    >>> without_grad(lambda tensor: tensor * 2)(torch.ones(1, requires_grad=True)).requires_grad
    False
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            _set_grad_enabled(enabled)

    return call  # type: ignore[return-value]
