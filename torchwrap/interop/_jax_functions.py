"""The functions of a JAX simulator, compiled over flat arrays: checks, and the packed state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import Space

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap.interop import _checks
from torchwrap.spaces import Signature

_STEP = ("state", "observation", "reward", "terminated", "truncated", "info")
_PARTIAL_RESET_DIVISOR, _MIN_PARTIAL_RESET = 16, 16


def signature(owner: str, *arguments: Any, device: torch.device | str) -> Signature:
    """As `_checks.signature`, on a device that JAX computes on."""
    device = validation.device(owner, device)
    try:
        jax.devices("gpu" if device.type == "cuda" else device.type)
    except RuntimeError as error:
        raise ValueError(f"{owner} needs a device that JAX computes on, but got {str(device)!r}: {error}") from None
    return _checks.signature(owner, *arguments, device=device)


class JaxFunctions:
    """`reset` and `step` of a batch, each one compiled call. They are checked at construction, without being compiled.

    Args:
        owner: the function that errors name.
        reset, step: as for `from_jax`.
        signature: of the env.
        batched: whether the functions take the whole batch.
        info_keys: entries of the info to return.

    Raises:
        TypeError, ValueError: if the functions do not fit each other or the signature.
    """

    def __init__(
        self,
        owner: str,
        reset: Callable[..., Any],
        step: Callable[..., Any],
        signature: Signature,
        batched: bool,
        info_keys: Sequence[str],
    ) -> None:
        for name, function in (("reset", reset), ("step", step)):
            if not callable(function):
                raise TypeError(f"{owner} needs a function as {name}, but got {function!r}.")
        num_envs = signature.num_envs
        self.owner = owner
        self.info_keys = info_keys
        self.observation_space, self.action_space = signature.single_observation_space, signature.single_action_space
        # Resets compute this many rows at once, so that they are compiled once, and cost little where few episodes end.
        self.reset_size = min(num_envs, max(_MIN_PARTIAL_RESET, math.ceil(num_envs / _PARTIAL_RESET_DIVISOR)))
        # Compiled by themselves too, so that JAX traces them once for the checks and for the call.
        self._reset = jax.jit(reset if batched else jax.vmap(reset))
        self._step = jax.jit(step if batched else jax.vmap(step))
        key = jax.eval_shape(jax.random.key, 0)
        self.key_words = math.prod(jax.eval_shape(jax.random.key_data, key).shape)
        initial = jax.eval_shape(self._reset, _batch(key, self.reset_size))
        if not isinstance(initial, tuple) or len(initial) != 2:
            raise TypeError(f"{owner} needs reset to return (state, observation), but got {_describe(initial)}.")
        self._check_observation("reset", initial[1], self.reset_size)
        self._packing = _Packing(owner, initial[0], self.reset_size)
        state = self._packing.like(num_envs)
        action = [
            jax.ShapeDtypeStruct((num_envs, *(leaf.shape or ())), _dtype(leaf)) for _, leaf in spaces.leaves(self.action_space)
        ]
        self._check_step(jax.eval_shape(self._step, state, self._action(action)), state, num_envs)
        self.num_words = self._packing.num_words
        self.reset, self.step, self.unpack = jax.jit(self._run_reset), jax.jit(self._run_step), jax.jit(self._packing.unpack)

    def _run_reset(self, key_words: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        state, observation = self._reset(jax.random.wrap_key_data(key_words))
        return self._packing.pack(state), self._observations(observation)

    def _run_step(self, words: jax.Array, action: list[jax.Array]) -> tuple[Any, ...]:
        state, observation, *flags, info = self._step(self._packing.unpack(words), self._action(action))
        values = [*zip(flags, (jnp.float32, bool, bool), strict=True), *[(info[name], jnp.float32) for name in self.info_keys]]
        columns = [value.astype(dtype).reshape(-1, 1) for value, dtype in values]
        return self._packing.pack(state), self._observations(observation), columns[:3], columns[3:]

    def _action(self, leaves: list[Any]) -> Any:
        return _nest(self.action_space, iter(leaves))

    def _observations(self, observation: Any) -> list[jax.Array]:
        return [_at(observation, path).astype(_dtype(leaf)) for path, leaf in spaces.leaves(self.observation_space)]

    def _check_observation(self, name: str, observation: Any, num_rows: int) -> None:
        parts = list(spaces.leaves(self.observation_space))
        try:
            found = [_at(observation, path) for path, _ in parts]
            fits = len(jax.tree.leaves(observation)) == len(found) and all(
                value.shape == (num_rows, *(leaf.shape or ())) and jnp.can_cast(value.dtype, _dtype(leaf), "same_kind")
                for value, (_, leaf) in zip(found, parts, strict=True)
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            needed = f"{num_rows} observations of {self.observation_space}"
            raise ValueError(f"{self.owner} needs {name} to return {needed}, but got {_describe(observation)}.")

    def _check_step(self, result: Any, before: Any, num_envs: int) -> None:
        if not isinstance(result, tuple) or len(result) != len(_STEP) or not isinstance(result[-1], dict):
            needed = f"({', '.join(_STEP)}) with a dict as info"
            raise TypeError(f"{self.owner} needs step to return {needed}, but got {_describe(result)}.")
        values = dict(zip(_STEP, result, strict=True))
        initial, after = (_layout(state) for state in (before, values["state"]))
        structures = [jax.tree.structure(state) for state in (before, values["state"])]
        if initial != after or structures[0] != structures[1]:
            changed = {name: (initial.get(name), after.get(name)) for name in {**initial, **after}}
            differences = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
            raise ValueError(
                f"{self.owner} needs step to return a state of the structure, shapes and dtypes of that from reset, but got "
                f"(reset, step) {differences or structures}."
            )
        self._check_observation("step", values["observation"], num_envs)
        info = values["info"]
        unknown = sorted(set(self.info_keys) - set(info))
        if unknown:
            known = f"It contains {sorted(info)}."
            raise ValueError(f"{self.owner} needs info_keys that the info contains, but got {unknown}. {known}")
        for name, value in {**{key: values[key] for key in _STEP[2:5]}, **{key: info[key] for key in self.info_keys}}.items():
            if getattr(value, "shape", None) != (num_envs,):
                raise ValueError(f"{self.owner} needs {name} as one number per env, but got {_describe(value)}.")

    def __deepcopy__(self, memo: Any) -> JaxFunctions:
        return self  # without state; a copy would be compiled again


class _Packing:
    """A state as one int32 array `(num_rows, num_words)`: one array to exchange, whatever the simulator's state consists of.

    Args:
        owner: the function that errors name.
        state: shapes and dtypes.
        num_rows: of each of them.
    """

    def __init__(self, owner: str, state: Any, num_rows: int) -> None:
        for path, leaf in jax.tree.leaves_with_path(state):
            if leaf.shape[:1] != (num_rows,):
                got = f"{_describe(leaf)} in state{jax.tree_util.keystr(path)}"
                raise ValueError(f"{owner} needs reset to return a state with one row per key ({num_rows}), but got {got}.")
        rows, self.structure = jax.tree.flatten(state)
        self.rows = [jax.ShapeDtypeStruct(row.shape[1:], row.dtype) for row in rows]
        self.impls: list[Any] = []

        def record(state: Any) -> None:
            self.impls = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in jax.tree.leaves(state)]

        jax.eval_shape(record, state)  # only a traced key tells how it is implemented
        self.sizes = []
        for path, leaf in jax.tree.leaves_with_path(state):
            try:
                self.sizes.append(jax.eval_shape(_to_words, leaf).shape[1])
            except (TypeError, ValueError):
                needed = "a state of bools, integers, floats and PRNG keys"
                got = f"{_describe(leaf)} in state{jax.tree_util.keystr(path)}"
                raise TypeError(f"{owner} needs {needed}, but got {got}.") from None
        self.num_words = sum(self.sizes)
        if not self.num_words:
            raise ValueError(f"{owner} needs a state with at least one number, but got {_describe(state)}.")

    def like(self, num_rows: int) -> Any:
        return jax.tree.unflatten(self.structure, [_batch(row, num_rows) for row in self.rows])

    def pack(self, state: Any) -> jax.Array:
        return jnp.concatenate([_to_words(leaf) for leaf in jax.tree.leaves(state)], 1)

    def unpack(self, words: jax.Array) -> Any:
        parts = jnp.split(words, np.cumsum(self.sizes)[:-1], 1)
        leaves = [_from_words(*part) for part in zip(parts, self.rows, self.impls, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


def _to_words(leaf: Any) -> jax.Array:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype.itemsize >= 4:
        words = jax.lax.bitcast_convert_type(leaf, jnp.int32)
    else:
        is_bool = leaf.dtype == bool
        words = (leaf if is_bool else jax.lax.bitcast_convert_type(leaf, _unsigned(leaf.dtype))).astype(jnp.int32)
    return words.reshape(len(leaf), math.prod(words.shape[1:]))


def _from_words(words: jax.Array, row: Any, impl: Any) -> jax.Array:
    if impl is not None:
        data = jax.eval_shape(jax.random.key_data, row)
        return jax.random.wrap_key_data(_from_words(words, data, None), impl=impl)
    shape = (len(words), *row.shape)
    if row.dtype == bool:
        return words.reshape(shape).astype(bool)
    if row.dtype.itemsize < 4:
        words = words.astype(_unsigned(row.dtype))
    if row.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(words.reshape(*shape, 2), row.dtype)
    return jax.lax.bitcast_convert_type(words.reshape(shape), row.dtype)


def _unsigned(dtype: Any) -> str:
    return f"uint{8 * dtype.itemsize}"


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _batch(row: Any, num_rows: int) -> Any:
    return jax.ShapeDtypeStruct((num_rows, *row.shape), row.dtype)


def _dtype(leaf: Space[Any]) -> Any:
    """The dtype of a leaf's values in JAX: of 32 bits, unless JAX is configured for 64."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value[int(name) if isinstance(value, tuple | list) else name]
    return value


def _nest(space: Space[Any], leaves: Iterator[Any]) -> Any:
    subspaces = spaces.children(space)
    if subspaces is None:
        return next(leaves)
    parts = {name: _nest(subspace, leaves) for name, subspace in subspaces.items()}
    return tuple(parts.values()) if isinstance(space, gymnasium.spaces.Tuple) else parts


def _layout(state: Any) -> dict[str, str]:
    return {jax.tree_util.keystr(path): _describe(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def _describe(value: Any) -> str:
    """A pytree with shapes and dtypes instead of arrays."""

    def describe(leaf: Any) -> Any:
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else leaf

    return str(jax.tree.map(describe, value))
