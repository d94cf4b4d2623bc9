"""The transforms between the raw observation and the policy, and between the policy and the env's action, as copies."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from gymnasium import Space
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import nested
from torchwrap._core.env_buffers import BatchedModule, EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap._deploy.copies import deep_copy
from torchwrap._deploy.description import of_part
from torchwrap._deploy.policy import RandomnessError, Watch
from torchwrap.env import Env
from torchwrap.random import Stream
from torchwrap.spaces import Signature
from torchwrap.transforms.compose import Compose
from torchwrap.transforms.transform import ObservationTransform, Transform
from torchwrap.wrappers.transformed import TransformedEnv
from torchwrap.wrappers.wrapper import Wrapper, layers

Part: TypeAlias = Transform | Wrapper

ROWS = 2  # of the values that a part is tried with

Buffer = tuple[nn.Module, str]
"""A module, and the name of one of its buffers."""


@dataclasses.dataclass
class Chain:
    """What is deployed of an env.

    Args:
        observation_space: of the raw observation.
        action_space: of the env's action.
        transforms: copies, innermost first.
        buffers: those of the copies that have one row per episode, by readable names.
        num_common: how many of the first transforms compute the same in a step and in a reset, and keep nothing.
        shown: the transforms, as the code that makes them.
        left_out: likewise, what `without` names.
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    transforms: list[Transform] = dataclasses.field(default_factory=list)
    buffers: dict[str, Buffer] = dataclasses.field(default_factory=dict)
    num_common: int = 0
    shown: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)


def chain_of(env: Env, without: Sequence[str | type]) -> Chain:
    """The chain of an env.

    Raises:
        TypeError, ValueError: for a part that cannot be deployed, or cannot be left out.
    """
    parts = list(_parts(env))
    base = parts[0][1] if parts else env.signature
    chain = Chain(base.single_observation_space, base.single_action_space)
    _check_without(without, [piece for part, _, _ in parts for piece in _pieces(part)])
    changes_observation = changes_action = False
    for part, below, above in parts:
        if _is_in(part, without):
            chain.left_out.append(of_part(part))
            if below.single_observation_space != above.single_observation_space:
                _check_innermost(part, "observation", changes_observation)
                chain.observation_space = above.single_observation_space
            if below.single_action_space != above.single_action_space:
                _check_innermost(part, "action", changes_action)
                chain.action_space = above.single_action_space
            continue
        if part.is_passive:
            continue
        if isinstance(part, Wrapper):
            if any(getattr(type(part), hook) is not getattr(Wrapper, hook) for hook in ("_step", "_reset")):
                raise _refusal(part, "drives the env itself")
            continue
        chain.left_out += [of_part(piece) for piece in _pieces(part) if piece is not part and _is_in(piece, without)]
        transform = _copied(part, without)
        in_observation, in_action = _trial(part, transform, below, above, env.device)
        changes_observation, changes_action = changes_observation or in_observation, changes_action or in_action
        if in_observation or in_action:
            _take_buffers(chain.buffers, type(part).__name__, transform)
            if len(chain.transforms) == chain.num_common and not chain.buffers and not _distinguishes(transform):
                chain.num_common += 1
            chain.transforms.append(transform)
            chain.shown.append(of_part(part))
    return chain


def _parts(env: Env) -> Iterator[tuple[Part, Signature, Signature]]:
    """Transforms and wrappers, innermost first, with the signatures below and above."""
    for layer in reversed(layers(env)):
        if isinstance(layer, TransformedEnv):
            yield from _composed(layer.transforms)
        elif isinstance(layer, Wrapper):
            yield layer, layer.env.signature, layer.signature


def _composed(compose: Compose) -> Iterator[tuple[Part, Signature, Signature]]:
    for part, below, above in zip(compose, compose._signatures, compose._signatures[1:], strict=False):
        if isinstance(part, Compose):
            yield from _composed(part)
        else:
            yield part, below, above


def _pieces(part: Part) -> list[Part]:
    """The part, and the transforms inside of it."""
    if isinstance(part, Wrapper):
        return [part]
    return [module for module in part.modules() if isinstance(module, Transform) and not isinstance(module, Compose)]


def _is_in(part: Part, without: Sequence[str | type]) -> bool:
    return any(type(part).__name__ == entry if isinstance(entry, str) else isinstance(part, entry) for entry in without)


def _check_without(without: Sequence[str | type], pieces: list[Part]) -> None:
    for entry in without:
        if not isinstance(entry, str | type):
            raise TypeError(f"deploy needs names or classes of transforms and wrappers in without, but got {entry!r}.")
        if not any(_is_in(piece, [entry]) for piece in pieces):
            known = sorted({type(piece).__name__ for piece in pieces})
            raise ValueError(f"deploy needs names in without among those of the env, {known}, but got {entry!r}.")


def _check_innermost(part: Part, what: str, changed: bool) -> None:
    if changed:
        raise ValueError(
            f"deploy needs parts in without that leave the {what} space as it is, or are nearest to the env, but got "
            f"{of_part(part)}: it is above a transform that changes the {what}, so leave that one out too."
        )


def _refusal(part: Part, fault: str) -> ValueError:
    name = type(part).__name__
    return ValueError(
        f"deploy needs transforms that compute rows from observations and actions alone, but got {of_part(part)}, which "
        f'{fault}: `without=["{name}"]` leaves it out, and what it does is then up to the caller.'
    )


def _copied(part: Transform, without: Sequence[str | type]) -> Transform:
    """A frozen copy, whose env buffers have `ROWS` initial rows."""
    for piece in _pieces(part):
        owns = any(isinstance(module, Stream) for module in _own_modules(piece))
        if owns and not _is_in(piece, without):
            raise _refusal(piece, "draws random numbers")
    memo: dict[int, Any] = {}
    for module in part.modules():
        for name in getattr(module, "_env_buffer_names", ()):
            memo[id(module._buffers[name])] = _initial(module, name)
    made = deep_copy(part, memo).eval()
    originals = {id(memo[id(piece)]): piece for piece in _pieces(part)}
    return _frozen(made, lambda piece: _is_in(originals[id(piece)], without))


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a transform, without those of the transforms inside of it."""
    yield module
    for child in module.children():
        if not isinstance(child, Transform):
            yield from _own_modules(child)


def _frozen(transform: Transform, is_left_out: Callable[[Transform], bool]) -> Transform:
    for compose in [module for module in transform.modules() if isinstance(module, Compose)]:
        for key, part in list(compose._modules.items()):
            assert isinstance(part, Transform)
            if not isinstance(part, Compose):
                compose._modules[key] = Transform() if is_left_out(part) else part._frozen()
        compose._find_hooks()
    return transform._frozen().eval()


def _initial(module: nn.Module, name: str) -> Tensor:
    declared, buffer = getattr(type(module), name, None), module.get_buffer(name)
    if isinstance(declared, EnvBuffer):
        return declared.allocate(module, ROWS, buffer.device)
    return torch.zeros(ROWS, *buffer.shape[1:], dtype=buffer.dtype, device=buffer.device)


def _trial(
    part: Transform, transform: Transform, below: Signature, above: Signature, device: torch.device
) -> tuple[bool, bool]:
    """Whether the transform changes observations, and actions. A change in place counts."""
    kept = copy.deepcopy(transform)  # a trial writes buffers
    ended = torch.zeros(ROWS, 1, dtype=torch.bool, device=device)
    flags = {"terminated": ended, "truncated": ended.clone()}
    everyone = RowMask.full(ROWS, device)

    def changes_observation(others: dict[str, Tensor]) -> bool:
        def root(observation: spaces.Value) -> TensorDict:
            return nested.tensordict({"observation": observation, **others}, ROWS)

        space = below.single_observation_space
        return any(
            [
                _changes(lambda given: kept.step(root(given))["observation"], spaces.zeros(space, ROWS, device)),
                _changes(lambda given: kept.reset(root(given), everyone)["observation"], spaces.zeros(space, ROWS, device)),
            ]
        )

    shared = {
        f"{key}.{name}" if key else name: buffer
        for key, module in kept.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in getattr(module, "_env_buffer_names", ())
    }
    versions = {name: buffer._version for name, buffer in shared.items()}
    try:
        with Watch(), torch.no_grad():
            in_action = _changes(kept.action, spaces.zeros(above.single_action_space, ROWS, device))
            in_observation = changes_observation({**flags, "reward": ended.float()})
            if in_observation:
                changes_observation(flags)  # what a deployed policy is given: no reward
    except RandomnessError as error:
        raise _refusal(part, f"draws random numbers by {error}") from None
    except Exception as error:
        kind = "reads what only the env has" if isinstance(error, KeyError) else f"raised {type(error).__name__}"
        fault = f"{kind} ({error.args[0] if error.args else error})"
        raise _refusal(part, fault) from error
    written = [name for name, buffer in shared.items() if buffer._version != versions[name]]
    if (in_observation or in_action) and written:
        raise _refusal(part, f"writes the buffer {written[0]!r}, which all rows share, while an EnvBuffer has a row for each")
    return in_observation, in_action


def _changes(function: Callable[[spaces.Value], spaces.Value], given: spaces.Value) -> bool:
    """Whether the function returns another value than it was given, or writes to it."""
    before = nested.leaves(given)
    versions = [leaf._version for leaf in before]
    after = nested.leaves(function(given))
    if len(before) != len(after):
        return True
    return any(leaf is not old or leaf._version != version for leaf, old, version in zip(after, before, versions, strict=True))


def _distinguishes(transform: Transform) -> bool:
    """Whether the transform computes another thing in a reset than in a step, or may do so."""
    kind = type(transform)
    inner = [module for module in transform.modules() if isinstance(module, Compose) and module is not transform]
    if inner:
        return any(_distinguishes(part) for compose in inner for part in compose.flat())
    overrides = [hook for hook in ("step", "reset") if getattr(kind, hook) is not getattr(Transform, hook)]
    by_itself = kind.step is ObservationTransform.step and kind.reset is ObservationTransform.reset
    return bool(overrides) and not by_itself


def _take_buffers(buffers: dict[str, Buffer], owner: str, transform: Transform) -> None:
    """Adds the env buffers of a transform, under short names where these are unique."""
    found = [
        (key, module, name)
        for key, module in transform.named_modules()
        for name in (module._env_buffer_names if isinstance(module, BatchedModule) else ())
    ]
    taken = {name.split(".")[0] for name in buffers}
    number = 1
    while f"{owner}{number if number > 1 else ''}" in taken:
        number += 1
    owner = f"{owner}{number if number > 1 else ''}"
    names = [name for _, _, name in found]
    for key, module, name in found:
        path = name if names.count(name) == 1 or not key else f"{key}.{name}"
        buffers[f"{owner}.{path}"] = module, name
