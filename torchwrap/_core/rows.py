"""Rows of a batch: nested values with one row per env, and which of the rows to write to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

Rows = TypeVar("Rows", Tensor, TensorDict)
Nested: TypeAlias = Tensor | TensorDictBase | Mapping[Any, "Nested"] | tuple["Nested", ...]
Structure: TypeAlias = tuple[object, ...]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

# The constructor's checks take most of its time, and a step makes three TensorDicts.
_unchecked = getattr(TensorDict, "_new_unsafe", TensorDict)


def tensordict(values: dict[str, Tensor | TensorDict], *batch_size: int) -> TensorDict:
    """A TensorDict of values that are known to have this batch size."""
    return _unchecked(values, batch_size=torch.Size(batch_size))  # type: ignore[arg-type,no-any-return]


def apply(
    function: Callable[[tuple[str, ...], Tensor], Tensor], value: Rows, path: tuple[str, ...] = ()
) -> Rows:
    """Returns a value with each tensor replaced by `function(path, tensor)`."""
    if isinstance(value, Tensor):
        return function(path, value)  # type: ignore[return-value]
    values = {key: apply(function, value[key], (*path, key)) for key in value.keys()}  # type: ignore[arg-type]
    return TensorDict(values, batch_size=value.batch_size)  # type: ignore[arg-type]


def _keys(value: Any) -> list[Any]:
    return list(range(len(value))) if isinstance(value, tuple) else sorted(value.keys(), key=str)


def flatten(value: Nested, found: list[Tensor]) -> Structure:
    """Appends the tensors in the order of their keys. Returns the keys at every level, hashable, alike for equal kinds."""
    if isinstance(value, Tensor):
        found.append(value)
        return ()
    structure: list[object] = []
    for key in _keys(value):
        structure += key, flatten(value[key], found)  # type: ignore[index]
    return tuple(structure)


def leaves(value: Nested) -> list[Tensor]:
    """The tensors, in the order of their keys."""
    found: list[Tensor] = []
    flatten(value, found)
    return found


def builder(value: Nested) -> Callable[[Iterator[Tensor]], Nested]:
    """Returns a function that builds a value like this one from tensors in the order of `leaves`."""
    if isinstance(value, Tensor):
        return next
    parts = {key: builder(value[key]) for key in _keys(value)}  # type: ignore[index]
    if isinstance(value, tuple):
        return lambda tensors: tuple([part(tensors) for part in parts.values()])
    if isinstance(value, TensorDict):
        size = tuple(value.batch_size)
        return lambda tensors: tensordict(
            {str(key): part(tensors) for key, part in parts.items()}, *size
        )  # type: ignore[misc]
    return lambda tensors: {key: part(tensors) for key, part in parts.items()}  # type: ignore[return-value,misc]


def is_traced(tensor: Tensor) -> bool:
    """True if a compiler traces this tensor, which then has no values: it says that it compiles, or it made a subclass."""
    return torch.compiler.is_compiling() or type(tensor) not in _PLAIN


def is_host_readable(tensor: Tensor) -> bool:
    """True if the host can read this tensor without a device sync: it is on the CPU, and not traced."""
    return not torch.compiler.is_compiling() and tensor.is_cpu and type(tensor) in _PLAIN


def no_zero(tensor: Tensor) -> bool:
    """True if the host knows, without a device sync, that no element is 0."""
    return is_host_readable(tensor) and bool(tensor.all())


def materialize(tensor: Tensor) -> Tensor:
    """Stores an intermediate result of a compiled graph, such as statistics that all rows share, or the next state.

    Inductor would compute a division or a root again in each result and each row. It stores the input of a view by strides.
    """
    return tensor if is_host_readable(tensor) else tensor.as_strided(tensor.shape, tensor.stride())


class RowMask:
    """A set of rows of a batch, such as the envs whose episode ended.

    If the host can read the mask, it finds the rows once and then touches only those. Otherwise (in a compiled graph, or on
    another device) each method selects with `torch.where` over the full batch. Both give the same values, so authors of envs
    and transforms write one path. `value` is a Tensor or a TensorDict whose first dimension is the batch.

    Args:
        tensor: bool, `(num_envs,)` or `(num_envs, 1)`. It must not change afterwards.
        synchronize: let `any` read the mask even if the host has to wait for the device: a simulator on the host needs it.

    >>> mask = RowMask(torch.tensor([False, True, True]))
    >>> elapsed = torch.tensor([[4], [5], [6]])
    >>> mask.fill_(elapsed, 0)
    >>> elapsed.flatten(), mask.indices
    (tensor([4, 0, 0]), tensor([1, 2]))
    """

    __slots__ = ("_is_empty", "_on_host", "column", "indices", "num_rows", "tensor")

    tensor: Tensor
    """The mask: bool, `(num_envs,)`."""
    column: Tensor
    """The mask: bool, `(num_envs, 1)`."""
    indices: Tensor | None
    """Indices of the rows, int64; None if the host cannot read the mask without a device sync."""

    def __init__(self, tensor: Tensor, *, synchronize: bool = False) -> None:
        is_column = tensor.dim() == 2
        self.tensor = tensor.squeeze(-1) if is_column else tensor
        self.column = tensor if is_column else tensor.unsqueeze(-1)
        self.num_rows = tensor.shape[
            0
        ]  # `len` would make a constant of the size in an exported graph
        self.indices = self.tensor.nonzero().squeeze(-1) if is_host_readable(tensor) else None
        self._on_host = self.tensor.cpu() if synchronize else self.tensor
        self._is_empty = (
            self.indices.numel() == 0
            if self.indices is not None
            else synchronize and not self._on_host.any()
        )

    @classmethod
    def full(cls, num_rows: int, device: torch.device | str = "cpu") -> RowMask:
        """A mask of every row."""
        return cls(torch.ones(num_rows, dtype=torch.bool, device=device))

    def any(self) -> bool:
        """Whether a row is set. True as well if the host cannot know without a device sync, so that nothing is skipped."""
        return not self._is_empty

    def numpy(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """The mask as a NumPy array `(num_envs,)`, for a simulator on the host. Waits for the device."""
        return self._on_host.cpu().numpy()

    def like(self, value: Tensor) -> Tensor:
        """The mask with as many dimensions as the value: bool, `(num_envs, 1, ...)`."""
        return self.column if value.dim() == 2 else self.tensor.view(-1, *(1,) * (value.dim() - 1))

    def where(self, first: Rows, second: Rows | float) -> Rows:
        """Rows of `first` if set, else of `second`, as a new value."""
        if isinstance(first, Tensor):
            return torch.where(self.like(first), first, second)  # type: ignore[arg-type,return-value]
        return tensordict(
            {key: self.where(first[key], second[key]) for key in first.keys()}, self.num_rows
        )  # type: ignore[index,misc]

    def gather(self, value: Rows) -> Rows:
        """The rows that are set, one for each of `indices`; all rows if the host cannot tell."""
        if self.indices is None:
            return value
        if isinstance(value, Tensor):
            return value.index_select(0, self.indices)
        parts = {key: self.gather(value[key]) for key in value.keys()}  # type: ignore[index,misc]
        return tensordict(parts, len(self.indices))  # type: ignore[arg-type]

    @property
    def gathered(self) -> Tensor | None:
        """The mask of the rows that `gather` returns: bool, `(num_envs,)`; None if every one of them is set."""
        return self.tensor if self.indices is None else None

    def spread(self, rows: Rows) -> Rows:
        """Rows such as `gather` returns, as a value for all envs. The other rows are 0 or unspecified."""
        if self.indices is None:
            return rows
        if not isinstance(rows, Tensor):
            return tensordict({key: self.spread(rows[key]) for key in rows.keys()}, self.num_rows)  # type: ignore[index,misc]
        spread = torch.zeros(self.num_rows, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        return spread.index_copy_(0, self.indices, rows)  # type: ignore[return-value]

    def scatter_(self, buffer: Tensor, rows: Tensor) -> None:
        """Writes rows such as `gather` returns into the buffer, in place."""
        if self.indices is None:
            buffer.copy_(torch.where(self.like(buffer), rows, buffer))
        else:
            buffer.index_copy_(0, self.indices, rows)

    def assign_(self, buffer: Rows, value: Rows) -> None:
        """Writes the set rows of `value` into the buffer, in place."""
        if isinstance(buffer, Tensor):
            self.scatter_(buffer, self.gather(value))
        else:
            for key in buffer.keys():
                self.assign_(buffer[key], value[key])

    def fill_(self, buffer: Tensor, value: float | bool) -> None:
        """Sets the rows of the buffer to one value, in place."""
        if self.indices is None:
            buffer.masked_fill_(self.like(buffer), value)
        else:
            buffer.index_fill_(0, self.indices, value)

    def apply(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """`function` of the rows that are set, each computed by itself. What the other rows hold is unspecified."""
        return self.spread(function(self.gather(value)))
