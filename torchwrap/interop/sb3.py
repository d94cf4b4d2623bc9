"""to_sb3: a torchwrap env as a Stable-Baselines3 `VecEnv`."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Tuple
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from torchwrap import spaces
from torchwrap.env import Env
from torchwrap.interop import _checks
from torchwrap.transforms import RecordEpisodeStatistics
from torchwrap.wrappers import Wrapper


def to_sb3(env: Env) -> SB3VecEnv:
    """Makes a torchwrap env a Stable-Baselines3 `VecEnv`, for its algorithms, `VecEnv` wrappers and `evaluate_policy`.

    `step` returns NumPy arrays: observations `(num_envs, *shape)` (a dict of them for a `Dict` space), rewards `(num_envs,)`
    float32, dones `(num_envs,)` bool, and infos. On the CPU they share memory with tensors that no later step changes; from
    another device they are copied. Actions are copied. Live envs share one empty info. That of a finished env holds
    `terminal_observation`, `TimeLimit.truncated`, the env's own info, and, if the env has `RecordEpisodeStatistics`,
    `episode` with the return `r`, the length `l` and the time `t`; `Monitor` and `VecMonitor` are then not needed.

    `seed(seed)` takes effect in the next `reset()`, as in SB3, which for torchwrap means `env.reset(seed)`. `get_attr` and
    `env_method` read and call the whole batch once, and return the result for each index.

    Args:
        env: the env. The result owns it from now on; its transforms learn unless `env.eval()` was called.

    Returns:
        The `VecEnv`.

    Raises:
        TypeError: if `env` is no torchwrap env.
        ValueError: for spaces that SB3 cannot hold: `Tuple`, nested `Dict`, unbounded actions, several dimensions of
            `MultiDiscrete`, and `Discrete` or `MultiDiscrete` that do not start at 0.

    >>> from torchwrap.testing import ScriptedEnv
    >>> venv = to_sb3(ScriptedEnv(2, (1,), episode_lengths=(1, 2), ending="truncated"))
    >>> _ = venv.reset()
    >>> observations, rewards, dones, infos = venv.step(np.zeros((2, 6)))
    >>> observations.tolist(), dones.tolist()
    ([[0.0], [1001.0]], [True, False])
    >>> infos[0]["terminal_observation"].tolist(), infos[0]["TimeLimit.truncated"]
    ([1.0], True)
    """
    return SB3VecEnv(env)


class SB3VecEnv(VecEnv):
    """A torchwrap env as a `VecEnv`; made by `to_sb3`."""

    def __init__(self, env: Env) -> None:
        self.env = _checks.env("to_sb3", env)
        _check_observations(env.single_observation_space)
        _check_actions(env.single_action_space)
        self._action_dtype = spaces.dtype(env.single_action_space)
        self._recorder = next(iter(RecordEpisodeStatistics.of(env)), None)
        self._live: dict[str, Any] = {}
        self._start = time.time()
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self.metadata = env.metadata

    def reset(self) -> Any:
        if any(options != self._options[0] for options in self._options):
            raise ValueError("to_sb3 needs the same reset options for every env, but got different ones.")
        td = self.env.reset(seed=self._seeds[0], options=self._options[0] or None)
        self._reset_seeds()
        self._reset_options()
        return _arrays(td["observation"])

    def step_async(self, actions: Any) -> None:
        self._action = torch.tensor(np.asarray(actions), dtype=self._action_dtype, device=self.env.device)

    def step_wait(self) -> Any:
        transition, td = self.env.step(self._action)
        successor = dict(transition["next"].items())
        dones = _arrays(successor["done"]).reshape(-1)
        infos = [self._live] * self.num_envs
        finished = dones.nonzero()[0]
        if finished.size:
            self._finish(infos, finished, successor)
        # Nothing else holds the memory of the reward, so that SB3 can add the values of final observations to it.
        return _arrays(td["observation"]), _arrays(successor["reward"]).reshape(-1), dones, infos

    def _finish(self, infos: list[dict[str, Any]], finished: Any, successor: dict[str, Any]) -> None:
        index, rows = torch.as_tensor(finished, device=self.env.device), finished.tolist()
        finals = _arrays(successor["observation"][index])
        own = _arrays(successor["info"][index]) if "info" in successor else {}
        truncated = (_arrays(successor["truncated"]) & ~_arrays(successor["terminated"])).reshape(-1)[finished].tolist()
        for i, row in enumerate(rows):
            infos[row] = {**_row(own, i), "terminal_observation": _row(finals, i), "TimeLimit.truncated": truncated[i]}
        recorder = self._recorder
        if recorder is not None:
            seconds = round(time.time() - self._start, 6)
            totals = (successor[key][index].flatten().tolist() for key in (recorder.return_key, recorder.length_key))
            for row, total, length in zip(rows, *totals, strict=True):
                infos[row]["episode"] = {"r": total, "l": length, "t": seconds}

    def close(self) -> None:
        self.env.close()

    def get_images(self) -> Any:
        return self.env.render()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        own = attr_name in ("observation_space", "action_space")  # those of a single env, as in SB3
        return [getattr(self, attr_name) if own else self._find(attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        chosen = sorted(self._get_indices(indices))
        if chosen != list(range(self.num_envs)):
            raise ValueError(f"to_sb3 needs set_attr for all {self.num_envs} envs, which share one, but got indices {chosen}.")
        if isinstance(self.env, Wrapper):
            self.env.set_wrapper_attr(attr_name, value)
        else:
            setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        return [self._find(method_name)(*method_args, **method_kwargs)] * len(list(self._get_indices(indices)))

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: Any = None) -> list[bool]:
        # RecordEpisodeStatistics does what Monitor does: evaluate_policy then reads returns from infos.
        is_monitored = self._recorder is not None and issubclass(wrapper_class, Monitor)
        return [is_monitored] * len(list(self._get_indices(indices)))

    def _find(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name) if isinstance(self.env, Wrapper) else getattr(self.env, name)


def _arrays(value: spaces.Value) -> Any:
    if isinstance(value, Tensor):
        return value.numpy(force=True)
    return {key: _arrays(part) for key, part in value.items()}


def _row(arrays: Any, i: int) -> Any:
    return {key: _row(part, i) for key, part in arrays.items()} if isinstance(arrays, dict) else arrays[i]


def _check_observations(space: Space[Any]) -> None:
    if isinstance(space, Tuple):
        remedy = "put transforms.FlattenObservation on the env"
        raise ValueError(f"to_sb3 needs observations without a Tuple, but got {space}: {remedy}.")
    _checks.flat_dict("to_sb3", space)
    for _, leaf in spaces.leaves(space):
        _check_numbering("observations", leaf)


def _check_actions(space: Space[Any]) -> None:
    if not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        raise ValueError(f"to_sb3 needs actions in a Box, Discrete, MultiDiscrete or MultiBinary space, but got {space}.")
    if isinstance(space, Box) and not np.isfinite([space.low, space.high]).all():
        remedy = "put transforms.TransformAction(func, action_space) on the env"
        raise ValueError(f"to_sb3 needs actions with finite bounds, but got {space}: {remedy}.")
    if isinstance(space, MultiBinary) and len(space.shape) != 1:
        raise ValueError(f"to_sb3 needs MultiBinary actions with one dimension, but got {space}.")
    _check_numbering("actions", space)


def _check_numbering(what: str, space: Space[Any]) -> None:
    if isinstance(space, MultiDiscrete) and len(space.shape) != 1:
        raise ValueError(f"to_sb3 needs MultiDiscrete {what} with one dimension, but got {space}.")
    if isinstance(space, Discrete | MultiDiscrete) and np.any(space.start):
        remedy = f"put transforms.Transform{what[:-1].title()}(func, {what[:-1]}_space) on the env"
        raise ValueError(f"to_sb3 needs {what} that start at 0, but got {space}: {remedy}.")
