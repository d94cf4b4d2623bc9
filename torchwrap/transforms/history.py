"""Transforms that keep earlier observations or actions of the running episode."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import random, spaces
from torchwrap._core import validation
from torchwrap._core.buffers import BatchedModule, EnvBuffer
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Path, Signature, Value
from torchwrap.transforms.transform import Transform


class _Frames(BatchedModule):
    """The latest frames of one leaf in each env, oldest first: `(num_envs, size, *shape)`.

    Args:
        padding: one frame, which fills the buffer at the start of an episode.
        size: number of frames.
        num_envs: number of envs.
        repeats_initial: whether an initial frame fills the buffer instead.
    """

    frames = EnvBuffer(
        row=lambda self: self.padding.expand(self.size, *self.padding.shape),
    )
    padding: Tensor

    def __init__(
        self,
        padding: Tensor,
        size: int,
        num_envs: int,
        repeats_initial: bool,
    ) -> None:
        super().__init__()
        self.size = size
        self.repeats_initial = repeats_initial
        self.register_buffer("padding", padding, persistent=False)
        self.allocate(num_envs, padding.device)

    def append(self, frame: Tensor) -> Tensor:
        """Adds a frame and drops the oldest one. Returns all frames."""
        later = self.frames[:, 1:]
        frames = torch.cat([later, frame.unsqueeze(1)], 1)
        self.frames.copy_(frames)
        return frames

    def restart(
        self,
        initial: Tensor,
        mask: RowMask,
    ) -> Tensor:
        """Starts an episode with an initial frame in the rows of the mask. Returns all frames."""
        initial = mask.gather(initial).unsqueeze(1)
        padding = initial if self.repeats_initial else self.padding
        shape = (initial.shape[0], self.size - 1, *self.padding.shape)
        padding = padding.expand(shape)
        frames = torch.cat([padding, initial], 1)
        mask.scatter_(self.frames, frames)
        return mask.spread(frames)

    def clear(self, mask: RowMask) -> None:
        """Starts an episode without a frame in the rows of the mask."""
        mask.assign_(self.frames, self.padding.expand_as(self.frames))


class _History(Transform):
    """Base for transforms that keep the latest frames of each leaf of a space."""

    frames_of: dict[Path, _Frames]

    def _make_frames(
        self, space: Space[Any], signature: Signature, size: int, padding_type: str | Any
    ) -> None:
        is_member = not isinstance(padding_type, str)
        if is_member and not space.contains(padding_type):
            must = f"padding_type must be in {space}"
            raise ValueError(refusal(type(self).__name__, must, repr(padding_type)))
        self.frames_of = {}
        for path, leaf in spaces.leaves(space):
            padding = spaces.zeros(leaf, 1, signature.device)[0]
            if is_member:
                member = np.asarray(spaces.at(padding_type, path), leaf.dtype)
                padding = torch.tensor(member, device=signature.device)
            repeats_initial = not is_member and padding_type == "reset"
            frames = _Frames(padding, size, signature.num_envs, repeats_initial)
            self.frames_of[path] = frames
        self.histories = nn.ModuleList(self.frames_of.values())

    def _output(self, frames: Tensor) -> Tensor:
        """Returns the new value of a leaf, from its frames `(num_envs, size, *shape)`."""
        raise NotImplementedError

    def _append(self, value: Value) -> Value:
        return spaces.apply(
            lambda path, frame: self._output(self.frames_of[path].append(frame)), value
        )

    def _restart(
        self,
        initial: Value,
        mask: RowMask,
    ) -> Value:
        return spaces.apply(
            lambda path, frame: self._output(self.frames_of[path].restart(frame, mask)), initial
        )


def _padding_type(owner: str, padding_type: Any, *names: str) -> Any:
    if isinstance(padding_type, str | bytes) and padding_type not in names:
        must = f"padding_type must be a member of the space or {' or '.join(map(repr, names))}"
        raise ValueError(refusal(owner, must, repr(padding_type)))
    return copy.deepcopy(padding_type)


class FrameStackObservation(_History):
    """Stacks the latest observations of an episode, oldest first. A stack never mixes episodes.

    Args:
        stack_size: number of observations in the stack.
        padding_type: fills the stack at the start of an episode: "reset" repeats the initial
            observation, "zero" takes the element of the space nearest to zero, and an observation
            of the space is used itself.
        axis: None stacks along a new first axis. A number joins the observations along that axis of
            a Box, such as -1 for the channels of `(height, width, channels)`, as
            Stable-Baselines3's `VecFrameStack` does.

    Shape: `(num_envs, *shape)` to `(num_envs, stack_size, *shape)`, or with `axis` to `shape` with
    `stack_size` times as many elements along it; each leaf of a `Dict` or `Tuple` by itself.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), FrameStackObservation(3))
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"].flatten()
    tensor([0., 0., 1.])
    """

    def __init__(
        self, stack_size: int, *, padding_type: str | Any = "reset", axis: int | None = None
    ) -> None:
        super().__init__()
        owner = "FrameStackObservation"
        self.stack_size = validation.integer(owner, "stack_size", stack_size, at_least=1)
        self.padding_type = _padding_type(owner, padding_type, "reset", "zero")
        self.axis = axis

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        self._make_frames(below, signature, self.stack_size, self.padding_type)
        if self.axis is None:
            above = batch_space(below, self.stack_size)
        else:
            above = spaces.map_leaves(self._concatenate, below)
        return signature.replace(single_observation_space=above)

    def _concatenate(self, leaf: Space[Any]) -> Box:
        box = spaces.box("FrameStackObservation with an axis", "observation", leaf)
        low = np.concatenate([box.low] * self.stack_size, self.axis)
        high = np.concatenate([box.high] * self.stack_size, self.axis)
        return Box(low, high, dtype=box.dtype.type)

    def _output(self, frames: Tensor) -> Tensor:
        if self.axis is None:
            return frames
        num_dims = frames.dim() - 2
        return torch.cat(frames.unbind(1), self.axis % num_dims + 1)  # the first dimension is envs

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", self._append(td["observation"]))

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        return td.set("observation", self._restart(td["observation"], mask))


class _Delay(_History):
    """Base for delays: one for every episode, one for each env, or drawn for each episode."""

    delays = EnvBuffer(row=lambda self: torch.tensor(self.shortest))
    padding_types: tuple[str, ...] = ("reset", "zero")

    def __init__(
        self, delay: int | tuple[int, int] | Tensor, *, padding_type: str | Any = "zero"
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        bounds: Any = delay
        if isinstance(delay, Tensor):
            if delay.dim() != 1 or delay.dtype != torch.int64:
                must = "delay must be a tensor of shape (num_envs,) and dtype torch.int64"
                raise ValueError(refusal(owner, must, validation.described(delay)))
            bounds = int(delay.min()), int(delay.max())
        self.shortest, self.longest = validation.interval(owner, "delay", bounds, at_least=0)
        self.delay = delay
        self.padding_type = _padding_type(owner, padding_type, *self.padding_types)

    def _set_up(
        self,
        space: Space[Any],
        signature: Signature,
    ) -> Signature:
        self._make_frames(space, signature, self.longest + 1, self.padding_type)
        self.allocate(signature.num_envs, signature.device)
        if isinstance(self.delay, Tensor):
            if len(self.delay) != signature.num_envs:
                must = f"delay must have one number for each of {signature.num_envs} envs"
                raise ValueError(refusal(type(self).__name__, must, len(self.delay)))
            self.delays.copy_(self.delay)
        self.is_drawn = self.longest > self.shortest and not isinstance(self.delay, Tensor)
        if self.is_drawn:
            self.stream, signature = signature.stream()
        return signature

    def deployed(self) -> Transform:
        if isinstance(self.delay, Tensor) and len(self.delay) != len(self.delays):
            raise ValueError("its delay depends on the env")
        return self

    def _draw_delays(self, mask: RowMask) -> None:
        if self.is_drawn:
            delays = random.integers(self.stream.key(), self.shortest, self.longest + 1)
            mask.assign_(self.delays, delays)

    def _output(self, frames: Tensor) -> Tensor:
        index = self.longest - self.delays
        index = index.view(-1, *(1,) * (frames.dim() - 1))
        return frames.take_along_dim(index, 1).squeeze(1)


class DelayObservation(_Delay):
    """Delays observations by a number of steps.

    Args:
        delay: the number of steps; a pair (shortest, longest), from which each episode draws; or an
            int64 tensor `(num_envs,)` with a number for each env.
        padding_type: the first `delay` observations of an episode: "zero" is the element of the
            space nearest to zero, "reset" the initial observation, and an observation of the space
            is used itself.

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

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", self._append(td["observation"]))

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        self._draw_delays(mask)
        return td.set("observation", self._restart(td["observation"], mask))


class DelayAction(_Delay):
    """Delays actions by a number of steps, as actuators and networks do.

    Args:
        delay: as for `DelayObservation`.
        padding_type: the env's actions in the first `delay` steps of an episode: "zero" is the
            action of the space nearest to zero, and an action of the space is used itself.

    Shape: any action space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from gymnasium.spaces import Discrete
    >>> env = ScriptedEnv(1, action_space=Discrete(9))
    >>> env = TransformedEnv(env, DelayAction(1))
    >>> td = env.reset()
    >>> for action in (5, 6):
    ...     transition, td = env.step(td.set("action", torch.tensor([action])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([5])
    """

    padding_types = ("zero",)

    def setup(self, signature: Signature) -> Signature:
        return self._set_up(signature.single_action_space, signature)

    def action(self, action: Value) -> Value:
        return self._append(action)

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        self._draw_delays(mask)
        for frames in self.frames_of.values():
            frames.clear(mask)
        return td
