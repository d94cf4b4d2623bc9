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
from torchwrap._core.env_buffers import ConstantBuffer, SubmoduleAttribute
from torchwrap._core.repeat import repeat
from torchwrap._core.row_mask import RowMask
from torchwrap._core.tracing import is_host_readable
from torchwrap._env import function_checks
from torchwrap._env.batched_functions import OPTIONAL, BatchedFunctions
from torchwrap._env.dynamics import Dynamics, State
from torchwrap._env.frames import Frames
from torchwrap._env.host_steps import HostSteps
from torchwrap._env.initial_states import InitialStatePool
from torchwrap.env import Env
from torchwrap.random import Key, Stream
from torchwrap.spaces import Signature

_SMALL = 8192  # envs, for which an operator of NumPy takes less time than one of PyTorch
# The index of a function is part of its key, so that no two functions of a step draw the same numbers.
_FUNCTIONS = ("initial", "transition", "observation", "reward", "terminal", "pool", "truncated")
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
    | `truncated(state, rng)`, optional | a bool scalar, which counts besides `max_episode_steps` |
    | `transition_info(state, action, next_state)`, optional | a dict of tensors, each of which is `("next", "info", name)` |
    | `state_info(state)`, optional | the same, about the next state, under other names |

    `rng` is a `torchwrap.random.Key`. Draw from it with the functions of `torchwrap.random`, and use `rng.fold_in(1)`,
    `rng.fold_in(2)`, ... for further independent draws in the same function. Use tensor operators only: `torch.where` instead
    of `if`. State fields that are scalars vectorize best. Keyword arguments of `initial` are the env's reset options.
    `terminal` and `truncated` get the next state. Scalars of an info become `(num_envs, 1)`; its names and shapes are fixed.

    A class that sets `is_pure = True` promises that results depend on the arguments and on the attributes of the object alone.
    Up to 8,192 envs on the CPU, uncompiled, then run its functions several times as fast: they are traced once, and computed
    in NumPy; and initial states and their observations are drawn for many episodes at once. They can use arithmetic,
    comparisons, `where`, sums and other reductions, slices, `stack` and `cat`. With a matrix product, an index that is a
    tensor, a write in place or a random draw in a step, they are computed in PyTorch.

    A class that sets `broadcasts = True` is called without `torch.vmap`. All tensors then have the leading dimension of
    `rng.env.shape`: the whole batch, or, in `initial` and `observation`, any number of its rows.

    Args:
        func_env: the functions, with `observation_space` and `action_space` of a single env.
        num_envs: number of envs.
        device: of all tensors.
        max_episode_steps: truncates episodes at this length. An int64 tensor `(num_envs,)`, which is copied, gives each env a
            limit of its own; `signature.max_episode_steps` is then the largest. None disables it.
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
    step_limits = ConstantBuffer()
    """The limit of each env, int64 `(num_envs,)`, if they differ."""

    def __init__(
        self,
        func_env: FuncEnv[Any, Any, Any, Any, Any, Any, Any],
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        max_episode_steps: int | Tensor | None = None,
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
        metadata = getattr(func_env, "metadata", {})
        if render_mode not in (None, *metadata.get("render_modes", ())):
            modes = metadata.get("render_modes", [])
            raise ValueError(f"FunctionalEnv needs a render_mode in {modes} or None, but got {render_mode!r}.")
        limit, limits = function_checks.step_limits(max_episode_steps, num_envs)
        signature = Signature(num_envs, func_env.observation_space, func_env.action_space, device, limit, first_index)
        super().__init__(signature, spec=spec, metadata=metadata, render_mode=render_mode)
        self.func_env, self._functions = func_env, BatchedFunctions(func_env)
        self.action_repeat = validation.integer("FunctionalEnv", "action_repeat", action_repeat, at_least=1)
        for name, value in function_checks.params(params, num_envs).items():
            self.register_env_buffer(f"params_{name}", value.to(device, copy=True))
        self.parameter_names = list(params or {})
        validation.integer("FunctionalEnv", "reset_pool", reset_pool, at_least=0)
        if reset_pool and params:
            raise ValueError("FunctionalEnv needs a reset_pool of 0 if params differ between envs, but got both.")
        self.stream = Stream(num_envs, first_index, tag=0, device=device)
        self._is_small = getattr(func_env, "is_pure", False) and num_envs <= _SMALL and not params and not reset_pool
        self._is_small &= spaces.children(signature.single_observation_space) is None
        self._host_steps, self._frames = HostSteps(func_env), Frames(func_env)
        owner, call = type(func_env).__name__, self._call_and_inspect
        state = function_checks.initial_state(owner, call, num_envs)
        self.fields = list(state)
        for field, value in state.items():
            self.register_env_buffer(f"state_{field}", value.clone())
        info_names = function_checks.step(self._functions, call, self.state, signature)
        optional = frozenset(filter(self._functions.defines, OPTIONAL))
        self._dynamics = Dynamics(self.fields, info_names, optional, limit)
        self._step_inputs = [f"state_{field}" for field in self.fields]  # names of buffers
        if limits is not None:
            self.register_env_buffer("step_limits", limits.to(device, copy=True))
            self._step_inputs.append("step_limits")
        self.pool = InitialStatePool(reset_pool, self.state) if reset_pool else None

    def _call_and_inspect(self, name: str, *arguments: Any) -> Any:
        return self._functions.inspect(name, self._key(name), self.params, *arguments)

    def simulate(self, state: Mapping[str, Tensor], action: spaces.Value, *, offset: int = 0) -> tuple[TensorDict, State]:
        """Takes a step from any state, differentiably. The env itself does not change, and nothing is reset.

        From `env.state`, it returns what `env.step(action)` would, with the same random numbers and the same truncation: those
        of the clock. Gradients flow to the state and the action, which are copied, so that later steps do not disturb them.
        Wrappers and transforms take no part; `action_repeat` does, and an episode that ends stays in its last state.

        Args:
            state: as `env.state`, whose buffers it never writes to: clone them before you require their gradients.
            action: of all envs.
            offset: number of steps to add to the clock: *h* for step *h*, counted from 0, of a plan that starts now. Note that
                such a plan knows the env's own random numbers.

        Returns:
            successor: a TensorDict, as `transition["next"]`: `observation`, `reward`, the three flags, and `info` if any.
            state: the next one, as `env.state`.

        Raises:
            TypeError, ValueError: for a state or an action that does not fit.

        >>> from torchwrap.envs.pendulum import Pendulum
        >>> env = FunctionalEnv(Pendulum(), num_envs=2)
        >>> action = torch.ones(2, 1, requires_grad=True)
        >>> successor, state = env.simulate(env.state, action)
        >>> torch.autograd.grad(successor["reward"].sum(), action)  # of -0.001 * action**2
        (tensor([[-0.0020],
                [-0.0020]]),)
        """
        owner = f"{self._name()}.simulate"
        function_checks.given_state(owner, state, self.state)
        spaces.check(owner, "an action", self.single_action_space, action, self.num_envs, self.device)
        offset = validation.integer(owner, "offset", offset, at_least=0)
        # Copies, because a step on the host writes to the buffers behind the back of autograd, which needs their values.
        inputs = [*[state[field].clone() for field in self.fields], *self._inputs()[len(self.fields) :]]
        draw = self.stream.draw + offset * self.action_repeat
        return self._dynamics.simulate(self._call_at, inputs, draw, action.clone(), self.action_repeat, self.num_envs)

    def _call_at(self, draw: Tensor, name: str, *arguments: Any) -> Any:
        return self._call(name, *arguments, key=self._key(name)._replace(draw=draw))

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
            return self._dynamics.successor([torch.from_numpy(array) for array in arrays], self.num_envs)
        self.stream.next_draw()
        inputs = self._inputs()
        updates, results = self._advance(*inputs, self.stream.draw, action)
        for buffer, update in zip(inputs, updates, strict=False):
            buffer.copy_(update)
        return self._dynamics.successor(results, self.num_envs)

    def _step_and_reset(self, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        # In NumPy if possible: the same as for any env, but without tensors in between.
        arrays = None
        if self.action_repeat == 1 and self._is_host_computed():
            function, draw = self._advance_and_finish, self._draw_initial
            arrays = self._host_steps.step_and_reset(function, self._memory(), action, draw)
        if arrays is None:
            return super()._step_and_reset(action)
        *results, observation = [torch.from_numpy(array) for array in arrays]
        return self._dynamics.successor(results, self.num_envs), observation

    def _inputs(self) -> list[Any]:
        # The fields of the state, and the limits of the envs if they differ.
        return list(map(self._buffers.__getitem__, self._step_inputs))  # faster than attributes

    def _memory(self) -> list[Any]:
        return [*self._inputs(), *map(self.stream._buffers.__getitem__, _CLOCK)]

    def _draw_initial(self, key: Key) -> list[Tensor]:
        # As at the start of an episode.
        initial_key, observation_key = (key._replace(tag=self._key(name).tag) for name in ("initial", "observation"))
        state = self._call("initial", key=initial_key)
        return [*[state[field] for field in self.fields], self._call("observation", state, key=observation_key)]

    def _is_host_computed(self) -> bool:
        return self._is_small and is_host_readable(self.stream.draw)

    def _advance(self, *arguments: Any) -> tuple[list[Tensor], list[Any]]:
        return self._dynamics.advance(self._call, *arguments)

    def _advance_and_finish(self, *arguments: Any) -> tuple[list[Tensor], list[Any]]:
        return self._dynamics.advance_and_finish(self._call, *arguments)

    def _reset(self, mask: RowMask, options: dict[str, Any] | None = None) -> TensorDict:
        rows = mask.indices
        if rows is not None and len(rows) and not options and self._is_host_computed():
            first = torch.from_numpy(self._host_steps.reset(rows.numpy(), self._memory(), self._draw_initial))
            return nested.tensordict({"observation": mask.spread(first)}, self.num_envs)
        self.stream.next_episode(mask)
        if mask.any():
            initial = self._initial(rows, options)
            for name, value in self.state.items():
                mask.scatter_(value, initial[name])
        return nested.tensordict({"observation": self._call("observation", self.state)}, self.num_envs)

    def _initial(self, rows: Tensor | None, options: dict[str, Any] | None) -> dict[str, Tensor]:
        if options or self.pool is None:
            return self._call("initial", rows=rows, options=options)
        key = self._key("pool")
        return self.pool.take(key if rows is None else key.select(rows))

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        if self.render_mode is None:
            raise RuntimeError(f'{self._name()} needs render_mode="rgb_array" at construction for render, but got None.')
        return self._frames.draw(self.state, range(self.num_envs) if envs is None else envs)

    def close(self) -> None:
        self._frames.close()

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
            key = self._key(name)
        if rows is not None:
            key = key.select(rows)
            params = {field: value.index_select(0, rows) for field, value in params.items()}
        return self._functions(name, key, params, arguments, options)

    def _key(self, name: str) -> Key:
        return self.stream.key(_FUNCTIONS.index(name) if name in _FUNCTIONS else 0)
