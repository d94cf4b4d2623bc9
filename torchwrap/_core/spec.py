"""Specs: how an env was made, as Gymnasium's `EnvSpec`, from which `torchwrap.make` makes another."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec, WrapperSpec

from torchwrap._core.env_buffers import BatchedModule


class Spec(EnvSpec):
    """Gymnasium's `EnvSpec`, with an error message that names the arguments that JSON cannot represent."""

    def to_json(self) -> str:
        """The spec as JSON; `EnvSpec.from_json` reads it.

        Raises:
            ValueError: for functions, arrays, and other arguments that JSON cannot represent.
        """
        for spec in (self, *self.additional_wrappers):
            _check_json(spec)
        return super().to_json()


def _check_json(spec: Any) -> None:
    for name, value in (spec.kwargs or {}).items():
        for item in _items(value):
            if isinstance(item, WrapperSpec):
                _check_json(item)
                continue
            try:
                json.dumps(item)
            except TypeError:
                got = f"{name}={item!r} of {spec.name}"
                raise ValueError(
                    f"to_json needs arguments that JSON can represent, but got {got}. make(env.spec) accepts it."
                ) from None


def _items(value: Any) -> list[Any]:
    """What lists and dicts hold, however deep."""
    if not isinstance(value, list | dict):
        return [value]
    return [item for part in (value.values() if isinstance(value, dict) else value) for item in _items(part)]


def replace(spec: EnvSpec, **changes: Any) -> Spec:
    """Returns a copy of a spec with some fields changed."""
    fields = {name: copy.copy(getattr(spec, name)) for name in inspect.signature(EnvSpec).parameters}
    return Spec(**{**fields, **changes})


def record(part: Any) -> WrapperSpec:
    """The spec of a wrapper or transform: its class, and its constructor arguments, read from the attributes of their names.

    Raises:
        ValueError: if an argument is not an attribute.

    >>> from torchwrap.transforms import ClipReward
    >>> record(ClipReward(-1, 1)).kwargs
    {'min_reward': -1, 'max_reward': 1}
    """
    kind = type(part)
    parameters = {name: parameter for name, parameter in inspect.signature(kind).parameters.items() if name != "env"}
    missing = [name for name in parameters if not hasattr(part, name)]
    if missing:
        raise ValueError(f"{kind.__name__} needs its arguments as attributes for its spec, but got none for {missing}.")
    arguments = {
        name: _recorded(_listed(getattr(part, name)) if parameter.kind is parameter.VAR_POSITIONAL else getattr(part, name))
        for name, parameter in parameters.items()
    }
    return WrapperSpec(kind.__name__, f"{kind.__module__}:{kind.__qualname__}", arguments)


def _listed(values: Any) -> list[Any]:
    # A single Compose would be taken for the whole.
    parts = list(values)
    return [values] if len(parts) == 1 and type(parts[0]) is type(values) else parts


def _recorded(value: Any) -> Any:
    if isinstance(value, BatchedModule):  # a transform
        return record(value)
    if isinstance(value, list):
        return [_recorded(item) for item in value]
    if isinstance(value, dict):
        return {name: _recorded(item) for name, item in value.items()}
    return value


def rebuild(spec: Any, *env: Any) -> Any:
    """Makes a wrapper (around `env`) or a transform from its spec.

    Raises:
        ValueError: if its class cannot be imported.

    >>> from torchwrap.transforms import ClipReward
    >>> rebuild(record(ClipReward(-1, 1)))
    ClipReward(min_reward=-1, max_reward=1)
    """
    if isinstance(spec, Mapping):  # a WrapperSpec that was read from JSON
        spec = WrapperSpec(**spec)
    module, _, path = spec.entry_point.partition(":")
    try:
        kind: Any = importlib.import_module(module)
        for name in path.split("."):
            kind = getattr(kind, name)
    except (ImportError, AttributeError):
        needed = "make needs a spec of wrappers and transforms that can be imported"
        raise ValueError(f"{needed}, but got {spec.entry_point}.") from None
    arguments = {name: _rebuilt(value) for name, value in (spec.kwargs or {}).items()}
    positional = [
        value
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is parameter.VAR_POSITIONAL
        for value in arguments.pop(name, ())
    ]
    return kind(*env, *positional, **arguments)


def _rebuilt(value: Any) -> Any:
    if isinstance(value, list):
        return [_rebuilt(item) for item in value]
    if isinstance(value, dict) and not _is_spec(value):
        return {name: _rebuilt(item) for name, item in value.items()}
    return rebuild(value) if _is_spec(value) else value


def _is_spec(value: Any) -> bool:
    return isinstance(value, WrapperSpec) or (isinstance(value, Mapping) and set(value) == {"name", "entry_point", "kwargs"})
