"""Transform: four hooks over a TensorDict, the one-method bases for the common cases, and Compose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import masks
from torchwrap.buffer import Module
from torchwrap.spaces import Signature, Value


class Transform(Module):
    """What happens to actions on their way into an env, and to observations and rewards on their way out.

    A transform knows a signature and a TensorDict, never an env. Override the hooks whose data you change; each is the
    identity by default. `td` has batch size `(num_envs,)` and may be written to; `mask` is bool, `(num_envs,)`, and may not.

    | hook | job |
    |---|---|
    | `setup(signature) -> signature` | checks and changes the description, allocates buffers |
    | `action(action) -> action` | the agent's action to the env's; a new tensor; runs outermost first |
    | `step(td) -> td` | the successor: `observation`, `reward`, `terminated`, `truncated`, `info` |
    | `reset(td, mask) -> td` | first observations where `mask`; other rows neither change nor count |

    What is learned goes into persistent buffers that do not depend on `num_envs`; what belongs to running episodes into
    buffers made by `register_rows(name, tensor)`, of which a graph may show `reset` a few rows alone. Buffers are written in
    place and never handed out. Constructor arguments are kept under their own names. No hook may look at values on the host:
    masks and `torch.where` instead.
    """

    in_use = False
    """Whether an env has it; a transform has room for the state of one."""

    def __init__(self) -> None:
        super().__init__()  # and so takes no arguments, where nn.Module takes any

    def setup(self, signature: Signature) -> Signature:
        return signature

    def action(self, action: Value) -> Value:
        return action

    def step(self, td: TensorDict) -> TensorDict:
        return td

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        return td

    def forward(self, td: TensorDict) -> TensorDict:
        """Transforms a TensorDict of any batch size outside an env, where no memory is needed."""
        raise TypeError(f"{self!r} needs an env around it, for it remembers; but got a call of its own.")

    def flat(self) -> Iterator[Transform]:
        """The transforms this one consists of, innermost first."""
        yield self

    def _alone(self, td: TensorDict, key: str, function: Callable[[Value], Value]) -> TensorDict:
        try:
            value = function(td[key])
        except AttributeError as error:
            message = f"{self!r} needs to have been on an env, which tells it the spaces, but got a call of its own: {error}"
            raise RuntimeError(message) from error
        return td.copy().set(key, value)

    def extra_repr(self) -> str:
        names = inspect.signature(type(self).__init__).parameters
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name))
        return " ".join(shown.split())  # one line, arrays too

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class ObservationTransform(Transform):
    """Base for transforms of each observation by itself: write `observation`, and `setup` where the space changes."""

    costly = False
    """Whether to compute, of a reset's observations (one tensor), only those in the mask where the host can look at it."""

    def observation(self, observation: Value) -> Value:
        raise NotImplementedError

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("observation", self.observation(td["observation"]))

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        observation = td["observation"]
        first = masks.only(mask, observation, self.observation) if self.costly else self.observation(observation)
        return td.set("observation", first)

    def forward(self, td: TensorDict) -> TensorDict:
        return self._alone(td, "observation", self.observation)


class RewardTransform(Transform):
    """Base for transforms of each reward by itself: write `reward`, which gets `(num_envs, 1)`."""

    def reward(self, reward: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, td: TensorDict) -> TensorDict:
        return td.set("reward", self.reward(td["reward"]))

    def forward(self, td: TensorDict) -> TensorDict:
        return self._alone(td, "reward", self.reward)


class ActionTransform(Transform):
    """Base for transforms of each action by itself: write `action`, and `setup` where the space changes."""

    def action(self, action: Value) -> Value:
        raise NotImplementedError

    def forward(self, td: TensorDict) -> TensorDict:
        return self._alone(td, "action", self.action)


class Compose(Transform):
    """Several transforms as one, innermost first: observations and rewards go through in order, actions in reverse.

    Args:
        transforms: the transforms; none of them is the identity.

    >>> from torchwrap import transforms as T
    >>> Compose([T.ClipReward(-1, 1), T.TimeLimit(9)])
    Compose([ClipReward(min_reward=-1, max_reward=1), TimeLimit(max_episode_steps=9)])
    """

    transforms: Any  # an nn.ModuleList, of Transforms

    def __init__(self, transforms: Iterable[Transform]) -> None:
        super().__init__()
        single = isinstance(transforms, Transform | str | bytes | Mapping | Tensor | np.ndarray)
        if single or not isinstance(transforms, Iterable):
            raise TypeError(f"Compose needs a list of Transforms, but got {transforms!r}.")
        transforms = list(transforms)
        for position, transform in enumerate(transforms):
            if not isinstance(transform, Transform):
                raise TypeError(f"Compose needs Transforms, but got {type(transform).__name__} at transforms[{position}].")
        self.transforms = nn.ModuleList(transforms)
        parts = list(self.flat())
        for position, part in enumerate(parts):
            if any(part is other for other in parts[:position]):
                raise ValueError(f"Compose needs each transform once, but got {part!r} twice: each has state of its own.")

    def setup(self, signature: Signature) -> Signature:
        for position, transform in enumerate(self.transforms):
            try:
                signature = transform.setup(signature)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"transforms[{position}] ({type(transform).__name__}): {error}") from error
        # Plain tuples of those that do something: walking a ModuleList costs more than a small operator.
        self._hooks = {
            hook: tuple(part for part in self.transforms if getattr(type(part), hook) is not getattr(Transform, hook))
            for hook in ("action", "step", "reset")
        }
        return signature

    def action(self, action: Value) -> Value:
        for transform in reversed(self._hooks["action"]):
            action = transform.action(action)
        return action

    def step(self, td: TensorDict) -> TensorDict:
        for transform in self._hooks["step"]:
            td = transform.step(td)
        return td

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        for transform in self._hooks["reset"]:
            td = transform.reset(td, mask)
        return td

    def forward(self, td: TensorDict) -> TensorDict:
        parts = list(self.flat())
        for transform in (part for part in parts if not isinstance(part, ActionTransform)):
            td = transform(td)
        for transform in (part for part in reversed(parts) if isinstance(part, ActionTransform)):
            td = transform(td)
        return td

    def flat(self) -> Iterator[Transform]:
        for transform in self.transforms:
            yield from transform.flat()

    def __repr__(self) -> str:
        return f"Compose([{', '.join(map(repr, self.transforms))}])"
