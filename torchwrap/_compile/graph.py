"""Graph and Rollout: functions of tensors that run without Python between their operators."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchwrap._compile.cuda_graph import CudaGraph
from torchwrap._compile.inputs import Function, Inputs
from torchwrap._compile.internals import inductor, list_options, resolved
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
# numbers: as the tail of a vector they are faster one by one, and frames are stacked in one pass.
_CPU_OPTIONS: Options = {
    "cpp_wrapper": True,
    "size_asserts": False,
    "cpp.enable_loop_tail_vec": False,
    "force_pointwise_cat": True,
}


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
        self._repeated: list[int] | None = None

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """The leaves of the result, in separate memory."""
        leaves = list(self.run(*map(tensors.__getitem__, self.used)))
        # Inductor drops a copy of a copy, although both are results: the same ones in every run.
        if self._repeated is None:
            self._repeated = _repeated(leaves)
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
        name = self.function.__name__.strip("_")
        start = time.perf_counter()
        _LOG.info("compiling the %s of %r", name, self.inputs.modules[0])
        graph, result = trace(self.function, self.inputs, values)
        used = _prune(graph)
        example = [tensors[index] for index in used]
        run = _lower(graph, example, self.settings)
        program = Program(run, used, rows.builder(result))
        if captures(example[0].device) and not self.is_part:
            program.cuda_graph = CudaGraph(program, len(self.inputs.tensors))
        _LOG.info("compiled the %s in %.1f s", name, time.perf_counter() - start)
        return program


class Rollout:
    """Takes the place of a collector's steps: `storage, root = rollout(root)`, time-first.

    Args:
        collector: has the env, the policy and the number of steps.
        step: takes a root. Returns the tensors to store by key, and the next root.
        root: like the roots of later calls.
        unroll: steps per graph.
        settings: how to compile.
    """

    def __init__(
        self,
        collector: Collector,
        step: Callable[[Root], tuple[Storage, Root]],
        root: Root,
        unroll: int,
        settings: Settings,
    ) -> None:
        self.collector = collector
        self.step = step
        self.unroll = min(unroll, collector.num_steps)
        self.build = rows.builder(root)
        self.inputs = Inputs(self._roots)
        self.graph = Graph(self._rollout, self.inputs, settings, is_part=True)
        self._prepare(root)

    def __call__(self, root: Root) -> tuple[Storage, Root]:
        loop, buffers = self._prepare(root)
        storage, leaves = loop([*buffers, *rows.leaves(root)])
        outside = storage.pop(OUTSIDE, None)
        if outside is not None and outside.any():
            env = self.collector.env
            must = f"the policy must return actions in {env.single_action_space}"
            raise ValueError(refusal(env._name(), must, "an action outside of it"))
        following: Any = self.build(iter(leaves))
        return storage, following

    def _roots(self) -> list[object]:
        policy = self.collector.policy
        return [self.collector.env, policy, *modules_of(policy)]

    def _prepare(self, root: Root) -> tuple[Loop, list[Tensor]]:
        """The graphs for such roots, compiled if there are none yet, and the buffers."""
        graphs, buffers = self.inputs.current()
        loop = graphs.get(self)
        if loop is None:
            loop = self._compile(root)
            graphs[self] = loop
        return loop, buffers

    @torch.inference_mode(False)  # because later calls can be outside of it
    @torch.no_grad()
    def _compile(self, root: Root) -> Loop:
        """Finds out what a step stores, and compiles graphs for it."""
        num_steps = self.collector.num_steps
        device = rows.leaves(root)[0].device
        stored: Any = infer(self.step, self.inputs, (root,))[0]  # type: ignore[index]
        storage: Storage = {}
        for key in sorted(stored, key=str):  # the order of `rows.leaves`
            leaf = stored[key]
            shape = (num_steps, *leaf.shape)
            storage[key] = torch.empty(shape, dtype=leaf.dtype, device=device)
        programs: dict[int, Program] = {}
        for steps in {self.unroll, num_steps % self.unroll} - {0}:
            targets = {key: value[:steps] for key, value in storage.items()}
            programs[steps], _ = self.graph.prepare(root, targets)
        return Loop(programs, storage, len(self.inputs.tensors))

    def _rollout(self, root: Root, targets: Storage) -> Root:
        """The function of a graph: as many steps as the targets have room for."""
        steps: list[Storage] = []
        first, *_ = targets.values()
        while len(steps) < len(first):
            stored, root = self.step(root)
            steps.append(stored)
        for key, target in targets.items():
            target.copy_(torch.stack([stored[key] for stored in steps]))
        return root


class Loop:
    """The graphs of a rollout. They run one after the other, the longest ones first.

    On CUDA, they are parts of one CUDA graph, into storage that stays the same.

    Args:
        programs: by their number of steps.
        storage: tensors like those to write to.
        num_buffers: the number of tensors of `Inputs`.
    """

    def __init__(self, programs: dict[int, Program], storage: Storage, num_buffers: int) -> None:
        self.programs = programs
        self.num_buffers = num_buffers
        self.cuda_graph: CudaGraph | None = None
        device = rows.leaves(storage)[0].device
        if captures(device):
            self.storage = storage
            run = functools.partial(self._run, storage)
            self.cuda_graph = CudaGraph(run, num_buffers)
        else:
            self.storage = {key: value.to("meta") for key, value in storage.items()}

    def __call__(self, tensors: list[Tensor]) -> tuple[Storage, Sequence[Tensor]]:
        """The steps of the rollout, and the leaves of the last root."""
        if self.cuda_graph is not None:
            leaves = self.cuda_graph(tensors)
            return {key: value.clone() for key, value in self.storage.items()}, leaves
        storage: Storage = {}
        for key, value in self.storage.items():
            storage[key] = torch.empty_like(value, device=tensors[-1].device)
        return storage, self._run(storage, tensors)

    def _run(self, storage: Storage, tensors: list[Tensor]) -> Sequence[Tensor]:
        buffers = tensors[: self.num_buffers]
        leaves: Sequence[Tensor] = tensors[self.num_buffers :]
        split = functools.partial(torch.split, split_size_or_sections=max(self.programs))
        for targets in zip(*map(split, storage.values()), strict=True):
            program = self.programs[len(targets[0])]
            # A root of an env, or of the steps before, can be in any layout.
            leaves = program([*buffers, *map(resolved, leaves), *targets])
        return leaves


def _repeated(leaves: Sequence[Tensor]) -> list[int]:
    """The indices of leaves in the memory of an earlier one."""
    repeated = []
    known = set()
    for index, leaf in enumerate(leaves):
        address = leaf.untyped_storage().data_ptr()
        if leaf.numel() and address in known:
            repeated.append(index)
        known.add(address)
    return repeated


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


def _lower(graph: GraphModule, example: Sequence[Tensor], settings: Settings) -> Run:
    """A callable that computes the graph for tensors like the example; it is compiled here.

    Inductor is called directly if PyTorch has its entry point, without the guards of
    `torch.compile`: the caller has checked the tensors.
    """
    backend = settings.backend
    if backend == "eager":
        return graph
    cuda = {tensor.device for tensor in example if tensor.is_cuda}
    options: dict[str, Any] = dict(settings.options)
    if backend == "inductor":
        if not cuda:
            known = {name: _CPU_OPTIONS[name] for name in list_options() if name in _CPU_OPTIONS}
            options = {**known, **options}
        if inductor is not None:
            fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
            return inductor(graph, fakes, options=options)  # type: ignore[no-any-return]
    run: Run = torch.compile(
        graph, fullgraph=True, dynamic=False, backend=backend, options=options or None
    )
    with torch.random.fork_rng(cuda):
        run(*copy.deepcopy(example))  # the first call compiles
    return run
