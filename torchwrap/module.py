"""Module: the nn.Module under envs, transforms, statistics and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Module(nn.Module):
    """An `nn.Module` whose buffers and submodules are plain attributes as well.

    `nn.Module` finds them only after a look-up has failed, which costs half as much as a small operator, some thirty times a
    step. They stay where they are for everybody else: `state_dict`, `to`, `deepcopy` and the like see no difference.

    >>> module = Module()
    >>> module.register_buffer("count", nn.Parameter().data)
    >>> module.__dict__["count"] is module.get_buffer("count")
    True
    """

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        super().register_buffer(name, tensor, persistent)
        self.__dict__[name] = tensor

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_buffers", ()) or name in self.__dict__.get("_modules", ()):
            self.__dict__[name] = value

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Module:
        super()._apply(fn, recurse)
        self.__dict__.update(self._buffers)
        return self
