"""`gymnasium.spaces` to and from batched tensors, and the signature: what goes into and comes out of an env.

A value of a space, for `num_envs` envs at once, is a tensor `(num_envs, *space.shape)` in the space's dtype (`Discrete`:
`(num_envs,)` int64), and for `Dict` and `Tuple` a TensorDict of such values under the dict's keys, or "0", "1", ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.wrappers.utils import create_zero_array
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import random

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
        if isinstance(self.num_envs, bool) or not isinstance(self.num_envs, int) or self.num_envs < 1:
            raise ValueError(f"An env needs num_envs of at least 1, but got {self.num_envs!r}.")
        if not isinstance(self.first_index, int) or self.first_index < 0:
            raise ValueError(f"An env needs a first_index of at least 0, but got {self.first_index!r}.")
        for space in (self.single_observation_space, self.single_action_space):
            for _, leaf in leaves(space):
                dtype(leaf)

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
    else:
        for key, part in parts.items():
            yield from leaves(part, (*path, key))


def build(space: Space[Any], make: Callable[[tuple[str, ...], Space[Any]], Tensor], num_envs: int) -> Value:
    """A value of a space, with each leaf made by `make(path, leaf)`."""

    def walk(space: Space[Any], path: tuple[str, ...]) -> Value:
        parts = children(space)
        if parts is None:
            return make(path, space)
        return TensorDict({key: walk(part, (*path, key)) for key, part in parts.items()}, batch_size=[num_envs])

    return walk(space, ())


def dtype(space: Space[Any]) -> torch.dtype:
    """The torch dtype of a leaf space.

    >>> dtype(spaces.Box(0, 255, (2, 2), np.uint8))
    torch.uint8
    """
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise TypeError(f"A space needs to be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, but got {space}.")
    try:
        return torch.from_numpy(np.empty(0, space.dtype)).dtype
    except TypeError:
        raise TypeError(f"A space needs a dtype that PyTorch has, but got {space} of dtype {space.dtype}.") from None


def zeros(space: Space[Any], num_envs: int, device: torch.device | str = "cpu") -> Value:
    """The member of a space nearest to zero (Gymnasium's `create_zero_array`), once for each env, in memory of its own."""

    def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
        zero = torch.as_tensor(create_zero_array(leaf), dtype=dtype(leaf), device=device)
        return zero.expand(num_envs, *zero.shape).clone()

    return build(space, make, num_envs)


def from_numpy(space: Space[Any], value: Any, device: torch.device | str = "cpu") -> Value:
    """Gymnasium's batched value (array, dict or tuple) as tensors of their own on `device`.

    Copies to CUDA go through pinned memory and do not block; PyTorch's host allocator keeps it until they are done.
    """
    parts = children(space)
    if parts is not None:
        values = dict(enumerate(value)) if isinstance(value, tuple) else value
        named = {key: values[int(key) if isinstance(value, tuple) else key] for key in parts}
        tensors = {key: from_numpy(part, named[key], device) for key, part in parts.items()}
        return TensorDict(tensors, batch_size=next(iter(tensors.values())).shape[:1])
    tensor = torch.from_numpy(np.ascontiguousarray(value, space.dtype))
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)


def to_numpy(space: Space[Any], value: Value) -> Any:
    """Tensors as Gymnasium's batched value: an array, and dicts and tuples of arrays."""
    parts = children(space)
    if parts is None:
        return value.cpu().numpy()
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
    device, shape = key.env.device, space.shape or ()
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        # Gymnasium: uniform between two bounds, exponential from one, normal without any.
        low, high = (torch.as_tensor(bound, dtype=dtype(space), device=device) for bound in (space.low, space.high))
        drawn = random.uniform(key, shape, dtype(space)) * (high - low) + low
        if not space.is_bounded():
            key = key._replace(tag=key.tag + 1)
            one_sided, free = random.exponential(key, shape, dtype(space)), random.normal(key, shape, dtype(space))
            below, above = torch.isfinite(low), torch.isfinite(high)
            drawn = torch.where(below & above, drawn, torch.where(below, low + one_sided, high - one_sided))
            drawn = torch.where(below | above, drawn, free)
        return drawn
    if isinstance(space, spaces.Box):
        low, high = (torch.as_tensor(bound.astype(np.float64), device=device) for bound in (space.low, space.high))
        drawn = (random.uniform(key, shape, torch.float64) * (high - low + 1) + low).floor()
        return drawn.clamp(low, high).to(dtype(space))
    if isinstance(space, spaces.MultiBinary):
        return random.integers(key, 2, shape).to(dtype(space))
    count, start = counts(space, device)
    return (random.integers(key, count, shape) + start).to(dtype(space))


def counts(space: Space[Any], device: torch.device | str = "cpu") -> tuple[Tensor | int, Tensor | int]:
    """How many values each component of a discrete leaf takes, and the first of them."""
    if isinstance(space, spaces.MultiDiscrete):
        return torch.as_tensor(space.nvec, device=device), torch.as_tensor(space.start, device=device)
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
    if isinstance(space, spaces.Box):
        low, high = (torch.as_tensor(bound, device=value.device) for bound in (space.low, space.high))
        return bool(((value >= low) & (value <= high)).all())
    count, start = counts(space, value.device)
    return bool(((value >= start) & (value < start + count)).all())


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
    on_host = device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and not isinstance(space, spaces.Box) and not contains(space, value):
        raise ValueError(f"{name} needs {what} in {space}, but got values from {value.min()} to {value.max()}.")


def where(mask: Tensor, first: Value, second: Value) -> Value:
    """Rows of `first` where `mask` (bool, `(num_envs,)`), else of `second`, in a value of their own."""
    if isinstance(first, Tensor):
        return torch.where(mask.view(-1, *(1,) * (first.dim() - 1)), first, second)
    return TensorDict({key: where(mask, first[key], second[key]) for key in first.keys()}, batch_size=first.batch_size)


def flatten(space: Space[Any], value: Value, to: torch.dtype) -> Tensor:
    """A batched value as `(num_envs, flatdim)`, each row as Gymnasium's `flatten` makes it (`Discrete` becomes one-hot).

    >>> flatten(spaces.Discrete(3, start=1), torch.tensor([1, 3]), torch.int64)
    tensor([[1, 0, 0],
            [0, 0, 1]])
    """
    parts = children(space)
    if parts is not None:
        return torch.cat([flatten(part, value[key], to) for key, part in parts.items()], -1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counts, starts = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec), space.start
        columns = value.reshape(len(value), -1, 1) - torch.as_tensor(np.ravel(starts), device=value.device).view(-1, 1)
        one_hots = [columns[:, i] == torch.arange(int(n), device=value.device) for i, n in enumerate(counts.ravel())]
        return torch.cat(one_hots, -1).to(to)
    return value.flatten(1).to(to)
