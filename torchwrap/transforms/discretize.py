"""Discretization of boxes into bins of equal width."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import ActionTransform, ObservationTransform, Transform


class _Discretize(Transform):
    """Base of both directions.

    A bin is an index per dimension, or one flat index in row-major order. Tables have a row per
    dimension.
    """

    bins: int | tuple[int, ...]
    edges: Tensor
    centers: Tensor
    counts: Tensor
    strides: Tensor

    def __init__(
        self,
        bins: int | tuple[int, ...],
        multidiscrete: bool = False,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if np.ndim(bins) == 0:
            self.bins = validation.integer(owner, "bins", bins, at_least=1)
        else:
            sizes: Any = bins
            self.bins = validation.sizes(owner, "bins", tuple(sizes), at_least=1)
        self.multidiscrete = validation.flag(owner, "multidiscrete", multidiscrete)

    def setup(self, signature: Signature) -> Signature:
        owner = type(self).__name__
        what = self._standalone  # "observation" or "action"
        name = f"single_{what}_space"
        box = spaces.box(owner, what, getattr(signature, name), of="numbers")
        low = box.low.ravel()
        high = box.high.ravel()
        with np.errstate(all="ignore"):
            is_finite = np.isfinite(high * 1.0 - low * 1.0).all()
        if not is_finite:
            must = f"the {what} space must have finite bounds and a finite width"
            raise ValueError(refusal(owner, must, box))
        counts = self.bins if isinstance(self.bins, tuple) else (self.bins,) * low.size
        if len(counts) != low.size:
            raise ValueError(refusal(owner, f"bins must be {low.size} numbers", self.bins))
        if not self.multidiscrete and math.prod(counts) > 2**31:
            must = "bins must have a product of at most 2**31 to be sampled"
            remedy = "Use multidiscrete=True"
            raise ValueError(refusal(owner, must, self.bins, remedy))
        self.shape = box.shape
        # Floats are compared in their own dtype. Dimensions with fewer bins are padded.
        dtype = box.dtype if box.dtype.kind == "f" else np.dtype(np.float64)
        edges = np.full((low.size, max(counts) + 1), np.inf, dtype)
        for row, count in enumerate(counts):
            line = np.linspace(low[row], high[row], count + 1, dtype=dtype)
            edges[row, : count + 1] = line
        centers = 0.5 * edges[:, :-1] + 0.5 * edges[:, 1:]  # a sum of edges could overflow
        with np.errstate(invalid="ignore"):  # of dimensions that are padded
            centers = centers.astype(box.dtype)
        centers = centers.clip(low[:, None], high[:, None])
        # In row-major order, a stride is the product of the counts behind.
        products = np.cumprod([1, *counts[:0:-1]])
        strides = products[::-1].copy()
        self._register_constants(
            signature.device, edges=edges, centers=centers, counts=counts, strides=strides
        )
        above: Space[Any] = MultiDiscrete(list(counts))
        if not self.multidiscrete:
            above = Discrete(math.prod(counts))
        return signature.replace(**{name: above})


class DiscretizeObservation(_Discretize, ObservationTransform):
    """Replaces components of the observation by indices of bins of equal width, as in Gymnasium.

    Values outside the bounds go to the outermost bins.

    Args:
        bins: number of bins per dimension, or a tuple with one number per dimension.
        multidiscrete: whether to keep one index per dimension, instead of one flat index in
            row-major order.

    Shape: a Box with finite bounds to `(num_envs,)` int64, or `(num_envs, dimensions)` int64 with
    `multidiscrete`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from gymnasium.spaces import Box
    >>> env = ScriptedEnv(1, observation_space=Box(0, 40, (2,), np.float32))
    >>> env = TransformedEnv(env, DiscretizeObservation(4, multidiscrete=True))
    >>> env.reset()["observation"]  # raw: 0 and 10
    tensor([[0, 1]])
    """

    def observation(self, observation: Tensor) -> Tensor:
        batch = observation.shape[: observation.dim() - len(self.shape)]
        columns = observation.to(self.edges.dtype).reshape(*batch, -1, 1)
        # Counts the upper edges at or below the value; ONNX has no search. NaN is in the last bin.
        is_below = columns < self.edges[:, 1:]
        indices = (~is_below).sum(-1).minimum(self.counts - 1)
        return indices if self.multidiscrete else (indices * self.strides).sum(-1)


class DiscretizeAction(_Discretize, ActionTransform):
    """Takes indices of bins of equal width as actions, and passes on the centers of the bins.

    Args:
        bins: number of bins per dimension, or a tuple with one number per dimension.
        multidiscrete: whether an action has one index per dimension, instead of one flat index in
            row-major order.

    Shape: actions are `(num_envs,)` int64, or `(num_envs, dimensions)` int64 with `multidiscrete`;
    the action space below is a Box with finite bounds.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> import torch; from gymnasium.spaces import Box
    >>> env = ScriptedEnv(2, action_space=Box(-1, 1, (1,), np.float32))
    >>> env = TransformedEnv(env, DiscretizeAction(4))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([0, 3])))
    >>> transition["next", "info", "action"].flatten()  # the action that the env received
    tensor([-0.7500,  0.7500])
    """

    def action(self, action: Tensor) -> Tensor:
        indices = action
        if not self.multidiscrete:
            indices = action.unsqueeze(-1) // self.strides % self.counts
        rows = self.centers.expand(*indices.shape, -1)
        centers = rows.gather(-1, indices.unsqueeze(-1))
        return centers.reshape(*indices.shape[:-1], *self.shape)
