"""TransformedEnv: an env with transforms on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict

from torchwrap._core.env_buffers import BatchedModule
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.random import Stream
from torchwrap.spaces import Value
from torchwrap.transforms.compose import Compose
from torchwrap.transforms.transform import Transform
from torchwrap.wrappers.wrapper import Wrapper


class TransformedEnv(Wrapper):
    """An env with transforms on it, which is an env.

    `transforms` is always a `Compose`, with `len`, iteration, indexing and slicing.

    Args:
        env: the env to wrap.
        transforms: innermost first: the first one is nearest to the env. A single `Compose` is taken as it is.

    Raises:
        TypeError, ValueError: if a transform does not fit the spaces below it, or belongs to another env. The message names
            its position.

    >>> from torchwrap.testing import ScriptedEnv
    >>> from torchwrap import transforms as T
    >>> env = TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1), T.TimeLimit(9))
    >>> env
    <TimeLimit(max_episode_steps=9)<ClipReward(min_reward=-1, max_reward=1)<ScriptedEnv(num_envs=2, device=cpu)>>>
    >>> env.transforms[-1]
    TimeLimit(max_episode_steps=9)
    """

    def __init__(self, env: Env, *transforms: Transform) -> None:
        composed = transforms[0] if len(transforms) == 1 and isinstance(transforms[0], Compose) else Compose(transforms)
        parts = [module for module in composed.modules() if isinstance(module, Transform) and not isinstance(module, Compose)]
        for part in parts:
            if part.attached:
                got = f"{part!r} of another one. Make a new one; load_state_dict() copies what the old one has learned"
                raise ValueError(f"TransformedEnv needs transforms that belong to no other env, but got {got}.")
        super().__init__(env)
        self.signature = composed.setup(env.signature)
        self.transforms = composed
        self._compiled_step: Callable[[TensorDict], TensorDict] | None = None  # takes the place of `transforms.step`
        self._compiled_reset: Callable[[TensorDict, RowMask], TensorDict] | None = None
        self._streams = [module for module in composed.modules() if isinstance(module, Stream)]
        for part in parts:
            part.attached = True
            part._fix()

    def _step(self, action: Value) -> TensorDict:
        for stream in self._streams:
            stream.next_draw()
        return (self._compiled_step or self.transforms.step)(self.env._step(self.transforms.action(action)))

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        for stream in self._streams:
            stream.next_episode(mask)
        return (self._compiled_reset or self.transforms.reset)(self.env._reset(mask, options), mask)

    @property
    def is_compiled(self) -> bool:
        return self._compiled_step is not None or super().is_compiled

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_compiled_step": None, "_compiled_reset": None}

    def _parts(self) -> list[BatchedModule]:
        return [self, *reversed(list(self.transforms.flat()))]

    def __repr__(self) -> str:
        text = repr(self.env)
        for transform in self.transforms.flat():
            text = f"<{transform!r}{text}>"
        return text
