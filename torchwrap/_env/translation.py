"""Translation: a function of tensors as Python source that computes it in NumPy."""

from __future__ import annotations

import math
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

_ROUNDING = ("ceil", "floor", "trunc")
_POWERS = ("exp", "expm1", "log", "log1p", "log2", "reciprocal", "sqrt")
_TRIGONOMETRY = ("cos", "cosh", "sin", "sinh", "tan", "tanh")
_LOGIC = (*[f"bitwise_{name}" for name in ("and", "not", "or", "xor")], *[f"logical_{name}" for name in ("and", "not", "or")])
_BINARY = ("copysign", "fmod", "hypot", "maximum", "minimum", "remainder")
_SAME_NAMES = (*_ROUNDING, *_POWERS, *_TRIGONOMETRY, *_LOGIC, *_BINARY, "isinf", "isnan")
# Operators whose result is that of a NumPy function of the same operands, once these have one dtype.
_UFUNCS: dict[Any, np.ufunc] = {
    **{getattr(_aten, name): getattr(np, name) for name in _SAME_NAMES},
    **{_aten.acos: np.arccos, _aten.asin: np.arcsin, _aten.atan: np.arctan, _aten.atan2: np.arctan2, _aten.round: np.rint},
    **{_aten.add: np.add, _aten.sub: np.subtract, _aten.mul: np.multiply, _aten.div: np.true_divide},
    **{_aten.eq: np.equal, _aten.ne: np.not_equal, _aten.lt: np.less, _aten.le: np.less_equal},
    **{_aten.gt: np.greater, _aten.ge: np.greater_equal, _aten.abs: np.absolute, _aten.neg: np.negative},
}
_REDUCTIONS: dict[Any, np.ufunc] = {
    **{_aten.sum: np.add, _aten.prod: np.multiply, _aten.amax: np.maximum, _aten.amin: np.minimum},
    **{_aten.any: np.logical_or, _aten.all: np.logical_and},
}
_RESHAPES = {_aten.view, _aten._unsafe_view, _aten.squeeze, _aten.unsqueeze}
_COPIES = {_aten._to_copy, _aten.clone, _aten.lift_fresh_copy}
_FILLED = {_aten.zeros_like: 0, _aten.ones_like: 1, _aten.full_like: None}

Array: TypeAlias = np.ndarray[Any, Any]


def translate(function: Callable[..., Any], example: Sequence[Array]) -> Callable[..., list[Array]] | None:
    """Returns a pure function in NumPy, as described in `HostFunction`; None if an operator has no counterpart there.

    Matrix products have one, but NumPy's library for them would not use PyTorch's number of threads.
    """
    try:
        copies = [array.copy() for array in example]
        traced = make_fx(function, _DECOMPOSITIONS, "fake", _allow_non_fake_inputs=True)
        graph: Any = traced(*map(torch.from_numpy, copies)).graph
        run = _Translation(graph).compile()
        dtypes = [array.dtype for array in run(*copies)]
    except Exception:  # of any function that a user has written
        return None
    return run if dtypes == list(map(_dtype, graph.output_node().args[0][1])) else None


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
        graph.eliminate_dead_code()
        for node in graph.nodes:
            if node.op == "get_attr":  # a tensor that is no argument, in whose memory the array lies
                value = getattr(graph.owning_module, node.target).detach()
                node.meta["val"], self.names[node.name] = value, value.numpy()
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
            return self.constant(np.full(_shape(node), _completed(arguments, _FILLED[packet])[1], _dtype(node)))
        if packet in _COPIES:
            self.memory[node] = node
            return f"{arguments[0]}.astype({self.constant(_dtype(node))})"
        if packet in _RESHAPES:
            self.memory[node] = self.memory.get(arguments[0])
            return f"{arguments[0]}.reshape({_shape(node)})"
        if packet is _aten.expand:
            return f"{self.numpy('broadcast_to')}({arguments[0]}, {_shape(node)})"
        if packet is _aten.permute:
            return f"{arguments[0]}.transpose({arguments[1]})"
        if packet is _aten.select:
            return _index(*arguments)
        if packet is _aten.slice:
            source, dim, start, end, step = _completed(arguments, 0, None, None, 1)
            return _index(source, dim, f"{start or 0}:{end}:{step}")
        if packet is operator.getitem:
            return self.parts[arguments[0]][arguments[1]]
        if packet is _aten.unbind:
            source, dim = _completed(arguments, 0)
            self.parts[node] = [_index(source, dim, index) for index in range(_shape(source)[dim])]
            return ""
        if packet is _aten.split:
            source, size, dim = _completed(arguments, 1, 0)
            starts = range(0, _shape(source)[dim], size)
            self.parts[node] = [_index(source, dim, f"{start}:{start + size}") for start in starts]
            return ""
        if packet in (_aten.mul, _aten.div) and _is_one(arguments[1]) and _dtype(node) == _dtype(arguments[0]):
            node.replace_all_uses_with(arguments[0])
            return ""
        if packet in _UFUNCS and not node.kwargs:
            self.memory[node] = node
            return f"{self.numpy(_UFUNCS[packet].__name__)}({self.operands(arguments, _common_dtype(node))})"
        if packet in _REDUCTIONS and _shape(node):  # without dimensions NumPy would return a number
            source, dims, keepdim = _completed(arguments, [], False)
            axes, name = (tuple(dims) if isinstance(dims, list) else dims), self.numpy(_REDUCTIONS[packet].__name__)
            self.memory[node] = node
            return f"{name}.reduce({source}, {axes}, {self.constant(_dtype(node))}, None, {keepdim})"
        if packet is _aten.cat:
            values, dim = _completed(arguments, 0)
            self.memory[node] = node
            return f"{self.numpy('concatenate')}([{self.operands(values, _dtype(node))}], {dim})"
        if packet is _aten.where:
            mask, *values = arguments
            self.memory[node] = node
            return f"{self.numpy('where')}({mask}, {self.operands(values, _dtype(node))})"
        if packet is _aten.stack:
            values, dim = _completed(arguments, 0)
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

    def operands(self, values: Any, dtype: np.dtype[Any]) -> str:
        """Expressions for values, all of one dtype."""
        return ", ".join([self.operand(value, dtype) for value in values])

    def operand(self, value: Any, dtype: np.dtype[Any]) -> str:
        if not isinstance(value, Node):
            return self.constant(np.array(value, dtype))
        return value.name if _dtype(value) == dtype else f"{value}.astype({self.constant(dtype)})"


def _completed(arguments: Any, *defaults: Any) -> Any:
    # With the defaults of those that are not given, after the first one.
    return (*arguments, *defaults[len(arguments) - 1 :])


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
        tensor = torch.maximum(tensor, low if isinstance(low, Tensor) else _scalar(low, tensor.dtype))
    return tensor if high is None else torch.minimum(tensor, high if isinstance(high, Tensor) else _scalar(high, tensor.dtype))


def _rsub(tensor: Tensor, number: Any) -> Tensor:
    return _scalar(number, torch.result_type(tensor, number)) - tensor


def _pow(tensor: Tensor, exponent: Any) -> Any:
    # Other powers take longer in NumPy.
    if exponent in (2, 3):
        return math.prod([tensor.to(torch.result_type(tensor, exponent))] * int(exponent))
    return tensor.sqrt() if exponent == 0.5 else NotImplemented


def _norm(tensor: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    return (tensor * tensor).sum(dim, keepdim).sqrt() if order == 2 else NotImplemented


def _mean(tensor: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    total = tensor.sum(dim, keepdim)
    return total / (tensor.numel() / total.numel())


# In terms of operators that NumPy has.
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.clamp.default: _clamp,
    _aten.clamp.Tensor: _clamp,
    _aten.linalg_vector_norm.default: _norm,
    _aten.masked_fill.Scalar: lambda tensor, mask, value: torch.where(mask, value, tensor),
    _aten.max.dim: lambda tensor, dim, keepdim=False: (tensor.amax(dim, keepdim), tensor.argmax(dim, keepdim)),
    _aten.mean.dim: _mean,
    _aten.min.dim: lambda tensor, dim, keepdim=False: (tensor.amin(dim, keepdim), tensor.argmin(dim, keepdim)),
    _aten.pow.Tensor_Scalar: _pow,
    _aten.relu.default: lambda tensor: _clamp(tensor, 0),
    _aten.rsqrt.default: lambda tensor: tensor.sqrt().reciprocal(),
    _aten.rsub.Scalar: _rsub,
    _aten.sigmoid.default: lambda tensor: (1 + (-tensor).exp()).reciprocal(),
}
