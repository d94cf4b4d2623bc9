"""The modules of a policy, which is a module, or a function over modules."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
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
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif id(value) not in seen:
            seen.add(id(value))
            for part in _parts(value, package):
                visit(part)

    package = _package(policy)
    if policy is not None:
        visit(policy)
        for part in () if isinstance(policy, nn.Module) else _attributes(policy):
            visit(part)
    return list(found.values())


def _parts(value: Any, package: str) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield value.__self__
        yield from () if isinstance(value.__self__, nn.Module) else _attributes(value.__self__)
    elif isinstance(value, types.FunctionType) and _package(value) == package:
        variables = inspect.getclosurevars(value)
        yield from (*variables.nonlocals.values(), *variables.globals.values())


def _attributes(value: Any) -> list[Any]:
    is_function = isinstance(value, types.FunctionType | types.MethodType | functools.partial)
    return [] if is_function else [part for part in getattr(value, "__dict__", {}).values() if isinstance(part, nn.Module)]


def _package(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None)).partition(".")[0]
