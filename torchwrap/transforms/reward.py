"""Stateless transforms of rewards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap.spaces import REWARD, Signature
from torchwrap.transforms.transform import RewardTransform

_LARGEST = torch.finfo(torch.float32).max


class TransformReward(RewardTransform):
    """Applies a function to the batch of rewards.

    Args:
        func: takes rewards and returns new ones, both `(num_envs, 1)` float32.

    Raises:
        TypeError, ValueError: from `setup`, if `func` fails on a batch of zeros or returns another
            shape or dtype.

    >>> import torch; from tensordict import TensorDict
    >>> double = TransformReward(lambda reward: 2 * reward)
    >>> double(TensorDict({"reward": torch.ones(1, 1)}, [1]))["reward"]
    tensor([[2.]])
    """

    def __init__(self, func: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.func = validation.function("TransformReward", "func", func)

    def setup(self, signature: Signature) -> Signature:
        spaces.check_function("TransformReward", "rewards", self.func, REWARD, REWARD, signature)
        return signature

    def reward(self, reward: Tensor) -> Tensor:
        return self.func(reward)


class ClipReward(RewardTransform):
    """Clips rewards.

    Args:
        min_reward, max_reward: the bounds. None disables one.

    >>> import torch; from tensordict import TensorDict
    >>> td = TensorDict({"reward": torch.tensor([[-5.0], [5.0]])}, [2])
    >>> ClipReward(max_reward=1)(td)["reward"].flatten()
    tensor([-5.,  1.])
    """

    low: float | None = None
    high: float | None = None

    def __init__(
        self,
        min_reward: float | None = None,
        max_reward: float | None = None,
    ) -> None:
        super().__init__()
        owner = "ClipReward"
        lowest = -_LARGEST
        if min_reward is None and max_reward is None:
            raise ValueError(refusal(owner, "min_reward or max_reward must be a number", "neither"))
        # Bounds that float32 cannot represent become infinite, because clamp refuses them.
        if min_reward is not None:
            min_reward = validation.number(owner, "min_reward", min_reward, high=_LARGEST)
            self.low = spaces.bound(min_reward, torch.float32)
            lowest = max(lowest, min_reward)
        if max_reward is not None:
            max_reward = validation.number(owner, "max_reward", max_reward, low=lowest)
            self.high = spaces.bound(max_reward, torch.float32)
        self.min_reward = min_reward
        self.max_reward = max_reward

    def reward(self, reward: Tensor) -> Tensor:
        return reward.clamp(self.low, self.high)


class ScaleReward(RewardTransform):
    """Multiplies rewards by a constant.

    Args:
        scale: the factor.

    >>> import torch; from tensordict import TensorDict
    >>> td = TensorDict({"reward": torch.tensor([[-5.0], [5.0]])}, [2])
    >>> ScaleReward(0.5)(td)["reward"].flatten()
    tensor([-2.5000,  2.5000])
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = validation.number("ScaleReward", "scale", scale, -_LARGEST, _LARGEST)

    def reward(self, reward: Tensor) -> Tensor:
        return reward * self.scale
