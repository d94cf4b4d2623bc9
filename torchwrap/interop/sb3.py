"""to_sb3: a torchwrap env as a Stable-Baselines3 `VecEnv`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Tuple
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap.env import Env
from torchwrap.interop import _checks
from torchwrap.transforms import NormalizeReward, RewardTransform


def to_sb3(env: Env) -> SB3VecEnv | SB3LearningVecEnv:
    """Makes a torchwrap env a Stable-Baselines3 `VecEnv`, for algorithms and `evaluate_policy`.

    `step` returns NumPy arrays: observations `(num_envs, *shape)` (a dict of them for a `Dict`
    space), rewards `(num_envs,)` float32, dones `(num_envs,)` bool, and infos. On the CPU they
    share memory with tensors that no later step changes; from another device they are copied.
    Actions are copied. The info of a live env is empty. The info of a finished env holds
    `terminal_observation`, `TimeLimit.truncated`, every entry of the env's own info, numbers as
    Python scalars, and, if the env has `RecordEpisodeStatistics`, `episode` with the return `r`,
    the length `l` and the time `t`. `Monitor` and `VecMonitor` are then needed for `info_keywords`
    only.

    For an env with a `state_dict`, such as running statistics, or with `params`, the result holds a
    `VecNormalize`: `venv.save`, `VecNormalize.load(path, to_sb3(env))` and SB3's callbacks save,
    load and copy the `state_dict`, and `venv.training = False` is `env.eval()`. The file also holds
    the `params` of functions or a simulator's levels: the next reset in train mode sets them, if
    they are of as many envs. The env is `venv.unwrapped.env`.
    Formulas such as `normalize_obs` raise: use `deploy` for raw data. In the `VecNormalize` of an
    off-policy algorithm, `model.get_vec_normalize_env()`, they serve its replay buffer and change
    nothing.

    `seed(seed)` takes effect in the next `reset()`. `get_attr`, `set_attr` and `env_method` reach
    the same attributes as `env.get_wrapper_attr`. An attribute of a layer is read or called once,
    and each index gets the result, or its own row of the result of `action_masks()`, for
    MaskablePPO. The functions of a `FunctionalEnv` may have `action_masks(state)`, for a single
    env. `HerReplayBuffer` calls the env's `compute_reward(achieved_goal, desired_goal, info)` with
    NumPy batches; no transform may change goals or rewards.

    Args:
        env: its observations and actions are those that SB3 can hold: no `Tuple` or nested `Dict`,
            no unbounded actions, one dimension of `MultiDiscrete`, and `Discrete` and
            `MultiDiscrete` from 0 on. The result owns it from now on.

    >>> import numpy as np; from torchwrap.testing import ScriptedEnv
    >>> venv = to_sb3(ScriptedEnv(2, (1,), episode_lengths=(1, 2), ending="truncated"))
    >>> _ = venv.reset()
    >>> observations, rewards, dones, infos = venv.step(np.zeros((2, 6)))
    >>> observations.tolist(), infos[0]["terminal_observation"].tolist()
    ([[0.0], [1001.0]], [1.0])
    """
    venv = SB3VecEnv(env)
    learns = env.state_dict() or venv.params.state_dict()
    return SB3LearningVecEnv(SB3VecNormalize(venv)) if learns else venv


class SB3VecEnv(VecEnv):
    """A torchwrap env as a `VecEnv`; made by `to_sb3`."""

    def __init__(self, env: Env) -> None:
        self.env = _checks.require_env("to_sb3", env)
        _check_spaces(env.single_observation_space, env.single_action_space)
        self._recorder = next(iter(_checks.recorders("to_sb3", env)), None)
        self._start = time.time()
        self.params = _checks.Params(env)
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self.metadata = env.metadata

    def reset(self) -> VecEnvObs:
        # They are for this reset alone, even if the env refuses them.
        seed = self._seeds[0]
        options = self._options
        self._reset_seeds()
        self._reset_options()
        if any(other != options[0] for other in options):
            must = "the reset options of all envs must be equal"
            raise ValueError(refusal("to_sb3", must, options))
        self.params.resume()
        td = self.env.reset(seed=seed, options=options[0] or None)
        return _arrays(td["observation"])

    def step_async(self, actions: ArrayLike) -> None:
        self._action = spaces.from_numpy(self.env.single_action_space, actions, self.env.device)

    def step_wait(self) -> VecEnvStepReturn:
        transition, td = self.env.step(self._action)
        successor = transition["next"]
        # SB3 adds the values of final observations to the reward, in place.
        rewards = _arrays(successor["reward"]).reshape(-1)
        dones = _arrays(successor["done"]).reshape(-1)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        finished = dones.nonzero()[0]
        if len(finished):
            rows = successor[torch.as_tensor(finished, device=self.env.device)]
            columns = self._final_infos(rows)
            for i, row in enumerate(finished):
                infos[row] = _row(columns, i)
        return _arrays(td["observation"]), rewards, dones, infos

    def _final_infos(self, successor: TensorDict) -> dict[str, Any]:
        """The infos of finished envs, from their rows of the successor, with a list per number."""
        truncated = successor["truncated"] & ~successor["terminated"]
        infos = {
            **_arrays(successor.get("info", {}), scalars=True),
            "terminal_observation": _arrays(successor["observation"]),
            "TimeLimit.truncated": truncated.flatten().tolist(),
        }
        if self._recorder is not None:
            episode = {}
            for name, key in self._recorder.keys.items():
                name = {"return": "r", "length": "l"}.get(name, name)
                episode[name] = successor[key].flatten().tolist()
            seconds = round(time.time() - self._start, 6)
            infos["episode"] = {**episode, "t": [seconds] * len(successor)}
        return infos

    def close(self) -> None:
        self.env.close()

    def get_images(self) -> Sequence[NDArray[Any]]:
        return self.env.render()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        value = _checks.get_attr(self.env, attr_name)
        return self._select(_checks.per_env(self.env, value), indices)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        rows = set(self._get_indices(indices))
        is_some = len(rows) < self.num_envs
        if not _checks.is_shared(self.env, attr_name):
            values = self.get_attr(attr_name) if is_some else [None] * self.num_envs
            for row in rows:
                values[row] = value  # To SB3, a list is one value.
            value = values
        elif is_some:
            must = f"indices of set_attr must be all {self.num_envs} envs, which share {attr_name}"
            raise ValueError(refusal("to_sb3", must, sorted(rows)))
        self.env.set_wrapper_attr(attr_name, value)

    def env_method(
        self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        if method_name == "compute_reward":
            self._check_goals()
        method = self.env.get_wrapper_attr(method_name)
        if isinstance(method, _checks.MethodOfEach):
            method.rows = list(self._get_indices(indices))
            return list(method(*args, **kwargs))
        results = _checks.call(self.env, method_name, *args, **kwargs)
        return self._select(results, indices)

    def _check_goals(self) -> None:
        """Raises if HER would compute rewards from goals that the env does not know."""
        base: Any = self.env.unwrapped
        goals = spaces.children(base.single_observation_space) or {}
        given = spaces.children(self.observation_space) or {}
        changed = []
        for key, goal in goals.items():
            if key.endswith("_goal") and given.get(key) != goal:
                changed.append(key)
        for module in self.env.modules():
            if isinstance(module, RewardTransform | NormalizeReward):
                changed.append("reward")
        if changed:
            raise ValueError(
                refusal(
                    "to_sb3",
                    "transforms must change no goals and rewards for HER",
                    f"changes of {changed}",
                    "Use VecNormalize, around to_sb3(env), instead",
                )
            )

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        # RecordEpisodeStatistics does what Monitor does: evaluate_policy reads returns from infos.
        records = self._recorder is not None and issubclass(wrapper_class, Monitor)
        return self._select([records] * self.num_envs, indices)

    def _select(self, values: Sequence[Any], indices: VecEnvIndices) -> list[Any]:
        return [values[i] for i in self._get_indices(indices)]


class SB3VecNormalize(VecNormalize):
    """The mode and the `state_dict` of an env, for SB3's algorithms and callbacks.

    These look for a `VecNormalize`. Its formulas are for replay buffers alone, which hold
    observations and rewards as the env returned them, and ask for the original rewards first.
    """

    has_buffer = False

    def _refuse(self, value: bool) -> None:
        must = "norm_obs and norm_reward cannot be set, because the env's transforms normalize"
        remedy = (
            "For raw returns in evaluate_policy, put RecordEpisodeStatistics below NormalizeReward"
        )
        raise AttributeError(refusal("to_sb3", must, None, remedy))

    norm_obs = norm_reward = property(lambda self: False, _refuse)
    training = property(
        lambda self: self.venv.env.training,
        lambda self, mode: self.venv.env.train(mode),
    )
    # `sync_envs_normalization` copies it to an env for evaluation.
    ret_rms = property(
        lambda self: self.venv.env.state_dict(),
        lambda self, state: self.venv.env.load_state_dict(state),
    )

    def __init__(self, venv: SB3VecEnv) -> None:
        VecEnvWrapper.__init__(self, venv)

    def reset(self) -> Any:
        self.old_obs: Any = self.venv.reset()
        return self.old_obs

    def step_wait(self) -> VecEnvStepReturn:
        self.old_obs, self.old_reward, dones, infos = self.venv.step_wait()
        return self.old_obs, self.old_reward, dones, infos

    def get_original_reward(self) -> Any:
        self.has_buffer = True
        return super().get_original_reward()

    def _unchanged(self, values: Any) -> Any:
        return values if self.has_buffer else _refuse_formulas()

    normalize_obs = unnormalize_obs = _unchanged  # type: ignore[assignment]
    normalize_reward = unnormalize_reward = _unchanged  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        learned = {name: value.cpu() for name, value in self.ret_rms.items()}
        venv: Any = self.venv
        return _load, (learned, venv.params.state_dict())


class SB3LearningVecEnv(VecEnvWrapper):
    """A `VecEnv` of an env that learns; made by `to_sb3` and `VecNormalize.load`.

    It has the attributes and methods of the `SB3VecNormalize` in it, but not the formulas.
    """

    learned: dict[str, Tensor]
    """The saved `state_dict`, which `VecNormalize.load` puts into an env."""

    params: dict[str, Tensor]
    """The saved `params`, which the env's next reset in train mode sets."""

    def reset(self) -> VecEnvObs:
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        return self.venv.step_wait()

    def getattr_recursive(self, name: str) -> Any:
        # SB3 calls it for names that this class lacks, also from wrappers around it.
        is_formula = name.startswith(("normalize_", "unnormalize_", "get_original_"))
        return _refuse_formulas() if is_formula else super().getattr_recursive(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("training", "norm_obs", "norm_reward"):
            setattr(self.venv, name, value)
        else:
            super().__setattr__(name, value)

    def set_venv(self, venv: VecEnv) -> None:
        base = venv.unwrapped
        if not isinstance(base, SB3VecEnv):
            must = "venv must be from to_sb3, as the saved one"
            raise TypeError(refusal("VecNormalize.load", must, venv))
        base.env.load_state_dict(self.learned)
        base.params.load_state_dict(self.params)
        # `sync_envs_normalization` needs as many wrappers as an env for evaluation has.
        super().__init__(venv.venv if isinstance(venv, SB3LearningVecEnv) else venv)


def _load(learned: dict[str, Tensor], params: dict[str, Tensor]) -> SB3LearningVecEnv:
    venv = SB3LearningVecEnv.__new__(SB3LearningVecEnv)
    venv.learned = learned
    venv.params = params
    return venv


def _refuse_formulas() -> NoReturn:
    fault = "has no formulas of VecNormalize, because the env's transforms normalize"
    remedy = (
        "torchwrap.deploy(env, policy) acts on raw observations, and "
        "RecordEpisodeStatistics below NormalizeReward records raw returns"
    )
    raise NotImplementedError(refusal("to_sb3", fault, remedy=remedy))


def _arrays(value: Any, scalars: bool = False) -> Any:
    """A value as NumPy arrays. `scalars` makes lists of numbers where there is one per row."""
    if not isinstance(value, Tensor):
        return {key: _arrays(part, scalars) for key, part in value.items()}
    array = value.numpy(force=True)
    return array.ravel().tolist() if scalars and array.size == len(array) else array


def _row(columns: Any, i: int) -> Any:
    if isinstance(columns, dict):
        return {key: _row(column, i) for key, column in columns.items()}
    return columns[i]


def _check_spaces(observations: Space[Any], actions: Space[Any]) -> None:
    leaves = dict(spaces.leaves(observations))
    if isinstance(observations, Tuple) or any(len(path) > 1 for path in leaves):
        raise ValueError(
            refusal(
                "to_sb3",
                "observations must not be a Tuple or a nested Dict",
                observations,
                "Put transforms.FlattenObservation on the env",
            )
        )
    is_bounded = not isinstance(actions, Box) or actions.is_bounded()
    if not is_bounded or not isinstance(actions, Box | Discrete | MultiDiscrete | MultiBinary):
        raise ValueError(
            refusal(
                "to_sb3",
                "actions must be a bounded Box, Discrete, MultiDiscrete or MultiBinary",
                actions,
                "Leave out ClipAction, because SB3 clips, or put TransformAction on the env",
            )
        )
    vectors: list[Any] = [leaf for leaf in leaves.values() if isinstance(leaf, MultiDiscrete)]
    if isinstance(actions, MultiBinary | MultiDiscrete):
        vectors.append(actions)
    for space in vectors:
        if len(space.shape) != 1:
            raise ValueError(
                refusal(
                    "to_sb3",
                    "MultiDiscrete spaces and MultiBinary actions must have one dimension",
                    space,
                )
            )
    _checks.starts_at_zero("to_sb3", "observation", observations)
    _checks.starts_at_zero("to_sb3", "action", actions)
