"""Checks that the adapters to other libraries share. All of them run at construction."""

from __future__ import annotations

from typing import Any

from gymnasium import Space
from gymnasium.spaces import Box, Discrete

from torchwrap import spaces
from torchwrap.env import Env


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
