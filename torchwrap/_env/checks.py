"""Checks of what a caller gives to an env. All of them run before anything has changed."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Discrete
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._env import policy_state
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
        raise ValueError(f"{owner}.reset needs a seed that is an integer in [0, 2**64), but got {validation.shown(value)}.")
    return number


def mask(env: EnvFacade, value: Any, has_reset: bool) -> None:
    """Raises unless `value` is a mask of the env's rows; before the first reset it must set all of them."""
    name, shape = env._name(), (env.num_envs,)
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.shape != shape or value.device != env.device:
        got = f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}.reset needs a mask of shape {shape} torch.bool on {env.device}, but got {got}.")
    if not has_reset and not value.all():
        raise RuntimeError(f"{name}.reset needs a first reset of every env, but got a mask that leaves some out.")


def transition(env: EnvFacade, given: Any, last: TensorDict) -> TensorDict | dict[str, Any]:
    """What to step: the TensorDict that was given, or the items of the last root with the bare action that was given."""
    if not _is_action(env, given):
        step_input(env, given)
        return given  # type: ignore[no-any-return]
    _action(env, given)
    return {**dict(last.items()), "action": given}


def step_input(env: EnvFacade, td: Any) -> None:
    """Raises unless `td` is a TensorDict with an action of the env, to which `next` can be written."""
    name = env._name()
    if not isinstance(td, TensorDictBase):
        needed, remedy = f'{name}.step needs a TensorDict with "action", or an action as a tensor', ""
        if isinstance(td, tuple):
            remedy = f": {_SECOND_OF_STEP}"
        elif isinstance(td, np.ndarray | list):
            remedy = ": `env.step(torch.as_tensor(action))` takes it"
        raise TypeError(f"{needed}, but got {type(td).__name__}{remedy}.")
    action = td.get("action", None)
    if action is None:
        got = f"a TensorDict with keys {sorted(td.keys())}{_row(env, td.batch_size, ())}"
        raise ValueError(f'{name}.step needs td["action"], but got {got}.')
    _action(env, action)
    if "next" in td and not set((found := td["next"]).keys()) <= env.signature.policy_state.keys():
        if "reward" in found:
            got = f'a TensorDict with "next", which has been stepped: {_SECOND_OF_STEP}'
            raise ValueError(f"{name}.step needs a root, but got {got}.")
        raise ValueError(
            f'{name} needs nothing under "next" but state of the policy that is declared, but got {sorted(found.keys())}: '
            "transforms.PolicyState declares it."
        )
    if td.batch_size != (env.num_envs,) or td.is_locked:
        got = f"{tuple(td.batch_size)}{', locked' if td.is_locked else ''}{_row(env, td.batch_size, ())}"
        raise ValueError(f"{name}.step needs an unlocked TensorDict of batch size ({env.num_envs},), but got {got}.")


def only_observation(env: EnvFacade, initial: TensorDict) -> None:
    """Raises for what a reset returns besides the observation, because a root would not hold it."""
    if len(initial.keys()) > 1:
        got = sorted(key for key in initial.keys() if key != "observation")
        raise ValueError(
            f"{env._name()}.reset needs layers that set no other key than observation, but got {got}, which no root would "
            "hold: make it a part of a Dict observation, or set it in step."
        )


def root(env: EnvFacade, td: Any, last: TensorDict) -> None:
    """Raises unless a collector can start from `td`: the last root, or another one with its observation."""
    if not isinstance(td, TensorDictBase):
        remedy = f": {_SECOND_OF_COLLECT}" if isinstance(td, tuple) else ""
        raise TypeError(f'Collector needs a TensorDict with "observation" to start from, but got {type(td).__name__}{remedy}.')
    known = {"observation", "action", "next", *policy_state.keys(env.signature)}
    if not set(td.keys()) <= known:
        got = sorted(set(td.keys()) - known)
        raise ValueError(
            f"Collector needs a root of {env._name()}, but got {got} as well, which no step would carry on: "
            "transforms.PolicyState declares what a policy carries from step to step."
        )
    if "observation" not in td:
        raise ValueError(f'Collector needs a TensorDict with "observation" to start from, but got keys {sorted(td.keys())}.')
    if td is not last and "next" in td:
        raise ValueError(
            f'Collector needs a root, but got a TensorDict with "next", which has been stepped: {_SECOND_OF_COLLECT}.'
        )
    observation = td["observation"]
    _value(env, "a rollout from an observation", env.single_observation_space, observation)
    if td is not last and not _equal(observation, spaces.to_device(last.get("observation", observation), env.device)):
        needed = f"the root that the last reset, step or collection of {env._name()} returned"
        raise ValueError(f"Collector needs {needed}, but got a stale one, with another observation: {_SECOND_OF_COLLECT}.")


_SECOND_OF_STEP = "the second result is the next root, `transition, td = env.step(td)`"
_SECOND_OF_COLLECT = "the second result of a step and of a collection is the next root, `data, td = collect(td)`"


def _action(env: EnvFacade, value: Any) -> None:
    _value(env, "an action", env.single_action_space, value)


def _value(env: EnvFacade, what: str, space: Space[Any], value: Any) -> None:
    try:
        spaces.check(env._name(), what, space, value, env.num_envs, env.device)
    except ValueError as error:
        shape, remedy = getattr(value, "shape", None), ""
        if isinstance(space, Discrete) and space is env.single_action_space and shape == (env.num_envs, space.n):
            remedy = ": `scores.argmax(-1)` makes actions of scores"
        raise ValueError(f"{str(error)[:-1]}{remedy or _row(env, shape, space.shape)}.") from None


def _row(env: EnvFacade, shape: Any, single_shape: Any) -> str:
    if env.num_envs != 2 or shape != single_shape:
        return ""
    return ": reset returns one TensorDict, `td = env.reset()`, and `obs, info = env.reset()` splits it into two rows"


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = (first == second) | (first.isnan() & second.isnan()) if first.shape == second.shape else None
        return same is not None and bool(same.all())
    if isinstance(first, Tensor) or isinstance(second, Tensor) or set(first.keys()) != set(second.keys()):
        return False
    return all(_equal(value, second[key]) for key, value in first.items())


def _is_action(env: EnvFacade, given: Any) -> bool:
    if not isinstance(given, TensorDictBase):
        return isinstance(given, Tensor)
    parts = spaces.children(env.single_action_space)  # actions of a Dict space are TensorDicts with its keys
    return parts is not None and set(given.keys()) == set(parts) and not isinstance(given.get("action", None), TensorDictBase)
