"""What `deploy` takes from an env: frozen copies of its transforms, the spaces below them, and their description as JSON."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from numpy.typing import NDArray
from torch import nn

from torchwrap import spaces
from torchwrap._core import spec as specs
from torchwrap._core.env_buffers import BatchedModule, EnvBuffer
from torchwrap.env import Env
from torchwrap.random import Stream
from torchwrap.spaces import Signature
from torchwrap.transforms.compose import Compose
from torchwrap.transforms.transform import ObservationTransform, Transform
from torchwrap.wrappers.transformed import TransformedEnv
from torchwrap.wrappers.wrapper import Wrapper, layers

Part: TypeAlias = Transform | Wrapper
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclasses.dataclass
class Chain:
    """The deployed transforms of an env, innermost first, and the spaces below them: raw observations, the env's actions."""

    observation_space: Space[Any]
    action_space: Space[Any]
    transforms: list[Transform] = dataclasses.field(default_factory=list)
    shown: list[str] = dataclasses.field(default_factory=list)  # as the code that makes them
    left_out: list[str] = dataclasses.field(default_factory=list)


def chain_of(env: Env, without: Sequence[str | type]) -> Chain:
    """The chain of an env. Raises a ValueError for a part that cannot be deployed, or cannot be left out."""
    parts = list(_parts(env))
    known = [piece for part, _, _ in parts for piece in _pieces(part)]
    for entry in without:
        if not any(_is_in(piece, [entry]) for piece in known):
            names = sorted({type(piece).__name__ for piece in known})
            raise ValueError(f"deploy needs names or classes in without among those of the env, {names}, but got {entry!r}.")
    base = parts[0][1] if parts else env.signature
    chain = Chain(base.single_observation_space, base.single_action_space)
    changed: set[str] = set()  # hooks of the transforms so far
    for part, below, above in parts:
        owner = Wrapper if isinstance(part, Wrapper) else Transform
        names = [name for name in ("_step", "_reset", "step", "reset", "action") if name in vars(owner)]
        hooks = {name for name in names if getattr(type(part), name) is not vars(owner)[name]}
        if _is_in(part, without):
            chain.left_out.append(_shown(part))
            for what, conflicts in (("observation", {"step", "reset"}), ("action", {"action"})):
                space = getattr(above, f"single_{what}_space")
                if space != getattr(below, f"single_{what}_space"):
                    if changed & conflicts:
                        fault = f"{_shown(part)}: a transform below it changes the {what}"
                        raise ValueError(f"deploy cannot leave out {fault}. Leave that one out too.")
                    setattr(chain, f"{what}_space", space)
        elif hooks and not part.is_passive:
            if isinstance(part, Wrapper):
                raise refusal(part, "drives the env")
            chain.transforms.append(_frozen_copy(part, without))
            chain.shown.append(_shown(part))
            chain.left_out += [_shown(piece) for piece in _pieces(part) if _is_in(piece, without)]
            changed |= hooks
    return chain


def _parts(env: Env | Compose) -> Iterator[tuple[Part, Signature, Signature]]:
    """Transforms and wrappers, innermost first, with the signatures below and above."""
    if isinstance(env, Compose):
        for part, below, above in zip(env, env._signatures, env._signatures[1:], strict=False):
            yield from _parts(part) if isinstance(part, Compose) else [(part, below, above)]
        return
    for layer in reversed(layers(env)):
        if isinstance(layer, TransformedEnv):
            yield from _parts(layer.transforms)
        elif isinstance(layer, Wrapper):
            yield layer, layer.env.signature, layer.signature


def _pieces(part: Part) -> list[Part]:
    """The part, and the transforms inside of it, such as those of `ObservationGroups`."""
    inner = [] if isinstance(part, Wrapper) else list(part.modules())[1:]
    return [part, *(module for module in inner if isinstance(module, Transform) and not isinstance(module, Compose))]


def _is_in(part: Part, without: Sequence[str | type]) -> bool:
    return type(part).__name__ in without or any(isinstance(entry, type) and isinstance(part, entry) for entry in without)


def _frozen_copy(part: Transform, without: Sequence[str | type]) -> Transform:
    """A copy in eval mode, whose env buffers have one initial row, without the parts inside that are left out."""
    for piece in _pieces(part):
        if not _is_in(piece, without) and any(isinstance(module, Stream) for module in piece.children()):
            raise refusal(piece, "draws random numbers")
    transform = copy.deepcopy(part)
    for module, name in _env_buffers(transform):
        declared, row = getattr(type(module), name, None), module.get_buffer(name)[:1].zero_()
        setattr(module, name, declared.allocate(module, 1, row.device) if isinstance(declared, EnvBuffer) else row)
    for compose in [module for module in transform.modules() if isinstance(module, Compose)]:
        for position, inner in enumerate(compose):
            if not isinstance(inner, Compose):
                compose.add_module(str(position), Transform() if _is_in(inner, without) else inner._frozen())
    return transform._frozen().eval().requires_grad_(False)


def _env_buffers(transform: Transform) -> list[tuple[nn.Module, str]]:
    modules = [module for module in transform.modules() if isinstance(module, BatchedModule)]
    return [(module, name) for module in modules for name in module._env_buffer_names]


def state_of(transforms: Sequence[Transform]) -> dict[str, tuple[nn.Module, str]]:
    """The module and the attribute of each buffer with one row per env, by the name of the transform and the attribute."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for transform in transforms:
        for module, key in _env_buffers(transform):
            name = f"{type(transform).__name__}.{key}"
            number = sum(other == name or other.startswith(f"{name}.") for other in found)
            found[f"{name}.{number + 1}" if number else name] = module, key
    return found


def ignores_starts(transform: Transform) -> bool:
    """Whether the transform computes the same whether or not a row starts an episode."""
    hooks = (type(transform).step, type(transform).reset)
    return hooks in [(kind.step, kind.reset) for kind in (Transform, ObservationTransform)] and not _env_buffers(transform)


def refusal(part: Part, fault: str) -> ValueError:
    """The error for a part that cannot be deployed."""
    remedy = f'`without=["{type(part).__name__}"]` leaves it out, and the caller takes over its work.'
    return ValueError(f"deploy cannot use {_shown(part)}, because it {fault}. {remedy}")


def _shown(part: Part) -> str:
    """A transform or wrapper as the code that makes it."""
    if isinstance(part, Transform):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(part))  # the addresses of functions
    try:
        arguments = specs.record(part).kwargs or {}
    except ValueError:  # the wrapper does not keep its arguments
        return f"{type(part).__name__}(...)"
    return f"{type(part).__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def described(space: Space[Any]) -> dict[str, Json]:
    """A space as JSON: its kind, and for a leaf its shape, dtype and values. Bounds are one number if all of them are equal.

    >>> described(gym_spaces.Box(-1, np.inf, (2,)))
    {'type': 'Box', 'shape': [2], 'dtype': 'float32', 'low': -1.0, 'high': None}
    """
    children, found = spaces.children(space), {"type": type(space).__name__}
    if children is not None:
        return {**found, "spaces": {key: described(child) for key, child in children.items()}}
    values: dict[str, Json] = {}
    if isinstance(space, gym_spaces.Box):
        values = {"low": _bounds(space.low), "high": _bounds(space.high)}
    elif isinstance(space, gym_spaces.Discrete):
        values = {"n": int(space.n), "start": int(space.start)}
    elif isinstance(space, gym_spaces.MultiDiscrete):
        values = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
    return {**found, "shape": list(space.shape or ()), "dtype": str(np.dtype(space.dtype)), **values}


def _bounds(bound: NDArray[Any]) -> Json:
    values = bound.astype(object)
    values[~np.isfinite(bound)] = None  # JSON has no infinity
    first: Json = values.flat[0] if values.size else None
    return first if all(value == first for value in values.flat) else values.tolist()
