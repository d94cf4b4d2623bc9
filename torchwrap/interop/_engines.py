"""Engines: each steps and resets one kind of vector env, and gives true successors in every auto-reset mode.

| engine | vector env | finished rows |
|---|---|---|
| `Sync` | Gymnasium's `SyncVectorEnv` | wait for their reset |
| `Async` (`_workers.py`) | Gymnasium's `AsyncVectorEnv` | as `Engine` |
| `Ale` | ALE's `AtariVectorEnv` | as `Engine`, in `SAME_STEP` |
| `EnvPool` | EnvPool | reset by a step that ignores their action |
| `Engine` | any other | wait for their reset, or are already reset (`SAME_STEP`) |
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, Wrapper
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap.env import Options

NUM_SEEDS = 2**31
"""EnvPool and ALE keep seeds in an int32. Larger ones are taken modulo this number."""

NO_LIMIT = 2**31 - 1
"""EnvPool's `max_episode_steps` for episodes without a time limit."""

NEW_ENV = "Call env.close() and make a new env"

Mask = NDArray[np.bool_]

Infos = list[tuple[dict[str, Any], Mask]]
"""Batched infos, each with the mask of the rows that it is valid for."""

Batch = tuple[Any, Any, Any, Any, Infos]
"""The true successor of every row: observation, reward, terminated, truncated, infos."""


class Engine:
    """Any vector env, stepped and reset as a whole.

    In `SAME_STEP`, the vector env resets finished rows within `step`. The engine then returns their
    final observations and infos, and gives the initial ones in `reset`.

    Args:
        vector_env: the vector env, which the engine owns from now on.
        name: of the env, in error messages.
        info_names: the entries of infos that are read.
    """

    modes: tuple[AutoresetMode, ...] = (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP)
    remedy = (
        'Make it with torchwrap.make(id, num_envs, backend="gymnasium"), or pass '
        'vectorization_mode="sync" and vector_kwargs='
        '{"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED} to make_vec'
    )
    takes_options = True
    can_repeat = False  # as `Env.can_repeat`
    is_interruptible = True  # False if an interrupted call leaves results behind for the next one

    def __init__(
        self, vector_env: VectorEnv[Any, Any, Any], name: str, info_names: Collection[str]
    ) -> None:
        self.vector_env: Any = vector_env
        self.name = name
        self.info_names = info_names
        self.fault = ""  # the error of all further calls
        mode = self._mode()
        if mode not in self.modes:
            names = " or ".join([mode.name for mode in self.modes])
            must = f"the autoreset_mode of the vector env must be {names}"
            raise ValueError(refusal("from_gymnasium", must, mode, self.remedy))
        self.same_step = mode is AutoresetMode.SAME_STEP
        self.max_episode_steps = self._step_limit()
        self._unchecked = {"step", "reset"}
        self._all = np.ones(vector_env.num_envs, bool)
        self._observation: Any = None  # the latest batch that the vector env returned
        # In SAME_STEP: the rows that are already reset, and the info of their reset.
        self._already_reset = np.zeros(vector_env.num_envs, bool)
        self._initial_info: dict[str, Any] = {}

    def step(self, actions: Any) -> Batch:
        """Takes an action in every env, and returns its true successor."""
        result = self._check("step", self._step(actions))
        self._observation, reward, terminated, truncated, info = result
        if not self.same_step:
            return self._observation, reward, terminated, truncated, [(info, self._all)]
        done = np.logical_or(terminated, truncated)
        self._already_reset = done
        self._initial_info = info
        if not done.any():
            return self._observation, reward, terminated, truncated, [(info, self._all)]
        has_final = self._has_final(info, done)
        observation = copy.deepcopy(self._observation)
        if has_final.any():
            _assign(observation, has_final, self._final_observations(info, has_final))
        infos = [(info, ~has_final), (info.get("final_info", {}), has_final)]
        return observation, reward, terminated, truncated, infos

    def reset(self, rows: Mask, seed: int | None, options: Options | None) -> tuple[Any, Infos]:
        """Starts episodes in the rows of a mask. Row *i* gets the seed `seed + i`.

        Returns the observations of all rows, and the infos of the mask's.
        """
        already_reset = self._already_reset
        # If this call is interrupted, the next one resets every row.
        self._already_reset = np.zeros_like(rows)
        to_reset = rows
        if seed is None and options is None:
            to_reset = rows & ~already_reset
        infos = [(self._initial_info, rows & ~to_reset)]
        if to_reset.any():
            result = self._check("reset", self._reset(to_reset, seed, options))
            self._observation, info = result
            infos.append((info, to_reset))
        self._already_reset = already_reset & ~rows
        return self._observation, infos

    def choose_seed(self, seed: int | None, is_first: bool, first_index: int) -> int | None:
        """As `Env._choose_seed`."""
        return seed

    def attributes(self, name: str) -> Sequence[tuple[bool, Any] | None]:
        """By env, as `find`; `[None]` if the envs cannot be reached."""
        envs = self._envs()
        return [find(env, name) for env in envs] or [None]

    def set_attribute(self, name: str, value: Any) -> bool | None:
        """Sets the attribute in every env. Returns whether they have it; None if out of reach."""
        envs = self._envs()
        if not all(env.has_wrapper_attr(name) for env in envs):
            return False
        for env in envs:
            env.set_wrapper_attr(name, value)
        return bool(envs) or None

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every env."""
        return tuple([env.get_wrapper_attr(name)(*args, **kwargs) for env in self._envs()])

    def render(self, rows: Sequence[int] | None) -> Any:
        """The frames of some rows, or of all."""
        frames = self._call("render")
        return frames if rows is None else [frames[row] for row in rows]

    def close(self) -> None:
        """Closes the vector env."""
        self.vector_env.close()

    def check_usable(self) -> None:
        """Raises if an earlier fault or interrupted call has made the vector env useless."""
        if self.fault:
            raise RuntimeError(self.fault)

    def known_names(self, infos: Infos) -> set[str]:
        """The names of all entries of the infos that the last step returned."""
        names = {name for info, _ in infos for name in info}
        return {name for name in names if not name.startswith("_")}

    # The calls of the vector env.

    def _step(self, actions: Any) -> Any:
        return self._call("step", actions)

    def _reset(self, rows: Mask, seed: Any, options: Options | None) -> Any:
        # A new dict, because Gymnasium removes the mask from it.
        options = dict(options or {})
        if not rows.all():
            options["reset_mask"] = rows
        return self._call("reset", seed=seed, options=options or None)

    def _call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        self.check_usable()
        if not self.is_interruptible:
            self.fault = interrupted(self.name)
        result = getattr(self.vector_env, command)(*args, **kwargs)
        self.fault = ""
        return result

    def _check(self, call: str, result: Any) -> Any:
        """Checks the first result of `step` and of `reset`, with the values of all envs."""
        if call in self._unchecked:
            num_envs = self.vector_env.num_envs
            space = batch_space(self.vector_env.single_observation_space, num_envs)
            check_result(self.name, call, space, result, num_envs)
            self._unchecked.remove(call)
        return result

    # The properties of the vector env.

    def _mode(self) -> Any:
        return autoreset_mode_of((self.vector_env.metadata or {}).get("autoreset_mode"))

    def _envs(self) -> list[Any]:
        """The single envs, if they are in this process."""
        base = self.vector_env.unwrapped
        return base.envs if isinstance(base, SyncVectorEnv) else []

    def _step_limit(self) -> int | None:
        """The step limit that all envs share. Their `TimeLimit`s are not in the vector env's spec.

        A vector env that was exported by torchwrap has `max_episode_steps`.
        """
        limits = {_time_limit(env) for env in self._envs()}
        limits = limits or {getattr(self.vector_env.unwrapped, "max_episode_steps", None)}
        return common_limit(limits)

    def _has_final(self, info: dict[str, Any], done: Mask) -> Mask:
        """The rows of `info["final_obs"]` that hold a final observation, in `SAME_STEP`."""
        return done

    def _final_observations(self, info: dict[str, Any], rows: Mask) -> Any:
        space = self.vector_env.single_observation_space
        final: Any = info.get("final_obs")
        indices = np.flatnonzero(rows).tolist()
        try:
            # One observation per env, as from Gymnasium; or a batch of a Dict or Tuple.
            if isinstance(final, dict):
                final = list(iterate(self.vector_env.observation_space, final))
            chosen = tuple([final[row] for row in indices])
            return concatenate(space, chosen, create_empty_array(space, len(chosen)))
        except Exception as error:
            must = f'info["final_obs"] must hold the final observations of envs {indices}'
            raise ValueError(refusal(self.name, must, repr(final))) from error


class Sync(Engine):
    """Gymnasium's `SyncVectorEnv`, env by env.

    It leaves out Gymnasium's auto-reset, its batch of every entry of the infos, and a copy. A
    finished env returns its last result again until it is reset, so that actions can be repeated.
    """

    can_repeat = True

    def __init__(
        self, vector_env: VectorEnv[Any, Any, Any], name: str, info_names: Collection[str]
    ) -> None:
        super().__init__(vector_env, name, info_names)
        self.same_step = False
        self._results: list[Any] = [None] * vector_env.num_envs
        self._observations: list[Any] = [None] * vector_env.num_envs
        self._finished = [False] * vector_env.num_envs
        space = vector_env.single_observation_space
        self._observation = create_empty_array(space, vector_env.num_envs)
        # NumPy's cast to narrower integers wraps around, whatever the first step returned.
        dtypes = [np.dtype(leaf.dtype) for _, leaf in spaces.leaves(space)]
        self._may_wrap = any([dtype.kind in "iu" and dtype.itemsize < 8 for dtype in dtypes])

    def step(self, actions: Any) -> Batch:
        each = iterate(self.vector_env.action_space, actions)
        for row, (env, action) in enumerate(zip(self.vector_env.envs, each, strict=True)):
            if not self._finished[row]:
                self._results[row] = env.step(action)
        if "step" in self._unchecked:
            self._check_steps()
        try:
            observations, reward, terminated, truncated, infos = zip(*self._results, strict=True)
            done = np.logical_or(terminated, truncated)
            self._set_observations(observations)
        except Exception:  # NumPy's, which names no env
            self._check_steps()
            raise
        self._finished = done.ravel().tolist()
        return self._observation, reward, terminated, truncated, self._batch_infos(infos, self._all)

    def reset(self, rows: Mask, seed: int | None, options: Options | None) -> tuple[Any, Infos]:
        space = self.vector_env.single_observation_space
        infos: list[dict[str, Any]] = [{}] * len(rows)
        for row in np.flatnonzero(rows).tolist():
            own_seed = None if seed is None else seed + row
            result = self.vector_env.envs[row].reset(seed=own_seed, options=options)
            check_result(self.name, f"reset of env {row}", space, result)
            self._observations[row], infos[row] = result
            self._finished[row] = False
        self._set_observations(self._observations)
        return self._observation, self._batch_infos(infos, rows)

    def known_names(self, infos: Infos) -> set[str]:
        return {name for *_, info in self._results for name in info}

    def _set_observations(self, observations: Sequence[Any]) -> None:
        self._observations = list(observations)
        space = self.vector_env.single_observation_space
        self._observation = concatenate(space, self._observations, self._observation)

    def _batch_infos(self, infos: Sequence[dict[str, Any]], rows: Mask) -> Infos:
        batch: dict[str, Any] = {}
        for name in self.info_names:
            found = [info[name] for info in infos if name in info]
            if found:  # the first value fills the rows without the entry
                batch[name] = [info.get(name, found[0]) for info in infos]
                batch[f"_{name}"] = np.array([name in info for info in infos])
        return [(batch, rows)]

    def _check_steps(self) -> None:
        space = self.vector_env.single_observation_space
        is_exact = True
        for row, result in enumerate(self._results):
            is_exact &= check_result(self.name, f"step of env {row}", space, result)
        if is_exact and not self._may_wrap:
            self._unchecked.discard("step")


class Games(Engine):
    """Base of the engines in C++. Their threads step all envs together, and sum a game's rewards."""

    takes_options = False
    is_interruptible = False

    def __init__(
        self, vector_env: VectorEnv[Any, Any, Any], name: str, info_names: Collection[str]
    ) -> None:
        super().__init__(vector_env, name, info_names)
        num_envs = vector_env.num_envs
        if self._batch_size() not in (0, num_envs):
            must = f"batch_size must be num_envs={num_envs}, so that all envs step together"
            raise ValueError(refusal("from_gymnasium", must, self._batch_size(), "Omit it"))
        self._game_returns = np.zeros(num_envs)

    def _batch_size(self) -> int:
        raise NotImplementedError

    def _add_games(self, info: dict[str, Any], reward: Any, over: Any) -> None:
        """Adds each game's return to the info, and whether it is over. An episode may be a life."""
        info["game_return"] = self._game_returns + reward
        info["game_over"] = over
        self._game_returns = np.where(over, 0, info["game_return"])


class Ale(Games):
    """ALE's `AtariVectorEnv`, which lacks `DISABLED`.

    In `NEXT_STEP`, a masked reset would end games that `life_loss_info` continues.
    """

    modes = (AutoresetMode.SAME_STEP,)
    remedy = "Pass autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP to make_vec"

    _game_starts: Any = None  # by row, the number of the frame before its game

    def _mode(self) -> Any:
        # Its constructor writes into the metadata of every other ALE vector env.
        return getattr(self.vector_env.unwrapped, "autoreset_mode", None)

    def _batch_size(self) -> int:
        return getattr(self.vector_env.unwrapped, "batch_size", 0)

    def _step(self, actions: Any) -> Any:
        observation, reward, *flags, info = super()._step(actions)
        game_starts = info["frame_number"] - info["episode_frame_number"]
        self._add_games(info, reward, game_starts != self._game_starts)
        self._game_starts = game_starts
        info["final_info"] = {name: info[name] for name in ("game_return", "game_over")}
        # If a game is over, the episode that begins here has the infos of the next game.
        info["game_return"] = self._game_returns
        info["game_over"] = np.zeros_like(info["game_over"])
        return observation, reward, *flags, info

    def _has_final(self, info: dict[str, Any], done: Mask) -> Mask:
        # With life_loss_info, an episode may end within a game. ALE then writes no final_obs.
        over: Mask = info["final_info"]["game_over"]
        return over

    def _reset(self, rows: Mask, seed: Any, options: Options | None) -> Any:
        if seed is not None:  # an array has one seed for each row that is reset
            seed = (seed % NUM_SEEDS + np.flatnonzero(rows)) % NUM_SEEDS
        observation, info = super()._reset(rows, seed, options)
        self._game_starts = info["frame_number"] - info["episode_frame_number"]
        self._game_returns[rows] = 0
        return observation, info


class EnvPool(Games):
    """EnvPool. Its auto-reset is a step that ignores its action; only finished rows take it.

    It seeds its envs when it makes them.
    """

    modes = (AutoresetMode.NEXT_STEP,)

    def __init__(self, pool: Any, name: str, info_names: Collection[str]) -> None:
        if pool is not pool.unwrapped:
            must = "vector_env must be EnvPool's env itself"
            got = f"{type(pool).__name__} around it"
            remedy = "Put torchwrap's transforms on the result instead"
            raise ValueError(refusal("from_gymnasium", must, got, remedy))
        super().__init__(pool, name, info_names)
        seeds = [*pool.config.get("env_seed", ()), pool.config["seed"]]
        self._seed = seeds[0]  # of row 0
        self._finished = np.zeros(pool.num_envs, bool)
        self._actions: Any = None

    def _batch_size(self) -> int:
        return int(self.vector_env.config["batch_size"])

    def _step_limit(self) -> int | None:
        return common_limit({self.vector_env.config.get("max_episode_steps")})

    def choose_seed(self, seed: int | None, is_first: bool, first_index: int) -> int | None:
        own_seed = (self._seed - first_index) % NUM_SEEDS
        if seed is None:
            return own_seed if is_first else None
        if not is_first or seed % NUM_SEEDS != own_seed:
            must = f"seed must be {own_seed} in the first reset, and None later"
            remedy = (
                "EnvPool seeds envs when it makes them: "
                f'torchwrap.make(id, num_envs, backend="envpool", seed={seed})'
            )
            raise ValueError(refusal(f"{self.name}.reset", must, seed, remedy))
        return seed

    def step(self, actions: Any) -> Batch:
        result = self._check("step", self._step(actions))
        self._observation, reward, terminated, truncated, info = result
        self._actions = actions
        self._finished = terminated | truncated
        # Atari games have rewards before clipping, and terminations apart from lost lives.
        if {"lives", "reward", "terminated"} <= info.keys():
            self._add_games(info, info["reward"], (info["terminated"] > 0) | truncated)
        return self._observation, reward, terminated, truncated, [(info, self._all)]

    def reset(self, rows: Mask, seed: int | None, options: Options | None) -> tuple[Any, Infos]:
        finished = rows & self._finished
        running = rows & ~self._finished
        infos = []
        self._game_returns[running] = 0
        if running.any():
            observation, info = self._reset(running, None, options)
            if running.all():
                self._observation = observation
            infos.append(self._assign(observation, info))
        if finished.any():
            # With episodic_life, this goes on with the lives that are left.
            indices = np.flatnonzero(finished)
            actions = _select(self._actions, indices)
            observation, *_, info = self._call("step", actions, indices)
            infos.append(self._assign(observation, info))
        self._finished = self._finished & ~rows
        return self._observation, infos

    def _assign(self, observation: Any, info: dict[str, Any]) -> tuple[dict[str, Any], Mask]:
        """Writes the observations of some envs into the batch, and spreads their info to it."""
        indices = info["env_id"]
        _assign(self._observation, indices, observation)
        rows = np.zeros(len(self._finished), bool)
        rows[indices] = True
        batch = {}
        for name in {*self.info_names} & info.keys():
            batch[name] = np.zeros((len(rows), *info[name].shape[1:]), info[name].dtype)
            batch[name][indices] = info[name]
        return batch, rows

    def render(self, rows: Sequence[int] | None) -> Any:
        return self._call("render", range(self.vector_env.num_envs) if rows is None else rows)


# Functions that the engines share.


def autoreset_mode_of(value: Any) -> Any:
    """An autoreset mode, from itself, its value or its name; anything else is returned unchanged."""
    for mode in AutoresetMode:
        if value in (mode, mode.value, mode.name):
            return mode
    return value


def interrupted(name: str) -> str:
    """The error after an interrupted call of a vector env that steps in threads or processes."""
    fault = "an earlier call did not finish, and the vector env may still hold its results"
    return refusal(name, fault, remedy=NEW_ENV)


def find(env: Any, name: str) -> tuple[bool, Any] | None:
    """Whether an env's attribute is a method, and its value if not; None without the attribute."""
    if not env.has_wrapper_attr(name):
        return None
    value = env.get_wrapper_attr(name)
    return callable(value), None if callable(value) else value


def common_limit(limits: Collection[Any]) -> int | None:
    """The step limit that all envs share, if there is one."""
    limit, *others = limits
    is_limit = isinstance(limit, int) and limit != NO_LIMIT
    return limit if is_limit and not others else None


def _time_limit(env: Any) -> int:
    limit: int = vars(env).get("_max_episode_steps") or NO_LIMIT
    return min(limit, _time_limit(env.env)) if isinstance(env, Wrapper) else limit


def _select(values: Any, rows: Any) -> Any:
    if isinstance(values, dict):
        return {key: _select(value, rows) for key, value in values.items()}
    return values[rows]


def _assign(values: Any, rows: Any, given: Any) -> None:
    if isinstance(values, dict | tuple):
        for key in values if isinstance(values, dict) else range(len(values)):
            _assign(values[key], rows, given[key])
    else:
        values[rows] = given


# Checks of what Gymnasium's envs return.


def check_result(owner: str, call: str, space: Space[Any], value: Any, num_envs: int = 1) -> bool:
    """Raises a TypeError or ValueError unless `step` or `reset`, the `call`, returned a valid result.

    Returns whether the observation consists of arrays of the space's dtypes, so that no cast can
    change a value.
    """
    names = ("observation", "info")
    if call.startswith("step"):
        names = ("observation", "reward", "terminated", "truncated", "info")
    is_result = isinstance(value, tuple | list) and len(value) == len(names)
    if not is_result or not isinstance(value[-1], dict):
        must = f"{call} must return ({', '.join(names)}) with a dict as info"
        raise TypeError(refusal(owner, must, repr(value)))
    for name, number in zip(names[1:-1], value[1:-1], strict=True):
        as_numbers(owner, name, number, num_envs, call)
    is_exact = True
    for path, leaf in spaces.leaves(space):
        is_exact &= _check_leaf(owner, call, path, leaf, value[0])
    return is_exact


def as_numbers(
    owner: str, name: str, values: Any, num_envs: int, call: str = "step"
) -> NDArray[Any]:
    """Rewards or flags as an array.

    Raises a ValueError unless they are one number per env: NumPy would make NaN of None.
    """
    with contextlib.suppress(ValueError):  # of different lengths
        array = np.asarray(values)
        if array.dtype.kind in "biuf" and array.size == num_envs:
            return array
    must = f"{name} of {call} must be one number per env"
    raise ValueError(refusal(owner, must, repr(values)))


def _check_leaf(
    owner: str, call: str, path: spaces.Path, leaf: Space[Any], observation: Any
) -> bool:
    # As in `SyncVectorEnv`, other dtypes of the same kind fit. Workers would cast anything, and
    # NumPy lets integers overflow.
    dtype = np.dtype(leaf.dtype)
    part = observation
    fits = False
    is_exact = False
    with contextlib.suppress(LookupError, TypeError, ValueError):
        part = spaces.at(observation, path)
        array = np.asarray(part)
        is_exact = array is part and array.dtype == dtype
        fits = array.shape == (leaf.shape or ())
        fits &= np.can_cast(array.dtype, dtype, "same_kind")
        if fits and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype):
            fits = bool((array.astype(dtype) == array).all())
    if not fits:
        key = "".join([f"[{key!r}]" for key in path])
        got = repr(part)
        if isinstance(part, np.ndarray):
            got += f" of {part.dtype}"
        must = f"observation{key} of {call} must be in {leaf}"
        remedy = f"Return {dtype} values of shape {leaf.shape}, or change observation_space"
        raise ValueError(refusal(owner, must, got, remedy))
    return is_exact
