"""Transforms of one observation at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from torch import Tensor

import torchwrap.spaces as tensors
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.base import ObservationTransform


class TransformObservation(ObservationTransform):
    """Applies a function to the batch of observations.

    Args:
        func: takes observations `(num_envs, *shape)` (a TensorDict for `Dict` and `Tuple` spaces) and gives new ones.
        observation_space: what one env's observation becomes; as before where None.

    >>> import torch; from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, observation_shape=(2,)), TransformObservation(lambda obs: obs / 2))
    >>> env.reset()["observation"]
    tensor([[0., 5.]])
    """

    def __init__(self, func: Callable[[Value], Value], observation_space: Space[Any] | None = None) -> None:
        super().__init__()
        if not callable(func):
            raise TypeError(f"TransformObservation needs a callable func, but got {func!r}.")
        self.func = func
        self.observation_space = observation_space

    def setup(self, signature: Signature) -> Signature:
        space = self.observation_space or signature.single_observation_space
        zeros = tensors.zeros(signature.single_observation_space, signature.num_envs, signature.device)
        given = self.func(zeros)
        tensors.check("TransformObservation", "func to give", space, given, signature.num_envs, signature.device)
        return signature.replace(single_observation_space=space)

    def observation(self, observation: Value) -> Value:
        return self.func(observation)


class ClipObservation(ObservationTransform):
    """Clips every component of an observation, as Stable-Baselines3's `VecNormalize` does at 10.

    Args:
        min_obs: lower bound.
        max_obs: upper bound.

    >>> import torch; from tensordict import TensorDict
    >>> ClipObservation(-1, 1)(TensorDict({"observation": torch.tensor([-3.0, 0.5])}, [2]))["observation"]
    tensor([-1.0000,  0.5000])
    """

    def __init__(self, min_obs: float, max_obs: float) -> None:
        super().__init__()
        if not min_obs <= max_obs:
            raise ValueError(f"ClipObservation needs min_obs <= max_obs, but got {min_obs} and {max_obs}.")
        self.min_obs = min_obs
        self.max_obs = max_obs

    def setup(self, signature: Signature) -> Signature:
        space = signature.single_observation_space
        if not isinstance(space, spaces.Box):
            raise TypeError(f"ClipObservation needs a Box observation space, but got {space}.")
        bounds = np.array([self.min_obs, self.max_obs])
        if (bounds.astype(space.dtype) != bounds).any() and not np.issubdtype(space.dtype, np.floating):
            raise ValueError(
                f"ClipObservation needs bounds that {space.dtype} holds, but got {self.min_obs} and {self.max_obs}."
            )
        low, high = (np.clip(bound, *bounds).astype(space.dtype) for bound in (space.low, space.high))
        return signature.replace(single_observation_space=spaces.Box(low, high, space.shape, space.dtype))

    def observation(self, observation: Tensor) -> Tensor:
        return observation.clamp(self.min_obs, self.max_obs)


class FlattenObservation(ObservationTransform):
    """Makes a vector of an observation: `Discrete` becomes one-hot, the parts of `Dict` and `Tuple` follow each other.

    Shape: any space to `(num_envs, gymnasium.spaces.flatdim(space))`, laid out as `gymnasium.spaces.flatten` does.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, observation_space=spaces.Discrete(3)), FlattenObservation())
    >>> env.reset()["observation"]
    tensor([[1, 0, 0],
            [0, 1, 0]])
    """

    def setup(self, signature: Signature) -> Signature:
        self.space = signature.single_observation_space
        flat = spaces.flatten_space(self.space)
        self.dtype = tensors.dtype(flat)
        return signature.replace(single_observation_space=flat)

    def observation(self, observation: Value) -> Tensor:
        return tensors.flatten(self.space, observation, self.dtype)
