"""Specs: how an env was made, as Gymnasium's `EnvSpec`. `torchwrap.make` makes another from it."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, WrapperSpec

from torchwrap._core.buffers import BatchedModule
from torchwrap._core.errors import refusal

_MOVED = {  # since 0.2.0
    "torchwrap.transforms.action:StickyAction": "torchwrap.transforms.history:StickyAction",
    "torchwrap.transforms.policy_state:PolicyState": "torchwrap.policy:PolicyState",
}


def replace(spec: EnvSpec, **changes: Any) -> EnvSpec:
    """A copy of a spec with some fields changed."""
    fields = inspect.signature(EnvSpec).parameters
    kept = {name: copy.copy(getattr(spec, name)) for name in fields}
    return EnvSpec(**{**kept, **changes})


def limited(spec: EnvSpec, limit: int | None) -> EnvSpec:
    """A copy with the step limit of a whole stack. Its kwargs keep the limit of the env itself."""
    inner = -1 if spec.max_episode_steps is None else spec.max_episode_steps
    kwargs = {"max_episode_steps": inner, **spec.kwargs}
    return replace(spec, max_episode_steps=limit, kwargs=kwargs)


def record(part: Any) -> WrapperSpec:
    """The spec of a wrapper or transform: its class and its arguments.

    Arguments are read from the attributes of their names.
    """
    kind = type(part)
    parameters = dict(inspect.signature(kind).parameters)
    parameters.pop("env", None)
    missing = [name for name in parameters if not hasattr(part, name)]
    if missing:
        raise ValueError(
            refusal(
                kind.__name__,
                f"arguments {missing} must be kept as attributes of these names, for the spec",
            )
        )
    arguments = {}
    for name, parameter in parameters.items():
        value = getattr(part, name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            # A named Compose, or one inside another, would be lost if it was unpacked.
            is_named = getattr(value, "is_named", False)
            is_nested = len(value) == 1 and type(next(iter(value))) is type(value)
            value = [value] if is_named or is_nested else list(value)
        arguments[name] = map_parts(_recorded, value)
    return WrapperSpec(kind.__name__, f"{kind.__module__}:{kind.__qualname__}", arguments)


def _recorded(value: Any) -> Any:
    if isinstance(value, BatchedModule):
        return record(value)
    if isinstance(value, torch.dtype):  # by its name, for JSON
        return str(value).removeprefix("torch.")
    return value


def map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the parts of lists and dicts, however deep. A spec is one part."""
    if isinstance(value, list):
        return [map_parts(function, part) for part in value]
    if isinstance(value, dict) and not _is_spec(value):
        return {name: map_parts(function, part) for name, part in value.items()}
    return function(value)


def copied(value: Any) -> Any:
    """A copy of lists, dicts, arrays and tensors, however deep. Other objects stay."""
    return map_parts(_copied_leaf, value)


def _copied_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_spec(value: Any) -> bool:
    fields = {"name", "entry_point", "kwargs"}
    is_from_json = isinstance(value, Mapping) and set(value) == fields
    return is_from_json or isinstance(value, WrapperSpec)


def rebuild(spec: Any, kinds: tuple[type, ...]) -> Callable[..., Any]:
    """A function that makes a wrapper (of an env) or a transform from its spec.

    The class has to be one of `kinds`. The spec may come from a file: nothing is imported, and
    nothing but constructors of such classes is called.
    """
    if isinstance(spec, Mapping):  # read from JSON
        spec = WrapperSpec(**spec)
    entry_point = str(spec.entry_point)
    module, _, path = _MOVED.get(entry_point, entry_point).partition(":")
    kind: Any = sys.modules.get(module)
    for name in path.split("."):
        kind = inspect.getattr_static(kind, name, None)  # runs no code of modules or classes
    if not isinstance(kind, type) or not issubclass(kind, kinds):
        raise ValueError(
            refusal(
                "make",
                "spec must be of torchwrap Wrappers and Transforms that can be imported",
                spec.entry_point,
                "" if module in sys.modules else f"`import {module}` first, if you trust it",
            )
        )

    def rebuilt(value: Any) -> Any:
        if _is_spec(value):
            return rebuild(value, kinds)()
        return value

    arguments = map_parts(rebuilt, dict(spec.kwargs or {}))
    parameters = inspect.signature(kind).parameters
    for name in arguments.keys() - parameters.keys():
        if not arguments[name]:
            del arguments[name]  # an unused argument of an earlier version
    parts: list[Any] = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts += arguments.pop(name, ())
    return lambda *env: kind(*env, *parts, **arguments)
