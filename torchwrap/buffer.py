"""Buffer: how a module of ours declares a buffer that it reads at every step."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Buffer:
    """Reads the module's buffer of this name; `register_buffer` still makes it.

    `nn.Module` looks a buffer up only after an ordinary look-up has failed, which costs as much as half a small operator. A
    class attribute is found first. It reads the same `_buffers`, so nothing else changes.

    >>> from torch import nn, zeros
    >>> class Counter(nn.Module):
    ...     count = Buffer()
    >>> module = Counter()
    >>> module.register_buffer("count", zeros(1))
    >>> module.count is module.get_buffer("count")
    True
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Tensor:
        try:
            return module._buffers[self.name]
        except (AttributeError, KeyError):
            raise AttributeError(f"{owner} needs register_buffer({self.name!r}) first, but got none.") from None
