"""Inputs: the buffers and parameters that graphs read and write, and what else they depend on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchwrap._compile.internals import is_lazy, layout, layout_guard
from torchwrap._core.errors import refusal
from torchwrap._core.rows import Nested

Function: TypeAlias = Callable[..., Nested]
Key: TypeAlias = tuple[object, ...]
Graphs: TypeAlias = dict[object, Any]
"""Compiled graphs, by their function and arguments."""
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


_MAX_KEYS = 8  # as torch.compile's limit


class Inputs:
    """The implicit inputs of graphs: the buffers and parameters of modules.

    Graphs stay valid when tensors are written, moved or replaced by others of the same layout.

    Args:
        find_roots: returns modules, and functions that call them; at each call, because a policy
            can be replaced.
    """

    def __init__(self, find_roots: Callable[[], Sequence[object]]) -> None:
        self.find_roots = find_roots
        self.modules: list[nn.Module] = []
        self._known: dict[Key, tuple[list[object], Graphs]] = {}
        self._scan()

    def current(self) -> tuple[Graphs, list[Tensor]]:
        """The graphs that fit what the modules are now, and the tensors to run them on."""
        is_known = _same(self._observe(), self._observed)
        if not is_known or not self._guard(*self.tensors):
            self._scan()
        return self.graphs, self.tensors

    def call(
        self, function: Function, tensors: Sequence[Tensor], *values: Nested
    ) -> tuple[Nested, list[str]]:
        """Calls a function that computes with these tensors instead of the modules' own.

        Returns its result, and the names of the tensors that it replaced instead of writing to.
        """
        places = list(self.places.values())
        given = [tensors[index] for index in self.indices]
        own = swap(places, given)
        try:
            result = function(*values)
        finally:
            found = swap(places, own)
        paths = zip(self.places, given, found, strict=True)
        return result, [_name(path) for path, before, after in paths if after is not before]

    def _scan(self) -> None:
        """Finds the modules and tensors again."""
        roots = self.find_roots()
        container = nn.ModuleList([root for root in roots if isinstance(root, nn.Module)])
        named = dict(container.named_modules())
        modules = list(named.values())[1:]
        if not _same(modules, self.modules):  # the old ones never come back
            self._known.clear()
        self.modules = modules
        self.places = places_of(container)
        held = [store[name] for store, name in self.places.values()]
        for path, tensor in zip(self.places, held, strict=True):
            if is_lazy(tensor):
                must = f"{_name(path)} must hold its values in memory"
                remedy = "Replace it by its `clone()`"
                raise ValueError(refusal("compile", must, "a lazy tensor", remedy))
        distinct: dict[int, Tensor] = {id(tensor): tensor for tensor in held}
        self.tensors = list(distinct.values())
        ids = list(distinct)
        self.indices = [ids.index(id(tensor)) for tensor in held]
        self._watch()
        functions = list(chain.from_iterable(map(_parts, roots)))
        for hooks in self._hooks:
            functions += chain.from_iterable(map(_parts, hooks.values()))
        key = (
            *(tuple(named), tuple(self.places), tuple(self.indices)),
            *map(id, functions),
            tuple(map(len, self._hooks)),
            tuple([module.training for module in modules]),
            tuple(map(layout, self.tensors)),
            *_autocast(),
        )
        # As long as the functions are held, no others have their ids.
        self._known[key] = self._known.pop(key, (functions, {}))
        for oldest in list(self._known)[:-_MAX_KEYS]:
            del self._known[oldest]
        self.graphs = self._known[key][1]

    def _watch(self) -> None:
        """Notes what `current` compares."""
        watched = list(self.places.values())
        self._hooks: list[dict[int, Any]] = []
        children: list[dict[str, Any]] = []
        for module in self.modules:
            watched += [(module._modules, name) for name in module._modules]  # type: ignore[misc]
            watched.append((vars(module), "training"))
            children.append(module._modules)
            self._hooks += [module._forward_pre_hooks, module._forward_hooks]
        self._stores = [store for store, _ in watched]
        self._names = [name for _, name in watched]
        self._keyed: list[dict[Any, Any]] = [*children, *self._hooks]
        self._observed = self._observe()
        self._guard = layout_guard(self.tensors)

    def _observe(self) -> list[object]:
        """The roots, tensors, modules, modes, and the keys of children and hooks."""
        found = [*self.find_roots(), *_autocast()]
        found += chain.from_iterable(filter(None, self._keyed))
        found += map(dict.get, self._stores, self._names)
        return found


def repeated(leaves: Sequence[Tensor]) -> list[int]:
    """The indices of leaves in the memory of an earlier one."""
    repeated = []
    known = set()
    for index, leaf in enumerate(leaves):
        address = leaf.untyped_storage().data_ptr()
        if leaf.numel() and address in known:
            repeated.append(index)
        known.add(address)
    return repeated


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _name(path: str) -> str:
    """The name of a tensor in its root, whose index comes first in the path."""
    return path.partition(".")[2]


def _autocast() -> list[object]:
    return [
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    ]


def _parts(function: object) -> list[object]:
    """The objects that identify a function. Python makes a bound method anew at each access."""
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    return [function]
