"""The state of a recurrent policy: it travels in the root from step to step, and starts over with each episode."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap._core.row_mask import RowMask
from torchwrap._env.facade import EnvFacade
from torchwrap.spaces import Signature

State = dict[str, Tensor]
"""Tensors `(num_envs, ...)` by name."""

IS_INIT = "is_init"


def keys(signature: Signature) -> list[str]:
    """The keys of a root besides `observation`."""
    return [*signature.policy_state, IS_INIT] if signature.policy_state else []


def initial(signature: Signature) -> State:
    """The entries of a root, besides `observation`, where every episode starts."""
    n, device = signature.num_envs, signature.device
    entries = {name: row.allocate(None, n, device) for name, row in signature.policy_state.items()}
    return {**entries, IS_INIT: torch.ones(n, 1, dtype=torch.bool, device=device)} if entries else {}


def reset(signature: Signature, mask: RowMask, root: TensorDict | None) -> State:
    """The entries of a root after a reset: initial in the rows of `mask`, and as in the last root elsewhere."""
    entries = initial(signature)
    if root is None:
        return entries
    return {name: mask.where(value, root[name].to(signature.device)) for name, value in entries.items()}


def read(env: EnvFacade, given: TensorDict | dict[str, Any]) -> State:
    """The state after the step, which the policy has set under `next`. With a bare action it is that before the step.

    Raises:
        ValueError: if the policy has left out a state, or set one of another shape or dtype.
    """
    declared = env.signature.policy_state
    if isinstance(given, dict):
        return {name: given[name] for name in declared}
    state = {key: given.get(("next", key), None) for key in declared}
    for key, row in declared.items():
        name, value, shape = env._name(), state[key], (env.num_envs, *row.shape)
        if not isinstance(value, Tensor):
            remedy = f'`td["next", "{key}"] = ...` sets it, as PolicyState needs'
            raise ValueError(f'{name} needs the state of the policy in ("next", "{key}"), but got {value!r}: {remedy}.')
        if value.shape != shape or value.dtype != row.dtype:
            got = f"{tuple(value.shape)} {value.dtype}"
            raise ValueError(f'{name} needs ("next", "{key}") of shape {shape} {row.dtype}, but got {got}.')
    return {key: value.detach() for key, value in state.items()}


def following(signature: Signature, state: State, done: Tensor | None) -> State:
    """The entries of the next root, in memory of their own. The state has at least one. None for `done` resets no row."""
    some = next(iter(state.values()))
    ended = torch.zeros(len(some), 1, dtype=torch.bool, device=some.device) if done is None else done.clone()
    entries = {
        name: value.masked_fill(ended.view(-1, *[1] * (value.dim() - 1)), signature.policy_state[name].fill)
        for name, value in state.items()
    }
    return {**entries, IS_INIT: ended}
