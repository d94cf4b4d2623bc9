"""to_sb3: a torchwrap env as a Stable-Baselines3 `VecEnv`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import (
    VecEnvIndices,
    VecEnvObs,
    VecEnvStepReturn,
    VecEnvWrapper,
)
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap.env import Env
from torchwrap.interop import _checks
from torchwrap.transforms import NormalizeReward, RecordEpisodeStatistics, RewardTransform


def to_sb3(env: Env) -> SB3VecEnv | SB3VecNormalize:
    """Makes a torchwrap env a Stable-Baselines3 `VecEnv`, for its algorithms, `VecEnv` wrappers and `evaluate_policy`.

    `step` returns NumPy arrays: observations `(num_envs, *shape)` (a dict of them for a `Dict` space), rewards `(num_envs,)`
    float32, dones `(num_envs,)` bool, and infos. On the CPU they share memory with tensors that no later step changes; from
    another device they are copied. Actions are copied. The info of a live env is empty. The info of a finished env holds
    `terminal_observation`, `TimeLimit.truncated`, the env's own info, numbers as Python scalars, and, if the env has
    `RecordEpisodeStatistics`, `episode` with the return `r`, the length `l` and the time `t`; `Monitor` and `VecMonitor` are
    then not needed, but for `info_keywords`.

    For an env with a `state_dict`, such as running statistics, the result is a `VecNormalize` to SB3: `venv.save`,
    `VecNormalize.load(path, to_sb3(env))` and SB3's callbacks save, load and copy what the env has learned, and
    `venv.training = False` is `env.eval()`. The env is `venv.unwrapped.env`. `seed(seed)` takes effect in the next `reset()`.
    `get_attr`, `set_attr` and `env_method` reach what `env.get_wrapper_attr` does; what belongs to the whole batch is read and
    called once, and each index gets the result. `HerReplayBuffer` calls `compute_reward(achieved_goal, desired_goal, info)` of
    a Gymnasium env or of the functions of a `FunctionalEnv`; no transform may change goals or rewards.

    Args:
        env: its observations and actions are those that SB3 can hold: no `Tuple` or nested `Dict`, no unbounded actions, one
            dimension of `MultiDiscrete`, and `Discrete` and `MultiDiscrete` from 0 on. The result owns it from now on.

    >>> from torchwrap.testing import ScriptedEnv
    >>> venv = to_sb3(ScriptedEnv(2, (1,), episode_lengths=(1, 2), ending="truncated"))
    >>> _ = venv.reset()
    >>> observations, rewards, dones, infos = venv.step(np.zeros((2, 6)))
    >>> observations.tolist(), infos[0]["terminal_observation"].tolist(), infos[0]["TimeLimit.truncated"]
    ([[0.0], [1001.0]], [1.0], True)
    """
    venv = SB3VecEnv(env)
    return SB3VecNormalize(venv) if env.state_dict() else venv


class SB3VecEnv(VecEnv):
    """A torchwrap env as a `VecEnv`; made by `to_sb3`."""

    def __init__(self, env: Env) -> None:
        self.env = _checks.env("to_sb3", env)
        _check_spaces(env.single_observation_space, env.single_action_space)
        self._recorder = next(iter(RecordEpisodeStatistics.of(env)), None)
        self._start = time.time()
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self.metadata = env.metadata

    def reset(self) -> VecEnvObs:
        if any(options != self._options[0] for options in self._options):
            raise ValueError(
                "to_sb3 needs the same reset options for every env, but got different ones."
            )
        td = self.env.reset(seed=self._seeds[0], options=self._options[0] or None)
        self._reset_seeds()
        self._reset_options()
        return _arrays(td["observation"])

    def step_async(self, actions: ArrayLike) -> None:
        dtype = spaces.dtype(self.env.single_action_space)
        self._action = torch.tensor(np.asarray(actions), dtype=dtype, device=self.env.device)

    def step_wait(self) -> VecEnvStepReturn:
        transition, td = self.env.step(self._action)
        successor = transition["next"]
        dones = _arrays(successor["done"]).reshape(-1)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if dones.any():
            self._finish(infos, dones.nonzero()[0], successor)
        # SB3 adds the values of final observations to the reward, in place.
        return _arrays(td["observation"]), _arrays(successor["reward"]).reshape(-1), dones, infos

    def _finish(
        self, infos: list[dict[str, Any]], finished: NDArray[Any], successor: TensorDict
    ) -> None:
        ended = successor[torch.as_tensor(finished, device=self.env.device)]
        finals, own = _arrays(ended["observation"]), _arrays(ended.get("info", {}), scalars=True)
        truncated = (ended["truncated"] & ~ended["terminated"]).flatten().tolist()
        keys, short = self._recorder.keys if self._recorder else {}, {"return": "r", "length": "l"}
        episode = {
            short.get(name, name): ended[key].flatten().tolist() for name, key in keys.items()
        }
        for i, row in enumerate(finished):
            infos[row] = {
                **_row(own, i),
                "terminal_observation": _row(finals, i),
                "TimeLimit.truncated": truncated[i],
            }
            if episode:
                infos[row]["episode"] = {
                    **_row(episode, i),
                    "t": round(time.time() - self._start, 6),
                }

    def close(self) -> None:
        self.env.close()

    def get_images(self) -> Sequence[NDArray[Any]]:
        return self.env.render()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        own = attr_name in ("observation_space", "action_space")  # of a single env, as in SB3
        return self._repeat(
            getattr(self, attr_name) if own else self.env.get_wrapper_attr(attr_name), indices
        )

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        chosen = sorted(self._get_indices(indices))
        if chosen != list(range(self.num_envs)):
            raise ValueError(
                f"to_sb3 needs set_attr for all {self.num_envs} envs, which share it, but got indices {chosen}."
            )
        self.env.set_wrapper_attr(attr_name, value)

    def env_method(
        self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        if (
            method_name == "compute_reward"
        ):  # of HER, with goals from the observations that it has stored
            inner, outer = (
                spaces.children(each.single_observation_space) or {}
                for each in (self.env.unwrapped, self.env)
            )
            changed = [
                key for key in inner if key.endswith("_goal") and outer.get(key) is not inner[key]
            ]
            changed += [
                "reward"
                for part in self.env.modules()
                if isinstance(part, RewardTransform | NormalizeReward)
            ]
            if changed:
                needed = "to_sb3 needs goals and rewards that no transform changes for HER"
                raise ValueError(
                    f"{needed}, but transforms change {changed}: use VecNormalize, around to_sb3(env), instead."
                )
            func_env: Any = getattr(self.env.unwrapped, "func_env", None)
            if hasattr(
                func_env, method_name
            ):  # of a single env, like the other functions; infos of live envs are empty
                goals = [torch.as_tensor(goal, device=self.env.device) for goal in args[:2]]
                compute, broadcasts = (
                    func_env.compute_reward,
                    getattr(func_env, "broadcasts", False),
                )
                rewards = (compute if broadcasts else torch.vmap(compute, in_dims=(0, 0, None)))(
                    *goals, {}
                )
                return self._repeat(_arrays(rewards), indices)
        result = self.env.get_wrapper_attr(method_name)(*args, **kwargs)
        return self._repeat(_arrays(result) if isinstance(result, Tensor) else result, indices)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        # RecordEpisodeStatistics does what Monitor does: evaluate_policy then reads returns from infos.
        return self._repeat(
            self._recorder is not None and issubclass(wrapper_class, Monitor), indices
        )

    def _repeat(self, value: Any, indices: VecEnvIndices) -> list[Any]:
        # Of the envs of a simulator, `get_wrapper_attr` gives a tuple with one value for each.
        is_each = self.env.host_stepped and isinstance(value, tuple) and len(value) == self.num_envs
        return [value[i] if is_each else value for i in self._get_indices(indices)]


class SB3VecNormalize(VecNormalize):
    """A `VecEnv` of an env that learns, whose state SB3 saves, loads and copies like a `VecNormalize`."""

    def _refuse(self, value: bool) -> None:
        remedy = (
            "for raw returns in evaluate_policy, put RecordEpisodeStatistics below NormalizeReward"
        )
        raise AttributeError(
            f"norm_obs and norm_reward cannot be set, because the transforms of the env normalize: {remedy}."
        )

    norm_obs = norm_reward = property(
        lambda self: False, _refuse
    )  # nothing comes on top of the transforms
    training = property(
        lambda self: self._learning.training, lambda self, mode: self._learning.train(mode)
    )
    # `sync_envs_normalization` copies it.
    ret_rms = property(
        lambda self: self._learning.state_dict(),
        lambda self, state: self._learning.load_state_dict(state),
    )

    def __init__(self, venv: VecEnv) -> None:
        base = venv.unwrapped
        if not isinstance(base, SB3VecEnv):
            raise TypeError(
                f"VecNormalize.load needs a venv from to_sb3, like the one that was saved, but got {venv}."
            )
        self._learning = base.env
        VecEnvWrapper.__init__(self, venv.venv if isinstance(venv, SB3VecNormalize) else venv)

    def reset(self) -> Any:
        self.old_obs: Any = self.venv.reset()
        return self.old_obs

    def step_wait(self) -> VecEnvStepReturn:
        self.old_obs, self.old_reward, dones, infos = self.venv.step_wait()
        return self.old_obs, self.old_reward, dones, infos

    def __getstate__(self) -> dict[str, Any]:
        learned = {name: value.cpu() for name, value in self.ret_rms.items()}
        return {"learned": learned, "norm_obs_keys": None}  # VecNormalize reads the second one

    def set_venv(self, venv: VecEnv) -> None:
        SB3VecNormalize.__init__(self, venv)
        self.ret_rms = vars(self).pop("learned")


def _arrays(value: Any, scalars: bool = False) -> Any:
    if isinstance(value, Tensor):
        array = value.numpy(force=True)
        return array.ravel().tolist() if scalars and array.size == len(array) else array  # Python's
    return {key: _arrays(part, scalars) for key, part in value.items()}


def _row(arrays: Any, i: int) -> Any:
    return (
        {key: _row(part, i) for key, part in arrays.items()}
        if isinstance(arrays, dict)
        else arrays[i]
    )


def _check_spaces(observations: Space[Any], actions: Space[Any]) -> None:
    if isinstance(observations, Tuple) or any(
        len(path) > 1 for path, _ in spaces.leaves(observations)
    ):
        remedy = "put transforms.FlattenObservation on the env"
        raise ValueError(
            f"to_sb3 needs observations without a Tuple or nested Dict, but got {observations}: {remedy}."
        )
    if not isinstance(actions, Box | Discrete | MultiDiscrete | MultiBinary):
        raise ValueError(
            f"to_sb3 needs actions in a Box, Discrete, MultiDiscrete or MultiBinary space, but got {actions}."
        )
    if isinstance(actions, Box) and not np.isfinite([actions.low, actions.high]).all():
        remedy = "leave out ClipAction, because SB3 clips, or put transforms.TransformAction(func, action_space) on the env"
        raise ValueError(f"to_sb3 needs actions with finite bounds, but got {actions}: {remedy}.")
    if isinstance(actions, MultiBinary) and len(actions.shape) != 1:
        raise ValueError(f"to_sb3 needs MultiBinary actions with one dimension, but got {actions}.")
    for what, space in (
        *(("observation", leaf) for _, leaf in spaces.leaves(observations)),
        ("action", actions),
    ):
        if isinstance(space, MultiDiscrete) and len(space.shape) != 1:
            raise ValueError(
                f"to_sb3 needs MultiDiscrete {what}s with one dimension, but got {space}."
            )
        _checks.starts_at_zero("to_sb3", what, space)
