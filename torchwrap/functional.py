"""FunctionalEnv: a batch of envs from pure functions of one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium.experimental.functional import FuncEnv
from tensordict import TensorDict
from torch import Tensor

from torchwrap import arguments, masks, spaces
from torchwrap.buffer import Submodule
from torchwrap.env import Env
from torchwrap.pool import Pool
from torchwrap.random import Key, Stream
from torchwrap.repeat import repeat
from torchwrap.spaces import Signature

# Their places are the tags of their keys: no two functions of a step draw the same numbers.
_FUNCTIONS = ("initial", "transition", "observation", "reward", "terminal")


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in value.values() for leaf in _leaves(part)]


def _needs(error: Exception) -> str:
    # What PyTorch says of functions that torch.vmap cannot batch is meant for those who know it.
    if "data-dependent control flow" in str(error):
        return "tensor operators, torch.where instead of `if`"
    return "to draw from its rng" if "random operation" in str(error) else "to give tensors"


def _storages(*values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for value in values for leaf in _leaves(value)}


class FunctionalEnv(Env):
    """`num_envs` copies of a world that is written as pure functions: Gymnasium's `FuncEnv`, in torch.

    The functions are `initial(rng)`, `transition(state, action, rng)`, `observation(state, rng)`,
    `reward(state, action, next_state, rng)` and `terminal(state, rng)`. A state is a dict of tensors (one tensor a field
    vectorises best), an observation of a `Dict` space too; `rng` is a `torchwrap.random.Key`: the same functions of it
    always draw the same numbers. Each function is written for one world and batched by `torch.vmap`, or, where the class
    sets `broadcasts = True`, is called with a dimension of worlds in front of every shape: all of them, or in `initial`
    those that begin anew.

    Args:
        func_env: the functions, with `observation_space` and `action_space`.
        num_envs: how many worlds.
        device: where they live.
        max_episode_steps: truncates episodes of that length; never where None.
        action_repeat: does each action that often, or until the episode ends, and sums the rewards; the limit counts each.
        first_index: global index of the first world, for a shard of a larger run.
        params: what differs between worlds: tensors `(num_envs, ...)` by name. The functions get those of their world.
        reset_pool: how many first states to hold ready, where `initial` is expensive: an episode begins in one of them at
            random, and all of them are drawn anew within 256 steps. None where 0.
        render_mode: "rgb_array" where the functions have `render_init` and `render_image`; no pictures where None.
        spec: Gymnasium's `EnvSpec`, where there is one.

    Reset options are passed on as keyword arguments of `initial`.

    >>> from torchwrap.envs.cartpole import CartPole
    >>> env = FunctionalEnv(CartPole(), num_envs=3, max_episode_steps=500)
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([3, 4])
    """

    stream = Submodule()

    def __init__(
        self,
        func_env: FuncEnv[Any, Any, Any, Any, Any, Any, Any],
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        max_episode_steps: int | None = None,
        action_repeat: int = 1,
        first_index: int = 0,
        params: Mapping[str, Tensor] | None = None,
        reset_pool: int = 0,
        render_mode: str | None = None,
        spec: Any = None,
    ) -> None:
        if isinstance(func_env, type) or not all(hasattr(func_env, name) for name in ("observation_space", "action_space")):
            raise TypeError(f"FunctionalEnv needs functions with observation_space and action_space, but got {func_env!r}.")
        device = arguments.device("FunctionalEnv", device)
        if max_episode_steps is not None:
            arguments.integer("FunctionalEnv", "max_episode_steps", max_episode_steps, at_least=1)
        metadata = getattr(func_env, "metadata", {})
        if render_mode not in (None, *metadata.get("render_modes", ())):
            modes = metadata.get("render_modes", [])
            raise ValueError(f"FunctionalEnv needs a render_mode in {modes} or None, but got {render_mode!r}.")
        signature = Signature(
            num_envs, func_env.observation_space, func_env.action_space, device, max_episode_steps, first_index
        )
        super().__init__(signature, spec=spec, metadata=metadata, render_mode=render_mode)
        self.func_env = func_env
        self.action_repeat = arguments.integer("FunctionalEnv", "action_repeat", action_repeat, at_least=1)
        self._painter: Any = None
        for name, value in (params or {}).items():
            if not isinstance(value, Tensor) or value.shape[:1] != (num_envs,):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"FunctionalEnv needs params[{name!r}] as a tensor ({num_envs}, ...), but got {got}.")
            self.register_rows(f"params_{name}", value.to(device, copy=True))
        self.parameter_names = list(params or {})
        arguments.integer("FunctionalEnv", "reset_pool", reset_pool, at_least=0)
        if reset_pool and params:
            raise ValueError("FunctionalEnv needs a reset_pool of 0 where worlds differ in params, but got both.")
        self.stream = Stream(num_envs, first_index, tag=0, device=device)
        self.fields: list[str] = []
        self.aliasing: set[str] = set()
        self._try_out()
        self.pool = Pool(reset_pool, self.state) if reset_pool else None

    def _try_out(self) -> None:
        # One step, to see that what the functions give fits, and which of them give a tensor that is not new at each call.
        name, n, global_state = type(self.func_env).__name__, self.num_envs, torch.get_rng_state()

        def call(function: str, *arguments: Any) -> Any:
            try:
                result, again = self._call(function, *arguments), self._call(function, *arguments)
                given, held = _storages(result), _storages(again, *arguments)
            except Exception as error:
                raise TypeError(f"{name}.{function} needs {_needs(error)}, but got {type(error).__name__}: {error}") from error
            if not torch.equal(global_state, torch.get_rng_state()):
                torch.set_rng_state(global_state)
                raise TypeError(f"{name}.{function} needs to draw from its rng, but got PyTorch's global generator moved.")
            if given & held or any(0 in leaf.stride() for leaf in _leaves(result)):
                self.aliasing.add(function)
            return result

        state = call("initial")
        if not isinstance(state, dict):
            raise TypeError(f"{name}.initial needs to give a dict of tensors, but got {type(state).__name__}.")
        for field, value in state.items():
            if value.shape[:1] != (n,):
                raise ValueError(f"{name}.initial needs to give {field!r} with {n} envs first, but got {tuple(value.shape)}.")
            self.fields.append(field)
            self.register_rows(f"state_{field}", value.clone())
        state, action = self.state, spaces.zeros(self.single_action_space, n, self.device)
        observation = call("observation", state)
        spaces.check(f"{name}.observation", "to give", self.single_observation_space, observation, n, self.device)
        following = call("transition", state, action)
        if set(following) != set(self.fields):
            raise ValueError(f"{name}.transition needs to give fields {self.fields}, but got {list(following)}.")
        for field, value in state.items():
            got = following[field]
            if got.shape != value.shape or got.dtype != value.dtype:
                needed = f"{name}.transition needs to give {field!r} of shape {tuple(value.shape)} {value.dtype}"
                raise ValueError(f"{needed}, but got {tuple(got.shape)} {got.dtype}.")
        reward, terminal = call("reward", state, action, following), call("terminal", following)
        for function, value in (("reward", reward), ("terminal", terminal)):
            if value.shape != (n,):
                raise ValueError(f"{name}.{function} needs to give one scalar an env, but got {tuple(value.shape)} in all.")
        if terminal.dtype != torch.bool:
            raise TypeError(f"{name}.terminal needs to give torch.bool, but got {terminal.dtype}.")

    @property
    def state(self) -> dict[str, Tensor]:
        """The simulator's state by field, each `(num_envs, ...)`: the buffers themselves, so write to them in place."""
        buffers = self._buffers  # sooner than nn.Module's look-up
        return {name: buffers[f"state_{name}"] for name in self.fields}  # type: ignore[misc]

    @property
    def params(self) -> dict[str, Tensor]:
        """What differs between worlds, each `(num_envs, ...)`: the buffers themselves."""
        return {name: self.get_buffer(f"params_{name}") for name in self.parameter_names}

    def _seed(self, seed: int, mask: Tensor) -> None:
        super()._seed(seed, mask)
        if self.pool is not None:
            self.pool.fill(self.pool.slots, self._call("initial", key=self.pool.seed(seed)))

    def _step(self, td: TensorDict) -> TensorDict:
        if self.pool is not None:
            slots, key = self.pool.next()
            self.pool.fill(slots, self._call("initial", key=key))
        return repeat(self._one_step, td, self.action_repeat)

    def _one_step(self, td: TensorDict) -> TensorDict:
        self.stream.next_draw()
        state, action = self.state, td["action"]
        next_state = self._call("transition", state, action)
        reward = self._call("reward", state, action, next_state)
        terminated = self._call("terminal", next_state)
        observation = self._call("observation", next_state)
        self._write(next_state)
        limit = self.signature.max_episode_steps
        truncated = torch.zeros_like(terminated) if limit is None else self.stream.draw >= limit
        return TensorDict(
            {
                "observation": observation,
                "reward": reward.to(torch.float32).view(-1, 1),
                "terminated": terminated.view(-1, 1),
                "truncated": truncated.view(-1, 1),
            },
            batch_size=[self.num_envs],
        )

    def _reset(self, mask: Tensor, options: dict[str, Any] | None = None) -> TensorDict:
        self.stream.next_episode(mask)
        if masks.free_to_look(mask):
            places = masks.rows(mask)
            if len(places):
                first = self._first(options, places)
                for name, value in self.state.items():
                    value.index_copy_(0, places, first[name])
        else:
            first = self._first(options)
            self._write({name: masks.once(masks.where(mask, first[name], value)) for name, value in self.state.items()})
        return TensorDict({"observation": self._call("observation", self.state)}, batch_size=[self.num_envs])

    def _first(self, options: dict[str, Any] | None, places: Tensor | None = None) -> dict[str, Tensor]:
        if self.pool is None or options:
            return self._call("initial", places=places, options=options)
        key = self.stream.key(len(_FUNCTIONS))
        return self.pool.take(key if places is None else key.at(places))

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        if self.render_mode is None:
            raise RuntimeError(f'{self._name()} needs render_mode="rgb_array" at construction for render, but got None.')
        if self._painter is None:
            self._painter = self.func_env.render_init()
        states = {name: value.cpu() for name, value in self.state.items()}
        frames = []
        for row in range(self.num_envs) if envs is None else envs:
            state = {name: value[row] for name, value in states.items()}
            self._painter, frame = self.func_env.render_image(state, self._painter)
            frames.append(frame)
        return tuple(frames)

    def close(self) -> None:
        if self._painter is not None:
            self.func_env.render_close(self._painter)
            self._painter = None

    def _check_options(self, options: dict[str, Any]) -> None:
        known = [name for name in inspect.signature(self.func_env.initial).parameters if name not in ("rng", "params")]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"{self._name()}.reset needs options among {known}, but got {unknown}.")
        try:
            self._call("initial", options=options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self._name()}.reset needs options that fit, but got {options}: {error}") from error

    def _write(self, state: dict[str, Tensor]) -> None:
        for name, value in self.state.items():
            value.copy_(state[name])

    def _nested(self, observation: Any) -> spaces.Value:
        if not isinstance(observation, dict):
            return observation
        return TensorDict({key: self._nested(part) for key, part in observation.items()}, batch_size=[self.num_envs])

    def _call(
        self,
        name: str,
        *arguments: Any,
        key: Key | None = None,
        places: Tensor | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        # For all worlds, for those in some places alone, or for nobody's, with a key.
        function, options = getattr(self.func_env, name), options or {}
        params = self.params if self.parameter_names else {}
        if key is None:
            key = self.stream.key(_FUNCTIONS.index(name))
        if places is not None:
            key = key.at(places)
            params = {field: value.index_select(0, places) for field, value in params.items()}

        def run(key: Key, params: dict[str, Tensor], *arguments: Any) -> Any:
            return function(*arguments, rng=key, **({"params": params} if params else {}), **options)

        if getattr(self.func_env, "broadcasts", False):
            result = run(key, params, *arguments)
        else:
            words, tag = key[:-1], key.tag
            result = torch.vmap(lambda words, *rest: run(Key(*words, tag), *rest))(words, params, *arguments)  # type: ignore[call-arg]
        if name == "observation":
            result = self._nested(result)
        if name not in self.aliasing:
            return result
        return {key: value.clone() for key, value in result.items()} if isinstance(result, dict) else result.clone()
