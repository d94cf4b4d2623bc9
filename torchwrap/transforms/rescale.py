"""Affine maps from one Box to another."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import ActionTransform, ObservationTransform, Transform


class _Rescale(Transform):
    """Base of both directions: new = gradient * old + intercept, rounded as in `rescale_box`."""

    names: str  # both bounds, for messages
    limit = math.inf  # largest size of a bound
    gradient: Tensor
    intercept: Tensor
    domain: Tensor
    codomain: Tensor

    def __init__(
        self,
        low: Any,
        high: Any,
    ) -> None:
        super().__init__()
        # The bounds keep their dtypes, because Gymnasium computes in them.
        self.bounds = f"{validation.shown(low)} and {validation.shown(high)}"
        try:
            bounds = map(validation.on_host, (low, high))
            self.low, self.high = np.broadcast_arrays(*bounds)
            kinds: set[str] = {self.low.dtype.kind, self.high.dtype.kind}
            fits = self.low < self.high
            fits &= np.maximum(-self.low, self.high).astype(float) <= self.limit
        except (TypeError, ValueError, RuntimeError):
            kinds = {""}
        if not kinds <= set("iuf") or not fits.all():
            must = f"{self.names} must be increasing numbers of size {self.limit:g} or less"
            raise ValueError(refusal(type(self).__name__, must, self.bounds))

    def setup(self, signature: Signature) -> Signature:
        # A dimension with a single finite bound is shifted, not scaled.
        owner = type(self).__name__
        name = f"single_{self._standalone}_space"
        box = spaces.box(owner, self._standalone, getattr(signature, name), of="floats")
        is_action = self._standalone == "action"
        if is_action and not box.is_bounded():
            must = "the action space below must have finite bounds"
            raise ValueError(refusal(owner, must, box))
        low = np.broadcast_to(self.low, box.shape)
        high = np.broadcast_to(self.high, box.shape)
        if not (box.low < box.high).all():
            raise ValueError(refusal(owner, "the space below must have low < high", box))
        has_low = np.isfinite(low)
        has_high = np.isfinite(high)
        dtype = box.dtype
        with np.errstate(all="ignore"):
            width = box.high.astype(np.longdouble) - box.low
            ratio = (high - low) / width
            gradient = np.where(has_low & has_high, ratio, 1).astype(dtype)
            intercept = np.where(has_high, high - box.high, 0)
            intercept = np.where(has_low, low - gradient * box.low, intercept).astype(dtype)
            new = Box(low.astype(dtype), high.astype(dtype), box.shape, dtype)
        fits = new.low < new.high
        fits &= has_low == np.isfinite(box.low)
        fits &= has_high == np.isfinite(box.high)
        fits &= (gradient > 0) & np.isfinite(gradient + intercept)
        if not fits.all():
            must = f"{self.names} must be infinite where {box} is, and distinct in {dtype}"
            raise ValueError(refusal(owner, must, self.bounds))
        domain, codomain = (new, box) if is_action else (box, new)
        self._register_constants(
            signature.device,
            gradient=gradient,
            intercept=intercept,
            domain=np.stack([domain.low, domain.high]),
            codomain=np.stack([codomain.low, codomain.high]),
        )
        self.is_exact = True
        self.is_exact = torch.equal(self._rescaled(self.domain), self.codomain)
        return signature.replace(**{name: new})

    def _rescaled(self, value: Tensor) -> Tensor:
        if self._standalone == "action":
            result = (value - self.intercept) / self.gradient
        else:
            result = self.gradient * value + self.intercept
        if self.is_exact:  # at the bounds. Both are monotonic, so nothing between is outside.
            return result
        is_inside = value == value.clamp(*self.domain)
        return torch.where(is_inside, result.clamp(*self.codomain), result)


class RescaleObservation(_Rescale, ObservationTransform):
    """Maps observations affinely from the bounds of their space to [min_obs, max_obs].

    The formula is the one of Gymnasium's `rescale_box`. Values outside of the bounds are not
    clipped; rounding moves no other value outside of the new bounds.

    Args:
        min_obs: the new lower bound, a number or an array that broadcasts to the shape of the
            observation. It must be infinite exactly where the old bound is.
        max_obs: the new upper bound, with the same rules.

    Shape: a Box of floats to a Box of the same shape and dtype. For integers, such as images, put
    `DtypeObservation` below.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, observation_space=Box(0, 8, (3,), np.float32))
    >>> env = TransformedEnv(env, RescaleObservation(-1, 1))
    >>> env.reset()["observation"]  # raw: 0, 2 and 4
    tensor([[-1.0000, -0.5000,  0.0000]])
    """

    names = "min_obs and max_obs"

    def __init__(
        self,
        min_obs: float | Any,
        max_obs: float | Any,
    ) -> None:
        super().__init__(min_obs, max_obs)
        self.min_obs = validation.on_host(min_obs)
        self.max_obs = validation.on_host(max_obs)

    observation = _Rescale._rescaled  # type: ignore[assignment]


class RescaleAction(_Rescale, ActionTransform):
    """Maps actions affinely from [min_action, max_action] to the bounds of the space below.

    The formula is the one of Gymnasium's `rescale_box`. Values outside of the bounds are not
    clipped; rounding moves no other value outside of the new bounds.

    Args:
        min_action: the agent's lower bound, a number or an array that broadcasts to the shape of
            the action.
        max_action: the agent's upper bound, with the same rules.

    Shape: a Box of floats with finite bounds; the space above has the same shape and dtype.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=Box(0, 10, (1,))), RescaleAction(-1, 1))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[0.5]])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([[7.5000]])
    """

    names = "min_action and max_action"
    limit = sys.float_info.max

    def __init__(
        self,
        min_action: float | Any,
        max_action: float | Any,
    ) -> None:
        super().__init__(min_action, max_action)
        self.min_action = validation.on_host(min_action)
        self.max_action = validation.on_host(max_action)

    action = _Rescale._rescaled  # type: ignore[assignment]
