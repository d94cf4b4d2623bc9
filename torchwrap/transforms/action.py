"""Transforms of actions, on their way from the agent to the env."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import Tensor

from torchwrap import random, spaces
from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Path, Signature, Value
from torchwrap.transforms.transform import ActionTransform, Transform


class TransformAction(ActionTransform):
    """Applies a function to the batch of actions before they reach the env.

    Args:
        func: takes a batch of actions `(num_envs, *shape)` of `action_space` (a TensorDict for
            `Dict` and `Tuple` spaces), and returns new ones of the action space below.
        action_space: the space of a single agent's action. None keeps the space below.

    Raises:
        TypeError, ValueError: from `setup`, if `func` fails on a batch of zeros or returns actions
            that do not fit the space.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
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


class StickyAction(Transform):
    """Repeats the previous action at random (sticky actions).

    At each step a series of repeats starts, unless one is running. The first action of an episode
    is always the agent's. Source: Machado et al., "Revisiting the Arcade Learning Environment",
    2018.

    Args:
        repeat_action_probability: probability that a series starts, in [0, 1).
        repeat_action_duration: number of steps in a series, or a pair (shortest, longest) from
            which it is drawn uniformly.

    Shape: any action space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> from gymnasium.spaces import Discrete
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=Discrete(9)), StickyAction(0.999))
    >>> _, td = env.step(env.reset(seed=0).set("action", torch.tensor([0])))
    >>> transition, _ = env.step(td.set("action", torch.tensor([1])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([0])
    """

    has_acted = EnvBuffer((), torch.bool)
    repeats_left = EnvBuffer((), torch.int64)

    def __init__(
        self, repeat_action_probability: float, repeat_action_duration: int | tuple[int, int] = 1
    ) -> None:
        super().__init__()
        self.repeat_action_probability = validation.probability(
            "StickyAction", "repeat_action_probability", repeat_action_probability
        )
        self.repeat_action_duration = repeat_action_duration
        # `random.integers` counts up to 2**31.
        self.shortest, self.longest = validation.interval(
            "StickyAction", "repeat_action_duration", repeat_action_duration, 1, 2**31
        )

    def setup(self, signature: Signature) -> Signature:
        self.buffer_names: dict[Path, str] = {}
        for path, leaf in spaces.leaves(signature.single_action_space):
            name = f"last_action_{len(self.buffer_names)}"
            self.buffer_names[path] = name
            zeros = spaces.zeros(leaf, signature.num_envs, signature.device)
            self.register_env_buffer(name, zeros)
        self.stream, signature = signature.stream()
        return signature

    def action(self, action: Value) -> Value:
        key = self.stream.key()
        can_start = self.has_acted & (self.repeats_left == 0)
        starts = can_start & (random.uniform(key) < self.repeat_action_probability)
        duration = random.integers(key.fold_in(1), self.shortest, self.longest + 1)
        repeats_left = torch.where(starts, duration, self.repeats_left)
        repeated = RowMask(repeats_left > 0)

        def choose(path: Path, chosen: Tensor) -> Tensor:
            last_action = self.get_buffer(self.buffer_names[path])
            last_action.copy_(repeated.where(last_action, chosen))
            return last_action.clone()

        self.repeats_left.copy_((repeats_left - 1).clamp(min=0))
        self.has_acted.fill_(True)
        return spaces.apply(choose, action)

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        mask.fill_(self.has_acted, False)
        mask.fill_(self.repeats_left, 0)
        return td


class ClipAction(ActionTransform):
    """Clips actions to the bounds of the space, so that a policy may return any real numbers.

    Shape: a Box of floats. The space above has the same shape and dtype, but no bounds.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
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
