"""Envs over a simulator: their base, attributes of the simulator's envs, and shared checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchwrap._core.errors import refusal
from torchwrap.env import Env

STEP = ("observation", "reward", "terminated", "truncated", "info")


class SimulatorEnv(Env):
    """Base of envs over a simulator outside of PyTorch. They have no snapshots."""

    can_snapshot = False
    host_stepped = True

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        if force and not hasattr(self, name):
            fault = f"cannot set {name!r} in the simulator's envs, which it does not hold"
            raise AttributeError(
                refusal(self._label, fault, remedy="Set it on the simulator itself")
            )
        return super().set_wrapper_attr(name, value, force=force)

    def __getstate__(self) -> NoReturn:
        # copy.deepcopy and pickle come here. Many simulators give a fresh env as their copy.
        fault = "cannot be copied or pickled: a simulator outside of PyTorch holds state"
        remedy = (
            "Make a new env; load_state_dict(env.state_dict()) copies what transforms have learned"
        )
        raise TypeError(refusal(self._label, fault, remedy=remedy))


class PerEnv(tuple[Any, ...]):
    """One value per env of a simulator. A tuple of a layer is one value for all."""


@dataclasses.dataclass
class MethodOfEach:
    """A method of a simulator's envs. A call returns its results in some rows."""

    engine: Any
    name: str
    rows: Sequence[int]

    def __call__(self, *args: Any, **kwargs: Any) -> PerEnv:
        return PerEnv(self.engine.call_method(self.rows, self.name, args, kwargs))


def per_env(env: Env, value: Any) -> tuple[Any, ...]:
    """An attribute of each env: the values of a simulator's envs, or that of a layer for all."""
    return value if isinstance(value, PerEnv) else (value,) * env.num_envs


def is_shared(env: Env, name: str) -> bool:
    """Whether `set_wrapper_attr` sets one value for all envs, and not one in each of Gymnasium."""
    if env.has_wrapper_attr(name):
        return not isinstance(env.get_wrapper_attr(name), PerEnv)
    return not isinstance(env.unwrapped, SimulatorEnv)


def get_attr(env: Env, name: str) -> Any:
    """As `env.get_wrapper_attr`. Spaces are those of a single env, as in Gymnasium and SB3."""
    is_space = name in ("observation_space", "action_space")
    return env.get_wrapper_attr(f"single_{name}" if is_space else name)


def call(
    env: Env,
    name: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """As Gymnasium's `VectorEnv.call`: calls a method, or reads an attribute, of each env.

    Methods of layers are called once, for all envs. `action_masks` and `render` return a row each.
    """
    result = get_attr(env, name)
    if callable(result):
        result = result(*args, **kwargs)
    if isinstance(result, Tensor):
        result = result.numpy(force=True)
    return tuple(result) if name in ("action_masks", "render") else per_env(env, result)


def check_reset(owner: str, rows: NDArray[np.bool_]) -> None:
    """Raises before a step if a simulator resets rows itself, and their next episode is unknown."""
    if rows.any():
        must = "a reset must follow each episode that ends"
        got = f"a step of envs {np.flatnonzero(rows).tolist()}, which reset themselves"
        remedy = (
            "Let no transform clear terminated or truncated, and call reset(mask=...) after "
            "step_without_reset"
        )
        raise RuntimeError(refusal(owner, must, got, remedy))


def check_tuple(
    owner: str,
    call: str,
    names: Sequence[str],
    result: Any,
    describe: Callable[[Any], str],
) -> None:
    """Raises a TypeError unless a call returned a tuple with these names, the last one a dict."""
    is_tuple = isinstance(result, tuple | list) and len(result) == len(names)
    if not is_tuple or not isinstance(result[-1], dict):
        must = f"{call} must return ({', '.join(names)}) with a dict as info"
        raise TypeError(refusal(owner, must, describe(result)))
