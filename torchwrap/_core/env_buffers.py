"""Declarations of a module's buffers, and the module whose buffers have one row per env."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Attribute:
    store: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self.store][self.name]
        except KeyError:
            raise AttributeError(f"{type(module).__name__} has no {self.name!r} before it is registered.") from None


class BufferAttribute(_Attribute):
    """Reads the module's buffer of this name, which is registered with `register_buffer`.

    `nn.Module` finds a buffer only after the ordinary attribute lookup has failed, which costs half as much as a small
    operator. A class attribute is found first. It reads the same `_buffers`, so nothing else changes.

    >>> class Counter(nn.Module):
    ...     count = BufferAttribute()
    >>> module = Counter()
    >>> module.register_buffer("count", torch.zeros(1))
    >>> module.count is module.get_buffer("count")
    True
    """

    store = "_buffers"


class ConstantBuffer(BufferAttribute):
    """A `BufferAttribute` for configuration, such as bounds: `.to` moves it, but it is not state, so no snapshot holds it."""


class SubmoduleAttribute(_Attribute):
    """Reads the module's submodule of this name, which is assigned as usual; see `BufferAttribute`.

    >>> class Pair(nn.Module):
    ...     first = SubmoduleAttribute()
    >>> module = Pair()
    >>> module.first = nn.Identity()
    >>> module.first is module.get_submodule("first")
    True
    """

    store = "_modules"


class EnvBuffer(BufferAttribute):
    """Declares a buffer with one row per env, which belongs to running episodes.

    The declaration is the initial value of one row. `BatchedModule.allocate` makes the buffer from it, attribute access reads
    it, `.to` moves it, `Env.snapshot` saves it, a partial reset restricts it to the finished rows, and `state_dict` leaves it
    out.

    Args:
        shape: of one row.
        dtype: of the buffer.
        fill: the initial value of each element.
        row: instead of the three above: gives the initial row as a tensor, from the module. Needed where shape or dtype
            depend on a space.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        fill: float = 0,
        *,
        row: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.shape, self.dtype, self.fill, self.row = shape, dtype, fill, row

    def allocate(self, module: Any, num_envs: int, device: torch.device | str) -> Tensor:
        """The initial rows of all envs, in new memory."""
        if self.row is None:
            return torch.full((num_envs, *self.shape), self.fill, dtype=self.dtype, device=device)
        row = self.row(module).to(device)
        return row.expand(num_envs, *row.shape).clone()


class BatchedModule(nn.Module):
    """An `nn.Module` that knows which of its buffers have one row per env.

    >>> class Clock(BatchedModule):
    ...     elapsed = EnvBuffer((1,), torch.int64)
    >>> clock = Clock()
    >>> clock.allocate(num_envs=3)
    >>> clock.elapsed.shape, clock.state_dict()
    (torch.Size([3, 1]), OrderedDict())
    """

    _env_buffer_names: tuple[str, ...] = ()

    def allocate(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        """Registers every `EnvBuffer` that the class declares, with its initial value."""
        for kind in reversed(type(self).__mro__):
            for name, declaration in vars(kind).items():
                if isinstance(declaration, EnvBuffer):
                    self.register_env_buffer(name, declaration.allocate(self, num_envs, device))

    def register_env_buffer(self, name: str, tensor: Tensor) -> None:
        """Registers a buffer `(num_envs, ...)` whose name is known only at run time, such as one per leaf of a space."""
        self.register_buffer(name, tensor, persistent=False)
        self._env_buffer_names = (*dict.fromkeys((*self._env_buffer_names, name)),)
