"""Transforms of actions, from what the agent chose to what the env gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from tensordict import TensorDict
from torch import Tensor

from torchwrap import arguments, masks, random, spaces
from torchwrap.buffer import Buffer
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.base import ActionTransform, Transform


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
        self.func = func
        self.action_space = spaces.argument("TransformAction", "action_space", action_space)

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_action_space
        space = below if self.action_space is None else self.action_space
        spaces.check_function("TransformAction", "actions", self.func, space, below, signature)
        return signature.replace(single_action_space=space)

    def action(self, action: Value) -> Value:
        return self.func(action)


class StickyAction(Transform):
    """Does the last action again, by chance: Machado and others, "Revisiting the Arcade Learning Environment", 2018.

    Args:
        repeat_action_probability: how probable it is that a series of repeats begins, in [0, 1).
        repeat_action_duration: how many steps a series lasts; a pair of bounds for a number that is drawn.

    An episode's first action is always the agent's.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> space = gymnasium.spaces.Box(-1, 1, (1,))
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=space), StickyAction(0.999, repeat_action_duration=(2, 3)))
    >>> td = env.reset(seed=0)
    >>> for number in range(3):
    ...     transition, td = env.step(td.set("action", torch.tensor([[number / 2]])))
    >>> transition["next", "info", "action"]  # what a ScriptedEnv got
    tensor([[0.]])
    """

    acted = Buffer()
    left = Buffer()

    def __init__(self, repeat_action_probability: float, repeat_action_duration: int | tuple[int, int] = 1) -> None:
        super().__init__()
        self.repeat_action_probability = arguments.probability(
            "StickyAction", "repeat_action_probability", repeat_action_probability
        )
        self.repeat_action_duration = repeat_action_duration
        bounds = repeat_action_duration if isinstance(repeat_action_duration, tuple | list) else (repeat_action_duration,) * 2
        if len(bounds) != 2:
            raise ValueError(f"StickyAction needs repeat_action_duration as one number or two, but got {bounds!r}.")
        name, most = "repeat_action_duration", 2**31  # of that many, random.integers can draw one
        self.shortest = arguments.integer("StickyAction", name, bounds[0], at_least=1, at_most=most)
        self.longest = arguments.integer("StickyAction", name, bounds[1], at_least=self.shortest, at_most=most)

    def setup(self, signature: Signature) -> Signature:
        n, space = signature.num_envs, signature.single_action_space
        self.last = {path: f"last_{number}" for number, (path, _) in enumerate(spaces.leaves(space))}
        zeros = spaces.zeros(space, n, signature.device)
        for path, name in self.last.items():
            self.register_rows(name, zeros[path] if path else zeros)
        for name, dtype in (("acted", torch.bool), ("left", torch.int64)):
            self.register_rows(name, torch.zeros(n, dtype=dtype, device=signature.device))
        self.stream, signature = signature.stream()
        return signature

    def action(self, action: Value) -> Value:
        key, left = self.stream.key(), self.left
        begins = self.acted & (left == 0) & (random.uniform(key) < self.repeat_action_probability)
        left = torch.where(begins, random.integers(key.part(1), self.longest - self.shortest + 1) + self.shortest, left)
        repeats = left > 0

        def latest(path: tuple[str, ...], chosen: Tensor) -> Tensor:
            last = self.get_buffer(self.last[path])
            last.copy_(masks.where(repeats, last, chosen))
            return last.clone()

        self.left.copy_((left - 1).clamp(min=0))
        self.acted.fill_(True)
        return spaces.apply(latest, action)

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        self.acted.masked_fill_(mask, False)
        self.left.masked_fill_(mask, 0)
        return td


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
        space = spaces.box("ClipAction", "action", signature.single_action_space, of="floats")
        uniform = all(np.unique(bound).size == 1 for bound in (space.low, space.high))
        for name, bound in (("low", space.low), ("high", space.high)):
            for held in (self.__dict__, self._buffers):
                held.pop(name, None)
            if uniform:
                setattr(self, name, float(bound.flat[0]))  # one number for all clips several times faster
            else:
                self.register_buffer(name, torch.as_tensor(bound, device=signature.device), persistent=False)
        unbounded: gymnasium.spaces.Box = gymnasium.spaces.Box(-np.inf, np.inf, space.shape, space.dtype)
        return signature.replace(single_action_space=unbounded)

    def action(self, action: Tensor) -> Tensor:
        return action.clamp(self.low, self.high)
