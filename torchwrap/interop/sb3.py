"""to_sb3: a torchwrap env as a Stable-Baselines3 `VecEnv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap.env import Env, take
from torchwrap.interop import _simulator, _trainers
from torchwrap.transforms import ObservationTransform, RewardTransform


def to_sb3(env: Env) -> SB3VecEnv | SB3VecNormalize:
    """Makes a torchwrap env a Stable-Baselines3 `VecEnv`, for algorithms and `evaluate_policy`.

    `step` returns NumPy arrays: observations `(num_envs, *shape)` (a dict of them for a `Dict`
    space), rewards `(num_envs,)` float32, dones `(num_envs,)` bool, and infos. On the CPU they
    share memory with tensors that no later step changes; from another device they are copied.
    Actions are copied. The info of a live env is empty. The info of a finished env holds
    `terminal_observation`, `TimeLimit.truncated`, every entry of the env's own info, numbers as
    Python scalars, and, if the env has `RecordEpisodeStatistics`, `episode` with the return `r`
    and the length `l`. `Monitor` and `VecMonitor` are then needed for `info_keywords` only.

    For an env with a `state_dict`, such as running statistics, or with `params`, the result is a
    `VecNormalize`: `venv.save`, `VecNormalize.load(path, to_sb3(env))` and SB3's callbacks save,
    load and copy the `state_dict`, and `venv.training = False` is `env.eval()`. The file also holds
    the `params` of functions or a simulator's levels: the next reset in train mode sets them, if
    they are of as many envs. The env is `venv.unwrapped.env`.
    Formulas such as `normalize_obs` raise: use `deploy` for raw data. Those of an off-policy
    algorithm's env serve its replay buffer and change nothing. `get_original_obs` and
    `get_original_reward` return what the env returned.

    `seed(seed)` and `set_options(options)`, one dict for all envs, take effect in the next
    `reset()`. `get_attr`, `set_attr` and `env_method` reach the same attributes as
    `env.get_wrapper_attr`. An attribute of a layer is read or called once, and each index gets the
    result, or its own row of the result of `action_masks()`, for MaskablePPO. The functions of a
    `FunctionalEnv` may have `action_masks(state)`, for a single env. `HerReplayBuffer` calls the
    env's `compute_reward(achieved_goal, desired_goal, info)` with NumPy batches; no transform may
    change goals or rewards.

    Args:
        env: its `Discrete` and `MultiDiscrete` spaces start at 0. SB3's algorithms take no `Tuple`
            or nested `Dict`, no unbounded actions, and one dimension of `MultiDiscrete`. The result
            owns it from now on.

    >>> import numpy as np; from torchwrap.testing import ScriptedEnv
    >>> venv = to_sb3(ScriptedEnv(2, (1,), episode_lengths=(1, 2), ending="truncated"))
    >>> _ = venv.reset()
    >>> observations, rewards, dones, infos = venv.step(np.zeros((2, 6)))
    >>> observations.tolist(), infos[0]["terminal_observation"].tolist()
    ([[0.0], [1001.0]], [1.0])
    """
    venv = SB3VecEnv(env)
    learns = env.state_dict() or venv.params.state_dict()
    return SB3VecNormalize(venv) if learns else venv


class SB3VecEnv(VecEnv):
    """A torchwrap env as a `VecEnv`; made by `to_sb3`."""

    def __init__(self, env: Env) -> None:
        self.env = _trainers.require_env("to_sb3", env)
        self._recorders = _trainers.recorders("to_sb3", env)[:1]
        self.params = _trainers.Params(env)
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        # SB3 itself raises for other spaces that it cannot hold.
        _trainers.starts_at_zero("to_sb3", self.observation_space, self.action_space)
        self.metadata = env.metadata

    def reset(self) -> VecEnvObs:
        # They are for this reset alone, even if the env refuses them.
        seed = self._seeds[0]
        options = self._options[0]
        self._reset_seeds()
        self._reset_options()
        self.params.resume()
        td = self.env.reset(seed=seed, options=options or None)
        return _arrays(td["observation"])

    def step_async(self, actions: Any) -> None:
        self._action = spaces.from_numpy(self.action_space, actions, self.env.device)

    def step_wait(self) -> VecEnvStepReturn:
        successor, td = take(self.env, self._action)
        # SB3 adds the values of final observations to the reward, in place.
        rewards = _arrays(successor["reward"]).reshape(-1)
        dones = _arrays(successor["done"]).reshape(-1)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        finished = dones.nonzero()[0]
        if len(finished):
            rows = successor[finished]
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
        for _, keys in self._recorders:
            episode = infos["episode"] = {}
            for name, key in keys.items():
                episode[name] = successor[key].flatten().tolist()
        return infos

    def close(self) -> None:
        self.env.close()

    def get_images(self) -> Any:
        return self.env.render()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> Any:
        value = _simulator.get_attr(self.env, attr_name)
        return self._select(_simulator.per_env(self.env, value), indices)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        rows = set(self._get_indices(indices))
        is_some = len(rows) < self.num_envs
        if not _simulator.is_shared(self.env, attr_name):
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
    ) -> Any:
        if method_name == "compute_reward":
            self._check_goals()
        method = self.env.get_wrapper_attr(method_name)
        if isinstance(method, _simulator.MethodOfEach):
            method.rows = list(self._get_indices(indices))
            return list(method(*args, **kwargs))
        results = _simulator.call(self.env, method_name, *args, **kwargs)
        return self._select(results, indices)

    def _check_goals(self) -> None:
        """Raises if HER would compute rewards from goals that the env does not know."""
        goals = dict(spaces.leaves(self.env.unwrapped.single_observation_space))
        given = dict(spaces.leaves(self.observation_space))
        paths = ("achieved_goal",), ("desired_goal",)
        changed = [path for path in paths if given.get(path) != goals.get(path)]
        for name, module in self.env.named_modules():
            is_changing = isinstance(module, (ObservationTransform, RewardTransform))
            if is_changing and ".parts.observation." not in name:  # of ObservationKeys
                changed.append(name)
        if changed:
            must = "transforms must change no goals and rewards for HER"
            raise ValueError(refusal("to_sb3", must))

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> Any:
        # RecordEpisodeStatistics does what Monitor does: evaluate_policy reads returns from infos.
        records = wrapper_class is Monitor and bool(self._recorders)
        return [records for _ in self._get_indices(indices)]

    def _select(self, values: Sequence[Any], indices: VecEnvIndices) -> Any:
        return [values[i] for i in self._get_indices(indices)]


class SB3VecNormalize(VecNormalize):
    """A `VecEnv` of an env that learns, with its mode and `state_dict`; made by `to_sb3`.

    SB3's algorithms and callbacks look for a `VecNormalize`. Its formulas are for replay buffers
    alone, which hold observations and rewards as the env returned them, and ask for the original
    rewards first.
    """

    has_buffer = False

    params: Mapping[str, Tensor] = {}  # Files of 0.2.0 lack them.

    def _refuse(self, value: Any) -> None:
        fault = "norm_obs and norm_reward cannot be set: the env's transforms normalize"
        remedy = "For raw returns, put RecordEpisodeStatistics first, and leave this line out"
        raise AttributeError(refusal("to_sb3", fault, remedy=remedy))

    norm_obs = norm_reward = property(lambda self: False, _refuse)
    training = property(
        lambda self: self.unwrapped.env.training,
        lambda self, mode: self.unwrapped.env.train(mode),
    )
    # `sync_envs_normalization` copies it to an env for evaluation.
    ret_rms = property(
        lambda self: self.unwrapped.env.state_dict(),
        lambda self, state: self.unwrapped.env.load_state_dict(state),
    )

    def __init__(self, venv: VecEnv) -> None:
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
        if not self.has_buffer:
            fault = "has no formulas: the env's transforms normalize, and torchwrap.deploy has them"
            raise NotImplementedError(refusal("to_sb3", fault))
        return values

    normalize_obs = unnormalize_obs = _unchanged  # type: ignore[assignment]
    normalize_reward = unnormalize_reward = _unchanged  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        learned = {name: value.cpu() for name, value in self.ret_rms.items()}
        base: Any = self.unwrapped
        params = base.params.state_dict()
        # VecNormalize reads the last one.
        return {"learned": learned, "params": params, "norm_obs_keys": None}

    def set_venv(self, venv: Any) -> None:
        base = venv.unwrapped
        base.env.load_state_dict(self.learned)
        base.params.load_state_dict(self.params)
        # `sync_envs_normalization` needs as many wrappers as an env for evaluation has.
        VecEnvWrapper.__init__(self, venv.venv if isinstance(venv, SB3VecNormalize) else venv)


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
