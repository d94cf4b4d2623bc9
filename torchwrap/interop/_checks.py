"""The base of envs over a simulator, and checks that the adapters to other libraries share."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap.env import Env
from torchwrap.functional import FunctionalEnv
from torchwrap.statistics import RunningMeanStd
from torchwrap.transforms.episode import RecordEpisodeStatistics

_CRITICS = {"policy": "critic", "actor": "critic", "obs": "states"}
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


def require_env(owner: str, value: Any) -> Env:
    """Returns `value` if it is an env without the state of a policy."""
    if not isinstance(value, Env):
        remedy = "Make one with torchwrap.make or torchwrap.from_gymnasium"
        must = "env must be a torchwrap.Env"
        raise TypeError(refusal(owner, must, type(value).__name__, remedy))
    if value.signature.policy_state:
        must = "env must have no PolicyState, because trainers carry the state of policies"
        raise ValueError(refusal(owner, must, repr(value)))
    return value


def recorders(owner: str, env: Env) -> list[tuple[str, Any]]:
    """The `stats_key` of each recorder, innermost first, and its keys by Gymnasium's names."""
    found = []
    for recorder in RecordEpisodeStatistics.of(env):
        metrics = dict(recorder.keys)
        keys = {"r": metrics.pop("return"), "l": metrics.pop("length")}
        taken = sorted({"r", "l", "t"} & set(metrics))
        if taken:
            must = "metrics must have other names than r, l and t, which the trainer's info has"
            raise ValueError(refusal(owner, must, taken))
        found.append((recorder.stats_key, keys | metrics))
    return found


def load_statistics(
    owner: str,
    env: Env,
    key: str,
    state: dict[str, Any] | None,
    strict: bool = True,
) -> None:
    """Loads the entry `key` of a checkpoint into an env. Warns if the checkpoint lacks it."""
    if state is not None:
        env.load_state_dict(state, strict)
    elif env.state_dict():
        fault = f"the checkpoint has no {key!r}: the statistics of the env stay as they are"
        remedy = "Call env.load_state_dict() with those of the policy"
        warnings.warn(refusal(owner, fault, remedy=remedy), stacklevel=3)


class Params:
    """The `params` of functions, or the levels of a simulator, for a trainer's checkpoint.

    What is loaded waits until the env trains: an env that plays keeps its own.
    """

    def __init__(self, env: Env) -> None:
        self.env = env
        self.loaded: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        own = self._own()
        return {name: value.to("cpu", copy=True) for name, value in own.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.loaded = dict(state)

    def resume(self) -> None:
        """Sets what was loaded, if it is of as many envs."""
        if not self.env.training:
            return
        for name, value in self._own().items():
            loaded = self.loaded.get(name, value)
            if loaded.shape == value.shape:
                value.copy_(loaded)
        self.loaded = {}

    def _own(self) -> dict[str, Tensor]:
        base = self.env.unwrapped
        if isinstance(base, FunctionalEnv):
            return base.params
        levels = {}
        if isinstance(base, SimulatorEnv):
            for name, buffer in base.named_buffers(recurse=False):
                if not hasattr(type(base), name):  # else of running episodes
                    levels[name] = buffer
        return levels


def warn_untrained(owner: str, env: Env) -> None:
    """Warns about statistics in eval mode that have seen no more than the initial observations."""
    for name, module in env.named_modules():
        if isinstance(module, RunningMeanStd) and not module.training:
            module._warn_untrained(f"{owner}: {name}", env.num_envs)


def actor_and_critic(space: Space[Any]) -> dict[str, Space[Any]]:
    """The actor's and the critic's entry of a Dict observation, if it has both."""
    for actor, critic in _CRITICS.items():
        if isinstance(space, Dict) and {actor, critic} <= set(space):
            return {actor: space[actor], critic: space[critic]}
    return {}


def is_float_box(space: Any, *dims: int) -> bool:
    """Whether a space is a float32 Box whose number of dimensions is among `dims`."""
    has_shape = isinstance(space, Box) and len(space.shape) in dims
    return has_shape and space.dtype == np.float32


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


def starts_at_zero(owner: str, *parts: Space[Any]) -> None:
    """Raises a ValueError for discrete spaces that count from another number."""
    for part in parts:
        for _, leaf in spaces.leaves(part):
            if isinstance(leaf, Discrete | MultiDiscrete) and np.any(leaf.start):
                raise ValueError(refusal(owner, "observations and actions must start at 0", leaf))


def metric_keys(env: Env) -> list[str]:
    """The keys that all recorders of the env write."""
    return [key for recorder in RecordEpisodeStatistics.of(env) for key in recorder.keys.values()]


def logs(
    env: Env,
    metric_keys: list[str],
    successor: TensorDict,
) -> dict[str, Tensor]:
    """Numbers of a step for a trainer's logs, float32 `(n,)`.

    They are the entries of info with one number per env, nested ones as "a/b", the numbers that a
    simulator of `from_functions` has put into "episode" or "log" of its info, and the metrics of
    episodes that ended. If none has, they are absent: a trainer's mean of nothing would be NaN.
    """
    numbers = {}
    if "info" in successor.keys():
        for name, value in successor["info"].flatten_keys("/").items():
            if value.numel() == len(value):
                numbers[name] = value.flatten().float()
    info = getattr(env.unwrapped, "last_info", None) or {}
    log = info.get("episode", info.get("log"))
    if isinstance(log, dict):
        for name, value in log.items():
            if isinstance(value, Tensor | Number):
                number = torch.as_tensor(value, dtype=torch.float32)
                numbers[name] = number.flatten().clone()
    if metric_keys and successor["done"].any():  # which waits for the device
        done = successor["done"].squeeze(-1)
        for key in metric_keys:
            numbers[key] = successor[key][done, 0].float()
    return numbers


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
