"""Transforms that remember earlier observations of the running episode."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor

from torchwrap import arguments, spaces
from torchwrap.buffer import Buffer
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

    earlier = Buffer()
    padding = Buffer()

    def __init__(self, stack_size: int, *, padding_type: str | Any = "reset") -> None:
        super().__init__()
        self.stack_size = arguments.integer("FrameStackObservation", "stack_size", stack_size, at_least=1)
        if isinstance(padding_type, str) and padding_type not in ("reset", "zero"):
            raise ValueError(
                f'FrameStackObservation needs padding_type "reset", "zero" or an observation, but got {padding_type!r}.'
            )
        self.padding_type = padding_type

    def setup(self, signature: Signature) -> Signature:
        space, device = signature.single_observation_space, signature.device
        if spaces.children(space) is not None:
            raise TypeError(f"FrameStackObservation needs observations of one tensor, but got {space}.")
        padding = spaces.zeros(space, 1, device)[0]
        if not isinstance(self.padding_type, str):
            if not space.contains(self.padding_type):
                raise ValueError(f"FrameStackObservation needs a padding_type in {space}, but got {self.padding_type!r}.")
            padding = torch.tensor(self.padding_type, dtype=padding.dtype, device=device)
        self.repeats_first = isinstance(self.padding_type, str) and self.padding_type == "reset"
        earlier = padding.expand(signature.num_envs, self.stack_size - 1, *padding.shape).clone()
        self.register_buffer("padding", padding, persistent=False)
        self.register_buffer("earlier", earlier, persistent=False)
        return signature.replace(single_observation_space=batch_space(space, self.stack_size))

    def step(self, td: TensorDict) -> TensorDict:
        stacked = torch.cat([self.earlier, td["observation"].unsqueeze(1)], 1)
        self.earlier.copy_(stacked[:, 1:])
        return td.set("observation", stacked)

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        first = spaces.once(td["observation"]).unsqueeze(1)
        if self.repeats_first:
            stacked = first.expand(-1, self.stack_size, *self.padding.shape).clone()
        else:
            stacked = torch.cat([self.padding.expand_as(self.earlier), first], 1)
        spaces.write(mask, stacked[:, 1:], self.earlier)
        return td.set("observation", stacked)
