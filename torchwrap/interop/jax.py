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
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.env import Options
from torchwrap.interop import _simulator
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
    random numbers keeps a key in the state. Arrays pass between JAX and PyTorch by DLPack. Actions
    of `Dict` and `Tuple` spaces are nested dicts, the latter with the keys "0", "1", and so on.
    Actions of 64 bits are converted, unless JAX is configured for 64 bits.

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
    if not batched:
        reset = jax.vmap(reset)
        step = jax.vmap(step)
    signature = Signature(
        num_envs,
        observation_space,
        action_space,
        validation.device("from_jax", device),
        max_episode_steps,
        first_index,
    )
    return JaxEnv(reset, step, signature, info_keys)


def from_brax(
    env: Any,
    num_envs: int,
    *,
    max_episode_steps: int | None = 1000,
    **arguments: Any,
) -> JaxEnv:
    """Makes a torchwrap env of an env of Brax, or of MuJoCo Playground, which has the same API.

    `done` is `terminated`, and `max_episode_steps` truncates. Each episode starts in a new random
    state; with Brax's `AutoResetWrapper`, all of them start in the first one. Actions are in
    [-1, 1].

    Args:
        env: a name, as for `brax.envs.get_environment`, or the env itself, without Brax's training
            wrappers. Load an env of MuJoCo Playground with `config_overrides={"impl": "jax"}`,
            because Warp computes outside of JAX.
        num_envs: number of envs.
        max_episode_steps: truncates episodes at this length. None disables it.
        arguments: `info_keys`, names among the numbers in `state.metrics` and `state.info`,
            `device` and `first_index`, as for `from_jax`.

    >>> env = from_brax("inverted_pendulum", num_envs=4096)  # doctest: +SKIP
    """
    if isinstance(env, str):
        import brax.envs

        env = brax.envs.get_environment(env)
    _check_brax_env(env)

    def reset(key: jax.Array) -> tuple[Any, Any]:
        state = env.reset(key)
        return state, state.obs

    def step(state: Any, action: jax.Array) -> tuple[Any, ...]:
        state = env.step(state, action)
        terminated = state.done != 0
        truncated = jnp.zeros((), bool)
        info = {**state.info, **state.metrics}
        return state, state.obs, state.reward, terminated, truncated, info

    return from_jax(
        reset,
        step,
        num_envs,
        _box(env.observation_size),
        Box(-1, 1, (int(env.action_size),)),
        max_episode_steps=max_episode_steps,
        **arguments,
    )


def _check_brax_env(env: Any) -> None:
    layer = env
    while layer is not None:
        name = type(layer).__name__
        if name.removeprefix("Brax") in _TRAINING_WRAPPERS:
            must = "env must have no training wrappers"
            raise ValueError(refusal("from_brax", must, name))
        layer = vars(layer).get("env")
    model = getattr(env, "mjx_model", None)
    impl = getattr(model, "impl", None)
    if getattr(impl, "value", impl) == "warp":
        raise ValueError(refusal("from_brax", "env must compute in JAX", "Warp"))


def _box(size: Any) -> Space[Any]:
    """The space of Brax's `observation_size`: a number, a shape, or a dict of them."""
    if hasattr(size, "items"):
        return Dict({key: _box(part) for key, part in size.items()})
    return Box(-np.inf, np.inf, tuple(np.atleast_1d(size)))


class JaxEnv(FunctionsEnv):
    """A JAX simulator as a torchwrap env; made by `from_jax` and `from_brax`. No snapshots.

    Shapes and dtypes of what the functions return are checked while JAX traces them.
    """

    def __init__(
        self,
        reset: Callable[..., Any],
        step: Callable[..., Any],
        signature: Signature,
        info_keys: Sequence[str],
    ) -> None:
        super().__init__("from_jax", signature, info_keys)
        self.stream = Stream(self.num_envs, signature.first_index, tag=0, device=self.device)
        self.state: Any = None
        """The simulator's state: JAX arrays with one row per env. None before the first reset."""
        # A call of reset has one size, to be compiled once, and few rows, because few episodes end.
        few = max(16, math.ceil(self.num_envs / 16))
        self._slots = torch.arange(min(self.num_envs, few), device=self.device)
        self._key_words = jax.random.key_data(jax.random.key(0)).size
        self._user_reset = reset
        self._user_step = step
        self._jax_reset = jax.jit(self._run_reset)
        self._jax_step = jax.jit(self._run_step)

    def _step(self, action: spaces.Value) -> TensorDict:
        self.stream.next_draw()
        # A copy, because it can become a part of the state, in the same memory.
        given: Any = action.clone()
        if isinstance(given, TensorDict):
            given = given.to_dict()
        given = jax.tree.map(_to_jax, given)
        self.state, *results = jax.block_until_ready(self._jax_step(self.state, given))
        observation, numbers, info = jax.tree.map(from_dlpack, results)
        return self._successor(self._observation(observation, self.num_envs), numbers, info)

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        self.stream.next_episode(mask)
        observation = spaces.zeros(self.single_observation_space, self.num_envs, self.device)
        rows = torch.from_numpy(np.flatnonzero(mask.numpy())).to(self.device)
        for chunk in rows.split(len(self._slots)):
            # The last row fills the rest of a call.
            index = chunk[self._slots.clamp(max=len(chunk) - 1)]
            key = self.stream.key().select(index)
            words = bits(key, self._key_words).to(torch.uint32)
            state, initial = jax.block_until_ready(self._jax_reset(_to_jax(words)))
            if self.state is None:  # The first reset overwrites all of these rows.
                first = jnp.zeros(self.num_envs, int)
                self.state = jax.tree.map(lambda leaf: leaf[first], state)  # noqa: B023
            self.state = _write(self.state, _to_jax(index), state)
            initial = jax.tree.map(from_dlpack, initial)
            observation[index] = self._observation(initial, len(index))
        return tensordict({"observation": observation}, self.num_envs)

    def _clocks(self) -> list[Tensor]:
        return [self.stream.draw]

    # Traced by JAX.

    def _run_reset(self, key_words: jax.Array) -> tuple[Any, Any]:
        state, observation = self._user_reset(jax.random.wrap_key_data(key_words))
        self._check_observation("reset", observation, len(key_words))
        return _strong(state), observation

    def _run_step(self, state: Any, action: Any) -> tuple[Any, ...]:
        result = self._user_step(state, action)
        self._check_numbers(result, ("state", *_simulator.STEP))
        next_state, observation, *numbers, info = result
        self._check_observation("step", observation, self.num_envs)
        next_state = _strong(next_state)
        given = jax.eval_shape(_strong, state)
        returned = jax.eval_shape(_strong, next_state)
        if jax.tree.flatten(returned) != jax.tree.flatten(given):
            must = "step must return a state with the structure, shapes and dtypes of reset's"
            raise ValueError(refusal(self._owner, must, describe(returned)))
        info = {name: info[name] for name in self.info_spaces}
        return next_state, observation, numbers, info

    def _can_cast(self, value: Any, leaf: Space[Any]) -> bool:
        return jnp.can_cast(value.dtype, leaf.dtype, "same_kind")


def _to_jax(tensor: Tensor) -> jax.Array:
    # A view; of int64 a copy, if JAX computes with 32 bits.
    return jax.dlpack.from_dlpack(tensor.contiguous())


def _strong(state: Any) -> Any:
    # JAX would trace and compile the step again for weak types.
    return jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), state)


@jax.jit
def _write(state: Any, index: jax.Array, rows: Any) -> Any:
    return jax.tree.map(
        lambda leaf, new: leaf.at[index].set(new),
        state,
        rows,
    )
