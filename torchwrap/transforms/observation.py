"""Transforms of one observation at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from torchwrap import arguments, spaces
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
        if observation_space is not None and not isinstance(observation_space, Space):
            raise TypeError(
                f"TransformObservation needs a gymnasium Space as observation_space, but got {observation_space!r}."
            )
        self.observation_space = observation_space

    def setup(self, signature: Signature) -> Signature:
        space = self.observation_space
        if space is None:
            space = signature.single_observation_space
        zeros = spaces.zeros(signature.single_observation_space, signature.num_envs, signature.device)
        given = self.func(zeros)
        spaces.check("TransformObservation", "func to give observations", space, given, signature.num_envs, signature.device)
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
        self.min_obs = self.low = arguments.number("ClipObservation", "min_obs", min_obs)
        self.max_obs = self.high = arguments.number("ClipObservation", "max_obs", max_obs, low=self.min_obs)

    def setup(self, signature: Signature) -> Signature:
        space = signature.single_observation_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise TypeError(f"ClipObservation needs a Box observation space, but got {space}.")
        if np.issubdtype(space.dtype, np.integer):
            limits = np.iinfo(space.dtype)
            self.low = math.ceil(max(self.min_obs, limits.min))
            self.high = math.floor(min(self.max_obs, limits.max))
            if self.low > self.high:
                raise ValueError(f"ClipObservation needs bounds with a value of {space.dtype} between, but got {self!r}.")
        else:
            # Bounds beyond the dtype are none.
            largest = float(np.finfo(space.dtype).max)
            self.low, self.high = (
                bound if abs(bound) <= largest else math.copysign(math.inf, bound) for bound in (self.min_obs, self.max_obs)
            )
        low, high = (np.clip(bound, self.low, self.high).astype(space.dtype) for bound in (space.low, space.high))
        return signature.replace(single_observation_space=gymnasium.spaces.Box(low, high, space.shape, space.dtype))

    def observation(self, observation: Tensor) -> Tensor:
        return observation.clamp(self.low, self.high)


class FlattenObservation(ObservationTransform):
    """Makes a vector of an observation: `Discrete` becomes one-hot, the parts of `Dict` and `Tuple` follow each other.

    Shape: any space to `(num_envs, gymnasium.spaces.flatdim(space))`, laid out as `gymnasium.spaces.flatten` does.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, observation_space=gymnasium.spaces.Discrete(3)), FlattenObservation())
    >>> env.reset()["observation"]
    tensor([[1, 0, 0],
            [0, 1, 0]])
    """

    space: Space[Any]
    dtype: torch.dtype

    def setup(self, signature: Signature) -> Signature:
        self.space = signature.single_observation_space
        flat = gymnasium.spaces.utils.flatten_space(self.space)
        self.dtype = spaces.dtype(flat)
        return signature.replace(single_observation_space=flat)

    def observation(self, observation: Value) -> Tensor:
        return spaces.flatten(self.space, observation, self.dtype)
