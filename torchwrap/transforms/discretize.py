"""Boxes cut into bins of equal width."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from torchwrap import arguments, spaces
from torchwrap.buffer import Buffer
from torchwrap.spaces import Signature
from torchwrap.transforms.base import ActionTransform, ObservationTransform


class _Bins(nn.Module):
    """The bins of a box, dimension after dimension: their edges, and one number for all of them, the last one fastest."""

    edges = Buffer()
    inner = Buffer()
    centers = Buffer()
    counts = Buffer()
    strides = Buffer()

    def __init__(
        self, name: str, box: gymnasium.spaces.Box, bins: int | tuple[int, ...], device: torch.device, most: int = 2**63 - 1
    ) -> None:
        super().__init__()
        low, high = box.low.ravel(), box.high.ravel()
        with np.errstate(all="ignore"):
            finite = np.isfinite(high * 1.0 - low * 1.0).all()
        if not finite:
            raise ValueError(f"{name} needs a box with finite bounds and a finite width, but got {box}.")
        counts = (bins,) * low.size if isinstance(bins, int) else bins
        if len(counts) != low.size or not counts:
            raise ValueError(f"{name} needs bins for each of {low.size} dimensions, but got {bins!r}.")
        if math.prod(counts) > most:
            raise ValueError(f"{name} needs at most {most} bins in all, but got {bins!r} in {low.size} dimensions.")
        self.shape, self.dtype = box.shape, spaces.dtype(box)
        # As Gymnasium has them, of the box's own dtype; as far as there are fewer, edges that nothing reaches.
        lines = [np.linspace(*ends) for ends in zip(low, high, np.add(counts, 1), strict=True)]
        most = max(counts)
        edges = [np.pad(line, (0, most + 1 - len(line)), constant_values=np.inf) for line in lines]
        centers = [np.pad(0.5 * (line[:-1] + line[1:]), (0, most + 1 - len(line))) for line in lines]
        strides = np.cumprod([1, *counts[:0:-1]])[::-1].copy()
        for key, value in (("edges", edges), ("centers", centers), ("counts", counts), ("strides", strides)):
            array = np.array(value, np.float64 if key in ("edges", "centers") else np.int64)
            self.register_buffer(key, torch.as_tensor(array, device=device), persistent=False)
        self.register_buffer("inner", self.edges[:, 1:].contiguous(), persistent=False)

    def space(self, multidiscrete: bool) -> gymnasium.Space[Any]:
        counts = self.counts.tolist()
        return gymnasium.spaces.MultiDiscrete(counts) if multidiscrete else gymnasium.spaces.Discrete(math.prod(counts))

    def flat(self, value: Tensor) -> Tensor:
        """Values of the box as float64 `(..., dimensions)`."""
        batch = value.shape[: value.dim() - len(self.shape)]
        return value.double().reshape(*batch, -1)

    def join(self, places: Tensor) -> Tensor:
        """Places `(..., dimensions)` as one number."""
        return (places * self.strides).sum(-1)

    def split(self, number: Tensor) -> Tensor:
        return number.unsqueeze(-1) // self.strides % self.counts


def _bins(name: str, bins: Any) -> int | tuple[int, ...]:
    if isinstance(bins, tuple | list) or (isinstance(bins, np.ndarray) and bins.ndim):
        return tuple([arguments.integer(name, "bins", count, at_least=1) for count in bins])
    return arguments.integer(name, "bins", bins, at_least=1)


class DiscretizeObservation(ObservationTransform):
    """Says in which bin each component of the observation lies, or with one number in which of all.

    Args:
        bins: how many for each dimension, or a tuple with a number for each.
        multidiscrete: whether each dimension keeps a number of its own.

    Shape: a Box with finite bounds to `(num_envs,)` int64, or `(num_envs, dimensions)`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> box = gymnasium.spaces.Box(0, 40, (2,), np.float32)
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=box), DiscretizeObservation(4, multidiscrete=True))
    >>> env.reset()["observation"]  # of 0 and 10
    tensor([[0, 1]])
    """

    def __init__(self, bins: int | tuple[int, ...], multidiscrete: bool = False) -> None:
        super().__init__()
        self.bins = _bins("DiscretizeObservation", bins)
        self.multidiscrete = arguments.flag("DiscretizeObservation", "multidiscrete", multidiscrete)

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("DiscretizeObservation", "observation", signature.single_observation_space, of="numbers")
        self.places = _Bins("DiscretizeObservation", box, self.bins, signature.device)
        return signature.replace(single_observation_space=self.places.space(self.multidiscrete))

    def observation(self, observation: Tensor) -> Tensor:
        bins = self.places
        # How many inner edges are not above it; what lies beyond the outer ones belongs to the last bin there.
        flat = bins.flat(observation)
        columns = flat.flatten(end_dim=-2).t().contiguous() if flat.dim() > 1 else flat.unsqueeze(-1)
        places = torch.searchsorted(bins.inner, columns, right=True)
        places = places.t().reshape(flat.shape).minimum(bins.counts - 1)
        return places if self.multidiscrete else bins.join(places)

    def revert_observation(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper edges of bins, `(..., dimensions)` both, in the dtype of the box."""
        bins = self.places
        places = (observation if self.multidiscrete else bins.split(observation)).unsqueeze(-1)
        edges = bins.edges.expand(*places.shape[:-1], -1)
        low, high = edges.gather(-1, places), edges.gather(-1, places + 1)
        return low.squeeze(-1).to(bins.dtype), high.squeeze(-1).to(bins.dtype)


class DiscretizeAction(ActionTransform):
    """Takes the number of a bin for an action: its centre is done.

    Args:
        bins: how many for each dimension, or a tuple with a number for each.
        multidiscrete: whether each dimension has a number of its own.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> box = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    >>> env = TransformedEnv(ScriptedEnv(2, action_space=box), DiscretizeAction(4))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([0, 3])))
    >>> transition["next", "info", "action"].flatten()  # what a ScriptedEnv got
    tensor([-0.7500,  0.7500])
    """

    def __init__(self, bins: int | tuple[int, ...], multidiscrete: bool = False) -> None:
        super().__init__()
        self.bins = _bins("DiscretizeAction", bins)
        self.multidiscrete = arguments.flag("DiscretizeAction", "multidiscrete", multidiscrete)

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("DiscretizeAction", "action", signature.single_action_space, of="numbers")
        most = 2**63 - 1 if self.multidiscrete else 2**31  # of that many, random.integers can draw one
        self.places = _Bins("DiscretizeAction", box, self.bins, signature.device, most)
        return signature.replace(single_action_space=self.places.space(self.multidiscrete))

    def action(self, action: Tensor) -> Tensor:
        bins = self.places
        places = (action if self.multidiscrete else bins.split(action)).unsqueeze(-1)
        centers = bins.centers.expand(*places.shape[:-1], -1).gather(-1, places).squeeze(-1)
        return centers.reshape(*places.shape[:-2], *bins.shape).to(bins.dtype)

    def revert_action(self, action: Tensor) -> Tensor:
        """The bins with the nearest centres, in the form that `action` takes."""
        bins = self.places
        far = torch.arange(bins.centers.shape[1], device=action.device) >= bins.counts.unsqueeze(-1)
        distance = (bins.centers - bins.flat(action).unsqueeze(-1)).abs().masked_fill(far, math.inf)
        places = distance.argmin(-1)
        return places if self.multidiscrete else bins.join(places)
