"""Engines: each steps and resets one kind of vector env, and returns true successors.

| engine | vector env | finished rows |
|---|---|---|
| `Sync` | Gymnasium's `SyncVectorEnv` | may be stepped again, or left out |
| `Async` (`_workers.py`) | Gymnasium's `AsyncVectorEnv` | as `Engine` |
| `Ale` | ALE's `AtariVectorEnv` | as `Engine`, in `SAME_STEP` |
| `EnvPool` | EnvPool | reset by a step that ignores their action |
| `Engine` | any other | as the vector env does, or are already reset (`SAME_STEP`) |
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap.env import Options
from torchwrap.interop._infos import Info, Infos, Mask
from torchwrap.interop._simulator import check_reset, check_tuple

NUM_SEEDS = 2**31
"""EnvPool and ALE keep seeds in an int32. Larger seeds are taken modulo this number."""

NO_LIMIT = 2**31 - 1
"""EnvPool's `max_episode_steps` for episodes without a time limit."""

NEW_ENV = "Call env.close() and make a new env"

Arrays = list[NDArray[Any]]
"""An array per leaf of a space, in the order of their keys, in new memory and its dtype."""

Results = tuple[Arrays, Infos]
"""Observations, after a step also the `spaces.COLUMNS` as `(num_envs, 1)`; and infos."""

Leaves = list[tuple[spaces.Path, Any]]
"""Those of a space, with their paths."""


class Engine:
    """Any vector env, stepped and reset as a whole.

    In `SAME_STEP`, the vector env resets finished rows within `step`. The engine then returns their
    final observations and infos, and the initial ones in `reset`.

    Args:
        vector_env: the vector env, which the engine owns from now on.
        name: of the env, in error messages.
        info_names: the entries of infos that are read.
    """

    modes: tuple[AutoresetMode, ...] = (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP)
    remedy_for_mode = (
        "Pass autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED to the vector env, or in "
        'vector_kwargs, with vectorization_mode="sync", to make_vec, or call '
        'torchwrap.make(id, num_envs, backend="gymnasium")'
    )
    takes_options = True
    remedy_for_repeats = "Let each env repeat them, with torchwrap.make(id, wrappers=[...])"
    is_interruptible = True  # False if an interrupted call leaves results for the next call
    is_ours = False  # True if worker processes have the methods of `WorkerEnv`

    def __init__(
        self,
        vector_env: Any,
        name: str,
        info_names: Collection[str],
    ) -> None:
        self.vector_env = vector_env
        self.name = name
        self.info_names = info_names
        self.fault = ""  # If not empty, all further calls raise this error.
        self.reaches_envs = isinstance(vector_env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        mode = autoreset_mode_of(self._mode())
        if mode not in self.modes:
            must = f"autoreset_mode must be {' or '.join([mode.name for mode in self.modes])}"
            raise ValueError(refusal("from_gymnasium", must, mode, self.remedy_for_mode))
        self.same_step = mode is AutoresetMode.SAME_STEP
        self.max_episode_steps = self._step_limit()
        self._all = np.ones(vector_env.num_envs, bool)
        space = vector_env.single_observation_space
        # In the order of keys at every level.
        self._leaves: Leaves = sorted(spaces.leaves(space), key=operator.itemgetter(0))
        self._batches: Leaves = list(spaces.leaves(batch_space(space, vector_env.num_envs)))
        self._observation: Any = None  # The latest batch that the vector env returned.
        # In SAME_STEP: the rows that are already reset, and the info of their reset.
        self._already_reset = ~self._all
        self._initial_info: Info = {}

    def leave_out(self, rows: Mask) -> None:
        """Lets rows return their last result again in the next step."""
        fault = "cannot repeat actions, because envs with ended episodes cannot be left out"
        raise ValueError(refusal(self.name, fault, remedy=self.remedy_for_repeats))

    def step(self, actions: Any) -> Results:
        """Takes an action in every env, and returns the true successors."""
        check_reset(self.name, self._already_reset)
        result = self._step(actions)
        columns = self._check("step", result)
        self._observation, *_, info = result
        observation = self._observation
        infos = [(info, self._all)]
        if self.same_step:
            done = (columns[1] | columns[2]).ravel()
            self._already_reset = done
            self._initial_info = info
            final_rows = self._final_rows(info, done)
            if final_rows.any():
                observation = self._with_final_observations(info, final_rows)
                final_info = info.get("final_info", {})
                infos = [(info, ~final_rows), (final_info, final_rows)]
        return self._copies(observation) + columns, infos

    def reset(
        self,
        rows: Mask,
        seed: int | None,
        options: Options | None,
    ) -> Results:
        """Starts episodes in the rows of a mask. Row *i* gets the seed `seed + i`.

        Returns the observations of all rows, and the infos of the mask's.
        """
        already_reset = self._already_reset
        # If this call is interrupted, the next call trusts no earlier reset.
        self._already_reset = ~self._all
        to_reset = rows
        if seed is None and options is None:
            to_reset = rows & ~already_reset
        infos = [(self._initial_info, rows & ~to_reset)]
        if to_reset.any():
            result = self._reset(to_reset, seed, options)
            self._check("reset", result)
            self._observation, info = result
            infos.append((info, to_reset))
        self._already_reset = already_reset & ~rows
        return self._copies(self._observation), infos

    def choose_seed(
        self,
        seed: int | None,
        is_first: bool,
        first_index: int,
    ) -> int | None:
        """As `Env._choose_seed`."""
        return seed

    def attributes(self, name: str) -> tuple[Any, ...] | None:
        """The attribute of each env; None if an env lacks it, or cannot be reached."""
        if not self.reaches_envs or not all(self.call("has_wrapper_attr", name)):
            return None
        return self.call("torchwrap_call" if self.is_ours else "get_wrapper_attr", name)

    def set_attributes(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of each env."""
        if len(values) != len(self._all):
            must = f"{name} must be a list of {len(self._all)} values, or one that is no list"
            raise ValueError(refusal(self.name, must, values))
        base = self.vector_env.unwrapped
        if not isinstance(base, SyncVectorEnv):
            base.set_attr(name, values)
            return
        for env, value in zip(base.envs, values, strict=True):
            set_attribute(env, name, value)

    def call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of each env, and returns a tuple."""
        return self.vector_env.unwrapped.call(command, *args, **kwargs)

    def call_method(
        self,
        rows: Sequence[int],
        name: str,
        args: Any,
        kwargs: Any,
    ) -> list[Any]:
        """Calls a method of some envs."""
        envs = self.vector_env.unwrapped.envs
        return [envs[row].get_wrapper_attr(name)(*args, **kwargs) for row in rows]

    def render(self, rows: Sequence[int] | None) -> Any:
        """The frames of some rows, or of all."""
        frames = self._call("render")
        return frames if rows is None else [frames[row] for row in rows]

    def close(self) -> None:
        """Closes the vector env."""
        self.vector_env.close()

    def check_usable(self) -> None:
        """Raises if a fault or an interrupted call has made the vector env useless."""
        if self.fault:
            raise RuntimeError(self.fault)

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

    def _check(self, call: str, result: Any) -> Arrays:
        """Raises unless `step` or `reset` returned values of all envs. Returns the columns."""
        return check_result(self.name, call, self._batches, result, len(self._all))

    def _copies(self, observation: Any) -> Arrays:
        arrays = []
        for path, leaf in self._leaves:
            part = spaces.entry(observation, path)
            arrays.append(np.array(part, leaf.dtype, order="C"))
        return arrays

    # The properties of the vector env.

    def _mode(self) -> Any:
        return (self.vector_env.metadata or {}).get("autoreset_mode")

    def _step_limit(self) -> int | None:
        """The step limit of the envs' `TimeLimit`s, which the vector env's spec does not have."""
        limits: Any = self.attributes("_max_episode_steps")
        if limits is None:
            return getattr(self.vector_env.unwrapped, "max_episode_steps", None)
        return limits[0] if len(set(limits)) == 1 else None  # envs with different limits

    def _final_rows(self, info: Info, done: Mask) -> Mask:
        """The rows of `info["final_obs"]` that hold a final observation, in `SAME_STEP`."""
        return done

    def _with_final_observations(self, info: Info, rows: Mask) -> Any:
        final: Any = info.get("final_obs")
        indices = np.flatnonzero(rows).tolist()
        observation = copy.deepcopy(self._observation)
        try:
            if isinstance(final, dict):  # a batch, and not Gymnasium's array of observations
                final = list(iterate(self.vector_env.observation_space, final))
            space = self.vector_env.single_observation_space
            chosen: Any = [final[row] for row in indices]
            empty: Any = create_empty_array(space, len(chosen))
            _assign(observation, indices, concatenate(space, chosen, empty))
        except (LookupError, TypeError, ValueError) as error:
            must = f'info["final_obs"] must hold the final observations of envs {indices}'
            raise ValueError(refusal(self.name, must, f"{final!r}")) from error
        return observation


class Sync(Engine):
    """Gymnasium's `SyncVectorEnv`, env by env.

    It leaves out Gymnasium's auto-reset, its batch of every entry of the infos, and a copy.
    """

    def __init__(
        self,
        vector_env: Any,
        name: str,
        info_names: Collection[str],
    ) -> None:
        super().__init__(vector_env, name, info_names)
        self.same_step = False
        self._envs = vector_env.envs
        self._results: list[Any] = [None] * vector_env.num_envs
        self._left_out = ~self._all
        self._unchecked = {"step", "reset"}

    def leave_out(self, rows: Mask) -> None:
        self._left_out = rows

    def step(self, actions: Any) -> Results:
        steps = ~self._left_out
        self._left_out = ~self._all
        each = list(iterate(self.vector_env.action_space, actions))
        for row in steps.nonzero()[0].tolist():
            self._results[row] = self._envs[row].step(each[row])
        if "step" in self._unchecked:
            self._check_results("step", self._all)
        try:
            observations, *values, infos = zip(*self._results, strict=True)
            arrays = self._stack(observations)
            for name, column in zip(spaces.COLUMNS, values, strict=True):
                arrays.append(as_column(self.name, "step", name, column, len(self._all)))
            batch = self._batch_infos(infos)
        except Exception:  # NumPy's error names no env.
            self._check_results("step", self._all)
            raise
        return arrays, [(batch, self._all)]

    def reset(
        self,
        rows: Mask,
        seed: int | None,
        options: Options | None,
    ) -> Results:
        self._left_out = ~self._all
        indices = np.flatnonzero(rows).tolist()
        infos: list[Info] = [{}] * len(rows)
        for row in indices:
            row_seed = None if seed is None else seed + row
            self._results[row] = self._envs[row].reset(seed=row_seed, options=options)
        if "reset" in self._unchecked:
            self._check_results("reset", rows)
        try:
            observations = []
            for row in indices:
                observation, infos[row] = self._results[row]
                observations.append(observation)
            arrays = self._stack(observations)
            batch = self._batch_infos(infos)
        except Exception:
            self._check_results("reset", rows)
            raise
        if len(indices) < len(rows):
            arrays = [_spread(array, rows) for array in arrays]
        return arrays, [(batch, rows)]

    def _stack(self, observations: Sequence[Any]) -> Arrays:
        """Raises an error that names no env if the observations of some do not fit."""
        arrays = []
        for path, leaf in self._leaves:
            parts = observations
            for key in path:
                index: Any = int(key) if isinstance(parts[0], (tuple, list)) else key
                parts = [part[index] for part in parts]
            arrays.append(_fit(parts, leaf, (len(parts), *leaf.shape)))
        return arrays

    def _batch_infos(self, infos: Sequence[Info]) -> Info:
        batch: Info = {}
        for name in self.info_names:
            has_entry = [name in info for info in infos]
            if any(has_entry):
                filler = infos[has_entry.index(True)][name]
                batch[name] = [info.get(name, filler) for info in infos]
                batch[f"_{name}"] = np.array(has_entry)
        return batch

    def _check_results(self, call: str, rows: Mask) -> None:
        for row in np.flatnonzero(rows).tolist():
            check_result(self.name, f"{call} of env {row}", self._leaves, self._results[row])
        self._unchecked.discard(call)


class Games(Engine):
    """Base of the engines in C++. Their threads step all envs together."""

    takes_options = False
    is_interruptible = False

    def start_games(self) -> None:
        """Makes the next reset start games, also where a life was lost and the game would go on."""


class Ale(Games):
    """ALE's `AtariVectorEnv`, which lacks `DISABLED`.

    In `NEXT_STEP`, a masked reset would end games that `life_loss_info` continues.
    """

    modes = (AutoresetMode.SAME_STEP,)
    remedy_for_mode = "Pass autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP to make_vec"
    remedy_for_repeats = "Pass frameskip to torchwrap.make"
    _game_starts: Any = None  # For each row, the number of the frame before its game.
    _is_over: Any = False  # For each row, whether its game ended in the last step.

    def _mode(self) -> Any:
        # Its constructor writes into the metadata of every other ALE vector env.
        return getattr(self.vector_env.unwrapped, "autoreset_mode", None)

    def _step(self, actions: Any) -> Any:
        *result, info = super()._step(actions)
        game_starts = info["frame_number"] - info["episode_frame_number"]
        self._is_over = game_starts != self._game_starts
        self._game_starts = game_starts
        # Outside of final_info, the entries are the next root's.
        info["final_info"] = {"game_over": self._is_over}
        info["game_over"] = ~self._all
        return *result, info

    def _final_rows(self, info: Info, done: Mask) -> Mask:
        # With life_loss_info, an episode may end within a game. ALE then writes no final_obs.
        return self._is_over

    def start_games(self) -> None:
        self._already_reset = self._already_reset & self._is_over

    def _reset(self, rows: Mask, seed: Any, options: Options | None) -> Any:
        if seed is not None:
            # An array of seeds has one for each row that is reset. Its sums must fit an int64.
            seed = (seed % NUM_SEEDS + np.flatnonzero(rows)) % NUM_SEEDS
        observation, info = super()._reset(rows, seed, options)
        self._game_starts = info["frame_number"] - info["episode_frame_number"]
        return observation, info


class EnvPool(Games):
    """EnvPool. Its auto-reset is a step that ignores its action; only finished rows take it.

    It seeds its envs when it makes them.
    """

    modes = (AutoresetMode.NEXT_STEP,)
    remedy_for_repeats = "Pass frame_skip to torchwrap.make, where EnvPool's env takes it"

    def __init__(
        self,
        pool: Any,
        name: str,
        info_names: Collection[str],
    ) -> None:
        super().__init__(pool, name, info_names)
        seeds = [*pool.config.get("env_seed", ()), pool.config["seed"]]
        self._seed = seeds[0]  # Row 0 has this seed.
        self._finished = ~self._all
        self._actions: Any = None

    def _step_limit(self) -> int | None:
        limit = self.vector_env.config["max_episode_steps"]
        return None if limit == NO_LIMIT else limit

    def choose_seed(
        self,
        seed: int | None,
        is_first: bool,
        first_index: int,
    ) -> int | None:
        pool_seed = (self._seed - first_index) % NUM_SEEDS
        if seed is None:
            return pool_seed if is_first else None
        if not is_first or seed % NUM_SEEDS != pool_seed:
            must = f"seed must be {pool_seed} in the first reset, and None later"
            remedy = (
                "EnvPool seeds envs when it makes them: "
                f'torchwrap.make(id, num_envs, backend="envpool", seed={seed})'
            )
            raise ValueError(refusal(f"{self.name}.reset", must, seed, remedy))
        return seed

    def start_games(self) -> None:
        self._finished = ~self._all

    def _step(self, actions: Any) -> Any:
        check_reset(self.name, self._finished)
        result = super()._step(actions)
        *_, terminated, truncated, info = result
        self._actions = actions
        self._finished = terminated | truncated
        if {"lives", "terminated"} <= info.keys():  # the latter apart from lost lives
            info["game_over"] = (info["terminated"] > 0) | truncated
        return result

    def reset(
        self,
        rows: Mask,
        seed: int | None,
        options: Options | None,
    ) -> Results:
        finished = rows & self._finished
        running = rows & ~self._finished
        infos = []
        if running.any():
            result = self._reset(running, None, options)
            if running.all():
                self._check("reset", result)
                self._observation, _ = result
            infos.append(self._merge(*result))
        if finished.any():
            # With episodic_life, this goes on with the lives that are left.
            indices = np.flatnonzero(finished)
            actions = _select(self._actions, indices)
            observation, *_, info = self._call("step", actions, indices)
            infos.append(self._merge(observation, info))
        self._finished = self._finished & ~rows
        return self._copies(self._observation), infos

    def _merge(self, observation: Any, info: Info) -> tuple[Info, Mask]:
        """Writes observations of some envs into the batch. Returns their info as a batch."""
        indices = info["env_id"]
        _assign(self._observation, indices, observation)
        rows = ~self._all
        rows[indices] = True
        batch = {}
        for name in {*self.info_names} & info.keys():
            values = info[name]
            shape = (len(rows), *values.shape[1:])
            batch[name] = np.zeros(shape, values.dtype)
            batch[name][indices] = values
        return batch, rows

    def render(self, rows: Sequence[int] | None) -> Any:
        if rows is None:
            rows = range(self.vector_env.num_envs)
        return self._call("render", rows)


# Functions that the engines share.


def autoreset_mode_of(value: Any) -> Any:
    """An autoreset mode, from itself, its value or its name; or the value unchanged."""
    for mode in AutoresetMode:
        if value in (mode, mode.value, mode.name):
            return mode
    return value


def set_attribute(env: Any, name: str, value: Any) -> bool:
    """Sets an attribute of the wrapper that has it, or else of the env, where the env sees it."""
    is_set = env.set_wrapper_attr(name, value, force=False)
    return is_set or env.unwrapped.set_wrapper_attr(name, value)


def interrupted(name: str) -> str:
    """The error after an interrupted call of a vector env that steps in threads or processes."""
    fault = "an earlier call did not finish, and the vector env may still hold its results"
    return refusal(name, fault, remedy=NEW_ENV)


def _select(values: Any, rows: Any) -> Any:
    if isinstance(values, dict):
        return {key: _select(value, rows) for key, value in values.items()}
    return values[rows]


def _assign(values: Any, rows: Any, given: Any) -> None:
    if isinstance(values, np.ndarray):
        values[rows] = given
        return
    for key in values if isinstance(values, dict) else range(len(values)):
        _assign(values[key], rows, given[key])


def _spread(values: NDArray[Any], rows: Mask) -> NDArray[Any]:
    """Values of the rows of a mask as a batch of all rows. The others repeat one of them."""
    latest = np.cumsum(rows) - 1
    return values[np.maximum(latest, 0)]


# Checks of what Gymnasium's envs return.


def check_result(
    owner: str,
    call: str,
    leaves: Leaves,
    result: Any,
    num_envs: int = 1,
) -> Arrays:
    """Raises a TypeError or ValueError unless a step or reset returned a valid result.

    Returns the rewards and flags of a step, as `as_column`.

    Args:
        owner: the env, in error messages.
        call: begins with "step" or "reset".
        leaves: of the observation's space.
        result: the tuple that the call returned.
        num_envs: rewards and flags that the result has.
    """
    names = spaces.COLUMNS if call.startswith("step") else ()
    check_tuple(owner, call, ("observation", *names, "info"), result, repr)
    columns = []
    for index, name in enumerate(names, 1):
        columns.append(as_column(owner, call, name, result[index], num_envs))
    for path, leaf in leaves:
        part = result[0]
        try:
            part = spaces.entry(part, path)
            _fit(part, leaf, leaf.shape)
        except (LookupError, TypeError, ValueError):
            keys = "".join([f"[{key!r}]" for key in path])
            must = f"observation{keys} of {call} must be in {leaf}"
            raise ValueError(refusal(owner, must, f"{part!r}")) from None
    return columns


def as_column(
    owner: str,
    call: str,
    name: str,
    values: Any,
    num_envs: int,
) -> NDArray[Any]:
    """Rewards or flags as a new array `(num_envs, 1)`.

    Raises a ValueError unless they are one number per env: NumPy would make NaN of None.
    """
    try:
        array = np.array(values)
        fits = array.dtype.kind in "biuf" and array.size == num_envs
    except ValueError:  # nested lists of different lengths
        fits = False
    if not fits:
        must = f"{name} of {call} must be one number per env"
        raise ValueError(refusal(owner, must, f"{values!r}"))
    return array.astype(spaces.COLUMNS[name].dtype, copy=False).reshape(num_envs, 1)


def _fit(
    values: Any,
    leaf: Any,
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """Values as an array of a leaf's dtype. Raises a TypeError or ValueError if they do not fit.

    As in `SyncVectorEnv`, other dtypes of the same kind fit. Workers would cast anything.
    """
    array = np.asarray(values)
    fits = array.shape == shape
    if array.dtype != leaf.dtype:
        fits = fits and np.can_cast(array.dtype, leaf.dtype, "same_kind")
        array = spaces.cast(array, leaf.dtype)
    if not fits:
        raise ValueError
    return array
