"""A policy that is a copy of another one, and the modules that it consists of."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchwrap._core.reachable import Reachable
from torchwrap.env import Env

NEEDED = (
    "an nn.Module that is called with a TensorDict, one of its methods, or a function of modules in its closure, such as "
    '`lambda td: network(td["observation"]).argmax(-1)`'
)


def copied(policy: Any) -> Any:
    """A copy of the policy, whose modules are copies too.

    Raises:
        TypeError: for what cannot be copied.
    """
    try:
        return _copied(policy, {})
    except Exception as error:
        got = f"{policy!r}, which cannot be copied ({type(error).__name__}: {error})"
        raise TypeError(f"deploy needs a policy as {NEEDED}, but got {got}.") from error


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    # A deep copy, which goes into functions as well: `copy.deepcopy` returns them as they are.
    if not isinstance(value, types.FunctionType):
        return copy.deepcopy(value, memo)
    if id(value) in memo:
        return memo[id(value)]
    names = {name for name in value.__code__.co_names if _holds_modules(value.__globals__.get(name))}
    cells = tuple(types.CellType() for _ in value.__closure__ or ())
    variables = {**value.__globals__} if names else value.__globals__
    made = memo[id(value)] = types.FunctionType(value.__code__, variables, value.__name__, value.__defaults__, cells or None)
    made.__kwdefaults__ = value.__kwdefaults__
    for name in names:
        variables[name] = _copied(value.__globals__[name], memo)
    for cell, source in zip(cells, value.__closure__ or (), strict=True):
        cell.cell_contents = _copied(source.cell_contents, memo)
    made.__defaults__ = tuple(_copied(part, memo) for part in value.__defaults__ or ()) or None
    return made


def _holds_modules(value: Any) -> bool:
    # Whether a global variable is to be copied: classes and functions of libraries are not.
    if isinstance(value, type | types.ModuleType) or value is None:
        return False
    found = Reachable([({"value": value}, "value")])
    return bool(found.modules) or isinstance(value, Tensor)


def modules_of(policy: Any) -> list[nn.Module]:
    """The modules that a policy which is no module consists of, without those that another one contains.

    Raises:
        TypeError: if one of them is an env.
    """
    found = Reachable([({"policy": policy}, "policy")]).modules
    if env := next((module for module in found if isinstance(module, Env)), None):
        raise TypeError(f"deploy needs a policy without an env, but got {policy!r}, which refers to {env!r}: use {NEEDED}.")
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]


def action_of(given: Any, keys: set[str] | None) -> tuple[Any, TensorDictBase | None]:
    """The action in what a policy has returned, and the TensorDict with everything else, if it has returned one.

    Args:
        keys: of an action that is a TensorDict itself.
    """
    if isinstance(given, TensorDictBase) and (keys is None or set(given.keys()) != keys):
        return given["action"], given
    if not isinstance(given, Tensor | TensorDictBase):
        raise TypeError(f"deploy needs a policy that returns tensors, but got {type(given).__name__}: use {NEEDED}.")
    return given, None


class NoRandomness(TorchDispatchMode):
    """Raises at an operator that draws random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomnessError(str(func))
        return func(*args, **(kwargs or {}))


class RandomnessError(Exception):
    """An operator that draws random numbers, by its name."""
