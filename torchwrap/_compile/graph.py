"""Graph: a function of tensors, traced once, compiled, and then run without Python between its operators.

The names of PyTorch's compilers that are not public live here.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchwrap._compile.cuda_graph import CudaGraph
from torchwrap._compile.inputs import Function, Inputs
from torchwrap._compile.trace import trace
from torchwrap._core import rows
from torchwrap._core.rows import Nested

try:
    from torch._inductor import compile as inductor
    from torch._inductor import list_options
except ImportError:
    inductor, list_options = None, list  # type: ignore[assignment]

_LOG = logging.getLogger("torchwrap")

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


def captures(device: torch.device) -> bool:
    """Whether functions of tensors on this device are captured as CUDA graphs."""
    return device.type == "cuda"


class Settings(NamedTuple):
    """How to compile."""

    backend: str
    options: Options


class Program(NamedTuple):
    """A compiled graph: from the tensors of `Inputs` and the leaves of the arguments to the leaves of the result."""

    run: Callable[[list[Tensor]], Sequence[Tensor]]
    build: Callable[[Iterator[Tensor]], Nested]
    """Builds the result from its leaves."""


class Graph:
    """A function of Tensors, TensorDicts, and tuples and dicts of them, which writes to buffers in place, as one graph.

    It is traced and compiled at the first call, and again whenever a call finds another structure of the arguments, another
    dtype, shape or device, other modules, or another mode of them, such as `train()` and `eval()`. If it is `captured`, a call
    on a CUDA device is one CUDA graph. It is not if it is a part of a larger one.
    """

    def __init__(
        self, function: Function, inputs: Inputs, settings: Settings, *, captured: bool = True
    ) -> None:
        self.function, self.inputs, self.settings, self.captured = (
            function,
            inputs,
            settings,
            captured,
        )
        self.programs: dict[object, Program] = {}
        self._version = inputs.version

    def __call__(self, *values: Nested) -> Nested:
        program, tensors = self.prepare(*values)
        return program.build(iter(program.run(tensors)))

    def prepare(self, *values: Nested) -> tuple[Program, list[Tensor]]:
        """The program for arguments like these, which is compiled if it does not exist yet, and what to run it on."""
        state, tensors = self.inputs.current()
        found: list[Tensor] = []
        structure = rows.flatten(values, found)
        leaves = [leaf.contiguous() for leaf in found]
        key = state, structure, tuple([(leaf.dtype, leaf.shape, leaf.device) for leaf in leaves])
        program = self.programs.get(key)
        if program is None:
            if (
                self._version != self.inputs.version
            ):  # programs for other modules cannot be called any more
                self.programs, self._version = {}, self.inputs.version
            program = self.programs[key] = self._compile(values)
        return program, [*tensors, *leaves]

    @torch.inference_mode(False)  # because tensors made in inference mode have no version counter
    @torch.no_grad()
    def _compile(self, values: tuple[Nested, ...]) -> Program:
        name, start = self.function.__name__.strip("_"), time.perf_counter()
        _LOG.info("compiling the %s of %r", name, self.inputs.roots[0])
        graph, result = trace(self.function, self.inputs, values)
        used, tensors = _prune(graph), [*self.inputs.current()[1], *rows.leaves(values)]
        example = [
            tensors[index].contiguous() if index >= self.inputs.num_tensors else tensors[index]
            for index in used
        ]
        run = _Compiled(compile_graph(graph, example, *self.settings), used)
        _LOG.info("compiled the %s in %.1f s", name, time.perf_counter() - start)
        if self.captured and captures(example[0].device):
            return Program(CudaGraph(run, self.inputs.num_tensors), rows.builder(result))
        return Program(run, rows.builder(result))


class _Compiled:
    """Runs a compiled graph on the tensors that it uses, and returns tensors that share no memory."""

    def __init__(self, run: Run, used: list[int]) -> None:
        self.run, self.used = run, used
        self.shared: list[int] | None = None

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        leaves = list(self.run(*map(tensors.__getitem__, self.used)))
        # Inductor drops a copy of a copy if both are results. Which ones it drops is the same in every run.
        if self.shared is None:
            memory = [leaf.untyped_storage().data_ptr() for leaf in leaves]
            self.shared = [
                index
                for index, leaf in enumerate(leaves)
                if leaf.numel() and memory[index] in memory[:index]
            ]
        for index in self.shared:
            leaves[index] = leaves[index].clone()
        return leaves


def _prune(graph: GraphModule) -> list[int]:
    """Removes inputs that the graph does not use. Returns the indices of the others."""
    used = []
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if node.users:
            used.append(index)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def compile_graph(
    graph: GraphModule, example: Sequence[Tensor], backend: str, options: Options
) -> Run:
    """A callable that computes the graph for inputs like the example. It is ready when this returns.

    Inductor is called directly, if PyTorch has it, without the guards of `torch.compile`: the caller has checked the inputs.
    """
    if backend == "eager":
        return graph
    cuda = {tensor.device for tensor in example if tensor.is_cuda}
    if backend == "inductor":
        known = () if cuda else list_options()
        options = {
            **{name: value for name, value in _CPU_OPTIONS.items() if name in known},
            **options,
        }
        if inductor is not None:
            fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
            return inductor(graph, fakes, options=dict(options))  # type: ignore[no-any-return]
    run: Run = torch.compile(
        graph, fullgraph=True, dynamic=False, backend=backend, options=dict(options) or None
    )  # type: ignore[arg-type]
    with torch.random.fork_rng(cuda):
        run(*copy.deepcopy(example))  # it compiles at its first call
    return run
