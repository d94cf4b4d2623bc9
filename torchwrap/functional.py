"""FunctionalEnv: a batch of envs from the pure functions of a single env."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium.experimental.functional import FuncEnv
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import nested, validation
from torchwrap._core.env_buffers import SubmoduleAttribute
from torchwrap._core.row_mask import RowMask
from torchwrap._core.tracing import is_host_readable
from torchwrap._env.batched_functions import BatchedFunctions
from torchwrap._env.host_steps import HostSteps
from torchwrap._env.initial_states import InitialStatePool
from torchwrap._env.repeat import repeat
from torchwrap.env import Env
from torchwrap.random import Key, Stream
from torchwrap.spaces import Signature

_SUCCESSOR = ("observation", "reward", "terminated", "truncated", "done")
_SMALL = 1024  # envs, for which an operator of NumPy takes less time than one of PyTorch
# The index of a function is part of its key, so that no two functions of a step draw the same numbers.
_FUNCTIONS = ("initial", "transition", "observation", "reward", "terminal")
_CLOCK = Key._fields[:5]


class FunctionalEnv(Env):
    """`num_envs` copies of an env that is written as pure functions: Gymnasium's `FuncEnv`, in torch.

    Write each function for a single env; `torch.vmap` batches it.

    | function | returns, for a single env |
    |---|---|
    | `initial(rng)` | the initial state: a dict of tensors, with the same fields, shapes and dtypes at every call |
    | `transition(state, action, rng)` | the next state, with the same fields |
    | `observation(state, rng)` | a tensor, or a dict of tensors for a `Dict` space, that lies in `observation_space` |
    | `reward(state, action, next_state, rng)` | a scalar of any real dtype |
    | `terminal(state, rng)` | a bool scalar |

    `rng` is a `torchwrap.random.Key`. Draw from it with the functions of `torchwrap.random`, and use `rng.fold_in(1)`,
    `rng.fold_in(2)`, ... for further independent draws in the same function. Use tensor operators only: `torch.where` instead
    of `if`. State fields that are scalars vectorize best. Keyword arguments of `initial` are the env's reset options.

    A class that sets `is_pure = True` promises that results depend on the arguments and on the attributes of the object alone.
    Up to 1,024 envs on the CPU, uncompiled, then run its functions several times as fast: they are traced once, and computed
    in NumPy; and initial states and their observations are drawn for many episodes at once.

    A class that sets `broadcasts = True` is called without `torch.vmap`. All tensors then have the leading dimension of
    `rng.env.shape`: the whole batch, or, in `initial` and `observation`, any number of its rows.

    Args:
        func_env: the functions, with `observation_space` and `action_space` of a single env.
        num_envs: number of envs.
        device: of all tensors.
        max_episode_steps: truncates episodes at this length. None disables it.
        action_repeat: repeats each action this often, or until the episode ends, and sums the rewards. Each repetition counts
            towards `max_episode_steps`.
        first_index: global index of the first env, for a shard of a larger run.
        params: parameters that differ between envs, by name: tensors `(num_envs, ...)`. Every function then gets those of its
            env as `params`, a dict.
        reset_pool: size of a pool of precomputed initial states, for an expensive `initial`. An episode starts from a random
            state of the pool, and the whole pool is drawn again within 256 steps. 0 disables it.
        render_mode: "rgb_array" if the functions have `render_init` and `render_image`. None disables rendering.
        spec: Gymnasium's `EnvSpec`, if there is one.

    Raises:
        TypeError, ValueError: if an argument is invalid, or if a function cannot be batched or returns a value that does not
            fit. Each function is called at construction, and the message names it.

    >>> from torchwrap.envs.cartpole import CartPole
    >>> env = FunctionalEnv(CartPole(), num_envs=3, max_episode_steps=500)
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([3, 4])
    """

    stream = SubmoduleAttribute()

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
        device = validation.device("FunctionalEnv", device)
        if max_episode_steps is not None:
            validation.integer("FunctionalEnv", "max_episode_steps", max_episode_steps, at_least=1)
        metadata = getattr(func_env, "metadata", {})
        if render_mode not in (None, *metadata.get("render_modes", ())):
            modes = metadata.get("render_modes", [])
            raise ValueError(f"FunctionalEnv needs a render_mode in {modes} or None, but got {render_mode!r}.")
        signature = Signature(
            num_envs, func_env.observation_space, func_env.action_space, device, max_episode_steps, first_index
        )
        super().__init__(signature, spec=spec, metadata=metadata, render_mode=render_mode)
        self.func_env, self._functions = func_env, BatchedFunctions(func_env)
        self.action_repeat = validation.integer("FunctionalEnv", "action_repeat", action_repeat, at_least=1)
        self._render_state: Any = None  # as FuncEnv.render_init returns it
        for name, value in (params or {}).items():
            if not isinstance(value, Tensor) or value.shape[:1] != (num_envs,):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"FunctionalEnv needs params[{name!r}] as a tensor ({num_envs}, ...), but got {got}.")
            self.register_env_buffer(f"params_{name}", value.to(device, copy=True))
        self.parameter_names = list(params or {})
        validation.integer("FunctionalEnv", "reset_pool", reset_pool, at_least=0)
        if reset_pool and params:
            raise ValueError("FunctionalEnv needs a reset_pool of 0 if params differ between envs, but got both.")
        self.stream = Stream(num_envs, first_index, tag=0, device=device)
        self.fields: list[str] = []
        self._is_small = getattr(func_env, "is_pure", False) and num_envs <= _SMALL and not params and not reset_pool
        self._is_small &= spaces.children(signature.single_observation_space) is None
        self._host_steps = HostSteps(func_env)
        self._validate_functions()
        self.pool = InitialStatePool(reset_pool, self.state) if reset_pool else None

    def _validate_functions(self) -> None:
        # Takes one step, to check what each function returns, and registers the buffers of the state.
        name, n = type(self.func_env).__name__, self.num_envs
        state = self._call_and_inspect("initial")
        if not isinstance(state, dict):
            raise TypeError(f"{name}.initial needs to return a dict of tensors, but got {type(state).__name__}.")
        for field, value in state.items():
            if value.shape[:1] != (n,):
                needed = f"{name}.initial needs to return {field!r} of shape ({n}, ...)"
                raise ValueError(f"{needed}, but got {tuple(value.shape)}.")
            self.fields.append(field)
            self.register_env_buffer(f"state_{field}", value.clone())
        state, action = self.state, spaces.zeros(self.single_action_space, n, self.device)
        observation = self._call_and_inspect("observation", state)
        what = "to return observations"
        spaces.check(f"{name}.observation", what, self.single_observation_space, observation, n, self.device)
        next_state = self._call_and_inspect("transition", state, action)
        if set(next_state) != set(self.fields):
            raise ValueError(f"{name}.transition needs to return fields {self.fields}, but got {list(next_state)}.")
        for field, value in state.items():
            got = next_state[field]
            if got.shape != value.shape or got.dtype != value.dtype:
                needed = f"{name}.transition needs to return {field!r} of shape {tuple(value.shape)} {value.dtype}"
                raise ValueError(f"{needed}, but got {tuple(got.shape)} {got.dtype}.")
        reward = self._call_and_inspect("reward", state, action, next_state)
        terminal = self._call_and_inspect("terminal", next_state)
        for function, value in (("reward", reward), ("terminal", terminal)):
            if value.shape != (n,):
                needed = f"{name}.{function} needs to return one scalar per env"
                raise ValueError(f"{needed}, but got shape {tuple(value.shape)} for {n} envs.")
        if terminal.dtype != torch.bool:
            raise TypeError(f"{name}.terminal needs to return torch.bool, but got {terminal.dtype}.")

    def _call_and_inspect(self, name: str, *arguments: Any) -> Any:
        return self._functions.inspect(name, self.stream.key(_FUNCTIONS.index(name)), self.params, *arguments)

    @property
    def state(self) -> dict[str, Tensor]:
        """The simulator's state by field, each `(num_envs, ...)`. These are the buffers: write to them in place."""
        buffers = self._buffers  # faster than nn.Module's lookup
        return {name: buffers[f"state_{name}"] for name in self.fields}  # type: ignore[misc]

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters that differ between envs, each `(num_envs, ...)`. These are the buffers: write to them in place."""
        return {name: self.get_buffer(f"params_{name}") for name in self.parameter_names}

    def _read_clock(self) -> Tensor:
        return -(-self.stream.draw // self.action_repeat)

    def _write_clock(self, steps: Tensor) -> None:
        self.stream.draw.copy_(steps * self.action_repeat)

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        if self.pool is not None:
            self.pool.fill(self.pool.slots, self._call("initial", key=self.pool.seed(seed)))

    def _step(self, action: spaces.Value) -> TensorDict:
        if self.pool is not None:
            slots, key = self.pool.next()
            self.pool.fill(slots, self._call("initial", key=key))
        return repeat(self._one_step, action, self.action_repeat)

    def _one_step(self, action: spaces.Value) -> TensorDict:
        arrays = self._host_steps.step(self._advance, self._memory(), action) if self._is_host_computed() else None
        if arrays is not None:
            return self._successor([torch.from_numpy(array) for array in arrays])
        self.stream.next_draw()
        state = list(self.state.values())
        updates, results = self._advance(*state, self.stream.draw, action)
        for buffer, update in zip(state, updates, strict=True):
            buffer.copy_(update)
        return self._successor(results)

    def _step_and_reset(self, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        # In NumPy if possible: the same as for any env, but without tensors in between.
        arrays = None
        if self.action_repeat == 1 and self._is_host_computed():
            function, draw = self._advance_and_finish, self._draw_initial
            arrays = self._host_steps.step_and_reset(function, self._memory(), action, draw)
        if arrays is None:
            return super()._step_and_reset(action)
        *results, observation = [torch.from_numpy(array) for array in arrays]
        return self._successor(results), observation

    def _memory(self) -> list[Any]:
        words = self.stream._buffers  # faster than attributes
        return [*self.state.values(), *[words[name] for name in _CLOCK]]

    def _draw_initial(self, key: Key) -> list[Tensor]:
        # As at the start of an episode.
        initial_key, observation_key = (
            key._replace(tag=self.stream.key(_FUNCTIONS.index(name)).tag) for name in ("initial", "observation")
        )
        state = self._call("initial", key=initial_key)
        return [*[state[field] for field in self.fields], self._call("observation", state, key=observation_key)]

    def _is_host_computed(self) -> bool:
        return self._is_small and is_host_readable(self.stream.draw)

    def _successor(self, results: list[Tensor]) -> TensorDict:
        return nested.tensordict(dict(zip(_SUCCESSOR, results, strict=False)), self.num_envs)

    def _advance(self, *arguments: Any) -> tuple[list[Tensor], list[Any]]:
        # From the fields of the state, the clock and the action to the fields of the next state, and what the step returns.
        *values, draw, action = arguments
        state = dict(zip(self.fields, values, strict=True))
        next_state = self._call("transition", state, action)
        reward = self._call("reward", state, action, next_state)
        terminated = self._call("terminal", next_state)
        observation = self._call("observation", next_state)
        limit = self.signature.max_episode_steps
        truncated = torch.zeros_like(terminated) if limit is None else draw >= limit
        flags = [terminated.view(-1, 1), truncated.view(-1, 1)]
        return [next_state[field] for field in self.fields], [observation, reward.to(torch.float32).view(-1, 1), *flags]

    def _advance_and_finish(self, *arguments: Any) -> tuple[list[Tensor], list[Any]]:
        state, results = self._advance(*arguments)
        observation, _, terminated, truncated = results
        return state, [*results, terminated | truncated, observation]

    def _reset(self, mask: RowMask, options: dict[str, Any] | None = None) -> TensorDict:
        rows = mask.indices
        if rows is not None and len(rows) and not options and self._is_host_computed():
            first = torch.from_numpy(self._host_steps.reset(rows.numpy(), self._memory(), self._draw_initial))
            observation = first.new_zeros(self.num_envs, *first.shape[1:]).index_copy_(0, rows, first)
            return nested.tensordict({"observation": observation}, self.num_envs)
        self.stream.next_episode(mask)
        if mask.any():
            initial = self._initial(rows, options)
            for name, value in self.state.items():
                mask.scatter_(value, initial[name])
        return nested.tensordict({"observation": self._call("observation", self.state)}, self.num_envs)

    def _initial(self, rows: Tensor | None, options: dict[str, Any] | None) -> dict[str, Tensor]:
        if options or self.pool is None:
            return self._call("initial", rows=rows, options=options)
        key = self.stream.key(len(_FUNCTIONS))
        return self.pool.take(key if rows is None else key.select(rows))

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        if self.render_mode is None:
            raise RuntimeError(f'{self._name()} needs render_mode="rgb_array" at construction for render, but got None.')
        if self._render_state is None:
            self._render_state = self.func_env.render_init()
        states = {name: value.cpu() for name, value in self.state.items()}
        frames = []
        for row in range(self.num_envs) if envs is None else envs:
            state = {name: value[row] for name, value in states.items()}
            self._render_state, frame = self.func_env.render_image(state, self._render_state)
            frames.append(frame)
        return tuple(frames)

    def close(self) -> None:
        if self._render_state is not None:
            self.func_env.render_close(self._render_state)
            self._render_state = None

    def _check_options(self, options: dict[str, Any]) -> None:
        known = [name for name in inspect.signature(self.func_env.initial).parameters if name not in ("rng", "params")]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"{self._name()}.reset needs options among {known}, but got {unknown}.")
        try:
            self._call("initial", options=options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self._name()}.reset needs options that fit, but got {options}: {error}") from error

    def _call(
        self,
        name: str,
        *arguments: Any,
        key: Key | None = None,
        rows: Tensor | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        # Calls a function for all envs, for those in `rows`, or, given a key, for states that belong to no env yet.
        params = self.params if self.parameter_names else {}
        if key is None:
            key = self.stream.key(_FUNCTIONS.index(name))
        if rows is not None:
            key = key.select(rows)
            params = {field: value.index_select(0, rows) for field, value in params.items()}
        return self._functions(name, key, params, arguments, options)
