"""Detects draws that no seed of an env reaches, and draws that are not independent."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchwrap._core.errors import refusal
from torchwrap._core.operators import OperatorMode

Generator = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions that read and write the state of a generator."""

_OF_PYTORCH = "PyTorch's global generator"
_ON_HOST: dict[str, Generator] = {
    "Python's random": (random.getstate, random.setstate),
    "numpy.random": (np.random.get_state, np.random.set_state),
    _OF_PYTORCH: (torch.get_rng_state, torch.set_rng_state),
}

DRAWING = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm"),
    *("normal", "bernoulli", "multinomial", "poisson", "binomial", "gumbel_softmax"),
    *("normal_", "uniform_", "random_", "exponential_", "bernoulli_", "cauchy_", "geometric_"),
    *("log_normal_", "_standard_gamma", "_sample_dirichlet"),
}
"""Names of PyTorch's operators that draw in every call."""


@contextlib.contextmanager
def no_foreign_draws(owner: str, remedy: str, device: torch.device | None) -> Iterator[None]:
    """Raises a TypeError if the block draws from a global generator, and puts its state back.

    Without a device, the block may draw. Other threads may draw too: while any runs, the states of
    generators say nothing about this one, so only PyTorch's operators in this thread are refused.
    """
    if device is None:
        yield
        return
    generators = dict(_ON_HOST)
    if device.type not in ("cpu", "meta", "mps"):  # the functions of MPS take no device
        backend = torch.get_device_module(device)
        generators[f"{_OF_PYTORCH} of {device}"] = (
            lambda: backend.get_rng_state(device),
            lambda state: backend.set_rng_state(state, device),
        )
    drawn: list[str] = []
    if threading.active_count() > 1:
        try:
            with _RefuseDraws(drawn):
                yield
        except Exception:
            if not drawn:
                raise
    else:
        before = {name: read() for name, (read, _) in generators.items()}
        yield
        for name, (read, write) in generators.items():
            if threading.active_count() == 1 and _content(read()) != _content(before[name]):
                write(before[name])
                drawn.append(name)
    if drawn:
        raise TypeError(refusal(owner, f"must not draw from {drawn[0]}", remedy=remedy))


class _RefuseDraws(OperatorMode):
    """Refuses and notes the draws of this thread: a mode is active in one thread only."""

    def __init__(self, drawn: list[str]) -> None:
        super().__init__()
        self.drawn = drawn

    def operator(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in DRAWING and kwargs.get("generator") is None:
            self.drawn.append(_OF_PYTORCH)
            raise TypeError(name)
        return func(*args, **kwargs)


keys_of_thread: dict[int, list[tuple[Any, ...]]] = {}
"""The keys of draws in threads that run a block of `no_key_twice`, with their tensors."""


def note(key: tuple[Any, ...], words: tuple[Any, ...]) -> None:
    """Notes the key of a draw. Its words stay alive, so that their ids are not used again."""
    keys = keys_of_thread.get(threading.get_ident(), [])
    keys.append((key, words))


@contextlib.contextmanager
def no_key_twice(owner: str) -> Iterator[None]:
    """Raises a TypeError if two draws of the block have the same key, and so are correlated."""
    thread = threading.get_ident()
    outer = keys_of_thread.get(thread)
    found = keys_of_thread[thread] = []
    try:
        yield
    finally:
        del keys_of_thread[thread]
        if outer is not None:
            outer += found
            keys_of_thread[thread] = outer
    if len({key for key, _ in found}) < len(found):
        remedy = "Draw again from `key.fold_in(1)`, `key.fold_in(2)`, ..., which are independent"
        raise TypeError(refusal(owner, "must not draw twice from one key", remedy=remedy))


def _content(state: Any) -> list[Any]:
    """The state of a generator as values that can be compared."""
    parts = (state.numpy(),) if isinstance(state, Tensor) else state
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]
