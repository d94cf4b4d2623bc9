"""Backends: from a traced graph to a callable. The names of PyTorch's compilers that are not public live here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

try:
    from torch._inductor import compile as inductor
except ImportError:
    inductor = None  # type: ignore[assignment]

Options: TypeAlias = Mapping[str, str | int | float | bool | None]
Run: TypeAlias = Callable[..., Sequence[Tensor]]

# The C++ wrapper calls the kernels of a graph without Python in between. Rows are often a few numbers wide: the last numbers
# of a row take less time one by one than as a part of a vector, and frames are stacked in one pass.
_CPU_OPTIONS: Options = {
    "cpp_wrapper": True,
    "size_asserts": False,
    "cpp.enable_loop_tail_vec": False,
    "force_pointwise_cat": True,
}


def compile_graph(graph: GraphModule, example: Sequence[Tensor], backend: str, options: Options) -> Run:
    """A callable that computes the graph for inputs like the example. It is ready when this returns.

    Inductor is called directly, without the guards of `torch.compile`, because the caller has checked the inputs. Where this
    PyTorch does not have it, `torch.compile` takes its place, and a call takes longer.
    """
    if backend == "eager":
        return graph
    cuda = {tensor.device for tensor in example if tensor.is_cuda}
    if backend == "inductor":
        known = torch._inductor.list_options()
        options = {**{name: value for name, value in _CPU_OPTIONS.items() if name in known and not cuda}, **options}
        if inductor is not None:
            fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
            return inductor(graph, fakes, options=dict(options))  # type: ignore[no-any-return]
    run: Run = torch.compile(graph, fullgraph=True, dynamic=False, backend=backend, options=dict(options) or None)  # type: ignore[arg-type]
    with torch.random.fork_rng(cuda):
        run(*copy.deepcopy(example))  # it compiles at its first call
    return run
