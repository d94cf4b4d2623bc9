"""Gymnasium's vector envs as torchwrap envs, and torchwrap envs as Gymnasium's: `from_gymnasium`, `to_gymnasium`."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._core import spec as specs
from torchwrap._core import validation
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.env import Env, Options
from torchwrap.interop import _checks, _engines, _workers
from torchwrap.random import fresh_seed
from torchwrap.spaces import Signature
from torchwrap.transforms.episode import RecordEpisodeStatistics

Mask = NDArray[np.bool_]
InfoKeys = Sequence[str] | Mapping[str, Space[Any]]


def from_gymnasium(
    vector_env: VectorEnv[Any, Any, Any],
    *,
    device: torch.device | str = "cpu",
    info_keys: InfoKeys = (),
    first_index: int = 0,
    worker_timeout: float | None = 60.0,
) -> GymnasiumEnv:
    """Wraps a Gymnasium vector env, or one of EnvPool or ALE, as a torchwrap env, whose `close()` closes it within seconds.

    Args:
        vector_env: in `AutoresetMode.DISABLED` (preferred) or `SAME_STEP`; ALE's in `SAME_STEP`, EnvPool's as it is. The
            result owns it from now on. An `AsyncVectorEnv` of your own casts results before they are checked, and only its own
            `call`, `get_attr` and `set_attr` reach its envs: prefer `torchwrap.make(..., vectorization_mode="async")`. EnvPool
            seeds its envs when it makes them: the first `reset` reports that seed, and `reset` takes no other.
        device: of all tensors.
        info_keys: the entries of `info` to pass on under `("next", "info", name)`: a list of names of numbers, which become
            `(num_envs, 1)` float32, or a mapping from names to spaces. Envs whose info lacks an entry get zeros. A name in a
            list must appear by the end of the first episode; otherwise it is taken for a typo. Roots have `("info", name)`,
            which came with their observation. Atari games of EnvPool and ALE have "game_return", the sum of the game's rewards
            so far (EnvPool's of unclipped ones), and "game_over"; ALE has no other info of final steps.
        first_index: global index of the first env; env *i* of a shard is seeded with `seed + first_index + i`.
        worker_timeout: seconds for the processes of an `AsyncVectorEnv` to answer a call. None disables it. If one exits or
            does not answer, this call and all later ones raise a RuntimeError with its index. `close()` still works.

    Raises:
        ValueError: for another vector env in `NEXT_STEP`, whose step after the end of an episode is no transition.

    >>> import gymnasium
    >>> mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    >>> vector_env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs=mode)
    >>> from_gymnasium(vector_env)
    <CartPole-v1(num_envs=2, device=cpu)>
    """
    return GymnasiumEnv(
        vector_env,
        device=device,
        info_keys=info_keys,
        first_index=first_index,
        worker_timeout=worker_timeout,
    )


def make(
    id: str,
    num_envs: int,
    vectorization_mode: str,
    env: dict[str, Any],
    *,
    wrappers: Sequence[Callable[..., Any]] | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> GymnasiumEnv:
    """Makes a Gymnasium env for `torchwrap.make(..., backend="gymnasium")`. `env` has the arguments of `GymnasiumEnv`."""

    def make_one() -> Any:
        made: Any = gymnasium.make(id, **kwargs)
        for wrapper in wrappers or ():
            made = wrapper(made)
        return made

    timeout = env["worker_timeout"] = _seconds("make", env["worker_timeout"])
    vector_kwargs = {
        **(vector_kwargs or {}),
        "autoreset_mode": AutoresetMode.DISABLED,
        "copy": False,
    }  # tensors are copies
    if vectorization_mode == "sync":
        return GymnasiumEnv(SyncVectorEnv([make_one] * num_envs, **vector_kwargs), **env)
    in_worker = functools.partial(
        _workers.WorkerEnv, make_one, tuple(env["info_keys"]), os.getpid(), timeout
    )
    before = set(multiprocessing.active_children())
    try:
        vector_env = AsyncVectorEnv([in_worker] * num_envs, **vector_kwargs)
    except (EOFError, ConnectionError) as error:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        what = f"one ended, perhaps after it printed an exception, or took more than worker_timeout={timeout} s"
        remedy = 'Pass vectorization_mode="sync" to construct the envs in this process'
        raise RuntimeError(
            f"make could not construct {id} in worker processes: {what}. {remedy}."
        ) from error
    return GymnasiumEnv(vector_env, **env)


def make_envpool(
    id: str, num_envs: int, env: dict[str, Any], *, seed: int | None = None, **kwargs: Any
) -> GymnasiumEnv:
    """Makes an env of EnvPool's for `torchwrap.make(..., backend="envpool")`. `env` has the arguments of `GymnasiumEnv`."""
    first_index = validation.integer("make", "first_index", env["first_index"], at_least=0)
    seed = (
        fresh_seed()
        if seed is None
        else validation.integer("make", "seed", seed, at_least=0, at_most=2**64 - 1)
    )
    make_pool = functools.partial(_engines.make_envpool, id, num_envs, kwargs)
    pool = make_pool(seed + first_index)
    env["spec"].max_episode_steps = _engines.engine(pool).max_episode_steps
    made = GymnasiumEnv(pool, **env)
    made._engine.make = make_pool
    return made


def make_ale(id: str, num_envs: int, env: dict[str, Any], **kwargs: Any) -> GymnasiumEnv:
    """Makes ALE's vector env for `torchwrap.make(..., backend="ale")`. `env` has the arguments of `GymnasiumEnv`."""
    if not str(env["spec"].vector_entry_point).startswith("ale_py"):
        raise ValueError(
            f'make needs the id of a game, such as "ALE/Pong-v5", for backend="ale", but got {id!r}.'
        )
    if "game_return" in env["info_keys"] and kwargs.get("reward_clipping", True):
        remedy = "pass reward_clipping=False, and put transforms.ClipReward(-1, 1) on the env"
        raise ValueError(
            f'make needs unclipped rewards for the info "game_return", but got clipped ones: {remedy}.'
        )
    if kwargs.get("max_episode_steps") == -1:
        del kwargs["max_episode_steps"]
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP, **kwargs}
    try:
        vector_env = gymnasium.make_vec(
            id, num_envs, vectorization_mode="vector_entry_point", **kwargs
        )
    except (TypeError, AssertionError, gymnasium.error.Error) as error:
        remedies = {
            "max_episode_steps": "put transforms.TimeLimit on the env",
            "render_mode": 'pass backend="gymnasium"',
            "seed": "call env.reset(seed=0)",
        }
        remedy = "".join(
            [f". For {name}, {remedies[name]}." for name in remedies if name in kwargs]
        )
        raise ValueError(
            f"make needs arguments that ALE's vector env takes: {error}{remedy}"
        ) from None
    return GymnasiumEnv(vector_env, **env)


def _seconds(owner: str, worker_timeout: float | None) -> float | None:
    # The operating system accepts no time of more than some decades.
    return (
        None
        if worker_timeout is None
        else min(validation.positive(owner, "worker_timeout", worker_timeout), 1e9)
    )


class GymnasiumEnv(_checks.SimulatorEnv):
    """A Gymnasium vector env as a torchwrap env; made by `from_gymnasium`. It has no snapshots."""

    can_snapshot = False

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
            got = f"{type(vector_env).__name__}: make one with gymnasium.make_vec"
            raise TypeError(f"from_gymnasium needs a gymnasium.vector.VectorEnv, but got {got}.")
        engine = _engines.engine(
            vector_env, info_names=() if isinstance(info_keys, str) else info_keys
        )
        if spec is None and isinstance(vector_env.spec, EnvSpec):
            spec = copy.deepcopy(vector_env.spec)
            # make_vec records an explicit limit among the kwargs; Gymnasium's -1 means no limit.
            limit = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
            spec.max_episode_steps = None if limit == -1 else limit
        both = vector_env.single_observation_space, vector_env.single_action_space
        for space, batched in zip(
            both, (vector_env.observation_space, vector_env.action_space), strict=True
        ):
            if batched not in (
                space,
                batch_space(space, vector_env.num_envs),
            ):  # EnvPool has the space of a single env
                remedy = "declare one that contains them all with observation_mode=(batch_space(space, num_envs), space)"
                raise ValueError(
                    f"from_gymnasium needs envs with the same space, but got {batched} for {space}: {remedy}."
                )
        limit = spec.max_episode_steps if spec is not None else engine.max_episode_steps
        device = validation.device("from_gymnasium", device)
        signature = Signature(vector_env.num_envs, *both, device, limit, first_index)
        worker_timeout = _seconds("from_gymnasium", worker_timeout)
        super().__init__(
            signature, spec=spec, metadata=vector_env.metadata, render_mode=vector_env.render_mode
        )
        if isinstance(info_keys, str):
            raise TypeError(
                f"from_gymnasium needs info_keys as a list or a mapping, but got the string {info_keys!r}."
            )
        self._engine = engine
        engine.name = self._name()
        self.same_step, self.can_repeat = engine.mode is AutoresetMode.SAME_STEP, engine.can_repeat
        self.info_spaces = (
            dict(info_keys)
            if isinstance(info_keys, Mapping)
            else dict.fromkeys(info_keys, spaces.REWARD)
        )
        for space in self.info_spaces.values():
            spaces.dtype(space)  # raises for what tensors cannot hold
        self._unseen_info_keys = set() if isinstance(info_keys, Mapping) else set(info_keys)
        shapes = {
            name: (self.num_envs, *(space.shape or ())) for name, space in self.info_spaces.items()
        }
        # The infos that came with the last observations, of `reset` or `step`, and what a step has returned of resets.
        self._infos = {
            name: np.zeros(shape, self.info_spaces[name].dtype) for name, shape in shapes.items()
        }
        self._initial_infos = dict[str, Any]()
        self._root_info = self._current_info if shapes else None
        self._first_seed: int | None = None  # for the next _reset
        # In same-step mode the simulator resets rows before `_reset` is called for them, and has returned the observation.
        self._already_reset = np.zeros(self.num_envs, bool)
        self._workers = _workers.Workers(
            vector_env, self._name(), worker_timeout, engine.has_threads
        )
        own_limit = self._workers.call("its constructor", engine.step_limit)
        if own_limit is not None and (limit is None or own_limit < limit):
            self.signature = signature.replace(max_episode_steps=own_limit)
            self._spec = spec and specs.limited(spec, own_limit)
        if (
            self._workers.processes
        ):  # at the end of the program, too, before Python waits for the processes
            Finalize(self, _workers.Workers.close, (self._workers,), exitpriority=10)

    @property
    def vector_env(self) -> Any:
        """The vector env. A seed replaces one of EnvPool that has not taken a step."""
        return self._engine.vector_env

    def _check_usable(self) -> None:
        self._workers.check()

    def _choose_seed(
        self, seed: int | None, is_first: bool, mask: torch.Tensor | None = None
    ) -> int | None:
        chosen = self._engine.choose_seed(
            self._name(), self.signature.first_index, seed, is_first, mask
        )
        return super()._choose_seed(chosen, is_first)

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        if mask.any():  # otherwise no `_reset` follows
            self._first_seed = seed + self.signature.first_index
            self._workers.vector_env = self._engine.seeded(self._first_seed)

    def _step(self, action: spaces.Value) -> TensorDict:
        actions = spaces.to_numpy(self.single_action_space, action)
        live = None if self._live is None else self._live.numpy()
        reward, terminated, truncated, info = self._workers.call(
            "step", self._engine.step, actions, live
        )
        given = {"reward": reward, "terminated": terminated, "truncated": truncated}
        columns = {
            name: _checks.as_numbers(self._name(), "step", name, given[name], self.num_envs)
            for name in given
        }
        successor = self._to_tensors(self._engine.observation)
        has_final = np.zeros(self.num_envs, bool)
        if self.same_step:
            self._already_reset = done = np.logical_or(terminated, truncated)
            if done.any():
                has_final = self._engine.has_final(info, done)
            if has_final.any():
                rows = np.flatnonzero(has_final)
                successor[spaces.tensor(rows, self.device)] = self._to_tensors(
                    self._final_observations(info, rows)
                )
        result = {"observation": successor}
        for name, values in columns.items():
            dtype = np.float32 if name == "reward" else np.bool_
            result[name] = spaces.tensor(
                np.array(values, dtype).reshape(self.num_envs, 1), self.device
            )
        if self.info_spaces:
            self._read_infos(info, ~has_final if self.same_step else None)
            if (
                self.same_step
            ):  # in rows that are already reset, the info of the transition is in final_info
                self._initial_infos = info
                self._read_infos(info.get("final_info", {}), has_final)
            if self._unseen_info_keys and np.logical_or(terminated, truncated).any():
                got = f"{sorted(self._unseen_info_keys)}. It contains {sorted(self._engine.known_names(info))}"
                raise ValueError(
                    f"{self._name()} needs info_keys that its info contains, but got {got}."
                )
            result |= self._current_info()
        return tensordict(result, self.num_envs)

    def _final_observations(self, info: dict[str, Any], rows: NDArray[np.intp]) -> Any:
        space, final = self.single_observation_space, info.get("final_obs")
        try:
            # One per env, as Gymnasium's; or a batch of a Dict or Tuple.
            each = (
                list(iterate(self.observation_space, final)) if isinstance(final, dict) else final
            )
            return concatenate(
                space, tuple([each[row] for row in rows]), create_empty_array(space, len(rows))
            )  # type: ignore[arg-type,index]
        except Exception as error:
            needed = f'info["final_obs"] to hold the final observations of envs {rows.tolist()} in SAME_STEP'
            raise ValueError(f"{self._name()} needs {needed}, but got {final!r}.") from error

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        rows = mask.numpy()
        first_seed, self._first_seed = self._first_seed, None
        # If this call is interrupted, the next one resets every row.
        already_reset, self._already_reset = self._already_reset, np.zeros(self.num_envs, bool)
        to_reset = rows & ~already_reset if first_seed is None and options is None else rows
        if self.same_step:
            self._read_infos(self._initial_infos, rows & ~to_reset)
        if to_reset.any():
            info = self._workers.call("reset", self._engine.reset, to_reset, first_seed, options)
            self._read_infos(info, to_reset)
        self._already_reset = already_reset & ~rows
        return tensordict(
            {"observation": self._to_tensors(self._engine.observation)}, self.num_envs
        )

    def _check_options(self, options: Options) -> None:
        if "reset_mask" in options:
            raise ValueError(
                f"{self._name()}.reset takes no option reset_mask: pass mask=torch.as_tensor(reset_mask)."
            )
        if not self._engine.takes_options:
            super()._check_options(options)

    def _read_infos(self, infos: dict[str, Any], rows: Mask | None = None) -> None:
        """Keeps what an info holds for some envs, or for all. Envs whose info lacks an entry get zeros."""
        for name, values in self._infos.items():
            given = infos.get(f"_{name}", name in infos)
            found: Any = given if rows is None else rows & given
            if given is True:
                found = ... if rows is None else rows
            else:
                values[... if rows is None else rows] = 0
            if name in infos:
                self._unseen_info_keys.discard(name)
                try:
                    values[found] = np.asarray(infos[name])[found].reshape(-1, *values.shape[1:])
                except (IndexError, TypeError, ValueError):
                    needed = f"{self._name()} needs info[{name!r}] to fit {self.info_spaces[name]}, but got {infos[name]!r}"
                    remedy = f"Declare its space in info_keys: {{{name!r}: Box(...)}}. For strings and other objects, "
                    remedy += f'env.get_wrapper_attr("{name}") reads an attribute of each env'
                    raise ValueError(f"{needed}. {remedy}.") from None

    def _current_info(self) -> dict[str, spaces.Value]:
        tensors = {
            name: spaces.tensor(values.copy(), self.device) for name, values in self._infos.items()
        }
        return {"info": tensordict(tensors, self.num_envs)}

    def _to_tensors(self, observation: Any) -> spaces.Value:
        return spaces.from_numpy(self.single_observation_space, observation, self.device)

    def has_wrapper_attr(self, name: str) -> bool:
        return super().has_wrapper_attr(name) or None not in self._workers.find(name)

    def get_wrapper_attr(self, name: str) -> Any:
        found: Sequence[Any] = (None,) if hasattr(self, name) else self._workers.find(name)
        if None in found:
            return super().get_wrapper_attr(name)
        if all(is_method for is_method, _ in found):
            return functools.partial(self._workers.call, name, self._workers.base.call, name)
        return tuple([value for _, value in found])

    def _set_in_simulator(self, name: str, value: Any) -> bool:
        if not self._workers.reach_envs:
            return super()._set_in_simulator(name, value)
        is_found = None not in self._workers.find(name)
        if is_found:
            self._workers.call(name, self._workers.base.set_attr, name, [value] * self.num_envs)
        return is_found

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        if self.render_mode is None:
            raise RuntimeError(
                f'{self._name()} was made without a render mode: make it with render_mode="rgb_array".'
            )
        return tuple(self._workers.call("render", self._engine.render, envs))

    def close(self) -> None:
        self._workers.close()


def to_gymnasium(
    env: Env, *, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP
) -> TorchwrapVectorEnv:
    """Exports a torchwrap env as a `gymnasium.vector.VectorEnv`, which takes and returns NumPy arrays.

    Results are as from `SyncVectorEnv`; no later step changes the arrays. If the env has `RecordEpisodeStatistics`, the infos
    of a step in which episodes end have `episode` with `r`, `l` and `t`, and so does `final_info`.

    Args:
        env: the env. The result owns it from now on, and its `close()` closes it.
        autoreset_mode: `SAME_STEP`, in which `infos["final_obs"]` holds the final observations and `infos["final_info"]` the
            infos of the finished envs, or `DISABLED`, in which `reset(options={"reset_mask": mask})` resets them.

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
        mode = _engines.mode(autoreset_mode)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
            remedy = "in other modes, the step after the end of an episode is no transition. Use SAME_STEP"
            raise ValueError(
                f"to_gymnasium needs AutoresetMode.SAME_STEP or DISABLED, but got {autoreset_mode!r}: {remedy}."
            )
        self.metadata = {**env.metadata, "autoreset_mode": mode}
        self.spec, self.render_mode, self.num_envs = env.spec, env.render_mode, env.num_envs
        self.single_observation_space, self.observation_space = (
            env.single_observation_space,
            env.observation_space,
        )
        self.single_action_space, self.action_space = env.single_action_space, env.action_space
        self.max_episode_steps = env.signature.max_episode_steps  # without a spec, too
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._records = {
            record.stats_key: record.keys for record in RecordEpisodeStatistics.of(env)
        }
        self._start_times = np.full(self.num_envs, time.perf_counter())
        self._to_reset = np.zeros(
            self.num_envs, np.bool_
        )  # finished envs, if they do not reset themselves

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if isinstance(seed, list | tuple | np.ndarray):
            remedy = "pass reset(seed=0), from which every env gets a random stream of its own"
            raise TypeError(f"{self}.reset needs one seed, an integer, but got {seed!r}: {remedy}.")
        mask = np.ones(self.num_envs, np.bool_)
        if isinstance(options, dict):
            options = dict(
                options
            )  # Gymnasium's wrappers read the mask from theirs after this call
            mask = options.pop("reset_mask", mask)
            if isinstance(state := options.get("state"), dict) and not self.env.host_stepped:
                options["state"] = {
                    name: torch.as_tensor(value, device=self.env.device)
                    for name, value in state.items()
                }
            if (
                not isinstance(mask, np.ndarray)
                or mask.dtype != np.bool_
                or mask.shape != (self.num_envs,)
                or not mask.any()
            ):
                needed = f"options['reset_mask'] as an array ({self.num_envs},) of np.bool_ with at least one True"
                got = f"{mask.dtype} {mask!r}" if isinstance(mask, np.ndarray) else repr(mask)
                raise ValueError(f"{self}.reset needs {needed}, but got {got}.")
        rows = None if mask.all() else torch.as_tensor(mask, device=self.env.device)
        td = self.env.reset(seed, rows, options)
        super().reset(seed=None if seed is None else int(seed))
        self._start_times[mask] = time.perf_counter()
        self._to_reset[mask] = False
        return spaces.to_numpy(self.single_observation_space, td["observation"]), _batch_infos(
            td.get("info", {}), mask
        )

    def step(self, actions: Any) -> tuple[Any, NDArray[np.float64], Mask, Mask, dict[str, Any]]:
        if self._to_reset.any():
            ended = np.flatnonzero(self._to_reset).tolist()
            remedy = 'in AutoresetMode.DISABLED, call reset(options={"reset_mask": terminations | truncations})'
            raise RuntimeError(
                f"{self} needs a reset of envs {ended}, whose episodes have ended, before step(): {remedy}."
            )
        transition, td = (self.env.step if self._same_step else self.env.step_without_reset)(
            self._to_tensors(actions)
        )
        successor = transition["next"]
        names = ("reward", "terminated", "truncated")
        reward, terminated, truncated = (
            successor[name].squeeze(-1).numpy(force=True) for name in names
        )
        done = terminated | truncated
        infos = self._infos(successor, done)
        for name, values in (
            _batch_infos(td.get("info", {}), done).items() if self._same_step else ()
        ):
            infos.setdefault(name, values)[done] = values[done]  # of the resets
        if not self._same_step:
            self._to_reset = done
        self._start_times[done] = time.perf_counter()
        observation = spaces.to_numpy(self.single_observation_space, td["observation"])
        return observation, reward.astype(np.float64), terminated, truncated, infos

    def _to_tensors(self, actions: Any) -> spaces.Value:
        for path, space in spaces.leaves(self.single_action_space):
            try:
                part = spaces.at(actions, path)
                dtype = np.asarray(part).dtype
            except (IndexError, KeyError, TypeError, ValueError):
                raise ValueError(
                    f"{self}.step needs actions of {self.action_space}, but got {actions!r}."
                ) from None
            if not isinstance(space, gymnasium.spaces.Box) and dtype.kind not in "iub":
                raise ValueError(
                    f"{self}.step needs integers as actions of {space}, but got {part!r} of dtype {dtype}."
                )
        return spaces.from_numpy(self.single_action_space, actions, self.env.device)

    def _infos(self, successor: TensorDict, done: Mask) -> dict[str, Any]:
        info = dict(successor.get("info", {}).items())
        infos = _batch_infos(info, ~done if self._same_step else np.ones_like(done))
        if not done.any():
            return infos
        statistics = self._statistics(successor, done)
        if self._same_step:
            infos["final_obs"], infos["_final_obs"] = np.full(self.num_envs, None), done.copy()
            ended = torch.as_tensor(done, device=self.env.device)
            final = spaces.to_numpy(self.single_observation_space, successor["observation"][ended])
            for row, observation in zip(
                np.flatnonzero(done), iterate(self.observation_space, final), strict=True
            ):
                infos["final_obs"][row] = observation
            # Gymnasium keeps statistics of single envs here, and its vector wrapper keeps them at the top, as below.
            infos["final_info"], infos["_final_info"] = (
                _batch_infos({**info, **statistics}, done),
                done.copy(),
            )
        for key, value in statistics.items():
            infos[key], infos[f"_{key}"] = value, done.copy()
        return infos

    def _statistics(self, successor: TensorDict, done: Mask) -> dict[str, dict[str, NDArray[Any]]]:
        seconds = np.round(time.perf_counter() - self._start_times, 6)
        statistics = {}
        for stats_key, keys in self._records.items():
            if keys["return"] in successor:  # a layer above may have dropped it
                columns = {
                    name: successor[key].squeeze(-1).numpy(force=True) for name, key in keys.items()
                }
                columns = {
                    "r": columns.pop("return").astype(np.float64),
                    "l": columns.pop("length"),
                    "t": seconds,
                    **columns,
                }
                statistics[stats_key] = {
                    name: np.where(done, column, 0) for name, column in columns.items()
                }
        return statistics

    def render(self) -> tuple[Any, ...]:
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        if hasattr(
            self, "env"
        ):  # Gymnasium before 1.4 also closes what the constructor has refused
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
