"""Detects draws from global random generators, which no seed of an env reaches."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchwrap._core.errors import refusal

Generator = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions that read and write the state of a generator."""

PYTHON_GENERATORS: dict[str, Generator] = {
    "Python's random": (random.getstate, random.setstate),
    "numpy.random": (np.random.get_state, np.random.set_state),
}
SCALARS = (bool, int, float, complex, str, bytes, type(None))


@contextlib.contextmanager
def no_foreign_draws(owner: str, remedy: str, device: torch.device | None) -> Iterator[None]:
    """Raises a TypeError if the block draws from a global generator, and puts its state back."""
    if device is None:
        yield
        return
    torch_generator = (torch.get_rng_state, torch.set_rng_state)
    generators = {**PYTHON_GENERATORS, "PyTorch's global generator": torch_generator}
    if device.type not in ("cpu", "meta", "mps"):  # the functions of MPS take no device
        backend = torch.get_device_module(device)
        generators[f"PyTorch's global generator of {device}"] = (
            lambda: backend.get_rng_state(device),
            lambda state: backend.set_rng_state(state, device),
        )
    before = {name: read() for name, (read, _) in generators.items()}
    yield
    drawn = []
    for name, (read, write) in generators.items():
        if not equal(before[name], read()):
            write(before[name])
            drawn.append(name)
    if drawn:
        sentence = remedy[:1].upper() + remedy[1:]
        raise TypeError(refusal(owner, f"must not draw from {drawn[0]}", remedy=sentence))


def equal(first: Any, second: Any) -> bool:
    """Whether two Python values are equal: scalars, arrays, tensors, and containers of them."""
    if first is second or type(first) is not type(second):
        return first is second
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, list | tuple | collections.deque):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict):
        same_keys = list(first) == list(second)
        return same_keys and all(map(equal, first.values(), second.values()))
    return isinstance(first, (*SCALARS, set)) and bool(first == second)
