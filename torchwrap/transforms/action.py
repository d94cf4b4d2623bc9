"""Transforms of actions, from what the agent chose to what the env gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from torchwrap import spaces
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.base import ActionTransform


class TransformAction(ActionTransform):
    """Applies a function to the batch of actions, before the env gets them.

    Args:
        func: takes actions as `action_space` has them, with `num_envs` in front, and gives new ones as the env needs them.
        action_space: what one agent's action is; as the env's where None.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=gymnasium.spaces.Box(-1, 1, (1,))), TransformAction(torch.tanh))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[0.5]])))
    >>> transition["next", "info", "action"]  # what a ScriptedEnv got
    tensor([[0.4621]])
    """

    def __init__(self, func: Callable[[Value], Value], action_space: Space[Any] | None = None) -> None:
        super().__init__()
        if not callable(func):
            raise TypeError(f"TransformAction needs a callable func, but got {func!r}.")
        if action_space is not None and not isinstance(action_space, Space):
            raise TypeError(f"TransformAction needs a gymnasium Space as action_space, but got {action_space!r}.")
        self.func = func
        self.action_space = action_space

    def setup(self, signature: Signature) -> Signature:
        below, n, device = signature.single_action_space, signature.num_envs, signature.device
        space = below if self.action_space is None else self.action_space
        given = self.func(spaces.zeros(space, n, device))
        spaces.check("TransformAction", "func to give actions", below, given, n, device)
        return signature.replace(single_action_space=space)

    def action(self, action: Value) -> Value:
        return self.func(action)


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
        space = spaces.box("ClipAction", "action", signature.single_action_space, floats=True)
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
