"""Env: the contract between a batch of environments and everything above it. Auto-reset and snapshots live here, once."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import Space
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import masks, spaces
from torchwrap.buffer import Module, Submodule
from torchwrap.random import Stream, fresh_seed
from torchwrap.spaces import Signature


class Env(Module):
    """`num_envs` environments that step together on tensors and reset themselves.

    `td = env.reset(seed)` gives the first observations; `transition, td = env.step(td)` does `td["action"]`. The transition
    holds what really happened, final observations included; the second `td` is where to act next, and in rows whose episode
    ended it holds the first observation of a new one.

    | key | shape, dtype |
    |---|---|
    | `observation` | `(num_envs, *shape)`, a nested TensorDict for `Dict` and `Tuple` spaces |
    | `action` | `(num_envs, *shape)` |
    | `("next", "observation")` | as `observation` |
    | `("next", "reward")` | `(num_envs, 1)` float32 |
    | `("next", "terminated")`, `("next", "truncated")`, `("next", "done")` | `(num_envs, 1)` bool |
    | `("next", "info", name)` | as the env declares |

    Authors write `_step` and `_reset`, both over the whole batch and without any auto-reset, and keep the state of running
    episodes in buffers made by `register_rows`. Returned tensors are the caller's: no later step changes them,
    and changing them in place does not change what happens next.
    """

    action_stream = Submodule()

    can_snapshot = True
    """Whether all state is in buffers. False where a foreign simulator keeps its own."""

    def __init__(
        self,
        signature: Signature,
        *,
        spec: Any = None,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__()
        self.signature = signature
        self._spec = spec
        self.metadata = metadata or {}
        self.render_mode = render_mode
        self.action_stream = Stream(signature.num_envs, signature.first_index, tag=1, device=signature.device)
        self._observation: spaces.Value | None = None  # where to act next, as last handed out

    # What an author of an env writes.

    def _step(self, td: TensorDict) -> TensorDict:
        """Does `td["action"]`: a new TensorDict with `observation`, `reward`, `terminated`, `truncated` (and `info`)."""
        raise NotImplementedError

    def _reset(self, mask: Tensor) -> TensorDict:
        """Begins new episodes where `mask` (bool, `(num_envs,)`): a new TensorDict with `observation`.

        Other rows keep their state; what they hold in the result is not looked at. An env with reset options takes them as
        a second argument, `options=None`.
        """
        raise NotImplementedError

    def _seed(self, seed: int, mask: Tensor) -> None:
        for module in self.modules():
            if isinstance(module, Stream):
                module.seed(seed, mask)

    # What a user calls.

    @torch.no_grad()
    def reset(self, seed: int | None = None, mask: Tensor | None = None, options: dict[str, Any] | None = None) -> TensorDict:
        """Begins new episodes, in every env or where `mask` (bool, `(num_envs,)`) is set, and says where to act.

        With a `seed`, env *i* (its global index, whatever `num_envs`) begins the first episode of its own random stream;
        without, its next one. Rows outside the mask keep the observation last handed out, as you left it.
        """
        if mask is None:
            mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        else:
            self._check_mask(mask)
        if seed is not None:
            seed = _check_seed(self, seed)
        elif self._observation is None:
            seed = fresh_seed()  # so that a run that nobody has seeded can be run again
        arguments = {"options": options} if options else {}
        if options is not None and not isinstance(options, dict):
            raise TypeError(f"{self._name()}.reset needs options as a dict, but got {options!r}.")
        if options:
            self._check_options(options)
        if seed is not None:
            self._seed(seed, mask)
        observation = self._reset(mask, **arguments)["observation"]
        if self._observation is not None:
            observation = masks.where(mask, observation, self._observation.to(self.device))
        return self._hand_out(observation)

    @torch.no_grad()
    def step(self, td: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Does `td["action"]`: the same `td` with "next" written into it, and where to act next."""
        self._check_begun("step")
        self._check_action(td)
        successor, observation = self._advance(td["action"])
        td.set("next", successor)
        return td, self._hand_out(observation)

    # Everything of a step that computes, and nothing that checks: this is what gets compiled, as one or in its two parts.

    def _advance(self, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        successor, observation = self._succeed(action)
        self._begin_anew(successor["done"], observation)
        return successor, observation

    def _succeed(self, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        return self._conclude(self._step(TensorDict({"action": action}, batch_size=[self.num_envs])))

    def _conclude(self, successor: TensorDict) -> tuple[TensorDict, spaces.Value]:
        successor.set("done", masks.once(successor["terminated"] | successor["truncated"]))
        return successor, successor["observation"].clone()

    def _begin_anew(self, done: Tensor, observation: spaces.Value) -> None:
        # Writes the first observations of new episodes where the latest ended. The reset pass is skipped only where the host
        # knows that none did: for nothing, or because a simulator on the host has to be told anyway.
        host_looks = masks.free_to_look(done) or not self.can_snapshot
        if host_looks and not masks.any(done):
            return
        mask = done.squeeze(-1)
        if host_looks:
            masks.look_up(mask)
        masks.write(mask, self._reset(mask)["observation"], observation)

    def _hand_out(self, observation: spaces.Value) -> TensorDict:
        self._observation = observation
        return TensorDict({"observation": observation}, batch_size=[self.num_envs])

    def sample_action(self) -> spaces.Value:
        """Random actions, drawn on the env's device from a stream of their own: they do not disturb the env's."""
        return spaces.sample(self.single_action_space, self.action_stream)

    def snapshot(self) -> TensorDict:
        """Everything the env remembers: simulator, random streams, frames, returns, statistics; and where to act next.

        The latter is the observation last handed out, as you left it.
        """
        self._check_begun("snapshot")
        assert self._observation is not None
        self._check_can_snapshot()
        buffers = TensorDict({name: buffer.clone() for name, buffer in self.named_buffers()}, batch_size=[])
        return TensorDict({"buffers": buffers, "observation": self._observation.clone()}, batch_size=[])

    @torch.no_grad()
    def restore(self, snapshot: TensorDict | dict[str, Any]) -> TensorDict:
        """Goes back to a snapshot of this env, bit for bit, and says where to act.

        It takes `snapshot.to_dict()` too, which `torch.load(weights_only=True)` reads back with every version of tensordict.
        """
        self._check_can_snapshot()
        if not isinstance(snapshot, TensorDict | dict) or set(snapshot.keys()) != {"buffers", "observation"}:
            raise TypeError(f"{self._name()}.restore needs what snapshot() gave, but got {type(snapshot).__name__}.")
        buffers, observation = snapshot["buffers"], snapshot["observation"]
        if isinstance(observation, dict):
            observation = TensorDict(observation, batch_size=[self.num_envs])
        own = dict(self.named_buffers())
        if set(buffers.keys()) != set(own):
            different = sorted(set(buffers.keys()) ^ set(own))
            raise ValueError(
                f"{self._name()}.restore needs a snapshot of the same env, but got one that differs in {different}."
            )
        for name, buffer in own.items():
            if buffers[name].shape != buffer.shape or buffers[name].dtype != buffer.dtype:
                got = f"{tuple(buffers[name].shape)} {buffers[name].dtype}"
                raise ValueError(
                    f"{self._name()}.restore needs {name} of shape {tuple(buffer.shape)} {buffer.dtype}, but got {got}."
                )
        observation = observation.to(self.device).clone()
        what = "a snapshot with observations"
        spaces.check(f"{self._name()}.restore", what, self.single_observation_space, observation, self.num_envs, self.device)
        for name, buffer in own.items():
            buffer.copy_(buffers[name])
        return self._hand_out(observation)

    # Gymnasium's properties.

    @property
    def num_envs(self) -> int:
        return self.signature.num_envs

    @property
    def single_observation_space(self) -> Space[Any]:
        return self.signature.single_observation_space

    @property
    def single_action_space(self) -> Space[Any]:
        return self.signature.single_action_space

    @property
    def observation_space(self) -> Space[Any]:
        return batch_space(self.single_observation_space, self.num_envs)

    @property
    def action_space(self) -> Space[Any]:
        return batch_space(self.single_action_space, self.num_envs)

    @property
    def device(self) -> torch.device:
        return self.action_stream.env.device

    @property
    def spec(self) -> Any:
        """Gymnasium's `EnvSpec`, with every wrapper and transform: `torchwrap.make(env.spec)` makes another env like this."""
        return self._spec

    @property
    def np_random_seed(self) -> int | tuple[int, ...] | None:
        """The seed in force, drawn by the first reset where nobody gave one; of each env, where they differ."""
        if self._observation is None:
            return None
        words = zip(self.action_stream.seed_low.tolist(), self.action_stream.seed_high.tolist(), strict=True)
        seeds = tuple(low + (high << 32) for low, high in words)
        return seeds[0] if len(set(seeds)) == 1 else seeds

    @property
    def unwrapped(self) -> Env:
        return self

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Pictures of all envs, or of some: NumPy's, `(height, width, 3)` uint8, as Gymnasium's.

        It needs `render_mode="rgb_array"` at construction.
        """
        raise NotImplementedError(f"{self._name()} needs to be able to draw itself for render, but got an env that is not.")

    def close(self) -> None:
        """Frees what the env holds outside of PyTorch."""

    def __getstate__(self) -> dict[str, Any]:
        # What is compiled stands before the method of its name, and belongs to the env it was made for.
        return {name: value for name, value in self.__dict__.items() if not callable(getattr(type(self), name, None))}

    def __repr__(self) -> str:
        return f"<{self._name()}(num_envs={self.num_envs}, device={self.device})>"

    # Checks: all before anything has changed.

    def _name(self) -> str:
        return self._spec.id if self._spec is not None else type(self).__name__

    def _check_begun(self, what: str) -> None:
        if self._observation is None:
            raise RuntimeError(f"{self._name()} needs reset() first, but got {what}.")

    def _check_action(self, td: TensorDict) -> None:
        if not isinstance(td, TensorDictBase):
            raise TypeError(f'{self._name()}.step needs a TensorDict with "action", but got {type(td).__name__}.')
        action = td.get("action", None)
        if action is None:
            raise ValueError(f'{self._name()}.step needs td["action"], but got a TensorDict with keys {sorted(td.keys())}.')
        spaces.check(self._name(), "an action", self.single_action_space, action, self.num_envs, self.device)
        if td.batch_size != (self.num_envs,) or td.is_locked:
            got = f"{tuple(td.batch_size)}{', locked' if td.is_locked else ''}"
            raise ValueError(
                f"{self._name()}.step needs an unlocked TensorDict of batch size ({self.num_envs},), but got {got}."
            )

    def _check_mask(self, mask: Tensor) -> None:
        shape = (self.num_envs,)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape or mask.device != self.device:
            got = f"{tuple(mask.shape)} {mask.dtype} on {mask.device}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(f"{self._name()}.reset needs a mask of shape {shape} torch.bool on {self.device}, but got {got}.")
        if self._observation is None and not mask.all():
            raise RuntimeError(f"{self._name()}.reset needs a first reset of every env, but got a mask that leaves some out.")

    def _check_options(self, options: dict[str, Any]) -> None:
        parameters = inspect.signature(self._reset).parameters.values()
        if not any(parameter.name == "options" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise ValueError(f"{self._name()}.reset takes no options, but got {options}.")

    def _check_can_snapshot(self) -> None:
        if not self.can_snapshot:
            raise RuntimeError(
                f"{self._name()} needs its state in tensors for snapshot and restore, but got a foreign simulator's. "
                "Its transforms' learned state is in state_dict()."
            )


def _check_seed(env: Env, seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < 2**64:
        raise ValueError(f"{env._name()}.reset needs a seed that is an integer in [0, 2**64), but got {seed!r}.")
    return number
