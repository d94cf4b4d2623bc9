"""Rows of a batch: nested values with one row per env, and masks of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

Rows = TypeVar("Rows", Tensor, TensorDict)
Nested: TypeAlias = Tensor | TensorDictBase | Mapping[Any, "Nested"] | tuple["Nested", ...]
Structure: TypeAlias = tuple[object, ...]
Path: TypeAlias = tuple[str, ...]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

# The constructor's checks take most of its time, and a step makes three TensorDicts.
_unchecked: Any = getattr(TensorDict, "_new_unsafe", TensorDict)


def tensordict(values: Mapping[str, Any], *batch_size: int) -> TensorDict:
    """A TensorDict of values that are known to have this batch size."""
    return _unchecked(values, batch_size=torch.Size(batch_size))


def apply(
    function: Callable[[Path, Tensor], Tensor],
    value: Rows,
    path: Path = (),
) -> Rows:
    """Returns a value with each tensor replaced by `function(path, tensor)`."""
    if isinstance(value, Tensor):
        return function(path, value)  # type: ignore[return-value]
    values: dict[Any, Any] = {}
    for key, part in value.items():
        values[key] = apply(function, part, (*path, key))  # type: ignore[type-var]
    return tensordict(values, *value.batch_size)  # type: ignore[return-value]


def _keys(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return list(range(len(value)))
    return sorted(value.keys(), key=str)


def flatten(value: Nested, found: list[Tensor]) -> Structure:
    """Appends the tensors in the order of their keys. Returns the keys at every level, hashable."""
    if isinstance(value, Tensor):
        found.append(value)
        return ()
    structure: list[object] = []
    # One lookup in a TensorDict takes longer than all its items.
    parts: Any = value if isinstance(value, tuple) else dict(value.items())
    for key in _keys(parts):
        structure += key, flatten(parts[key], found)
    return tuple(structure)


def leaves(value: Nested) -> list[Tensor]:
    """The tensors, in the order of their keys."""
    found: list[Tensor] = []
    flatten(value, found)
    return found


def equal(first: Nested, second: Nested, tolerance: float = 0.0) -> bool:
    """Whether nested values of one layout have equal tensors. NaN equals NaN."""
    close = functools.partial(torch.allclose, rtol=tolerance, atol=tolerance, equal_nan=True)
    return all(map(close, leaves(first), leaves(second)))


def layout(value: Any) -> Any:
    """Shapes, dtypes and layouts of a nested value, to compare with those of another."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.layout
    if not isinstance(value, TensorDictBase):
        return type(value)
    return {key: layout(part) for key, part in value.items()}


def builder(value: Any) -> Callable[[Iterator[Tensor]], Any]:
    """Returns a function that builds a value with the keys of this one from its leaves."""
    if isinstance(value, Tensor):
        return next
    parts = [(key, builder(value[key])) for key in _keys(value)]
    is_tuple = isinstance(value, tuple)
    keys = range(len(value)) if is_tuple else [key for key, _ in value.items()]
    size = tuple(value.batch_size) if isinstance(value, TensorDict) else None

    def build(tensors: Iterator[Tensor]) -> Any:
        values: dict[Any, Any] = dict.fromkeys(keys)
        for key, part in parts:
            values[key] = part(tensors)
        if is_tuple:
            return tuple(values.values())
        return values if size is None else tensordict(values, *size)

    return build


def is_traced(tensor: Tensor) -> bool:
    """True if a compiler traces this tensor, which then has no values."""
    return torch.compiler.is_compiling() or type(tensor) not in _PLAIN


def is_host_readable(tensor: Tensor) -> bool:
    """True if the host can read this tensor without a device sync: on the CPU, and not traced."""
    return tensor.is_cpu and not is_traced(tensor)


def materialize(tensor: Tensor) -> Tensor:
    """Stores an intermediate result of a compiled graph, such as statistics that all rows share.

    Inductor would otherwise compute a division or a root again in each result and each row. A view
    made with `as_strided` forces it to store the value. What is a view already stays as it is,
    because Inductor may give its base other strides than it has here.
    """
    if is_traced(tensor) and tensor.untyped_storage().size() == tensor.nbytes:
        return tensor.as_strided(tensor.shape, tensor.stride())
    return tensor


class RowMask:
    """A set of rows of a batch, such as the envs whose episode ended.

    If the host can read the mask, it finds the rows once and then touches only those. Otherwise (in
    a compiled graph, or on another device) each method selects with `torch.where` over the full
    batch. Both give the same values, so authors of envs and transforms write one path. `value` is a
    Tensor or a TensorDict whose first dimension is the batch.

    Args:
        tensor: bool, `(num_envs,)` or `(num_envs, 1)`. It must not change afterwards.
        synchronize: let `any` read the mask even if the host has to wait for the device, as a
            simulator on the host needs it.

    >>> mask = RowMask(torch.tensor([False, True, True]))
    >>> elapsed = torch.tensor([[4], [5], [6]])
    >>> mask.fill_(elapsed, 0)
    >>> elapsed.flatten(), mask.indices
    (tensor([4, 0, 0]), tensor([1, 2]))
    """

    __slots__ = ("_is_empty", "_on_host", "_tensor", "column", "indices", "is_full", "num_rows")

    column: Tensor
    """The mask: bool, `(num_envs, 1)`."""
    indices: Tensor | None
    """Indices of the rows, int64; None if the host cannot read the mask without a sync."""
    is_full: bool
    """True for a full reset. Atari then starts a game, and not the next life."""

    def __init__(self, tensor: Tensor, *, synchronize: bool = False) -> None:
        # A step without an end needs the column alone.
        is_column = tensor.dim() == 2
        self._tensor = None if is_column else tensor
        self.column = tensor if is_column else tensor.unsqueeze(-1)
        self.is_full = False
        self.num_rows = tensor.shape[0]  # `len` would be a constant in an exported graph
        self.indices = None
        self._on_host = self.column
        self._is_empty = False
        if is_host_readable(tensor):
            self.indices = self.column.nonzero().select(1, 0)
            self._is_empty = self.indices.numel() == 0
        elif synchronize:
            self._on_host = self.column.cpu()
            self._is_empty = not self._on_host.any()

    @property
    def tensor(self) -> Tensor:
        """The mask: bool, `(num_envs,)`."""
        if self._tensor is None:
            self._tensor = self.column.squeeze(-1)
        return self._tensor

    @classmethod
    def full(cls, num_rows: int, device: torch.device | str = "cpu") -> RowMask:
        """A mask of every row, of a reset without a mask."""
        mask = cls(torch.ones(num_rows, dtype=torch.bool, device=device))
        mask.is_full = True
        return mask

    def any(self) -> bool:
        """False only if the host knows, without a device sync, that no row is set."""
        return not self._is_empty

    def numpy(self) -> NDArray[np.bool_]:
        """The mask as a NumPy array `(num_envs,)`, for a simulator on the host."""
        return self._on_host.cpu().numpy().ravel()

    def like(self, value: Tensor) -> Tensor:
        """The mask with as many dimensions as the value: bool, `(num_envs, 1, ...)`."""
        if value.dim() == 2:
            return self.column
        ones = (1,) * (value.dim() - 1)
        return self.tensor.view(-1, *ones)

    def where(self, first: Rows, second: Rows | float) -> Rows:
        """Rows of `first` if set, else of `second`, as a new value."""
        others: Any = second
        if isinstance(first, Tensor):
            return torch.where(self.like(first), first, others)  # type: ignore[return-value]
        values: dict[Any, Any] = {}
        for key, part in first.items():
            other = others if isinstance(others, int | float) else others[key]
            values[key] = self.where(part, other)
        return tensordict(values, self.num_rows)  # type: ignore[return-value]

    def gather(self, value: Rows) -> Rows:
        """The rows that are set, one for each of `indices`; all rows if the host cannot tell."""
        if self.indices is None:
            return value
        if isinstance(value, Tensor):
            return value.index_select(0, self.indices)
        values: dict[Any, Any] = {}
        for key, part in value.items():
            values[key] = self.gather(part)  # type: ignore[type-var]
        return tensordict(values, len(self.indices))  # type: ignore[return-value]

    @property
    def mask_of_gathered(self) -> Tensor | None:
        """True for the rows of `gather` that are set: bool, `(num_envs,)`. None if all are."""
        return self.tensor if self.indices is None else None

    def spread(self, rows: Rows) -> Rows:
        """The rows of `gather` as a value for all envs. The others are like one of them."""
        if self.indices is None:
            return rows
        if not isinstance(rows, Tensor):
            parts: dict[str, Any] = {}
            for key, part in rows.items():
                parts[key] = self.spread(part)  # type: ignore[type-var]
            return tensordict(parts, self.num_rows)  # type: ignore[return-value]
        values: Tensor = rows
        # 0 may be outside of a space, which the functions of users rely on.
        shape = values.shape[1:]
        first = values[:1] if len(values) else values.new_zeros(1, *shape)
        spread = first.expand(self.num_rows, *shape)
        return spread.index_copy(0, self.indices, values)  # type: ignore[return-value]

    def scatter_(self, buffer: Tensor, rows: Tensor) -> None:
        """Writes the rows of `gather` into the buffer, in place."""
        if self.indices is None:
            buffer.copy_(torch.where(self.like(buffer), rows, buffer))
        else:
            buffer.index_copy_(0, self.indices, rows)

    def assign_(self, buffer: Rows, value: Rows) -> None:
        """Writes the set rows of `value` into the buffer, in place."""
        if isinstance(buffer, Tensor):
            self.scatter_(buffer, self.gather(value))
        else:
            for key, part in buffer.items():
                self.assign_(part, value[key])

    def fill_(self, buffer: Rows, value: Tensor | float) -> None:
        """Sets the rows of the buffer to one value, a number or a tensor `()`, in place."""
        if not isinstance(buffer, Tensor):
            for part in buffer.values():
                self.fill_(part, value)  # type: ignore[type-var]
        elif self.indices is None:
            buffer.masked_fill_(self.like(buffer), value)  # type: ignore[arg-type]
        else:
            buffer.index_fill_(0, self.indices, value)

    def apply(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """`function` of the set rows, each by itself. The other rows are unspecified."""
        return self.spread(function(self.gather(value)))
