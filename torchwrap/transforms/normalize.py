"""Normalisation by running statistics, which are learned in train() and frozen in eval()."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import arguments, masks, spaces
from torchwrap.buffer import Buffer, Submodule
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.base import ObservationTransform, Transform


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen, each counted exactly once.

    What is kept are sums of differences from a reference, in float64, and an int64 count. There is no first sample that
    nobody saw: before the first update the mean is 0 and the variance 1.

    The reference is the first row itself. So sums of squares lose nothing to a mean that is large beside the deviation: with
    R = (mean - reference)^2 / variance, the subtraction magnifies rounding R times, but a row that was counted among n is
    never further away than R = n, so that even 1e12 rows leave four digits, and a variance that is not negative. It also makes
    the variance of a feature that never changes exactly 0.

    Args:
        shape: of one row; at least one dimension.
        device: where the statistics live.
        dtype: of the reference; float64 for rows that float32 does not hold.

    >>> statistics = RunningMeanStd((1,))
    >>> statistics.update(torch.tensor([[1.0], [3.0]]))
    >>> statistics.mean, statistics.var, statistics.count
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64), tensor([2]))
    """

    reference = Buffer()
    total = Buffer()
    squares = Buffer()
    count = Buffer()

    def __init__(self, shape: tuple[int, ...], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shape = arguments.sizes("RunningMeanStd", "shape", shape, at_least=0)
        device = arguments.device("RunningMeanStd", device)
        if not shape:
            raise ValueError(f"RunningMeanStd needs a shape of at least one dimension, but got {shape}.")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"RunningMeanStd needs dtype torch.float32 or torch.float64, but got {dtype!r}.")
        # Never 0-dim: torch 2.13 loses in-place updates of a 0-dim float64 CPU buffer under torch.compile.
        self.register_buffer("reference", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("total", torch.zeros(shape, dtype=torch.float64, device=device))
        self.register_buffer("squares", torch.zeros(shape, dtype=torch.float64, device=device))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64, device=device))

    @property
    def mean(self) -> Tensor:
        """float64, of `shape`."""
        return self.reference + self._moments()[0]

    @property
    def var(self) -> Tensor:
        """The population's, float64, of `shape`."""
        return self._moments()[1]

    def update(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Counts `rows` `(n, *shape)`, or those where `mask` (bool, `(n,)`) is set."""
        if mask is not None and masks.free_to_look(mask):
            rows, mask = rows[mask], None
        self._differences(rows, mask, learn=True)

    def normalize(self, rows: Tensor, epsilon: float, mask: Tensor | None = None, learn: bool = False) -> Tensor:
        """(rows - mean) / sqrt(var + epsilon), float32; with `learn`, after `update(rows, mask)`.

        Where the host can look at the mask, only rows in it are computed; the others are 0.
        """
        if mask is not None and masks.free_to_look(mask):
            return masks.only(mask, rows, lambda few: self.normalize(few, epsilon, learn=learn))
        differences = self._differences(rows, mask, learn)
        mean, var = self._moments()
        scale = var.add_(epsilon).rsqrt_()
        if differences.dtype == torch.float32:
            mean, scale = mean.float(), scale.float()
        return differences.sub_(masks.once(mean)).mul_(masks.once(scale)).float()

    def _differences(self, rows: Tensor, mask: Tensor | None, learn: bool) -> Tensor:
        # From the reference; if they are to be learned, those in the mask are counted.
        reference, squares, count = self.reference, self.squares, self.count
        if not learn:
            return rows - reference
        if not masks.free_to_look(rows):
            # Of row 0, or never: to search for the first row in the mask would cost two passes at every step.
            begins = (count == 0) & (True if mask is None else mask[:1])
            reference = reference.copy_(masks.once(torch.where(begins, rows[0], reference)))
        elif not count and len(rows):
            reference.copy_(rows[0])
        differences = counted = rows - reference
        number: Tensor | int = len(rows)
        if mask is not None:
            counted = torch.where(mask.view(-1, *(1,) * (rows.dim() - 1)), differences, 0)
            number = mask.sum()
        counted = counted.double()
        self.total.add_(counted.sum(0))
        squares.add_(torch.linalg.vecdot(counted, counted, dim=0))
        count.add_(number)
        return differences

    def _moments(self) -> tuple[Tensor, Tensor]:
        # Mean, as a difference from the reference, and variance.
        count = self.count
        known = masks.free_to_look(count) and int(count)
        counted = known or count.clamp(min=1)
        mean = self.total / counted
        var = (self.squares / counted).addcmul_(mean, mean, value=-1)
        return mean, var if known else var.add_(count == 0)


class NormalizeObservation(ObservationTransform):
    """Shifts and scales each component of the observation to mean 0 and variance 1 over everything seen.

    (observation - mean) / sqrt(var + epsilon), Gymnasium's formula. Every real observation counts exactly once: successors,
    final ones among them, and first observations. All envs share the statistics, which are the transform's `state_dict`.

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
        self.epsilon = arguments.positive("NormalizeObservation", "epsilon", epsilon)

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_observation_space
        boxes = {path: spaces.box("NormalizeObservation", "observation", box, "numbers") for path, box in spaces.leaves(below)}
        self.statistics_of = {path: _statistics(box, signature.device) for path, box in boxes.items()}
        each = list(self.statistics_of.values())
        self.statistics = nn.ModuleList(each) if spaces.children(below) is not None else each[0]
        return signature.replace(single_observation_space=_unbounded(below))

    def _normal(self, observation: Value, mask: Tensor | None = None, learn: bool = False) -> Value:
        def normal(path: tuple[str, ...], rows: Tensor) -> Tensor:
            return self.statistics_of[path].normalize(rows, self.epsilon, mask, learn)

        return spaces.apply(normal, observation)

    def observation(self, observation: Value) -> Value:
        return self._normal(observation)

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", self._normal(td["observation"], learn=self.training))

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        return td.set("observation", self._normal(td["observation"], mask, self.training))


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

    discounted_return = Buffer()
    statistics = Submodule()

    def __init__(self, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.gamma = arguments.number("NormalizeReward", "gamma", gamma, 0, 1)
        self.epsilon = arguments.positive("NormalizeReward", "epsilon", epsilon)

    def setup(self, signature: Signature) -> Signature:
        self.statistics = RunningMeanStd((1,), signature.device)
        discounted = torch.zeros(signature.num_envs, 1, device=signature.device)
        self.register_rows("discounted_return", discounted)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        reward = td["reward"]
        returns, statistics = self.discounted_return, self.statistics
        torch.add(reward, returns, alpha=self.gamma, out=returns)
        if self.training:
            statistics.update(returns)
        scale = statistics.var.add_(self.epsilon).rsqrt_().float()
        return td.set("reward", reward * masks.once(scale))

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        self.discounted_return.masked_fill_(mask.unsqueeze(-1), 0)
        return td
