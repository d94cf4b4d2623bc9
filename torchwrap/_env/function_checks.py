"""Checks of the functions of an env at construction. Each function is called once, and the error names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium.experimental.functional import FuncEnv
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._env.batched_functions import BatchedFunctions
from torchwrap.spaces import Signature

Call = Callable[..., Any]
"""Calls a function by its name, with the arguments that follow, for all envs."""


def initial_state(owner: str, call: Call, num_envs: int) -> dict[str, Tensor]:
    """The initial state of all envs, by field.

    Raises:
        TypeError, ValueError: unless it is a dict of tensors `(num_envs, ...)`.
    """
    state = call("initial")
    if not isinstance(state, dict):
        raise TypeError(f"{owner}.initial needs to return a dict of tensors, but got {type(state).__name__}.")
    for field, value in state.items():
        if value.shape[:1] != (num_envs,):
            needed = f"{owner}.initial needs to return {field!r} of shape ({num_envs}, ...)"
            raise ValueError(f"{needed}, but got {tuple(value.shape)}.")
    return state


def step(functions: BatchedFunctions, call: Call, state: dict[str, Tensor], signature: Signature) -> list[str]:
    """Takes one step from a state, and checks what each function returns.

    Returns:
        The names of the info.

    Raises:
        TypeError, ValueError: if a result does not fit.
    """
    owner, n, device = functions.owner, signature.num_envs, signature.device
    if getattr(type(functions.func_env), "step_info", None) is not getattr(FuncEnv, "step_info", None):
        needed = f"{owner} needs transition_info for the info of a step, as FuncEnv has it"
        raise TypeError(f"{needed}, but got step_info, the name in its docstring: rename it.")
    action = spaces.zeros(signature.single_action_space, n, device)
    what = "to return observations"
    spaces.check(f"{owner}.observation", what, signature.single_observation_space, call("observation", state), n, device)
    next_state = call("transition", state, action)
    if set(next_state) != set(state):
        raise ValueError(f"{owner}.transition needs to return fields {list(state)}, but got {list(next_state)}.")
    for field, value in state.items():
        got = next_state[field]
        if got.shape != value.shape or got.dtype != value.dtype:
            needed = f"{owner}.transition needs to return {field!r} of shape {tuple(value.shape)} {value.dtype}"
            raise ValueError(f"{needed}, but got {tuple(got.shape)} {got.dtype}.")
    results = {"reward": call("reward", state, action, next_state), "terminal": call("terminal", next_state)}
    if functions.defines("truncated"):
        results["truncated"] = call("truncated", next_state)
    for function, value in results.items():
        if value.shape != (n,):
            needed = f"{owner}.{function} needs to return one scalar per env"
            raise ValueError(f"{needed}, but got shape {tuple(value.shape)} for {n} envs.")
        if function != "reward" and value.dtype != torch.bool:
            raise TypeError(f"{owner}.{function} needs to return torch.bool, but got {value.dtype}.")
    names: list[str] = []
    for function, arguments in (("transition_info", (state, action, next_state)), ("state_info", (next_state,))):
        info = call(function, *arguments) if functions.defines(function) else {}
        _check_info(f"{owner}.{function}", info, n, device)
        if both := sorted(set(names) & set(info)):
            raise ValueError(f"{owner} needs different names in transition_info and state_info, but got {both} in both.")
        names += info
    return names


def _check_info(owner: str, info: Any, num_envs: int, device: torch.device) -> None:
    if not isinstance(info, dict):
        raise TypeError(f"{owner} needs to return a dict of tensors, but got {type(info).__name__}.")
    for name, value in info.items():
        if not isinstance(name, str):
            raise TypeError(f"{owner} needs names that are strings, but got {name!r}.")
        if not isinstance(value, Tensor):
            raise TypeError(f"{owner} needs to return {name!r} as a tensor, but got {type(value).__name__}.")
        if value.shape[:1] != (num_envs,):
            needed = f"{owner} needs to return {name!r} of shape ({num_envs}, ...)"
            raise ValueError(f"{needed}, but got {tuple(value.shape)}.")
        if value.device != device:
            raise ValueError(f"{owner} needs to return {name!r} on device {device}, but got {value.device}.")


def step_limits(value: Any, num_envs: int) -> tuple[int | None, Tensor | None]:
    """The limit of all envs as an int, and those of each env if they differ, from the argument `max_episode_steps`.

    Raises:
        TypeError, ValueError: unless it is None, an integer, or an int64 tensor `(num_envs,)`, of at least 1.

    >>> step_limits(torch.tensor([2, 3]), 2)
    (3, tensor([2, 3]))
    """
    if value is None:
        return None, None
    if not isinstance(value, Tensor) or value.dim() == 0:
        return validation.integer("FunctionalEnv", "max_episode_steps", value, at_least=1), None
    if value.shape != (num_envs,) or value.dtype != torch.int64:
        needed = f"FunctionalEnv needs max_episode_steps as an integer, or as a tensor ({num_envs},) torch.int64"
        raise ValueError(f"{needed}, but got {tuple(value.shape)} {value.dtype}.")
    if (least := int(value.min())) < 1:
        raise ValueError(f"FunctionalEnv needs max_episode_steps of at least 1, but got {least}.")
    return int(value.max()), value


def params(values: Mapping[str, Any] | None, num_envs: int) -> dict[str, Tensor]:
    """The argument `params`, if each is a tensor with one row per env.

    Raises:
        ValueError: for anything else.
    """
    for name, value in (values or {}).items():
        if not isinstance(value, Tensor) or value.shape[:1] != (num_envs,):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"FunctionalEnv needs params[{name!r}] as a tensor ({num_envs}, ...), but got {got}.")
    return dict(values or {})


def given_state(owner: str, state: Any, own: dict[str, Tensor]) -> None:
    """Checks a state that a caller made: the fields, shapes, dtypes and the device are those of the env's own.

    Raises:
        TypeError, ValueError: if not, in the name of `owner`.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{owner} needs a state as a dict of tensors, as `env.state` is, but got {type(state).__name__}.")
    if set(state) != set(own):
        raise ValueError(f"{owner} needs a state with fields {list(own)}, but got {list(state)}.")
    for field, value in own.items():
        given = state[field]
        if not isinstance(given, Tensor):
            raise TypeError(f"{owner} needs state[{field!r}] as a torch.Tensor, but got {type(given).__name__}.")
        if (given.shape, given.dtype, given.device) != (value.shape, value.dtype, value.device):
            needed = f"{owner} needs state[{field!r}] of shape {tuple(value.shape)} {value.dtype} on {value.device}"
            raise ValueError(f"{needed}, but got {tuple(given.shape)} {given.dtype} on {given.device}.")
