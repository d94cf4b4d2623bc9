"""Backends: from a traced graph to a callable. Settings of PyTorch's compilers live here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchwrap._compile.builds import Builds, compiling
from torchwrap._compile.direct import Compiled, inner_graphs
from torchwrap._compile.trace import written_inputs

# Sizes and strides are fixed when a graph is traced.
_INDUCTOR = {"size_asserts": False}
# The C++ wrapper around the kernels costs half of the Python one, and half of that again with small tensors on its stack.
# `toolchain` precompiles fewer headers.
_METADATA = {"wrapper": "torchwrap", "fusion": "any distance"}  # tells Inductor's cache whose graph it is
_CPU: dict[str, Any] = {
    "cpp_wrapper": True,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.allow_stack_allocation": True,
    "aot_inductor.metadata": _METADATA,
}
# The last components of a row one by one, and not as a masked vector. See `_has_short_tails`.
_CPU_SHORT_TAILS = {"cpp.enable_loop_tail_vec": False}
# With few envs most loops are over before another thread has started.
_SMALL_BATCH, _CPU_SMALL = 1024, {"cpp.min_chunk_size": 4096}

# On CUDA, a value that is computed again for each of its users costs less than one that is written and read, unless it takes
# long, such as random numbers. With few envs, launches cost more than bytes, so independent kernels become one. With many,
# only pointwise ones do: a scan among them would run in one block.
_CUDA = {"realize_reads_threshold": 24, "realize_opcount_threshold": 64, "combo_kernels": True}
_LARGE_BATCH, _CUDA_LARGE = 65536, {"combo_kernels_pointwise_only": True}


def backends() -> list[str]:
    """Names of PyTorch's compilers."""
    return torch._dynamo.list_backends(exclude_tags=())


def prepare(builds: Builds, backend: str, options: dict[str, Any], device: torch.device) -> None:
    """Begins with what takes long and needs no graph."""
    if backend == "inductor" and device.type == "cpu":
        from torchwrap._compile import toolchain  # imports Inductor

        with toolchain.installed(builds), torch._inductor.config.patch(_CPU), _vectors(options):
            builds.pool.submit(toolchain.Header().precompile)
            builds.pool.submit(torch._inductor.codecache.torch_key)  # hashes Inductor's sources, once per process


def compile_graph(
    graph: torch.fx.GraphModule,
    example: list[Tensor],
    backend: str,
    options: dict[str, Any],
    *,
    device: torch.device,
    num_rows: int,
    streamed: Sequence[int] = (),
    later: bool = False,
) -> Compiled:
    """A callable that computes the graph, for inputs like the example.

    In a block of `compiling`, its C++ may still be built when this returns; with `later`, even after the block. A call waits.
    What it writes to the inputs with the indices `streamed` is kept in no cache.
    """
    if backend != "inductor":
        return Compiled(torch._dynamo.lookup_backend(backend)(graph, example))
    # The on-disk caches of compiled graphs need a ShapeEnv. Tracing has none, because it would admit data-dependent sizes.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes: list[Any] = [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
    with compiling() as builds, contextlib.ExitStack() as stack:
        builds.num_graphs += 1
        inner: list[Any] = []
        if device.type == "cpu":
            from torchwrap._compile import duplicates, fusion, kernels, stack_allocation, toolchain  # they import Inductor

            stack_allocation.install()
            kernels.install()
            stack.enter_context(fusion.at_any_distance())
            stack.enter_context(toolchain.installed(builds, later))
            tails = _CPU_SHORT_TAILS if _has_short_tails(example, num_rows, _vector_bits(options)) else {}
            metadata = {"aot_inductor.metadata": _METADATA | kernels.metadata(streamed)}
            passes = {"post_grad_custom_pre_pass": duplicates.StoreOnce()}
            inner = stack.enter_context(inner_graphs())
            options = _CPU | passes | metadata | (_CPU_SMALL if num_rows < _SMALL_BATCH else {}) | tails | options
        elif device.type == "cuda":
            options = _CUDA | (_CUDA_LARGE if num_rows >= _LARGE_BATCH else {}) | options
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
        stack.enter_context(_dtype_rules_once())
        written = written_inputs(graph.graph)  # before Inductor changes the graph
        indices = [index for index, node in enumerate(graph.graph.find_nodes(op="placeholder")) if node in written]
        return Compiled(torch._inductor.compile(graph, fakes, options=_INDUCTOR | options), inner, indices)  # type: ignore


@contextlib.contextmanager
def _dtype_rules_once() -> Iterator[None]:
    # Inductor makes the rules for dtypes of all operators again for each operator of each kernel: a tenth of its time.
    from torch._inductor.codegen import common

    namespace, name = vars(common), "DtypePropagationOpsHandler"
    rules = namespace[name]
    namespace[name] = functools.cache(rules)
    try:
        yield
    finally:
        namespace[name] = rules


def _has_short_tails(example: list[Tensor], num_rows: int, vector_bits: int) -> bool:
    """Whether the last components of a row are faster one by one: behind whole vectors, less than half of another one.

    What a kernel loops over row by row has the width of what all rows share, such as statistics, or of the frames of a stack.
    Vectors that are neither of AVX2 nor of AVX-512 have no masked loads and stores.
    """
    lanes, floats = vector_bits // 32, [tensor for tensor in example if tensor.is_floating_point()]
    widths = [tensor.shape[-1] for tensor in floats if tensor.dim() > 2 or (tensor.dim() == 1 and len(tensor) != num_rows)]
    return lanes < 8 or any(width > lanes and 0 < width % lanes < lanes // 2 for width in widths)


def _vector_bits(options: dict[str, Any]) -> int:
    """Width of the vectors that Inductor will use; 0 for none."""
    from torch._inductor import cpu_vec_isa

    with _vectors(options):
        return cpu_vec_isa.pick_vec_isa().bit_width()


def _vectors(options: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    from torch._inductor import config

    return config.patch({"cpp.simdlen": options.get("cpp.simdlen", config.cpp.simdlen)})
