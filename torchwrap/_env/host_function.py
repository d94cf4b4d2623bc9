"""HostFunction: a function of small tensors, traced once and then run in NumPy."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_any

_aten = torch.ops.aten

# Operators whose result is that of a NumPy function of the same operands, once these have one dtype.
_UFUNCS: dict[Any, np.ufunc] = {
    **{getattr(_aten, name): getattr(np, name) for name in ("ceil", "cos", "exp", "floor", "sin", "sqrt", "tan", "tanh")},
    **{getattr(_aten, name): getattr(np, name) for name in ("copysign", "maximum", "minimum", "remainder")},
    **{getattr(_aten, name): getattr(np, name) for name in ("reciprocal", "square")},
    **{getattr(_aten, f"bitwise_{name}"): getattr(np, f"bitwise_{name}") for name in ("and", "not", "or", "xor")},
    **{getattr(_aten, f"logical_{name}"): getattr(np, f"logical_{name}") for name in ("and", "not", "or")},
    **{_aten.add: np.add, _aten.sub: np.subtract, _aten.mul: np.multiply, _aten.div: np.true_divide},
    **{_aten.eq: np.equal, _aten.ne: np.not_equal, _aten.lt: np.less, _aten.le: np.less_equal},
    **{_aten.gt: np.greater, _aten.ge: np.greater_equal, _aten.abs: np.absolute, _aten.neg: np.negative},
}
_RESHAPES = {_aten.view, _aten._unsafe_view, _aten.squeeze, _aten.unsqueeze}
_COPIES = {_aten._to_copy, _aten.clone}
_FILLED = {_aten.zeros_like: 0, _aten.ones_like: 1}

Function = Callable[..., tuple[list[Tensor], list[Any]]]


class HostFunction:
    """A function of small tensors on the CPU, as NumPy operators, each of which takes a quarter of the time of PyTorch's.

    Results agree with PyTorch's up to rounding. A copy is traced anew.

    >>> double = HostFunction()
    >>> count = torch.tensor([1.0, 2.0])
    >>> double(lambda count, step: ([count + step], [2 * count]), 1, [count], torch.ones(2)), count
    ([tensor([2., 4.])], tensor([2., 3.]))
    """

    def __init__(self) -> None:
        self._version: Any = None
        self._run: Callable[..., list[Any]] | None = None
        self._state, self._pointers, self._arrays = list[Tensor](), list[int](), list[Any]()

    def __call__(self, function: Function, version: Any, state: list[Tensor], *rest: Any) -> list[Any]:
        """Calls the function. In PyTorch, if it cannot be traced or has an operator without a counterpart in NumPy.

        Args:
            function: a pure function of `(*state, *rest)` that returns `(updates, results)`. Each update is written into the
                tensor of the state at the same position.
            version: another number whenever what the function depends on besides has changed. None asks for PyTorch.
            state: tensors, of the same shapes and dtypes at each call.
            rest: further arguments.

        Returns:
            The results.
        """
        if version is not None and version != self._version:
            self._version, self._run = version, _translate(function, [*state, *rest])
        if version is None or self._run is None:
            updates, results = function(*state, *rest)
            for tensor, update in zip(state, updates, strict=False):
                tensor.copy_(update)
            return results
        # The arrays are kept, because each takes a microsecond to make. Tensors can be replaced, and their memory can move.
        pointers = [tensor.data_ptr() for tensor in state]
        if pointers != self._pointers or not all(map(operator.is_, state, self._state)):
            self._state, self._pointers, self._arrays = state, pointers, [tensor.numpy() for tensor in state]
        return [torch.from_numpy(array) for array in self._run(*self._arrays, *[tensor.numpy() for tensor in rest])]

    def __reduce__(self) -> tuple[Any, ...]:
        return HostFunction, ()


class Attributes:
    """Notices that an attribute of an object has been replaced.

    >>> attributes = Attributes(torch.nn.Identity())
    >>> attributes.version() == attributes.version()
    True
    """

    def __init__(self, owner: object) -> None:
        self._owner, self._values, self._version = owner, list[Any](), 0

    def version(self) -> int:
        """Another number after each replacement."""
        values = list(vars(self._owner).values())
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._values, self._version = values, self._version + 1
        return self._version


def _translate(function: Function, example: list[Tensor]) -> Callable[..., list[Any]] | None:
    try:
        copies = [tensor.clone() for tensor in example]
        run = _Translation(make_fx(function, _DECOMPOSITIONS, "fake")(*copies).graph).compile()
        run(*[tensor.numpy() for tensor in copies])
    except Exception:  # of any function that a user has written
        return None
    return run


class _Translation:
    """Python source that computes a graph in NumPy."""

    def __init__(self, graph: Any) -> None:
        self.names: dict[str, Any] = {"np": np}
        self.inputs, self.lines = [node.name for node in graph.find_nodes(op="placeholder")], list[str]()
        updates, results = graph.output_node().args[0]
        self.memory: dict[Node, Node | None] = {}
        """The node in whose memory a node lies, if that was made in this call."""
        for node in graph.nodes:
            if node.op == "call_function":
                self.lines.append(f"{node.name} = {self.translate(node)}")
        memories = [self.memory.get(node) for node in results]
        returned = [
            node.name if memory is not None and memories.count(memory) == 1 else f"{node}.copy()"
            for node, memory in zip(results, memories, strict=True)
        ]
        self.lines.append(f"results = [{', '.join(returned)}]")  # first, because a result can lie in the state
        self.lines += [f"np.copyto({name}, {update})" for name, update in zip(self.inputs, updates, strict=False)]
        self.lines.append("return results")

    def compile(self) -> Callable[..., list[Any]]:
        body = "\n  ".join(self.lines)  # names of nodes and of constants, and numbers: nothing that a user has written
        exec(f"def run({', '.join(self.inputs)}):\n with np.errstate(all='ignore'):\n  {body}", self.names)
        return self.names["run"]  # type: ignore[no-any-return]

    def translate(self, node: Any) -> str:
        """An expression for the value of a node."""
        packet, arguments = getattr(node.target, "overloadpacket", node.target), node.args
        if not tree_any(lambda argument: isinstance(argument, Node), (node.args, node.kwargs)):
            return self.constant(node.target(*node.args, **node.kwargs).numpy())
        if packet in _FILLED:
            return self.constant(np.full(_shape(node), _FILLED[packet], _dtype(node)))
        if packet in _COPIES:
            self.memory[node] = node
            return f"{arguments[0]}.astype({self.constant(_dtype(node))})"
        if packet in _RESHAPES:
            self.memory[node] = self.memory.get(arguments[0])
            return f"{arguments[0]}.reshape({_shape(node)})"
        if packet is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if packet is _aten.pow and arguments[1] == 2:
            packet, arguments = _aten.square, arguments[:1]
        if packet in _UFUNCS and not node.kwargs:
            dtype, ufunc = _common_dtype(node), _UFUNCS[packet]
            self.memory[node] = node
            return f"np.{ufunc.__name__}({', '.join([self.operand(argument, dtype) for argument in arguments])})"
        if packet is _aten.where:
            mask, *values = arguments
            self.memory[node] = node
            return f"np.where({mask}, {', '.join([self.operand(value, _dtype(node)) for value in values])})"
        if packet is _aten.unbind:
            source, dim = (*arguments, 0)[:2]
            return f"[*np.moveaxis({source}, {dim}, 0)]"
        if packet is _aten.stack:
            values, dim = (*arguments, 0)[:2]
            self.memory[node] = node
            self.lines.append(f"{node.name} = np.empty({_shape(node)}, {self.constant(_dtype(node))})")
            index = [":"] * len(_shape(node))
            for position, value in enumerate(values):
                index[dim] = str(position)
                self.lines.append(f"{node.name}[{', '.join(index)}] = {value}")
            return node.name
        if packet is _aten.split:
            source, size, dim = (*arguments, 0)[:3]
            return f"np.split({source}, range({size}, {source}.shape[{dim}], {size}), {dim})"
        raise NotImplementedError(f"{node.target} with {node.kwargs}")

    def constant(self, value: Any) -> str:
        name = f"constant_{len(self.names)}"
        self.names[name] = value
        return name

    def operand(self, value: Any, dtype: np.dtype[Any]) -> str:
        if not isinstance(value, Node):
            return self.constant(np.array(value, dtype))
        return value.name if _dtype(value) == dtype else f"{value}.astype({self.constant(dtype)})"


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _dtype(node: Any) -> np.dtype[Any]:
    return _numpy_dtype(node.meta["val"].dtype)


def _common_dtype(node: Any) -> np.dtype[Any]:
    """The dtype in which PyTorch computes an operator."""
    first, *rest = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in node.args]
    found = torch.result_type(first, rest[0]) if rest else first.dtype
    result = node.meta["val"].dtype
    return _numpy_dtype(result if result.is_floating_point else found)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def _scalar(number: Any, dtype: torch.dtype) -> Tensor:
    return torch.scalar_tensor(number, dtype=dtype, device="cpu")


def _clamp(tensor: Tensor, low: Any = None, high: Any = None) -> Tensor:
    if low is not None:
        tensor = torch.maximum(tensor, _scalar(low, tensor.dtype))
    return tensor if high is None else torch.minimum(tensor, _scalar(high, tensor.dtype))


def _rsub(tensor: Tensor, number: Any) -> Tensor:
    return _scalar(number, torch.result_type(tensor, number)) - tensor


# In terms of operators that NumPy has.
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.clamp.default: _clamp,
    _aten.masked_fill.Scalar: lambda tensor, mask, value: torch.where(mask, value, tensor),
    _aten.rsub.Scalar: _rsub,
}
