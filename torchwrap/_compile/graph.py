"""Graph: a function of tensors, traced once and then run without Python between its operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from torchwrap._compile import replay
from torchwrap._compile.builds import compiling
from torchwrap._compile.direct import picker
from torchwrap._compile.inductor import compile_graph
from torchwrap._compile.reads import Reads
from torchwrap._compile.replay import Replay, Run
from torchwrap._compile.trace import Trace, trace
from torchwrap._core import nested


class Program(NamedTuple):
    """A graph that is ready to run: from what it reads and the leaves of the arguments to the leaves of the result."""

    run: Run
    build: Callable[[Iterator[Tensor]], Any]
    """Builds the result from its leaves."""


class Graph:
    """A function of tensors and TensorDicts, which writes to buffers in place, as one graph.

    It is traced once per device, structure of the arguments, layout (dtype, shape and strides) of the tensors that it reads,
    and mode of its modules, such as `train()` and `eval()`. It then runs without a compiler's guards: the caller has checked
    the shapes.

    Args:
        function: the function. Its arguments are Tensors, TensorDicts, and tuples and dicts of them.
        reads: what it reads besides its arguments.
        backend: as for `torch.compile`.
        options: for Inductor.
        num_rows: number of envs.
        static_outputs: on CUDA, return the first part of the result, a tuple, in the graph's own memory.
        part: the graph is part of a larger run: on CUDA it is not launched by itself.
        streamed: given the inputs of a graph for the leaves of the arguments, returns those that nobody reads soon after they
            are written.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        reads: Reads,
        *,
        backend: str,
        options: dict[str, Any],
        num_rows: int,
        static_outputs: bool = False,
        part: bool = False,
        streamed: Callable[[list[Node]], list[Node]] = lambda inputs: [],
    ) -> None:
        self.function, self.reads = function, reads
        self.backend, self.options, self.num_rows = backend, options, num_rows
        self.static_outputs, self.part, self.streamed = static_outputs, part, streamed
        self.version = reads.version
        self.programs: dict[Any, Program] = {}
        self.seen: list[Tensor] = []
        self.layouts: dict[Any, int] = {}
        self.layout = 0

    def __call__(self, *values: Any) -> Any:
        (run, build), tensors = self._find(values)
        return build(iter(run(tensors)))

    def program(self, *values: Any, later: bool = False) -> Program:
        """What runs the graph for arguments like these. It is traced and compiled if it does not exist yet.

        With `later`, its C++ may still be built when this returns. The first run waits for that.
        """
        return self._find(values, later)[0]

    def trace(self, *values: Any) -> Trace:
        """The graph for arguments like these, not compiled."""
        return trace(self.function, values, self.reads)

    def _find(self, values: Any, later: bool = False) -> tuple[Program, list[Tensor]]:
        self.reads.refresh()
        key, tensors = self._key(values)
        program = self.programs.get(key)
        return (program, tensors) if program is not None else self._make(values, later)

    @compiling()
    def _make(self, values: Any, later: bool) -> tuple[Program, list[Tensor]]:
        program = self._compile(values, later)
        key, tensors = self._key(values)  # the trace may have met tensors that were not known before
        self.programs[key] = program
        return program, tensors

    def _key(self, values: Any) -> tuple[Any, list[Tensor]]:
        state, tensors = self.state()
        structure = nested.flatten(values, tensors)
        return (tensors[0].device, structure, *state), tensors

    def state(self) -> tuple[tuple[Any, ...], list[Tensor]]:
        """What decides which program runs, besides the device and the arguments' structure; and the tensors that it reads."""
        if self.version != self.reads.version:
            self.version = self.reads.version
            self.programs.clear()
        tensors = self.reads.tensors()
        return (self.version, self._layout(tensors), self.reads.modes()), tensors

    def _layout(self, tensors: list[Tensor]) -> int:
        # A tensor of an env gets another layout only when it is replaced. Those of a policy may also get other `.data`.
        if self.reads.is_foreign or len(self.seen) != len(tensors) or not all(map(operator.is_, tensors, self.seen)):
            ids = list(map(id, tensors))
            tied = tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else ()
            layout = (tied, *[(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors])
            self.seen, self.layout = list(tensors), self.layouts.setdefault(layout, len(self.layouts))
        return self.layout  # a number, because a tuple is hashed again at each call

    @torch.inference_mode(False)  # because tensors made in inference mode have no version counter
    @torch.no_grad()
    def _compile(self, values: Any, later: bool) -> Program:
        graph, result, passed_through, example = self.trace(*values)
        nodes, count = graph.graph.find_nodes(op="placeholder"), len(self.reads.slots)
        streamed, used = self.streamed(nodes[count:]), _prune(graph)
        inputs, device = [example[index] for index in used], example[0].device
        compiled = compile_graph(
            graph,
            inputs,
            self.backend,
            self.options,
            device=device,
            num_rows=self.num_rows,
            streamed=[position for position, index in enumerate(used) if nodes[index] in streamed],
            later=later,
        )
        pick = picker(used)
        shared: list[int] | None = None

        def run(tensors: list[Tensor]) -> Sequence[Tensor]:
            nonlocal shared
            is_compiling = torch.compiler.is_compiling()
            leaves = list((compiled.hidden if is_compiling else compiled)(*pick(tensors)))
            if shared is None and not is_compiling:
                shared = _shared(leaves)
            for index in shared or ():
                leaves[index] = leaves[index].clone()
            for index, source in passed_through.items():
                leaves.insert(index, tensors[source])
            return leaves

        if replay.captures(device) and not self.part:
            num_static = len(nested.leaves(result[0])) if self.static_outputs else 0
            return Program(Replay(run, count, num_static), nested.builder(result))
        return Program(run, nested.builder(result))


def _shared(leaves: list[Tensor]) -> list[int]:
    """The indices of results in the memory of an earlier one.

    Inductor drops a copy of a copy if both are results. Which ones it drops is the same in every run.
    """
    found, known = [], set()
    for index, leaf in enumerate(leaves):
        memory = leaf.untyped_storage().data_ptr()
        if memory in known and leaf.numel():
            found.append(index)
        known.add(memory)
    return found


def _prune(graph: torch.fx.GraphModule) -> list[int]:
    """Removes unused inputs, each of which costs half a microsecond per call, and returns the indices of the others."""
    inputs = list(enumerate(graph.graph.find_nodes(op="placeholder")))
    used = [index for index, node in inputs if node.users]
    for _, node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return used
