"""`gymnasium.spaces` to and from batched tensors, and the signature: what goes into and comes out of an env.

A value of a space, for `num_envs` envs at once, is a tensor `(num_envs, *space.shape)` in the space's dtype (`Discrete`:
`(num_envs,)` int64), and for `Dict` and `Tuple` a TensorDict of such values under the dict's keys, or "0", "1", ...
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.wrappers.utils import create_zero_array
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import arguments, masks, random

REWARD: spaces.Box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
"""What a reward is."""

Value: TypeAlias = Any
"""A Tensor, or a TensorDict where the space is a `Dict` or `Tuple`."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """What goes in and out of an env, as a transform sees it from above or below. Spaces are those of a single env."""

    num_envs: int
    single_observation_space: Space[Any]
    single_action_space: Space[Any]
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    max_episode_steps: int | None = None
    first_index: int = 0
    num_streams: int = 2  # random streams in use so far: the env's own and that of sample_action

    def __post_init__(self) -> None:
        arguments.integer("An env", "num_envs", self.num_envs, at_least=1)
        arguments.integer("An env", "first_index", self.first_index, at_least=0)
        for space in (self.single_observation_space, self.single_action_space):
            require(space)

    def replace(self, **changes: Any) -> Signature:
        """This signature with some fields changed."""
        return dataclasses.replace(self, **changes)

    def stream(self) -> tuple[random.Stream, Signature]:
        """A random stream of the caller's own, told from the others by its place in the stack, and what to hand on."""
        stream = random.Stream(self.num_envs, self.first_index, self.num_streams, self.device)
        return stream, self.replace(num_streams=self.num_streams + 1)


def children(space: Space[Any]) -> dict[str, Space[Any]] | None:
    """The parts of a `Dict` or `Tuple` space by key; None for any other."""
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return {str(position): part for position, part in enumerate(space.spaces)}
    return None


def leaves(space: Space[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Space[Any]]]:
    """Every part of a space that is a single tensor, with its path of keys."""
    parts = children(space)
    if parts is None:
        yield path, space
        return
    if not parts or not all(isinstance(key, str) for key in parts):
        raise ValueError(f"A space needs parts, under keys that are text, but got {space}.")
    for key, part in parts.items():
        yield from leaves(part, (*path, key))


def build(
    space: Space[Any], make: Callable[[tuple[str, ...], Space[Any]], Tensor], num_envs: int, path: tuple[str, ...] = ()
) -> Value:
    """A value of a space, with each leaf made by `make(path, leaf)`."""
    parts = children(space)
    if parts is None:
        return make(path, space)
    return TensorDict({key: build(part, make, num_envs, (*path, key)) for key, part in parts.items()}, batch_size=[num_envs])


def apply(function: Callable[[tuple[str, ...], Tensor], Tensor], value: Value, path: tuple[str, ...] = ()) -> Value:
    """A value with each of its tensors replaced by `function(path, tensor)`."""
    if isinstance(value, Tensor):
        return function(path, value)
    parts = {key: apply(function, value[key], (*path, key)) for key in value.keys()}
    return TensorDict(parts, batch_size=value.batch_size)


def require(space: Space[Any]) -> None:
    """Raises unless tensors can hold values of a space."""
    for _, leaf in leaves(space):
        dtype(leaf)


def argument(owner: str, name: str, space: object) -> Space[Any] | None:
    """An argument that is a space or None; else an error on behalf of `owner`."""
    if space is None:
        return None
    if not isinstance(space, Space):
        raise TypeError(f"{owner} needs a gymnasium Space as {name}, but got {space!r}.")
    try:
        require(space)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{owner} needs an {name} that tensors can hold, but got {space}: {error}") from error
    return space


@functools.cache
def torch_dtype(to: np.dtype[Any]) -> torch.dtype | None:
    """A dtype of NumPy's in PyTorch; None where it is none of real numbers that PyTorch computes with."""
    try:
        found = torch.from_numpy(np.empty(0, to)).dtype
    except (TypeError, ValueError):
        return None
    # PyTorch stores three of them, and computes nothing.
    return found if to.kind in "biuf" and found not in (torch.uint16, torch.uint32, torch.uint64) else None


def dtype(space: Space[Any]) -> torch.dtype:
    """The torch dtype of a leaf space.

    >>> dtype(spaces.Box(0, 255, (2, 2), np.uint8))
    torch.uint8
    """
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise TypeError(f"A space needs to be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, but got {space}.")
    found = torch_dtype(np.dtype(space.dtype))
    if found is None:
        raise TypeError(f"A space needs a dtype that PyTorch computes with, but got {space} of dtype {space.dtype}.")
    return found


def box(owner: str, what: str, space: Space[Any], of: Literal["", "numbers", "floats"] = "") -> spaces.Box:
    """The space, if it is a Box (of what is needed); else a TypeError on behalf of `owner`, which needs one for `what`."""
    if not isinstance(space, spaces.Box) or space.dtype.kind not in {"": "biuf", "numbers": "iuf", "floats": "f"}[of]:
        raise TypeError(f"{owner} needs a Box {what} space{of and f' of {of}'}, but got {space}.")
    return space


def bound(limit: float, to: torch.dtype) -> float:
    """A limit of values of a float dtype, as PyTorch takes it: none where it is beyond them."""
    return limit if abs(limit) <= torch.finfo(to).max else math.copysign(math.inf, limit)


def zeros(space: Space[Any], num_envs: int, device: torch.device | str = "cpu") -> Value:
    """The member of a space nearest to zero (Gymnasium's `create_zero_array`), once for each env, in memory of its own."""

    def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
        zero = torch.as_tensor(create_zero_array(leaf), dtype=dtype(leaf), device=device)
        return zero.expand(num_envs, *zero.shape).clone()

    return build(space, make, num_envs)


def from_numpy(space: Space[Any], value: Any, device: torch.device | str = "cpu") -> Value:
    """Gymnasium's batched value (array, dict or tuple) as tensors of their own on `device`."""
    parts = children(space)
    if parts is not None:
        values = dict(enumerate(value)) if isinstance(value, tuple) else value
        named = {key: values[int(key) if isinstance(value, tuple) else key] for key in parts}
        tensors = {key: from_numpy(part, named[key], device) for key, part in parts.items()}
        return TensorDict(tensors, batch_size=next(iter(tensors.values())).shape[:1])
    return tensor(np.array(value, space.dtype, order="C"), device)


def tensor(array: Any, device: torch.device | str) -> Tensor:
    """An array that nobody else holds as a tensor on `device`.

    Copies to CUDA go through pinned memory and do not block; PyTorch's host allocator keeps it until they are done.
    """
    held, device = torch.from_numpy(array), torch.device(device)
    if device.type == "cpu":
        return held
    return (held.pin_memory() if device.type == "cuda" else held).to(device, non_blocking=True)


def to_numpy(space: Space[Any], value: Value) -> Any:
    """Tensors as Gymnasium's batched value, in memory of its own: an array, and dicts and tuples of arrays."""
    parts = children(space)
    if parts is None:
        return value.numpy(force=True).copy()
    arrays = {key: to_numpy(part, value[key]) for key, part in parts.items()}
    return tuple(arrays.values()) if isinstance(space, spaces.Tuple) else arrays


def sample(space: Space[Any], stream: random.Stream) -> Value:
    """A random member for each env of the stream, distributed as Gymnasium's `Space.sample`, drawn on the stream's device.

    >>> sample(spaces.Discrete(3), random.Stream(5, seed=0)).shape
    torch.Size([5])
    """

    def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
        key = stream.key()
        stream.next_draw()
        return _sample_leaf(leaf, key)

    return build(space, make, len(stream.env))


def _sample_leaf(space: Space[Any], key: random.Key) -> Tensor:
    device, shape, to = key.env.device, space.shape or (), dtype(space)
    if isinstance(space, spaces.Box):
        whole = not to.is_floating_point
        work = torch.float32 if to in (torch.float32, torch.float16) else torch.float64
        low, high = (torch.as_tensor(bound, device=device).to(work) for bound in (space.low, space.high))
        # Gymnasium: uniform between two bounds, exponential from one, normal without any; whole numbers are rounded down.
        share = random.uniform(key, shape, work)
        drawn = low * (1 - share) + (high + whole) * share  # the difference of two bounds could overflow
        if not space.is_bounded():
            one_sided = random.exponential(key.part(1), shape, work)
            free = random.normal(key.part(2), shape, work)
            below, above = (torch.as_tensor(bound, device=device) for bound in (space.bounded_below, space.bounded_above))
            drawn = torch.where(below & above, drawn, torch.where(below, low + one_sided, high + whole - one_sided))
            drawn = torch.where(below | above, drawn, free)
        drawn = (drawn.floor() if whole else drawn).clamp(low, high)
        return drawn.to(to)
    count, start = counts(space, device)
    return (random.integers(key, count, shape) + start).to(to)


def counts(space: Space[Any], device: torch.device | str = "cpu") -> tuple[Tensor | int, Tensor | int]:
    """How many values each component of a discrete leaf takes, and the first of them."""
    if isinstance(space, spaces.MultiDiscrete):
        count, start = (torch.as_tensor(bound, dtype=torch.int64, device=device) for bound in (space.nvec, space.start))
        return count, start
    if isinstance(space, spaces.Discrete):
        return int(space.n), int(space.start)
    return 2, 0


def contains(space: Space[Any], value: Value) -> bool:
    """Whether every row of a batched value lies in the space: shape, dtype and bounds. It reads the data on the host.

    >>> contains(spaces.Discrete(2), torch.tensor([0, 1, 2]))
    False
    """
    parts = children(space)
    if parts is not None:
        if not isinstance(value, TensorDictBase) or set(value.keys()) != set(parts):
            return False
        return all(contains(part, value[key]) for key, part in parts.items())
    if not isinstance(value, Tensor) or value.dtype != dtype(space) or value.shape[1:] != (space.shape or ()):
        return False
    count, start = counts(space, value.device) if isinstance(space, spaces.Discrete) else (None, None)
    if isinstance(count, int) and isinstance(start, int):  # the most frequent, at every step
        low, high = value.aminmax()
        return int(low) >= start and int(high) < start + count
    return not outside(space, value).any()


def outside(space: Space[Any], value: Tensor) -> Tensor:
    """Which components of a leaf's batched value are not within its bounds, bool of the same shape; NaN is not."""
    if isinstance(space, spaces.Box):
        low, high = (torch.as_tensor(bound, device=value.device) for bound in (space.low, space.high))
        return ~((value >= low) & (value <= high))
    count, start = counts(space, value.device)
    value = value.long()
    return (value < start) | (value >= start + count)


def check(name: str, what: str, space: Space[Any], value: object, num_envs: int, device: torch.device) -> None:
    """Raises unless a batched value has the structure, shape, dtype and device that the space asks for.

    Values of discrete spaces are looked at where the host has them; on another device that would be a synchronisation.
    """
    parts = children(space)
    if parts is not None:
        if not isinstance(value, TensorDictBase) or set(value.keys()) != set(parts):
            got = sorted(value.keys()) if isinstance(value, TensorDictBase) else type(value).__name__
            raise TypeError(f"{name} needs {what} as a TensorDict with keys {sorted(parts)}, but got {got}.")
        for key, part in parts.items():
            check(name, f"{what}[{key!r}]", part, value[key], num_envs, device)
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} needs {what} as a torch.Tensor, but got {type(value).__name__}.")
    shape = (num_envs, *(space.shape or ()))
    if value.shape != shape:
        raise ValueError(f"{name} needs {what} of shape {shape} (num_envs first), but got {tuple(value.shape)}.")
    if value.dtype != dtype(space):
        raise TypeError(f"{name} needs {what} of dtype {dtype(space)} for {space}, but got {value.dtype}.")
    if value.device != device:
        raise ValueError(f"{name} needs {what} on device {device}, but got {value.device}.")
    if not isinstance(space, spaces.Box) and masks.free_to_look(value) and not contains(space, value):
        raise ValueError(f"{name} needs {what} in {space}, but got values from {value.min()} to {value.max()}.")


def check_function(
    name: str, what: str, func: Callable[[Value], Value], takes: Space[Any], gives: Space[Any], signature: Signature
) -> None:
    """Calls a function once, and raises unless it makes a batched value of one space into one of another."""
    try:
        given = func(zeros(takes, signature.num_envs, signature.device))
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} needs a func that takes {what}, but got {type(error).__name__}: {error}") from error
    check(name, f"func to give {what}", gives, given, signature.num_envs, signature.device)


def flatten(space: Space[Any], value: Value, to: torch.dtype) -> Tensor:
    """A value as vectors `(..., flatdim)`, each as Gymnasium's `flatten` makes it (`Discrete` becomes one-hot).

    >>> flatten(spaces.Discrete(3, start=1), torch.tensor([1, 3]), torch.int64)
    tensor([[1, 0, 0],
            [0, 0, 1]])
    """
    parts = children(space)
    if parts is not None:
        return torch.cat([flatten(part, value[key], to) for key, part in parts.items()], -1)
    batch = value.shape[: value.dim() - len(space.shape or ())]
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        numbers, starts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec), np.ravel(space.start)
        columns = value.reshape(*batch, -1).unsqueeze(-1)
        one_hots = [
            columns[..., i, :] == torch.arange(int(start), int(start) + int(n), device=value.device)
            for i, (n, start) in enumerate(zip(numbers, starts, strict=True))
        ]
        return torch.cat(one_hots, -1).to(to)
    return value.reshape(*batch, -1).to(to)
