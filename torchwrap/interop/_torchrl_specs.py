"""Gymnasium's spaces as TorchRL's specs, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

from torchwrap import spaces


def to_spec(space: Space[Any], num_envs: int, device: torch.device) -> TensorSpec:
    """The spec of a batch of values of a space.

    A `Box` with an infinite bound is unbounded, because TorchRL cannot draw from one. `Discrete` and `MultiDiscrete` are
    categorical. Those that do not start at 0 are bounded integers.

    >>> to_spec(gym_spaces.Discrete(3), 2, torch.device("cpu")).rand().shape
    torch.Size([2])
    """
    parts = spaces.children(space)
    if parts is not None:
        specs = {key: to_spec(part, num_envs, device) for key, part in parts.items()}
        return Composite(specs, shape=(num_envs,), device=device)
    form: dict[str, Any] = {"shape": (num_envs, *(space.shape or ())), "dtype": spaces.dtype(space), "device": device}
    if isinstance(space, gym_spaces.MultiBinary):
        return Binary(**form)
    if isinstance(space, gym_spaces.Box):
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        largest = torch.finfo(low.dtype).max if low.is_floating_point() else 2**62
        if not (high.double() - low.double() <= largest).all():
            return Unbounded(**form)
    else:
        count = torch.as_tensor(space.nvec if isinstance(space, gym_spaces.MultiDiscrete) else space.n)  # type: ignore[attr-defined]
        low = torch.as_tensor(space.start)  # type: ignore[attr-defined]
        high = low + count - 1
        if not low.any():
            return MultiCategorical(count, **form) if low.dim() else Categorical(int(count), **form)
    low, high = (bound.to(device, form["dtype"]).expand(form["shape"]).clone() for bound in (low, high))
    return Bounded(low, high, **form)


def spec_like(value: Any) -> TensorSpec:
    """An unbounded spec of a value, a Tensor or a TensorDict."""
    if not isinstance(value, Tensor):
        parts = {key: spec_like(value[key]) for key in value.keys()}
        return Composite(parts, shape=value.batch_size, device=value.device)
    kind = Binary if value.dtype == torch.bool else Unbounded
    return kind(shape=value.shape, dtype=value.dtype, device=value.device)


def to_space(spec: TensorSpec, *, is_action: bool = False) -> Space[Any]:
    """The space of a single env, from the spec of a batch of them.

    A one-hot action is `Discrete` or `MultiDiscrete`, any other one-hot or boolean value `MultiBinary`.

    Raises:
        TypeError: for a spec that no space can represent.
        ValueError: for bounds that differ between the envs.

    >>> to_space(OneHot(3, shape=(2, 3)), is_action=True), to_space(OneHot(3, shape=(2, 3)))
    (Discrete(3), MultiBinary(3))
    """
    if isinstance(spec, Composite):
        return gym_spaces.Dict({key: to_space(part, is_action=is_action) for key, part in spec.items()})
    shape = tuple(spec.shape[1:])
    if is_action and isinstance(spec, OneHot) and len(shape) == 1:
        return gym_spaces.MultiDiscrete(_counts(spec)) if isinstance(spec, MultiOneHot) else gym_spaces.Discrete(shape[0])
    if isinstance(spec, OneHot | Binary) or spec.dtype == torch.bool:
        if not shape:
            return gym_spaces.Discrete(2)
        return gym_spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if isinstance(spec, MultiCategorical):
        return gym_spaces.MultiDiscrete(spec.nvec[0].cpu().numpy())
    if isinstance(spec, Categorical):
        return gym_spaces.MultiDiscrete(np.full(shape, spec.space.n)) if shape else gym_spaces.Discrete(spec.space.n)
    if not isinstance(spec, Bounded | Unbounded):
        raise TypeError(f"from_torchrl needs specs of tensors, but got {type(spec).__name__}: ExcludeTransform drops keys.")
    dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
    if isinstance(spec, Bounded):
        low, high = spec.space.low, spec.space.high
        if (low != low[0]).any() or (high != high[0]).any():
            raise ValueError(f"from_torchrl needs the same bounds in all envs, but got {spec}.")
        return gym_spaces.Box(low[0].cpu().numpy(), high[0].cpu().numpy(), shape, dtype)
    if spec.dtype.is_floating_point:
        return gym_spaces.Box(-np.inf, np.inf, shape, dtype)
    limits = torch.iinfo(spec.dtype)
    return gym_spaces.Box(limits.min, limits.max, shape, dtype)


def encode(spec: TensorSpec, action: Any) -> Any:
    """An action of `to_space(spec, is_action=True)` as the spec wants it.

    >>> encode(OneHot(3, shape=(2, 3)), torch.tensor([2, 0]))
    tensor([[False, False,  True],
            [ True, False, False]])
    """
    if isinstance(spec, Composite):
        return TensorDict({key: encode(part, action[key]) for key, part in spec.items()}, batch_size=spec.shape[:1])
    if isinstance(spec, OneHot):
        columns = action.unbind(-1) if isinstance(spec, MultiOneHot) else [action]
        pairs = zip(columns, _counts(spec), strict=True)
        action = torch.cat([torch.nn.functional.one_hot(column, count) for column, count in pairs], -1)
    return action.to(spec.dtype)


def decode(space: Space[Any], value: Any, num_envs: int) -> spaces.Value:
    """A copy of what TorchRL returned, as a value of `to_space` of its spec."""

    def make(path: tuple[str, ...], leaf: Space[Any]) -> Tensor:
        return (value.get(path) if path else value).to(spaces.dtype(leaf), copy=True)  # type: ignore[no-any-return]

    return spaces.build(space, make, num_envs)


def copied(value: Any) -> Any:
    """A copy of a Tensor, or of a TensorDict of any kind as a plain one."""
    if not isinstance(value, TensorDictBase):
        return value.clone()
    return TensorDict({key: copied(value.get(key)) for key in value.keys()}, batch_size=value.batch_size)


def _counts(spec: TensorSpec) -> list[int]:
    return [box.n for box in spec.space] if isinstance(spec, MultiOneHot) else [spec.space.n]
