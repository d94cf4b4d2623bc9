"""Direct calls of compiled graphs, without PyTorch's wrappers around them, which take 4 us of each call."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def inner_graphs() -> Iterator[list[Any]]:
    """Within this block, lists the graphs without wrappers that Inductor makes or loads in this thread."""
    from torch._inductor.output_code import CompiledFxGraph

    found: list[Any] = []
    thread, post_compile = threading.get_ident(), CompiledFxGraph.post_compile

    def note(graph: Any, *args: Any, **keywords: Any) -> None:
        post_compile(graph, *args, **keywords)
        if threading.get_ident() == thread:
            found.append(graph)

    CompiledFxGraph.post_compile = note  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        CompiledFxGraph.post_compile = post_compile  # type: ignore[method-assign]


class Compiled:
    """A compiled graph, whose kernels are called directly if the wrappers only pass on what they get and return.

    Whether they do is seen in the first call: the kernels get the same tensors, behind the constants of the graph, and return
    those that the whole returns.

    Args:
        hidden: the graph as a backend returns it, in a wrapper that hides it from `torch.compile`. Only a caller that is being
            compiled needs that wrapper.
        inner: the graph without wrappers; none or several if it is not known.
        written: the indices of the inputs that it writes to. Autograd counts these writes.
    """

    def __init__(self, hidden: Callable[..., Any], inner: Sequence[Any] = (), written: Sequence[int] = ()) -> None:
        self.hidden, self.written = hidden, picker(written)
        self.wrapped = getattr(hidden, "_torchdynamo_orig_callable", hidden)
        for function in (hidden, self.wrapped):
            for name in ("zero_grad", "named_parameters", "named_buffers"):  # methods, which keep the graph that was compiled
                getattr(function, "__dict__", {}).pop(name, None)
        self.inner: Any = inner[0] if len(inner) == 1 else None
        self.kernels: Any = self.inner and self.inner.current_callable
        self.constants: Sequence[Tensor] = ()
        self.passes_on = False

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        if not self.passes_on:
            return self._watched(tensors) if self.inner else self.wrapped(*tensors)
        # The wrappers turn gradients and autocast off, and give the graph its name in a profile.
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.autograd.profiler._is_profiler_enabled:
            return self.wrapped(*tensors)
        torch._C._increment_version(self.written(tensors))  # type: ignore[attr-defined]
        return self.kernels([*self.constants, *tensors])  # type: ignore[no-any-return]

    def _watched(self, tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
        kernels, calls = self.kernels, []

        def watch(given: list[Tensor]) -> Sequence[Tensor]:
            copy = list(given)  # the kernels clear the list
            results = kernels(given)
            calls.append((copy, results))
            return results  # type: ignore[no-any-return]

        self.inner.current_callable = watch
        try:
            outputs = self.wrapped(*tensors)
        finally:
            self.inner.current_callable = kernels
        if len(calls) == 1:  # and not one of another thread's as well
            given, results = calls[0]
            count = len(given) - len(tensors)
            if _same(given[count:], tensors) and _same(results, outputs):
                self.constants, self.kernels, self.passes_on = given[:count], _entry(kernels), True
        return outputs


def picker(indices: Sequence[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Returns a function that picks the tensors with these indices."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda tensors: [tensors[index] for index in indices]


def _entry(kernels: Any) -> Any:
    # The function in C++, without the wrapper in Python that looks at the type of each input.
    for cell in getattr(kernels, "__closure__", None) or ():
        entry = cell.cell_contents
        if getattr(entry, "__name__", "") == "inductor_entry_cpp":
            handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
            results = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
            return lambda tensors: results(entry(handles(tensors)))
    return kernels


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
