"""Affine maps from one Box to another."""

from __future__ import annotations

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


class _Rescale(Transform):
    """Base of the two directions of new = gradient * old + intercept, with the formula and roundings of `rescale_box`."""

    gradient, intercept = ConstantBuffer(), ConstantBuffer()

    def _set_bounds(self, names: str, low: Any, high: Any, finite: bool = False) -> None:
        # In the given dtypes, because Gymnasium computes in them.
        self.shown = f"{validation.shown(low)} and {validation.shown(high)}"
        try:
            given = self.low, self.high = np.asarray(low), np.asarray(high)
            fits = all(
                bound.dtype.kind in "iuf" and (np.isfinite(bound).all() or not finite)
                for bound in given
            )
            fits = fits and bool((self.low < self.high).all())
        except (TypeError, ValueError, RuntimeError):
            fits = False
        if not fits:
            raise ValueError(f"{type(self).__name__} needs {names}, but got {self.shown}.")

    def _rescale(
        self, what: str, box: gymnasium.spaces.Box, device: torch.device
    ) -> gymnasium.spaces.Box:
        # Registers the coefficients, and returns the new box. A dimension with a single finite bound is shifted, not scaled.
        name = type(self).__name__
        try:
            low, high = (
                np.broadcast_to(bound, box.shape)
                for bound in np.broadcast_arrays(self.low, self.high)
            )
        except ValueError:
            shape = np.broadcast(self.low, self.high).shape
            raise ValueError(
                f"{name} needs bounds that fit shape {box.shape}, but got {shape}."
            ) from None
        if not (box.low < box.high).all():
            raise ValueError(f"{name} needs {what} space with low < high, but got {box}.")
        for new, old in ((low, box.low), (high, box.high)):
            if not np.array_equal(np.where(np.isinf(new), new, 0), np.where(np.isinf(old), old, 0)):
                raise ValueError(
                    f"{name} needs bounds that are infinite where {box} is unbounded, but got {self.shown}."
                )
        bounded_below, bounded_above = np.isfinite(low), np.isfinite(high)
        bounded = bounded_below & bounded_above
        gradient, intercept = np.ones(box.shape, box.dtype), np.zeros(box.shape, box.dtype)
        with np.errstate(all="ignore"):
            gradient[bounded] = (high[bounded] - low[bounded]) / (
                box.high[bounded].astype(np.longdouble) - box.low[bounded]
            )
            intercept[bounded_above] = high[bounded_above] - box.high[bounded_above]
            intercept[bounded_below] = (
                gradient[bounded_below] * -box.low[bounded_below] + low[bounded_below]
            )
            lower, upper = low.astype(box.dtype), high.astype(box.dtype)
        if not (
            (lower < upper) & (gradient > 0) & np.isfinite(gradient) & np.isfinite(intercept)
        ).all():
            raise ValueError(
                f"{name} needs bounds that {box.dtype} can represent and tell apart, but got {self!r} for {box}."
            )
        self.register_buffer("gradient", torch.as_tensor(gradient, device=device), persistent=False)
        self.register_buffer(
            "intercept", torch.as_tensor(intercept, device=device), persistent=False
        )
        return gymnasium.spaces.Box(lower, upper, box.shape, box.dtype)


class RescaleObservation(_Rescale, ObservationTransform):
    """Maps observations affinely from the bounds of their space to [min_obs, max_obs], without clipping.

    The formula is the one of Gymnasium's `rescale_box`.

    Args:
        min_obs: the new lower bound, a number or an array that broadcasts to the shape of the observation. It must be infinite
            exactly where the old bound is.
        max_obs: the new upper bound, with the same rules.

    Shape: a Box of floats to a Box of the same shape and dtype. For integers, such as images, put `DtypeObservation` below.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> box = gymnasium.spaces.Box(0, 8, (3,), np.float32)
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=box), RescaleObservation(-1, 1))
    >>> env.reset()["observation"]  # of 0, 2 and 4
    tensor([[-1.0000, -0.5000,  0.0000]])
    """

    def __init__(self, min_obs: float | Any, max_obs: float | Any) -> None:
        super().__init__()
        self._set_bounds("min_obs < max_obs", min_obs, max_obs)
        self.min_obs, self.max_obs = min_obs, max_obs

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box(
            "RescaleObservation", "observation", signature.single_observation_space, of="floats"
        )
        return signature.replace(
            single_observation_space=self._rescale("an observation", box, signature.device)
        )

    def observation(self, observation: Tensor) -> Tensor:
        return self.gradient * observation + self.intercept


class RescaleAction(_Rescale, ActionTransform):
    """Maps actions affinely from [min_action, max_action] to the bounds of the action space below, without clipping.

    The formula is the one of Gymnasium's `rescale_box`.

    Args:
        min_action: the agent's lower bound, a number or an array that broadcasts to the shape of the action.
        max_action: the agent's upper bound, with the same rules.

    Shape: a Box of floats with finite bounds; the space above has the same shape and dtype.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=gymnasium.spaces.Box(0, 10, (1,))), RescaleAction(-1, 1))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[0.5]])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([[7.5000]])
    """

    def __init__(self, min_action: float | Any, max_action: float | Any) -> None:
        super().__init__()
        self._set_bounds("finite min_action < max_action", min_action, max_action, finite=True)
        self.min_action, self.max_action = min_action, max_action

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("RescaleAction", "action", signature.single_action_space, of="floats")
        if not (np.isfinite(box.low) & np.isfinite(box.high)).all():
            raise ValueError(
                f"RescaleAction needs an action space with finite bounds, but got {box}."
            )
        return signature.replace(
            single_action_space=self._rescale("an action", box, signature.device)
        )

    def action(self, action: Tensor) -> Tensor:
        return (action - self.intercept) / self.gradient
