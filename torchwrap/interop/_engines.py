"""Engines: how vector envs differ in what they take as seeds, reset, and return as final observations."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from gymnasium import Wrapper
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from torchwrap import spaces
from torchwrap.env import Options
from torchwrap.interop import _checks, _workers

_SEEDS = 2**31
"""EnvPool and ALE keep seeds in an int32. Larger ones are taken modulo this number."""

_NO_LIMIT = 2**31 - 1
"""EnvPool's time limit of episodes that are not truncated."""


class Engine:
    """Gymnasium's own vector envs, and all that take and return what they do."""

    modes: tuple[AutoresetMode, ...] = (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP)
    remedy = (
        'Make it with torchwrap.make(id, num_envs, backend="gymnasium"), or pass vectorization_mode="sync" '
        'and vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED} to make_vec.'
    )
    takes_options = True
    can_repeat = False  # as `Env.can_repeat`
    has_threads = False  # of which one may still hold the results of an interrupted call
    max_episode_steps: int | None = (
        None  # the time limit in force, where no spec of Gymnasium's has it
    )
    observation: Any = None  # the last one of all rows
    name = "from_gymnasium"  # in messages
    make: Callable[[int], Any] | None = (
        None  # makes the vector env with a seed, if it takes seeds there alone
    )

    def __init__(self, vector_env: VectorEnv[Any, Any, Any], info_names: Collection[str]) -> None:
        self.vector_env: Any = vector_env
        self.info_names = info_names  # the entries of infos that are read
        self._unchecked = {"step", "reset"}
        self._game_returns = np.zeros(vector_env.num_envs)
        self.mode = self._read_mode()
        if self.mode not in self.modes:
            needed = (
                f"a vector env in AutoresetMode.{' or '.join(mode.name for mode in self.modes)}"
            )
            remedy = f"in other modes the step after the end of an episode is no transition. {self.remedy}"
            raise ValueError(f"from_gymnasium needs {needed}, but got {self.mode}: {remedy}")

    def _read_mode(self) -> Any:
        return mode((self.vector_env.metadata or {}).get("autoreset_mode"))

    def step_limit(self) -> int | None:
        """The step limit that all envs share. Their `TimeLimit`s are not in the spec of a vector env."""
        base, name = self.vector_env.unwrapped, "_max_episode_steps"
        limits = {getattr(base, "max_episode_steps", None)}
        if isinstance(base, SyncVectorEnv):
            limits = {
                min(vars(layer).get(name) or _NO_LIMIT for layer in _layers(env))
                for env in base.envs
            }
        elif isinstance(base, AsyncVectorEnv) and all(base.call("has_wrapper_attr", name)):
            limits = set(base.get_attr(name))
        limit = limits.pop()
        return limit if isinstance(limit, int) and limit != _NO_LIMIT and not limits else None

    def choose_seed(
        self, owner: str, first_index: int, seed: int | None, is_first: bool, mask: Any
    ) -> int | None:
        """As `Env._choose_seed`."""
        return seed

    def seeded(self, seed: int) -> Any:
        """The vector env that a reset with this seed resets: another one, if it takes seeds only where it is made."""
        return self.vector_env

    def step(self, actions: Any, rows: Any = None) -> tuple[Any, ...]:
        """A step of all envs: rewards, flags and infos. With `rows`, a mask, the others return their last results again."""
        self.observation, *result = self._checked("step", self.vector_env.step(actions))
        return tuple(result)

    def _checked(self, call: str, result: Any) -> Any:
        """The first result of `step` and of `reset`, with numbers and observations of all envs."""
        if call in self._unchecked:
            num_envs, space = self.vector_env.num_envs, self.vector_env.single_observation_space
            _checks.result(self.name, call, batch_space(space, num_envs), result, num_envs)
            self._unchecked.remove(call)
        for index, error in enumerate(result[-1].get(_workers.ERROR, ())):
            if error is not None:
                raise RuntimeError(f"In {self.name}, env {index} raised {error}")
        return result

    def _add_games(self, info: dict[str, Any], reward: Any, over: Any) -> None:
        """Adds to the info the return of each game, of which an episode may be one life, and whether the game is over."""
        info.update(game_return=self._game_returns + reward, game_over=over)
        self._game_returns = np.where(over, 0, info["game_return"])

    def has_final(self, info: dict[str, Any], done: Any) -> Any:
        """The rows of `info["final_obs"]` that hold a final observation, in `SAME_STEP`."""
        return done

    def known_names(self, info: dict[str, Any]) -> set[str]:
        """The names of all entries of the infos of the last step, whose result `info` is."""
        return {
            name
            for entries in (info, info.get("final_info", {}))
            for name in entries
            if not name.startswith("_")
        }

    def reset(self, rows: Any, seed: int | None, options: Options | None) -> dict[str, Any]:
        """Resets the rows of a mask, of which row *i* gets the seed `seed + i`. Returns infos, for all rows."""
        # Gymnasium's count on from one number, and ignore the seeds of rows outside the mask.
        self.observation, info = self._checked("reset", self._reset_mask(rows, seed, options))
        return info  # type: ignore[no-any-return]

    def _reset_mask(
        self, rows: Any, seed: Any, options: Options | None
    ) -> tuple[Any, dict[str, Any]]:
        mask_option = {} if rows.all() else {"reset_mask": rows}
        # A new dict, because Gymnasium removes the mask from it.
        return self.vector_env.reset(seed=seed, options={**(options or {}), **mask_option} or None)

    def render(self, rows: Any) -> Any:
        """The frames of some rows, or of all."""
        frames = self.vector_env.render()
        return frames if rows is None else [frames[row] for row in rows]


class Sync(Engine):
    """Gymnasium's `SyncVectorEnv`, env by env: without its auto-reset, its batches of all infos, and one of its copies."""

    can_repeat = True

    def __init__(self, vector_env: VectorEnv[Any, Any, Any], info_names: Collection[str]) -> None:
        super().__init__(vector_env, info_names)
        self.mode = AutoresetMode.DISABLED
        self._observations: list[Any] = [None] * vector_env.num_envs
        self._results: list[Any] = self._observations
        # NumPy's cast to narrower integers wraps around, whatever the first step has returned.
        dtypes = [
            np.dtype(leaf.dtype) for _, leaf in spaces.leaves(vector_env.single_observation_space)
        ]
        self._may_wrap = any(dtype.kind in "iu" and dtype.itemsize < 8 for dtype in dtypes)
        self._batched: Any = create_empty_array(
            vector_env.single_observation_space, vector_env.num_envs
        )

    def step(self, actions: Any, rows: Any = None) -> tuple[Any, ...]:
        chosen = [True] * len(self._results) if rows is None else rows.tolist()
        batch = zip(
            self.vector_env.envs,
            iterate(self.vector_env.action_space, actions),
            self._results,
            chosen,
            strict=True,
        )
        self._results = [
            env.step(action) if is_chosen else last for env, action, last, is_chosen in batch
        ]
        if "step" in self._unchecked:
            self._check_steps(self._results)
        try:
            observations, reward, terminated, truncated, infos = zip(*self._results, strict=True)
            self._set_observations(list(observations))
        except Exception:  # NumPy's, which names no env
            self._check_steps(self._results)
            raise
        return reward, terminated, truncated, self._batched_infos(infos)

    def known_names(self, info: dict[str, Any]) -> set[str]:
        return {name for *_, entries in self._results for name in entries}

    def _batched_infos(self, infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        info: dict[str, Any] = {}
        for name in self.info_names:
            found = [entries[name] for entries in infos if name in entries]
            if len(found) == len(infos):
                info[name] = found
            elif found:  # of which one stands in where there is none
                info[name] = [entries.get(name, found[0]) for entries in infos]
                info[f"_{name}"] = np.array([name in entries for entries in infos])
        return info

    def reset(self, rows: Any, seed: int | None, options: Options | None) -> dict[str, Any]:
        space, infos = self.vector_env.single_observation_space, list[dict[str, Any]]()
        for row in np.flatnonzero(rows).tolist():
            own_seed = None if seed is None else seed + row
            result = self.vector_env.envs[row].reset(seed=own_seed, options=options)
            _checks.result(self.name, f"reset of env {row}", space, result)
            self._observations[row], info = result
            infos = infos or [info] * len(
                rows
            )  # the first one stands in for rows that are not reset
            infos[row] = info
        self._set_observations(self._observations)
        return self._batched_infos(infos)

    def _check_steps(self, results: list[Any]) -> None:
        space = self.vector_env.single_observation_space
        is_exact = [
            _checks.result(self.name, f"step of env {row}", space, each)
            for row, each in enumerate(results)
        ]
        if all(is_exact) and not self._may_wrap:
            self._unchecked.discard("step")

    def _set_observations(self, observations: list[Any]) -> None:
        self._observations = observations
        self.observation = concatenate(
            self.vector_env.single_observation_space, observations, self._batched
        )


class Ale(Engine):
    """ALE's `AtariVectorEnv`. It has no `DISABLED`; a masked reset in `NEXT_STEP` ends games `life_loss_info` goes on with."""

    modes = (AutoresetMode.SAME_STEP,)
    remedy = "Pass autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP to AtariVectorEnv or make_vec."
    takes_options = False
    has_threads = True

    def __init__(self, vector_env: VectorEnv[Any, Any, Any], info_names: Collection[str]) -> None:
        super().__init__(vector_env, info_names)
        _check_batch(
            "ALE's vector env", vector_env.num_envs, getattr(vector_env.unwrapped, "batch_size", 0)
        )
        self._games: Any = None  # by row, the number of the frame before its game

    def _read_mode(self) -> Any:
        # Its constructor writes into the metadata of every other one.
        return getattr(self.vector_env.unwrapped, "autoreset_mode", None)

    def step(self, actions: Any, rows: Any = None) -> tuple[Any, ...]:
        reward, *flags, info = super().step(actions)
        games, self._games = self._games, self._read_games(info)
        self._add_games(info, reward, games != self._games)
        info["final_info"] = {name: info[name] for name in ("game_return", "game_over")}
        # An episode that begins here has the infos of the next game, if the last one is over.
        info.update(game_return=self._game_returns, game_over=np.zeros_like(info["game_over"]))
        return reward, *flags, info

    def has_final(self, info: dict[str, Any], done: Any) -> Any:
        # With life_loss_info, games go on after an end. ALE does not write their rows of final_obs.
        return info["final_info"]["game_over"]

    def reset(self, rows: Any, seed: int | None, options: Options | None) -> dict[str, Any]:
        # An array has one seed for each row that is reset.
        seeds = None if seed is None else (seed % _SEEDS + np.flatnonzero(rows)) % _SEEDS
        self.observation, info = self._reset_mask(rows, seeds, options)
        self._games = self._read_games(info)
        self._game_returns[rows] = 0
        return info

    def _read_games(self, info: dict[str, Any]) -> Any:
        return info["frame_number"] - info["episode_frame_number"]


class EnvPool(Engine):
    """EnvPool. Its auto-reset is a step that ignores its action; only the finished rows take it, in the same step."""

    modes = (AutoresetMode.NEXT_STEP,)
    takes_options = False
    has_threads = True

    def __init__(self, pool: Any, info_names: Collection[str]) -> None:
        super().__init__(pool, info_names)
        if pool is not pool.unwrapped:
            remedy = "Gymnasium's wrappers take its auto-reset for a step. Put torchwrap's transforms on the result instead"
            raise ValueError(
                f"from_gymnasium needs EnvPool's env itself, but got {type(pool).__name__} around it: {remedy}."
            )
        config = pool.config
        _check_batch("EnvPool", config["num_envs"], config["batch_size"])
        self._seed = [*config.get("env_seed", ()), config["seed"]][0]  # of row 0
        limit = config.get("max_episode_steps")
        self.max_episode_steps = None if limit == _NO_LIMIT else limit
        self._was_reset = False
        self._finished, self._actions = np.zeros(config["num_envs"], bool), None

    def choose_seed(
        self, owner: str, first_index: int, seed: int | None, is_first: bool, mask: Any
    ) -> int | None:
        made_with = (self._seed - first_index) % _SEEDS
        if seed is None:
            return made_with if is_first else None
        can_make = (
            self.make is not None and self._actions is None and (mask is None or bool(mask.all()))
        )
        if not can_make and (seed % _SEEDS != made_with or self._was_reset):
            needed = (
                f"seed={made_with}, with which the pool was made, and none after the first reset"
            )
            if self.make is not None:
                needed = "a seed for all envs before their first step, or none"
            remedy = (
                f'make a new one with torchwrap.make(id, num_envs, backend="envpool", seed={seed})'
            )
            raise ValueError(
                f"{owner}.reset needs {needed}, but got {seed}. EnvPool seeds envs when it makes them: {remedy}."
            )
        return seed

    def seeded(self, seed: int) -> Any:
        if self.make is not None and (seed % _SEEDS != self._seed or self._was_reset):
            pool, self.vector_env, self._seed = self.vector_env, self.make(seed), seed % _SEEDS
            pool.close()
        return self.vector_env

    def step(self, actions: Any, rows: Any = None) -> tuple[Any, ...]:
        reward, terminated, truncated, info = super().step(actions)
        self._actions, self._finished = actions, terminated | truncated
        if {
            "lives",
            "reward",
            "terminated",
        } <= info.keys():  # of an Atari game, the last two without clipping and lost lives
            self._add_games(info, info["reward"], (info["terminated"] > 0) | truncated)
        return reward, terminated, truncated, info

    def reset(self, rows: Any, seed: int | None, options: Options | None) -> dict[str, Any]:
        self._was_reset = True
        infos: dict[str, Any] = {}
        finished, running = rows & self._finished, rows & ~self._finished
        self._game_returns[running] = 0
        if running.all():
            self.observation, infos = self._reset_mask(running, None, options)
        elif running.any():
            self._assign(infos, *self._reset_mask(running, None, options))
        if finished.any():
            # EnvPool's own auto-reset. With episodic_life, it goes on with the lives that are left; reset() starts a new game.
            env_ids = np.flatnonzero(finished)
            observation, _, _, _, info = self.vector_env.step(
                _select(self._actions, env_ids), env_ids
            )
            self._assign(infos, observation, info)
        self._finished = self._finished & ~rows
        return infos

    def _assign(self, infos: dict[str, Any], observation: Any, info: dict[str, Any]) -> None:
        # Writes the results of some envs into the results of all.
        _assign(self.observation, info["env_id"], observation)
        for name in set(self.info_names).intersection(info):
            shape = len(self._finished), *info[name].shape[1:]
            infos.setdefault(name, np.zeros(shape, info[name].dtype))[info["env_id"]] = info[name]

    def render(self, rows: Any) -> Any:
        return self.vector_env.render(range(self.vector_env.num_envs) if rows is None else rows)


def mode(value: Any) -> Any:
    """An autoreset mode, from itself, its value or its name; anything else as it is."""
    return next((each for each in AutoresetMode if value in (each, each.value, each.name)), value)


def engine(vector_env: VectorEnv[Any, Any, Any], info_names: Collection[str] = ()) -> Engine:
    """The engine of a vector env, by its class or the package that defines it."""
    packages = {base.__module__.partition(".")[0] for base in type(vector_env.unwrapped).__mro__}
    own = Sync if type(vector_env) is SyncVectorEnv else Engine
    kind = EnvPool if "envpool" in packages else Ale if "ale_py" in packages else own
    return kind(vector_env, info_names)


def make_envpool(id: str, num_envs: int, kwargs: dict[str, Any], seed: int) -> Any:
    """Makes EnvPool's vector env of an id, with `seed + i` for env *i*, and without a time limit if it is -1."""
    try:
        envpool = importlib.import_module("envpool")
    except ImportError as error:
        needed = 'make needs the package envpool for backend="envpool"'
        raise ImportError(
            f"{needed}: {error}. Install it with `pip install torchwrap[envpool]`."
        ) from error
    if id not in envpool.list_all_envs():
        name = id.rpartition("/")[2]
        remedy = (
            f"pass {name!r}"
            if name in envpool.list_all_envs()
            else "`envpool.list_all_envs()` lists them"
        )
        raise ValueError(
            f'make needs an id that EnvPool has for backend="envpool", but got {id!r}: {remedy}.'
        )
    if kwargs.get("max_episode_steps") == -1:
        kwargs["max_episode_steps"] = _NO_LIMIT
    try:
        return envpool.make(
            id, env_type="gymnasium", num_envs=num_envs, seed=seed % _SEEDS, **kwargs
        )
    except (TypeError, AssertionError) as error:
        raise ValueError(f"make needs arguments that EnvPool's {id} takes: {error}") from None


def _layers(env: Any) -> list[Any]:
    return [env, *_layers(env.env)] if isinstance(env, Wrapper) else [env]


def _check_batch(owner: str, num_envs: int, batch_size: int) -> None:
    if batch_size not in (0, num_envs):
        raise ValueError(
            f"from_gymnasium needs {owner} to step all {num_envs} envs together, but got {batch_size=}: omit it."
        )


def _select(values: Any, rows: Any) -> Any:
    return (
        {key: _select(value, rows) for key, value in values.items()}
        if isinstance(values, dict)
        else values[rows]
    )


def _assign(values: Any, rows: Any, given: Any) -> None:
    if isinstance(values, dict):
        for key, value in values.items():
            _assign(value, rows, given[key])
    else:
        values[rows] = given
