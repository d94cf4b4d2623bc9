"""Transforms of actions, from what the agent chose to what the env gets."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from torchwrap.buffer import Buffer
from torchwrap.spaces import Signature
from torchwrap.transforms.base import ActionTransform


def _box(signature: Signature, name: str) -> gymnasium.spaces.Box:
    space = signature.single_action_space
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise TypeError(f"{name} needs a Box action space of floats, but got {space}.")
    return space


class ClipAction(ActionTransform):
    """Clips actions to the env's bounds, so that an agent may act without any.

    Shape: the action space becomes Box(-inf, inf) of the same shape and dtype.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=gymnasium.spaces.Box(-1, 1, (1,))), ClipAction())
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[3.0]])))
    >>> transition["next", "info", "action"]  # what a ScriptedEnv got
    tensor([[1.]])
    """

    low: Any  # a number, or a tensor of the action's shape
    high: Any

    def setup(self, signature: Signature) -> Signature:
        space = _box(signature, "ClipAction")
        for name, bound in (("low", space.low), ("high", space.high)):
            self.__dict__.pop(name, None)
            if (bound == bound.flat[0]).all():
                setattr(self, name, float(bound.flat[0]))  # one number for all clips several times faster
            else:
                self.register_buffer(name, torch.as_tensor(bound, device=signature.device), persistent=False)
        unbounded: gymnasium.spaces.Box = gymnasium.spaces.Box(-np.inf, np.inf, space.shape, space.dtype)
        return signature.replace(single_action_space=unbounded)

    def action(self, action: Tensor) -> Tensor:
        return action.clamp(self.low, self.high)


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
        try:
            low, high = np.broadcast_arrays(np.asarray(min_action, np.float64), np.asarray(max_action, np.float64))
            ordered = bool((np.isfinite(low) & np.isfinite(high) & (low < high)).all())
        except (TypeError, ValueError):
            ordered = False
        if not ordered:
            raise ValueError(f"RescaleAction needs finite min_action < max_action, but got {min_action!r} and {max_action!r}.")
        self.min_action = min_action
        self.max_action = max_action

    def setup(self, signature: Signature) -> Signature:
        space = _box(signature, "RescaleAction")
        if not (np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)).all():
            raise ValueError(f"RescaleAction needs an action space with finite bounds, low < high, but got {space}.")
        try:
            low, high = (np.broadcast_to(bound, space.shape) for bound in (self.min_action, self.max_action))
        except ValueError:
            shape = np.broadcast_shapes(np.shape(self.min_action), np.shape(self.max_action))
            raise ValueError(f"RescaleAction needs bounds that fit shape {space.shape}, but got {shape}.") from None
        # Gymnasium's rescale_box: env = (agent - intercept) / gradient, both formed in double precision.
        gradient = (np.float64(high) - low) / (space.high.astype(np.float64) - space.low)
        intercept = gradient * -space.low.astype(np.float64) + low
        for name, value in (("gradient", gradient), ("intercept", intercept)):
            tensor = torch.as_tensor(value.astype(space.dtype), device=signature.device)
            self.register_buffer(name, tensor, persistent=False)
        box: gymnasium.spaces.Box = gymnasium.spaces.Box(
            low.astype(space.dtype), high.astype(space.dtype), space.shape, space.dtype
        )
        return signature.replace(single_action_space=box)

    def action(self, action: Tensor) -> Tensor:
        return (action - self.intercept) / self.gradient
