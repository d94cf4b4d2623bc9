"""trace: from a Python function over modules to a graph of operators. It finds and refuses code that cannot be traced."""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.experimental.functional import FuncEnv
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from torchwrap._compile.inputs import Function, Inputs
from torchwrap._core import rows
from torchwrap._core.generators import PYTHON_GENERATORS, SCALARS, equal
from torchwrap._core.rows import Nested
from torchwrap.env import Env
from torchwrap.policy import act
from torchwrap.transforms.transform import Transform

_ON_DEVICE = (
    "Use tensor operators, such as `torch.where`, and in a transform the methods of the mask"
)
_HOST_READS = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "nonzero",
    "argwhere",
}
_GENERATORS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
    "dropout",
}
_GENERATORS |= {f"{name}_like" for name in ("rand", "randn", "randint")}
_GENERATORS |= {
    f"{name}_"
    for name in ("normal", "uniform", "random", "exponential", "bernoulli", "cauchy", "geometric")
}


class Trace(NamedTuple):
    """A traced function."""

    graph: GraphModule
    """From the tensors of `Inputs`, and the leaves of the arguments, to the leaves of the result."""
    result: Nested
    """The result, of fake tensors, which have a shape and a dtype but no values."""


@torch.inference_mode(False)  # because tensors made in inference mode have no version counter
@torch.no_grad()
def trace(function: Function, inputs: Inputs, values: tuple[Nested, ...]) -> Trace:
    """Traces a function with fake tensors instead of the arguments and of the modules' tensors, which `inputs` has.

    A ValueError says which code cannot be traced, and names the env, the transform or the policy. The arguments are Tensors,
    TensorDicts, and tuples and dicts of them; `values` are like the arguments of later calls.
    """
    example = [*inputs.current()[1], *[leaf.contiguous() for leaf in rows.leaves(values)]]
    build, count, results = rows.builder(values), inputs.num_tensors, list[Nested]()

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        with _HostReads():
            result, replaced = inputs.call(function, tensors[:count], *build(iter(tensors[count:])))  # type: ignore[misc]
        if replaced:
            raise _Refusal(
                f"replaces the tensor {replaced[0].partition('.')[2]}. Write to it in place, such as with `copy_`"
            )
        results.append(result)
        return tuple(rows.leaves(result))

    try:
        places = _places(inputs)
        with _unchanged(places):
            graph = make_fx(flat, tracing_mode="fake")(*example)
        with _unchanged(places):
            again = make_fx(flat, tracing_mode="fake")(*example)
        _require_equal(graph, again)
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise ValueError(f"compile cannot trace {_culprit(error)}: it {reason}.") from error
    return Trace(graph, results[0])


def dependencies(
    function: Callable[..., list[Tensor]], values: list[Tensor], num_state: int
) -> tuple[set[Tensor], set[Tensor]] | None:
    """The tensors that a function uses, arguments and others, and the subset that its results depend on; None if untraceable.

    The last `num_state` arguments and results are a state and the next state, which matters where a result depends on it.
    """
    try:
        graph = make_fx(functionalize(function))(*values)
    except Exception:  # of many kinds
        return None
    *nodes, output = graph.graph.nodes
    arguments = [node for node in nodes if node.op == "placeholder"]
    tensors = dict(zip(arguments, values, strict=True))
    tensors |= {node: getattr(graph, str(node.target)) for node in nodes if node.op == "get_attr"}
    waiting: Any = list(output.args[0])  # type: ignore[arg-type]
    following = {arguments.pop(): waiting.pop() for _ in range(num_state)}
    seen = set()
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            waiting += [*node.all_input_nodes, *([following[node]] if node in following else ())]
    return set(tensors.values()), {tensor for node, tensor in tensors.items() if node in seen}


class _HostReads(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_is_all_true":  # `torch.distributions` checks its arguments with it
            return True
        if name in _HOST_READS:
            raise _Refusal(f"reads values on the host ({name}). {_ON_DEVICE}")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            if not all(isinstance(size, int) for size in result.shape):
                raise _Refusal(
                    f"makes a tensor whose shape depends on values ({name}). {_ON_DEVICE}"
                )
            if any(
                isinstance(value, Tensor) and value.dim() and value.device != result.device
                for value in args
            ):
                raise _Refusal(
                    f"copies between devices ({name}), and the host waits for it. Keep tensors in buffers"
                )
        return result


class NoGenerators(TorchFunctionMode):
    """Refuses random numbers that do not come from `torchwrap.random`: they would not depend on the seed of the env."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _GENERATORS:
            remedy = "Draw with `torchwrap.random`, from a stream of `signature.stream()` or the key of the function"
            raise _Refusal(f"draws from PyTorch's global generator ({name}). {remedy}")
        return func(*args, **(kwargs or {}))


def _reason(error: Exception) -> str | None:
    """Why the code cannot be traced; None for an error of the code itself."""
    text = str(error)
    if isinstance(error, _Refusal):
        return text
    if "convert all Tensors to FakeTensors" in text:
        return (
            "uses a tensor that none of its modules holds. Register it as a buffer or a parameter"
        )
    if (
        "data-dependent" in text
        or "DataDependent" in type(error).__name__
        or "DynamicOutputShape" in type(error).__name__
    ):
        return f"reads values on the host. {_ON_DEVICE}"
    return None


def _culprit(error: BaseException) -> str:
    """The innermost env or transform on the stack, or the policy."""
    found, at = "this code", error.__traceback__
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        if isinstance(owner, Env | Transform | FuncEnv):
            found = f"{type(owner).__name__}.{at.tb_frame.f_code.co_name}"
        elif at.tb_frame.f_code is act.__code__:
            found = "the policy"
        at = at.tb_next
    return found


def _require_equal(first: GraphModule, second: GraphModule) -> None:
    for once, again in itertools.zip_longest(
        first.code.splitlines(), second.code.splitlines(), fillvalue="nothing"
    ):
        if once != again:
            shown = [line.strip().partition(";")[0] for line in (once, again)]
            remedy = "Keep values that change in a buffer, and draw with torchwrap.random"
            raise _Refusal(
                f"computes different things in two calls, first `{shown[0]}`, then `{shown[1]}`. {remedy}"
            )


# Python values that code can change and a graph would not: they are found, and put back.

_CONTAINERS = (list, dict, set, collections.deque, np.ndarray)


class _Refusal(Exception):
    """Code that cannot be traced."""


class _Place(NamedTuple):
    """Where a Python value is kept: under a key of a namespace, or in the cell of a closure."""

    name: str
    owner: Any
    key: str

    def read(self) -> Any:
        return (
            self.owner.get(self.key) if isinstance(self.owner, dict) else self.owner.cell_contents
        )

    def write(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.key] = value
        else:
            self.owner.cell_contents = value


def _places(inputs: Inputs) -> list[_Place]:
    """Attributes of modules and of the objects that they hold, and the variables of functions that the modules belong to."""
    owners: list[object] = [
        module for module in inputs.modules.modules() if module is not inputs.modules
    ]
    for module in owners[
        :
    ]:  # objects that a module keeps as part of its state, such as the functions of an env
        for part in vars(module).values():
            if (
                hasattr(part, "__dict__")
                and not isinstance(part, type | nn.Module | Tensor)
                and not inspect.isroutine(part)
            ):
                owners.append(part)
    found = []
    for function in inputs.find_functions():
        if isinstance(function, types.MethodType):
            owners.append(function.__self__)
            function = function.__func__
        if isinstance(function, types.FunctionType):
            for name in inspect.getclosurevars(function).globals:
                found.append(_Place(f"the global {name}", function.__globals__, name))
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            ):
                found.append(_Place(f"{name} of {function.__qualname__}", cell, name))
    for owner in owners:
        values = getattr(owner, "__dict__", {})
        for name in values.keys() - {"_parameters", "_buffers", "_modules"}:
            found.append(_Place(f"{type(owner).__name__}.{name}", values, name))
    return [place for place in found if isinstance(place.read(), (*SCALARS, *_CONTAINERS, Tensor))]


@contextlib.contextmanager
def _unchanged(places: list[_Place]) -> Iterator[None]:
    """Puts all values back at the end of the block, and raises a `_Refusal` with the name of the first that has changed."""
    before = []
    for place in places:
        value = place.read()
        before.append((place, value, value.copy() if isinstance(value, _CONTAINERS) else value))
    states = [get() for get, _ in PYTHON_GENERATORS.values()]
    changed = []
    try:
        yield
    finally:
        for place, value, contents in before:
            if place.read() is not value or not equal(value, contents):
                changed.append(f"changes {place.name}. Register a buffer and write to it in place")
                _refill(value, contents)
                place.write(value)
        for (name, (get, put)), state in zip(PYTHON_GENERATORS.items(), states, strict=True):
            if not equal(get(), state):
                changed.append(
                    f"draws from {name}. Draw with torchwrap.random, from a stream or the key of the function"
                )
                put(state)
    if changed:
        raise _Refusal(changed[0])


def _refill(value: Any, contents: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = contents
    elif hasattr(value, "clear"):
        value.clear()
        (value.extend if hasattr(value, "extend") else value.update)(contents)
