"""Runs of envs and comparisons of what they return, for the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap.env import Env

MakeEnv = Callable[..., Env]
"""Makes a new env from `num_envs` and `first_index`."""

NUM_ENVS, NUM_STEPS = 5, 40


def require(condition: bool | Tensor, message: str) -> None:
    """Raises an AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def require_equal(first: TensorDict, second: TensorDict, promise: str, tolerance: float = 0.0) -> None:
    """Requires the same keys, shapes, dtypes and values. The message starts with the promise and names the first difference.

    Args:
        first: the expected TensorDict.
        second: the one to compare.
        promise: what holds if they are equal.
        tolerance: relative and absolute, for values.
    """
    keys, other_keys = set(first.keys(True, True)), set(second.keys(True, True))
    require(keys == other_keys, f"{promise}: needs the same keys, but got {keys ^ other_keys} in one of the two.")
    for key in keys:
        expected, got = first[key], second[key]
        layout = f"{key} of shape {tuple(expected.shape)} {expected.dtype}, but got {tuple(got.shape)} {got.dtype}"
        require(expected.dtype == got.dtype and expected.shape == got.shape, f"{promise}: needs {layout}.")
        equal = torch.isclose(expected, got, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not equal.all():
            index = (~equal).nonzero()[0].tolist()
            values = f"{expected[tuple(index)].item()} and {got[tuple(index)].item()}"
            raise AssertionError(f"{promise}: needs equal {key}, but got {values} at index {index}.")


def sample_actions(env: Env) -> list[spaces.Value]:
    """Resets the env with seed 0, and samples an action for every step."""
    env.reset(seed=0)
    return [env.sample_action() for _ in range(NUM_STEPS)]


def run(env: Env, actions: list[spaces.Value], td: TensorDict | None = None) -> Iterator[tuple[TensorDict, TensorDict]]:
    """Yields what `env.step` returns for each action, from the root `td` on. None resets the env with seed 0."""
    td = env.reset(seed=0) if td is None else td
    for number, action in enumerate(actions, 1):
        td.set("action", action.clone())
        for name in env.signature.policy_state:
            td["next", name] = torch.full_like(td[name], number)
        transition, td = env.step(td)
        yield transition, td


def buffers(module: torch.nn.Module) -> TensorDict:
    """A copy of every buffer."""
    return TensorDict({name: buffer.clone() for name, buffer in module.named_buffers()}, batch_size=[])
