"""Checks that the adapters to other libraries share. All of them run at construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import Space
from gymnasium.spaces import Box, Discrete

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap.env import Env
from torchwrap.spaces import Signature


def env(owner: str, value: Any) -> Env:
    """`value`, if it is an env without the state of a policy.

    >>> env("to_skrl", 3)
    Traceback (most recent call last):
    TypeError: to_skrl needs a torchwrap.Env, but got int: torchwrap.make and torchwrap.from_gymnasium make one.
    """
    if not isinstance(value, Env):
        remedy = "torchwrap.make and torchwrap.from_gymnasium make one"
        raise TypeError(f"{owner} needs a torchwrap.Env, but got {type(value).__name__}: {remedy}.")
    if value.signature.policy_state:
        raise ValueError(
            f"{owner} needs an env without PolicyState, because trainers carry the state of policies themselves, but got "
            f"{value!r}."
        )
    return value


def vector(owner: str, what: str, space: Space[Any]) -> Box:
    """`space`, if it is a Box with one dimension."""
    if not isinstance(space, Box) or len(space.shape) != 1:
        remedy = ": put transforms.FlattenObservation on the env" if what == "observations" else ""
        raise ValueError(f"{owner} needs {what} in a Box with one dimension, but got {space}{remedy}.")
    return space


def flat_dict(owner: str, space: Space[Any]) -> None:
    """Raises for a Dict or Tuple inside another one."""
    parts = spaces.children(space) or {}
    if any(spaces.children(part) is not None for part in parts.values()):
        raise ValueError(
            f"{owner} needs observations without a Dict in a Dict, but got {space}: put transforms.FlattenObservation or "
            "FilterObservation on the env."
        )


def discrete_or_box(owner: str, space: Space[Any]) -> None:
    """Raises unless actions are Discrete or a Box."""
    if not isinstance(space, Discrete | Box):
        raise ValueError(f"{owner} needs actions in a Discrete or Box space, but got {space}.")


def signature(
    owner: str,
    num_envs: int,
    observation_space: Space[Any],
    action_space: Space[Any],
    max_episode_steps: int | None,
    first_index: int,
    info_keys: Sequence[str],
    *,
    device: torch.device | str,
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
