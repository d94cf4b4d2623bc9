"""Signature: the description of an env that a transform sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import Space

from torchwrap._core import validation
from torchwrap._core.env_buffers import EnvBuffer
from torchwrap.random import Stream
from torchwrap.spaces.values import dtype, leaves


@dataclasses.dataclass(frozen=True)
class Signature:
    """Describes a batch of envs: what a transform gets from the layer below, and returns for the layer above.

    Args:
        num_envs: at least 1.
        single_observation_space, single_action_space: of a single env.
        device: of all tensors.
        max_episode_steps: the length at which episodes are truncated. None if there is no limit.
        first_index: global index of the first env, for a shard of a larger run.
        num_streams: number of random streams in use so far: the env's own, that of `sample_action`, and those of transforms.
        policy_state: what a recurrent policy carries from step to step, by name.

    Raises:
        TypeError, ValueError: for an invalid number, or a space that tensors cannot represent.

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

    def stream(self) -> tuple[Stream, Signature]:
        """Returns a new random stream for a transform, independent of the env's other ones, and a signature that counts it."""
        stream = Stream(self.num_envs, self.first_index, self.num_streams, self.device)
        return stream, self.replace(num_streams=self.num_streams + 1)
