"""Transforms that remember earlier observations of the running episode."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor

import torchwrap.spaces as tensors
from torchwrap.spaces import Signature
from torchwrap.transforms.base import Transform


class FrameStackObservation(Transform):
    """Stacks the latest observations of an episode, oldest first.

    Args:
        stack_size: how many.
        padding_type: what stands before an episode's first observation: "reset" (that observation), "zero", or an
            observation of the space.

    Shape: `(num_envs, *shape)` to `(num_envs, stack_size, *shape)`; a final observation stays in its own episode's stack.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(1,)), FrameStackObservation(3))
    >>> td = env.reset()
    >>> env.step(td.set("action", env.sample_action()))[1]["observation"].flatten()
    tensor([0., 0., 1.])
    """

    frames: Tensor
    padding: Tensor

    def __init__(self, stack_size: int, *, padding_type: str | Any = "reset") -> None:
        super().__init__()
        if isinstance(stack_size, bool) or not isinstance(stack_size, int) or stack_size < 1:
            raise ValueError(f"FrameStackObservation needs a stack_size of at least 1, but got {stack_size!r}.")
        if isinstance(padding_type, str) and padding_type not in ("reset", "zero"):
            raise ValueError(
                f'FrameStackObservation needs padding_type "reset", "zero" or an observation, but got {padding_type!r}.'
            )
        self.stack_size = stack_size
        self.padding_type = padding_type

    def setup(self, signature: Signature) -> Signature:
        space = signature.single_observation_space
        if tensors.children(space) is not None:
            raise TypeError(f"FrameStackObservation needs observations of one tensor, but got {space}.")
        padding = tensors.zeros(space, 1, signature.device)[0]
        if not isinstance(self.padding_type, str):
            if not space.contains(self.padding_type):
                raise ValueError(f"FrameStackObservation needs a padding_type in {space}, but got {self.padding_type!r}.")
            padding = torch.as_tensor(self.padding_type, dtype=padding.dtype, device=signature.device)
        frames = padding.expand(signature.num_envs, self.stack_size, *padding.shape).clone()
        self.register_buffer("padding", padding, persistent=False)
        self.register_buffer("frames", frames, persistent=False)
        return signature.replace(single_observation_space=batch_space(space, self.stack_size))

    def step(self, td: TensorDict) -> TensorDict:
        stacked = torch.cat([self.frames[:, 1:], td["observation"].unsqueeze(1)], 1)
        self.frames.copy_(stacked)
        return td.set("observation", stacked)

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        observation = td["observation"].unsqueeze(1)
        padding = observation if isinstance(self.padding_type, str) and self.padding_type == "reset" else self.padding
        first = torch.cat([padding.expand_as(self.frames)[:, 1:], observation], 1)
        self.frames.copy_(tensors.where(mask, first, self.frames))
        return td.set("observation", first)
