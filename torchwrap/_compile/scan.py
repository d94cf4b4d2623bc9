"""scan: a loop over steps as one operator of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchwrap._compile.internals import flat_scan_operator, is_mapped, scan_operator
from torchwrap._compile.pure import PureFunction
from torchwrap._compile.trace import fake_inputs
from torchwrap._core import rows, validation
from torchwrap._core.errors import refusal

Step = Callable[[Any, Any], tuple[Any, Any]]
Layout: TypeAlias = tuple[Any, ...]


def scan(
    function: Step,
    carry: Any,
    xs: Any,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """A loop over the first dimension of `xs`, as `jax.lax.scan`.

    Experimental: it may change in every minor version.

    In `torch.compile` it is one operator, whose body is compiled once, whatever the number of
    steps. Otherwise, and before PyTorch 2.11, it is a Python loop. In `torch.vmap` it cannot be
    compiled: map the function, as `scan(torch.vmap(function), carry, xs)`. Complex tensors cannot,
    either. The function gets copies and may write to them. Gradients flow, but not through steps of
    envs: around a compiled scan over those, `torch.no_grad()` is needed if the function also reads
    parameters. PyTorch 2.13 compiles `torch.autograd.grad` of a scan, outside of others, and no
    `torch.func.grad`.

    Args:
        function: takes the carry and a slice of `xs`. Returns the next carry, of the same
            structure, shapes and dtypes, and an output; `()` if there is none.
        carry: the first carry: Tensors, TensorDicts, and tuples and dicts of them.
        xs: likewise, each tensor with the steps as its first dimension, at least one.
        reverse: whether to begin with the last slice.

    Returns:
        carry: the last carry.
        outputs: the outputs, stacked in a new first dimension, in the order of `xs`.

    Raises:
        TypeError: for values of other types, by their names; compiled, for complex tensors.
        ValueError: for a carry that changes its structure, shape or dtype, for tensors in `xs` of
            different lengths, and in a compiled `torch.vmap`. `torch.compile` may wrap these
            errors.

    >>> def add(total, x):
    ...     return total + x, total + x
    >>> scan(add, torch.tensor(0), torch.arange(4))
    (tensor(6), tensor([0, 1, 3, 6]))
    """
    validation.function("scan", "function", function)
    carried, layout = _flat("carry", carry)
    x_leaves, layout_of_xs = _flat("xs", xs)
    num_steps = _number_of_steps(layout_of_xs)
    carried = _copies(carried)
    if not carried:
        raise ValueError(refusal("scan", "carry must hold a tensor"))
    _check_compiled([*carried, *x_leaves])
    # With the given order of keys: another would make `torch.compile` compile the next call again.
    build_carry = rows.builder(carry)
    build_x = rows.builder(_first_slice(xs))

    def body(carried: list[Tensor], x: list[Tensor]) -> Any:
        # Copies, because the operator allows no writes to what it is given.
        carry = build_carry(iter(_copies(carried)))
        result = function(carry, build_x(iter(_copies(x))))
        if not isinstance(result, tuple) or len(result) != 2:
            must = "function must return a tuple of the next carry and an output"
            raise TypeError(refusal("scan", must, type(result).__name__))
        next_carry, output = result
        next_carried, next_layout = _flat("carry", next_carry)
        _check_same("carry", layout, next_layout)
        _flat("output", output)  # raises for other types
        _check_compiled(next_carried)  # a closure may be mapped
        return _copies(next_carried), _encoded(output)

    if scan_operator is not None and torch.compiler.is_compiling():
        carried, encoded = scan_operator(body, carried, x_leaves, reverse=reverse)
        return build_carry(iter(carried)), _decoded(encoded)
    outputs: list[Any] = []
    for index in reversed(range(num_steps)) if reverse else range(num_steps):
        carried, encoded = body(carried, [leaf[index] for leaf in x_leaves])
        output = _decoded(encoded, num_new_dims=0)
        outputs.append(output)
        _, expected = _flat("output", outputs[0])
        _, found = _flat("output", output)
        _check_same("output", expected, found)
    if reverse:
        outputs.reverse()
    return build_carry(iter(carried)), _stacked(outputs)


def _flat(name: str, value: Any) -> tuple[list[Tensor], Layout]:
    """The tensors, and their keys, shapes and dtypes. Raises a TypeError for other types."""
    leaves: list[Tensor] = []
    try:
        structure = rows.flatten(value, leaves)
    except AttributeError:
        must = f"{name} must be a tensor, or a TensorDict, tuple or dict of tensors"
        raise TypeError(refusal("scan", must, type(value).__name__)) from None
    return leaves, (structure, [(tuple(leaf.shape), leaf.dtype) for leaf in leaves])


def _check_same(name: str, expected: Layout, found: Layout) -> None:
    if found != expected:
        must = f"{name} must have the same keys, shapes and dtypes in every step, {expected}"
        raise ValueError(refusal("scan", must, found))


def _check_compiled(tensors: list[Tensor]) -> None:
    """Raises where PyTorch's operator gives wrong shapes, or cannot be compiled."""
    if not is_mapped or not torch.compiler.is_compiling():
        return
    if any(map(is_mapped, tensors)):
        must = "in torch.compile, scan must not be called in torch.vmap"
        raise ValueError(refusal("scan", must, remedy="Map `function` instead"))
    if any(map(Tensor.is_complex, tensors)):
        must = "in torch.compile, carry and xs must be real"
        raise TypeError(refusal("scan", must, "complex tensors", "Use torch.view_as_real"))


def _number_of_steps(layout_of_xs: Layout) -> int:
    """Raises unless each tensor has the same number of steps, at least one."""
    _, layouts = layout_of_xs
    lengths = {shape[:1] for shape, _ in layouts}
    if len(lengths) == 1 and lengths.isdisjoint([(), (0,)]):
        ((length,),) = lengths
        return int(length)
    must = "xs must hold tensors with the steps as their first dimension, at least one"
    raise ValueError(refusal("scan", must, layouts))


def _first_slice(value: Any) -> Any:
    """The first slice. A TensorDict without batch dimensions stays as it is."""
    if isinstance(value, tuple):
        return tuple([_first_slice(part) for part in value])
    if isinstance(value, dict):
        return {key: _first_slice(part) for key, part in value.items()}
    if isinstance(value, TensorDictBase) and not value.batch_dims:
        return value
    return value[0]


def _stacked(values: list[Any]) -> Any:
    """Values of one structure, stacked in a new first dimension."""
    first = values[0]
    if isinstance(first, (Tensor, TensorDictBase)):
        return torch.stack(values)
    if isinstance(first, tuple):
        return tuple([_stacked(list(parts)) for parts in zip(*values, strict=True)])
    return {key: _stacked([value[key] for value in values]) for key in first}


# The operator takes no TensorDict. Python values cannot be returned from it, so a TensorDict and a
# dict become a dict whose only key encodes the type: the number of batch dimensions, or -1.


def _encoded(value: Any) -> Any:
    """Copies, because what the operator returns must not share memory."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple([_encoded(part) for part in value])
    entries = {key: _encoded(part) for key, part in value.items()}
    return {value.batch_dims if isinstance(value, TensorDictBase) else -1: entries}


def _decoded(value: Any, num_new_dims: int = 1) -> Any:
    """The inverse. The operator has stacked tensors in a new first dimension."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple):
        return tuple([_decoded(part, num_new_dims) for part in value])
    ((batch_dims, encoded),) = value.items()
    entries = {key: _decoded(part, num_new_dims) for key, part in encoded.items()}
    if batch_dims < 0:
        return entries
    first, *_ = rows.leaves(entries)
    return TensorDict(entries, first.shape[: num_new_dims + batch_dims])


def _copies(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous, because strides belong to the layout of the operator's carry."""
    return [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]


def scanned(
    step: PureFunction, num_buffers: int, num_steps: int
) -> tuple[GraphModule, list[Tensor]]:
    """A graph of the scan over a step from a carry to an output and the next carry.

    The graph takes buffers, a carry and constants, as the step does, and writes to the buffers. It
    returns the stacked outputs and the last carry.

    Returns:
        The graph, and the constants.
    """
    fakes = fake_inputs(step.graph)
    end = len(fakes) - len(step.constants)
    num_written = len(step.written)
    num_leaves = end - num_buffers
    # The written buffers change from step to step, too.
    carried = [*step.written, *range(num_buffers, end)]
    num_carried = len(carried)
    others = [index for index in range(len(fakes)) if index not in carried]

    def body(*given: Tensor) -> list[Tensor]:
        unchanged = given[num_carried + 1 :]  # after the slice of `steps`
        arguments = dict(zip(carried, given, strict=False))
        arguments.update(zip(others, unchanged, strict=True))
        results = step.graph(*[arguments[index] for index in sorted(arguments)])
        copies = _copies(results)  # what the operator returns must not share memory
        outputs = copies[num_written:-num_leaves]
        return [*copies[:num_written], *copies[-num_leaves:], *outputs]

    def run(*tensors: Tensor) -> list[Tensor]:
        first = _copies([tensors[index] for index in carried])
        unchanged = [tensors[index] for index in others]
        results = flat_scan_operator(body, first, [torch.zeros(num_steps, 1)], unchanged)
        for index, value in zip(step.written, results, strict=False):
            tensors[index].copy_(value)
        return [*results[num_carried:], *results[num_written:num_carried]]

    return make_fx(run, tracing_mode="fake")(*fakes), step.constants
