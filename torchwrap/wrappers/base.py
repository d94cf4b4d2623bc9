"""Wrappers: envs around an env. Transforms go through TransformedEnv; write a Wrapper only to drive the env itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from torchwrap import recipe
from torchwrap.buffer import Submodule
from torchwrap.env import Env
from torchwrap.random import Stream
from torchwrap.spaces import Value
from torchwrap.transforms.base import Compose, Transform


class Wrapper(Env):
    """An env that holds another as `.env` and passes everything on; override `_step`, `_reset`, or both.

    Attributes of inner layers are reached as in Gymnasium, with `get_wrapper_attr(name)`; there is no silent forwarding.
    """

    env = Submodule()

    def __init__(self, env: Env) -> None:
        if not isinstance(env, Env):
            hint = "torchwrap.make and torchwrap.interop.gymnasium.from_gymnasium give one"
            raise TypeError(f"{type(self).__name__} needs a torchwrap.Env first, but got {type(env).__name__}: {hint}.")
        if "_advance" in vars(env) or "_transform_reset" in vars(env):
            raise ValueError(f"{type(self).__name__} needs an env that is not compiled yet, but got {env!r}: compile it last.")
        super().__init__(env.signature, spec=env._spec, metadata=env.metadata, render_mode=env.render_mode)
        self.env = env
        self.action_stream = env.action_stream  # one a stack, so that wrapping does not change what is sampled
        self.can_snapshot = env.can_snapshot

    def _step(self, td: TensorDict) -> TensorDict:
        return self.env._step(td)

    def _reset(self, mask: Tensor, **keywords: Any) -> TensorDict:
        return self.env._reset(mask, **keywords)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if "options" not in inspect.signature(self._reset).parameters:  # but **keywords, which go to the env below
            self.env._check_options(options)

    def _seed(self, seed: int, mask: Tensor) -> None:
        super()._seed(seed, mask)
        self.env._seed(seed, mask)

    @property
    def unwrapped(self) -> Env:
        return self.env.unwrapped

    @property
    def spec(self) -> Any:
        below = self.env.spec
        if below is None:
            return None
        return recipe.replace(below, additional_wrappers=(*below.additional_wrappers, recipe.record(self)))

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        return self.env.render(envs)

    def close(self) -> None:
        self.env.close()

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether this layer or one below has the attribute."""
        return self._owner(name) is not None

    def get_wrapper_attr(self, name: str) -> Any:
        """The attribute of the outermost layer that has it."""
        owner = self._owner(name)
        if owner is None:
            raise AttributeError(f"{self!r} needs a layer with the attribute {name!r}, but got none.")
        return getattr(owner, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets the attribute on the outermost layer that has it, else, with `force`, on this one; whether it did."""
        owner = self._owner(name)
        if owner is None and not force:
            return False
        setattr(owner or self, name, value)
        return True

    def _owner(self, name: str) -> Env | None:
        layer: Env = self
        while not hasattr(layer, name):
            if not isinstance(layer, Wrapper):
                return None
            layer = layer.env
        return layer

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self.env!r}>"


class TransformedEnv(Wrapper):
    """An env with transforms on it, which is an env.

    Args:
        env: the env below.
        transforms: innermost first: the first one is nearest to the env.

    >>> from torchwrap.testing import ScriptedEnv
    >>> from torchwrap import transforms as T
    >>> TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1), T.TimeLimit(9))
    <TimeLimit(max_episode_steps=9)<ClipReward(min_reward=-1, max_reward=1)<ScriptedEnv(num_envs=2, device=cpu)>>>
    """

    transform = Submodule()

    def __init__(self, env: Env, *transforms: Transform) -> None:
        transform = transforms[0] if len(transforms) == 1 else Compose(transforms)
        if not isinstance(transform, Transform):
            hint = "give them one after the other, or in a Compose"
            raise TypeError(f"TransformedEnv needs Transforms, but got {type(transform).__name__}: {hint}.")
        for part in transform.flat():
            if part.in_use:
                raise ValueError(
                    f"TransformedEnv needs transforms of its own, but got {part!r} of another env. "
                    "Make a new one; load_state_dict() hands on what it has learned."
                )
        super().__init__(env)
        self.signature = transform.setup(env.signature.replace(device=env.device))
        self.transform = transform
        self.streams = [module for module in transform.modules() if isinstance(module, Stream)]
        self.acts = any(type(part).action is not Transform.action for part in transform.flat())
        for part in transform.flat():
            part.in_use = True

    def _step(self, td: TensorDict) -> TensorDict:
        return self._transform_step(self._step_below(td["action"]))

    def _succeed(self, action: Value) -> tuple[TensorDict, Value]:
        return self._conclude(self._step_below(action))

    def _step_below(self, action: Value) -> TensorDict:
        for stream in self.streams:
            stream.next_draw()
        if self.acts:
            action = self.transform.action(action)
        return self.env._step(TensorDict({"action": action}, batch_size=[self.num_envs]))

    def _reset(self, mask: Tensor, **keywords: Any) -> TensorDict:
        for stream in self.streams:
            stream.next_episode(mask)
        return self._transform_reset(self.env._reset(mask, **keywords), mask)

    @property
    def transforms(self) -> list[Transform]:
        """As they were given: the one, or the one that they became."""
        return [self.transform]

    # A method each, so that each can be a graph where a foreign simulator is below.

    def _conclude(self, td: TensorDict) -> tuple[TensorDict, Value]:
        return super()._conclude(self._transform_step(td))

    def _transform_step(self, td: TensorDict) -> TensorDict:
        return self.transform.step(td)

    def _transform_reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        return self.transform.reset(td, mask)

    def __repr__(self) -> str:
        text = repr(self.env)
        for transform in self.transform.flat():
            text = f"<{transform!r}{text}>"
        return text
