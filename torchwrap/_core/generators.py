"""Detects draws from global random generators, which no seed of an env reaches."""

from __future__ import annotations

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

_ON_HOST: dict[str, Generator] = {
    "Python's random": (random.getstate, random.setstate),
    "numpy.random": (np.random.get_state, np.random.set_state),
    "PyTorch's global generator": (torch.get_rng_state, torch.set_rng_state),
}


@contextlib.contextmanager
def no_foreign_draws(owner: str, remedy: str, device: torch.device | None) -> Iterator[None]:
    """Raises a TypeError if the block draws from a global generator, and puts its state back.

    Without a device, the block may draw.
    """
    if device is None:
        yield
        return
    generators = dict(_ON_HOST)
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
        if _content(read()) != _content(before[name]):
            write(before[name])
            drawn.append(name)
    if drawn:
        raise TypeError(refusal(owner, f"must not draw from {drawn[0]}", remedy=remedy))


def _content(state: Any) -> list[Any]:
    """The state of a generator as values that can be compared."""
    parts = (state.numpy(),) if isinstance(state, Tensor) else state
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]
