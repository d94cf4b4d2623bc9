"""Stateless transforms of rewards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import RewardTransform

_MAX_REWARD = torch.finfo(torch.float32).max


class TransformReward(RewardTransform):
    """Applies a function to the batch of rewards.

    Args:
        func: takes rewards and returns new ones, both `(num_envs, 1)` float32.

    Raises:
        TypeError, ValueError: from `setup`, if `func` fails on a batch of zeros or returns another shape or dtype.

    >>> import torch; from tensordict import TensorDict
    >>> TransformReward(lambda reward: 2 * reward)(TensorDict({"reward": torch.ones(1, 1)}, [1]))["reward"]
    tensor([[2.]])
    """

    def __init__(self, func: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.func = validation.function("TransformReward", "func", func)

    def setup(self, signature: Signature) -> Signature:
        spaces.check_function(
            "TransformReward", "rewards", self.func, spaces.REWARD, spaces.REWARD, signature
        )
        return signature

    def reward(self, reward: Tensor) -> Tensor:
        return self.func(reward)


class ClipReward(RewardTransform):
    """Clips rewards.

    Args:
        min_reward, max_reward: the bounds. None disables one.

    >>> import torch; from tensordict import TensorDict
    >>> ClipReward(max_reward=1)(TensorDict({"reward": torch.tensor([[-5.0], [5.0]])}, [2]))["reward"].flatten()
    tensor([-5.,  1.])
    """

    def __init__(self, min_reward: float | None = None, max_reward: float | None = None) -> None:
        super().__init__()
        if min_reward is None and max_reward is None:
            raise ValueError("ClipReward needs min_reward, max_reward or both, but got neither.")
        if min_reward is not None:
            min_reward = validation.number("ClipReward", "min_reward", min_reward, high=_MAX_REWARD)
        if max_reward is not None:
            lowest = -_MAX_REWARD if min_reward is None else max(-_MAX_REWARD, min_reward)
            max_reward = validation.number("ClipReward", "max_reward", max_reward, low=lowest)
        self.min_reward, self.max_reward = min_reward, max_reward
        # Bounds that float32 cannot represent become infinite, because clamp refuses them.
        self.low = None if min_reward is None else spaces.bound(min_reward, torch.float32)
        self.high = None if max_reward is None else spaces.bound(max_reward, torch.float32)

    def reward(self, reward: Tensor) -> Tensor:
        return reward.clamp(self.low, self.high)


class ScaleReward(RewardTransform):
    """Multiplies rewards by a constant.

    Args:
        scale: the factor.

    >>> import torch; from tensordict import TensorDict
    >>> ScaleReward(0.5)(TensorDict({"reward": torch.tensor([[-5.0], [5.0]])}, [2]))["reward"].flatten()
    tensor([-2.5000,  2.5000])
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = validation.number("ScaleReward", "scale", scale, -_MAX_REWARD, _MAX_REWARD)

    def reward(self, reward: Tensor) -> Tensor:
        return reward * self.scale
