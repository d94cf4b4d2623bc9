"""Checks that the adapters to other libraries share. All of them run at construction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Discrete, MultiDiscrete

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap.env import Env
from torchwrap.spaces import Signature

STEP = ("observation", "reward", "terminated", "truncated", "info")


def env(owner: str, value: Any) -> Env:
    """`value`, if it is an env without the state of a policy."""
    if not isinstance(value, Env):
        remedy = "torchwrap.make and torchwrap.from_gymnasium make one"
        raise TypeError(f"{owner} needs a torchwrap.Env, but got {type(value).__name__}: {remedy}.")
    if value.signature.policy_state:
        needed = "an env without PolicyState, because trainers carry the state of policies themselves"
        raise ValueError(f"{owner} needs {needed}, but got {value!r}.")
    return value


def starts_at_zero(owner: str, what: str, space: Space[Any]) -> None:
    """Raises a ValueError for discrete observations or actions that count from another number."""
    if isinstance(space, Discrete | MultiDiscrete) and np.any(space.start):
        remedy = f"put transforms.Transform{what.title()}(func, {what}_space) on the env"
        raise ValueError(f"{owner} needs {what}s that start at 0, but got {space}: {remedy}.")


def signature(
    owner: str,
    num_envs: int,
    observation_space: Space[Any],
    action_space: Space[Any],
    max_episode_steps: int | None,
    first_index: int,
    device: torch.device | str,
    info_keys: Sequence[str],
) -> Signature:
    """The description of an env that functions make, from arguments that are checked."""
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        if spaces.optional_space(owner, name, space) is None:
            raise TypeError(f"{owner} needs a gymnasium Space as {name}, but got None.")
    if max_episode_steps is not None:
        max_episode_steps = validation.integer(owner, "max_episode_steps", max_episode_steps, at_least=1)
    if isinstance(info_keys, str):
        raise TypeError(f"{owner} needs info_keys as a list, but got the string {info_keys!r}.")
    device = validation.device(owner, device)
    return Signature(num_envs, observation_space, action_space, device, max_episode_steps, first_index)


def numbers(
    owner: str, result: Any, names: tuple[str, ...], info_keys: Collection[str], describe: Callable[[Any], str]
) -> dict[str, Any]:
    """By name, the reward, the flags and the info that a simulator's `step` returned, whose result ends as `STEP` does."""
    if not isinstance(result, tuple | list) or len(result) != len(names) or not isinstance(result[-1], dict):
        raise TypeError(f"{owner} needs step to return ({', '.join(names)}) with a dict as info, but got {describe(result)}.")
    *_, reward, terminated, truncated, info = result
    if unknown := sorted(set(info_keys) - set(info)):
        raise ValueError(f"{owner} needs info_keys that the info contains, but got {unknown}. It contains {sorted(info)}.")
    return {"reward": reward, "terminated": terminated, "truncated": truncated, **{name: info[name] for name in info_keys}}
