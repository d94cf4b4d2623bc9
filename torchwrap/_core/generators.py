"""Detects draws that no seed of an env reaches, and draws that are not independent."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torchwrap._core.errors import refusal
from torchwrap._core.operators import OperatorMode

_PYTORCH = "PyTorch's global generator"

DRAWING = re.compile(
    "rand.*|(normal|bernoulli)_?|(uniform|exponential|cauchy|geometric|log_normal)_|multinomial|"
    "poisson|binomial|gumbel_softmax|_standard_gamma|_sample_dirichlet"
)
"""Names of PyTorch's operators that draw in every call."""


@contextlib.contextmanager
def no_foreign_draws(owner: str, remedy: str, device: torch.device | None) -> Iterator[None]:
    """Raises a TypeError if the block draws from a global generator.

    Without a device, the block may draw. Other threads may draw too: while any runs, the states of
    generators say nothing about this one, so only PyTorch's operators in this thread are refused.
    """
    if device is None:
        yield
        return
    drawn: list[str] = []
    is_alone = threading.active_count() == 1
    before = _states(device)
    try:
        with contextlib.nullcontext() if is_alone else _RefuseDraws(drawn):
            yield
    except Exception:
        if not drawn:
            raise
    if is_alone and threading.active_count() == 1:
        after = _states(device)
        drawn += [name for name in before if before[name] != after[name]]
    if drawn:
        raise TypeError(refusal(owner, f"must not draw from {drawn[0]}", remedy=remedy))


def _states(device: torch.device) -> dict[str, Any]:
    """The states of the global generators by name, as values that can be compared."""
    states: dict[str, Any] = {
        "Python's random": random.getstate(),
        "numpy.random": [np.asarray(part).tolist() for part in np.random.get_state()],
        _PYTORCH: torch.get_rng_state().tolist(),
    }
    if device.type not in ("cpu", "meta", "mps"):  # the functions of MPS take no device
        state = torch.get_device_module(device).get_rng_state(device)
        states[f"{_PYTORCH} of {device}"] = state.tolist()
    return states


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Puts the global generators back into their states at the end of the block."""
    accessors: list[tuple[Callable[..., Any], ...]] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            accessors.append((module.get_rng_state_all, module.set_rng_state_all))
    if torch.backends.mps.is_available():
        accessors.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
    states = [get_state() for get_state, _ in accessors]
    try:
        yield
    finally:
        for (_, set_state), state in zip(accessors, states, strict=True):
            set_state(state)


class _RefuseDraws(OperatorMode):
    """Refuses and notes the draws of this thread: a mode is active in one thread only."""

    def __init__(self, drawn: list[str]) -> None:
        super().__init__()
        self.drawn = drawn

    def operator(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if DRAWING.fullmatch(name) and kwargs.get("generator") is None:
            self.drawn.append(_PYTORCH)
            raise TypeError(name)
        return func(*args, **kwargs)


keys_of_thread: dict[int, list[tuple[Any, ...]]] = {}
"""The keys of draws in threads that run a block of `no_key_twice`, with their tensors."""


def note(words: tuple[Any, ...], *numbers: int) -> None:
    """Notes the key of a draw. Its words stay alive, so that their ids are not used again."""
    if not keys_of_thread or torch.compiler.is_compiling():
        return
    keys = keys_of_thread.get(threading.get_ident(), [])
    if not words[-1].is_inference():  # such tensors count no writes
        words = tuple([getattr(word, "held_from", word) for word in words])
        versions = [(id(word), word._version) for word in words]
        keys.append(((*versions, *numbers), words))


def note_held(held: Any, word: Any) -> None:
    """Marks a held word as the same draw coordinate as its source."""
    if keys_of_thread and not torch.compiler.is_compiling():
        held.held_from = word


@contextlib.contextmanager
def no_key_twice(owner: str) -> Iterator[None]:
    """Raises a TypeError if two draws of the block have the same key, and so are correlated."""
    thread = threading.get_ident()
    is_outermost = thread not in keys_of_thread
    keys = keys_of_thread.setdefault(thread, [])
    start = len(keys)
    try:
        yield
    finally:
        if is_outermost:
            del keys_of_thread[thread]
    found = [key for key, _ in keys[start:]]
    if len(set(found)) < len(found):
        remedy = "Draw again from `key.fold_in(1)`, `key.fold_in(2)`, ..., which are independent"
        raise TypeError(refusal(owner, "must not draw twice from one key", remedy=remedy))
