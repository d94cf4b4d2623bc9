"""Python values that code can change and a graph would not: they are found, and put back."""

from __future__ import annotations

import collections
import contextlib
import inspect
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from torchwrap._compile.inputs import Inputs

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, collections.deque, np.ndarray)
_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "Python's random": (random.getstate, random.setstate),
    "numpy.random": (np.random.get_state, np.random.set_state),
}


class Refusal(Exception):
    """Code that a graph cannot follow."""


class Place(NamedTuple):
    """Where a value is kept."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


@contextlib.contextmanager
def unchanged(places: list[Place]) -> Iterator[None]:
    """Puts all values back at the end of the block, and raises if one was another.

    Raises:
        Refusal: with the name of the first value that has changed, unless the block raises by itself.
    """
    before = [(place, place.get(), _copy(place.get())) for place in places]
    states = {name: get() for name, (get, _) in _GENERATORS.items()}
    changed = []
    try:
        yield
    finally:
        for place, value, copied in before:
            now = place.get()
            if now is not value or not _equal(value, copied):
                changed.append(f"changes {place.name}: register a buffer and write it in place")
                _refill(value, copied)
                place.set(value)
        for name, (get, set_state) in _GENERATORS.items():
            if not _equal(get(), states[name]):
                changed.append(f"draws from {name}: draw with torchwrap.random, from a stream or the key of the function")
                set_state(states[name])
    if changed:
        raise Refusal(changed[0])


def places(inputs: Inputs) -> list[Place]:
    """Attributes of modules and of the objects that they hold, and the variables of functions that the modules belong to."""
    found = []
    for module in inputs.modules.modules():
        if module is not inputs.modules:
            found += _attributes(module)
            for part in vars(module).values():
                found += _attributes(part) if _is_open(part) else []
    for function in inputs.find_functions():
        if isinstance(function, types.MethodType):
            found += _attributes(function.__self__)
            function = function.__func__
        if isinstance(function, types.FunctionType):
            found += [
                Place(f"the global {name}", *_item(function.__globals__, name))
                for name in inspect.getclosurevars(function).globals
            ]
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            found += [Place(f"{name} of {function.__qualname__}", *_cell(cell)) for name, cell in cells]
    return [place for place in found if isinstance(place.get(), (*_SCALARS, *_CONTAINERS, Tensor))]


def _attributes(owner: object) -> list[Place]:
    values = getattr(owner, "__dict__", {})
    names = [name for name in values if name not in ("_parameters", "_buffers", "_modules")]
    return [Place(f"{type(owner).__name__}.{name}", *_item(values, name)) for name in names]


def _is_open(value: object) -> bool:
    """Whether a module keeps this object as part of its state, such as the functions of an env."""
    return hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | Tensor) and not inspect.isroutine(value)


def _item(values: dict[str, Any], name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: values.get(name), lambda value: values.__setitem__(name, value)


def _cell(cell: types.CellType) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: cell.cell_contents, lambda value: setattr(cell, "cell_contents", value)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, _CONTAINERS) else value


def _refill(value: Any, contents: Any) -> None:
    if isinstance(value, list):
        value[:] = contents
    elif isinstance(value, np.ndarray):
        value[...] = contents
    elif isinstance(value, dict | set | collections.deque):
        value.clear()
        (value.extend if isinstance(value, collections.deque) else value.update)(contents)


def _equal(first: Any, second: Any) -> bool:
    if first is second or type(first) is not type(second):
        return first is second
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, list | tuple | collections.deque):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(value, second[key]) for key, value in first.items())
    return isinstance(first, (*_SCALARS, set)) and bool(first == second)
