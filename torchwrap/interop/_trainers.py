"""What adapters to trainers share: spaces, logs, statistics and levels in checkpoints."""

from __future__ import annotations

import warnings
from numbers import Number
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap.env import Env, check_is_env
from torchwrap.functional import FunctionalEnv
from torchwrap.interop.tensors import TensorEnv
from torchwrap.statistics import RunningMeanStd
from torchwrap.transforms.episode import RecordEpisodeStatistics

_CRITICS = {"policy": "critic", "actor": "critic", "obs": "states"}


def require_env(owner: str, value: Any) -> Env:
    """Returns `value` if it is an env without the state of a policy."""
    check_is_env(owner, value)
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
        # Asked for each time, because a simulator may replace its tensors.
        function = base.functions["levels"] if isinstance(base, TensorEnv) else None
        levels = {} if function is None else function()
        if not isinstance(levels, dict):
            must = "levels must return a dict of tensors by name"
            raise TypeError(refusal("from_functions", must, type(levels).__name__))
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
