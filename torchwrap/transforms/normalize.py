"""Running mean and variance, and normalization by them: learned in train(), frozen in eval()."""

from __future__ import annotations

import math
import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.env_buffers import BatchedModule, EnvBuffer
from torchwrap._core.rows import RowMask, materialize, no_zero
from torchwrap.spaces import Path, Signature, Value
from torchwrap.transforms.transform import ObservationTransform, Transform


class RunningMeanStd(BatchedModule):
    """Mean and variance of each component over all rows seen. Each finite value counts exactly once.

    NaN and infinite values are left out, each by itself: the other components of the row count. `count` is the number of
    values, per component. There is no pseudo-count prior: before its first value, the mean of a component is 0 and the
    variance 1.

    The module keeps float64 sums of differences from a reference, the first row that was counted, and int64 counts. With
    R = (mean - reference)^2 / variance, the variance has R times the rounding error of the sums. A reference among n rows has
    R <= n, so even 1e12 rows leave four digits. The variance of a feature that never changes is exactly 0.

    Args:
        shape: of one row; at least one dimension.
        device: of the buffers.
        dtype: of the reference: float32, or float64 for rows that float32 cannot represent.

    >>> statistics = RunningMeanStd((1,))
    >>> statistics.update(torch.tensor([[1.0], [3.0], [torch.nan]]))
    >>> statistics.mean, statistics.var
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    >>> statistics.count
    tensor([2])
    """

    reference: Tensor
    total: Tensor
    squares: Tensor
    count: Tensor
    synced: Tensor

    def __init__(self, shape: tuple[int, ...], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shape = validation.sizes("RunningMeanStd", "shape", shape, at_least=0)
        device = validation.device("RunningMeanStd", device)
        if not shape:
            raise ValueError(f"RunningMeanStd needs a shape of at least one dimension, but got {shape}.")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"RunningMeanStd needs dtype torch.float32 or torch.float64, but got {dtype!r}.")
        # Never 0-dim: torch 2.13 loses in-place updates of a 0-dim float64 CPU buffer under torch.compile.
        dtypes = {"reference": dtype, "total": torch.float64, "squares": torch.float64, "count": torch.int64}
        for name, dtype in dtypes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))
        # The sums that all processes of a group had after their last sync, or loaded; see `torchwrap.sync_statistics`.
        self.register_buffer("synced", torch.zeros_like(self.sums()), persistent=False)

    @property
    def mean(self) -> Tensor:
        """The mean, float64, of `shape`."""
        return self.reference + self._moments()[0]

    @property
    def var(self) -> Tensor:
        """The population variance, float64, of `shape`."""
        return self._moments()[1]

    def update(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Counts the finite values of `rows` `(n, *shape)`, or of those where `mask` (bool, `(n,)`) is set."""
        if len(rows) == 0:
            return
        reference = self.reference
        if not no_zero(self.count):  # the reference of a component is the first row that is counted
            first, unseen = rows[0], self.count == 0
            if mask is not None:
                index = torch.where(mask, torch.arange(len(rows), device=rows.device), len(rows) - 1).amin(0, keepdim=True)
                first, unseen = rows.index_select(0, index)[0], unseen & mask.index_select(0, index)
            reference = materialize(torch.where(unseen & (first.abs() < math.inf), first, reference))
            self.reference.copy_(reference)
        differences = rows - reference
        # Of float64, what is too large to be squared is left out as well.
        counts = differences.abs() < (1e150 if differences.dtype == torch.float64 else math.inf)
        if mask is not None:
            counts &= mask.view(-1, *(1,) * (rows.dim() - 1))
        kept = torch.where(counts, differences, 0).double()
        self.total.add_(kept.sum(0))
        self.squares.add_(kept.square_().sum(0))
        self.count.add_(counts.sum(0, dtype=torch.int32))

    def normalize(self, rows: Tensor, epsilon: float) -> Tensor:
        """Returns (rows - mean) / sqrt(var + epsilon), float32."""
        mean, var = self._moments()
        differences = rows - self.reference
        mean = materialize(mean.to(differences.dtype))
        scale = materialize((var + epsilon).rsqrt().to(differences.dtype))
        return ((differences - mean) * scale).float()

    def scale(self, epsilon: float) -> Tensor:
        """Returns 1 / sqrt(var + epsilon), float32, of `shape`."""
        return (self.var + epsilon).rsqrt().float()

    def frozen(self, epsilon: float) -> Tensor:
        """The constants of `normalize`, in the dtype of the reference: reference, mean - reference, and scale."""
        self._warn_untrained("A deployed policy")
        mean, var = self._moments()
        return torch.stack([self.reference, *(each.to(self.reference.dtype) for each in (mean, (var + epsilon).rsqrt()))])

    def sums(self) -> Tensor:
        """All that is added up: totals, squares and counts, float64, `(3, size)`."""
        return torch.stack([part.flatten().double() for part in (self.total, self.squares, self.count)])

    def set_sums(self, sums: Tensor, reference: Tensor) -> None:
        """Writes sums of differences from a reference `(size,)`, which all processes share from now on."""
        buffers = (self.reference, self.total, self.squares, self.count)
        for buffer, value in zip(buffers, (reference, *sums), strict=True):
            buffer.copy_(value.view_as(buffer))
        self.synced.copy_(sums)

    @torch.inference_mode()  # in which every buffer can be written to
    def set_moments(self, mean: Any, var: Any, count: Any) -> None:
        """Goes on from statistics of another library, as if it had counted `count` values of this mean and variance.

        Args:
            mean, var: tensors or arrays of `shape`, or a number for all components. `var` is the population variance.
            count: one number, or one per component, rounded to an integer of at least 1.

        >>> statistics = RunningMeanStd((2,))
        >>> statistics.set_moments([1.0, 2.0], [4.0, 9.0], count=100)
        >>> statistics.mean, statistics.var, statistics.count
        (tensor([1., 2.], dtype=torch.float64), tensor([4., 9.], dtype=torch.float64), tensor([100, 100]))
        """
        shape, found = self.count.shape, []
        for name, value, low in (("mean", mean, -math.inf), ("var", var, 0), ("count", count, 1)):
            needed = f"RunningMeanStd needs {name} of shape {tuple(shape)}"
            try:
                given = torch.as_tensor(value, dtype=torch.float64, device=self.count.device)
            except (RuntimeError, TypeError, ValueError):
                raise TypeError(f"{needed} as numbers, but got {validation.shown(value)}.") from None
            if given.dim() and given.shape != shape:
                raise ValueError(f"{needed}, but got {tuple(given.shape)}.")
            given = given.round() if name == "count" else given
            limit = torch.finfo(self.reference.dtype if name == "mean" else given.dtype).max
            if not ((given >= low) & (given.abs() <= limit)).all():
                raise ValueError(f"{needed}, finite{f' and at least {low}' * (low >= 0)}, but got {validation.shown(value)}.")
            found.append(given.expand(shape).flatten())
        mean, var, count = found
        reference = mean.to(self.reference.dtype).double()
        shift = mean - reference
        self.set_sums(torch.stack([shift * count, (var + shift.square()) * count, count]), reference)

    def _warn_untrained(self, owner: str) -> None:
        if not self.count.is_meta and not self.count.any():
            remedy = "load those of a trained env with load_state_dict(), or learn them in train()"
            warnings.warn(f"{owner} normalizes in eval() with statistics that have no samples: {remedy}.", stacklevel=4)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        state_dict, prefix, errors = args[0], args[1], args[-1]
        if not errors and all(prefix + name in state_dict for name in self.state_dict()):
            with torch.inference_mode():  # in which every buffer can be written to
                self.synced.copy_(self.sums())  # every process loads the same statistics

    def _moments(self) -> tuple[Tensor, Tensor]:
        # The mean as a difference from the reference, and the variance.
        number = self.count.clamp(min=1)
        mean = self.total / number
        var = (self.squares / number - mean.square()).relu()  # a reference of 0 may leave less than nothing
        return mean, var + (self.count == 0)


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
        self.statistics_of = {path: _statistics(leaf, signature.device, path) for path, leaf in spaces.leaves(below)}
        each = list(self.statistics_of.values())
        self.statistics = nn.ModuleList(each) if spaces.children(below) is not None else each[0]
        above = spaces.map_leaves(lambda leaf: gymnasium.spaces.Box(-np.inf, np.inf, leaf.shape, np.float32), below)
        return signature.replace(single_observation_space=above)

    def observation(self, observation: Value) -> Value:
        return spaces.apply(lambda path, leaf: self.statistics_of[path].normalize(leaf, self.epsilon), observation)

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

    def _frozen(self) -> Transform:
        return _FrozenNormalization({path: each.frozen(self.epsilon) for path, each in self.statistics_of.items()})


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

    is_passive = True
    discounted_return = EnvBuffer((1,), torch.float64)

    def __init__(self, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.gamma = validation.number("NormalizeReward", "gamma", gamma, 0, 1)
        self.epsilon = validation.positive("NormalizeReward", "epsilon", epsilon)

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
