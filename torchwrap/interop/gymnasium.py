"""Gymnasium's vector envs as torchwrap envs, and torchwrap envs as Gymnasium's: `from_gymnasium`, `to_gymnasium`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import nested, validation
from torchwrap._core import spec as specs
from torchwrap._core.rows import RowMask
from torchwrap.env import Env
from torchwrap.interop import _engines, _workers
from torchwrap.interop._vector_env import to_gymnasium as to_gymnasium
from torchwrap.random import fresh_seed
from torchwrap.spaces import Signature

InfoKeys = Sequence[str] | Mapping[str, Space[Any]]
_SCALAR: gymnasium.spaces.Box = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)


def from_gymnasium(
    vector_env: VectorEnv[Any, Any, Any],
    *,
    device: torch.device | str = "cpu",
    info_keys: InfoKeys = (),
    first_index: int = 0,
    worker_timeout: float | None = 60.0,
) -> GymnasiumEnv:
    """Wraps a Gymnasium vector env as a torchwrap env. The transitions are the same in both autoreset modes.

    EnvPool's vector envs and ALE's are such vector envs too, and their transitions are the same.

    Args:
        vector_env: in `AutoresetMode.DISABLED` (preferred) or `SAME_STEP`. The result owns it from now on. ALE's has to be in
            `SAME_STEP`. EnvPool's is in `NEXT_STEP`, but the bridge resets its finished rows at once. EnvPool seeds its envs
            when it makes them: the first `reset` reports that seed, and `reset` takes no other.
        device: of all tensors.
        info_keys: the entries of `info` to pass on under `("next", "info", name)`: a list of names of numbers, which become
            `(num_envs, 1)` float32, or a mapping from names to spaces. Envs whose info lacks an entry get zeros. A name in a
            list must appear by the end of the first episode; otherwise it is taken for a typo. ALE has no info of final steps.
        first_index: global index of the first env; env *i* of a shard is seeded with `seed + first_index + i`.
        worker_timeout: seconds for each process of an `AsyncVectorEnv` to answer a call. None disables it. If an env raises,
            exits or does not answer, this call and all later ones raise a RuntimeError with its index. `close()` still works.

    Returns:
        The env. Its `close()` closes `vector_env`, within seconds.

    Raises:
        TypeError: if `vector_env` is no vector env, or `info_keys` is a string.
        ValueError: for another vector env in `AutoresetMode.NEXT_STEP`. Its step after the end of an episode is no transition.

    >>> import gymnasium
    >>> mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    >>> vector_env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs=mode)
    >>> from_gymnasium(vector_env)
    <CartPole-v1(num_envs=2, device=cpu)>
    """
    return GymnasiumEnv(vector_env, device=device, info_keys=info_keys, first_index=first_index, worker_timeout=worker_timeout)


def make(
    id: str,
    num_envs: int,
    vectorization_mode: str,
    *,
    device: torch.device | str,
    first_index: int,
    info_keys: InfoKeys,
    spec: Any,
    worker_timeout: float | None,
    vector_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> GymnasiumEnv:
    """Makes a Gymnasium env for `torchwrap.make(..., backend="gymnasium")`, whose arguments these are.

    The vector env does not auto-reset and does not copy its observations, because the conversion to tensors copies them.
    """
    worker_timeout = _seconds("make", worker_timeout)
    work = functools.partial(_workers.work, worker_timeout, tuple(info_keys))
    defaults = {"worker": work} if vectorization_mode == "async" else {}
    overrides = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
    vector_kwargs = {**defaults, **(vector_kwargs or {}), **overrides}
    with _workers.constructing(id, worker_timeout):
        vector_env = gymnasium.make_vec(
            id, num_envs, vectorization_mode=vectorization_mode, vector_kwargs=vector_kwargs, **kwargs
        )
    return GymnasiumEnv(
        vector_env, device=device, info_keys=info_keys, first_index=first_index, worker_timeout=worker_timeout, spec=spec
    )


def make_envpool(
    id: str,
    num_envs: int,
    *,
    device: torch.device | str,
    first_index: int,
    info_keys: InfoKeys,
    given: dict[str, Any],
    seed: int | None = None,
    max_episode_steps: int | None = None,
    **kwargs: Any,
) -> GymnasiumEnv:
    """Makes an env of EnvPool's for `torchwrap.make(..., backend="envpool")`, whose arguments these are.

    `given` is for the spec.
    """
    first_index = validation.integer("make", "first_index", first_index, at_least=0)
    seed = fresh_seed() if seed is None else validation.integer("make", "seed", seed, at_least=0, at_most=2**64 - 1)
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    pool = _engines.make_envpool(id, num_envs, seed + first_index, kwargs)
    spec = specs.Spec(id, max_episode_steps=_engines.engine(pool).max_episode_steps, kwargs=given)
    return GymnasiumEnv(pool, device=device, info_keys=info_keys, first_index=first_index, worker_timeout=None, spec=spec)


def _seconds(owner: str, worker_timeout: float | None) -> float | None:
    # The operating system accepts no time of more than some decades.
    return None if worker_timeout is None else min(validation.positive(owner, "worker_timeout", worker_timeout), 1e9)


class GymnasiumEnv(Env):
    """A Gymnasium vector env as a torchwrap env; made by `from_gymnasium`.

    The simulator keeps its own state, so the env has no snapshots.
    """

    can_snapshot = False
    host_stepped = True

    def __init__(
        self,
        vector_env: VectorEnv[Any, Any, Any],
        *,
        device: torch.device | str,
        info_keys: InfoKeys,
        first_index: int,
        worker_timeout: float | None,
        spec: Any = None,
    ) -> None:
        if not isinstance(vector_env, VectorEnv):
            raise TypeError(
                f"from_gymnasium needs a gymnasium.vector.VectorEnv, but got {type(vector_env).__name__}: "
                "gymnasium.make_vec makes one."
            )
        engine = _engines.engine(vector_env)
        if spec is None and isinstance(vector_env.spec, EnvSpec):
            spec = copy.deepcopy(vector_env.spec)
            # make_vec records an explicit limit among the kwargs; Gymnasium's -1 means no limit.
            limit = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
            spec.max_episode_steps = None if limit == -1 else limit
        signature = Signature(
            vector_env.num_envs,
            vector_env.single_observation_space,
            vector_env.single_action_space,
            validation.device("from_gymnasium", device),
            spec.max_episode_steps if spec is not None else engine.max_episode_steps,
            first_index,
        )
        worker_timeout = _seconds("from_gymnasium", worker_timeout)
        super().__init__(signature, spec=spec, metadata=vector_env.metadata, render_mode=vector_env.render_mode)
        if isinstance(info_keys, str):
            raise TypeError(f"from_gymnasium needs info_keys as a list or a mapping, but got the string {info_keys!r}.")
        self.vector_env, self._engine = vector_env, engine
        self.same_step = engine.mode is AutoresetMode.SAME_STEP
        self._steps_each = type(vector_env) is SyncVectorEnv and not self.same_step  # others may do more in a step
        self.info_spaces = dict(info_keys) if isinstance(info_keys, Mapping) else dict.fromkeys(info_keys, _SCALAR)
        for space in self.info_spaces.values():
            spaces.dtype(space)
        self._unseen_info_keys = set() if isinstance(info_keys, Mapping) else set(self.info_spaces)
        self._first_seed: int | None = None  # for the next _reset
        # In same-step mode the simulator resets rows before `_reset` is called for them, and has returned the observation.
        self._already_reset = np.zeros(self.num_envs, bool)
        self._last_observation: Any = None
        self._workers = _workers.Workers(vector_env, self._name(), worker_timeout, engine.has_threads)
        if self._workers.pipes:  # at the end of the program, too, before Python waits for the processes
            Finalize(self, _workers.Workers.close, (self._workers,), exitpriority=10)

    def _check_usable(self) -> None:
        self._workers.check()

    def _choose_seed(self, seed: int | None, is_first: bool) -> int | None:
        chosen = self._engine.choose_seed(self._name(), self.signature.first_index, seed, is_first)
        return super()._choose_seed(chosen, is_first)

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        self._first_seed = seed + self.signature.first_index

    def _step(self, action: spaces.Value) -> TensorDict:
        actions = spaces.to_numpy(self.single_action_space, action)
        if self._steps_each:
            successor, reward, terminated, truncated, info = self._step_each(actions)
        else:
            with self._workers:
                self._last_observation, reward, terminated, truncated, info = self._engine.step(actions)
            successor = self._to_tensors(self._last_observation)
        has_final = np.zeros(self.num_envs, bool)
        if self.same_step:
            self._already_reset = terminated | truncated
            if self._already_reset.any():
                has_final = self._engine.has_final(info, self._already_reset)
                rows = np.flatnonzero(has_final)
                if rows.size:
                    successor[spaces.tensor(rows, self.device)] = self._batch(info["final_obs"][rows])
        result = {
            "observation": successor,
            "reward": self._column(reward, np.float32),
            "terminated": self._column(terminated, np.bool_),
            "truncated": self._column(truncated, np.bool_),
        }
        if self.info_spaces:
            result["info"] = self._info(info, has_final, np.logical_or(terminated, truncated))
        return nested.tensordict(result, self.num_envs)

    def _step_each(self, actions: Any) -> tuple[Any, ...]:
        """A step of each env of a `SyncVectorEnv`, whose own takes longer: it batches infos, and copies once more."""
        base: Any = self.vector_env
        results = [env.step(action) for env, action in zip(base.envs, iterate(base.action_space, actions), strict=True)]
        observations, reward, terminated, truncated, infos = zip(*results, strict=True)
        base._env_obs = list(observations)
        info: dict[str, Any] = {}
        if self.info_spaces:
            for row, entries in enumerate(infos):
                if not self._unseen_info_keys:  # about a misspelt name, the error says what there is
                    entries = {name: entries[name] for name in self.info_spaces if name in entries}
                info = base._add_info(info, entries, row)
        return self._batch(observations), reward, terminated, truncated, info

    def _reset(self, mask: RowMask, options: dict[str, Any] | None = None) -> TensorDict:
        rows = mask.numpy()
        first_seed, self._first_seed = self._first_seed, None
        # If this call is interrupted, the next one resets every row.
        already_reset, self._already_reset = self._already_reset, np.zeros(self.num_envs, bool)
        forced = first_seed is not None or options is not None
        to_reset = rows if forced else rows & ~already_reset
        if to_reset.any():
            with self._workers:
                self._last_observation = self._engine.reset(self._last_observation, to_reset, first_seed, options)
        self._already_reset = already_reset & ~rows
        return nested.tensordict({"observation": self._to_tensors(self._last_observation)}, self.num_envs)

    def _check_options(self, options: dict[str, Any]) -> None:
        if not self._engine.takes_options:
            super()._check_options(options)

    def _info(self, info: dict[str, Any], has_final: Any, done: Any) -> TensorDict:
        # In rows that are already reset, the info of the transition is in final_info.
        sources = ((info, ~has_final), (info.get("final_info", {}), has_final))
        values = {}
        for name, space in self.info_spaces.items():
            shape = space.shape or ()
            value = np.zeros((self.num_envs, *shape), space.dtype)
            for source, rows in sources:
                rows = rows & source.get(f"_{name}", name in source)
                if not rows.any():
                    continue
                self._unseen_info_keys.discard(name)
                try:
                    value[rows] = np.asarray(source[name])[rows].reshape(-1, *shape)
                except (IndexError, TypeError, ValueError):
                    message = f"{self._name()} needs info {name!r} that fits {space}, but got {source[name]!r}."
                    raise ValueError(f"{message} Declare its space in info_keys: {{{name!r}: Box(...)}}.") from None
            values[name] = spaces.from_numpy(space, value, self.device)
        if self._unseen_info_keys and done.any():
            known = sorted({key for source, _ in sources for key in source if not key.startswith("_")})
            unknown = sorted(self._unseen_info_keys)
            raise ValueError(f"{self._name()} needs info_keys that its info contains, but got {unknown}. It contains {known}.")
        return TensorDict(values, batch_size=[self.num_envs])

    def _to_tensors(self, observation: Any) -> spaces.Value:
        return spaces.from_numpy(self.single_observation_space, observation, self.device)

    def _batch(self, observations: Any) -> spaces.Value:
        # From one observation per env. Gymnasium's function takes five times as long, but knows every space.
        space = self.single_observation_space
        if isinstance(space, gymnasium.spaces.Box):
            array = np.array(observations)
            if array.shape[1:] == space.shape and array.dtype == space.dtype:
                return spaces.tensor(array, self.device)
        empty: Any = create_empty_array(space, len(observations))
        return self._to_tensors(concatenate(space, tuple(observations), empty))

    def _column(self, values: Any, dtype: Any) -> Tensor:
        return spaces.tensor(np.array(values, dtype).reshape(self.num_envs, 1), self.device)

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        if self.render_mode is None:
            raise RuntimeError(f'{self._name()} needs render_mode="rgb_array" at construction for render, but got None.')
        with self._workers:
            return tuple(self._engine.render(envs))

    def close(self) -> None:
        self._workers.close()
