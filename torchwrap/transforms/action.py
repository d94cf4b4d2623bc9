"""Transforms of actions, on their way from the agent to the env."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box
from numpy.typing import ArrayLike
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.transform import ActionTransform


class TransformAction(ActionTransform):
    """Applies a function to the batch of actions before they reach the env.

    Args:
        func: takes a batch of actions `(num_envs, *shape)` of `action_space` (a TensorDict for
            `Dict` and `Tuple` spaces), and returns new ones of the action space below.
        action_space: the space of a single agent's action. None keeps the space below.

    Raises:
        TypeError, ValueError: from `setup`, if `func` fails on a batch of zeros or returns actions
            that do not fit the space.

    >>> import torch; from torchwrap.testing import ScriptedEnv
    >>> from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, action_space=Box(-1, 1, (1,)))
    >>> env = TransformedEnv(env, TransformAction(torch.tanh))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[0.5]])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([[0.4621]])
    """

    def __init__(
        self, func: Callable[[Value], Value], action_space: Space[Any] | None = None
    ) -> None:
        super().__init__()
        self.func = validation.function("TransformAction", "func", func)
        self.action_space = spaces.optional_space("TransformAction", "action_space", action_space)

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_action_space
        above = self.action_space or below
        spaces.check_function("TransformAction", "actions", self.func, above, below, signature)
        return signature.replace(single_action_space=above)

    def action(self, action: Value) -> Value:
        return self.func(action)


class ClipAction(ActionTransform):
    """Clips actions to the bounds of the space, so that a policy may return any real numbers.

    Shape: a Box of floats. The space above has the same shape and dtype, but no bounds.

    >>> import torch; from torchwrap.testing import ScriptedEnv
    >>> from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=Box(-1, 1, (1,))), ClipAction())
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[3.0]])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([[1.]])
    """

    low: Tensor
    high: Tensor

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("ClipAction", "action", signature.single_action_space, of="floats")
        self._register_constants(signature.device, low=box.low, high=box.high)
        above = Box(-np.inf, np.inf, box.shape, box.dtype)
        return signature.replace(single_action_space=above)

    def action(self, action: Tensor) -> Tensor:
        return action.clamp(self.low, self.high)


class AffineAction(ActionTransform):
    """Scales and shifts actions, such as for the joints of a robot: `scale * action + offset`.

    As Isaac Lab's `JointAction`: the agent's action is a change from default positions, the offset.

    Args:
        scale, offset: finite numbers, or arrays that broadcast to the action.

    Shape: a Box of floats. The space above has the same shape and dtype, but no bounds, so a
    `ClipAction` belongs below.

    >>> import torch; from torchwrap.testing import ScriptedEnv
    >>> from torchwrap.wrappers import TransformedEnv
    >>> env = ScriptedEnv(1, action_space=Box(-9, 9, (2,)))
    >>> env = TransformedEnv(env, AffineAction(0.5, offset=[0, 1]))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[3.0, -4.0]])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([[ 1.5000, -1.0000]])
    """

    slope: Tensor
    intercept: Tensor

    def __init__(self, scale: ArrayLike, offset: ArrayLike = 0.0) -> None:
        super().__init__()
        lowest = -sys.float_info.max
        self.scale = validation.numbers("AffineAction", "scale", scale, lowest)
        self.offset = validation.numbers("AffineAction", "offset", offset, lowest)

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("AffineAction", "action", signature.single_action_space, of="floats")
        self._register_coefficients(box, signature.device, slope="scale", intercept="offset")
        above = Box(-np.inf, np.inf, box.shape, box.dtype)
        return signature.replace(single_action_space=above)

    def action(self, action: Tensor) -> Tensor:
        return self.slope * action + self.intercept
