"""Backends: from a traced graph to a callable. The names of PyTorch's compilers that are not public live here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

try:
    from torch._inductor import compile as inductor
except ImportError:
    inductor = None  # type: ignore[assignment]

Option: TypeAlias = str | int | float | bool | None
Options: TypeAlias = Mapping[str, Option]
Run: TypeAlias = Callable[..., Sequence[Tensor]]

# The C++ wrapper calls the kernels of a graph without Python in between.
_CPU_OPTIONS: Options = {"cpp_wrapper": True, "size_asserts": False}


def compile_graph(graph: GraphModule, example: Sequence[Tensor], backend: str, options: Options) -> Run:
    """A callable that computes the graph for inputs like the example, which are fake tensors.

    Inductor is called directly, without the guards of `torch.compile`, because the caller has checked the inputs. Where this
    PyTorch does not have it, `torch.compile` takes its place, and a call takes longer.
    """
    if backend == "eager":
        return graph
    if backend == "inductor":
        options = {**(_CPU_OPTIONS if example[0].device.type == "cpu" else {}), **options}
        if inductor is not None:
            return inductor(graph, list(example), options=dict(options))  # type: ignore[no-any-return]
    return torch.compile(graph, fullgraph=True, dynamic=False, backend=backend, options=dict(options) or None)
