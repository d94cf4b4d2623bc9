"""Inputs: the buffers and parameters that a graph reads and writes, and the modes of their modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchwrap._core.buffers import BatchedModule
from torchwrap._core.rows import Nested

Function: TypeAlias = Callable[..., Nested]
Layout: TypeAlias = tuple[object, ...]
Place: TypeAlias = tuple[dict[str, Any], str]
"""A dict of a module, and a key in it."""


class Inputs:
    """The implicit inputs of a graph: all buffers and parameters of the modules that `find_modules` returns at each call.

    So they can be written, moved and replaced, and a module of a policy can be replaced by another. `current` tells when a
    graph that was made before does not fit any more. `find_functions` returns functions whose variables no graph can change.
    """

    def __init__(
        self,
        find_modules: Callable[[], Sequence[nn.Module]],
        find_functions: Callable[[], Sequence[object]] = lambda: (),
    ) -> None:
        self.find_modules, self.find_functions = find_modules, find_functions
        self._all: list[nn.Module] = []
        self.version = 0
        """Another number whenever the modules are others."""
        self._states: dict[Layout, int] = {}
        self._look()

    def _look(self) -> None:
        self.roots = list(self.find_modules())
        self.modules = nn.ModuleList(self.roots)
        modules = list(self.modules.modules())[1:]
        if not _same(modules, self._all):
            self._all, self.version = modules, self.version + 1
        self.names: dict[str, int] = {}
        """Positions of tensors by name. Tied tensors have the same position."""
        tensors, others = list[Place](), list[Place]()
        known: dict[int, int] = {}
        self._foreign: list[int] = []  # positions of tensors whose owners are not torchwrap's
        for prefix, module in self.modules.named_modules():
            if module is self.modules:
                continue
            stores: tuple[dict[str, Tensor | None], ...] = (module._parameters, module._buffers)
            for store, name, tensor in [(each, *item) for each in stores for item in each.items()]:
                if tensor is None:
                    continue
                position = known.setdefault(id(tensor), len(tensors))
                is_new = position == len(tensors)
                (tensors if is_new else others).append((store, name))
                if is_new and _is_foreign(module):
                    self._foreign.append(position)
                self.names[f"{prefix}.{name}"] = position
            others += [(module._modules, name) for name in module._modules]
            others.append((vars(module), "training"))
        self._hooks: list[dict[int, Any]] = []
        for module in filter(_is_foreign, modules):
            self._hooks += [module._forward_pre_hooks, module._forward_hooks]
        self.num_tensors = len(tensors)
        self._stores, self._keys = zip(*tensors, *others, strict=True)
        self._seen = self._read()
        layouts = tuple(map(_layout, self._seen[: len(tensors)]))
        modes = tuple([module.training for module in modules])
        state = self.version, tuple(self.names.values()), layouts, modes
        self._state = self._states.setdefault(state, len(self._states))

    def _read(self) -> list[Any]:
        return list(map(dict.get, self._stores, self._keys))

    def current(self) -> tuple[Layout, list[Tensor]]:
        """The state that a graph depends on, apart from the values of tensors, and the tensors."""
        if not (_same(self._read(), self._seen) and _same(self.find_modules(), self.roots)):
            self._look()
        tensors: list[Tensor] = self._seen[: self.num_tensors]
        # A parameter keeps its identity when `module.half()` gives it other data.
        foreign = tuple(map(_layout, map(tensors.__getitem__, self._foreign)))
        hooks = tuple(map(tuple, self._hooks))
        autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        return (self._state, foreign, hooks, *autocast), tensors

    def call(
        self, function: Function, tensors: Sequence[Tensor], *values: Nested
    ) -> tuple[Nested, list[str]]:
        """The result of a function while these tensors take the place of the modules' own.

        Also returns the names of tensors that the function has replaced instead of writing to them.
        """
        state = {f"roots.{name}": tensors[position] for name, position in self.names.items()}
        result = functional_call(
            Root({"roots": self.modules}), state, (function, *values), tie_weights=False
        )
        # `functional_call` writes what the modules hold in the end to the dict.
        replaced = [
            name
            for name, position in self.names.items()
            if state[f"roots.{name}"] is not tensors[position]
        ]
        return result, replaced


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _is_foreign(module: nn.Module) -> bool:
    """Whether this is a module of a policy, which can be called, and converted in place."""
    is_own = type(module).__module__.partition(".")[0] == __package__.partition(".")[0]
    return not (is_own or isinstance(module, BatchedModule | nn.ModuleList))


def _layout(tensor: Tensor) -> Layout:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


class Root(nn.ModuleDict):
    """The module to which `functional_call` gives other tensors while a function runs."""

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)
