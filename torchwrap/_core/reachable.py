"""Reachable: what a function can reach from its owners. Modules, tensors, and the Python state that a graph would not keep."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDict
from torch import Tensor, nn

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_GLOBAL_GENERATORS = {"Python's random": random._inst, "numpy.random": np.random.mtrand._rand}  # type: ignore[attr-defined]
_MAX_OBJECTS, _MAX_ARRAY_BYTES = 50_000, 2**24


class Edge(NamedTuple):
    """Where a value was found: `container[key]`, or in a variable of a closure."""

    container: Any
    key: Any
    value: Any

    def holds(self) -> bool:
        """Whether the value is still there."""
        try:
            found = self.container.cell_contents if self.key is None else self.container[self.key]
        except (LookupError, ValueError):
            return False
        return found is self.value


class Reachable:
    """What can be reached from some values, and what it contains now.

    It looks into modules, containers, functions (closures, and the globals that they name), classes, and objects, unless they
    are part of an installed library: what a library keeps to itself is its own affair.

    Args:
        roots: `(container, key)` of each value to start from.
    """

    def __init__(self, roots: list[tuple[Any, Any]]) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: dict[int, tuple[Tensor, Edge | None]] = {}
        """Tensors by id, with where they were found, unless that cannot be looked up again."""
        self.functions: list[types.FunctionType] = []
        """Those of the user, without the methods of classes."""
        self._objects: list[tuple[Any, str, dict[Any, Any]]] = []  # with name and contents
        self._found: dict[int, tuple[Edge | None, int]] = {}  # by id: where, and the id of what it was found in
        self._classes: set[int] = set()
        self._queue: collections.deque[tuple[Any, str]] = collections.deque()
        for container, key in roots:
            self._reach(container[key], str(key), Edge(container, key, container[key]), 0)
        for name, generator in _GLOBAL_GENERATORS.items():
            self._reach(generator, name, None, 0)
        while self._queue and len(self._objects) < _MAX_OBJECTS:
            self._look_into(*self._queue.popleft())

    def _reach(self, value: Any, name: str, edge: Edge | None, parent: int) -> None:
        if isinstance(value, Tensor):
            found, place = self.tensors.get(id(value), (value, None))
            self.tensors[id(value)] = found, place or (edge if edge is not None and edge.key is not None else None)
        elif id(value) not in self._found and not isinstance(value, (*_SCALARS, types.ModuleType)):
            self._found[id(value)] = edge, parent
            self._queue.append((value, name))

    def _look_into(self, value: Any, name: str) -> None:
        if isinstance(value, nn.Module):
            self.modules.append(value)
        if isinstance(value, type):
            self._classes.add(id(value))
        is_method = self._found[id(value)][1] in self._classes
        if isinstance(value, types.FunctionType) and not (is_method or _is_library(value.__module__)):
            self.functions.append(value)
        contents = _contents(value)
        self._objects.append((value, name, contents))
        for key, part in () if isinstance(value, (np.ndarray, *_GENERATORS)) else contents.items():
            self._reach(part, _label(value, name, key), _edge(value, key, part), id(value))
        for part in _fixed_parts(value):
            self._reach(part, name, None, id(value))

    def edges_to(self, value: Any) -> Iterator[Edge]:
        """What must hold for the value to be found in the same way again."""
        at = id(value)
        while at in self._found:
            edge, at = self._found[at]
            if edge is not None:
                yield edge

    def changes(self) -> list[tuple[str, Any]]:
        """What is not as it was: names, and values now."""
        return [
            (_label(value, name, key), now.get(key))
            for value, name, before in self._objects
            for now in [_contents(value)]
            for key in dict.fromkeys((*before, *now))
            if key not in before or key not in now or not _same(before[key], now[key])
        ]

    def restore(self) -> None:
        """Puts everything back."""
        for value, _, before in self._objects:
            now = _contents(value)
            if before.keys() != now.keys() or not all(_same(before[key], now[key]) for key in before):
                _put_back(value, before)


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, np.ndarray):
        return bool(np.array_equal(before, now, equal_nan=before.dtype.kind in "fc"))
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, dict):  # the state of a random generator
        return before.keys() == now.keys() and all(_same(before[key], now[key]) for key in before)
    return isinstance(before, _SCALARS) and bool(before == now)


def _contents(value: Any) -> dict[Any, Any]:
    """What can be replaced in a value, by key."""
    if isinstance(value, TensorDict):
        value = value._tensordict
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | collections.deque):
        return dict(enumerate(value))
    if isinstance(value, set):
        return {id(part): part for part in value}
    if isinstance(value, np.ndarray):
        return {0: value.copy()} if value.nbytes <= _MAX_ARRAY_BYTES and value.dtype != object else {}
    if isinstance(value, _GENERATORS):
        return {0: _state(value)}
    if isinstance(value, types.FunctionType):
        if _is_library(value.__module__):
            return {}
        found: dict[Any, Any] = {
            name: value.__globals__[name] for name in global_names(value.__code__) if name in value.__globals__
        }
        for index, cell in enumerate(value.__closure__ or ()):  # an index stands for a variable of the closure
            with contextlib.suppress(ValueError):  # it has no value yet
                found[index] = cell.cell_contents
        return found
    if isinstance(value, type):
        return {
            name: part
            for name, part in vars(value).items()
            if not (_is_library(value.__module__) or name.startswith("__") or callable(part) or hasattr(type(part), "__get__"))
        }
    if not hasattr(value, "__dict__") or isinstance(value, functools.partial):
        return {}
    is_open = _is_open(value)
    return {name: part for name, part in vars(value).items() if is_open or isinstance(part, nn.Module | Tensor)}


def _fixed_parts(value: Any) -> tuple[Any, ...]:
    """What a value refers to for good."""
    if isinstance(value, tuple | frozenset):
        return tuple(value)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, types.FunctionType):
        return (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if isinstance(value, type):
        if _is_library(value.__module__):
            return ()
        functions = [getattr(part, "__func__", getattr(part, "fget", part)) for part in vars(value).values()]
        return (*value.__bases__, *[function for function in functions if isinstance(function, types.FunctionType)])
    return (type(value),) if hasattr(value, "__dict__") and _is_open(value) else ()


def _edge(value: Any, key: Any, part: Any) -> Edge | None:
    if isinstance(value, types.FunctionType):
        return Edge(value.__globals__, key, part) if isinstance(key, str) else Edge(_cell(value, key), None, part)
    if isinstance(value, TensorDict):
        return Edge(value._tensordict, key, part)
    if isinstance(value, dict | list):
        return Edge(value, key, part)
    return Edge(vars(value), key, part) if hasattr(value, "__dict__") and not isinstance(value, type) else None


def _put_back(value: Any, contents: dict[Any, Any]) -> None:
    if isinstance(value, TensorDict):
        value = value._tensordict
    if isinstance(value, list | collections.deque):
        value.clear()
        value.extend(contents.values())
    elif isinstance(value, np.ndarray):
        value[...] = contents[0]
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = contents[0]
    elif isinstance(value, random.Random):
        value.setstate(contents[0])
    elif isinstance(value, np.random.RandomState):
        value.set_state(contents[0])
    elif isinstance(value, set):
        value.clear()
        value.update(contents.values())
    elif isinstance(value, type):
        for name in _contents(value).keys() - contents.keys():
            delattr(value, name)
        for name, part in contents.items():
            setattr(value, name, part)
    else:
        variables = {
            key: part for key, part in contents.items() if isinstance(value, types.FunctionType) and isinstance(key, int)
        }
        for index, part in variables.items():
            _cell(value, index).cell_contents = part
        scope = value if isinstance(value, dict) else getattr(value, "__globals__", None) or vars(value)
        for key in _contents(value).keys() - contents.keys():
            del scope[key]
        scope.update({key: part for key, part in contents.items() if key not in variables})


def _label(value: Any, name: str, key: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"the global {key}" if isinstance(key, str) else f"{value.__code__.co_freevars[key]} of {value.__qualname__}"
    if isinstance(value, type):
        return f"{value.__name__}.{key}"
    owner, _, last = name.rpartition(".")
    if last in ("_buffers", "_parameters", "_modules"):
        return f"{owner}.{key}"
    if isinstance(value, dict | list | collections.deque | TensorDict):
        return f"{name}[{key!r}]"
    if isinstance(value, (set, np.ndarray, *_GENERATORS)):
        return name if not isinstance(value, _GENERATORS) else f"the state of {name}"
    return f"{type(value).__name__}.{key}"


def _cell(function: types.FunctionType, index: int) -> types.CellType:
    return function.__closure__[index]  # type: ignore[index]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def global_names(code: types.CodeType) -> set[str]:
    """Names of global variables, and of attributes, in a function and in those inside of it."""
    return set(code.co_names).union(*[global_names(part) for part in code.co_consts if isinstance(part, types.CodeType)])


def _is_open(value: Any) -> bool:
    """Whether to look at the attributes of an object."""
    module = type(value).__module__
    is_ours = module.startswith("torchwrap.") and not module.startswith("torchwrap._compile")
    return isinstance(value, nn.Module) or is_ours or not _is_library(module)


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module is installed, and not written by the user."""
    top = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    installed = top in ("torchwrap", *sys.stdlib_module_names) or "site-packages" in file or "dist-packages" in file
    return installed and top != "__main__"
