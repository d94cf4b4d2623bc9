"""The modules of a policy, which is a module, or a function over modules."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def modules_of(policy: Callable[..., Any] | None) -> list[nn.Module]:
    """The modules that a policy computes with: itself, or those that it names or closes over.

    A function's variables are followed into functions of the same package, a method and an object with `__call__` into the
    attributes of the object. Modules that are hidden deeper, such as in a list, are not found.

    >>> network = nn.Linear(2, 2)
    >>> modules_of(lambda td: network(td["observation"]).argmax(-1))
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    found: dict[int, nn.Module] = {}
    seen: dict[int, Any] = {}
    waiting: list[Any] = [policy, *_attributes(policy)]
    package = _package(policy)
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, functools.partial):
                waiting += [value.func, *value.args, *value.keywords.values()]
            elif isinstance(value, types.MethodType):
                waiting += [value.__func__, value.__self__, *_attributes(value.__self__)]
            elif isinstance(value, types.FunctionType) and _package(value) == package:
                variables = inspect.getclosurevars(value)
                waiting += [*variables.nonlocals.values(), *variables.globals.values()]
    return list(found.values())


def _attributes(value: Any) -> list[nn.Module]:
    if isinstance(value, nn.Module | types.FunctionType | types.MethodType | functools.partial):
        return []
    return [part for part in getattr(value, "__dict__", {}).values() if isinstance(part, nn.Module)]


def _package(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None)).partition(".")[0]
