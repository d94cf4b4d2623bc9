"""Running mean and variance, and normalization by them: learned in train(), frozen in eval()."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer
from torchwrap._core.rows import RowMask, materialize
from torchwrap.spaces import Path, Signature, Value
from torchwrap.statistics import RunningMeanStd
from torchwrap.transforms.transform import ObservationTransform, Transform


class NormalizeObservation(ObservationTransform):
    """Shifts and scales each component of the observation to mean 0 and variance 1 over all observations seen.

    The formula is Gymnasium's: (observation - mean) / sqrt(var + epsilon). Every real observation counts exactly once, final
    and initial ones included; NaN and infinity pass, but do not count. All envs share the statistics, which are the
    transform's `state_dict`: a `RunningMeanStd`, `statistics`; for a `Dict`, `statistics_of[("key",)]` belongs to one entry.

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
        self.statistics_of = {
            path: _statistics(leaf, signature.device, path) for path, leaf in spaces.leaves(below)
        }
        each = list(self.statistics_of.values())
        self.statistics = nn.ModuleList(each) if spaces.children(below) is not None else each[0]
        above = spaces.map_leaves(
            lambda leaf: gymnasium.spaces.Box(-np.inf, np.inf, leaf.shape, np.float32), below
        )
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Value) -> Value:
        return spaces.apply(
            lambda path, leaf: self.statistics_of[path].normalize(leaf, self.epsilon), observation
        )

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", spaces.apply(self._learn, td["observation"]))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        def learn(path: Path, leaf: Tensor) -> Tensor:
            return mask.apply(lambda rows: self._learn(path, rows, mask.gathered), leaf)

        return td.set("observation", spaces.apply(learn, td["observation"]))

    def _learn(self, path: Path, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        statistics, rows = self.statistics_of[path], materialize(rows)
        if self.training:
            statistics.update(rows, mask)
        return statistics.normalize(rows, self.epsilon)

    def deployed(self) -> Transform:
        return _FrozenNormalization(
            {path: each.frozen(self.epsilon) for path, each in self.statistics_of.items()}
        )


class _FrozenNormalization(ObservationTransform):
    """Normalization by constants in the dtype of the reference: a float32 observation needs no float64."""

    def __init__(self, constants_of: dict[Path, Tensor]) -> None:
        super().__init__()
        self.name_of = {path: f"constants_{number}" for number, path in enumerate(constants_of)}
        for path, name in self.name_of.items():
            self.register_buffer(name, constants_of[path])

    def observation(self, observation: Value) -> Value:
        return spaces.apply(self._normalize, observation)

    def _normalize(self, path: Path, rows: Tensor) -> Tensor:
        # Rounded as `RunningMeanStd.normalize` rounds. The mean is much smaller than the reference, so they are not added up.
        reference, mean, scale = self.get_buffer(self.name_of[path]).unbind()
        return (rows - reference).sub_(mean).mul_(scale).float()


def _statistics(leaf: gymnasium.Space[Any], device: torch.device, path: Path) -> RunningMeanStd:
    box = spaces.box("NormalizeObservation", "observation", leaf, "numbers", path)
    wide = box.dtype in (np.float64, np.int32, np.int64)
    return RunningMeanStd(box.shape or (1,), device, torch.float64 if wide else torch.float32)


class NormalizeReward(Transform):
    """Divides rewards by the standard deviation of the discounted return. The mean is not subtracted.

    At each step, return = gamma * return + reward; the statistics are updated with it; the reward becomes
    reward / sqrt(var + epsilon); and where the episode ended, return = 0, as in Stable-Baselines3's `VecNormalize`. The first
    rewards can be large, because there are few returns yet: put `ClipReward` above. After a reward that is not finite, the
    return of that env is not finite until its episode ends, and does not count.

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

    def __init__(self, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.gamma = validation.number("NormalizeReward", "gamma", gamma, 0, 1)
        self.epsilon = validation.positive("NormalizeReward", "epsilon", epsilon)

    def deployed(self) -> None:
        return None

    def setup(self, signature: Signature) -> Signature:
        self.statistics = RunningMeanStd((1,), signature.device, torch.float64)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        returns = self.discounted_return
        returns.mul_(self.gamma).add_(td["reward"])
        if self.training:
            self.statistics.update(returns)
        return td.set("reward", td["reward"] * self.statistics.scale(self.epsilon))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        mask.fill_(self.discounted_return, 0)
        return td
