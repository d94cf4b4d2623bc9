"""JAX simulators as torchwrap envs: `from_jax` for pure functions, and `from_brax`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.env import Options
from torchwrap.interop import _checks
from torchwrap.random import Stream, bits
from torchwrap.spaces import Signature

# Brax's wrappers that count steps, reset, or batch, which the env does itself. MuJoCo Playground's begin with "Brax".
_WRAPPERS = {
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
    """Makes a torchwrap env of a simulator written in JAX: for torchwrap's auto-reset, transforms, collectors and trainers.

    | function | returns, for a single env |
    |---|---|
    | `reset(key)` | `(state, observation)`. The state is any pytree of numbers and PRNG keys |
    | `step(state, action)` | `(state, observation, reward, terminated, truncated, info)`, with a dict as `info` |

    The functions are pure, and know nothing of auto-reset. A `step` that draws random numbers keeps a key in the state. Arrays
    pass between JAX and PyTorch by DLPack. Values of a `Dict` space are dicts, of a `Tuple` space tuples. Values of spaces of
    64 bits are converted, unless JAX is configured for 64 bits.

    Args:
        reset, step: the functions.
        num_envs: number of envs.
        observation_space, action_space: of a single env.
        batched: whether the functions take a batch: `reset` any number of keys, `step` all envs.
        max_episode_steps: truncates episodes at this length, in addition to `truncated`. None disables it.
        info_keys: names of numbers in `info` to pass on under `("next", "info", name)`, as `(num_envs, 1)` float32.
        device: of all tensors, and of JAX's computation.
        first_index: global index of the first env, for a shard of a larger run.

    >>> from gymnasium.spaces import Box
    >>> step = lambda state, action: (state + action, state + action, -state, state > 3, False, {})
    >>> env = from_jax(lambda key: 2 * (jax.random.uniform(key),), step, 3, Box(-1, 1, ()), Box(-1, 1, ()))
    >>> env.reset(seed=0)["observation"].shape
    torch.Size([3])
    """
    for name, function in (("reset", reset), ("step", step)):
        if not callable(function):
            raise TypeError(f"from_jax needs a function as {name}, but got {function!r}.")
    functions = (reset, step) if batched else (jax.vmap(reset), jax.vmap(step))
    described = (
        num_envs,
        observation_space,
        action_space,
        max_episode_steps,
        first_index,
        device,
        info_keys,
    )
    return _make("from_jax", *functions, *described)


def from_brax(
    env: Any,
    num_envs: int,
    *,
    max_episode_steps: int | None = 1000,
    info_keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
    first_index: int = 0,
) -> JaxEnv:
    """Makes a torchwrap env of an env of Brax, or one of MuJoCo Playground, which has the same functions.

    `done` is `terminated`, and `max_episode_steps` truncates. Each episode starts in a new random state; with Brax's
    `AutoResetWrapper`, all of them start in the first one. Actions are in [-1, 1].

    Args:
        env: a name, as for `brax.envs.get_environment`, or the env itself, without Brax's training wrappers; of MuJoCo
            Playground with `config_overrides={"impl": "jax"}`, because Warp computes outside of JAX.
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
            raise ValueError(
                f"from_brax needs the name of one of Brax's envs, such as 'ant', but got {env!r}."
            ) from None
    if not all(
        hasattr(env, attribute)
        for attribute in ("reset", "step", "observation_size", "action_size")
    ):
        raise TypeError(f"from_brax needs an env of Brax or its name, but got {env!r}.")
    layer = env
    while layer is not None:
        if {kind.__name__.removeprefix("Brax") for kind in type(layer).__mro__} & _WRAPPERS:
            remedy = "make it with brax.envs.get_environment, and limit its episodes with max_episode_steps"
            raise ValueError(
                f"from_brax needs an env without training wrappers, but got {type(layer).__name__}: {remedy}."
            )
        layer = vars(layer).get("env")
    impl = getattr(getattr(env, "mjx_model", None), "impl", None)
    if getattr(impl, "value", impl) == "warp":
        remedy = 'load it with `registry.load(name, config_overrides={"impl": "jax"})`'
        raise ValueError(
            f"from_brax needs an env that computes in JAX, but got {name} in Warp: {remedy}."
        )

    def reset(key: jax.Array) -> tuple[Any, Any]:
        state = env.reset(key)
        return state, state.obs

    def step(state: Any, action: jax.Array) -> tuple[Any, ...]:
        state = env.step(state, action)
        return (
            state,
            state.obs,
            state.reward,
            state.done != 0,
            jnp.zeros((), bool),
            {**state.info, **state.metrics},
        )

    def space(size: Any) -> Space[Any]:
        if isinstance(size, int | np.integer | tuple):
            return gym_spaces.Box(
                -np.inf, np.inf, size if isinstance(size, tuple) else (int(size),), np.float32
            )
        return gym_spaces.Dict({key: space(part) for key, part in size.items()})

    both = space(env.observation_size), gym_spaces.Box(-1, 1, (int(env.action_size),), np.float32)
    described = num_envs, *both, max_episode_steps, first_index, device, info_keys
    return _make("from_brax", jax.vmap(reset), jax.vmap(step), *described, name=name)


def _make(
    owner: str,
    reset: Callable[..., Any],
    step: Callable[..., Any],
    *described: Any,
    name: str = "JaxEnv",
) -> JaxEnv:
    device, info_keys = described[-2:]
    device = validation.device(owner, device)
    try:
        jax.devices("gpu" if device.type == "cuda" else device.type)
    except RuntimeError as error:
        raise ValueError(
            f"{owner} needs a device that JAX computes on, but got {str(device)!r}: {error}"
        ) from None
    signature = _checks.signature(owner, *described)
    return JaxEnv(JaxFunctions(owner, reset, step, signature, list(info_keys)), signature, name)


class JaxEnv(_checks.SimulatorEnv):
    """A JAX simulator as a torchwrap env; made by `from_jax` and `from_brax`. It has no snapshots."""

    can_snapshot = False

    def __init__(self, functions: JaxFunctions, signature: Signature, name: str) -> None:
        super().__init__(signature)
        self.functions = functions
        self._label = name
        self.stream = Stream(
            signature.num_envs, signature.first_index, tag=0, device=signature.device
        )
        self.state: Any = None
        """The simulator's own state: a pytree of JAX arrays with one row per env. None before the first reset."""

    def _step(self, action: spaces.Value) -> TensorDict:
        self.stream.next_draw()
        # A copy, because it can become a part of the state, in the same memory.
        leaves = [
            _to_jax(spaces.at(action, path).clone())
            for path, _ in spaces.leaves(self.single_action_space)
        ]
        self.state, *results = jax.block_until_ready(self.functions.step(self.state, leaves))
        observation, (reward, terminated, truncated), info = jax.tree.map(from_dlpack, results)
        if self.signature.max_episode_steps is not None:
            truncated |= (self.stream.draw >= self.signature.max_episode_steps).unsqueeze(-1)
        successor = {"reward": reward, "terminated": terminated, "truncated": truncated}
        # A copy, because JAX gives an observation that is a part of the state the memory of the state.
        successor["observation"] = self._observation([leaf.clone() for leaf in observation])
        if info:
            successor["info"] = tensordict(
                dict(zip(self.functions.info_keys, info, strict=True)), self.num_envs
            )
        return tensordict(successor, self.num_envs)

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        self.stream.next_episode(mask)
        observation = spaces.zeros(self.single_observation_space, self.num_envs, self.device)
        rows, size = (
            torch.from_numpy(np.flatnonzero(mask.numpy())).to(self.device),
            self.functions.reset_size,
        )
        for some in rows.split(size) if len(rows) else ():
            words = bits(self.stream.key().select(some), self.functions.key_words)
            keys = F.pad(words, (0, 0, 0, size - len(some))).to(torch.uint32)
            initial, leaves = jax.block_until_ready(self.functions.reset(_to_jax(keys)))
            # Rows of the padding are beyond the last env, and not written.
            index = _to_jax(F.pad(some, (0, size - len(some)), value=self.num_envs))
            self.state = self.functions.write(self.state, index, initial)
            observation[some] = self._observation(
                [from_dlpack(leaf)[: len(some)] for leaf in leaves]
            )
        return tensordict({"observation": observation}, self.num_envs)

    def _observation(self, leaves: list[Tensor]) -> spaces.Value:
        remaining, space = iter(leaves), self.single_observation_space
        return spaces.build(
            space, lambda _, leaf: next(remaining).to(spaces.dtype(leaf)), len(leaves[0])
        )

    def _clocks(self) -> list[Tensor]:
        return [self.stream.draw]


def _to_jax(tensor: Tensor) -> jax.Array:
    # A view; of int64 a copy, if JAX computes with 32 bits.
    return jax.dlpack.from_dlpack(tensor.contiguous())


class JaxFunctions:
    """`reset` and `step` of a batch, each one compiled call. They are checked at construction, without being compiled."""

    def __init__(
        self,
        owner: str,
        reset: Callable[..., Any],
        step: Callable[..., Any],
        signature: Signature,
        info_keys: list[str],
    ) -> None:
        self.owner, self.info_keys = owner, info_keys
        num_envs = self.num_envs = signature.num_envs
        self.observation_space, self.action_space = (
            signature.single_observation_space,
            signature.single_action_space,
        )
        # A reset computes this many rows per call, so that they are compiled once, and cost little where few episodes end.
        self.reset_size = min(num_envs, max(16, math.ceil(num_envs / 16)))
        # Compiled, so that JAX traces them once for the checks and for the call.
        self._reset, self._step = jax.jit(reset), jax.jit(step)
        key = jax.eval_shape(jax.random.key, 0)
        self.key_words = math.prod(jax.eval_shape(jax.random.key_data, key).shape)
        initial = jax.eval_shape(self._reset, jax.ShapeDtypeStruct((self.reset_size,), key.dtype))
        if not isinstance(initial, tuple) or len(initial) != 2:
            raise TypeError(
                f"{owner} needs reset to return (state, observation), but got {_describe(initial)}."
            )
        self._check_observation("reset", initial[1], self.reset_size)
        if any(array.shape[:1] != (self.reset_size,) for array in jax.tree.leaves(initial[0])):
            needed = f"a state with one row per key ({self.reset_size})"
            raise ValueError(
                f"{owner} needs reset to return {needed}, but got {_describe(initial[0])}."
            )
        before = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct((num_envs, *array.shape[1:]), array.dtype),
            initial[0],
        )
        leaves = [leaf for _, leaf in spaces.leaves(self.action_space)]
        structs = (
            jax.ShapeDtypeStruct((num_envs, *(leaf.shape or ())), _dtype(leaf)) for leaf in leaves
        )
        action = _nest(self.action_space, iter(structs))
        self._check_step(jax.eval_shape(self._step, before, action), before, num_envs)
        self.reset, self.step, self._write = (
            jax.jit(self._run_reset),
            jax.jit(self._run_step),
            jax.jit(_write),
        )

    def _run_reset(self, key_words: jax.Array) -> tuple[Any, list[jax.Array]]:
        state, observation = self._reset(jax.random.wrap_key_data(key_words))
        return jax.tree.map(_strong, state), self._observations(observation)

    def _run_step(self, state: Any, action: list[jax.Array]) -> tuple[Any, ...]:
        state, observation, *flags, info = self._step(state, _nest(self.action_space, iter(action)))
        values = [
            *zip(flags, (jnp.float32, bool, bool), strict=True),
            *[(info[name], jnp.float32) for name in self.info_keys],
        ]
        columns = [value.astype(dtype).reshape(-1, 1) for value, dtype in values]
        return (
            jax.tree.map(_strong, state),
            self._observations(observation),
            columns[:3],
            columns[3:],
        )

    def write(self, state: Any, index: jax.Array, rows: Any) -> Any:
        """The state of all envs, of which `rows` replaces some. None before the first reset, which is of all envs."""
        if state is None:
            state = jax.tree.map(lambda leaf: leaf[jnp.zeros(self.num_envs, int)], rows)
        return self._write(state, index, rows)

    def _observations(self, observation: Any) -> list[jax.Array]:
        return [
            spaces.at(observation, path).astype(_dtype(leaf))
            for path, leaf in spaces.leaves(self.observation_space)
        ]

    def _check_observation(self, name: str, observation: Any, num_rows: int) -> None:
        try:
            found = [
                (spaces.at(observation, path), leaf)
                for path, leaf in spaces.leaves(self.observation_space)
            ]
            fits = len(jax.tree.leaves(observation)) == len(found) and all(
                value.shape == (num_rows, *(leaf.shape or ()))
                and jnp.can_cast(value.dtype, _dtype(leaf), "same_kind")
                for value, leaf in found
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            needed = f"{num_rows} observations of {self.observation_space}"
            raise ValueError(
                f"{self.owner} needs {name} to return {needed}, but got {_describe(observation)}."
            )

    def _check_step(self, result: Any, before: Any, num_envs: int) -> None:
        numbers = _checks.numbers(
            self.owner, result, ("state", *_checks.STEP), self.info_keys, _describe
        )
        needed, got = (_describe(state) for state in (before, result[0]))
        if needed != got or jax.tree.structure(before) != jax.tree.structure(result[0]):
            raise ValueError(
                f"{self.owner} needs step to return a state like reset's, {needed}, but got {got}."
            )
        self._check_observation("step", result[1], num_envs)
        for name, value in numbers.items():
            if getattr(value, "shape", None) != (num_envs,):
                raise ValueError(
                    f"{self.owner} needs {name} as one number per env, but got {_describe(value)}."
                )


def _strong(leaf: jax.Array) -> jax.Array:
    # Not of a weak type, with which JAX would trace and compile the step again.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else jax.lax.convert_element_type(leaf, leaf.dtype)


def _write(whole: Any, index: jax.Array, rows: Any) -> Any:
    return jax.tree.map(lambda leaf, some: leaf.at[index].set(some, mode="drop"), whole, rows)


def _dtype(leaf: Space[Any]) -> np.dtype[Any]:
    # Of 32 bits, unless JAX is configured for 64.
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def _nest(space: Space[Any], leaves: Iterator[Any]) -> Any:
    subspaces = spaces.children(space)
    if subspaces is None:
        return next(leaves)
    parts = {name: _nest(subspace, leaves) for name, subspace in subspaces.items()}
    return tuple(parts.values()) if isinstance(space, gym_spaces.Tuple) else parts


def _describe(value: Any) -> str:
    """A pytree with shapes and dtypes instead of arrays."""
    return str(
        jax.tree.map(
            lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else leaf,
            value,
        )
    )
