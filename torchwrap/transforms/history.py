"""Transforms that keep earlier observations or actions of the running episode."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import random, spaces
from torchwrap._core import validation
from torchwrap._core.buffers import BatchedModule, ConstantBuffer, EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Path, Signature, Value
from torchwrap.transforms.transform import Transform


class _Frames(BatchedModule):
    """The latest frames of a leaf, oldest first. Before an initial one come copies of `padding`, or of it if that is None."""

    frames = EnvBuffer(row=lambda self: self.padding.expand(self.size, *self.padding.shape))
    padding = ConstantBuffer()

    def __init__(self, zero: Tensor, padding: Tensor | None, size: int, num_envs: int) -> None:
        super().__init__()
        self.size, self.repeats_initial = size, padding is None
        self.register_buffer("padding", zero if padding is None else padding, persistent=False)
        self.allocate(num_envs, zero.device)

    def step(self, frame: Tensor) -> Tensor:
        """Appends a frame. Returns all of them."""
        latest = torch.cat([self.frames[:, 1:], frame.unsqueeze(1)], 1)
        self.frames.copy_(latest)
        return latest

    def reset(self, initial: Tensor, mask: RowMask) -> Tensor:
        """Starts over with an initial frame, in the rows of the mask. Returns all frames."""
        initial = mask.gather(initial).unsqueeze(1)
        before = initial if self.repeats_initial else self.padding
        before = before.expand(initial.shape[0], self.size - 1, *self.padding.shape)
        latest = torch.cat([before, initial], 1)
        mask.scatter_(self.frames, latest)
        return mask.spread(latest)

    def clear(self, mask: RowMask) -> None:
        """Starts over without a frame, in the rows of the mask."""
        mask.assign_(self.frames, self.padding.expand_as(self.frames))


class _History(Transform):
    """Base for transforms that keep a separate history of each leaf of a space, and show a part of it."""

    def _make_histories(
        self, space: Space[Any], signature: Signature, size: int, padding_type: str | Any
    ) -> None:
        owner = type(self).__name__
        if not isinstance(padding_type, str) and not space.contains(padding_type):
            raise ValueError(f"{owner} needs a padding_type in {space}, but got {padding_type!r}.")
        self.history_of: dict[Path, _Frames] = {}
        for path, leaf in spaces.leaves(space):
            zero = spaces.zeros(leaf, 1, signature.device)[0]
            if isinstance(padding_type, str):
                padding = None if padding_type == "reset" else zero
            else:
                padding = torch.tensor(
                    np.asarray(spaces.at(padding_type, path), leaf.dtype), device=zero.device
                )
            self.history_of[path] = _Frames(zero, padding, size, signature.num_envs)
        self.histories = nn.ModuleList(self.history_of.values())

    def _shown(self, frames: Tensor) -> Tensor:
        """The new value of a leaf, from its frames `(num_envs, size, *shape)`."""
        return frames

    def _next(self, value: Value) -> Value:
        return spaces.apply(
            lambda path, frame: self._shown(self.history_of[path].step(frame)), value
        )

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", self._next(td["observation"]))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        shown = spaces.apply(
            lambda path, first: self._shown(self.history_of[path].reset(first, mask)),
            td["observation"],
        )
        return td.set("observation", shown)


def _padding(owner: str, padding_type: Any, *names: str) -> Any:
    if isinstance(padding_type, str | bytes) and padding_type not in names:
        needed = ", ".join(f'"{name}"' for name in names)
        raise ValueError(
            f"{owner} needs padding_type={needed} or a member of the space, but got {padding_type!r}."
        )
    return copy.deepcopy(padding_type)


class FrameStackObservation(_History):
    """Stacks the latest observations of an episode, oldest first. A stack never mixes episodes.

    Args:
        stack_size: number of observations in the stack.
        padding_type: fills the stack at the start of an episode: "reset" repeats the initial observation, "zero" takes the
            element of the space nearest to zero, and an observation of the space takes that one.
        axis: None stacks along a new first axis. A number joins the observations along that axis of a Box, such as -1 for
            the channels of `(height, width, channels)`, as Stable-Baselines3's `VecFrameStack` does.

    Shape: `(num_envs, *shape)` to `(num_envs, stack_size, *shape)`, or with `axis` to `shape` with `stack_size` times as many
    elements along it; each leaf of a `Dict` or `Tuple` by itself.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), FrameStackObservation(3))
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"].flatten()
    tensor([0., 0., 1.])
    """

    def __init__(
        self, stack_size: int, *, padding_type: str | Any = "reset", axis: int | None = None
    ) -> None:
        super().__init__()
        self.stack_size = validation.integer(
            "FrameStackObservation", "stack_size", stack_size, at_least=1
        )
        self.padding_type = _padding("FrameStackObservation", padding_type, "reset", "zero")
        self.axis = axis

    def setup(self, signature: Signature) -> Signature:
        space = signature.single_observation_space
        self._make_histories(space, signature, self.stack_size, self.padding_type)
        above = (
            batch_space(space, self.stack_size)
            if self.axis is None
            else spaces.map_leaves(self._joined, space)
        )
        return signature.replace(single_observation_space=above)

    def _joined(self, leaf: Space[Any]) -> Space[Any]:
        if not isinstance(leaf, gymnasium.spaces.Box) or self.axis not in range(
            -len(leaf.shape), len(leaf.shape)
        ):
            raise ValueError(
                f"FrameStackObservation needs a Box with the axis {self.axis!r}, but got {leaf}."
            )
        low, high = (
            np.concatenate([bound] * self.stack_size, self.axis) for bound in (leaf.low, leaf.high)
        )
        return gymnasium.spaces.Box(low, high, dtype=leaf.dtype.type)

    def _shown(self, frames: Tensor) -> Tensor:
        if self.axis is None:
            return frames
        return torch.cat(
            frames.unbind(1), self.axis + (self.axis >= 0)
        )  # the first dimension is the batch of envs


class _Delay(_History):
    """Base for delays: a number of steps for every episode, for each env, or drawn for each episode."""

    delays = EnvBuffer(row=lambda self: torch.tensor(self.shortest))
    paddings: tuple[str, ...] = ("reset", "zero")

    def __init__(
        self, delay: int | tuple[int, int] | Tensor, *, padding_type: str | Any = "zero"
    ) -> None:
        super().__init__()
        owner, bounds = (
            type(self).__name__,
            delay if isinstance(delay, tuple | list) else (delay, delay),
        )
        if isinstance(delay, Tensor):
            if delay.dim() != 1 or delay.dtype != torch.int64:
                got = validation.described(delay)
                raise ValueError(
                    f"{owner} needs a delay of shape (num_envs,) torch.int64, but got {got}."
                )
            bounds = int(delay.min()), int(delay.max())
        if len(bounds) != 2:
            raise ValueError(
                f"{owner} needs delay as a number, a pair, or a tensor (num_envs,), but got {bounds!r}."
            )
        self.shortest = validation.integer(owner, "delay", bounds[0], at_least=0)
        self.longest = validation.integer(owner, "delay", bounds[1], at_least=self.shortest)
        self.delay, self.padding_type = delay, _padding(owner, padding_type, *self.paddings)

    def _set_up(self, space: Space[Any], signature: Signature) -> Signature:
        self._make_histories(space, signature, self.longest + 1, self.padding_type)
        self.allocate(signature.num_envs, signature.device)
        self.is_drawn = self.longest > self.shortest and not isinstance(self.delay, Tensor)
        if self.is_drawn:
            self.stream, signature = signature.stream()
        if isinstance(self.delay, Tensor):
            if len(self.delay) != signature.num_envs:
                needed = f"a delay for each of {signature.num_envs} envs"
                raise ValueError(
                    f"{type(self).__name__} needs {needed}, but got {len(self.delay)}."
                )
            self.delays.copy_(self.delay)
        return signature

    def deployed(self) -> Transform:
        if isinstance(self.delay, Tensor) and len(self.delay) != len(self.delays):
            raise ValueError("its delay depends on the env")
        return self

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        if self.is_drawn:
            mask.assign_(
                self.delays, random.integers(self.stream.key(), self.shortest, self.longest + 1)
            )
        return td

    def _shown(self, frames: Tensor) -> Tensor:
        index = (self.longest - self.delays).view(-1, *(1,) * (frames.dim() - 1))
        return frames.take_along_dim(index, 1).squeeze(1)


class DelayObservation(_Delay):
    """Delays observations by a number of steps.

    Args:
        delay: the number of steps; a pair (shortest, longest), from which each episode draws; or an int64 tensor
            `(num_envs,)` with a number for each env.
        padding_type: what the first `delay` observations of an episode are: "zero" is the element of the space nearest to
            zero, "reset" the initial observation, and an observation of the space that one.

    Shape: any space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), DelayObservation(2))
    >>> td = env.reset()
    >>> for _ in range(3):  # observations 1, 2 and 3, after an initial 0
    ...     _, td = env.step(td.set("action", env.sample_action()))
    >>> td["observation"]
    tensor([[1.]])
    """

    def setup(self, signature: Signature) -> Signature:
        return self._set_up(signature.single_observation_space, signature)

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return _History.reset(self, super().reset(td, mask), mask)


class DelayAction(_Delay):
    """Delays actions by a number of steps, as actuators and networks do.

    Args:
        delay: as of `DelayObservation`.
        padding_type: what the env gets in the first `delay` steps of an episode: "zero" is the action of the space nearest to
            zero, and an action of the space that one.

    Shape: any action space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=gymnasium.spaces.Discrete(9)), DelayAction(1))
    >>> td = env.reset()
    >>> for action in (5, 6):
    ...     transition, td = env.step(td.set("action", torch.tensor([action])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([5])
    """

    paddings = ("zero",)

    def setup(self, signature: Signature) -> Signature:
        return self._set_up(signature.single_action_space, signature)

    def action(self, action: Value) -> Value:
        return self._next(action)

    def step(self, td: TensorDict) -> TensorDict:
        return td

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        for history in self.history_of.values():
            history.clear(mask)
        return super().reset(td, mask)
