"""Normalization by running statistics, which are learned in train() and frozen in eval()."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.env_buffers import EnvBuffer, SubmoduleAttribute
from torchwrap._core.row_mask import RowMask
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.statistics import FrozenMeanStd, RunningMeanStd
from torchwrap.transforms.transform import ObservationTransform, Transform


class NormalizeObservation(ObservationTransform):
    """Shifts and scales each component of the observation to mean 0 and variance 1 over all observations seen.

    The formula is Gymnasium's: (observation - mean) / sqrt(var + epsilon). Every real observation counts exactly once:
    successors, final observations included, and initial observations; NaN and infinity pass, but do not count. All envs share
    the statistics, which are the transform's `state_dict`.

    Args:
        epsilon: added to the variance.

    Shape: a Box of any shape and dtype to Box(-inf, inf) float32 of the same shape; each Box of a `Dict` or `Tuple` by itself.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, observation_shape=(1,)), NormalizeObservation())
    >>> env.reset()["observation"]  # of 0 and 1000
    tensor([[-1.],
            [ 1.]])
    """

    def __init__(self, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.epsilon = validation.positive("NormalizeObservation", "epsilon", epsilon)

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        boxes = {path: spaces.box("NormalizeObservation", "observation", box, "numbers") for path, box in spaces.leaves(below)}
        self.statistics_of = {path: _statistics(box, signature.device) for path, box in boxes.items()}
        each = list(self.statistics_of.values())
        self.statistics = nn.ModuleList(each) if spaces.children(below) is not None else each[0]
        return signature.replace(single_observation_space=_unbounded(below))

    def observation(self, observation: Value) -> Value:
        return self._normalize(observation, learn=False)

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", self._normalize(td["observation"], self.training))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return td.set("observation", self._normalize(td["observation"], self.training, mask))

    def _normalize(self, observation: Value, learn: bool, mask: RowMask | None = None) -> Value:
        def normalize(path: tuple[str, ...], leaf: Tensor) -> Tensor:
            statistics = self.statistics_of[path]
            if mask is None:
                return statistics.normalize(leaf, self.epsilon, learn=learn)
            return mask.apply(lambda rows: statistics.normalize(rows, self.epsilon, mask.gathered, learn), leaf)

        return spaces.apply(normalize, observation)

    def _frozen(self) -> Transform:
        return _FrozenNormalization({path: each.frozen(self.epsilon) for path, each in self.statistics_of.items()})


class _FrozenNormalization(ObservationTransform):
    def __init__(self, frozen_of: dict[tuple[str, ...], FrozenMeanStd]) -> None:
        super().__init__()
        self.frozen_of = frozen_of
        self.statistics = nn.ModuleList(frozen_of.values())

    def observation(self, observation: Value) -> Value:
        return spaces.apply(lambda path, leaf: self.frozen_of[path](leaf), observation)


def _statistics(box: gymnasium.spaces.Box, device: torch.device) -> RunningMeanStd:
    wide = box.dtype in (np.float64, np.int32, np.int64)
    return RunningMeanStd(box.shape or (1,), device, torch.float64 if wide else torch.float32)


def _unbounded(space: Space[Any]) -> Space[Any]:
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({key: _unbounded(part) for key, part in space.spaces.items()})
    if isinstance(space, gymnasium.spaces.Tuple):
        return gymnasium.spaces.Tuple([_unbounded(part) for part in space.spaces])
    return gymnasium.spaces.Box(-np.inf, np.inf, space.shape, np.float32)


class NormalizeReward(Transform):
    """Divides rewards by the standard deviation of the discounted return. The mean is not subtracted.

    At each step, return = gamma * return + reward; the statistics are updated with it; the reward becomes
    reward / sqrt(var + epsilon); and where the episode ended, return = 0. This is the order of Stable-Baselines3's
    `VecNormalize`; in Gymnasium the last reward leaks into the next episode. The first rewards can be large, because there are
    few returns yet: put `ClipReward` above. After a reward that is not finite, the return of that env is not finite until its
    episode ends, and does not count.

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

    discounted_return = EnvBuffer((1,), torch.float64)
    statistics = SubmoduleAttribute()

    def __init__(self, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.gamma = validation.number("NormalizeReward", "gamma", gamma, 0, 1)
        self.epsilon = validation.positive("NormalizeReward", "epsilon", epsilon)

    def setup(self, signature: Signature) -> Signature:
        self.statistics = RunningMeanStd((1,), signature.device, torch.float64)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        reward, returns = td["reward"], self.discounted_return
        torch.add(reward, returns, alpha=self.gamma, out=returns)
        scale = self.statistics.scale(self.epsilon, returns if self.training else None)
        return td.set("reward", reward * scale)

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        mask.fill_(self.discounted_return, 0)
        return td
