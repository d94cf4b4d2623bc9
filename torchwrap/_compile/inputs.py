"""Inputs: the buffers and parameters that a graph reads and writes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchwrap._core.buffers import BatchedModule
from torchwrap._core.rows import Nested

Function: TypeAlias = Callable[..., Nested]
Key: TypeAlias = tuple[object, ...]
Place: TypeAlias = tuple[dict[str, Any], str]
"""A dict of a module, and a name in it."""


def places_of(module: nn.Module) -> dict[str, Place]:
    """Where each buffer and parameter is held, by name. Tied tensors are held in several places."""
    places: dict[str, Place] = {}
    for prefix, part in module.named_modules():
        stores: list[dict[str, Any]] = [part._parameters, part._buffers]
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None:
                    path = f"{prefix}.{name}".removeprefix(".")
                    places[path] = (store, name)
    return places


def swap(places: Sequence[Place], tensors: Sequence[Tensor]) -> list[Any]:
    """Puts tensors into places, and returns those that were there.

    Modules then compute with these tensors. A second swap puts their own back, and returns the
    tensors of the first, except where a module has assigned another one.
    """
    before = [store.get(name) for store, name in places]
    for (store, name), tensor in zip(places, tensors, strict=True):
        store[name] = tensor
    return before


class Inputs:
    """The implicit inputs of a graph: the buffers and parameters of modules.

    A graph stays valid when tensors are written, moved or replaced. `current` returns a key that
    changes when the graph does not fit any more.

    Args:
        find_modules: returns the modules; at each call, because a policy can be replaced.
    """

    def __init__(self, find_modules: Callable[[], Sequence[nn.Module]]) -> None:
        self.find_modules = find_modules
        self.modules: list[nn.Module] = []
        self.version = 0
        """Incremented when the set of modules changes."""
        self._known: dict[Key, int] = {}
        self._scan()

    def current(self) -> tuple[Key, list[Tensor]]:
        """The key of graphs that fit, and the tensors to run them on."""
        found: list[Any] = list(self.find_modules())
        found += map(dict.get, self._stores, self._names)
        if not _same(found, self._seen):
            self._scan()
        # `module.half()` gives a parameter other data, and the parameter stays the same object.
        layouts = tuple(map(_layout, self._foreign))
        hooks = tuple(map(tuple, self._hooks))
        autocast = (
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        )
        return (self._state, layouts, hooks, autocast), self.tensors

    def call(
        self, function: Function, tensors: Sequence[Tensor], *values: Nested
    ) -> tuple[Nested, list[str]]:
        """Calls a function that computes with these tensors instead of the modules' own.

        Returns its result, and the names of the tensors that it replaced instead of writing to.
        """
        places = list(self.places.values())
        given = [tensors[index] for index in self._indices]
        own = swap(places, given)
        try:
            result = function(*values)
        finally:
            left = swap(places, own)
        names = zip(self.places, given, left, strict=True)
        return result, [name for name, before, after in names if after is not before]

    def _scan(self) -> None:
        """Finds the modules and tensors again."""
        roots = list(self.find_modules())
        container = nn.ModuleList(roots)
        modules = list(container.modules())[1:]
        if not _same(modules, self.modules):
            self.version += 1
        self.modules = modules
        self.places = places_of(container)
        held = [store[name] for store, name in self.places.values()]
        distinct: dict[int, Tensor] = {id(tensor): tensor for tensor in held}
        self.tensors = list(distinct.values())
        ids = list(distinct)
        self._indices = [ids.index(id(tensor)) for tensor in held]
        self._watch(roots)
        modes = tuple([module.training for module in modules])
        layouts = tuple(map(_layout, self.tensors))
        state = (self.version, *self._indices, layouts, modes)
        self._state = self._known.setdefault(state, len(self._known))

    def _watch(self, roots: list[nn.Module]) -> None:
        """Notes everything that `current` compares."""
        watched = list(self.places.values())
        self._foreign: list[Tensor] = []
        self._hooks: list[dict[int, Any]] = []
        for module in self.modules:
            watched += [(module._modules, name) for name in module._modules]  # type: ignore[misc]
            watched.append((vars(module), "training"))
            if _is_foreign(module):
                self._foreign += [*module.parameters(False), *module.buffers(False)]
                self._hooks += [module._forward_pre_hooks, module._forward_hooks]
        self._stores = [store for store, _ in watched]
        self._names = [name for _, name in watched]
        self._seen: list[Any] = list(roots)
        self._seen += map(dict.get, self._stores, self._names)


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _is_foreign(module: nn.Module) -> bool:
    """True for a policy's modules, which have hooks and can be converted in place."""
    package = type(module).__module__.partition(".")[0]
    is_own = package == __package__.partition(".")[0]
    return not (is_own or isinstance(module, BatchedModule | nn.ModuleList))


def _layout(tensor: Tensor) -> Key:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device
