"""Discretization of boxes into bins of equal width."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.buffers import ConstantBuffer
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import ActionTransform, ObservationTransform, Transform


class _Discretize(Transform):
    """Base of the two directions. A bin is an index per dimension, or one flat index in row-major order."""

    bins: int | tuple[int, ...]
    edges, upper_edges, centers, counts, strides = (ConstantBuffer() for _ in range(5))

    def __init__(self, bins: int | tuple[int, ...], multidiscrete: bool = False) -> None:
        super().__init__()
        name = type(self).__name__
        if isinstance(bins, tuple | list) or (isinstance(bins, np.ndarray) and bins.ndim):
            self.bins = tuple(
                [validation.integer(name, "each of bins", count, at_least=1) for count in bins]
            )
        else:
            self.bins = validation.integer(name, "bins", bins, at_least=1)
        self.multidiscrete = validation.flag(name, "multidiscrete", multidiscrete)

    def _make_bins(
        self, what: str, space: gymnasium.Space[Any], device: torch.device, max_total: int
    ) -> gymnasium.Space[Any]:
        """Registers the bins of a box. Returns the space of their indices."""
        owner, bins = type(self).__name__, self.bins
        box = spaces.box(owner, what, space, of="numbers")
        low, high = box.low.ravel(), box.high.ravel()
        with np.errstate(all="ignore"):
            finite = np.isfinite(high * 1.0 - low * 1.0).all()
        if not finite:
            raise ValueError(
                f"{owner} needs a box with finite bounds and a finite width, but got {box}."
            )
        counts = [bins] * low.size if isinstance(bins, int) else list(bins)
        if len(counts) != low.size or not counts:
            raise ValueError(
                f"{owner} needs bins for each of {low.size} dimensions, but got {bins!r}."
            )
        if math.prod(counts) > max_total:
            raise ValueError(
                f"{owner} needs at most {max_total} bins in all, but got {bins!r} in {low.size} dimensions."
            )
        self.shape, self.dtype = box.shape, spaces.dtype(box)
        # Gymnasium's edges, in its dtype. Dimensions with fewer bins are padded, with edges at infinity.
        lines = [np.linspace(*ends) for ends in zip(low, high, np.add(counts, 1), strict=True)]
        width = max(counts) + 1
        edges = np.array(
            [np.pad(line, (0, width - len(line)), constant_values=np.inf) for line in lines],
            np.float64,
        )
        centers = np.array(
            [np.pad(0.5 * (line[:-1] + line[1:]), (0, width - len(line))) for line in lines],
            np.float64,
        )
        # Steps compute in the dtype of the box, if it has floats, and so compare with the next number at or above an edge.
        work = box.dtype if box.dtype.kind == "f" else np.dtype(np.float64)
        upper = edges[:, 1:].astype(work)
        upper = np.where(upper < edges[:, 1:], np.nextafter(upper, np.array(np.inf, work)), upper)
        strides = np.cumprod([1, *counts[:0:-1]])[::-1]
        constants = {
            "edges": edges.astype(work),
            "upper_edges": upper,
            "centers": centers.astype(work),
        }
        for name, value in {
            **constants,
            "counts": np.array(counts),
            "strides": strides.copy(),
        }.items():
            self.register_buffer(name, torch.as_tensor(value, device=device), persistent=False)
        return (
            gymnasium.spaces.MultiDiscrete(counts)
            if self.multidiscrete
            else gymnasium.spaces.Discrete(math.prod(counts))
        )

    def _flatten(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of the box as `(..., dimensions, 1)`."""
        return value.to(dtype).reshape(*value.shape[: value.dim() - len(self.shape)], -1, 1)

    def _encode(self, indices: Tensor) -> Tensor:
        """Indices `(..., dimensions)` as members of the new space: flat indices `(...)` unless `multidiscrete`."""
        return indices if self.multidiscrete else (indices * self.strides).sum(-1)

    def _decode(self, value: Tensor) -> Tensor:
        """The inverse of `_encode`."""
        return value if self.multidiscrete else value.unsqueeze(-1) // self.strides % self.counts

    def _select(self, table: Tensor, indices: Tensor) -> Tensor:
        """The entries of a table `(dimensions, width)` at indices `(..., dimensions)`, in the dtype of the box."""
        return (
            table.expand(*indices.shape, -1)
            .gather(-1, indices.unsqueeze(-1))
            .squeeze(-1)
            .to(self.dtype)
        )


class DiscretizeObservation(_Discretize, ObservationTransform):
    """Replaces components of the observation by indices of bins of equal width, as in Gymnasium.

    Values outside the bounds go to the outermost bins.

    Args:
        bins: number of bins per dimension, or a tuple with one number per dimension.
        multidiscrete: whether to keep one index per dimension, instead of one flat index in row-major order.

    Shape: a Box with finite bounds to `(num_envs,)` int64, or `(num_envs, dimensions)` int64 with `multidiscrete`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> box = gymnasium.spaces.Box(0, 40, (2,), np.float32)
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=box), DiscretizeObservation(4, multidiscrete=True))
    >>> env.reset()["observation"]  # of 0 and 10
    tensor([[0, 1]])
    """

    def setup(self, signature: Signature) -> Signature:
        space = self._make_bins(
            "observation", signature.single_observation_space, signature.device, 2**63 - 1
        )
        return signature.replace(single_observation_space=space)

    def observation(self, observation: Tensor) -> Tensor:
        # The number of upper edges at or below the value, without a search, which ONNX does not have. NaN is in the last bin.
        below = self._flatten(observation, self.upper_edges.dtype) < self.upper_edges
        return self._encode((~below).sum(-1).minimum(self.counts - 1))

    def revert_observation(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the lower and upper edges of bins, both `(..., dimensions)` in the dtype of the box."""
        indices = self._decode(observation)
        return self._select(self.edges, indices), self._select(self.edges, indices + 1)


class DiscretizeAction(_Discretize, ActionTransform):
    """Takes actions as indices of bins of equal width, as in Gymnasium, and passes on the centers of the bins.

    Args:
        bins: number of bins per dimension, or a tuple with one number per dimension.
        multidiscrete: whether an action has one index per dimension, instead of one flat index in row-major order.

    Shape: actions are `(num_envs,)` int64, or `(num_envs, dimensions)` int64 with `multidiscrete`; the action space below is a
    Box with finite bounds.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> box = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    >>> env = TransformedEnv(ScriptedEnv(2, action_space=box), DiscretizeAction(4))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([0, 3])))
    >>> transition["next", "info", "action"].flatten()  # the action that the env received
    tensor([-0.7500,  0.7500])
    """

    def setup(self, signature: Signature) -> Signature:
        max_total = (
            2**63 - 1 if self.multidiscrete else 2**31
        )  # the largest count that random.integers takes
        space = self._make_bins(
            "action", signature.single_action_space, signature.device, max_total
        )
        return signature.replace(single_action_space=space)

    def action(self, action: Tensor) -> Tensor:
        centers = self._select(self.centers, self._decode(action))
        return centers.reshape(*centers.shape[:-1], *self.shape)

    def revert_action(self, action: Tensor) -> Tensor:
        """Returns the bins with the nearest centers, in the form that `action` takes."""
        padding = torch.arange(
            self.centers.shape[1], device=action.device
        ) >= self.counts.unsqueeze(-1)
        distances = (
            (self.centers - self._flatten(action, torch.float64))
            .abs()
            .masked_fill(padding, math.inf)
        )
        return self._encode(distances.argmin(-1))
