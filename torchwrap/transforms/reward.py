"""Transforms of one reward at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchwrap import arguments, spaces
from torchwrap.spaces import Signature
from torchwrap.transforms.base import RewardTransform

_LARGEST = torch.finfo(torch.float32).max  # of rewards


class TransformReward(RewardTransform):
    """Applies a function to the batch of rewards.

    Args:
        func: takes rewards `(num_envs, 1)` float32 and gives new ones.

    >>> import torch; from tensordict import TensorDict
    >>> TransformReward(lambda reward: 2 * reward)(TensorDict({"reward": torch.ones(1, 1)}, [1]))["reward"]
    tensor([[2.]])
    """

    def __init__(self, func: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        if not callable(func):
            raise TypeError(f"TransformReward needs a callable func, but got {func!r}.")
        self.func = func

    def setup(self, signature: Signature) -> Signature:
        spaces.check_function("TransformReward", "rewards", self.func, spaces.REWARD, spaces.REWARD, signature)
        return signature

    def reward(self, reward: Tensor) -> Tensor:
        return self.func(reward)


class ClipReward(RewardTransform):
    """Clips the reward.

    Args:
        min_reward: lower bound; none where None.
        max_reward: upper bound; none where None.

    >>> import torch; from tensordict import TensorDict
    >>> ClipReward(max_reward=1)(TensorDict({"reward": torch.tensor([[-5.0], [5.0]])}, [2]))["reward"].flatten()
    tensor([-5.,  1.])
    """

    def __init__(self, min_reward: float | None = None, max_reward: float | None = None) -> None:
        super().__init__()
        if min_reward is None and max_reward is None:
            raise ValueError("ClipReward needs min_reward, max_reward or both, but got neither.")
        lowest = -_LARGEST
        if min_reward is not None:
            min_reward = arguments.number("ClipReward", "min_reward", min_reward, high=_LARGEST)
            lowest = max(lowest, min_reward)
        if max_reward is not None:
            max_reward = arguments.number("ClipReward", "max_reward", max_reward, low=lowest)
        self.min_reward = min_reward
        self.max_reward = max_reward
        self.low, self.high = (
            limit if limit is None else spaces.bound(limit, torch.float32) for limit in (min_reward, max_reward)
        )

    def reward(self, reward: Tensor) -> Tensor:
        return reward.clamp(self.low, self.high)


class ScaleReward(RewardTransform):
    """Multiplies the reward.

    Args:
        scale: by what.

    >>> import torch; from tensordict import TensorDict
    >>> ScaleReward(0.5)(TensorDict({"reward": torch.tensor([[-5.0], [5.0]])}, [2]))["reward"].flatten()
    tensor([-2.5000,  2.5000])
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = arguments.number("ScaleReward", "scale", scale, -_LARGEST, _LARGEST)

    def reward(self, reward: Tensor) -> Tensor:
        return reward * self.scale
