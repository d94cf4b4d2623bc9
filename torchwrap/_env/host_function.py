"""HostFunction: a function of small tensors, traced once and then run in NumPy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from torchwrap._env.translation import Array, translate

Function: TypeAlias = Callable[..., tuple[list[Tensor], list[Any]]]


class HostFunction:
    """A function of small tensors on the CPU, as NumPy operators, each of which takes a quarter of the time of PyTorch's.

    Results agree with PyTorch's up to rounding. A copy of this object traces its functions again.

    >>> import numpy as np
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
            self._version, self._run = version, translate(function, example)
        return self._run

    def __reduce__(self) -> tuple[Any, ...]:
        return HostFunction, ()


class Views:
    """NumPy arrays in the memory of tensors. They are kept, because each takes a microsecond to make.

    >>> import torch
    >>> views, count = Views(), torch.zeros(2)
    >>> views([count])[0] is views([count])[0]
    True
    """

    def __init__(self) -> None:
        self._pointers, self._arrays = list[int](), list[Array]()

    def __call__(self, tensors: list[Tensor]) -> list[Array]:
        # Tensors can be replaced, and their memory can move. No other tensor gets the memory of an array that is kept.
        pointers = list(map(Tensor.data_ptr, tensors))
        if pointers != self._pointers:
            self._pointers, self._arrays = pointers, [tensor.numpy() for tensor in tensors]
        return self._arrays

    def __reduce__(self) -> tuple[Any, ...]:
        return Views, ()


class Attributes:
    """Notices that an attribute of an object has been replaced.

    >>> import torch
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
