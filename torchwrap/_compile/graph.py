"""Graph and Rollout: functions of tensors that run without Python between their operators."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchwrap._compile.cuda_graph import CudaGraph
from torchwrap._compile.inputs import Function, Inputs, repeated
from torchwrap._compile.internals import flat_scan_operator, inductor, list_options, resolved
from torchwrap._compile.pure import PureFunction
from torchwrap._compile.trace import infer, trace
from torchwrap._core import rows
from torchwrap._core.errors import refusal
from torchwrap._core.rows import Nested
from torchwrap.collector import Collector, Storage
from torchwrap.env import Root
from torchwrap.policy import modules_of

_LOG = logging.getLogger("torchwrap")

Options: TypeAlias = Mapping[str, str | int | float | bool | None]
Run: TypeAlias = Callable[..., Sequence[Tensor]]
OUTSIDE = ("outside",)
"""The key under which a step stores whether an action is out of bounds."""

# The C++ wrapper calls the kernels of a graph without Python in between. Rows often hold a few
# numbers: as the tail of a vector they are faster one by one.
_CPU_OPTIONS: Options = {
    "cpp_wrapper": True,
    "size_asserts": False,
    "cpp.enable_loop_tail_vec": False,
}
# Triton before 3.8 fails to compile some kernels that update statistics and make constants of them
# (its issue 8257). Tensors of a few numbers do not make their kernels one.
_CUDA_OPTIONS: Options = {"score_fusion_memory_threshold": 256}


class Settings(NamedTuple):
    """Arguments of `torchwrap.compile`."""

    backend: str
    options: Options


def captures(device: torch.device) -> bool:
    """True if graphs on this device are captured as CUDA graphs."""
    return device.type == "cuda"


class Program:
    """A compiled graph. It takes all tensors of `Inputs` and all leaves of the arguments.

    Args:
        run: the callable, from the tensors that the graph uses to the leaves of the result.
        used: the indices of those tensors.
        build: builds the result from its leaves.
    """

    def __init__(
        self,
        run: Run,
        used: list[int],
        build: Callable[[Iterator[Tensor]], Nested],
    ) -> None:
        self.run = run
        self.used = used
        self.build = build
        self.cuda_graph: CudaGraph | None = None
        # Inductor drops a copy of a copy, although both are results: the same ones in every run.
        self._repeated: list[int] | None = None

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """The leaves of the result, in separate memory."""
        leaves = list(self.run(*map(tensors.__getitem__, self.used)))
        if self._repeated is None:
            self._repeated = repeated(leaves)
        for index in self._repeated:
            leaves[index] = leaves[index].clone()
        return leaves


class Graph:
    """A function of Tensors, TensorDicts, and tuples and dicts of them, as one graph.

    The first call traces and compiles it; so does a call with another structure, dtype, shape or
    device of the arguments, or with other modules, modes, hooks, layouts or policies.

    Args:
        function: writes to buffers in place.
        inputs: the buffers.
        settings: how to compile.
        is_part: whether the graph is part of a larger CUDA graph.
    """

    def __init__(
        self, function: Function, inputs: Inputs, settings: Settings, *, is_part: bool = False
    ) -> None:
        self.function = function
        self.inputs = inputs
        self.settings = settings
        self.is_part = is_part

    def __call__(self, *values: Nested) -> Nested:
        program, tensors = self.prepare(*values)
        run = program.cuda_graph or program
        return program.build(iter(run(tensors)))

    def prepare(self, *values: Nested) -> tuple[Program, list[Tensor]]:
        """The program for such arguments, compiled if there is none yet, and its tensors."""
        graphs, buffers = self.inputs.current()
        arguments: list[Tensor] = []
        structure = rows.flatten(values, arguments)
        arguments = [resolved(leaf) for leaf in arguments]
        kinds = tuple([(leaf.dtype, leaf.shape, leaf.device) for leaf in arguments])
        tensors = [*buffers, *arguments]
        key = (self, structure, kinds)
        program = graphs.get(key)
        if program is None:
            program = self._compile(values, tensors)
            graphs[key] = program
        return program, tensors

    @torch.inference_mode(False)  # because tensors made in inference mode have no version counter
    @torch.no_grad()
    def _compile(self, values: tuple[Nested, ...], tensors: list[Tensor]) -> Program:
        with _logged(self.function.__name__.strip("_"), self.inputs):
            graph, result = trace(self.function, self.inputs, values)
            program = _lower(graph, tensors, result, self.settings)
        if captures(tensors[0].device) and not self.is_part:
            program.cuda_graph = CudaGraph(program, len(self.inputs.tensors))
        return program


@contextlib.contextmanager
def _logged(name: str, inputs: Inputs) -> Iterator[None]:
    start = time.perf_counter()
    _LOG.info("compiling the %s of %r", name, inputs.modules[0])
    yield
    _LOG.info("compiled the %s in %.1f s", name, time.perf_counter() - start)


class Rollout:
    """Takes the place of a collector's steps: `storage = rollout(root)`, time-first.

    Args:
        collector: has the env, the policy and the number of steps.
        step: takes a root. Returns the tensors to store by key, and the next root.
        root: like the roots of later calls.
        settings: how to compile.
    """

    def __init__(
        self,
        collector: Collector,
        step: Callable[[Root], tuple[Storage, Root]],
        root: Root,
        settings: Settings,
    ) -> None:
        self.collector = collector
        self.step = step
        self.settings = settings
        self.inputs = Inputs(self._roots)
        self._prepare(root)

    def __call__(self, root: Root) -> Storage:
        run, buffers = self._prepare(root)
        storage, _ = self.collector.env._drive("collection", self._run, run, buffers, root)
        return storage

    def _run(self, run: Scan | Loop, *given: Any) -> tuple[Storage, Root]:
        storage, following = run(*given)
        outside = storage.pop(OUTSIDE, None)
        if outside is not None and outside.any():
            env = self.collector.env
            must = f"the policy must return actions in {env.single_action_space}"
            raise ValueError(refusal(env._label, must, "an action outside of it"))
        return storage, following

    def _roots(self) -> list[object]:
        policy = self.collector.policy
        return [self.collector.env, policy, *modules_of(policy)]

    def _prepare(self, root: Root) -> tuple[Scan | Loop, list[Tensor]]:
        """The graphs for such roots, compiled if there are none yet, and the buffers."""
        graphs, buffers = self.inputs.current()
        run = graphs.get(self)
        if run is None:
            run = self._compile(root)
            graphs[self] = run
        return run, buffers

    @torch.inference_mode(False)  # because later calls can be outside of it
    @torch.no_grad()
    def _compile(self, root: Root) -> Scan | Loop:
        tensors = self.inputs.tensors
        shares_memory = bool(repeated(tensors))  # a scan would not see writes to the other buffer
        kind: type[Scan | Loop] = Scan
        if flat_scan_operator is None or captures(tensors[0].device) or shares_memory:
            kind = Loop
        return kind(self.step, self.inputs, root, self.collector.num_steps, self.settings)


class Scan:
    """The steps of a rollout as one graph: a scan over the step without side effects."""

    def __init__(
        self, step: Function, inputs: Inputs, root: Root, num_steps: int, settings: Settings
    ) -> None:
        self.step = PureFunction(step, inputs, (root,))
        self.num_steps = num_steps
        self.num_buffers = len(inputs.tensors)
        self.num_leaves = len(rows.leaves(root))
        leaves = map(resolved, rows.leaves(root))
        tensors = [*inputs.tensors, *leaves, *self.step.constants]
        with _logged("rollout", inputs):
            graph = make_fx(self._scan, tracing_mode="fake")(*tensors)
            self.program = _lower(graph, tensors, self.step.result, settings)

    def __call__(self, buffers: list[Tensor], root: Root) -> tuple[Storage, Root]:
        leaves = map(resolved, rows.leaves(root))
        results = self.program([*buffers, *leaves, *self.step.constants])
        return self.program.build(iter(results))  # type: ignore[return-value]

    def _scan(self, *tensors: Tensor) -> list[Tensor]:
        """The function of the graph. It writes to the buffers."""
        num_written = len(self.step.written)
        end = self.num_buffers + self.num_leaves
        # The written buffers and the root change from step to step. The step takes all tensors.
        carried = [*self.step.written, *range(self.num_buffers, end)]
        others = [index for index in range(len(tensors)) if index not in carried]
        num_carried = len(carried)

        def body(*given: Tensor) -> list[Tensor]:
            unchanged = given[num_carried + 1 :]  # after the slice of `steps`
            arguments = dict(zip(carried, given, strict=False))
            arguments.update(zip(others, unchanged, strict=True))
            results = self.step.graph(*[arguments[index] for index in sorted(arguments)])
            # Copies, because what the operator returns must not share memory.
            copies = [result.clone(memory_format=torch.contiguous_format) for result in results]
            root = copies[-self.num_leaves :]
            stored = copies[num_written : -self.num_leaves]
            return [*copies[:num_written], *root, *stored]

        # The stride of a single row may be 0, and `contiguous` keeps it.
        layout = torch.contiguous_format
        first = [tensors[index].clone(memory_format=layout) for index in carried]
        unchanged = [tensors[index] for index in others]
        steps = torch.zeros(self.num_steps, 1)
        results = flat_scan_operator(body, first, [steps], unchanged)
        for index, value in zip(self.step.written, results, strict=False):
            tensors[index].copy_(value)
        root = results[num_written:num_carried]
        return [*results[num_carried:], *root]


class Loop:
    """The steps of a rollout as one graph that runs several times.

    On CUDA, all of them are one CUDA graph, into storage that stays the same.
    """

    def __init__(
        self, step: Function, inputs: Inputs, root: Root, num_steps: int, settings: Settings
    ) -> None:
        self.step = step
        self.build_root = rows.builder(root)
        self.num_buffers = len(inputs.tensors)
        device = rows.leaves(root)[0].device
        result: Any = infer(step, inputs, (root,))
        stored: Storage = result[0]
        self.storage: Storage = {}
        for key in sorted(stored, key=str):  # the order of `rows.leaves`
            leaf = stored[key]
            shape = (num_steps, *leaf.shape)
            self.storage[key] = torch.empty(shape, dtype=leaf.dtype, device=device)
        graph = Graph(self._store_step, inputs, settings, is_part=True)
        targets = {key: value[0] for key, value in self.storage.items()}
        self.program, _ = graph.prepare(root, targets)
        self.cuda_graph: CudaGraph | None = None
        if captures(device):
            self.cuda_graph = CudaGraph(self._run, self.num_buffers)

    def __call__(self, buffers: list[Tensor], root: Root) -> tuple[Storage, Root]:
        run = self.cuda_graph or self._run
        leaves = run([*buffers, *rows.leaves(root)])
        following: Any = self.build_root(iter(leaves))
        return {key: value.clone() for key, value in self.storage.items()}, following

    def _run(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        buffers = tensors[: self.num_buffers]
        leaves: Sequence[Tensor] = tensors[self.num_buffers :]
        for targets in zip(*self.storage.values(), strict=True):
            # A root of an env, or of the step before, can be in any layout.
            leaves = self.program([*buffers, *map(resolved, leaves), *targets])
        return leaves

    def _store_step(self, root: Root, targets: Storage) -> Root:
        """The function of the graph."""
        result: Any = self.step(root)
        stored, following = result
        for key, target in targets.items():
            target.copy_(stored[key])
        return following  # type: ignore[no-any-return]


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


def _lower(
    graph: GraphModule, tensors: Sequence[Tensor], result: Nested, settings: Settings
) -> Program:
    """The program of a graph, for tensors like these.

    Inductor is called directly if PyTorch has its entry point, without the guards of
    `torch.compile`: the caller has checked the tensors. Otherwise the first call compiles.
    """
    used = _prune(graph)
    backend = settings.backend
    run: Run = graph
    options: dict[str, Any] = dict(settings.options)
    if backend == "inductor":
        on_cuda = any(tensor.is_cuda for tensor in tensors)
        defaults = _CUDA_OPTIONS if on_cuda else _CPU_OPTIONS
        known = {name: defaults[name] for name in list_options() if name in defaults}
        options = {**known, **options}
    if backend == "inductor" and inductor is not None:
        fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        run = inductor(graph, fakes, options=options)
    elif backend != "eager":
        run = torch.compile(
            graph, fullgraph=True, dynamic=False, backend=backend, options=options or None
        )
    return Program(run, used, rows.builder(result))
