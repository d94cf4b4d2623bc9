"""Transforms of actions, on their way from the agent to the env."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import random, spaces
from torchwrap._core import validation
from torchwrap._core.buffers import ConstantBuffer, EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.transform import ActionTransform, Transform


class TransformAction(ActionTransform):
    """Applies a function to the batch of actions before they reach the env.

    Args:
        func: takes a batch of actions `(num_envs, *shape)` of `action_space` (a TensorDict for `Dict` and `Tuple` spaces), and
            returns new ones of the action space below.
        action_space: the space of a single agent's action. None keeps the space below.

    Raises:
        TypeError, ValueError: from `setup`, if `func` fails on a batch of zeros or returns actions that do not fit the space.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=gymnasium.spaces.Box(-1, 1, (1,))), TransformAction(torch.tanh))
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[0.5]])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([[0.4621]])
    """

    def __init__(
        self, func: Callable[[Value], Value], action_space: gymnasium.Space[Any] | None = None
    ) -> None:
        super().__init__()
        self.func = validation.function("TransformAction", "func", func)
        self.action_space = spaces.optional_space("TransformAction", "action_space", action_space)

    def setup(self, signature: Signature) -> Signature:
        below = signature.single_action_space
        above = below if self.action_space is None else self.action_space
        spaces.check_function("TransformAction", "actions", self.func, above, below, signature)
        return signature.replace(single_action_space=above)

    def action(self, action: Value) -> Value:
        return self.func(action)


class StickyAction(Transform):
    """Repeats the previous action at random (sticky actions).

    At each step a series of repeats starts, unless one is running. The first action of an episode is always the agent's.
    Source: Machado et al., "Revisiting the Arcade Learning Environment", 2018.

    Args:
        repeat_action_probability: probability that a series starts, in [0, 1).
        repeat_action_duration: number of steps in a series, or a pair (shortest, longest) from which it is drawn uniformly.

    Shape: any action space, unchanged.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=gymnasium.spaces.Discrete(9)), StickyAction(0.999))
    >>> _, td = env.step(env.reset(seed=0).set("action", torch.tensor([0])))
    >>> env.step(td.set("action", torch.tensor([1])))[0]["next", "info", "action"]  # the action that the env received
    tensor([0])
    """

    has_acted = EnvBuffer((), torch.bool)
    repeats_left = EnvBuffer((), torch.int64)

    def __init__(
        self, repeat_action_probability: float, repeat_action_duration: int | tuple[int, int] = 1
    ) -> None:
        super().__init__()
        name, limit = (
            "repeat_action_duration",
            2**31,
        )  # the largest count that random.integers takes
        probability = validation.probability(
            "StickyAction", "repeat_action_probability", repeat_action_probability
        )
        self.repeat_action_probability, self.repeat_action_duration = (
            probability,
            repeat_action_duration,
        )
        bounds = (
            repeat_action_duration
            if isinstance(repeat_action_duration, tuple | list)
            else (repeat_action_duration,) * 2
        )
        if len(bounds) != 2:
            raise ValueError(
                f"StickyAction needs {name} as a number or a pair, but got {bounds!r}."
            )
        self.shortest = validation.integer("StickyAction", name, bounds[0], 1, limit)
        self.longest = validation.integer("StickyAction", name, bounds[1], self.shortest, limit)

    def setup(self, signature: Signature) -> Signature:
        space = signature.single_action_space
        self.buffer_names = {
            path: f"last_action_{number}" for number, (path, _) in enumerate(spaces.leaves(space))
        }
        for path, leaf in spaces.leaves(space):
            self.register_env_buffer(
                self.buffer_names[path], spaces.zeros(leaf, signature.num_envs, signature.device)
            )
        self.stream, signature = signature.stream()
        return signature

    def action(self, action: Value) -> Value:
        key, repeats_left = self.stream.key(), self.repeats_left
        starts = (
            self.has_acted
            & (repeats_left == 0)
            & (random.uniform(key) < self.repeat_action_probability)
        )
        duration = random.integers(key.fold_in(1), self.shortest, self.longest + 1)
        repeats_left = torch.where(starts, duration, repeats_left)
        repeated = RowMask(repeats_left > 0)

        def choose(path: tuple[str, ...], chosen: Tensor) -> Tensor:
            last_action = self.get_buffer(self.buffer_names[path])
            last_action.copy_(repeated.where(last_action, chosen))
            return last_action.clone()

        self.repeats_left.copy_((repeats_left - 1).clamp(min=0))
        self.has_acted.fill_(True)
        return spaces.apply(choose, action)

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        mask.fill_(self.has_acted, False)
        mask.fill_(self.repeats_left, 0)
        return td


class ClipAction(ActionTransform):
    """Clips actions to the bounds of the action space, so that a policy may return any real numbers.

    Shape: a Box of floats. The space above has the same shape and dtype, but no bounds.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, action_space=gymnasium.spaces.Box(-1, 1, (1,))), ClipAction())
    >>> transition, _ = env.step(env.reset().set("action", torch.tensor([[3.0]])))
    >>> transition["next", "info", "action"]  # the action that the env received
    tensor([[1.]])
    """

    low, high = ConstantBuffer(), ConstantBuffer()

    def setup(self, signature: Signature) -> Signature:
        box = spaces.box("ClipAction", "action", signature.single_action_space, of="floats")
        self.register_buffer(
            "low", torch.as_tensor(box.low, device=signature.device), persistent=False
        )
        self.register_buffer(
            "high", torch.as_tensor(box.high, device=signature.device), persistent=False
        )
        return signature.replace(
            single_action_space=gymnasium.spaces.Box(-np.inf, np.inf, box.shape, box.dtype)
        )

    def action(self, action: Tensor) -> Tensor:
        return action.clamp(self.low, self.high)
