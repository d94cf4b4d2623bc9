"""trace: from a Python function to a graph of operators. Nothing that other threads can see is changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributions import Distribution
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_pre_hook

from torchwrap._compile.reads import Reads
from torchwrap._compile.stand_ins import HostCopy, HostRead, NoHostReads, StandIns, layout, memory, plain
from torchwrap._core import nested
from torchwrap._core.graph_hints import stored
from torchwrap._core.reachable import Reachable
from torchwrap._core.tracing import tracing
from torchwrap.env import Env
from torchwrap.transforms.transform import Transform


class Trace(NamedTuple):
    """What a function computes, and the structure of what it returns."""

    graph: GraphModule
    result: Any
    passed_through: dict[int, int]
    """Leaves of the result that are tensors of the input: from the index of one to that of the other."""
    example: list[Tensor]
    """An input: the tensors of `Reads`, and the leaves of the arguments."""


@torch.inference_mode(False)  # because tensors made in inference mode have no version counter
@torch.no_grad()
def trace(function: Callable[..., Any], values: Any, reads: Reads) -> Trace:
    """Runs a function on tensors without values, and leaves everything as it was.

    Operators get a stand-in for each tensor that the function finds in a module, so no module ever holds one. The function
    runs twice: what differs the second time depends on state that a graph would not keep.

    Args:
        function: the function. Its arguments are Tensors, TensorDicts, and tuples and dicts of them.
        values: the arguments.
        reads: what the function reads besides. Tensors and modules that it does not know are added to it.

    Raises:
        ValueError: if the function reads values on the host, or keeps state outside of buffers. The message names the culprit.
    """
    with _unchanged(reads) as reachable:
        first = _Pass(function, values, reads, make_fx)
        changes = reachable.changes()
        _require_state([change for change in changes if isinstance(change[1], Tensor)])
        before = Reachable(reads.roots) if changes else reachable
        second = _Pass(function, values, reads, make_fx)
        _require_state(before.changes())
        second.require_equal(first)
    return second.finish(first, reads, reachable)


@torch.inference_mode(False)
@torch.no_grad()
def outline(function: Callable[..., Any], values: Any, reads: Reads) -> Any:
    """What a function returns, as tensors without values, in a third of the time of `trace`.

    The function runs once, so state that a graph would not keep is left to `trace` to find.
    """
    with _unchanged(reads):
        return _Pass(function, values, reads, lambda flat: flat).result


@contextlib.contextmanager
def _unchanged(reads: Reads) -> Iterator[Reachable]:
    # Undoes what the block changes, and says what an error of it means.
    reachable = Reachable(reads.roots)
    validate_args = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # validation reads values
    try:
        yield reachable
    except _StateError as error:
        raise ValueError(f"compile needs state in buffers that are written in place, but got {error}.") from None
    except Exception as error:
        is_read = isinstance(error, HostRead | DataDependentOutputException | DynamicOutputShapeException)
        needed = "tensor operators whose results are not read on the host" if is_read else "a function that can be traced"
        if isinstance(error, HostCopy):
            needed = "tensors that are on the device already"
        message = f"compile needs {needed}, but got {_culprit(error)}: {type(error).__name__}: {error}"
        raise ValueError(message) from error
    finally:
        Distribution.set_default_validate_args(validate_args)
        reachable.restore()


class _Pass:
    """One run of the function.

    Args:
        record: `make_fx`, or the identity to run the function without a graph.
    """

    def __init__(self, function: Callable[..., Any], values: Any, reads: Reads, record: Callable[..., Any]) -> None:
        slots = reads.tensors()
        self.example = list(map(plain, [*slots, *nested.leaves(values)]))
        self.result: Any = None
        self.passed_through: dict[int, int] = {}
        self.modules: dict[int, nn.Module] = {}
        build, count, thread = nested.builder(values), len(slots), threading.get_ident()
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # without a ShapeEnv, so no data-dependent sizes

        def flat(*tensors: Tensor) -> list[Tensor]:
            stand_ins = StandIns(slots, tensors, mode)
            self.met = stand_ins.met
            with tracing(), NoHostReads(), stand_ins:
                self.result = function(*build(iter(tensors[count:])))
                leaves = list(map(stand_ins.of, nested.leaves(self.result)))
                index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
                found = {index: index_of[id(leaf)] for index, leaf in enumerate(leaves) if id(leaf) in index_of}
                self.passed_through = found
                return [stored(leaf) for index, leaf in enumerate(leaves) if index not in found]

        def note(module: nn.Module, inputs: Any) -> None:
            if threading.get_ident() == thread:
                self.modules[id(module)] = module

        hook = register_module_forward_pre_hook(note)
        try:  # tensors that were made in inference mode can be written to in inference mode only
            with torch.inference_mode(any(tensor.is_inference() for tensor in slots)), mode:
                self.graph = record(flat)(*[mode.from_tensor(tensor) for tensor in self.example])
        finally:
            hook.remove()
        self.num_slots = count

    @functools.cached_property
    def literals(self) -> dict[Any, Any]:
        """The constants of the graph, by their names in it."""
        return {node.target: getattr(self.graph, node.target) for node in self.graph.graph.find_nodes(op="get_attr")}

    def require_equal(self, first: _Pass) -> None:
        """Raises unless an earlier pass gave the same graph."""
        for once, again in itertools.zip_longest(first.graph.code.splitlines(), self.graph.code.splitlines()):
            if once != again:
                raise _StateError(
                    f"a function that computes another thing each time: first{_shown(once)}, then{_shown(again)}"
                )
        for name in first.met.keys() | first.literals.keys():
            before, now = (run.met.get(name, run.literals.get(name)) for run in (first, self))
            if not _equal(before, now):
                raise _StateError(f"a function with another constant each time: first {before}, then {now}")

    def finish(self, first: _Pass, reads: Reads, reachable: Reachable) -> Trace:
        """The trace. Tensors that the function met in both passes are inputs of its graph; others are its constants."""
        graph, lasting = self.graph.graph, []
        inputs = graph.find_nodes(op="placeholder")
        body = next(node for node in graph.nodes if node.op != "placeholder")
        for name, tensor in self.literals.items():
            if not isinstance(tensor, FakeTensor):
                setattr(self.graph, name, tensor.clone())  # it can be in the memory of a NumPy array
        for node, (name, tensor) in zip(inputs[len(self.example) :], self.met.items(), strict=True):
            if _same_memory(first.met[name], tensor):
                lasting.append(tensor)
                with graph.inserting_before(inputs[self.num_slots]):
                    found = graph.placeholder(f"lasting_{name}")
            else:
                setattr(self.graph, name, tensor)
                with graph.inserting_before(body):
                    found = graph.call_function(torch.ops.aten.clone.default, (graph.get_attr(name),))
            found.meta.update(node.meta)
            node.replace_all_uses_with(found)
            graph.erase_node(node)
        self.graph.recompile()
        reads.add(lasting, list(self.modules.values()), reachable)
        example = list(self.example)
        example[self.num_slots : self.num_slots] = list(map(plain, lasting))
        _check_aliases(graph, example)
        sources = {
            index: source if source < self.num_slots else source + len(lasting)
            for index, source in self.passed_through.items()
        }
        return Trace(self.graph, self.result, sources, example)


class _StateError(Exception):
    """State that a graph would not keep."""


def _require_state(changes: list[tuple[str, Any]]) -> None:
    if changes:
        remedy = "register a buffer and write it in place; a cache can be filled by a call before compile"
        raise _StateError(f"a change of {changes[0][0]}: {remedy}")


def _shown(line: str | None) -> str:
    return f" `{line.strip().partition(';')[0]}`" if line else " nothing"


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return first.numel() > 0 and memory(first) == memory(second)


def _equal(first: Any, second: Any) -> bool:
    if any(not isinstance(value, Tensor) or isinstance(value, FakeTensor) for value in (first, second)):
        return type(first) is type(second)
    return layout(first) == layout(second) and bool(((first == second) | ((first != first) & (second != second))).all())


def _check_aliases(graph: torch.fx.Graph, example: list[Tensor]) -> None:
    # A graph that writes to an input does not know that another one shares its memory.
    inputs = dict(zip(graph.find_nodes(op="placeholder"), example, strict=True))
    used = {node: tensor for node, tensor in inputs.items() if node.users and tensor.numel()}
    for node in written_inputs(graph):
        for other, tensor in used.items():
            if other is not node and node in used and _overlap(used[node], tensor):
                layouts = f"{tuple(used[node].shape)} {used[node].dtype} and {tuple(tensor.shape)} {tensor.dtype}"
                raise ValueError(
                    f"compile needs tensors that share no memory if one of them is written to, but got two of {layouts} that "
                    "do: keep one, and make the other one from it where it is needed."
                )


def written_inputs(graph: torch.fx.Graph) -> set[Node]:
    """The inputs that operators write to, directly or through views."""
    source: dict[Node, Node] = {node: node for node in graph.find_nodes(op="placeholder")}
    written = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for position, argument in enumerate(schema.arguments if schema is not None else ()):
            value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
            if argument.alias_info is None or not isinstance(value, Node) or value not in source:
                continue
            if argument.alias_info.is_write:
                written.add(source[value])
            source[node] = source[value]
    return written


def _overlap(first: Tensor, second: Tensor) -> bool:
    ranges = []
    for tensor in (first, second):
        start = tensor.data_ptr()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        ranges.append((start, start + extent * tensor.element_size()))
    (start, end), (other_start, other_end) = ranges
    return start < other_end and other_start < end


def _culprit(error: Exception) -> str:
    """The innermost env or transform on the stack."""
    found, at = "the policy", error.__traceback__
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        if isinstance(owner, Env | Transform):
            found = f"{type(owner).__name__}.{at.tb_frame.f_code.co_name}"
        at = at.tb_next
    return found
