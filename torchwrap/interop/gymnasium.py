"""Gymnasium's vector envs as torchwrap envs: `from_gymnasium`."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._core import spec as specs
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask, builder, tensordict
from torchwrap.env import Options
from torchwrap.interop._engines import (
    Ale,
    Arrays,
    Engine,
    EnvPool,
    Games,
    Sync,
)
from torchwrap.interop._infos import InfoKeys, InfoReader
from torchwrap.interop._simulator import MethodOfEach, PerEnv, SimulatorEnv
from torchwrap.interop._workers import Async, answer_time
from torchwrap.spaces import Signature

_ENGINES: dict[str, type[Engine]] = {
    "envpool": EnvPool,
    "ale_py": Ale,
}  # by package of the vector env's class


def from_gymnasium(
    vector_env: VectorEnv[Any, Any, Any],
    *,
    device: torch.device | str = "cpu",
    info_keys: InfoKeys = (),
    first_index: int = 0,
    worker_timeout: float | None = 60.0,
) -> GymnasiumEnv:
    """Wraps a Gymnasium vector env, or one of EnvPool or ALE, as a torchwrap env.

    Its `close()` closes the vector env within seconds.

    Args:
        vector_env: in `AutoresetMode.DISABLED` (preferred) or `SAME_STEP`; ALE's in `SAME_STEP`,
            EnvPool's in its own mode. The result owns it from now on. Prefer
            `torchwrap.make(..., vectorization_mode="async")` to an `AsyncVectorEnv` of your own:
            that casts results before they are checked. EnvPool seeds its envs when it makes them:
            `reset` takes no other seed.
        device: of all tensors.
        info_keys: the entries of `info` to pass on under `("next", "info", name)`: a list of names
            of numbers, which become `(num_envs, 1)` float32, or a mapping from names to spaces of
            single arrays.
            Envs whose info lacks an entry get zeros. A name in a list must appear by the end of the
            first episode; otherwise it is taken for a typo. Roots hold the infos of their
            observation under `("info", name)`. Atari games of EnvPool and ALE have "game_over", 1
            where the game ends and not a life alone; ALE has no other info of final steps.
        first_index: global index of the first env; env *i* of a shard is seeded with
            `seed + first_index + i`.
        worker_timeout: seconds for the processes of an `AsyncVectorEnv` to answer a call. None
            disables it, and a vector wrapper around the `AsyncVectorEnv` does, too. If a process
            exits or does not answer, this call and all later ones raise a RuntimeError with its
            index. `close()` still works.

    Raises:
        ValueError: for another vector env in `NEXT_STEP`, whose step after the end of an episode is
            no transition.

    >>> import gymnasium
    >>> mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    >>> vector_env = gymnasium.make_vec("CartPole-v1", 2, "sync", vector_kwargs=mode)
    >>> from_gymnasium(vector_env)
    <CartPole-v1(num_envs=2, device=cpu)>
    """
    return GymnasiumEnv(vector_env, device, info_keys, first_index, worker_timeout)


class GymnasiumEnv(SimulatorEnv):
    """A Gymnasium vector env as a torchwrap env; made by `from_gymnasium`. It has no snapshots."""

    def __init__(
        self,
        vector_env: VectorEnv[Any, Any, Any],
        device: torch.device | str = "cpu",
        info_keys: InfoKeys = (),
        first_index: int = 0,
        worker_timeout: float | None = 60.0,
        spec: EnvSpec | None = None,
    ) -> None:
        _check_vector_env(vector_env)
        spec = spec or _spec_of(vector_env)
        name = type(self).__name__ if spec is None else spec.id
        infos = InfoReader(name, info_keys, vector_env.num_envs)
        engine = _make_engine(vector_env, name, infos.spaces, worker_timeout)
        limit = engine.max_episode_steps
        if spec is not None:
            # A TimeLimit within the envs may be stricter than the registered limit.
            limits = [steps for steps in (limit, spec.max_episode_steps) if steps is not None]
            limit = min(limits, default=None)
            if limit != spec.max_episode_steps:
                spec = specs.limited(spec, limit)
        signature = Signature(
            vector_env.num_envs,
            vector_env.single_observation_space,
            vector_env.single_action_space,
            validation.device("from_gymnasium", device),
            limit,
            first_index,
        )
        super().__init__(
            signature, spec=spec, metadata=vector_env.metadata, render_mode=vector_env.render_mode
        )
        self._engine = engine
        self.same_step = engine.same_step
        self._infos = infos
        self.info_spaces = infos.spaces
        successor = spaces.zero_successor(signature, infos.spaces)
        self._build = {"successor": builder(successor)}
        for key, value in successor.items():
            self._build[key] = builder(value)
        self._next_seed: int | None = None  # The next `_reset` gives row 0 this seed.

    @property
    def vector_env(self) -> Any:
        """The vector env."""
        return self._engine.vector_env

    def _step(self, action: spaces.Value) -> TensorDict:
        actions = spaces.to_numpy(self.signature.single_action_space, action)
        arrays, infos = self._engine.step(actions)
        if self.info_spaces:
            *_, terminated, truncated = arrays
            self._infos.read(infos, has_end=bool((terminated | truncated).any()))
            arrays = self._infos.copies() + arrays
        return self._value("successor", arrays)  # type: ignore[no-any-return]

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        seed = self._next_seed
        self._next_seed = None
        if mask.is_full and isinstance(self._engine, Games):
            self._engine.start_games()
        arrays, infos = self._engine.reset(mask.numpy(), seed, options)
        if self.info_spaces:
            self._infos.read(infos)
        observation = self._value("observation", arrays)
        return tensordict({"observation": observation}, self.signature.num_envs)

    def _leave_out(self, rows: RowMask) -> None:
        self._engine.leave_out(rows.numpy())

    def _value(self, name: str, arrays: Arrays) -> Any:
        tensors = spaces.to_tensors(arrays, self.signature.device)
        return self._build[name](iter(tensors))

    def _choose_seed(
        self, seed: int | None, is_first: bool, mask: torch.Tensor | None = None
    ) -> int | None:
        # EnvPool's seed is fixed.
        seed = self._engine.choose_seed(seed, is_first, self.signature.first_index)
        return super()._choose_seed(seed, is_first, mask)

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        if mask.any():  # otherwise no `_reset` follows
            self._next_seed = seed + self.signature.first_index

    def _check_options(self, options: Options) -> None:
        # The mask is an argument of `reset`.
        if "reset_mask" in options or not self._engine.takes_options:
            super()._check_options(options)

    def _check_usable(self) -> None:
        self._engine.check_usable()

    def _root_info(self) -> dict[str, spaces.Value]:
        if not self.info_spaces:
            return {}
        return {"info": self._value("info", self._infos.copies())}

    # The envs of the simulator.

    def get_wrapper_attr(self, name: str) -> Any:
        values = None if hasattr(self, name) else self._engine.attributes(name)
        if values is None:
            return super().get_wrapper_attr(name)
        if all(map(callable, values)):
            return MethodOfEach(self._engine, name, range(self.num_envs))
        return PerEnv(values)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        if hasattr(self, name) or not self._engine.reaches_envs:
            return super().set_wrapper_attr(name, value, force=force)
        values = value if isinstance(value, list | tuple) else [value] * self.num_envs
        is_set = force or self.has_wrapper_attr(name)
        if is_set:
            self._engine.set_attributes(name, values)
        return is_set

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        return tuple(self._engine.render(envs))

    def close(self) -> None:
        self._engine.close()


def _make_engine(
    vector_env: VectorEnv[Any, Any, Any],
    name: str,
    info_names: Collection[str],
    worker_timeout: float | None,
) -> Engine:
    """The engine for the class of a vector env, or for the class's package."""
    timeout = answer_time("from_gymnasium", worker_timeout)
    if isinstance(vector_env, AsyncVectorEnv):
        return Async(vector_env, name, info_names, timeout)
    if type(vector_env) is SyncVectorEnv:
        return Sync(vector_env, name, info_names)
    for base in type(vector_env.unwrapped).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _ENGINES:
            return _ENGINES[package](vector_env, name, info_names)
    return Engine(vector_env, name, info_names)


def _check_vector_env(vector_env: Any) -> None:
    if not isinstance(vector_env, VectorEnv):
        must = "vector_env must be a gymnasium.vector.VectorEnv"
        got = type(vector_env).__name__
        raise TypeError(refusal("from_gymnasium", must, got, "Make one with gymnasium.make_vec"))


def _spec_of(vector_env: VectorEnv[Any, Any, Any]) -> EnvSpec | None:
    """The vector env's spec with the step limit in force."""
    if not isinstance(vector_env.spec, EnvSpec):
        return None
    spec = copy.deepcopy(vector_env.spec)
    # make_vec records an explicit limit among the kwargs; Gymnasium's -1 means no limit.
    limit = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
    spec.max_episode_steps = None if limit == -1 else limit
    return spec
