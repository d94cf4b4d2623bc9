"""The check that a layer draws no random numbers that no seed of an env reaches, in its first call."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

PYTHON_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "Python's random": (random.getstate, random.setstate),
    "numpy.random": (np.random.get_state, np.random.set_state),
}
SCALARS = (bool, int, float, complex, str, bytes, type(None))


@contextlib.contextmanager
def no_foreign_draws(owner: str, remedy: str, device: torch.device | None) -> Iterator[None]:
    """Raises a TypeError if the block draws from a global generator, whose state is put back. None: the block may draw."""
    if device is None:
        yield
        return
    generators = {
        **PYTHON_GENERATORS,
        "PyTorch's global generator": (torch.get_rng_state, torch.set_rng_state),
    }
    if device.type not in ("cpu", "meta", "mps"):  # the function of MPS takes no device
        own = torch.get_device_module(device)
        accessors = (
            lambda: own.get_rng_state(device),
            lambda state: own.set_rng_state(state, device),
        )
        generators[f"PyTorch's global generator of {device}"] = accessors
    before = {name: get() for name, (get, _) in generators.items()}
    yield
    if changed := [name for name, (get, _) in generators.items() if not equal(before[name], get())]:
        for name in changed:
            generators[name][1](before[name])
        raise TypeError(f"{owner} drew from {changed[0]}: {remedy}.")


def equal(first: Any, second: Any) -> bool:
    """Whether two Python values are equal: scalars, arrays, tensors, and containers of them."""
    if first is second or type(first) is not type(second):
        return first is second
    if isinstance(first, np.ndarray | Tensor):
        return (
            np.array_equal(first, second)
            if isinstance(first, np.ndarray)
            else torch.equal(first, second)
        )
    if isinstance(first, list | tuple | collections.deque):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(map(equal, first.values(), second.values()))
    return isinstance(first, (*SCALARS, set)) and bool(first == second)
