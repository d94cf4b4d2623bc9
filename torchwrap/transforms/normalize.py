"""Normalisation by running statistics, which are learned in train() and frozen in eval()."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap.spaces import Signature
from torchwrap.transforms.base import ObservationTransform, Transform


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen, merged batch by batch (Chan, Golub and LeVeque, 1979).

    The large sums are of differences from the running mean, in float32; what is kept is float64 and an int64 count. There
    is no first sample that nobody saw: before the first update the mean is 0 and the variance 1, with a count of 0.

    Args:
        shape: of one row; at least one dimension.
        device: where the statistics live.

    >>> statistics = RunningMeanStd((1,))
    >>> statistics.update(torch.tensor([[1.0], [3.0]]))
    >>> statistics.mean, statistics.var, statistics.count
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64), tensor([2]))
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        super().__init__()
        # Never 0-dim: torch 2.13 loses in-place updates of a 0-dim float64 CPU buffer under torch.compile.
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64, device=device))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64, device=device))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64, device=device))

    def update(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Counts `rows` `(n, *shape)`, or those where `mask` (bool, `(n,)`) is set, each exactly once."""
        shift = self.mean.to(torch.float32)
        rows = rows - shift
        number: Tensor | int
        if mask is None:
            number = len(rows)
            var, mean = torch.var_mean(rows, 0, correction=0)
        else:
            weight = mask.view(-1, *(1,) * (rows.dim() - 1))
            number = mask.sum()
            mean = torch.where(weight, rows, 0).sum(0) / number.clamp(min=1)
            var = torch.where(weight, rows - mean, 0).square().sum(0) / number.clamp(min=1)
        self.count.add_(number)
        share = number / self.count.clamp(min=1).to(torch.float64)
        delta = (mean.to(torch.float64) + shift) - self.mean
        self.mean.add_(delta * share)
        self.var.lerp_(var + delta * delta * (1 - share), share)

    def scale(self, epsilon: float) -> Tensor:
        """1 / sqrt(var + epsilon), float64."""
        return (self.var + epsilon).rsqrt()

    def normalize(self, rows: Tensor, epsilon: float) -> Tensor:
        """(rows - mean) / sqrt(var + epsilon), float32."""
        # float32 cannot hold a mean that is large beside the deviation: what its rounding leaves is added after scaling.
        shift, scale = self.mean.to(torch.float32), self.scale(epsilon)
        rest = (shift - self.mean) * scale
        return torch.addcmul(rest.to(torch.float32), (rows - shift).to(torch.float32), scale.to(torch.float32))


def _check_epsilon(name: str, epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"{name} needs an epsilon above 0, but got {epsilon}.")


class NormalizeObservation(ObservationTransform):
    """Shifts and scales each component of the observation to mean 0 and variance 1 over everything seen.

    (observation - mean) / sqrt(var + epsilon), Gymnasium's formula. Every real observation counts exactly once: successors,
    final ones among them, and first observations. All envs share the statistics, which are the transform's `state_dict`.

    Args:
        epsilon: added to the variance.

    Shape: a Box of any shape and dtype to Box(-inf, inf) float32 of the same shape.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, observation_shape=(1,)), NormalizeObservation())
    >>> env.reset()["observation"]  # of 0 and 1000
    tensor([[-1.],
            [ 1.]])
    """

    def __init__(self, epsilon: float = 1e-8) -> None:
        super().__init__()
        _check_epsilon("NormalizeObservation", epsilon)
        self.epsilon = epsilon

    def setup(self, signature: Signature) -> Signature:
        space = signature.single_observation_space
        if not isinstance(space, spaces.Box):
            raise TypeError(f"NormalizeObservation needs a Box observation space, but got {space}.")
        self.statistics = RunningMeanStd(space.shape or (1,), signature.device)
        unbounded: spaces.Box = spaces.Box(-np.inf, np.inf, space.shape, np.float32)
        return signature.replace(single_observation_space=unbounded)

    def observation(self, observation: Tensor) -> Tensor:
        return self.statistics.normalize(observation, self.epsilon)

    def step(self, td: TensorDict) -> TensorDict:
        if self.training:
            self.statistics.update(td["observation"])
        return super().step(td)

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        if self.training:
            self.statistics.update(td["observation"], mask)
        return super().reset(td, mask)


class NormalizeReward(Transform):
    """Scales rewards by the standard deviation of the discounted return; their mean stays.

    return = return * gamma + reward; update the statistics with it; reward / sqrt(var + epsilon); and where the episode
    ended, return = 0. That is the order of Stable-Baselines3's `VecNormalize`; Gymnasium lets the last reward leak into the
    next episode. Early rewards can come out large, for there are few returns yet: put `ClipReward` above.

    Args:
        gamma: discount of the return.
        epsilon: added to the variance.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, episode_lengths=2), NormalizeReward(gamma=0.5))
    >>> td = env.reset()
    >>> for _ in range(2):
    ...     transition, td = env.step(td.set("action", env.sample_action()))
    >>> transition["next", "reward"]  # rewards 1 and 2, returns 1 and 2.5: a standard deviation of 0.75
    tensor([[2.6667],
            [2.6667]])
    """

    discounted_return: Tensor

    def __init__(self, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__()
        if not 0 <= gamma <= 1:
            raise ValueError(f"NormalizeReward needs a gamma in [0, 1], but got {gamma}.")
        _check_epsilon("NormalizeReward", epsilon)
        self.gamma = gamma
        self.epsilon = epsilon

    def setup(self, signature: Signature) -> Signature:
        self.statistics = RunningMeanStd((1,), signature.device)
        discounted = torch.zeros(signature.num_envs, 1, device=signature.device)
        self.register_buffer("discounted_return", discounted, persistent=False)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        reward = td["reward"]
        self.discounted_return.mul_(self.gamma).add_(reward)
        if self.training:
            self.statistics.update(self.discounted_return)
        return td.set("reward", reward * self.statistics.scale(self.epsilon).to(torch.float32))

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        self.discounted_return.masked_fill_(mask.unsqueeze(-1), 0)
        return td
