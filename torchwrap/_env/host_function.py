"""HostFunction: a function of small tensors, traced once and then run in NumPy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

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

Array: TypeAlias = np.ndarray[Any, Any]
Function: TypeAlias = Callable[..., tuple[list[Tensor], list[Any]]]


class HostFunction:
    """A function of small tensors on the CPU, as NumPy operators, each of which takes a quarter of the time of PyTorch's.

    Results agree with PyTorch's up to rounding. A copy of this object traces its functions again.

    >>> double = HostFunction()
    >>> count, step = np.array([1.0, 2.0]), np.ones(2)
    >>> run = double.translated(lambda count, step: ([count + step], [2 * count]), 1, [count, step])
    >>> run(count, step), count
    ([array([2., 4.])], array([2., 3.]))
    """

    def __init__(self) -> None:
        self._version: Any = None
        self._run: Callable[..., list[Array]] | None = None

    def translated(self, function: Function, version: Any, example: Sequence[Array]) -> Callable[..., list[Array]] | None:
        """The function in NumPy; None if it cannot be traced or has an operator without a counterpart in NumPy.

        Args:
            function: a pure function of tensors that returns `(updates, results)`.
            version: another one whenever what the function depends on besides has changed.
            example: arguments. Their shapes and dtypes are those of each call.

        Returns:
            A function of arrays that writes each update into the argument at the same position, and returns the results.
        """
        if version != self._version:
            self._version, self._run = version, _translate(function, example)
        return self._run

    def __reduce__(self) -> tuple[Any, ...]:
        return HostFunction, ()


class Views:
    """NumPy arrays in the memory of tensors. They are kept, because each takes a microsecond to make.

    >>> views, count = Views(), torch.zeros(2)
    >>> views([count])[0] is views([count])[0]
    True
    """

    def __init__(self) -> None:
        self._tensors, self._pointers, self._arrays = list[Tensor](), list[int](), list[Array]()

    def __call__(self, tensors: list[Tensor]) -> list[Array]:
        pointers = [tensor.data_ptr() for tensor in tensors]  # tensors can be replaced, and their memory can move
        if pointers != self._pointers or not all(map(operator.is_, tensors, self._tensors)):
            self._tensors, self._pointers, self._arrays = tensors, pointers, [tensor.numpy() for tensor in tensors]
        return self._arrays

    def __reduce__(self) -> tuple[Any, ...]:
        return Views, ()


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


def _translate(function: Function, example: Sequence[Array]) -> Callable[..., list[Array]] | None:
    try:
        copies = [array.copy() for array in example]
        run = _Translation(make_fx(function, _DECOMPOSITIONS, "fake")(*map(torch.from_numpy, copies)).graph).compile()
        run(*copies)
    except Exception:  # of any function that a user has written
        return None
    return run


class _Translation:
    """Python source that computes a graph in NumPy."""

    def __init__(self, graph: Any) -> None:
        self.names: dict[str, Any] = {}
        self.inputs, self.lines = [node.name for node in graph.find_nodes(op="placeholder")], list[str]()
        self.memory: dict[Node, Node | None] = {}
        """The node in whose memory a node lies, if that was made in this call."""
        self.constants: dict[Any, str] = {}
        self.parts: dict[Node, list[str]] = {}
        """Expressions for the parts of a node that is a list."""
        first: dict[str, Node] = {}
        for node in graph.nodes:
            if node.op == "call_function" and (expression := self.translate(node)):
                same = first.setdefault(expression, node)
                if same is node:
                    self.lines.append(f"{node} = {expression}")
                else:  # computed already
                    node.replace_all_uses_with(same)
        updates, results = graph.output_node().args[0]
        memories = [self.memory.get(node) for node in results]
        returned = [
            node.name if memory is not None and memories.index(memory) == position else f"{node}.copy()"
            for position, (node, memory) in enumerate(zip(results, memories, strict=True))
        ]
        self.lines.append(f"results = [{', '.join(returned)}]")  # first, because a result can lie in the state
        # At once, because a value can lie in a state that another one is written to.
        values = [node.name if self.memory.get(node) is not None else f"{node}.copy()" for node in updates]
        targets = [f"{name}[...]" for name in self.inputs[: len(values)]]
        self.lines += [f"[{', '.join(targets)}] = [{', '.join(values)}]"] if values else []
        self.lines.append("return results")

    def compile(self) -> Callable[..., list[Array]]:
        body = "\n ".join(self.lines)  # names of nodes and of constants, and numbers: nothing that a user has written
        exec(f"def run({', '.join(self.inputs)}):\n {body}", self.names)
        return np.errstate(all="ignore")(self.names["run"])  # type: ignore[no-any-return]

    def translate(self, node: Any) -> str:
        """An expression for the value of a node; empty if `lines` or `parts` has it."""
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
            return self.parts[arguments[0]][arguments[1]]
        if packet is _aten.unbind:
            source, dim = (*arguments, 0)[:2]
            self.parts[node] = [_index(source, dim, index) for index in range(_shape(source)[dim])]
            return ""
        if packet is _aten.split:
            source, size, dim = (*arguments, 0)[:3]
            starts = range(0, _shape(source)[dim], size)
            self.parts[node] = [_index(source, dim, f"{start}:{start + size}") for start in starts]
            return ""
        if packet is _aten.pow and arguments[1] == 2:
            packet, arguments = _aten.square, arguments[:1]
        if packet in (_aten.mul, _aten.div) and _is_one(arguments[1]) and _dtype(node) == _dtype(arguments[0]):
            node.replace_all_uses_with(arguments[0])
            return ""
        if packet in _UFUNCS and not node.kwargs:
            dtype, ufunc = _common_dtype(node), _UFUNCS[packet]
            self.memory[node] = node
            operands = ", ".join([self.operand(argument, dtype) for argument in arguments])
            return f"{self.numpy(ufunc.__name__)}({operands})"
        if packet is _aten.where:
            mask, *values = arguments
            self.memory[node] = node
            return f"{self.numpy('where')}({mask}, {', '.join([self.operand(value, _dtype(node)) for value in values])})"
        if packet is _aten.stack:
            values, dim = (*arguments, 0)[:2]
            self.memory[node] = node
            self.lines.append(f"{node} = {self.numpy('empty')}({_shape(node)}, {self.constant(_dtype(node))})")
            self.lines += [f"{_index(node, dim, index)} = {value}" for index, value in enumerate(values)]
            return ""
        raise NotImplementedError(f"{node.target} with {node.kwargs}")

    def numpy(self, name: str) -> str:
        """A name for a function of NumPy. Attribute lookups would take a microsecond a step."""
        self.names[f"np_{name}"] = getattr(np, name)
        return f"np_{name}"

    def constant(self, value: Any) -> str:
        """A name for a dtype or an array. Equal ones have the same name, so that equal expressions are found."""
        key = value if isinstance(value, np.dtype) else (value.dtype, value.shape, value.tobytes())
        name = self.constants.setdefault(key, f"constant_{len(self.constants)}")
        self.names[name] = value
        return name

    def operand(self, value: Any, dtype: np.dtype[Any]) -> str:
        if not isinstance(value, Node):
            return self.constant(np.array(value, dtype))
        return value.name if _dtype(value) == dtype else f"{value}.astype({self.constant(dtype)})"


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _is_one(value: Any) -> bool:
    return not isinstance(value, Node) and bool(value == 1)


def _index(node: Any, dim: int, index: int | str) -> str:
    return f"{node}[{':, ' * (dim % len(_shape(node)))}{index}]"


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
