"""Graph: a function of tensors, traced once and then run without Python between its operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx

from torchwrap._compile.inductor import compile_graph
from torchwrap._compile.replay import Replay, Run
from torchwrap._core import nested
from torchwrap._core.graph_hints import as_bytes
from torchwrap.env import Env
from torchwrap.transforms.transform import Transform

_training = operator.attrgetter("training")


class Program(NamedTuple):
    """A graph that is ready to run: from buffers and the leaves of the arguments to the leaves of the result."""

    run: Run
    build: Callable[[Iterator[Tensor]], Any]
    """Builds the result from its leaves."""


class Trace(NamedTuple):
    """What a function computes, and the structure of what it returns."""

    graph: torch.fx.GraphModule
    result: Any
    passed_through: dict[int, int]
    """Leaves of the result that are tensors of the input: from the index of one to that of the other."""
    example: list[Tensor]
    """An input: buffers, and the leaves of the arguments."""


class Graph:
    """A function of tensors and TensorDicts, which writes to the buffers of modules in place, as one graph.

    It is traced once per device, structure of the arguments, layout (dtype, shape and strides) of buffers and parameters, and
    combination of `train()` and `eval()`. It then runs without a compiler's guards: the caller has checked the shapes.

    Args:
        function: the function. Its arguments are Tensors, TensorDicts, and tuples and dicts of them.
        modules: whose buffers and parameters it uses.
        backend: as for `torch.compile`.
        options: for Inductor.
        num_rows: number of envs.
        static_outputs: on CUDA, return the graph's own memory.
        part: the graph is part of a larger run. On CUDA it is no launch of its own, and the next run may write to its results.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        *,
        backend: str,
        options: dict[str, Any],
        num_rows: int,
        static_outputs: bool = False,
        part: bool = False,
    ) -> None:
        self.function = function
        self.modules = list(dict.fromkeys(part for module in modules for part in module.modules()))
        owned = [
            (module, tensors, name)
            for module in self.modules
            for tensors in _tensors_of(module)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self.slots: list[tuple[dict[str, Any], str]] = [(tensors, name) for _, tensors, name in owned]
        ours = {part for module in modules if isinstance(module, Env | Transform) for part in module.modules()}
        self.is_foreign = any(module not in ours for module, *_ in owned)
        self.backend, self.options, self.num_rows = backend, options, num_rows
        self.static_outputs, self.part = static_outputs, part
        self.programs: dict[Any, Program] = {}
        self.seen: list[Tensor] = []
        self.layouts: dict[Any, int] = {}
        self.layout = 0

    def __call__(self, *values: Any) -> Any:
        (run, build), tensors = self._find(values)
        return build(iter(run(tensors)))

    def program(self, *values: Any) -> Program:
        """What runs the graph for arguments like these. It is traced and compiled if it does not exist yet."""
        return self._find(values)[0]

    def _find(self, values: Any) -> tuple[Program, list[Tensor]]:
        tensors = self.buffers()
        layout = self._layout(tensors)
        structure = nested.flatten(values, tensors)
        key = (tensors[0].device, structure, layout, *map(_training, self.modules))
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = self._compile(values)
        return program, tensors

    def _layout(self, tensors: list[Tensor]) -> int:
        # A tensor of an env gets another layout only when it is replaced. Those of a policy may also get other `.data`.
        if self.is_foreign or len(self.seen) != len(tensors) or not all(map(operator.is_, tensors, self.seen)):
            layout = tuple([(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors])
            self.seen, self.layout = list(tensors), self.layouts.setdefault(layout, len(self.layouts))
        return self.layout  # a number, because a tuple is hashed again at each call

    def buffers(self) -> list[Tensor]:
        """Buffers and parameters. They are read at each call, because `.to(device)` replaces them."""
        return [tensors[name] for tensors, name in self.slots]

    @torch.inference_mode(False)  # because tensors made in inference mode have no version counter
    @torch.no_grad()
    def _compile(self, values: Any) -> Program:
        graph, result, passed_through, example = self.trace(values)
        device, used = example[0].device, _prune(graph)
        inputs = [example[index] for index in used]
        hidden = compile_graph(
            graph, inputs, self.backend, self.options, device=device, num_rows=self.num_rows, part=self.part
        )
        # The wrapper that hides the graph from `torch.compile` costs a tenth of the time of a small graph, and is needed only
        # if somebody compiles the caller.
        direct = getattr(hidden, "_torchdynamo_orig_callable", hidden)

        def run(tensors: list[Tensor]) -> Sequence[Tensor]:
            call = hidden if torch.compiler.is_compiling() else direct
            leaves = list(call(*[tensors[index] for index in used]))
            for index, source in passed_through.items():
                leaves.insert(index, tensors[source])
            return leaves

        captured = device.type == "cuda" and not self.part
        return Program(Replay(run, len(self.slots), self.static_outputs) if captured else run, nested.builder(result))

    def trace(self, values: Any) -> Trace:
        """Runs the function on tensors without values, and leaves everything as it was.

        Raises:
            ValueError: if the function reads values on the host, or keeps state outside of buffers. The message names the
                culprit.
        """
        tensors = [*self.buffers(), *nested.leaves(values)]
        example = [tensor.clone() if tensor.is_inference() else tensor.detach() for tensor in tensors]
        build, count, result = nested.builder(values), len(self.slots), None
        passed_through: dict[int, int] = {}

        def flat(*tensors: Tensor) -> list[Tensor]:
            nonlocal result
            self._put(tensors[:count])
            result = self.function(*build(iter(tensors[count:])))
            self._check_state(tensors[:count], attributes)
            index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
            leaves = nested.leaves(result)
            passed_through.update({index: index_of[id(leaf)] for index, leaf in enumerate(leaves) if id(leaf) in index_of})
            return [as_bytes(leaf).view(leaf.dtype) for index, leaf in enumerate(leaves) if index not in passed_through]

        held, attributes = self.buffers(), [_attributes(module) for module in self.modules]
        validate_args = Distribution._validate_args
        Distribution.set_default_validate_args(False)  # validation reads values
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # without a ShapeEnv, so no data-dependent sizes
        try:
            with mode:
                graph = make_fx(flat)(*[mode.from_tensor(tensor) for tensor in example])
        except _StateError as error:
            for module, before in zip(self.modules, attributes, strict=True):
                vars(module).update(before)
            raise ValueError(f"compile needs state in buffers that are written in place, but got {error}.") from None
        except Exception as error:
            what = f"compile needs tensor operators whose results are not read on the host, but got {_culprit(error)}"
            raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            Distribution.set_default_validate_args(validate_args)
            self._put(held)
        return Trace(graph, result, passed_through, example)

    def _put(self, buffers: Iterable[Tensor]) -> None:
        for (tensors, name), tensor in zip(self.slots, buffers, strict=True):
            tensors[name] = tensor

    def _check_state(self, buffers: Iterable[Tensor], attributes: list[dict[str, Any]]) -> None:
        names = {id(tensors): type(module).__name__ for module in self.modules for tensors in _tensors_of(module)}
        for (tensors, name), tensor in zip(self.slots, buffers, strict=True):
            if tensors.get(name) is not tensor:
                raise _StateError(f"another tensor as {names[id(tensors)]}.{name}")
        for module, before in zip(self.modules, attributes, strict=True):
            for name, value in _attributes(module).items():
                same = name in before and (value is before[name] or (isinstance(value, list | dict) and value == before[name]))
                if not same:
                    raise _StateError(f"another {type(value).__name__} as {type(module).__name__}.{name}")


class _StateError(Exception):
    """State that a graph would not keep."""


def _prune(graph: torch.fx.GraphModule) -> list[int]:
    """Removes unused inputs, each of which costs half a microsecond per call, and returns the indices of the others."""
    inputs = list(enumerate(graph.graph.find_nodes(op="placeholder")))
    used = [index for index, node in inputs if node.users]
    for _, node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def _tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._buffers, module._parameters


def _attributes(module: nn.Module) -> dict[str, Any]:
    # Lists and dicts as they are now. What belongs to nn.Module is checked by other means.
    return {
        name: value.copy() if type(value) in (list, dict) else value
        for name, value in vars(module).items()
        if not name.startswith("_")
    }


def _culprit(error: Exception) -> str:
    """The innermost env or transform on the stack."""
    found, trace = "the policy", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Env | Transform):
            found = f"{type(owner).__name__}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return found
