"""Graph: a function of tensors, traced once and then run without Python between its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchwrap._compile.backend import Options, Run, compile_graph
from torchwrap._compile.cuda_graph import CudaGraph
from torchwrap._compile.inputs import Function, Inputs
from torchwrap._compile.trace import Trace, trace
from torchwrap._core import rows
from torchwrap._core.rows import Nested


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
    """A function of tensors and TensorDicts, which writes to buffers in place, as one graph.

    It is traced and compiled at the first call, and again whenever a call finds another structure of the arguments, another
    dtype, shape or device, other modules, or another mode of them, such as `train()` and `eval()`.

    Args:
        function: the function. Its arguments are Tensors, TensorDicts, and tuples and dicts of them.
        inputs: what it reads and writes besides its arguments.
        settings: how to compile.
        captured: whether a call is one CUDA graph, where the tensors are on a CUDA device. False for a part of a larger one.
    """

    def __init__(self, function: Function, inputs: Inputs, settings: Settings, *, captured: bool = True) -> None:
        self.function, self.inputs, self.settings, self.captured = function, inputs, settings, captured
        self.programs: dict[object, Program] = {}
        self._version = inputs.version

    def __call__(self, *values: Nested) -> Nested:
        program, tensors = self.prepare(*values)
        return program.build(iter(program.run(tensors)))

    def trace(self, *values: Nested) -> Trace:
        """The graph for arguments like these, not compiled."""
        return trace(self.function, self.inputs, values)

    def prepare(self, *values: Nested) -> tuple[Program, list[Tensor]]:
        """The program for arguments like these, which is compiled if it does not exist yet, and what to run it on."""
        state, tensors = self.inputs.current()
        found: list[Tensor] = []
        structure = rows.flatten(values, found)
        leaves = [leaf.contiguous() for leaf in found]
        key = state, structure, tuple([(leaf.dtype, leaf.shape, leaf.device) for leaf in leaves])
        program = self.programs.get(key)
        if program is None:
            if self._version != self.inputs.version:  # programs for other modules cannot be called any more
                self.programs, self._version = {}, self.inputs.version
            program = self.programs[key] = self._compile(values)
        return program, [*tensors, *leaves]

    @torch.inference_mode(False)  # because tensors made in inference mode have no version counter
    @torch.no_grad()
    def _compile(self, values: tuple[Nested, ...]) -> Program:
        graph, result = self.trace(*values)
        used, tensors = _prune(graph), [*self.inputs.current()[1], *rows.leaves(values)]
        example = [tensors[index].contiguous() if index >= self.inputs.num_tensors else tensors[index] for index in used]
        run = _Compiled(compile_graph(graph, example, *self.settings), used)
        if self.captured and captures(example[0].device):
            return Program(CudaGraph(run, self.inputs.num_tensors), rows.builder(result))
        return Program(run, rows.builder(result))


class _Compiled:
    """Runs a compiled graph on those of the tensors that it uses, and returns tensors that share no memory."""

    def __init__(self, run: Run, used: list[int]) -> None:
        self.run, self.used = run, used
        self.shared: list[int] | None = None

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        leaves = list(self.run(*[tensors[index] for index in self.used]))
        # Inductor drops a copy of a copy if both are results. Which ones it drops is the same in every run.
        if self.shared is None:
            self.shared = _shared(leaves)
        for index in self.shared:
            leaves[index] = leaves[index].clone()
        return leaves


def _shared(leaves: list[Tensor]) -> list[int]:
    """The indices of results in the memory of an earlier one."""
    found, known = [], set()
    for index, leaf in enumerate(leaves):
        memory = leaf.untyped_storage().data_ptr()
        if memory in known and leaf.numel():
            found.append(index)
        known.add(memory)
    return found


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
