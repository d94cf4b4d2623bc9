"""Transforms that keep earlier observations of the running episode."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.env_buffers import BatchedModule, ConstantBuffer, EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Path, Signature
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


class _History(Transform):
    """Base for transforms that keep a separate history of each leaf of the observation."""

    def _make_histories(self, signature: Signature, size: int, padding_type: str | Any) -> None:
        self.history_of: dict[Path, _Frames] = {}
        for path, leaf in spaces.leaves(signature.single_observation_space):
            zero = spaces.zeros(leaf, 1, signature.device)[0]
            if isinstance(padding_type, str):
                padding = None if padding_type == "reset" else zero
            else:
                padding = torch.tensor(np.asarray(spaces.at(padding_type, path), leaf.dtype), device=zero.device)
            self.history_of[path] = _Frames(zero, padding, size, signature.num_envs)
        self.histories = nn.ModuleList(self.history_of.values())

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", spaces.apply(lambda path, frame: self.history_of[path].step(frame), td["observation"]))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        initial = td["observation"]
        return td.set("observation", spaces.apply(lambda path, frame: self.history_of[path].reset(frame, mask), initial))


class FrameStackObservation(_History):
    """Stacks the latest observations of an episode, oldest first. A stack never mixes episodes.

    Args:
        stack_size: number of observations in the stack.
        padding_type: fills the stack at the start of an episode: "reset" repeats the initial observation, "zero" takes the
            element of the space nearest to zero, and an observation of the space takes that one.

    Shape: `(num_envs, *shape)` to `(num_envs, stack_size, *shape)`; each leaf of a `Dict` or `Tuple` by itself.

    Raises:
        ValueError: from `setup`, if `padding_type` is an observation outside the space.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), FrameStackObservation(3))
    >>> td = env.reset()
    >>> env.step(td.set("action", env.sample_action()))[1]["observation"].flatten()
    tensor([0., 0., 1.])
    """

    def __init__(self, stack_size: int, *, padding_type: str | Any = "reset") -> None:
        super().__init__()
        self.stack_size = validation.integer("FrameStackObservation", "stack_size", stack_size, at_least=1)
        if isinstance(padding_type, str | bytes) and padding_type not in ("reset", "zero"):
            needed = 'padding_type "reset", "zero" or an observation'
            raise ValueError(f"FrameStackObservation needs {needed}, but got {padding_type!r}.")
        self.padding_type = copy.deepcopy(padding_type)

    def setup(self, signature: Signature) -> Signature:
        space, padding_type = signature.single_observation_space, self.padding_type
        if not isinstance(padding_type, str) and not space.contains(padding_type):
            raise ValueError(f"FrameStackObservation needs a padding_type in {space}, but got {padding_type!r}.")
        self._make_histories(signature, self.stack_size, padding_type)
        return signature.replace(single_observation_space=batch_space(space, self.stack_size))


class DelayObservation(_History):
    """Delays observations by a number of steps.

    Args:
        delay: the number of steps. The first `delay` observations of an episode are the element of the space nearest to zero.

    Shape: any space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), DelayObservation(2))
    >>> td = env.reset()
    >>> for _ in range(3):  # observations 1, 2 and 3, after an initial 0
    ...     _, td = env.step(td.set("action", env.sample_action()))
    >>> td["observation"]
    tensor([[1.]])
    """

    def __init__(self, delay: int) -> None:
        super().__init__()
        self.delay = validation.integer("DelayObservation", "delay", delay, at_least=0)

    def setup(self, signature: Signature) -> Signature:
        self._make_histories(signature, self.delay + 1, "zero")
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        return self._oldest(super().step(td))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return self._oldest(super().reset(td, mask))

    def _oldest(self, td: TensorDict) -> TensorDict:
        return td.set("observation", spaces.apply(lambda _, frames: frames[:, 0].clone(), td["observation"]))
