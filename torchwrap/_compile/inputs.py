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


_AUTOCAST = ("cpu", "cuda")
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
        self._find()

    def current(self) -> tuple[Graphs, list[Tensor]]:
        """Graphs for the current modules and layouts, and the tensors to run them on."""
        observed = self._observe()
        is_known = len(observed) == len(self._observed)
        is_known = is_known and all(map(operator.is_, observed, self._observed))
        if not is_known or not self._guard(*self.tensors):
            self._find()
        return self.graphs, self.tensors

    def call(
        self, function: Function, tensors: Sequence[Tensor], *values: Nested
    ) -> tuple[Nested, list[str]]:
        """Calls a function that computes with these tensors instead of the modules' own.

        Returns its result, and the names of the tensors that it replaced instead of writing to.
        """
        given = [tensors[index] for index in self.indices]
        own = swap(self.places, given)
        try:
            result = function(*values)
        finally:
            left = swap(self.places, own)
        held = zip(self.names, given, left, strict=True)
        return result, [name for name, before, after in held if after is not before]

    def _find(self) -> None:
        """Finds the modules and tensors again."""
        roots = self.find_roots()
        container = nn.ModuleList([root for root in roots if isinstance(root, nn.Module)])
        named = dict(container.named_modules())
        modules = list(named.values())[1:]
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                must = "modules must be those from which TorchScript was made"
                raise ValueError(refusal("compile", must, type(module).__name__))
        if list(map(id, modules)) != list(map(id, self.modules)):
            self._known.clear()  # drops the graphs of replaced modules
        self.modules = modules
        place_of = places_of(container)
        self.places = list(place_of.values())
        # A path begins with the index of its root.
        self.names = [path.partition(".")[2] for path in place_of]
        held = [store[name] for store, name in self.places]
        for name, tensor in zip(self.names, held, strict=True):
            if is_lazy(tensor):
                must = f"{name} must hold its values in memory"
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
            *(tuple(named), tuple(place_of), tuple(self.indices)),
            *map(id, functions),
            tuple(map(len, self._hooks)),
            tuple([module.training for module in modules]),
            tuple(map(layout, self.tensors)),
            *self._observed[-2 * len(_AUTOCAST) :],
        )
        # The functions are held with the graphs, so that no others get their ids.
        self._known[key] = self._known.pop(key, (functions, {}))
        _, self.graphs = self._known[key]
        for oldest in list(self._known)[:-_MAX_KEYS]:
            del self._known[oldest]

    def _watch(self) -> None:
        """Notes what `current` compares."""
        watched = list(self.places)
        self._hooks: list[dict[int, Any]] = []
        for module in self.modules:
            watched += [(module._modules, name) for name in module._modules]  # type: ignore[misc]
            watched.append((vars(module), "training"))
            self._hooks += [module._forward_pre_hooks, module._forward_hooks]
        self._watched = tuple(zip(*watched, strict=True))  # dicts, and a key in each
        children: Any = [module._modules for module in self.modules]
        self._keyed: list[dict[Any, Any]] = [*children, *self._hooks]  # dicts with all their keys
        self._observed = self._observe()
        self._guard = layout_guard(self.tensors)

    def _observe(self) -> list[object]:
        """The roots, tensors, modules, modes, and the keys of children and hooks."""
        found = list(self.find_roots())
        found += chain.from_iterable(filter(None, self._keyed))
        found += map(dict.get, *self._watched)
        found += map(torch.is_autocast_enabled, _AUTOCAST)
        found += map(torch.get_autocast_dtype, _AUTOCAST)
        return found


def aliased_indices(leaves: Sequence[Tensor]) -> list[int]:
    """The indices of leaves in the memory of an earlier one."""
    aliased = []
    known = set()
    for index, leaf in enumerate(leaves):
        address = leaf.untyped_storage().data_ptr()
        if leaf.numel() and address in known:
            aliased.append(index)
        known.add(address)
    return aliased


def _parts(function: object) -> list[object]:
    """The objects that identify a function. Python makes a bound method anew at each access."""
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    return [function]
