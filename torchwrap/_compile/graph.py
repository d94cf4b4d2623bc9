"""Graph: a function of tensors that runs without Python between its operators."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from gymnasium.spaces import Box
from tensordict.nn import CudaGraphModule
from torch import Tensor
from torch.fx import GraphModule

from torchwrap import spaces
from torchwrap._compile.cuda_graph import CudaGraph
from torchwrap._compile.inputs import Function, Inputs, aliased_indices
from torchwrap._compile.internals import (
    flat_scan_operator,
    inductor,
    layout_guard,
    list_options,
)
from torchwrap._compile.pure import PureFunction
from torchwrap._compile.scan import scanned
from torchwrap._compile.trace import exclusively, fake_inputs, trace, without_generators
from torchwrap._core import rows
from torchwrap._core.errors import refusal
from torchwrap._core.rows import Nested
from torchwrap.collector import Collector, Storage
from torchwrap.env import Root, Step
from torchwrap.policy import act, modules_of, named_by

_KIND = operator.attrgetter("dtype", "shape", "device", "layout")
_LOG = logging.getLogger("torchwrap")

Options: TypeAlias = Mapping[str, Any]
Run: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
_OUTSIDE = ("outside",)
"""The key under which a step stores whether an action is out of bounds."""

# The C++ wrapper calls the kernels of a graph without Python in between. Compiled apart from them,
# it needs no optimization. Headers that are compiled ahead take longer than they save the first few
# graphs, and so do tests whether g++ knows AVX. Scalar code for the tails of loops, because rows
# are short. A graph with a scan may be in the cache on disk: its key contains the body.
_CPU_OPTIONS: Options = {
    "cpp_wrapper": True,
    "cpp_wrapper_build_separate": True,
    "cpp_cache_precompile_headers": False,
    "cpp.vec_isa_ok": True,
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.scan": torch.__version__},
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


class Graph:
    """A function of Tensors, TensorDicts, and tuples and dicts of them, as one graph.

    The first call traces and compiles it; so does a call with another structure, dtype, shape or
    device of the arguments, or with other modules, modes, hooks, layouts or policies.

    Args:
        function: writes to buffers in place.
        inputs: the buffers.
        settings: how to compile.
        num_steps: makes a loop of the function, which then takes a carry and returns an output and
            the next carry. The graph returns the outputs of all steps, stacked, and the last carry.
        check: is called with arguments of a new layout, before they are traced.
    """

    def __init__(
        self,
        function: Function,
        inputs: Inputs,
        settings: Settings,
        num_steps: int | None = None,
        check: Callable[..., None] = lambda *values: None,
    ) -> None:
        self.check = check
        self.function = function
        self.inputs = inputs
        self.settings = settings
        self.num_steps = num_steps

    def __call__(self, *values: Nested) -> Any:
        program, tensors = self.prepare(*values)
        return program(tensors)

    def prepare(self, *values: Nested) -> tuple[Program, list[Tensor]]:
        """The program for such arguments, compiled if there is none yet, and its tensors."""
        graphs, buffers = self.inputs.current()
        arguments: list[Tensor] = []
        structure = rows.flatten(values, arguments)
        program = graphs.get((self, structure))
        if program is not None and program.fits(*arguments):
            return program, [*buffers, *arguments]
        key = (self, structure, *map(_KIND, arguments))
        program = graphs.get(key)
        if program is None:
            self.check(*values)
        # In memory, values can be negated or conjugated.
        resolved = map(Tensor.resolve_neg, map(Tensor.resolve_conj, arguments))
        tensors = [*buffers, *map(Tensor.contiguous, resolved)]
        if program is None:
            program = self._compile(values, tensors)
            graphs[key] = program
        graphs[self, structure] = program
        return program, tensors

    @exclusively()
    @torch.inference_mode(False)  # because tensors made in inference mode have no version counter
    @torch.no_grad()
    def _compile(self, values: tuple[Nested, ...], tensors: list[Tensor]) -> Program:
        buffers = self.inputs.tensors
        is_captured = captures(tensors[0].device)
        # A scan would not see writes to another buffer in the same memory.
        can_scan = flat_scan_operator is not None and not aliased_indices(buffers)
        start = time.perf_counter()
        name = "rollout" if self.num_steps else self.function.__name__.strip("_")
        _LOG.info("compiling the %s of %r", name, self.inputs.modules[0])
        traced = trace(self.function, self.inputs, values)
        graph = traced.graph
        constants: list[Tensor] = []
        num_steps = self.num_steps
        if num_steps and can_scan and not is_captured:
            graph, constants = scanned(PureFunction(traced), len(buffers), num_steps)
            num_steps = None
        run = _lower(graph, tensors, constants, self.settings)
        _LOG.info("compiled the %s in %.1f s", name, time.perf_counter() - start)
        if num_steps:
            run = Loop(run, len(buffers), num_steps, is_captured)
        elif is_captured:
            run = CudaGraph(run, len(buffers))
        return Program(run, traced.result, layout_guard(tensors[len(buffers) :]))


class Program:
    """A compiled graph. It takes all tensors of `Inputs` and all leaves of the arguments.

    Args:
        run: returns the leaves of the result, in separate memory.
        result: like the results.
        fits: whether arguments have the layouts that `run` takes, found in C++; a no is no proof.
    """

    def __init__(self, run: Run, result: Nested, fits: Callable[..., bool]) -> None:
        self.run = run
        self.result = result
        self.fits = fits
        self.build = rows.builder(result)

    def __call__(self, tensors: list[Tensor]) -> Any:
        leaves = self.run(tensors)
        return self.build(iter(leaves))


class Rollout:
    """Takes the place of `Collector._collect`: a scan over its steps."""

    def __init__(self, collector: Collector, settings: Settings) -> None:
        env = collector.env
        self.collector = collector
        self.env_step: Step = without_generators(env._step_and_reset)
        self.discrete: list[tuple[spaces.Path, Any]] = []
        # Eager mode checks discrete actions, and the host can read those on the CPU only.
        if not captures(env.device):
            leaves = spaces.leaves(env.single_action_space)
            self.discrete = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, Box)]
        check = partial(env._check_root, "Collector")
        inputs = Inputs(self._roots)
        self.graph = Graph(self._step, inputs, settings, collector.num_steps, check)
        self.graph.prepare(env._root_like(env.device))

    def __call__(self, root: Root) -> Storage:
        program, tensors = self.graph.prepare(root)
        storage, _ = self.collector.env._drive("collection", self._run, program, tensors)
        return storage

    def _run(self, program: Program, tensors: list[Tensor]) -> tuple[Storage, Root]:
        storage, following = program(tensors)
        outside = storage.pop(_OUTSIDE, None)
        if outside is not None and outside.any():
            env = self.collector.env
            must = f"the policy must return actions in {env.single_action_space}"
            raise ValueError(refusal(env._label, must, "an action outside of it"))
        return storage, following

    def _roots(self) -> list[object]:
        policy = self.collector.policy
        return [self.collector.env, policy, *modules_of(policy)]

    def _step(self, root: Root) -> tuple[Storage, Root]:
        env = self.collector.env
        policy = self.collector.policy
        if any(isinstance(part, CudaGraphModule) for part in named_by(policy)):
            must = "policy must call the module from which a CudaGraphModule was made"
            raise ValueError(refusal("compile", must))
        td = act(env, policy, rows.tensordict(root, env.num_envs))
        env._check_step_input(td)
        transition, following = env._transition(td, self.env_step)
        stored = self.collector._select(transition)
        if self.discrete and policy is not None:
            outside = []
            for path, leaf in self.discrete:
                action = spaces.entry(transition["action"], path)
                outside.append(spaces.outside(leaf, action).any())
            stored[_OUTSIDE] = torch.stack(outside).any()
        result = stored, following
        # Copies, because a policy may return its buffers, and a later step writes to them.
        build = rows.builder(result)
        return build(map(torch.clone, rows.leaves(result)))  # type: ignore[no-any-return]


class Loop:
    """A loop over a compiled step, where there is no `scan`. On CUDA, it is one CUDA graph."""

    def __init__(self, step: Run, num_buffers: int, num_steps: int, is_captured: bool) -> None:
        self.step = step
        self.num_buffers = num_buffers
        self.num_steps = num_steps
        self.run: Run = self._run
        if is_captured:
            self.run = CudaGraph(self._run, num_buffers).replay

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        num_carried = len(tensors) - self.num_buffers
        results = list(self.run(tensors))
        outputs = results[:-num_carried]
        width = len(outputs) // self.num_steps
        stacked = [torch.stack(outputs[index::width]) for index in range(width)]
        return [*stacked, *[leaf.clone() for leaf in results[-num_carried:]]]

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        """The outputs of each step, and the last carry."""
        buffers = tensors[: self.num_buffers]
        carry: Sequence[Tensor] = tensors[self.num_buffers :]
        num_carried = len(carry)
        outputs: list[Tensor] = []
        for _ in range(self.num_steps):
            results = self.step([*buffers, *map(Tensor.contiguous, carry)])
            outputs += results[:-num_carried]
            carry = results[-num_carried:]
        return [*outputs, *carry]


def _lower(
    graph: GraphModule,
    tensors: Sequence[Tensor],
    constants: Sequence[Tensor],
    settings: Settings,
) -> Run:
    """The compiled graph, for tensors like these. It takes them without the constants.

    Inductor is called directly if PyTorch has its entry point, without the guards of
    `torch.compile`: the caller has checked the tensors. Otherwise the first call compiles.
    """
    used = []
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if node.users:
            used.append(index)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    backend = settings.backend
    run: Callable[..., Sequence[Tensor]] = graph
    options: dict[str, Any] = dict(settings.options)
    if backend == "inductor":
        on_cuda = any(tensor.is_cuda for tensor in tensors)
        defaults = _CUDA_OPTIONS if on_cuda else _CPU_OPTIONS
        known = {name: defaults[name] for name in list_options() if name in defaults}
        options = {**known, **options}
    if backend == "inductor" and inductor is not None:
        run = inductor(graph, fake_inputs(graph), options=options)
    elif backend != "eager":
        run = torch.compile(
            graph, fullgraph=True, dynamic=False, backend=backend, options=options or None
        )
    aliased: list[int] | None = None

    def run_separately(given: list[Tensor]) -> list[Tensor]:
        nonlocal aliased
        leaves = list(run(*map([*given, *constants].__getitem__, used)))
        if aliased is None:
            # Inductor may return one tensor for two results; clone the second, here and later.
            aliased = aliased_indices(leaves)
        for index in aliased:
            leaves[index] = leaves[index].clone()
        return leaves

    return run_separately
