"""JAX simulators as torchwrap envs: `from_jax` for pure functions, and `from_brax`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Tuple
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.env import Options
from torchwrap.interop import _checks
from torchwrap.interop._functions import FunctionsEnv, describe
from torchwrap.random import Stream, bits
from torchwrap.spaces import Signature

# Wrappers of Brax that count steps, reset, or batch. Those of Playground begin with "Brax".
_TRAINING_WRAPPERS = {
    "EpisodeWrapper",
    "AutoResetWrapper",
    "VmapWrapper",
    "DomainRandomizationVmapWrapper",
    "EvalWrapper",
}


def from_jax(
    reset: Callable[..., Any],
    step: Callable[..., Any],
    num_envs: int,
    observation_space: Space[Any],
    action_space: Space[Any],
    *,
    batched: bool = False,
    max_episode_steps: int | None = None,
    info_keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
    first_index: int = 0,
) -> JaxEnv:
    """Makes a torchwrap env of a simulator in JAX, for auto-reset, transforms and trainers.

    | function | returns, for a single env |
    |---|---|
    | `reset(key)` | `(state, observation)`. The state is any pytree of numbers and PRNG keys |
    | `step(state, action)` | `(state, observation, reward, terminated, truncated, info)` |

    The functions are pure, and know nothing of auto-reset. `info` is a dict. A `step` that draws
    random numbers keeps a key in the state. Arrays pass between JAX and PyTorch by DLPack. Values
    of a `Dict` space are dicts, of a `Tuple` space tuples. Values of spaces of 64 bits are
    converted, unless JAX is configured for 64 bits.

    Args:
        reset, step: the functions.
        num_envs: number of envs.
        observation_space, action_space: of a single env.
        batched: whether the functions take a batch: `reset` any number of keys, `step` all envs.
        max_episode_steps: truncates episodes at this length, in addition to `truncated`. None
            disables it.
        info_keys: names of numbers in `info` to pass on under `("next", "info", name)`, as
            `(num_envs, 1)` float32.
        device: of all tensors, and of JAX's computation.
        first_index: global index of the first env, for a shard of a larger run.

    >>> step = lambda state, action: (state + action, state + action, -state, state > 3, False, {})
    >>> reset = lambda key: 2 * (jax.random.uniform(key),)
    >>> env = from_jax(reset, step, 3, Box(-1, 1, ()), Box(-1, 1, ()))
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([3])
    """
    validation.function("from_jax", "reset", reset)
    validation.function("from_jax", "step", step)
    _check_device("from_jax", device)
    if not batched:
        reset = jax.vmap(reset)
        step = jax.vmap(step)
    signature = _checks.signature(
        "from_jax",
        num_envs,
        observation_space,
        action_space,
        max_episode_steps,
        first_index,
        device,
        info_keys,
    )
    return JaxEnv("from_jax", reset, step, signature, info_keys)


def from_brax(
    env: Any,
    num_envs: int,
    *,
    max_episode_steps: int | None = 1000,
    info_keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
    first_index: int = 0,
) -> JaxEnv:
    """Makes a torchwrap env of an env of Brax, or of MuJoCo Playground, which has the same API.

    `done` is `terminated`, and `max_episode_steps` truncates. Each episode starts in a new random
    state; with Brax's `AutoResetWrapper`, all of them start in the first one. Actions are in
    [-1, 1].

    Args:
        env: a name, as for `brax.envs.get_environment`, or the env itself, without Brax's training
            wrappers. Load an env of MuJoCo Playground with `config_overrides={"impl": "jax"}`,
            because Warp computes outside of JAX.
        num_envs, device, first_index: as for `from_jax`.
        max_episode_steps: truncates episodes at this length. None disables it.
        info_keys: names among the numbers in `state.metrics` and `state.info`; see `from_jax`.

    >>> env = from_brax("inverted_pendulum", num_envs=4096)  # doctest: +SKIP
    """
    name = env if isinstance(env, str) else type(env).__name__
    if isinstance(env, str):
        import brax.envs

        try:
            env = brax.envs.get_environment(env)
        except KeyError:
            must = "env must be the name of one of Brax's envs, such as 'ant'"
            raise ValueError(refusal("from_brax", must, repr(env))) from None
    _check_brax_env(env)
    _check_device("from_brax", device)
    signature = _checks.signature(
        "from_brax",
        num_envs,
        _box(env.observation_size),
        Box(-1, 1, (int(env.action_size),)),
        max_episode_steps,
        first_index,
        device,
        info_keys,
    )

    def reset(key: jax.Array) -> tuple[Any, Any]:
        state = env.reset(key)
        return state, state.obs

    def step(state: Any, action: jax.Array) -> tuple[Any, ...]:
        state = env.step(state, action)
        terminated = state.done != 0
        truncated = jnp.zeros((), bool)
        info = {**state.info, **state.metrics}
        return state, state.obs, state.reward, terminated, truncated, info

    return JaxEnv("from_brax", jax.vmap(reset), jax.vmap(step), signature, info_keys, name)


def _check_brax_env(env: Any) -> None:
    if not hasattr(env, "observation_size") or not hasattr(env, "action_size"):
        raise TypeError(refusal("from_brax", "env must be an env of Brax or its name", repr(env)))
    layer = env
    while layer is not None:
        names = {kind.__name__.removeprefix("Brax") for kind in type(layer).__mro__}
        if names & _TRAINING_WRAPPERS:
            must = "env must have no training wrappers"
            remedy = "Make it with brax.envs.get_environment, and pass max_episode_steps"
            raise ValueError(refusal("from_brax", must, type(layer).__name__, remedy))
        layer = vars(layer).get("env")
    model = getattr(env, "mjx_model", None)
    impl = getattr(model, "impl", None)
    if getattr(impl, "value", impl) == "warp":
        remedy = 'Load it with `registry.load(name, config_overrides={"impl": "jax"})`'
        raise ValueError(refusal("from_brax", "env must compute in JAX", "Warp", remedy))


def _box(size: Any) -> Space[Any]:
    """The space of Brax's `observation_size`: a number, a shape, or a dict of them."""
    if hasattr(size, "items"):
        return Dict({key: _box(part) for key, part in size.items()})
    return Box(-np.inf, np.inf, tuple(np.atleast_1d(size)))


def _check_device(owner: str, device: torch.device | str) -> None:
    platform = validation.device(owner, device).type
    try:
        jax.devices("gpu" if platform == "cuda" else platform)
    except RuntimeError as error:
        must = f"device must be one that JAX computes on ({error})"
        raise ValueError(refusal(owner, must, device)) from None


class JaxEnv(FunctionsEnv):
    """A JAX simulator as a torchwrap env; made by `from_jax` and `from_brax`. No snapshots.

    Shapes and dtypes of what the functions return are checked here, without compiling them.
    """

    def __init__(
        self,
        owner: str,
        reset: Callable[..., Any],
        step: Callable[..., Any],
        signature: Signature,
        info_keys: Sequence[str],
        name: str = "JaxEnv",
    ) -> None:
        super().__init__(owner, signature, info_keys)
        self._label = name
        self.stream = Stream(self.num_envs, signature.first_index, tag=0, device=self.device)
        self.state: Any = None
        """The simulator's state: JAX arrays with one row per env. None before the first reset."""
        # A call of reset has one size, to be compiled once, and few rows, because few episodes end.
        few = max(16, math.ceil(self.num_envs / 16))
        self._reset_size = min(self.num_envs, few)
        # Jitted, so that JAX traces them once for the checks and the calls.
        self._user_reset = jax.jit(reset)
        self._user_step = jax.jit(step)
        key = jax.eval_shape(jax.random.key, 0)
        self._key_words = jax.eval_shape(jax.random.key_data, key).size
        self._check_step(self._check_reset(key.dtype))
        self._jax_reset = jax.jit(self._run_reset)
        self._jax_step = jax.jit(self._run_step)

    def _step(self, action: spaces.Value) -> TensorDict:
        self.stream.next_draw()
        # A copy, because it can become a part of the state, in the same memory.
        arrays = _tree(
            self.single_action_space,
            lambda path, _: _to_jax(spaces.entry(action, path).clone()),
        )
        results = jax.block_until_ready(self._jax_step(self.state, arrays))
        self.state, observation, numbers, info = results
        return self._successor(
            self._observation(observation, self.num_envs),
            jax.tree.map(from_dlpack, numbers),
            jax.tree.map(from_dlpack, info),
        )

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        self.stream.next_episode(mask)
        observation = spaces.zeros(self.single_observation_space, self.num_envs, self.device)
        rows = torch.from_numpy(np.flatnonzero(mask.numpy())).to(self.device)
        for chunk in rows.split(self._reset_size):
            # Rows of the padding are beyond the last env, and not written.
            padding = (0, self._reset_size - len(chunk))
            index = F.pad(chunk, padding, value=self.num_envs)
            key = self.stream.key().select(index.clamp(max=self.num_envs - 1))
            words = bits(key, self._key_words).to(torch.uint32)
            state, initial = jax.block_until_ready(self._jax_reset(_to_jax(words)))
            if self.state is None:  # The first reset overwrites all of these rows.
                self.state = jax.tree.map(self._repeat_row, state)
            self.state = _write(self.state, _to_jax(index), state)
            values = self._observation(initial, self._reset_size)
            observation[chunk] = values[: len(chunk)]
        return tensordict({"observation": observation}, self.num_envs)

    def _repeat_row(self, leaf: jax.Array) -> jax.Array:
        return leaf[jnp.zeros(self.num_envs, int)]

    def _observation(self, arrays: Any, num_rows: int) -> spaces.Value:
        def make(path: spaces.Path, leaf: Space[Any]) -> Tensor:
            array = from_dlpack(spaces.entry(arrays, path))
            # A copy, because JAX gives an observation in the state the memory of the state.
            return array.to(spaces.dtype(leaf), copy=True)

        return spaces.build(self.single_observation_space, make, num_rows)

    def _clocks(self) -> list[Tensor]:
        return [self.stream.draw]

    # Traced by JAX.

    def _run_reset(self, key_words: jax.Array) -> tuple[Any, Any]:
        state, observation = self._user_reset(jax.random.wrap_key_data(key_words))
        return _strong(state), self._cast(observation)

    def _run_step(self, state: Any, action: Any) -> tuple[Any, ...]:
        state, observation, reward, terminated, truncated, info = self._user_step(state, action)
        numbers = {
            "reward": _column(reward, jnp.float32),
            "terminated": _column(terminated, bool),
            "truncated": _column(truncated, bool),
        }
        info = {name: _column(info[name], jnp.float32) for name in self.info_spaces}
        return _strong(state), self._cast(observation), numbers, info

    def _cast(self, observation: Any) -> Any:
        return _tree(
            self.single_observation_space,
            lambda path, leaf: spaces.entry(observation, path).astype(_dtype(leaf)),
        )

    # Checks of shapes and dtypes.

    def _check_reset(self, key_dtype: Any) -> Any:
        """Returns the shapes and dtypes of the state of all envs."""
        size = self._reset_size
        result = jax.eval_shape(self._user_reset, jax.ShapeDtypeStruct((size,), key_dtype))
        if not isinstance(result, tuple) or len(result) != 2:
            must = "reset must return (state, observation)"
            raise TypeError(refusal(self._owner, must, describe(result)))
        state, observation = result
        self._check_observation("reset", observation, size)
        for array in jax.tree.leaves(state):
            if array.shape[:1] != (size,):
                must = f"reset must return a state with one row per key ({size})"
                raise ValueError(refusal(self._owner, must, describe(state)))
        return jax.tree.map(
            lambda array: self._struct(array.shape[1:], array.dtype),
            state,
        )

    def _struct(self, shape: Any, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((self.num_envs, *shape), dtype)

    def _check_step(self, state: Any) -> None:
        action = _tree(
            self.single_action_space,
            lambda _, leaf: self._struct(leaf.shape, _dtype(leaf)),
        )
        result = jax.eval_shape(self._user_step, state, action)
        self._check_numbers(result, ("state", *_checks.STEP))
        next_state = jax.eval_shape(_strong, result[0])
        if jax.tree.flatten(next_state) != jax.tree.flatten(state):
            must = f"step must return a state like reset's, {describe(state)}"
            raise ValueError(refusal(self._owner, must, describe(next_state)))
        self._check_observation("step", result[1], self.num_envs)

    def _can_cast(self, value: Any, leaf: Space[Any]) -> bool:
        return jnp.can_cast(value.dtype, _dtype(leaf), "same_kind")


def _to_jax(tensor: Tensor) -> jax.Array:
    # A view; of int64 a copy, if JAX computes with 32 bits.
    return jax.dlpack.from_dlpack(tensor.contiguous())


def _strong(state: Any) -> Any:
    # JAX would trace and compile the step again for weak types.
    return jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), state)


def _column(values: jax.Array, dtype: Any) -> jax.Array:
    return values.astype(dtype).reshape(-1, 1)


@jax.jit
def _write(state: Any, index: jax.Array, rows: Any) -> Any:
    return jax.tree.map(
        lambda leaf, new: leaf.at[index].set(new, mode="drop"),
        state,
        rows,
    )


def _dtype(leaf: Space[Any]) -> Any:
    # At most 32 bits, unless JAX is configured for 64.
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def _tree(space: Any, make: Any, path: spaces.Path = ()) -> Any:
    """A pytree like Gymnasium's values: dicts and tuples, with `make(path, leaf)` as leaves."""
    subspaces = spaces.children(space)
    if subspaces is None:
        return make(path, space)
    parts = {}
    for key, part in subspaces.items():
        parts[key] = _tree(part, make, (*path, key))
    return tuple(parts.values()) if isinstance(space, Tuple) else parts
