"""Wrapper: an env around an env, for what must drive the env itself. TransformedEnv: an env with transforms on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap._core import spec as specs
from torchwrap._core.buffers import BatchedModule, EpisodeClock
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.random import Stream
from torchwrap.spaces import Value
from torchwrap.transforms.transform import Compose, Transform


class Wrapper(Env):
    """An env that holds another env as `.env` and passes everything on to it. Override `_step`, `_reset`, or both.

    As in Gymnasium, `get_wrapper_attr(name)` reaches the attributes of inner layers, and each transform is a layer. Nothing
    else forwards attributes.

    Args:
        env: the env to wrap. It must not be compiled: compile the outermost layer, last.

    >>> from torchwrap.testing import ScriptedEnv
    >>> class DoubleReward(Wrapper):
    ...     def _step(self, action):
    ...         successor = self.env._step(action)
    ...         return successor.set("reward", 2 * successor["reward"])
    >>> env = DoubleReward(ScriptedEnv(1))
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "reward"]
    tensor([[2.]])
    """

    is_passive = False
    """Whether observations and actions pass as they are, so that `deploy` leaves the wrapper out."""

    def __init__(self, env: Env) -> None:
        if not isinstance(env, Env):
            got = f"{type(env).__name__}: make one with torchwrap.make or torchwrap.from_gymnasium"
            raise TypeError(
                f"{type(self).__name__} needs an Env as its first argument, but got {got}."
            )
        if env.is_compiled:
            raise ValueError(
                f"{type(self).__name__} needs an env that is not compiled, but got {env!r}: compile it last."
            )
        super().__init__(
            env.signature, spec=env._spec, metadata=env.metadata, render_mode=env.render_mode
        )
        self.env = env
        self.action_stream = (
            env.action_stream
        )  # one per stack, so that wrapping does not change what is sampled
        self.can_snapshot, self.host_stepped, self._has_root_info = (
            env.can_snapshot,
            env.host_stepped,
            env._has_root_info,
        )

    def _step(self, action: Value) -> TensorDict:
        return (
            self.env._step(action)
            if "_step" in self.env._checked
            else self.env._first("_step", action)
        )

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        below = self.env
        return (
            below._reset(mask, options)
            if "_reset" in below._checked
            else below._first("_reset", mask, options)
        )

    def _check_options(self, options: Options) -> None:
        self.env._check_options(options)

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        self.env._seed(seed, mask)

    @property
    def is_compiled(self) -> bool:
        return super().is_compiled or self.env.is_compiled

    @property
    def unwrapped(self) -> Env:
        return self.env.unwrapped

    @property
    def spec(self) -> Any:
        below, limit = self.env.spec, self.signature.max_episode_steps
        if below and limit != self.env.signature.max_episode_steps:
            below = specs.limited(below, limit)
        return below and specs.replace(
            below, additional_wrappers=(*below.additional_wrappers, specs.record(self))
        )

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        return self.env.render(envs)

    def close(self) -> None:
        self.env.close()

    def has_wrapper_attr(self, name: str) -> bool:
        return self._owner(name) is not None or self.env.has_wrapper_attr(name)

    def get_wrapper_attr(self, name: str) -> Any:
        owner = self._owner(name)
        return self.env.get_wrapper_attr(name) if owner is None else getattr(owner, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        owner = self._owner(name)
        if owner is None and self.env.set_wrapper_attr(name, value, force=False):
            return True
        if owner is not None or force:
            setattr(self if owner is None else owner, name, value)
        return owner is not None or force

    def _owner(self, name: str) -> nn.Module | None:
        return next((part for part in self._parts() if hasattr(part, name)), None)

    def _clocks(self) -> list[Tensor]:
        return [clock for part in self._parts() for clock in EpisodeClock.of(part)]

    def _read_clock(self) -> Tensor | None:
        own = super()._read_clock()
        return self.env._read_clock() if own is None else own

    def _write_clock(self, steps: Tensor) -> None:
        super()._write_clock(steps)
        self.env._write_clock(steps)

    def _load_from_state_dict(self, *args: Any) -> None:
        # Layers without state do not count: a stack with one more or fewer has the same checkpoints.
        state_dict, prefix = args[:2]
        given = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
        before, after = (
            sorted({_depth(name) for name in names}) for names in (given, self.state_dict())
        )
        if before != after and len(before) == len(after):
            for name, value in [(name, state_dict.pop(key)) for name, key in given.items()]:
                depth = _depth(name)
                state_dict[prefix + "env." * after[before.index(depth)] + name[4 * depth :]] = value
        super()._load_from_state_dict(*args)

    def _parts(self) -> list[BatchedModule]:
        """The modules of this layer that can own an attribute, outermost first."""
        return [self]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self.env!r}>"


def _depth(name: str) -> int:
    """The number of layers above the one that owns a tensor."""
    return 1 + _depth(name[4:]) if name.startswith("env.") else 0


def layers(env: Env) -> list[Env]:
    """The env and every env inside it, outermost first."""
    return [env, *layers(env.env)] if isinstance(env, Wrapper) else [env]


class TransformedEnv(Wrapper):
    """An env with transforms on it, which is an env.

    `transforms` is always a `Compose`, with `len`, iteration, indexing and slicing.

    Args:
        env: the env to wrap.
        transforms: innermost first: the first one is nearest to the env. A single `Compose` is taken as it is.

    >>> from torchwrap.testing import ScriptedEnv
    >>> from torchwrap import transforms as T
    >>> TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1), T.TimeLimit(9))
    <TimeLimit(max_episode_steps=9)<ClipReward(min_reward=-1, max_reward=1)<ScriptedEnv(num_envs=2, device=cpu)>>>
    """

    def __init__(self, env: Env, *transforms: Transform) -> None:
        composed = (
            transforms[0]
            if len(transforms) == 1 and isinstance(transforms[0], Compose)
            else Compose(transforms)
        )
        parts = [
            module
            for module in composed.modules()
            if isinstance(module, Transform) and not isinstance(module, Compose)
        ]
        for part in parts:
            if part.attached:
                got = f"{part!r} of another one: make a new one; load_state_dict() copies what the old one has learned"
                raise ValueError(
                    f"TransformedEnv needs transforms that belong to no other env, but got {got}."
                )
        super().__init__(env)
        self.signature = composed.setup(env.signature)
        self.transforms = composed
        self._compiled_step: Callable[[TensorDict], TensorDict] | None = (
            None  # takes the place of `transforms.step`
        )
        self._compiled_reset: Callable[[TensorDict, RowMask], TensorDict] | None = None
        self._streams = [module for module in composed.modules() if isinstance(module, Stream)]
        for part in parts:
            part.attached = True
            part._fix()

    def _step(self, action: Value) -> TensorDict:
        for stream in self._streams:
            stream.next_draw()
        return (self._compiled_step or self.transforms.step)(
            super()._step(self.transforms.action(action))
        )

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        for stream in self._streams:
            stream.next_episode(mask)
        return (self._compiled_reset or self.transforms.reset)(super()._reset(mask, options), mask)

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
