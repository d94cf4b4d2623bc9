"""What modules that belong to envs hold: buffers with a row for each env, and reading buffers and submodules at every step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class _Registered:
    place: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        try:
            return module.__dict__[self.place][self.name]
        except (AttributeError, KeyError):
            raise AttributeError(f"{owner} needs {self.name!r} in {self.place} first, but got none.") from None


class Buffer(_Registered):
    """Reads the module's buffer of this name; `register_buffer` still makes it.

    `nn.Module` looks a buffer up only after an ordinary look-up has failed, which costs as much as half a small operator. A
    class attribute is found first. It reads the same `_buffers`, so nothing else changes.

    >>> import torch
    >>> class Counter(nn.Module):
    ...     count = Buffer()
    >>> module = Counter()
    >>> module.register_buffer("count", torch.zeros(1))
    >>> module.count is module.get_buffer("count")
    True
    """

    place = "_buffers"


class Submodule(_Registered):
    """Reads the module's submodule of this name, which is assigned as ever; see `Buffer`.

    >>> class Pair(nn.Module):
    ...     first = Submodule()
    >>> module = Pair()
    >>> module.first = nn.Identity()
    >>> module.first is module.get_submodule("first")
    True
    """

    place = "_modules"


class Module(nn.Module):
    """An `nn.Module` that knows which of its buffers have a row for each env."""

    _names_of_rows: tuple[str, ...] = ()

    def register_rows(self, name: str, tensor: Tensor) -> None:
        """Registers what belongs to running episodes, `(num_envs, ...)`: a buffer that is not in the `state_dict`.

        A graph that begins few episodes anew reads and writes those rows alone.

        >>> import torch
        >>> module = Module()
        >>> module.register_rows("elapsed", torch.zeros(3, 1))
        >>> module.elapsed.shape, module.state_dict()
        (torch.Size([3, 1]), OrderedDict())
        """
        self.register_buffer(name, tensor, persistent=False)
        self._names_of_rows = (*dict.fromkeys((*self._names_of_rows, name)),)
