"""A policy that is a copy of another one, and what it must not do."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchwrap._core.reachable import Reachable
from torchwrap._deploy.copies import deep_copy
from torchwrap.env import Env

NEEDED = (
    "an nn.Module that is called with a TensorDict, one of its methods, or a function of modules in its closure, such as "
    '`lambda td: network(td["observation"]).argmax(-1)`'
)


def copied(policy: Any) -> Any:
    """A copy of the policy, whose modules are copies too.

    Raises:
        TypeError: for a policy that contains an env, or something else that cannot be copied.
    """
    if isinstance(policy, types.FunctionType):
        policy = _opened(policy)
    found = Reachable([({"policy": policy}, "policy")]).modules
    if env := next((module for module in found if isinstance(module, Env)), None):
        raise TypeError(f"deploy needs a policy without an env, but got {policy!r}, which refers to {env!r}: use {NEEDED}.")
    try:
        return deep_copy(policy)
    except Exception as error:
        got = f"{policy!r}, which cannot be copied ({type(error).__name__}: {error})"
        raise TypeError(f"deploy needs a policy as {NEEDED}, but got {got}.") from error


def _opened(function: types.FunctionType) -> types.FunctionType:
    # Reachable does not look into the functions of an installed library, which a policy may be one of.
    parts = (function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made = types.FunctionType(*parts)
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, ""
    made.__dict__.update(vars(function))
    return made


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those modules that no other one contains."""
    found = list(modules)
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


class Watch(TorchDispatchMode):
    """Raises at an operator that draws random numbers, and at one that computes with a parameter of somebody else.

    Args:
        parameters: ids of those that are allowed; None allows all.
    """

    def __init__(self, parameters: set[int] | None = None) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomnessError(str(func))
        known = self._parameters
        for value in tree_leaves((args, kwargs)) if known is not None else ():
            if isinstance(value, nn.Parameter) and id(value) not in known:  # type: ignore[operator]
                raise ForeignParameterError(f"one of shape {tuple(value.shape)} in {func}")
        return func(*args, **(kwargs or {}))


class RandomnessError(Exception):
    """An operator that draws random numbers, by its name."""


class ForeignParameterError(Exception):
    """A parameter that an operator has computed with."""
