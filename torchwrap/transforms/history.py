"""Transforms that remember earlier observations of the running episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import arguments, masks, spaces
from torchwrap.buffer import Buffer, Module
from torchwrap.spaces import Signature
from torchwrap.transforms.base import Transform

Path = tuple[str, ...]


class _Memory(Module):
    """What is remembered of one tensor of the observation."""

    def step(self, frame: Tensor) -> Tensor:
        raise NotImplementedError

    def reset(self, first: Tensor, mask: Tensor) -> Tensor:
        raise NotImplementedError


class _History(Transform):
    """Base for transforms that remember each tensor of an observation by itself."""

    def _remember(self, signature: Signature, make: Callable[[Path, Space[Any]], _Memory]) -> None:
        self.memory_of = {path: make(path, leaf) for path, leaf in spaces.leaves(signature.single_observation_space)}
        self.memories = nn.ModuleList(self.memory_of.values())

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", spaces.apply(lambda path, frame: self.memory_of[path].step(frame), td["observation"]))

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        first = td["observation"]
        return td.set("observation", spaces.apply(lambda path, frame: self.memory_of[path].reset(frame, mask), first))


class _Frames(_Memory):
    """The latest frames: what stands before an episode's first one is `padding`, or that one again where it is None."""

    earlier = Buffer()
    padding = Buffer()

    def __init__(self, zero: Tensor, padding: Tensor | None, stack_size: int, num_envs: int) -> None:
        super().__init__()
        self.stack_size, self.repeats_first = stack_size, padding is None
        padding = zero if padding is None else padding
        earlier = padding.expand(num_envs, stack_size - 1, *zero.shape).clone()
        self.register_buffer("padding", padding, persistent=False)
        self.register_rows("earlier", earlier)

    def step(self, frame: Tensor) -> Tensor:
        stacked = torch.cat([self.earlier, frame.unsqueeze(1)], 1)
        self.earlier.copy_(stacked[:, 1:])
        return stacked

    def reset(self, first: Tensor, mask: Tensor) -> Tensor:
        stacked = masks.only(mask, masks.once(first), self._begin)
        masks.write(mask, stacked[:, 1:], self.earlier)
        return stacked

    def _begin(self, first: Tensor) -> Tensor:
        first, shape = first.unsqueeze(1), self.padding.shape
        if self.repeats_first:
            return first.expand(-1, self.stack_size, *shape).clone()
        return torch.cat([self.padding.expand(len(first), self.stack_size - 1, *shape), first], 1)


class FrameStackObservation(_History):
    """Stacks the latest observations of an episode, oldest first.

    Args:
        stack_size: how many.
        padding_type: what stands before an episode's first observation: "reset" (that observation), "zero" (the member of the
            space nearest to it), or an observation of the space.

    Shape: `(num_envs, *shape)` to `(num_envs, stack_size, *shape)`, each tensor of a `Dict` or `Tuple` by itself. A final
    observation stays in its own episode's stack.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), FrameStackObservation(3))
    >>> td = env.reset()
    >>> env.step(td.set("action", env.sample_action()))[1]["observation"].flatten()
    tensor([0., 0., 1.])
    """

    def __init__(self, stack_size: int, *, padding_type: str | Any = "reset") -> None:
        super().__init__()
        self.stack_size = arguments.integer("FrameStackObservation", "stack_size", stack_size, at_least=1)
        if isinstance(padding_type, str | bytes) and padding_type not in ("reset", "zero"):
            raise ValueError(
                f'FrameStackObservation needs padding_type "reset", "zero" or an observation, but got {padding_type!r}.'
            )
        self.padding_type = padding_type

    def setup(self, signature: Signature) -> Signature:
        space, given = signature.single_observation_space, self.padding_type
        if not isinstance(given, str) and not space.contains(given):
            raise ValueError(f"FrameStackObservation needs a padding_type in {space}, but got {given!r}.")

        def make(path: Path, leaf: Space[Any]) -> _Frames:
            zero = spaces.zeros(leaf, 1, signature.device)[0]
            padding: Tensor | None = zero
            if not isinstance(given, str):
                part = given
                for key in path:
                    part = part[int(key)] if isinstance(part, tuple | list) else part[key]
                padding = torch.tensor(np.asarray(part, leaf.dtype), device=zero.device)
            elif given == "reset":
                padding = None
            return _Frames(zero, padding, self.stack_size, signature.num_envs)

        self._remember(signature, make)
        return signature.replace(single_observation_space=batch_space(space, self.stack_size))


class _Queue(_Memory):
    """Frames on their way: each comes out `delay` steps after it went in, and until then `zero` does."""

    zero = Buffer()
    frames = Buffer()
    place = Buffer()

    def __init__(self, zero: Tensor, delay: int, num_envs: int) -> None:
        super().__init__()
        self.register_buffer("zero", zero, persistent=False)
        self.register_rows("frames", zero.expand(num_envs, delay + 1, *zero.shape).clone())
        # Where the next one goes in, for all envs: a ring, in which the one behind it comes out.
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64, device=zero.device), persistent=False)

    def step(self, frame: Tensor) -> Tensor:
        self.frames.index_copy_(1, self.place, frame.unsqueeze(1))
        self.place.add_(1).remainder_(self.frames.shape[1])
        return self.frames.index_select(1, self.place).squeeze(1)

    def reset(self, first: Tensor, mask: Tensor) -> Tensor:
        # As if it had gone in at this step, behind zeros.
        latest = (self.place - 1) % self.frames.shape[1]
        frames = self.zero.expand_as(self.frames).index_copy(1, latest, first.unsqueeze(1))
        masks.write(mask, frames, self.frames)
        return frames.index_select(1, self.place).squeeze(1)


class DelayObservation(_History):
    """Hands out each observation some steps late.

    Args:
        delay: how many; an episode's first `delay` observations are the member of the space nearest to zero.

    Shape: any, and unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), DelayObservation(2))
    >>> td = env.reset()
    >>> for _ in range(3):  # that gives 1, 2 and 3
    ...     _, td = env.step(td.set("action", env.sample_action()))
    >>> td["observation"]
    tensor([[1.]])
    """

    def __init__(self, delay: int) -> None:
        super().__init__()
        self.delay = arguments.integer("DelayObservation", "delay", delay, at_least=0)

    def setup(self, signature: Signature) -> Signature:
        def make(_: Path, leaf: Space[Any]) -> _Queue:
            return _Queue(spaces.zeros(leaf, 1, signature.device)[0], self.delay, signature.num_envs)

        self._remember(signature, make)
        return signature
