"""Wrapper: an env around an env. TransformedEnv: an env with transforms on it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymnasium import Space
from tensordict import TensorDict

from torchwrap._core import spec as specs
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options, check_is_env
from torchwrap.random import Stream
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.episode import RecordEpisodeStatistics
from torchwrap.transforms.transform import Compose, Transform


class Wrapper(Env):
    """An env that holds another env as `.env` and passes everything on to it.

    Override `_step`, `_reset`, or both. As in Gymnasium, `get_wrapper_attr(name)` reaches the
    attributes of inner layers, and each transform is a layer. Nothing else forwards attributes.

    Args:
        env: the env to wrap. It must not be compiled: compile the outermost layer, last.
        signature: the description of this layer, if its action space differs from that of `env`.

    >>> from torchwrap.testing import ScriptedEnv
    >>> class DoubleReward(Wrapper):
    ...     def _step(self, action):
    ...         successor = self.env._step(action)
    ...         return successor.set("reward", 2 * successor["reward"])
    >>> env = DoubleReward(ScriptedEnv(1))
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "reward"]
    tensor([[2.]])
    """

    def __init__(self, env: Env, signature: Signature | None = None) -> None:
        self._check_env(env)
        super().__init__(
            signature or env.signature,
            spec=env._spec,
            metadata=env.metadata,
            render_mode=env.render_mode,
        )
        self.env = env
        # A stack has one stream, so that wrapping does not change which actions are sampled.
        self.action_stream = env.action_stream
        self.can_snapshot = env.can_snapshot
        self.host_stepped = env.host_stepped

    def _check_env(self, env: Any) -> None:
        name = type(self).__name__
        check_is_env(name, env)
        if env.is_compiled:
            raise ValueError(refusal(name, "env must not be compiled", env))

    def _step(self, action: Value) -> TensorDict:
        return self.env._run("_step", action)

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        return self.env._run("_reset", mask, options)

    def _leave_out(self, rows: RowMask) -> None:
        self.env._leave_out(rows)

    def deployed(self) -> None:
        """Returns None if the wrapper changes neither observations nor actions.

        A ValueError says why `deploy` cannot use an env with this wrapper.
        """
        raise ValueError("it drives the env")

    def _check_options(self, options: Options) -> None:
        self.env._check_options(options)

    def _seed(self, seed: int, mask: RowMask) -> None:
        self.env._seed(seed, mask)  # first: a curriculum asks whether the old episode has a step
        super()._seed(seed, mask)

    @property
    def is_compiled(self) -> bool:
        return super().is_compiled or self.env.is_compiled

    @property
    def unwrapped(self) -> Env:
        return self.env.unwrapped

    @property
    def spec(self) -> Any:
        below = self.env.spec
        if below is None:
            return None
        limit = self.signature.max_episode_steps
        if limit != self.env.signature.max_episode_steps:
            below = specs.limited(below, limit)
        wrappers = (*below.additional_wrappers, specs.record(self))
        return specs.replace(below, additional_wrappers=wrappers)

    def _batched_space(self, name: str) -> Space[Any]:
        if getattr(self, name) is getattr(self.env, name):
            return self.env._batched_space(name)
        return super()._batched_space(name)

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        return self.env.render(envs)

    def close(self) -> None:
        self.env.close()

    def _parts(self) -> list[Any]:
        """The objects of this layer that can own an attribute, outermost first."""
        return [self]

    def get_wrapper_attr(self, name: str) -> Any:
        for part in self._parts():
            if hasattr(part, name):
                return getattr(part, name)
        return self.env.get_wrapper_attr(name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        for part in self._parts():
            if hasattr(part, name):
                setattr(part, name, value)
                return True
        return self.env.set_wrapper_attr(name, value, force=force)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`, whatever the number of stateless layers.

        Keys are PyTorch's paths, "env." for each layer above their owner. Layers with state
        correspond by their order, so a checkpoint of a stack with other stateless layers fits. A
        call that raises leaves everything as it was.
        """
        if isinstance(state_dict, Mapping):
            state_dict = _match_layers(state_dict, self.state_dict())
        return super().load_state_dict(state_dict, strict, assign)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self.env!r}>"


def _match_layers(saved: Mapping[str, Any], expected: Iterable[str]) -> Any:
    """A checkpoint whose layers with state have the depths of another one."""
    depths = sorted({_layer(name) for name in saved})
    new_depths = sorted({_layer(name) for name in expected})
    if depths == new_depths or len(depths) != len(new_depths):
        return saved
    new_depth = dict(zip(depths, new_depths, strict=True))
    renamed = {}
    for name, value in saved.items():
        depth = _layer(name)
        renamed[new_depth[depth] + name.removeprefix(depth)] = value
    return renamed


def _layer(name: str) -> str:
    """The part of a buffer's path that leads to its layer, "env.env." for the third one."""
    return re.match(r"(?:env\.)*", name)[0]  # type: ignore[index]


def layers(env: Env) -> list[Env]:
    """The env and every env inside it, outermost first."""
    if isinstance(env, Wrapper):
        return [env, *layers(env.env)]
    return [env]


class TransformedEnv(Wrapper):
    """An env with transforms on it, which is an env.

    `transforms` is always a `Compose`, with `len`, iteration, indexing and slicing.

    Args:
        env: the env to wrap.
        transforms: innermost first: the first one is nearest to the env. A single `Compose` is
            taken as it is.

    >>> from torchwrap.testing import ScriptedEnv
    >>> from torchwrap import transforms as T
    >>> TransformedEnv(ScriptedEnv(2), T.TimeLimit(9))
    <TimeLimit(max_episode_steps=9)<ScriptedEnv(num_envs=2, device=cpu)>>
    """

    _not_copied = ("_compiled", "_graphs")

    def __init__(self, env: Env, *transforms: Transform) -> None:
        if len(transforms) == 1 and isinstance(transforms[0], Compose):
            composed = transforms[0]
        else:
            composed = Compose(transforms)
        parts = [module for module in composed.modules() if isinstance(module, Transform)]
        for part in parts:
            if part.attached:
                raise ValueError(
                    refusal(
                        "TransformedEnv",
                        "transforms must belong to no other env",
                        part,
                        "Make a new one; load_state_dict() copies what the old one has learned",
                    )
                )
        self._check_env(env)
        super().__init__(env, composed.setup(env.signature))
        self.transforms = composed
        keys = [recorder.stats_key for recorder in RecordEpisodeStatistics.of(self)]
        if len(set(keys)) < len(keys):
            must = "stats_key must differ from those of the layers below"
            raise ValueError(refusal("RecordEpisodeStatistics", must, keys))
        self._graphs: Any = None  # those of the transforms, over a simulator on the host
        self._streams = [module for module in composed.modules() if isinstance(module, Stream)]
        for part in parts:
            # A Compose holds no state, so it may be part of several envs.
            part.attached = not isinstance(part, Compose)

    def deployed(self) -> None:
        return None  # `deploy` takes the transforms

    def _step(self, action: Value) -> TensorDict:
        successor = self._step_below(action)
        if self._graphs is None:
            return self.transforms.step(successor)
        return self._graphs.step(successor)[0]  # type: ignore[no-any-return]

    def _advance(self, action: Value) -> tuple[TensorDict, Value]:
        is_overridden = type(self)._step is not TransformedEnv._step
        if self._graphs is None or is_overridden:
            return super()._advance(action)
        successor = self._step_below(action)
        return self._graphs.step(successor)  # type: ignore[no-any-return]

    def _step_below(self, action: Value) -> TensorDict:
        for stream in self._streams:
            stream.next_draw()
        return self.env._run("_step", self.transforms.action(action))  # type: ignore[no-any-return]

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        for stream in self._streams:
            stream.next_episode(mask)
        initial = self.env._run("_reset", mask, options)
        transforms = self._graphs or self.transforms
        return transforms.reset(initial, mask)  # type: ignore[no-any-return]

    @property
    def is_compiled(self) -> bool:
        return self._graphs is not None or super().is_compiled

    def _parts(self) -> list[Any]:
        return [self, *reversed(list(self.transforms.flat()))]

    def __repr__(self) -> str:
        text = repr(self.env)
        for transform in self.transforms.flat():
            text = f"<{transform!r}{text}>"
        return text
