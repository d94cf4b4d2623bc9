"""Gymnasium's spaces, and batched tensors as their values.

A value of a space holds one member per env. It is a tensor `(num_envs, *space.shape)` in the
space's dtype (`Discrete`: `(num_envs,)` int64). For a `Dict` or `Tuple` space it is a TensorDict of
such values, under the dict's keys or "0", "1", ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchwrap import random
from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer
from torchwrap._core.errors import refusal
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.rows import apply as apply
from torchwrap._core.rows import is_host_readable, tensordict

Path: TypeAlias = tuple[str, ...]

Value: TypeAlias = "Tensor | TensorDict"
"""A Tensor, or a TensorDict if the space is a `Dict` or `Tuple`."""

REWARD = spaces.Box(-np.inf, np.inf, (1,), np.float32)
"""The space of a reward: any float32 number."""

_FLAG: Space[Any] = spaces.Box(0, 1, (1,), np.bool_)  # type: ignore[arg-type]

COLUMNS: dict[str, Space[Any]] = {"reward": REWARD, "terminated": _FLAG, "truncated": _FLAG}
"""The entries of a successor that every env has, beside `observation`."""

_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")

TORCH_DTYPES = {np.dtype(name).str: getattr(torch, name) for name in _NAMES}
"""The real dtypes of both NumPy and PyTorch, by `dtype.str`: some Dynamos cannot hash a dtype."""

_CPU = torch.device("cpu")
_TENSOR_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

# The structure of a space and its values.


def children(
    space: Space[Any],
) -> dict[str, Space[Any]] | None:
    """The subspaces of a `Dict` by key, or of a `Tuple` by "0", "1", ...; None for other spaces."""
    if isinstance(space, _TENSOR_SPACES):  # the usual case; Dict and Tuple take longer to tell
        return None
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return {str(index): child for index, child in enumerate(space.spaces)}
    return None


def leaves(
    space: Space[Any],
    path: Path = (),
) -> Iterator[tuple[Path, Space[Any]]]:
    """Yields the path of keys to each leaf, a space of single tensors, and the leaf.

    Raises a ValueError for an empty `Dict` or `Tuple`, and for a `Dict` with a key that is not a
    string.

    >>> list(leaves(spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2)))))
    [(('a', 'b'), Discrete(2))]
    """
    subspaces = children(space)
    if subspaces is None:
        yield path, space
        return
    if not subspaces or not all(isinstance(key, str) for key in subspaces):
        must = "a Dict or Tuple space must have at least one subspace and string keys"
        raise ValueError(refusal("torchwrap.spaces", must, space))
    for key, child in subspaces.items():
        yield from leaves(child, (*path, key))


def map_leaves(
    function: Callable[[Space[Any]], Space[Any]],
    space: Space[Any],
) -> Space[Any]:
    """A space of the same structure with `function(leaf)` for each leaf."""
    if isinstance(space, spaces.Dict):
        parts = {key: map_leaves(function, part) for key, part in space.items()}
        return spaces.Dict(list(parts.items()))  # pairs keep their order
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_leaves(function, part) for part in space.spaces])
    return function(space)


def dict_like(
    below: spaces.Dict,
    parts: dict[str, Space[Any]],
) -> spaces.Dict:
    """A Dict of other parts, whose keys are sorted if those of `below` are, as Gymnasium does."""
    if not hasattr(below, "sort_keys"):  # before Gymnasium 1.4
        return spaces.Dict(parts)
    return spaces.Dict(parts, sort_keys=below.sort_keys)  # type: ignore[arg-type]


def build(
    space: Space[Any],
    make: Callable[[Path, Space[Any]], Tensor],
    num_envs: int,
    path: Path = (),
) -> Value:
    """Builds a value: `make(path, leaf)` returns the tensor `(num_envs, *leaf.shape)` of a leaf."""
    subspaces = children(space)
    if subspaces is None:
        return make(path, space)
    values = {}
    for key, child in subspaces.items():
        values[key] = build(child, make, num_envs, (*path, key))
    return tensordict(values, num_envs)


def entry(value: Any, path: Path) -> Any:
    """The entry of a nested value at the path of a leaf: of a TensorDict, a dict or a tuple."""
    for key in path:
        index: Any = int(key) if isinstance(value, tuple | list) else key
        value = value[index]
    return value


# Single tensors.


def dtype(space: Space[Any]) -> torch.dtype:
    """The torch dtype of a leaf. Raises a TypeError for a space that tensors cannot represent."""
    if not isinstance(space, _TENSOR_SPACES):
        must = "space must be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
        raise TypeError(refusal("torchwrap.spaces", must, str(space)))
    if space.dtype.str not in TORCH_DTYPES:
        must = f"space must have a dtype that PyTorch computes with, not {space.dtype}"
        remedy = "Convert it with make(id, wrappers=[...]) and Gymnasium's DtypeObservation"
        raise TypeError(refusal("torchwrap.spaces", must, space, remedy))
    return TORCH_DTYPES[space.dtype.str]


def counts(space: Space[Any]) -> tuple[Any, Any]:
    """The number of values and the smallest value in each component of a discrete leaf.

    Returns arrays for `MultiDiscrete`, else ints.
    """
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.astype(np.int64), space.start.astype(np.int64)
    if isinstance(space, spaces.Discrete):
        return int(space.n), int(space.start)
    return 2, 0


def bound(limit: float, to: torch.dtype) -> float:
    """A limit for PyTorch's `clamp`: infinite if it is too large for the float dtype `to`."""
    return torch.tensor(limit, dtype=to, device="cpu").item()


# Conversion of values.


def zeros(
    space: Space[Any],
    num_envs: int,
    device: torch.device | str = "cpu",
) -> Value:
    """For each env the member nearest to zero, as Gymnasium's `create_zero_array`."""

    def make(path: Path, leaf: Space[Any]) -> Tensor:
        if isinstance(leaf, spaces.Box):
            zero = np.clip(0, leaf.low, leaf.high)
        else:
            _, zero = counts(leaf)
        row = torch.as_tensor(zero, dtype=dtype(leaf), device=device)
        return row.expand(num_envs, *(leaf.shape or ())).clone()

    return build(space, make, num_envs)


def to_tensors(arrays: Iterable[Any], device: torch.device) -> tuple[Tensor, ...]:
    """New NumPy arrays as tensors on `device`. On the CPU they share the memory of the arrays."""
    sources = map(torch.from_numpy, arrays)
    if device.type == "cpu":
        return tuple(sources)
    if device.type == "cuda":
        # Only a copy from pinned memory does not block. The allocator keeps it until then.
        sources = map(Tensor.pin_memory, sources)
    return tuple([source.to(device, non_blocking=True) for source in sources])


def cast(array: NDArray[Any], to: Any) -> NDArray[Any]:
    """Copies numbers to an array of a dtype. Raises a ValueError if an integer would change."""
    if array.dtype == to:
        return array.copy()
    with np.errstate(invalid="ignore"):
        copy = array.astype(to, "C")
    changes = copy.dtype.kind != "f" and (copy != array).any()
    if changes or array.dtype.kind in "SU":
        raise ValueError(refusal("torchwrap", f"actions must be numbers of dtype {to}", array))
    return copy


def from_numpy(
    space: Space[Any],
    value: Any,
    device: torch.device = _CPU,
) -> Value:
    """Copies Gymnasium's batch (an array, or a dict or tuple of them) to tensors on `device`.

    Raises as `cast`.
    """
    subspaces = children(space)
    if subspaces is None:
        (leaf,) = to_tensors([cast(np.asarray(value), space.dtype)], device)
        return leaf
    tensors = {}
    for key, child in subspaces.items():
        tensors[key] = from_numpy(child, entry(value, (key,)), device)
    first = next(iter(tensors.values()))
    return TensorDict(tensors, batch_size=first.shape[:1])


def to_numpy(space: Space[Any], value: Value) -> Any:
    """Copies a value to Gymnasium's batched form, the inverse of `from_numpy`."""
    if isinstance(value, Tensor):
        return value.numpy(force=True).copy()  # type: ignore[call-arg]
    subspaces = children(space) or {}
    arrays = {key: to_numpy(child, value[key]) for key, child in subspaces.items()}
    return tuple(arrays.values()) if isinstance(space, spaces.Tuple) else arrays


def to_device(value: Value, device: torch.device) -> Value:
    """A value on a device. `TensorDict.to` would wait for the whole device."""
    return apply(lambda _, leaf: leaf.to(device), value)


def flatten(
    space: Space[Any],
    value: Value,
    to: torch.dtype,
) -> Tensor:
    """Flattens each member to a vector of a dtype. As in Gymnasium, discrete parts become one-hot.

    A value with any batch dimensions becomes a tensor `(*batch, flatdim(space))`.

    >>> flatten(spaces.Discrete(3, start=1), torch.tensor([1, 3]), torch.int64)
    tensor([[1, 0, 0],
            [0, 0, 1]])
    """
    if not isinstance(value, Tensor):
        parts = []
        for path, leaf in leaves(space):
            parts.append(flatten(leaf, entry(value, path), to))
        return torch.cat(parts, -1)
    num_batch_dims = value.dim() - len(space.shape or ())
    columns = value.reshape(*value.shape[:num_batch_dims], -1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        # Unlike `counts`: Dynamo traces `np.ravel` of NumPy's numbers, but not of Python's.
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        sizes = np.ravel(count).tolist()
        starts = np.ravel(space.start).tolist()
        one_hot = []
        for index, size in enumerate(sizes):
            values = starts[index] + torch.arange(size, device=value.device)
            one_hot.append(columns[..., index, None] == values)
        columns = torch.cat(one_hot, -1)
    return columns.to(to)


# Checks of spaces.


def optional_space(
    owner: str,
    name: str,
    space: object,
) -> Space[Any] | None:
    """Returns an argument that is a supported space or None. Raises a TypeError or ValueError."""
    if space is None:
        return None
    if not isinstance(space, Space):
        raise TypeError(refusal(owner, f"{name} must be a gymnasium Space", repr(space)))
    try:
        for _, leaf in leaves(space):
            dtype(leaf)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{owner}: {name} does not fit. {error}") from error
    return space


_DTYPE_KINDS = {"": "biuf", "numbers": "iuf", "floats": "f"}


def box(
    owner: str,
    what: str,
    space: Space[Any],
    of: Literal["", "numbers", "floats"] = "",
) -> spaces.Box:
    """Returns a space that is a Box, of "numbers" (no bools) or "floats" if asked for.

    Raises a TypeError for another space. `what` is "observation" or "action".
    """
    if isinstance(space, spaces.Box) and space.dtype.kind in _DTYPE_KINDS[of]:
        return space
    must = f"{what} space must be a Box"
    if of:
        must = f"{must} of {of}"
    remedy = "ObservationKeys transforms single entries of a Dict" if what == "observation" else ""
    raise TypeError(refusal(owner, must, space, remedy))


# Checks of values.

check_tensor = functools.partial(validation.tensor, kind=TypeError)


def outside(space: Space[Any], value: Tensor) -> Tensor:
    """True for each component of a leaf's value that is out of bounds or NaN: bool, same shape."""
    limits: Any
    if isinstance(space, spaces.Box):
        limits = (space.low, space.high)
    else:
        count, start = counts(space)
        limits = (start, start + count - 1)
        value = value.long()
    low, high = [torch.as_tensor(limit, device=value.device) for limit in limits]
    return ~((value >= low) & (value <= high))


def contains(space: Space[Any], value: Value) -> bool:
    """True if every row has the structure, shape, dtype and bounds of the space.

    Waits for the device.
    """
    subspaces = children(space)
    if subspaces is None:
        if not isinstance(value, Tensor) or value.dtype != dtype(space):
            return False
        is_shaped = value.shape[1:] == (space.shape or ())
        return is_shaped and not outside(space, value).any()
    if not isinstance(value, TensorDictBase) or set(value.keys()) != set(subspaces):
        return False
    return all(contains(child, value[key]) for key, child in subspaces.items())


def check(
    owner: str,
    what: str,
    space: Space[Any],
    value: Any,
    num_envs: int,
    device: torch.device,
    bounds: bool = True,
    remedy: str = "",
) -> None:
    """Raises a TypeError or ValueError unless a value has the space's structure, shape and dtype.

    `what` names the value in the message. With `bounds`, discrete values are checked too if the
    host can read them without a device sync.
    """
    if not isinstance(space, _TENSOR_SPACES):
        subspaces = children(space) or {}
        keys = sorted(value.keys()) if isinstance(value, TensorDictBase) else type(value)
        if keys != sorted(subspaces):
            must = f"{what} must be a TensorDict with keys {sorted(subspaces)}"
            raise TypeError(refusal(owner, must, keys, remedy))
        for key, child in subspaces.items():
            check(owner, f"{what}[{key!r}]", child, value[key], num_envs, device, bounds, remedy)
        return
    shape = (num_envs, *(space.shape or ()))
    to = TORCH_DTYPES[space.dtype.str]  # type: ignore[union-attr]
    check_tensor(owner, what, value, shape, to, device, remedy)
    if not bounds or isinstance(space, spaces.Box) or not is_host_readable(value):
        return
    if isinstance(space, spaces.Discrete):
        low, high = value.aminmax()
        is_inside = int(low) >= space.start and int(high) < space.start + space.n
    else:
        is_inside = not outside(space, value).any()
    if not is_inside:
        values = f"values from {value.min()} to {value.max()}"
        raise ValueError(refusal(owner, f"{what} must be in {space}", values, remedy))


def check_layer(
    owner: str,
    signature: Signature,
    td: Any,
    flags: bool,
) -> None:
    """Raises unless a layer's hook returned a TensorDict that fits; with `flags`, of a step."""
    num_envs = signature.num_envs
    device = signature.device
    if not isinstance(td, TensorDictBase) or td.batch_size != (num_envs,):
        must = f"result must be a TensorDict of batch size ({num_envs},)"
        raise TypeError(refusal(owner, must, getattr(td, "batch_size", type(td))))
    columns = COLUMNS if flags else {}
    missing = [key for key in ("observation", *columns) if key not in td.keys()]
    if missing:
        raise ValueError(refusal(owner, f"result must have {missing} too", sorted(td.keys())))
    space = signature.single_observation_space
    # After a reset, the rows that were not reset may hold anything.
    check(owner, "observation", space, td["observation"], num_envs, device, bounds=flags)
    for key, column in columns.items():
        check_tensor(owner, key, td[key], (num_envs, 1), dtype(column), device)


def check_function(
    owner: str,
    what: str,
    func: Callable[[Value], Value],
    takes: Space[Any],
    returns: Space[Any],
    signature: Signature,
) -> None:
    """Calls a function of `what` with zeros.

    Raises a TypeError or ValueError if it raises, if it draws, or if its result does not fit.
    """
    num_envs = signature.num_envs
    device = signature.device
    remedy = "Draw with torchwrap.random, in a Transform with a stream"
    with no_foreign_draws(f"{owner}'s func", remedy, device):
        try:
            result = func(zeros(takes, num_envs, device))
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            fault = f"func must take {what}, but it raised {type(error).__name__}: {error}"
            raise kind(refusal(owner, fault)) from error
    check(owner, f"func's {what}", returns, result, num_envs, device)


@dataclasses.dataclass(frozen=True)
class Signature:
    """Describes a batch of envs to a transform, which returns the description for the layer above.

    Args:
        num_envs: at least 1.
        single_observation_space, single_action_space: of a single env.
        device: of all tensors.
        max_episode_steps: the length at which episodes are truncated. None if there is no limit.
        first_index: global index of the first env, for a shard of a larger run.
        policy_state: the state that a recurrent policy carries from step to step, by name.

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
    policy_state: Mapping[str, EnvBuffer] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        values = vars(self)  # because it is frozen
        values["num_envs"] = validation.integer("Env", "num_envs", self.num_envs, at_least=1)
        values["first_index"] = validation.integer("Env", "first_index", self.first_index, 0)
        limit = self.max_episode_steps
        if limit is not None:
            limit = validation.integer("Env", "max_episode_steps", limit, at_least=1)
        values["max_episode_steps"] = limit
        for space in (self.single_observation_space, self.single_action_space):
            for _, leaf in leaves(space):
                dtype(leaf)
        # A tensor's device has an index, so "cuda" would equal none.
        values["device"] = torch.empty(0, device=self.device).device

    def replace(self, **changes: Any) -> Signature:
        """Returns this signature with some fields changed."""
        return dataclasses.replace(self, **changes)

    def stream(self) -> tuple[random.Stream, Signature]:
        """Returns a new random stream for a transform, and this signature.

        `reset(seed)` seeds it by its name in `state_dict`, so it is independent of other streams.
        """
        return random.Stream(self.num_envs, self.first_index, tag=2, device=self.device), self


def zero_successor(signature: Signature, infos: Mapping[str, Space[Any]]) -> Any:
    """Zeros like the results of `Env._step`, with infos in these spaces."""
    values = {"observation": signature.single_observation_space, **COLUMNS}
    if infos:
        values["info"] = spaces.Dict(dict(infos))
    return zeros(spaces.Dict(values), signature.num_envs, signature.device)


# Sampling.


class Sampler(nn.Module):
    """Draws a random member for each env of a stream, distributed as Gymnasium's `Space.sample`.

    >>> Sampler(spaces.Discrete(3))(random.Stream(5, seed=0)).shape
    torch.Size([5])
    """

    def __init__(
        self,
        space: Space[Any],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.space = space
        parts = [_Leaf(leaf, device) for _, leaf in leaves(space)]
        self.parts = nn.ModuleList(parts)

    def forward(self, stream: random.Stream, masks: Tensor | None = None) -> Value:
        """Draws from the stream, which advances by one step per leaf of the space.

        With masks `(num_envs, n)`, of a discrete leaf, only where they are not 0.
        """
        parts = iter(self.parts)

        def make(path: Path, leaf: Space[Any]) -> Tensor:
            stream.next_draw()
            return next(parts)(stream.key(), masks)

        return build(self.space, make, len(stream.env))


def sample(space: Space[Any], stream: random.Stream) -> Value:
    """Draws with a new `Sampler`, on the device of the stream."""
    return Sampler(space, stream.env.device)(stream)


class _Leaf(nn.Module):
    """Draws members of a leaf. Its numbers are buffers: a captured step cannot copy them."""

    low: Tensor
    high: Tensor
    below: Tensor
    above: Tensor
    count: Tensor
    start: Tensor

    def __init__(
        self,
        space: Space[Any],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.shape = space.shape or ()
        self.dtype = dtype(space)
        numbers: dict[str, Any] = {}
        if isinstance(space, spaces.Box):
            self.is_bounded = space.is_bounded()
            work = np.float32 if space.dtype in (np.float32, np.float16) else np.float64
            start: Any = 0
            if space.dtype.kind in "iu":  # counted from the nearest to 0: float64 holds 53 bits
                start = np.clip(0, space.low, space.high)
            numbers["start"] = start
            numbers["low"] = (space.low - start).astype(work)
            numbers["high"] = (space.high - start).astype(work)
            numbers["below"] = space.bounded_below
            numbers["above"] = space.bounded_above
        else:
            numbers["count"], numbers["start"] = counts(space)
            self.sizes = np.broadcast_to(numbers["count"], self.shape).ravel().tolist()
            if np.max(numbers["count"]) > 2**32:
                raise ValueError(refusal("Env", "actions must have at most 2**32 values", space))
        for name, number in numbers.items():
            value = torch.tensor(np.asarray(number), device=device)  # PyTorch 2.7 takes no np.bool
            self.register_buffer(name, value, persistent=False)

    def forward(self, key: random.Key, masks: Tensor | None) -> Tensor:
        if "count" in self._buffers:
            numbers = self._integers(key, masks) + self.start
            return numbers.to(self.dtype)
        # As in Gymnasium: uniform between two bounds, exponential from a single bound, normal
        # without any. Integers are rounded down.
        low = self.low
        shape = self.shape
        is_integral = not self.dtype.is_floating_point
        end = self.high + 1 if is_integral else self.high
        fraction = random.uniform(key, shape=shape, dtype=low.dtype)
        value = low * (1 - fraction) + end * fraction  # end - low could overflow
        if not self.is_bounded:
            distance = random.exponential(key.fold_in(1), shape=shape, dtype=low.dtype)
            unbounded = random.normal(key.fold_in(2), shape=shape, dtype=low.dtype)
            below_high = torch.where(self.above, end - distance, unbounded)
            from_bound = torch.where(self.below, low + distance, below_high)
            value = torch.where(self.below & self.above, value, from_bound)
        value = value.clamp(low, self.high)
        if is_integral:
            value = value.floor().long() + self.start
        return value.to(self.dtype)

    def _integers(self, key: random.Key, masks: Tensor | None) -> Tensor:
        if masks is None:
            # The product of a word and a count of 2**31 or more has the sign bit.
            return random.integers(key, self.count, shape=self.shape) & random.WORD
        if masks.shape[1:] != (sum(self.sizes),):
            must = f"action_masks must have {self.sizes} columns"
            raise ValueError(refusal("sample_action", must, masks.shape))
        # The largest of equally distributed numbers. Where no value is allowed, the smallest value.
        draws = random.uniform(key, shape=masks.shape[1:])
        parts = torch.where(masks > 0, draws, -1).split(self.sizes, -1)
        numbers = torch.stack([part.argmax(-1) for part in parts], -1)
        return numbers.view(-1, *self.shape)
