"""Runs of envs and comparisons of what they return, for the checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap.env import Env

MakeEnv = Callable[..., Env]
"""Makes a new env from `num_envs` and `first_index`."""

Run: TypeAlias = Iterable[tuple[TensorDict, TensorDict]]
"""What `env.step` returns, step by step."""

NUM_ENVS, NUM_STEPS = 5, 40


@contextlib.contextmanager
def closing(make: MakeEnv) -> Iterator[MakeEnv]:
    """A function that makes an env, of `NUM_ENVS` envs by default. All of its envs are closed in the end."""
    with contextlib.ExitStack() as stack:

        def make_env(num_envs: int = NUM_ENVS, first_index: int = 0) -> Env:
            env = make(num_envs=num_envs, first_index=first_index)
            stack.callback(env.close)
            return env

        yield make_env


def require(condition: bool | Tensor, message: str) -> None:
    """Raises an AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def require_equal(first: TensorDict, second: TensorDict, promise: str, tolerance: float = 0.0) -> None:
    """Requires the keys, shapes, dtypes and values of `first`, up to a tolerance, relative and absolute.

    The message starts with the promise that the two TensorDicts are equal, and names the first difference.
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


def require_equal_roots(first: TensorDict, second: TensorDict, promise: str, tolerance: float = 0.0) -> None:
    """As `require_equal`, for what roots hold before an action is chosen: not what a step or a snapshot has added."""
    added = ("action", "next", "buffers")
    first, second = (td.exclude(*added) for td in (first, second))
    require_equal(first, second, promise, tolerance)


def require_equal_runs(first: Run, second: Run, promise: str, tolerance: float = 0.0) -> None:
    """As `require_equal`, for the successors and roots of two runs."""
    for (expected, expected_td), (transition, td) in zip(first, second, strict=True):
        require_equal(expected["next"], transition["next"], promise, tolerance)
        require_equal_roots(expected_td, td, promise, tolerance)


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
