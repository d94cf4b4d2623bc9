"""Discretization of boxes into bins of equal width."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.env_buffers import ConstantBuffer
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import ActionTransform, ObservationTransform, Transform


class _Bins(nn.Module):
    """The bins of a box: an index per dimension, or one flat index in row-major order."""

    edges = ConstantBuffer()
    upper_edges = ConstantBuffer()
    centers = ConstantBuffer()
    counts = ConstantBuffer()
    strides = ConstantBuffer()

    def __init__(
        self,
        owner: str,
        box: gymnasium.spaces.Box,
        bins: int | tuple[int, ...],
        device: torch.device,
        max_total: int = 2**63 - 1,
    ) -> None:
        super().__init__()
        low, high = box.low.ravel(), box.high.ravel()
        with np.errstate(all="ignore"):
            finite = np.isfinite(high * 1.0 - low * 1.0).all()
        if not finite:
            raise ValueError(f"{owner} needs a box with finite bounds and a finite width, but got {box}.")
        counts = (bins,) * low.size if isinstance(bins, int) else bins
        if len(counts) != low.size or not counts:
            raise ValueError(f"{owner} needs bins for each of {low.size} dimensions, but got {bins!r}.")
        if math.prod(counts) > max_total:
            raise ValueError(f"{owner} needs at most {max_total} bins in all, but got {bins!r} in {low.size} dimensions.")
        self.shape, self.dtype = box.shape, spaces.dtype(box)
        self.work_dtype = torch.float64
        # Gymnasium's edges, in the dtype of the box. Dimensions with fewer bins are padded, with edges at infinity.
        lines = [np.linspace(*ends) for ends in zip(low, high, np.add(counts, 1), strict=True)]
        width = max(counts) + 1
        edges = [np.pad(line, (0, width - len(line)), constant_values=np.inf) for line in lines]
        centers = [np.pad(0.5 * (line[:-1] + line[1:]), (0, width - len(line))) for line in lines]
        strides = np.cumprod([1, *counts[:0:-1]])[::-1].copy()
        for name, value in (("edges", edges), ("centers", centers), ("counts", counts), ("strides", strides)):
            array = np.array(value, np.float64 if name in ("edges", "centers") else np.int64)
            self.register_buffer(name, torch.as_tensor(array, device=device), persistent=False)
        self.register_buffer("upper_edges", self.edges[:, 1:].contiguous(), persistent=False)

    def space(self, multidiscrete: bool) -> gymnasium.Space[Any]:
        counts = self.counts.tolist()
        return gymnasium.spaces.MultiDiscrete(counts) if multidiscrete else gymnasium.spaces.Discrete(math.prod(counts))

    def flatten(self, value: Tensor) -> Tensor:
        """Values of the box as float64 `(..., dimensions)`, or in the dtype that `freeze` has chosen."""
        batch = value.shape[: value.dim() - len(self.shape)]
        return value.to(self.work_dtype).reshape(*batch, -1)

    def freeze(self) -> None:
        """Keeps the centers in the dtype of the box, and the edges in float32 where it holds every value. The bins stay."""
        for name in ("centers", "edges"):
            self.register_buffer(name, self.get_buffer(name).to(self.dtype), persistent=False)
        if self.dtype not in (torch.float64, torch.int64, torch.int32):
            self.work_dtype, edges = torch.float32, self.upper_edges
            narrow = edges.float()  # a value is at or above an edge where it is at or above the next float32
            above = torch.nextafter(narrow, torch.full_like(narrow, math.inf))
            self.register_buffer("upper_edges", torch.where(narrow < edges, above, narrow), persistent=False)

    def ravel(self, indices: Tensor) -> Tensor:
        """Indices `(..., dimensions)` to flat indices `(...)`."""
        return (indices * self.strides).sum(-1)

    def unravel(self, flat_index: Tensor) -> Tensor:
        """Flat indices `(...)` to indices `(..., dimensions)`."""
        return flat_index.unsqueeze(-1) // self.strides % self.counts


def _bins(name: str, bins: Any) -> int | tuple[int, ...]:
    if isinstance(bins, tuple | list) or (isinstance(bins, np.ndarray) and bins.ndim):
        return tuple([validation.integer(name, "bins", count, at_least=1) for count in bins])
    return validation.integer(name, "bins", bins, at_least=1)


class DiscretizeObservation(ObservationTransform):
    """Replaces each component of the observation by the index of its bin. Values outside the bounds go to the outermost bins.

    The bins are Gymnasium's: of equal width, between the bounds of the space.

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

    is_frozen = False

    def __init__(self, bins: int | tuple[int, ...], multidiscrete: bool = False) -> None:
        super().__init__()
        self.bins = _bins("DiscretizeObservation", bins)
        self.multidiscrete = validation.flag("DiscretizeObservation", "multidiscrete", multidiscrete)

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("DiscretizeObservation", "observation", signature.single_observation_space, of="numbers")
        self.grid = _Bins("DiscretizeObservation", box, self.bins, signature.device)
        return signature.replace(single_observation_space=self.grid.space(self.multidiscrete))

    def observation(self, observation: Tensor) -> Tensor:
        flat = self.grid.flatten(observation)
        # The index is the number of upper edges at or below the value. A value beyond the last edge stays in the last bin.
        if self.is_frozen:  # ONNX has no searchsorted; NaN is sorted to the end
            indices = (~(flat.unsqueeze(-1) < self.grid.upper_edges)).sum(-1).minimum(self.grid.counts - 1)
            return indices if self.multidiscrete else self.grid.ravel(indices)
        columns = flat.flatten(end_dim=-2).t().contiguous() if flat.dim() > 1 else flat.unsqueeze(-1)
        indices = torch.searchsorted(self.grid.upper_edges, columns, right=True)
        indices = indices.t().reshape(flat.shape).minimum(self.grid.counts - 1)
        return indices if self.multidiscrete else self.grid.ravel(indices)

    def _frozen(self) -> Transform:
        self.grid.freeze()
        self.is_frozen = True
        return self

    def revert_observation(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the lower and upper edges of bins, both `(..., dimensions)` in the dtype of the box."""
        grid = self.grid
        indices = (observation if self.multidiscrete else grid.unravel(observation)).unsqueeze(-1)
        edges = grid.edges.expand(*indices.shape[:-1], -1)
        low, high = edges.gather(-1, indices), edges.gather(-1, indices + 1)
        return low.squeeze(-1).to(grid.dtype), high.squeeze(-1).to(grid.dtype)


class DiscretizeAction(ActionTransform):
    """Takes actions as indices of bins, and passes on the centers of the bins.

    The bins are Gymnasium's: of equal width, between the bounds of the space.

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

    def __init__(self, bins: int | tuple[int, ...], multidiscrete: bool = False) -> None:
        super().__init__()
        self.bins = _bins("DiscretizeAction", bins)
        self.multidiscrete = validation.flag("DiscretizeAction", "multidiscrete", multidiscrete)

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("DiscretizeAction", "action", signature.single_action_space, of="numbers")
        max_total = 2**63 - 1 if self.multidiscrete else 2**31  # the largest count that random.integers takes
        self.grid = _Bins("DiscretizeAction", box, self.bins, signature.device, max_total)
        return signature.replace(single_action_space=self.grid.space(self.multidiscrete))

    def action(self, action: Tensor) -> Tensor:
        grid = self.grid
        indices = (action if self.multidiscrete else grid.unravel(action)).unsqueeze(-1)
        centers = grid.centers.expand(*indices.shape[:-1], -1).gather(-1, indices).squeeze(-1)
        return centers.reshape(*indices.shape[:-2], *grid.shape).to(grid.dtype)

    def _frozen(self) -> Transform:
        self.grid.freeze()
        return self

    def revert_action(self, action: Tensor) -> Tensor:
        """Returns the bins with the nearest centers, in the form that `action` takes."""
        grid = self.grid
        padding = torch.arange(grid.centers.shape[1], device=action.device) >= grid.counts.unsqueeze(-1)
        distances = (grid.centers - grid.flatten(action).unsqueeze(-1)).abs().masked_fill(padding, math.inf)
        indices = distances.argmin(-1)
        return indices if self.multidiscrete else grid.ravel(indices)
