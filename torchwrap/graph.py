"""Graph: a function of tensors, run without Python. The only file that knows of PyTorch's compilers and of CUDA graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchwrap import masks, tree
from torchwrap.env import Env
from torchwrap.transforms.base import Transform

Run = Callable[[list[Tensor]], Sequence[Tensor]]
_TRAINING = operator.attrgetter("training")

# Sizes and strides are settled when a graph is made. The wrapper around the kernels in C++ costs half of the one in Python;
# half of that again with small tensors on its stack, but then results lie in memory of the graph's own.
_INDUCTOR = {"size_asserts": False}
_INDUCTOR_CPU, _INDUCTOR_PART = {"cpp_wrapper": True}, {"aot_inductor.allow_stack_allocation": True}
# Of few envs most loops are over before another thread has begun.
_MANY, _INDUCTOR_FEW = 1024, {"cpp.min_chunk_size": 4096}


def _settle() -> None:
    # What can lie on the stack is settled for a whole process by the first graph that anybody has compiled in it.
    from torch._inductor.codegen.common import init_backend_registration  # which brings SymPy

    with torch._inductor.config.patch(_INDUCTOR_PART):
        init_backend_registration()


def backends() -> list[str]:
    """Names of PyTorch's compilers."""
    return torch._dynamo.list_backends(exclude_tags=())


class Program(NamedTuple):
    """A graph that is ready to run: from buffers and the leaves of the input to the leaves of the result."""

    run: Run
    build: Callable[[Iterator[Tensor]], Any]
    """From leaves to the result."""


class Trace(NamedTuple):
    """What a function does and gives, but for the values."""

    graph: torch.fx.GraphModule
    result: Any
    given: dict[int, int]
    """Leaves of the result that are tensors of the input, by their places."""
    example: list[Tensor]
    """An input: buffers, and the leaves of the arguments."""


class Graph:
    """A function of tensors and TensorDicts, which writes to the buffers of modules in place, as one graph.

    It is traced once for each device, structure of the input, and combination of `train()` and `eval()`; then it runs
    without Python between the operators, and without a compiler's guards: whoever calls it has checked the shapes. A `part`
    of a larger run is no launch of its own on CUDA, and its results lie where the next run may write.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Iterable[nn.Module],
        *,
        backend: str,
        options: dict[str, Any],
        num_rows: int,
        static_outputs: bool = False,
        part: bool = False,
    ) -> None:
        self.function = function
        self.modules = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self.slots: list[tuple[dict[str, Any], str]] = [
            (tensors, name)
            for module in self.modules
            for tensors in _tensors_of(module)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self.backend, self.options, self.num_rows = backend, options, num_rows
        self.static_outputs, self.part = static_outputs, part
        self.programs: dict[Any, Program] = {}

    def __call__(self, *values: Any) -> Any:
        (run, build), tensors = self._find(values)
        return build(iter(run(tensors)))

    def program(self, *values: Any) -> Program:
        """What runs the graph for inputs like these; it is made where it is missing."""
        return self._find(values)[0]

    def _find(self, values: Any) -> tuple[Program, list[Tensor]]:
        tensors = self.buffers()
        structure = tree.flatten(values, tensors)
        key = (tensors[0].device, structure, *map(_TRAINING, self.modules))
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = self._make(values)
        return program, tensors

    def buffers(self) -> list[Tensor]:
        """Buffers and parameters. They are read anew each time, for `.to(device)` puts others into their places."""
        return [tensors[name] for tensors, name in self.slots]

    @torch.inference_mode(False)  # in which tensors do not know whether they were written to
    @torch.no_grad()
    def _make(self, values: Any) -> Program:
        graph, result, given, example = self.trace(values)
        device, used = example[0].device, _prune(graph)
        example = [example[place] for place in used]
        if self.backend == "inductor":
            on_cpu = _INDUCTOR_CPU | (_INDUCTOR_PART if self.part else {}) | (_INDUCTOR_FEW if self.num_rows < _MANY else {})
            options = _INDUCTOR | (on_cpu if device.type == "cpu" else {}) | self.options
            _settle()
            # Caches of compiled graphs, on disk, ask for a ShapeEnv. Tracing has none: it would let unknown numbers pass.
            mode = FakeTensorMode(shape_env=ShapeEnv())
            fakes: list[Any] = [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
            with torch._guards.tracing(torch._guards.TracingContext(mode)):
                compiled = torch._inductor.compile(graph, fakes, options=options)
        else:
            compiled = torch._dynamo.lookup_backend(self.backend)(graph, example)

        # What hides it from `torch.compile` costs a tenth of the time of a small graph; only who compiles the caller needs it.
        hidden, compiled = compiled, getattr(compiled, "_torchdynamo_orig_callable", compiled)

        def run(tensors: list[Tensor]) -> Sequence[Tensor]:
            call = hidden if torch.compiler.is_compiling() else compiled
            leaves = list(call(*[tensors[place] for place in used]))
            for place, number in given.items():
                leaves.insert(place, tensors[number])
            return leaves

        replayed = device.type == "cuda" and not self.part
        return Program(Replay(run, len(self.slots), self.static_outputs) if replayed else run, tree.builder(result))

    def trace(self, values: Any) -> Trace:
        """Runs the function on tensors without values, and leaves everything as it was."""
        tensors = [*self.buffers(), *tree.leaves(values)]
        example = [tensor.clone() if tensor.is_inference() else tensor.detach() for tensor in tensors]
        build, count, result = tree.builder(values), len(self.slots), None
        given: dict[int, int] = {}

        def flat(*tensors: Tensor) -> list[Tensor]:
            nonlocal result
            self._put(tensors[:count])
            result = self.function(*build(iter(tensors[count:])))
            self._check_state(tensors[:count], attributes)
            places = {id(tensor): place for place, tensor in enumerate(tensors)}
            leaves = tree.leaves(result)
            given.update({place: places[id(leaf)] for place, leaf in enumerate(leaves) if id(leaf) in places})
            return [masks.as_bytes(leaf).view(leaf.dtype) for place, leaf in enumerate(leaves) if place not in given]

        held, attributes = self.buffers(), [_attributes(module) for module in self.modules]
        checks = Distribution._validate_args
        Distribution.set_default_validate_args(False)  # they look at values
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # which has no values, not even numbers that are not known yet
        try:
            with mode:
                graph = make_fx(flat)(*[mode.from_tensor(tensor) for tensor in example])
        except _State as error:
            for module, before in zip(self.modules, attributes, strict=True):
                vars(module).update(before)
            raise ValueError(f"compile needs state in buffers that are written in place, but got {error}.") from None
        except Exception as error:
            what = f"compile needs tensor operators whose results nobody looks at on the host, but got {_culprit(error)}"
            raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            Distribution.set_default_validate_args(checks)
            self._put(held)
        return Trace(graph, result, given, example)

    def _put(self, buffers: Iterable[Tensor]) -> None:
        for (tensors, name), tensor in zip(self.slots, buffers, strict=True):
            tensors[name] = tensor

    def _check_state(self, buffers: Iterable[Tensor], attributes: list[dict[str, Any]]) -> None:
        names = {id(tensors): type(module).__name__ for module in self.modules for tensors in _tensors_of(module)}
        for (tensors, name), tensor in zip(self.slots, buffers, strict=True):
            if tensors.get(name) is not tensor:
                raise _State(f"another tensor as {names[id(tensors)]}.{name}")
        for module, before in zip(self.modules, attributes, strict=True):
            for name, value in _attributes(module).items():
                same = name in before and (value is before[name] or (isinstance(value, list | dict) and value == before[name]))
                if not same:
                    raise _State(f"another {type(value).__name__} as {type(module).__name__}.{name}")


class _State(Exception):
    """What a graph would not remember."""


class Replay:
    """A function of tensors as a CUDA graph, which is one launch; the first `count` tensors are buffers, used in place."""

    def __init__(self, run: Run, count: int, static_outputs: bool) -> None:
        self.run, self.count, self.static_outputs = run, count, static_outputs
        self.buffers: list[Tensor] = []

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        buffers, inputs = tensors[: self.count], tensors[self.count :]
        if len(self.buffers) != len(buffers) or not all(map(operator.is_, self.buffers, buffers)):
            self._capture(buffers, inputs)
        for static, value in zip(self.inputs, inputs, strict=True):
            static.copy_(value)
        self.graph.replay()
        return self.outputs if self.static_outputs else [output.clone() for output in self.outputs]

    def _capture(self, buffers: list[Tensor], inputs: list[Tensor]) -> None:
        self.buffers, self.inputs = buffers, [value.clone() for value in inputs]
        before = [buffer.clone() for buffer in buffers]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate their workspaces before anything is captured
            for _ in range(3):
                self.run([*self.buffers, *self.inputs])
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.run([*self.buffers, *self.inputs])
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _prune(graph: torch.fx.GraphModule) -> list[int]:
    """Takes the inputs out that the graph has no use for, each of which costs half a microsecond; the places of the others."""
    inputs = list(enumerate(graph.graph.find_nodes(op="placeholder")))
    used = [place for place, node in inputs if node.users]
    for _, node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def _tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._buffers, module._parameters


def _attributes(module: nn.Module) -> dict[str, Any]:
    # Lists and dicts as they are now; what belongs to nn.Module is looked after elsewhere.
    return {
        name: value.copy() if type(value) in (list, dict) else value
        for name, value in vars(module).items()
        if not name.startswith("_")
    }


def _culprit(error: Exception) -> str:
    """The innermost env or transform that was at work."""
    found, trace = "the policy", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Env | Transform):
            found = f"{type(owner).__name__}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return found
