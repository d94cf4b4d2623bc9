"""Specs: how an env was made, as Gymnasium's `EnvSpec`, from which `torchwrap.make` makes another."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec, WrapperSpec

from torchwrap._core.buffers import BatchedModule


def replace(spec: EnvSpec, **changes: Any) -> EnvSpec:
    """A copy of a spec with some fields changed."""
    fields = {
        name: copy.copy(getattr(spec, name)) for name in inspect.signature(EnvSpec).parameters
    }
    return EnvSpec(**{**fields, **changes})


def limited(spec: EnvSpec, limit: int | None) -> EnvSpec:
    """A copy with the step limit of a whole stack. Its arguments keep the one with which `make` makes the env itself."""
    own = -1 if spec.max_episode_steps is None else spec.max_episode_steps
    return replace(spec, max_episode_steps=limit, kwargs={"max_episode_steps": own, **spec.kwargs})


def record(part: Any) -> WrapperSpec:
    """The spec of a wrapper or transform: its class, and its arguments, read from the attributes of their names."""
    kind = type(part)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(kind).parameters.items()
        if name != "env"
    }
    if missing := [name for name in parameters if not hasattr(part, name)]:
        raise ValueError(
            f"{kind.__name__} has no spec: keep its arguments {missing} as attributes of these names."
        )
    arguments = {}
    for name, parameter in parameters.items():
        value = getattr(part, name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            # A single Compose would be taken for the whole, and a list has no names.
            is_whole = getattr(value, "is_named", False) or (
                len(value) == 1 and type(next(iter(value))) is type(value)
            )
            value = [value] if is_whole else list(value)
        arguments[name] = map_parts(
            lambda leaf: record(leaf) if isinstance(leaf, BatchedModule) else leaf, value
        )
    return WrapperSpec(kind.__name__, f"{kind.__module__}:{kind.__qualname__}", arguments)


def map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the parts of lists and dicts, however deep. A spec is one part."""
    if isinstance(value, list):
        return [map_parts(function, part) for part in value]
    if isinstance(value, dict) and not _is_spec(value):
        return {name: map_parts(function, part) for name, part in value.items()}
    return function(value)


def _is_spec(value: Any) -> bool:
    return isinstance(value, WrapperSpec) or (
        isinstance(value, Mapping) and set(value) == {"name", "entry_point", "kwargs"}
    )


def rebuild(spec: Any, kinds: tuple[type, ...]) -> Callable[..., Any]:
    """A function that makes a wrapper (of an env) or a transform from its spec, whose class has to be one of `kinds`.

    The spec may come from a file: nothing is imported, and nothing but constructors of such classes is called.
    """
    if isinstance(spec, Mapping):  # a WrapperSpec that was read from JSON
        spec = WrapperSpec(**spec)
    module, _, path = str(spec.entry_point).partition(":")
    kind: Any = sys.modules.get(module)
    for name in path.split("."):
        kind = inspect.getattr_static(kind, name, None)  # which runs no code of modules or classes
    if not isinstance(kind, type) or not issubclass(kind, kinds):
        needed = "make needs a spec of torchwrap Wrappers and Transforms that can be imported"
        remedy = "" if module in sys.modules else f": `import {module}` first, if you trust it"
        raise ValueError(f"{needed}, but got {spec.entry_point}{remedy}.")
    arguments = map_parts(
        lambda leaf: rebuild(leaf, kinds)() if _is_spec(leaf) else leaf, dict(spec.kwargs or {})
    )
    variable = [
        each.name
        for each in inspect.signature(kind).parameters.values()
        if each.kind is each.VAR_POSITIONAL
    ]
    parts = [part for name in variable for part in arguments.pop(name, ())]
    return lambda *env: kind(*env, *parts, **arguments)
