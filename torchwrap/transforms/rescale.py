"""Affine transforms between two boxes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap.buffer import Buffer
from torchwrap.spaces import Signature
from torchwrap.transforms.base import ActionTransform, ObservationTransform


def _bounds(name: str, what: tuple[str, str], low: Any, high: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    try:
        given = [np.asarray(bound) for bound in (low, high)]
        ordered = all(bound.dtype.kind in "iuf" for bound in given) and bool((given[0] < given[1]).all())
    except (TypeError, ValueError, RuntimeError):
        ordered = False
    if not ordered:
        raise ValueError(f"{name} needs {what[0]} < {what[1]}, but got {low!r} and {high!r}.")
    lower, upper = np.broadcast_arrays(*given)  # in their own dtypes, with which Gymnasium computes
    return lower, upper


def _rescale(owner: nn.Module, box: gymnasium.spaces.Box, low: Any, high: Any, device: torch.device) -> gymnasium.spaces.Box:
    # Gymnasium's rescale_box, rounded where it rounds: new = gradient * old + intercept. Where a side is unbounded, the other
    # is only shifted.
    low, high = (np.broadcast_to(bound, box.shape) for bound in (low, high))
    below, above = np.isfinite(low), np.isfinite(high)
    both = below & above
    gradient, intercept = np.ones(box.shape, box.dtype), np.zeros(box.shape, box.dtype)
    with np.errstate(all="ignore"):
        gradient[both] = (high[both] - low[both]) / (box.high[both].astype(np.longdouble) - box.low[both])
        intercept[above] = high[above] - box.high[above]
        intercept[below] = gradient[below] * -box.low[below] + low[below]
        lower, upper = low.astype(box.dtype), high.astype(box.dtype)
    if not ((lower < upper) & (gradient > 0) & np.isfinite(gradient) & np.isfinite(intercept)).all():
        name = type(owner).__name__
        raise ValueError(f"{name} needs bounds that {box.dtype} holds and tells apart, but got {owner!r} for {box}.")
    for name, value in (("gradient", gradient), ("intercept", intercept)):
        owner.register_buffer(name, torch.as_tensor(value, device=device), persistent=False)
    return gymnasium.spaces.Box(lower, upper, box.shape, box.dtype)


def _fits(name: str, what: str, box: gymnasium.spaces.Box, shape: tuple[int, ...]) -> None:
    try:
        fits = np.broadcast_shapes(shape, box.shape) == box.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} needs bounds that fit shape {box.shape}, but got {shape}.")
    if not (box.low < box.high).all():
        raise ValueError(f"{name} needs {what} space with low < high, but got {box}.")


class RescaleObservation(ObservationTransform):
    """Maps observations from their bounds to [min_obs, max_obs], affinely and without clipping.

    Args:
        min_obs: the new lower bound, a number or an array of the observation's shape; infinite exactly where the old one is.
        max_obs: the new upper bound.

    Shape: a Box of floats to a Box of the same shape and dtype. For integers, such as images, put `DtypeObservation` below.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> box = gymnasium.spaces.Box(0, 8, (3,), np.float32)
    >>> env = TransformedEnv(ScriptedEnv(1, observation_space=box), RescaleObservation(-1, 1))
    >>> env.reset()["observation"]  # of 0, 2 and 4
    tensor([[-1.0000, -0.5000,  0.0000]])
    """

    gradient = Buffer()
    intercept = Buffer()

    def __init__(self, min_obs: float | Any, max_obs: float | Any) -> None:
        super().__init__()
        _bounds("RescaleObservation", ("min_obs", "max_obs"), min_obs, max_obs)
        self.min_obs = min_obs
        self.max_obs = max_obs

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("RescaleObservation", "observation", signature.single_observation_space, of="floats")
        low, high = _bounds("RescaleObservation", ("min_obs", "max_obs"), self.min_obs, self.max_obs)
        _fits("RescaleObservation", "an observation", box, low.shape)
        for new, old in ((low, box.low), (high, box.high)):
            if not np.array_equal(np.where(np.isinf(new), new, 0) + np.zeros(box.shape), np.where(np.isinf(old), old, 0)):
                raise ValueError(
                    f"RescaleObservation needs bounds that are infinite where those of {box} are, "
                    f"but got {self.min_obs!r} and {self.max_obs!r}."
                )
        return signature.replace(single_observation_space=_rescale(self, box, low, high, signature.device))

    def observation(self, observation: Tensor) -> Tensor:
        return self.gradient * observation + self.intercept


class RescaleAction(ActionTransform):
    """Maps actions from [min_action, max_action] to the env's bounds, affinely and without clipping.

    Args:
        min_action: the agent's lower bound, a number or an array of the action's shape.
        max_action: the agent's upper bound.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=gymnasium.spaces.Box(0, 10, (1,))), RescaleAction(-1, 1))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[0.5]])))
    >>> transition["next", "info", "action"]  # what a ScriptedEnv got
    tensor([[7.5000]])
    """

    gradient = Buffer()
    intercept = Buffer()

    def __init__(self, min_action: float | Any, max_action: float | Any) -> None:
        super().__init__()
        low, high = _bounds("RescaleAction", ("finite min_action", "max_action"), min_action, max_action)
        if not (np.isfinite(low) & np.isfinite(high)).all():
            raise ValueError(f"RescaleAction needs finite min_action < max_action, but got {min_action!r} and {max_action!r}.")
        self.min_action = min_action
        self.max_action = max_action

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("RescaleAction", "action", signature.single_action_space, of="floats")
        if not (np.isfinite(box.low) & np.isfinite(box.high)).all():
            raise ValueError(f"RescaleAction needs an action space with finite bounds, low < high, but got {box}.")
        low, high = _bounds("RescaleAction", ("finite min_action", "max_action"), self.min_action, self.max_action)
        _fits("RescaleAction", "an action", box, low.shape)
        return signature.replace(single_action_space=_rescale(self, box, low, high, signature.device))

    def action(self, action: Tensor) -> Tensor:
        return (action - self.intercept) / self.gradient
