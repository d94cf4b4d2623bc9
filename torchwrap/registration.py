"""make: from an id to an env."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium
import torch
from gymnasium import Space

from torchwrap import arguments
from torchwrap.env import Env
from torchwrap.envs.cartpole import CartPole
from torchwrap.functional import FunctionalEnv

NATIVE = {"CartPole-v1": CartPole}
"""Ids with an env of our own, in tensors."""


def make(
    id: str,
    num_envs: int = 1,
    *,
    backend: Literal["torch", "gymnasium"] | None = None,
    device: torch.device | str = "cpu",
    first_index: int = 0,
    max_episode_steps: int | None = None,
    vectorization_mode: Literal["sync", "async"] | None = None,
    info_keys: Sequence[str] | Mapping[str, Space[Any]] = (),
    **kwargs: Any,
) -> Env:
    """`num_envs` envs of one id: torchwrap's own where there is one, else Gymnasium's.

    Args:
        id: as registered with Gymnasium.
        num_envs: how many.
        backend: "torch" for torchwrap's own, "gymnasium" for Gymnasium's; the first that has it where None.
        device: where tensors live.
        first_index: global index of the first env; `rank * num_envs` places a shard of a larger run.
        max_episode_steps: truncates episodes of that length; the registered limit where None, no limit where -1.
        vectorization_mode: for Gymnasium: "sync" (one process, the default) or "async" (a process for each env).
        info_keys: for Gymnasium: what of `info` to pass on, see `torchwrap.interop.gymnasium.from_gymnasium`.
        kwargs: for the env's constructor.

    Raises:
        ValueError: for an id that is not registered, or an argument that the backend does not take.

    >>> make("CartPole-v1", num_envs=4)
    <CartPole-v1(num_envs=4, device=cpu)>
    """
    if not isinstance(id, str):
        raise TypeError(f"make needs an id, a string, but got {id!r}.")
    arguments.integer("make", "num_envs", num_envs, at_least=1)
    if max_episode_steps is not None and (max_episode_steps != -1 or not isinstance(max_episode_steps, int)):
        arguments.integer("make", "max_episode_steps", max_episode_steps, at_least=1)
    if backend not in (None, "torch", "gymnasium"):
        raise ValueError(f'make needs backend "torch" or "gymnasium", but got {backend!r}.')
    if backend == "torch" and id not in NATIVE:
        raise ValueError(f'make needs an id in {sorted(NATIVE)} for backend="torch", but got {id!r}.')
    module, _, name = id.rpartition(":")  # Gymnasium's "module:id" imports what registers the id
    try:
        if module:
            importlib.import_module(module)
        spec = copy.deepcopy(gymnasium.spec(name))
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"make needs a registered id, but got {id!r}: {error}") from None
    if id in NATIVE and backend != "gymnasium":
        if vectorization_mode is not None or info_keys:
            raise ValueError(f'make needs backend="gymnasium" for vectorization_mode and info_keys, but got {id!r} in torch.')
        try:
            func_env = NATIVE[id](**kwargs)
        except TypeError as error:
            raise ValueError(
                f'make needs arguments that {id} takes in torch, or backend="gymnasium", but got: {error}'
            ) from None
        if max_episode_steps is not None:
            spec.max_episode_steps = None if max_episode_steps == -1 else max_episode_steps
        spec.kwargs.update(kwargs)
        return FunctionalEnv(
            func_env, num_envs, device=device, max_episode_steps=spec.max_episode_steps, first_index=first_index, spec=spec
        )
    if vectorization_mode not in (None, "sync", "async"):
        raise ValueError(f'make needs vectorization_mode "sync" or "async", but got {vectorization_mode!r}.')
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    interop = importlib.import_module("torchwrap.interop.gymnasium")  # a foreign library is imported when it is asked for
    return interop.make(
        id, num_envs, vectorization_mode or "sync", device=device, first_index=first_index, info_keys=info_keys, **kwargs
    )
