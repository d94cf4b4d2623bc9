"""Gymnasium's spaces, and batched tensors as their values.

A value of a space holds one member per env. It is a tensor `(num_envs, *space.shape)` in the space's dtype (`Discrete`:
`(num_envs,)` int64). For a `Dict` or `Tuple` space it is a TensorDict of such values, under the dict's keys or "0", "1", ...
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium import Space, spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchwrap import random
from torchwrap._core import validation
from torchwrap._core.buffers import ConstantBuffer, EnvBuffer
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.rows import apply as apply
from torchwrap._core.rows import is_host_readable

Path: TypeAlias = tuple[str, ...]

Value: TypeAlias = "Tensor | TensorDict"
"""A Tensor, or a TensorDict if the space is a `Dict` or `Tuple`."""

_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")

TORCH_DTYPES: dict[str, torch.dtype] = {np.dtype(name).str: getattr(torch, name) for name in _NAMES}
"""The real dtypes with which both NumPy and PyTorch compute, by NumPy's `dtype.str`: not every Dynamo hashes a dtype."""


def children(space: Space[Any]) -> dict[str, Space[Any]] | None:
    """The subspaces of a `Dict` by key, or of a `Tuple` by "0", "1", and so on. None for any other space."""
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return {str(index): child for index, child in enumerate(space.spaces)}
    return None


def leaves(space: Space[Any], path: Path = ()) -> Iterator[tuple[Path, Space[Any]]]:
    """Yields each leaf of a space, which is a space of single tensors, with its path of keys.

    Raises a ValueError for an empty `Dict` or `Tuple`, and for a `Dict` with a key that is not a string.

    >>> list(leaves(spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2)))))
    [(('a', 'b'), Discrete(2))]
    """
    if (subspaces := children(space)) is None:
        yield path, space
        return
    if not subspaces or not all(isinstance(key, str) for key in subspaces):
        raise ValueError(
            f"A Dict or Tuple space needs at least one subspace and string keys, but got {space}."
        )
    for key, child in subspaces.items():
        yield from leaves(child, (*path, key))


def build(
    space: Space[Any], make: Callable[[Path, Space[Any]], Tensor], num_envs: int, path: Path = ()
) -> Value:
    """Builds a value of a space: `make(path, leaf)` returns the tensor `(num_envs, *leaf.shape)` of each leaf."""
    if (subspaces := children(space)) is None:
        return make(path, space)
    values = {key: build(child, make, num_envs, (*path, key)) for key, child in subspaces.items()}
    return TensorDict(values, batch_size=[num_envs])


def at(value: Any, path: Path) -> Any:
    """The part of a nested value at the path of a leaf: of a TensorDict, or of Gymnasium's dicts and tuples."""
    for key in path:
        value = value[int(key) if isinstance(value, tuple | list) else key]
    return value


def to_device(value: Value, device: torch.device) -> Value:
    """A value on a device. `TensorDict.to` would wait for the whole device."""
    return apply(lambda _, leaf: leaf.to(device), value)


def dict_like(below: spaces.Dict, parts: dict[str, Space[Any]]) -> spaces.Dict:
    """A Dict of other parts, in the order that Gymnasium's wrappers give them: sorted, if `below` sorts its keys."""
    order = (
        {"sort_keys": below.sort_keys} if hasattr(below, "sort_keys") else {}
    )  # of Gymnasium 1.4
    return spaces.Dict(parts, **order)  # type: ignore[arg-type]


def map_leaves(function: Callable[[Space[Any]], Space[Any]], space: Space[Any]) -> Space[Any]:
    """A space of the same structure with `function(leaf)` for each leaf."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict(
            [(key, map_leaves(function, part)) for key, part in space.spaces.items()]
        )  # pairs keep their order
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_leaves(function, part) for part in space.spaces])
    return function(space)


def dtype(space: Space[Any]) -> torch.dtype:
    """The torch dtype of a leaf space. Raises a TypeError for a space that tensors cannot represent."""
    if not isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        remedy = ": leave such entries of a Dict out with make(id, wrappers=[...]) and Gymnasium's FilterObservation"
        needed = "A space needs to be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
        raise TypeError(f"{needed}, but got {space}{remedy if isinstance(space, Space) else ''}.")
    if space.dtype.str not in TORCH_DTYPES:
        raise TypeError(
            f"A space needs a dtype that PyTorch computes with, but got {space} of dtype {space.dtype}."
        )
    return TORCH_DTYPES[space.dtype.str]


def bound(limit: float, to: torch.dtype) -> float:
    """`limit` as a bound for PyTorch's `clamp`: infinite if the float dtype `to` cannot represent it."""
    return limit if abs(limit) <= torch.finfo(to).max else math.copysign(math.inf, limit)


def counts(space: Space[Any]) -> tuple[Any, Any]:
    """The number of values of each component of a discrete leaf, and the smallest: arrays of `MultiDiscrete`, else ints."""
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.astype(np.int64), space.start.astype(np.int64)
    if isinstance(space, spaces.Discrete):
        return int(space.n), int(space.start)
    return 2, 0


def zeros(space: Space[Any], num_envs: int, device: torch.device | str = "cpu") -> Value:
    """A new value with the member of the space that is nearest to zero for each env, as Gymnasium's `create_zero_array`."""

    def make(path: Path, leaf: Space[Any]) -> Tensor:
        zero = np.clip(0, leaf.low, leaf.high) if isinstance(leaf, spaces.Box) else counts(leaf)[1]
        return (
            torch.as_tensor(zero, dtype=dtype(leaf), device=device)
            .expand(num_envs, *(leaf.shape or ()))
            .clone()
        )

    return build(space, make, num_envs)


def tensor(array: Any, device: torch.device | str) -> Tensor:
    """A NumPy array as a tensor on `device`. On the CPU it shares the array's memory, so pass a new array."""
    source = torch.from_numpy(array)
    if (device := torch.device(device)).type == "cpu":
        return source
    if device.type == "cuda":
        source = (
            source.pin_memory()
        )  # for a copy that does not block; the allocator keeps the memory until it is done
    return source.to(device, non_blocking=True)


def from_numpy(space: Space[Any], value: Any, device: torch.device | str = "cpu") -> Value:
    """Copies a batched value of Gymnasium's (an array, or a dict or tuple of them) to tensors on `device`."""
    if (subspaces := children(space)) is None:
        return tensor(np.array(value, space.dtype, order="C"), device)
    values = (
        {str(index): part for index, part in enumerate(value)}
        if isinstance(value, tuple)
        else value
    )
    tensors = {key: from_numpy(child, values[key], device) for key, child in subspaces.items()}
    return TensorDict(tensors, batch_size=next(iter(tensors.values())).shape[:1])


def to_numpy(space: Space[Any], value: Value) -> Any:
    """Copies a value to Gymnasium's batched form, the inverse of `from_numpy`."""
    if isinstance(value, Tensor):
        return value.numpy(force=True).copy()  # type: ignore[call-arg]
    arrays = {
        key: to_numpy(child, at(value, (key,))) for key, child in (children(space) or {}).items()
    }
    return tuple(arrays.values()) if isinstance(space, spaces.Tuple) else arrays


def flatten(space: Space[Any], value: Value, to: torch.dtype) -> Tensor:
    """Flattens each member to a vector of a dtype, as Gymnasium's `flatten` does: discrete components become one-hot.

    A value with any batch dimensions becomes a tensor `(*batch, flatdim(space))`.

    >>> flatten(spaces.Discrete(3, start=1), torch.tensor([1, 3]), torch.int64)
    tensor([[1, 0, 0],
            [0, 0, 1]])
    """
    if not isinstance(value, Tensor):
        return torch.cat([flatten(leaf, at(value, path), to) for path, leaf in leaves(space)], -1)
    columns = value.reshape(*value.shape[: value.dim() - len(space.shape or ())], -1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        # Not by `counts`: Dynamo traces `np.ravel` of NumPy's numbers, but not of Python's.
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        sizes, starts = np.ravel(count).tolist(), np.ravel(space.start).tolist()
        ranges = [
            torch.arange(start, start + size, device=value.device)
            for size, start in zip(sizes, starts, strict=True)
        ]
        columns = torch.cat(
            [columns[..., index, None] == values for index, values in enumerate(ranges)], -1
        )
    return columns.to(to)


REWARD: spaces.Box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
"""The space of a reward: any float32 number."""


def optional_space(owner: str, name: str, space: object) -> Space[Any] | None:
    """Returns an argument that is a supported space or None. Raises a TypeError or ValueError for anything else."""
    if space is None:
        return None
    if not isinstance(space, Space):
        raise TypeError(f"{owner} needs a gymnasium Space as {name}, but got {space!r}.")
    try:
        for _, leaf in leaves(space):
            dtype(leaf)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{owner} needs an {name} that tensors can hold, but got {space}: {error}"
        ) from error
    return space


def box(
    owner: str,
    what: str,
    space: Space[Any],
    of: Literal["", "numbers", "floats"] = "",
    path: Path = (),
) -> spaces.Box:
    """Returns the space if it is a Box, of "numbers" (not bools) or "floats" if asked for. Raises a TypeError otherwise."""
    if (
        not isinstance(space, spaces.Box)
        or space.dtype.kind not in {"": "biuf", "numbers": "iuf", "floats": "f"}[of]
    ):
        remedy = (
            ": transform entries of a Dict with ObservationKeys"
            if path or isinstance(space, spaces.Dict)
            else ""
        )
        raise TypeError(
            f"{owner} needs a Box {what} space{of and f' of {of}'}, but got {space}{remedy}."
        )
    return space


def outside(space: Space[Any], value: Tensor) -> Tensor:
    """Which components of a leaf's batched value are out of bounds: bool, of the same shape. NaN is out of bounds."""
    if isinstance(space, spaces.Box):
        low, high = (
            torch.as_tensor(bound, device=value.device) for bound in (space.low, space.high)
        )
        return ~((value >= low) & (value <= high))
    count, start = (torch.as_tensor(number, device=value.device) for number in counts(space))
    value = value.long()
    return (value < start) | (value >= start + count)


def contains(space: Space[Any], value: Value) -> bool:
    """Whether every row of a batched value lies in the space: structure, shape, dtype and bounds. Waits for the device."""
    if (subspaces := children(space)) is not None:
        is_dict = isinstance(value, TensorDictBase) and set(value.keys()) == set(subspaces)
        return is_dict and all(
            contains(child, at(value, (key,))) for key, child in subspaces.items()
        )
    if (
        not isinstance(value, Tensor)
        or value.dtype != dtype(space)
        or value.shape[1:] != (space.shape or ())
    ):
        return False
    return not outside(space, value).any()


def check(
    owner: str,
    what: str,
    space: Space[Any],
    value: object,
    num_envs: int,
    device: torch.device,
    bounds: bool = True,
) -> None:
    """Raises a TypeError or ValueError unless a value has the structure, shape, dtype and device that the space requires.

    `owner` and `what` begin the message. The `bounds` of discrete spaces are checked if the host can read without a sync.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        subspaces = children(space) or {}
        if not isinstance(value, TensorDictBase) or set(value.keys()) != set(subspaces):
            got = (
                sorted(value.keys()) if isinstance(value, TensorDictBase) else type(value).__name__
            )
            raise TypeError(
                f"{owner} needs {what} as a TensorDict with keys {sorted(subspaces)}, but got {got}."
            )
        for key, child in subspaces.items():
            check(owner, f"{what}[{key!r}]", child, value[key], num_envs, device, bounds)
        return
    # The check of a single tensor is part of every eager step, so it calls few functions and operators.
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner} needs {what} as a torch.Tensor, but got {type(value).__name__}.")
    shape = (num_envs, *(space.shape or ()))
    if value.shape != shape:
        raise ValueError(
            f"{owner} needs {what} of shape {shape} (num_envs first), but got {tuple(value.shape)}."
        )
    if value.dtype != TORCH_DTYPES[space.dtype.str]:  # type: ignore[union-attr]
        raise TypeError(
            f"{owner} needs {what} of dtype {dtype(space)} for {space}, but got {value.dtype}."
        )
    if value.device != device:
        raise ValueError(f"{owner} needs {what} on device {device}, but got {value.device}.")
    if not bounds or isinstance(space, spaces.Box) or not is_host_readable(value):
        return
    if isinstance(space, spaces.Discrete):
        low, high = value.aminmax()
        is_inside = int(low) >= space.start and int(high) < space.start + space.n
    else:
        is_inside = not outside(space, value).any()
    if not is_inside:
        raise ValueError(
            f"{owner} needs {what} in {space}, but got values from {value.min()} to {value.max()}."
        )


def check_layer(owner: str, signature: Signature, td: object, flags: bool) -> None:
    """Raises unless a hook of a layer has returned a TensorDict that fits the signature; with `flags`, one of a step."""
    n, device = signature.num_envs, signature.device
    if not isinstance(td, TensorDictBase) or td.batch_size != (n,):
        got = (
            f"batch size {tuple(td.batch_size)}"
            if isinstance(td, TensorDictBase)
            else type(td).__name__
        )
        raise TypeError(
            f"{owner} needs to return a TensorDict of batch size ({n},), but got {got}."
        )
    dtypes = (
        {"reward": torch.float32, "terminated": torch.bool, "truncated": torch.bool}
        if flags
        else {}
    )
    if missing := [
        key for key in ("observation", *dtypes) if key not in td.keys() or td[key] is None
    ]:
        raise ValueError(
            f"{owner} needs to return {missing} too, but got {sorted(td.keys() - {*missing})}."
        )
    # After a reset, rows that go on may hold anything.
    check(
        owner,
        "to return observations",
        signature.single_observation_space,
        td["observation"],
        n,
        device,
        bounds=flags,
    )
    for key, to in dtypes.items():
        value: Any = td[key]
        if value.shape != (n, 1) or value.dtype != to or value.device != device:
            remedy = (
                f": convert it with `.to({to})`"
                if value.shape == (n, 1)
                else ": make a column with `.unsqueeze(-1)`"
            )
            got = f"{validation.described(value)} on {value.device}{remedy}"
            raise ValueError(
                f"{owner} needs to return {key} of shape {(n, 1)} {to} on {device}, but got {got}."
            )


def infos(owner: str, td: TensorDict, names: Sequence[str]) -> list[Tensor]:
    """The entries of a successor's info. Raises a ValueError if it lacks one."""
    try:
        return [td["info", name] for name in names]  # type: ignore[misc]
    except KeyError as error:
        remedy = "give an env of Gymnasium's the argument info_keys, and a FunctionalEnv the function state_info"
        raise ValueError(
            f"{owner} needs {list(names)} in the env's info ({error.args[0]}): {remedy}."
        ) from error


def check_function(
    owner: str,
    what: str,
    func: Callable[[Value], Value],
    takes: Space[Any],
    returns: Space[Any],
    signature: Signature,
) -> None:
    """Calls a function with zeros. Raises a TypeError or ValueError if it raises, draws, or if `check` does for its result."""
    num_envs, device = signature.num_envs, signature.device
    with no_foreign_draws(
        f"{owner}'s func", "draw with torchwrap.random, in a Transform with a stream", device
    ):
        try:
            result = func(zeros(takes, num_envs, device))
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"{owner} needs a func that takes {what}, but it raised {type(error).__name__}: {error}"
            ) from error
    try:
        check(owner, f"func to return {what}", returns, result, num_envs, device)
    except (TypeError, ValueError) as error:
        remedy = (
            ": pass the new space too" if what != "rewards" and isinstance(result, Tensor) else ""
        )
        raise type(error)(f"{str(error)[:-1]}{remedy}.") from None


@dataclasses.dataclass(frozen=True)
class Signature:
    """Describes a batch of envs: what a transform gets from the layer below, and returns for the layer above.

    Args:
        num_envs: at least 1.
        single_observation_space, single_action_space: of a single env.
        device: of all tensors.
        max_episode_steps: the length at which episodes are truncated. None if there is no limit.
        first_index: global index of the first env, for a shard of a larger run.
        num_streams: number of random streams in use so far: of the env, of `sample_action`, and of transforms.
        policy_state: what a recurrent policy carries from step to step, by name.
        summed_info: where a layer repeats actions, the names of the infos that it sums. None if every step is one of the env.

    >>> from gymnasium.spaces import Box, Discrete
    >>> signature = Signature(4, Box(-1, 1, (3,)), Discrete(2))
    >>> signature.replace(num_envs=8).num_envs
    8
    """

    num_envs: int
    single_observation_space: Space[Any]
    single_action_space: Space[Any]
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    max_episode_steps: int | None = None
    first_index: int = 0
    num_streams: int = 2
    policy_state: Mapping[str, EnvBuffer] = dataclasses.field(default_factory=dict)
    summed_info: frozenset[str] | None = None

    def __post_init__(self) -> None:
        validation.integer("An env", "num_envs", self.num_envs, at_least=1)
        validation.integer("An env", "first_index", self.first_index, at_least=0)
        for space in (self.single_observation_space, self.single_action_space):
            for _, leaf in leaves(space):
                dtype(leaf)
        # With its index, as tensors have it: "cuda" is the current CUDA device, and no tensor's device equals it.
        vars(self)["device"] = torch.empty(0, device=self.device).device

    def replace(self, **changes: Any) -> Signature:
        """Returns this signature with some fields changed."""
        return dataclasses.replace(self, **changes)

    def stream(self) -> tuple[random.Stream, Signature]:
        """Returns a new random stream for a transform, independent of the env's other ones, and a signature that counts it."""
        stream = random.Stream(self.num_envs, self.first_index, self.num_streams, self.device)
        return stream, self.replace(num_streams=self.num_streams + 1)


class Sampler(nn.Module):
    """Draws a random member of a space for each env of a stream, distributed as Gymnasium's `Space.sample`.

    >>> Sampler(spaces.Discrete(3))(random.Stream(5, seed=0)).shape
    torch.Size([5])
    """

    def __init__(self, space: Space[Any], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.space = space
        parts = [
            _Box(leaf, device) if isinstance(leaf, spaces.Box) else _Counted(leaf, device)
            for _, leaf in leaves(space)
        ]
        self.parts = nn.ModuleList(parts)

    def forward(self, stream: random.Stream) -> Value:
        """Draws from the stream, which advances by one step per leaf of the space."""
        parts = iter(self.parts)

        def make(path: Path, leaf: Space[Any]) -> Tensor:
            stream.next_draw()
            return next(parts)(stream.key())

        return build(self.space, make, len(stream.env))


def sample(space: Space[Any], stream: random.Stream) -> Value:
    """Draws with a new `Sampler`, on the device of the stream."""
    return Sampler(space, stream.env.device)(stream)


class _Leaf(nn.Module):
    """Draws members of a leaf. Its numbers are buffers, because a captured step cannot copy them from the host."""

    def __init__(self, space: Space[Any], device: torch.device | str, **numbers: Any) -> None:
        super().__init__()
        self.shape, self.dtype = space.shape or (), dtype(space)
        for name, number in numbers.items():
            self.register_buffer(name, torch.tensor(number, device=device), persistent=False)


class _Counted(_Leaf):
    count, start = ConstantBuffer(), ConstantBuffer()

    def __init__(self, space: Space[Any], device: torch.device | str) -> None:
        count, start = counts(space)
        super().__init__(space, device, count=count, start=start)

    def forward(self, key: random.Key) -> Tensor:
        return (random.integers(key, self.count, shape=self.shape) + self.start).to(self.dtype)


class _Box(_Leaf):
    low, high, below, above = (ConstantBuffer() for _ in range(4))

    def __init__(self, space: spaces.Box, device: torch.device | str) -> None:
        work = np.float32 if space.dtype in (np.float32, np.float16) else np.float64
        low, high = space.low.astype(work), space.high.astype(work)
        super().__init__(
            space, device, low=low, high=high, below=space.bounded_below, above=space.bounded_above
        )
        self.is_integral, self.is_bounded = not self.dtype.is_floating_point, space.is_bounded()

    def forward(self, key: random.Key) -> Tensor:
        # As Gymnasium: uniform between two bounds, exponential from one, normal without any. Integers are rounded down.
        low, high, shape = self.low, self.high, self.shape
        end = high + 1 if self.is_integral else high
        fraction = random.uniform(key, shape=shape, dtype=low.dtype)
        value = low * (1 - fraction) + end * fraction  # end - low could overflow
        if not self.is_bounded:
            distance = random.exponential(key.fold_in(1), shape=shape, dtype=low.dtype)
            unbounded = random.normal(key.fold_in(2), shape=shape, dtype=low.dtype)
            from_bound = torch.where(
                self.below, low + distance, torch.where(self.above, end - distance, unbounded)
            )
            value = torch.where(self.below & self.above, value, from_bound)
        return (value.floor() if self.is_integral else value).clamp(low, high).to(self.dtype)
