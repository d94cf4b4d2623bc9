"""torchwrap envs as Gymnasium's vector envs: `to_gymnasium`."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap.env import Env
from torchwrap.interop import _simulator, _trainers
from torchwrap.interop._engines import autoreset_mode_of
from torchwrap.interop._infos import Info, Mask

Result = tuple[Any, NDArray[np.float64], Mask, Mask, Info]
"""Observations, rewards, terminations, truncations, infos."""


def to_gymnasium(
    env: Env, *, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP
) -> TorchwrapVectorEnv:
    """Exports a torchwrap env as a `gymnasium.vector.VectorEnv`, with NumPy arrays.

    Results are as from `SyncVectorEnv`; no later step changes the arrays. Infos hold the entries of
    the env's `info_keys` for every env, zeros where it has none. If the env has
    `RecordEpisodeStatistics`, the infos of a step in which episodes end have `episode` with `r`,
    `l` and `t`, and so does `final_info`.

    Args:
        env: the env. The result owns it from now on, and its `close()` closes it.
        autoreset_mode: `SAME_STEP`, in which `infos["final_obs"]` holds the final observations and
            `infos["final_info"]` the infos of the finished envs, or `DISABLED`, in which
            `reset(options={"reset_mask": mask})` resets them.

    >>> from torchwrap.testing import ScriptedEnv
    >>> envs = to_gymnasium(ScriptedEnv(2, (1,), episode_lengths=(1, 2)))
    >>> observations, infos = envs.reset(seed=0)
    >>> observations, *_, infos = envs.step(envs.action_space.sample())
    >>> observations.tolist(), infos["final_obs"].tolist()
    ([[0.0], [1001.0]], [array([1.], dtype=float32), None])
    """
    return TorchwrapVectorEnv(env, autoreset_mode)


class TorchwrapVectorEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """A torchwrap env as a Gymnasium vector env; made by `to_gymnasium`."""

    def __init__(self, env: Env, autoreset_mode: AutoresetMode | str) -> None:
        self.env = _trainers.require_env("to_gymnasium", env)
        mode = autoreset_mode_of(autoreset_mode)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
            must = "autoreset_mode must be SAME_STEP or DISABLED"
            raise ValueError(refusal("to_gymnasium", must, f"{autoreset_mode!r}"))
        self.metadata = {**env.metadata, "autoreset_mode": mode}
        self.spec = env.spec
        self.render_mode = env.render_mode
        self.num_envs = env.num_envs
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.max_episode_steps = env.signature.max_episode_steps  # without a spec, too
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._recorders = _trainers.recorders("to_gymnasium", env)
        self._start_times = np.full(self.num_envs, time.perf_counter())
        self._to_reset = np.zeros(self.num_envs, np.bool_)  # finished envs, in DISABLED

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Any, Info]:
        mask = np.ones(self.num_envs, np.bool_)
        rows = None
        if isinstance(options, dict):
            options = dict(options)  # Gymnasium's wrappers read the mask from theirs after this
            if "reset_mask" in options:
                mask = np.asarray(options.pop("reset_mask"))
                rows = torch.as_tensor(mask, device=self.env.device)
        td = self.env.reset(seed, rows, options)
        super().reset(seed=None if seed is None else int(seed))
        self._start_times[mask] = time.perf_counter()
        self._to_reset[mask] = False
        return self._observation(td), _batch_infos(td.get("info", {}), mask)

    def step(self, actions: Any) -> Result:
        if self._to_reset.any():
            indices = np.flatnonzero(self._to_reset).tolist()
            fault = f"step() before a reset of envs {indices}, whose episodes have ended"
            remedy = 'Call reset(options={"reset_mask": terminations | truncations})'
            raise RuntimeError(refusal(f"{self}", fault, remedy=remedy))
        step = self.env.step if self._same_step else self.env.step_without_reset
        transition, td = step(self._to_tensors(actions))
        successor = transition["next"]
        reward = _to_array(successor["reward"]).astype(np.float64)
        terminated = _to_array(successor["terminated"])
        truncated = _to_array(successor["truncated"])
        done = terminated | truncated
        infos = self._infos(successor, done)
        if self._same_step:
            for name, values in _batch_infos(td.get("info", {}), done).items():
                batch: Any = infos.setdefault(name, values)
                batch[done] = values[done]
        else:
            self._to_reset = done
        self._start_times[done] = time.perf_counter()
        return self._observation(td), reward, terminated, truncated, infos

    def _observation(self, td: TensorDict) -> Any:
        return spaces.to_numpy(self.single_observation_space, td["observation"])

    def _to_tensors(self, actions: Any) -> spaces.Value:
        for path, space in spaces.leaves(self.single_action_space):
            dtype = np.asarray(spaces.entry(actions, path)).dtype
            is_number = isinstance(space, gymnasium.spaces.Box) or dtype.kind in "iub"
            if not is_number:  # NumPy would cast them
                must = f"actions of {space} must be integers"
                raise ValueError(refusal(f"{self}.step", must, dtype))
        return spaces.from_numpy(self.single_action_space, actions, self.env.device)

    def _infos(self, successor: TensorDict, done: Mask) -> Info:
        info = dict(successor.get("info", {}).items())
        rows = ~done if self._same_step else np.ones_like(done)
        infos = _batch_infos(info, rows)
        if not done.any():
            return infos
        final: Info = self._statistics(successor, done)
        if self._same_step:
            # Gymnasium's wrapper of single envs has its statistics in final_info. Its vector
            # wrapper has them at the top.
            final_info = _batch_infos({**info, **final}, done)
            final_obs = self._final_observations(successor, done)
            final |= {"final_info": final_info, "final_obs": final_obs}
        for key, value in final.items():
            infos[key] = value
            infos[f"_{key}"] = done.copy()
        return infos

    def _final_observations(self, successor: TensorDict, done: Mask) -> NDArray[np.object_]:
        """The observations of the finished envs, and None for the others."""
        rows = torch.as_tensor(done, device=self.env.device)
        observation = successor["observation"][rows]
        final = spaces.to_numpy(self.single_observation_space, observation)
        each = iterate(self.observation_space, final)
        observations = np.full(self.num_envs, None)
        for row in np.flatnonzero(done):
            observations[row] = next(each)
        return observations

    def _statistics(self, successor: TensorDict, done: Mask) -> Info:
        """The statistics of each recorder: the return "r", length "l", seconds "t" and metrics."""
        seconds = np.round(time.perf_counter() - self._start_times, 6)
        statistics: Info = {}
        for stats_key, keys in self._recorders:
            if keys["r"] not in successor:  # dropped by a layer above
                continue
            episode = {name: _to_array(successor[key]) for name, key in keys.items()}
            episode["r"] = episode["r"].astype(np.float64)
            episode["t"] = seconds
            statistics[stats_key] = {
                name: np.where(done, column, 0) for name, column in episode.items()
            }
        return statistics

    def call(
        self,
        name: str,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        return _simulator.call(self.env, name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        self.env.set_wrapper_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        if hasattr(self, "env"):  # Gymnasium before 1.4 also closes what the constructor refused
            self.env.close()


def _to_array(column: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = column.squeeze(-1).numpy(force=True)
    return array


def _batch_infos(values: Info | TensorDict, rows: Mask) -> Info:
    """Infos as Gymnasium batches them: zeros outside of a mask, which is under `_name`."""
    infos: Info = {}
    if not rows.any():
        return infos
    for name, value in values.items():
        infos[f"_{name}"] = rows.copy()
        if isinstance(value, dict | TensorDict):
            infos[name] = _batch_infos(value, rows)
            continue
        if isinstance(value, torch.Tensor):
            value = value.numpy(force=True)
        array = np.array(value)
        array[~rows] = 0
        if array.shape[1:] == (1,):
            array = array[:, 0]
        infos[name] = array
    return infos
