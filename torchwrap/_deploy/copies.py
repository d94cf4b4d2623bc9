"""Deep copies that go into functions: `copy.deepcopy` returns functions as they are, with the modules that they use."""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import Tensor

from torchwrap._core.reachable import Reachable, global_names


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy, also of the user's functions in it: of their variables, their defaults and the global modules they use."""
    memo = {} if memo is None else memo
    made = []
    for function in Reachable([({"value": value}, "value")]).functions:
        scope = function.__globals__
        names = [name for name in global_names(function.__code__) if _holds_modules(scope.get(name))]
        cells = tuple(types.CellType() for _ in function.__closure__ or ()) or None
        twin = types.FunctionType(function.__code__, {**scope} if names else scope, function.__name__, None, cells)
        memo[id(function)] = twin
        made.append((function, twin, names))
    for function, twin, names in made:  # when all have a twin, because they may use each other
        for name in names:
            twin.__globals__[name] = _copied(function.__globals__[name], memo)
        for cell, source in zip(twin.__closure__ or (), function.__closure__ or (), strict=True):
            cell.cell_contents = _copied(source.cell_contents, memo)
        twin.__defaults__ = tuple(_copied(part, memo) for part in function.__defaults__ or ()) or None
        twin.__kwdefaults__ = {name: _copied(part, memo) for name, part in (function.__kwdefaults__ or {}).items()}
        twin.__dict__.update({name: _copied(part, memo) for name, part in vars(function).items()})
        twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
    return _copied(value, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, types.ModuleType):
        return value
    return memo[id(value)] if id(value) in memo else copy.deepcopy(value, memo)


def _holds_modules(value: Any) -> bool:
    # Whether a global variable is to be copied: classes and functions of libraries are not.
    if isinstance(value, type | types.ModuleType) or value is None:
        return False
    found = Reachable([({"value": value}, "value")])
    return bool(found.modules) or isinstance(value, Tensor)
