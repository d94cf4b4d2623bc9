"""trace: from a Python function over modules to a graph of operators; other code is refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from gymnasium.experimental.functional import FuncEnv
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta, set_stack_trace

from torchwrap._compile.inputs import Function, Inputs, places_of
from torchwrap._core import rows
from torchwrap._core.buffers import distrust
from torchwrap._core.errors import refusal
from torchwrap._core.generators import DRAWING
from torchwrap._core.operators import OperatorMode
from torchwrap._core.rows import Nested
from torchwrap.env import Env
from torchwrap.policy import act
from torchwrap.transforms.transform import Transform

_USE_OPERATORS = (
    "Use torch.where instead of `if`, torch.stack([x, y]) instead of torch.tensor([x, y]), "
    "x[i + torch.arange(2)] instead of x[i : i + 2], and in a transform the methods of the mask"
)
_USE_BUFFERS = "Keep values that change in a buffer, and draw with torchwrap.random"
# Names of functions that need values.
_HOST_READS = {"item", "tolist", "numpy", "nonzero", "argwhere"}
_HOST_READS |= {"__bool__", "__int__", "__float__", "__index__", "__array__"}
# Words in PyTorch's errors for values that it does not have, the last two of `torch.tensor([x])`
# and of an f-string.
_VALUE_ERRORS = (
    "data-dependent|DataDependent|DynamicOutputShape|data is not allocated yet|"
    r"FakeTensor\.__format__"
)
_LIBRARIES = ("torch", "tensordict")
_POLICY = "the policy"
_LOCK = threading.RLock()


class Trace(NamedTuple):
    """A traced function."""

    graph: GraphModule
    """From the tensors of `Inputs` and the leaves of the arguments to the leaves of the result."""
    result: Nested
    """The result of fake tensors. They have a shape and a dtype, but no values."""


class Refusal(Exception):
    """A fault of code that cannot be traced, and its remedy."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(fault, remedy)
        self.fault = fault
        self.remedy = remedy


@contextlib.contextmanager
def exclusively() -> Iterator[None]:
    """Waits for other threads: PyTorch's tracers have one state for all of them."""
    with _LOCK:
        yield


def trace(function: Function, inputs: Inputs, values: tuple[Nested, ...]) -> Trace:
    """Traces a function of Tensors, TensorDicts, and tuples and dicts of them.

    It runs twice, with fake tensors for the arguments and for the modules' tensors. Python values
    become constants, so both runs have to compute the same.

    Args:
        function: writes to the tensors of `inputs` in place.
        inputs: has the modules that the function computes with.
        values: arguments like those of later calls.

    Raises:
        ValueError: for code that cannot be traced. It names the env, the transform or the policy.
    """
    try:
        first = _record(function, inputs, values)
        with preserve_node_meta():  # with the line of each operator
            second = _record(function, inputs, values)
        _check_equal(first.graph, second.graph)
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        must = f"cannot trace {_culprit(error)}, which {reason.fault}"
        raise ValueError(refusal("compile", must, remedy=reason.remedy)) from error
    return first


@torch.inference_mode(False)  # because tensors made in inference mode have no version counter
@torch.no_grad()
def _record(function: Function, inputs: Inputs, values: tuple[Nested, ...]) -> Trace:
    _, tensors = inputs.current()
    distrust(inputs.modules)
    # Copies, because a tensor that is given twice would be one input of the graph.
    layout = torch.contiguous_format
    leaves = [leaf.clone(memory_format=layout) for leaf in rows.leaves(values)]
    build = rows.builder(values)
    number = len(tensors)
    results: list[Nested] = []

    def flat(*given: Tensor) -> tuple[Tensor, ...]:
        arguments: Any = build(iter(given[number:]))
        with _Operators():
            result, replaced = inputs.call(function, given[:number], *arguments)
        if replaced:
            fault = f"replaces the tensor {replaced[0]}"
            raise Refusal(fault, "Write to it in place, as `copy_` does")
        results.append(result)
        return tuple(map(Tensor.contiguous, rows.leaves(result)))

    graph = make_fx(flat, tracing_mode="fake")(*tensors, *leaves)
    return Trace(graph, results[0])


def fake_inputs(graph: GraphModule) -> list[Tensor]:
    """The fake tensors that a graph was traced with."""
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


class _Operators(OperatorMode):
    """Refuses operators that a graph cannot have, and notes the line that calls each of them."""

    def operator(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_is_all_true":  # `torch.distributions` checks its arguments with it
            return True
        if name in _HOST_READS:
            raise Refusal(f"reads values on the host ({name})", _USE_OPERATORS)
        set_stack_trace([_line(sys._getframe(1))])
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            _check_result(name, args, result)
        return result


def _check_result(name: str, args: tuple[Any, ...], result: Tensor) -> None:
    if not all(isinstance(size, int) for size in result.shape):  # a symbol
        raise Refusal(f"makes a tensor whose shape depends on values ({name})", _USE_OPERATORS)
    tensors = [value for value in args if isinstance(value, Tensor) and value.dim()]
    if any(tensor.device != result.device for tensor in tensors):
        fault = f"copies between devices ({name}), so that the host waits"
        raise Refusal(fault, "Keep tensors in buffers")


class NoGenerators(OperatorMode):
    """Refuses random numbers of PyTorch's generator, because the env's seed does not reach it."""

    def operator(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if DRAWING.fullmatch(name) or name == "dropout":
            remedy = "Use torchwrap.random, with a stream of `signature.stream()` or the `rng`"
            raise Refusal(f"draws from PyTorch's global generator ({name})", remedy)
        return func(*args, **kwargs)


def without_generators(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses draws from PyTorch's generator: an env draws from its own streams."""

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        with NoGenerators():
            return function(*args)

    return checked


def _line(frame: FrameType) -> str:
    """The innermost line outside of PyTorch, tensordict and the modes."""
    modes = (__name__, OperatorMode.__module__, act.__module__)
    for caller, number in traceback.walk_stack(frame):
        module = str(caller.f_globals.get("__name__"))
        if module not in modes and module.partition(".")[0] not in _LIBRARIES:
            path = caller.f_code.co_filename
            code = linecache.getline(path, number).strip()
            return f"{path}:{number}: {code}"
    return ""


def _check_equal(first: GraphModule, second: GraphModule) -> None:
    """Raises at the first operator that differs. The second graph knows the lines of operators."""
    pairs = itertools.zip_longest(first.graph.nodes, second.graph.nodes)
    for first_node, second_node in pairs:
        if _described(first, first_node) != _described(second, second_node):
            node = second_node or first_node
            line = node.stack_trace or node.format_node()
            raise Refusal(f"computes something else in a second call, at `{line}`", _USE_BUFFERS)


def _described(graph: GraphModule, node: Node | None) -> str:
    """Equal for equal operators, and equal constants."""
    if node is None:
        return ""
    constant = getattr(graph, str(node.target)) if node.op == "get_attr" else None
    return f"{node.op} {node.target} {node.args} {node.kwargs} {constant}"


def _reason(error: Exception) -> Refusal | None:
    """The fault that PyTorch's error shows; None for an error that the code itself raises."""
    if isinstance(error, Refusal):
        return error
    text = f"{type(error).__name__}: {error}"
    if re.search("convert all Tensors to FakeTensors|fake mode", text):
        return _foreign(error)
    if re.search(_VALUE_ERRORS, text):
        return Refusal("reads values on the host", _USE_OPERATORS)
    if "a dynamo-optimized function" in text:
        return Refusal("is compiled already", "Pass what torch.compile was given")
    return None


def _foreign(error: Exception) -> Refusal:
    """The fault of a tensor that is no input of the graph, with the name that a module gives it."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners: list[Any] = [values.get("self") for values in frames]
    given: list[Tensor] = []
    for values, owner in zip(frames, owners, strict=True):
        if isinstance(owner, _Operators):
            keywords = values.get("kwargs") or {}
            given += _plain_tensors([*values["args"], *keywords.values()])
    name = "a tensor"
    is_of_module = False
    for tensor in given[:1]:
        name = f"a tensor of shape {tuple(tensor.shape)}"
        is_of_module = isinstance(tensor, nn.Parameter)
        for owner in reversed(owners):  # the outermost module names it last
            held = [] if not isinstance(owner, nn.Module) else places_of(owner).items()
            for path, (store, key) in held:
                if store[key] is tensor:
                    name = f"{type(owner).__name__}.{path}"
                    is_of_module = True
    remedy = "Register it as a buffer or a parameter, or a policy's state with PolicyState"
    if is_of_module and _culprit(error) == _POLICY:
        remedy = "Pass the module itself, or name it in the function"
    return Refusal(f"uses {name}, held by none of its modules", remedy)


def _plain_tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors of an operator's arguments that are not traced."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += _plain_tensors(value)
        elif isinstance(value, Tensor) and not rows.is_traced(value):
            found.append(value)
    return found


def _culprit(error: BaseException) -> str:
    """The innermost env or transform on the stack, or the policy."""
    culprit = "this code"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Env | Transform | FuncEnv):
            culprit = f"{type(owner).__name__}.{frame.f_code.co_name}"
        elif frame.f_code is act.__code__:
            culprit = _POLICY
    return culprit
