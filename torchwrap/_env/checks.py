"""Checks of what a caller gives to an env. All of them run before anything has changed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import spaces
from torchwrap._env.facade import EnvFacade


def seed(owner: str, value: Any) -> int:
    """`value` as a seed in [0, 2**64).

    >>> seed("CartPole-v1", -1)
    Traceback (most recent call last):
    ValueError: CartPole-v1.reset needs a seed that is an integer in [0, 2**64), but got -1.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < 2**64:
        raise ValueError(f"{owner}.reset needs a seed that is an integer in [0, 2**64), but got {value!r}.")
    return number


def mask(env: EnvFacade, value: Any, has_reset: bool) -> None:
    """Raises unless `value` is a mask of the env's rows; before the first reset it must set all of them."""
    name, shape = env._name(), (env.num_envs,)
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.shape != shape or value.device != env.device:
        got = f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}.reset needs a mask of shape {shape} torch.bool on {env.device}, but got {got}.")
    if not has_reset and not value.all():
        raise RuntimeError(f"{name}.reset needs a first reset of every env, but got a mask that leaves some out.")


def transition(env: EnvFacade, given: Any, root: TensorDict) -> TensorDict:
    """The TensorDict to step: what was given, or a copy of the root with the bare action that was given."""
    if not _is_action(env, given):
        step_input(env, given)
        return given  # type: ignore[no-any-return]
    _action(env, given)
    return root.copy().set("action", given)


def step_input(env: EnvFacade, td: Any) -> None:
    """Raises unless `td` is a TensorDict with an action of the env, to which `next` can be written."""
    name = env._name()
    if not isinstance(td, TensorDictBase):
        needed = f'{name}.step needs a TensorDict with "action", or an action as a tensor'
        raise TypeError(f"{needed}, but got {type(td).__name__}.")
    action = td.get("action", None)
    if action is None:
        raise ValueError(f'{name}.step needs td["action"], but got a TensorDict with keys {sorted(td.keys())}.')
    _action(env, action)
    if td.batch_size != (env.num_envs,) or td.is_locked:
        got = f"{tuple(td.batch_size)}{', locked' if td.is_locked else ''}"
        raise ValueError(f"{name}.step needs an unlocked TensorDict of batch size ({env.num_envs},), but got {got}.")


def _action(env: EnvFacade, value: Any) -> None:
    spaces.check(env._name(), "an action", env.single_action_space, value, env.num_envs, env.device)


def _is_action(env: EnvFacade, given: Any) -> bool:
    if not isinstance(given, TensorDictBase):
        return isinstance(given, Tensor)
    parts = spaces.children(env.single_action_space)  # actions of a Dict space are TensorDicts with its keys
    return parts is not None and set(given.keys()) == set(parts) and not isinstance(given.get("action", None), TensorDictBase)
