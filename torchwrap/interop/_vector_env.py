"""TorchwrapVectorEnv: a torchwrap env as a Gymnasium vector env. `torchwrap.interop.gymnasium` exports `to_gymnasium`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap.env import Env
from torchwrap.interop import _checks
from torchwrap.transforms.episode import RecordEpisodeStatistics

Mask = NDArray[np.bool_]


def to_gymnasium(env: Env, *, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP) -> TorchwrapVectorEnv:
    """Exports a torchwrap env as a `gymnasium.vector.VectorEnv`, which takes and returns NumPy arrays.

    Rewards are float64 `(num_envs,)`, terminations and truncations bool `(num_envs,)`, observations batched as in
    `SyncVectorEnv`. All arrays are copies: no later step changes them. Infos have the structure of `SyncVectorEnv`'s, with
    `(num_envs,)` for a number per env; those of a reset are empty. If the env has `RecordEpisodeStatistics`, the infos of a
    step in which episodes end contain `episode` with `r`, `l` and `t`, as with Gymnasium's vector wrapper of that name, and
    `final_info` contains it, as with the single one in a `SyncVectorEnv`. Gymnasium's own vector wrappers of observations
    need `DISABLED`; torchwrap's transforms below the export work in both modes.

    Args:
        env: the env. The result owns it from now on.
        autoreset_mode: `SAME_STEP`, in which `infos["final_obs"]` holds the final observations and `infos["final_info"]` the
            infos of the finished envs, or `DISABLED`, in which `reset(options={"reset_mask": mask})` resets them.

    Returns:
        The vector env. Its `close()` closes `env`.

    Raises:
        TypeError: if `env` is no torchwrap env.
        ValueError: for another mode.

    >>> from torchwrap.testing import ScriptedEnv
    >>> envs = to_gymnasium(ScriptedEnv(2, (1,), episode_lengths=(1, 2)))
    >>> observations, infos = envs.reset(seed=0)
    >>> observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
    >>> observations.tolist(), infos["final_obs"].tolist()
    ([[0.0], [1001.0]], [array([1.], dtype=float32), None])
    """
    return TorchwrapVectorEnv(env, autoreset_mode)


class TorchwrapVectorEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """A torchwrap env as a Gymnasium vector env; made by `to_gymnasium`."""

    def __init__(self, env: Env, autoreset_mode: AutoresetMode | str) -> None:
        self.env = _checks.env("to_gymnasium", env)
        modes = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
        mode = next((mode for mode in modes if autoreset_mode in (mode, mode.value)), None)
        if mode is None:
            remedy = ""
            if autoreset_mode in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value):
                remedy = (
                    ": in NEXT_STEP, the step after the end of an episode ignores its action and is no transition. Use "
                    'SAME_STEP, and read final observations from infos["final_obs"]'
                )
            raise ValueError(
                f"to_gymnasium needs autoreset_mode AutoresetMode.SAME_STEP or DISABLED, but got {autoreset_mode!r}{remedy}."
            )
        self.metadata = {**env.metadata, "autoreset_mode": mode}
        self.spec, self.render_mode, self.num_envs = env.spec, env.render_mode, env.num_envs
        self.single_observation_space, self.observation_space = env.single_observation_space, env.observation_space
        self.single_action_space, self.action_space = env.single_action_space, env.action_space
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._stats_keys = list(dict.fromkeys(record.stats_key for record in RecordEpisodeStatistics.of(env)))
        self._start_times = np.full(self.num_envs, time.perf_counter())
        self._to_reset = np.zeros(self.num_envs, np.bool_)  # finished envs, if they do not reset themselves

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if isinstance(seed, list | tuple | np.ndarray):
            raise TypeError(
                f"{self}.reset needs one seed, an integer, but got {seed!r}: pass reset(seed=0), from which every env gets a "
                "random stream of its own."
            )
        mask = np.ones(self.num_envs, np.bool_)
        if isinstance(options, dict):
            options = dict(options)  # Gymnasium's wrappers read the mask from theirs after this call
            mask = self._mask(options.pop("reset_mask", mask))
        rows = None if mask.all() else torch.as_tensor(mask, device=self.env.device)
        td = self.env.reset(seed, rows, options)
        super().reset(seed=None if seed is None else int(seed))
        self._start_times[mask] = time.perf_counter()
        self._to_reset[mask] = False
        return spaces.to_numpy(self.single_observation_space, td["observation"]), {}

    def _mask(self, mask: Any) -> Mask:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,) or not mask.any():
            needed = f"options['reset_mask'] as an array ({self.num_envs},) of np.bool_ with at least one True"
            got = f"{mask.dtype} {mask!r}" if isinstance(mask, np.ndarray) else repr(mask)
            raise ValueError(f"{self}.reset needs {needed}, but got {got}.")
        return mask

    def step(self, actions: Any) -> tuple[Any, NDArray[np.float64], Mask, Mask, dict[str, Any]]:
        if self._to_reset.any():
            raise RuntimeError(
                f"{self} needs a reset of envs {np.flatnonzero(self._to_reset).tolist()}, whose episodes have ended, before "
                'step(): in AutoresetMode.DISABLED, call reset(options={"reset_mask": terminations | truncations}).'
            )
        transition, td = (self.env.step if self._same_step else self.env.transition)(self._to_tensors(actions))
        successor = transition["next"]
        names = ("reward", "terminated", "truncated")
        reward, terminated, truncated = (successor[name].squeeze(-1).numpy(force=True) for name in names)
        done = terminated | truncated
        infos = self._infos(successor, done)
        if not self._same_step:
            self._to_reset = done
        self._start_times[done] = time.perf_counter()
        observation = spaces.to_numpy(self.single_observation_space, td["observation"])
        return observation, reward.astype(np.float64), terminated, truncated, infos

    def _to_tensors(self, actions: Any) -> spaces.Value:
        for path, space in spaces.leaves(self.single_action_space):
            part = actions
            try:
                for key in path:
                    part = part[int(key) if isinstance(part, tuple) else key]
                dtype = np.asarray(part).dtype
            except (IndexError, KeyError, TypeError, ValueError):
                raise ValueError(f"{self}.step needs actions of {self.action_space}, but got {actions!r}.") from None
            if not isinstance(space, Box) and dtype.kind not in "iub":
                raise ValueError(f"{self}.step needs integers as actions of {space}, but got {part!r} of dtype {dtype}.")
        return spaces.from_numpy(self.single_action_space, actions, self.env.device)

    def _infos(self, successor: TensorDict, done: Mask) -> dict[str, Any]:
        info = dict(successor.get("info", {}).items())
        if not done.any():
            return _batch_infos(info, ~done)
        infos, statistics = (
            _batch_infos(info, ~done if self._same_step else np.ones_like(done)),
            self._statistics(successor, done),
        )
        if self._same_step:
            infos["final_obs"], infos["_final_obs"] = np.full(self.num_envs, None), done.copy()
            ended = torch.as_tensor(done, device=self.env.device)
            final = spaces.to_numpy(self.single_observation_space, successor["observation"][ended])
            for row, observation in zip(np.flatnonzero(done), iterate(self.observation_space, final), strict=True):
                infos["final_obs"][row] = observation
            # Where Gymnasium's statistics of single envs are; those of its vector wrapper are at the top, as below.
            infos["final_info"], infos["_final_info"] = _batch_infos({**info, **statistics}, done), done.copy()
        for key, value in statistics.items():
            infos[key], infos[f"_{key}"] = value, done.copy()
        return infos

    def _statistics(self, successor: TensorDict, done: Mask) -> dict[str, dict[str, NDArray[Any]]]:
        seconds = np.where(done, np.round(time.perf_counter() - self._start_times, 6), 0)
        statistics = {}
        for key in self._stats_keys:
            names = (f"{key}_return", f"{key}_length")
            if names[0] in successor:  # a layer above may have dropped them
                total, length = (successor[name].squeeze(-1).numpy(force=True) for name in names)
                totals = np.where(done, total.astype(np.float64), 0), np.where(done, length, 0)
                statistics[key] = dict(zip("rlt", (*totals, seconds.copy()), strict=True))
        return statistics

    def render(self) -> tuple[Any, ...]:
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        if hasattr(self, "env"):  # Gymnasium before 1.4 also closes what the constructor has refused
            self.env.close()


def _batch_infos(values: dict[str, Any] | TensorDict, mask: Mask) -> dict[str, Any]:
    """Infos as Gymnasium batches them: zeros outside the mask, and the mask under the name with an underscore."""
    infos: dict[str, Any] = {}
    for name, value in values.items() if mask.any() else ():
        if isinstance(value, dict | TensorDict):
            infos[name] = _batch_infos(value, mask)
        else:
            array = np.array(value.numpy(force=True) if isinstance(value, torch.Tensor) else value)
            array[~mask] = 0
            infos[name] = array[:, 0] if array.shape[1:] == (1,) else array
        infos[f"_{name}"] = mask.copy()
    return infos
