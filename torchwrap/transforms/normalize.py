"""Normalization by a running mean and variance: learned in train(), frozen in eval()."""

from __future__ import annotations

import functools

import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Path, Signature, Value
from torchwrap.statistics import RunningMeanStd, differences_from
from torchwrap.transforms.transform import ObservationTransform, RewardTransform, Transform


class NormalizeObservation(ObservationTransform):
    """Shifts and scales each component to mean 0 and variance 1 over all observations seen.

    The formula is Gymnasium's: (observation - mean) / sqrt(var + epsilon). Every real observation
    counts exactly once, final and initial ones included; NaN and infinity pass, but do not count.
    All envs share the statistics, and `state_dict` holds them. `statistics` is a `RunningMeanStd`.
    For a `Dict`, `statistics_of[("key",)]` is the `RunningMeanStd` of one entry.

    Args:
        epsilon: added to the variance.

    Shape: a Box of any shape and dtype to Box(-inf, inf) float32 of the same shape; each Box of a
    `Dict` or `Tuple` by itself.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, observation_shape=(1,)), NormalizeObservation())
    >>> env.reset()["observation"]  # raw: 0 and 1000
    tensor([[-1.],
            [ 1.]])
    """

    statistics_of: dict[Path, RunningMeanStd]

    def __init__(self, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.epsilon = validation.positive("NormalizeObservation", "epsilon", epsilon)

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        self.statistics_of = {}
        for path, leaf in spaces.leaves(below):
            box = spaces.box("NormalizeObservation", "observation", leaf, "numbers")
            # float32 represents every value of the other dtypes.
            needs_float64 = box.dtype in (np.float64, np.int32, np.int64)
            dtype = torch.float64 if needs_float64 else torch.float32
            shape = box.shape or (1,)  # broadcasts with a batch of scalars
            self.statistics_of[path] = RunningMeanStd(shape, signature.device, dtype)
        modules = nn.ModuleList(self.statistics_of.values())
        self.statistics = modules if spaces.children(below) else modules[0]
        above = spaces.map_leaves(
            lambda leaf: Box(-np.inf, np.inf, leaf.shape),
            below,
        )
        return signature.replace(single_observation_space=above)

    def step(self, td: TensorDict) -> TensorDict:
        normalized = spaces.apply(self._update_and_normalize, td["observation"])
        return td.set("observation", normalized)

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        initial = mask.gather(td["observation"])
        normalize = functools.partial(self._update_and_normalize, mask=mask.mask_of_gathered)
        return td.set("observation", mask.spread(spaces.apply(normalize, initial)))

    def _update_and_normalize(
        self,
        path: Path,
        rows: Tensor,
        mask: Tensor | None = None,
        learns: bool = True,
    ) -> Tensor:
        statistics = self.statistics_of[path]
        if learns and self.training:
            differences = statistics._update(rows, mask)
        else:
            differences = differences_from(statistics.reference, rows)
        return statistics._normalize(differences, self.epsilon)

    def observation(self, observation: Value) -> Value:
        """Normalizes without an update."""
        normalize = functools.partial(self._update_and_normalize, learns=False)
        return spaces.apply(normalize, observation)

    def deployed(self) -> Transform:
        constants_of = {}
        for path, statistics in self.statistics_of.items():
            constants_of[path] = torch.stack(statistics.constants(self.epsilon))
        return _FrozenNormalization(constants_of)


class _FrozenNormalization(ObservationTransform):
    """Computes the formula of `RunningMeanStd.normalize` with constants, bit for bit."""

    def __init__(self, constants_of: dict[Path, Tensor]) -> None:
        super().__init__()
        self.name_of = {}
        for number, (path, constants) in enumerate(constants_of.items()):
            self.name_of[path] = f"constants_{number}"
            self.register_buffer(self.name_of[path], constants)

    def observation(self, observation: Value) -> Value:
        return spaces.apply(self._normalize, observation)

    def _normalize(
        self,
        path: Path,
        rows: Tensor,
    ) -> Tensor:
        # The mean is reference + shift, but that sum would lose the last digits of the shift.
        reference, shift, scale = self.get_buffer(self.name_of[path]).unbind()
        differences = differences_from(reference, rows)
        return ((differences - shift) * scale).float()


class NormalizeReward(RewardTransform):
    """Divides rewards by the standard deviation of the discounted return, without a shift.

    Each step computes return = gamma * return + reward, updates the statistics of returns, and
    returns reward / sqrt(var + epsilon). A reset sets return = 0. Stable-Baselines3's
    `VecNormalize` does the same. The first rewards can be large, because there are few returns yet:
    put `ClipReward` above. After a reward that is not finite, the return of that env is not finite
    until its episode ends, and does not count.

    Args:
        gamma: discount of the return.
        epsilon: added to the variance.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, episode_lengths=2), NormalizeReward(gamma=0.5))
    >>> td = env.reset()
    >>> for _ in range(2):
    ...     transition, td = env.step(td.set("action", env.sample_action()))
    >>> transition["next", "reward"]  # rewards 1 and 2, returns 1 and 2.5: deviation 0.75
    tensor([[2.6667],
            [2.6667]])
    """

    _standalone = ""  # it is stateful
    discounted_return = EnvBuffer((1,), torch.float64)

    def __init__(
        self,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__()
        self.gamma = validation.number("NormalizeReward", "gamma", gamma, 0, 1)
        self.epsilon = validation.positive("NormalizeReward", "epsilon", epsilon)

    def setup(self, signature: Signature) -> Signature:
        self.statistics = RunningMeanStd((1,), signature.device, torch.float64)
        return signature

    def reward(self, reward: Tensor) -> Tensor:
        statistics = self.statistics
        discounted_return = self.discounted_return.mul_(self.gamma).add_(reward)
        if self.training:
            statistics._update(discounted_return)
        return reward * statistics.scale(self.epsilon)

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        mask.fill_(self.discounted_return, 0)
        return td
