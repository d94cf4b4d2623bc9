"""How an env was made: Gymnasium's specs, with which `torchwrap.make` makes another."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec, WrapperSpec
from torch import nn

from torchwrap.transforms.base import Transform


class Spec(EnvSpec):
    """Gymnasium's `EnvSpec`, which says what of it JSON does not have."""

    def to_json(self) -> str:
        """This recipe as JSON; `EnvSpec.from_json` reads it.

        Raises:
            ValueError: for functions, arrays, and other arguments that JSON does not have.
        """
        for part in (self, *self.additional_wrappers):
            _check_json(part)
        return super().to_json()


def _check_json(part: Any) -> None:
    for name, value in (part.kwargs or {}).items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, WrapperSpec):
                _check_json(one)
                continue
            try:
                json.dumps(one)
            except TypeError:
                needs = "to_json needs arguments that JSON has"
                raise ValueError(f"{needs}, but got {name}={one!r} of {part.name}; make(env.spec) takes it.") from None


def replace(spec: EnvSpec, **changes: Any) -> Spec:
    """A recipe like this one, with some fields changed."""
    fields = {name: copy.copy(getattr(spec, name)) for name in inspect.signature(EnvSpec).parameters}
    return Spec(**{**fields, **changes})


def record(part: Any) -> WrapperSpec:
    """The recipe of a wrapper or transform: its class, and its arguments, which it keeps under their own names."""
    kind = type(part)
    names = [name for name in inspect.signature(kind).parameters if name != "env"]
    missing = [name for name in names if not hasattr(part, name)]
    if missing:
        raise ValueError(f"{kind.__name__} needs its arguments as attributes for its spec, but got none for {missing}.")
    arguments = {name: _recorded(getattr(part, name)) for name in names}
    return WrapperSpec(kind.__name__, f"{kind.__module__}:{kind.__qualname__}", arguments)


def _recorded(value: Any) -> Any:
    if isinstance(value, Transform):
        return record(value)
    if isinstance(value, list | nn.ModuleList):
        return [_recorded(part) for part in value]
    return value


def rebuild(spec: Any, *env: Any) -> Any:
    """A new wrapper (around the env) or transform from its recipe."""
    if isinstance(spec, Mapping):  # as JSON has it
        spec = WrapperSpec(**spec)
    module, _, path = spec.entry_point.partition(":")
    try:
        kind: Any = importlib.import_module(module)
        for name in path.split("."):
            kind = getattr(kind, name)
    except (ImportError, AttributeError):
        needs = "make needs a spec of wrappers and transforms that can be imported"
        raise ValueError(f"{needs}, but got {spec.entry_point}.") from None
    arguments = {name: _rebuilt(value) for name, value in (spec.kwargs or {}).items()}
    positional = [
        part
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is parameter.VAR_POSITIONAL
        for part in arguments.pop(name, ())
    ]
    return kind(*env, *positional, **arguments)


def _rebuilt(value: Any) -> Any:
    if isinstance(value, list):
        return [_rebuilt(part) for part in value]
    return rebuild(value) if _is_spec(value) else value


def _is_spec(value: Any) -> bool:
    return isinstance(value, WrapperSpec) or (isinstance(value, Mapping) and set(value) == {"name", "entry_point", "kwargs"})
