"""Env: the contract between a batch of environments and everything above it. A step and its auto-reset live here, once."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core import nested
from torchwrap._core.grad_mode import without_grad
from torchwrap._core.graph_hints import realize
from torchwrap._core.row_mask import RowMask
from torchwrap._core.zero_pool import ZeroPool
from torchwrap._env import checks, policy_state
from torchwrap._env import snapshot as snapshots
from torchwrap._env.executor import EAGER, Eager
from torchwrap._env.facade import EnvFacade
from torchwrap.random import Stream
from torchwrap.spaces import Signature


class Env(EnvFacade):
    """`num_envs` environments that step together on tensors and reset themselves.

    `td = env.reset(seed)` returns the initial observations. `transition, td = env.step(td)` takes `td["action"]`: `transition`
    holds the true successor, final observations included; the second `td` is the root of the next step. In rows whose episode
    ended, the root holds the initial observation of a new episode; elsewhere it equals `transition["next"]`.

    | key | shape, dtype |
    |---|---|
    | `observation` | `(num_envs, *shape)`, a nested TensorDict for `Dict` and `Tuple` spaces |
    | `action` | `(num_envs, *shape)` |
    | `("next", "observation")` | as `observation` |
    | `("next", "reward")` | `(num_envs, 1)` float32 |
    | `("next", "terminated")`, `("next", "truncated")`, `("next", "done")` | `(num_envs, 1)` bool |
    | `("next", "info", name)` | as the env declares |
    | `is_init`, and states by name | with `transforms.PolicyState`, for recurrent policies |

    Returned tensors belong to the caller: no later step changes them, and changing them in place does not change the env.

    Subclasses implement `_step` and `_reset`, both over the whole batch and without auto-reset, and declare the state of
    running episodes as `EnvBuffer`s. `step`, `transition` and `reset` cannot be overridden.

    If an exception, such as Ctrl-C, leaves a call before it returns, the state may belong to two different steps. The next
    call then raises, and asks for `reset()` or `restore()`.

    Args:
        signature: `num_envs`, the spaces of a single env, and the device.
        spec: Gymnasium's `EnvSpec`, if there is one.
        metadata: as Gymnasium's `Env.metadata`.
        render_mode: as Gymnasium's.
    """

    can_snapshot = True
    """Whether all state is in buffers, so that `snapshot` and `restore` work."""

    host_stepped = False
    """Whether a simulator on the host steps this env, outside of PyTorch. `torchwrap.compile` then compiles its transforms."""

    def __init__(
        self,
        signature: Signature,
        *,
        spec: Any = None,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(signature, spec, metadata, render_mode)
        self._executor, self._zero_pool = EAGER, ZeroPool()
        self.allocate(signature.num_envs, signature.device)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for verb, hook in (
            ("step", "_step(action)"),
            ("transition", "_step(action)"),
            ("reset", "_reset(mask, options=None)"),
        ):
            if getattr(cls, verb) is not getattr(Env, verb):
                raise TypeError(
                    f"{cls.__name__} needs to override {hook}, but got an override of {verb}(): other layers, the auto-reset "
                    "and compiled graphs do not call it."
                )

    # Hooks for subclasses.

    def _step(self, action: spaces.Value) -> TensorDict:
        """Takes an action in every env.

        Returns a new TensorDict with `observation`, `reward`, `terminated`, `truncated`, and `info` if the env declares any.
        """
        raise NotImplementedError

    def _reset(self, mask: RowMask, options: dict[str, Any] | None = None) -> TensorDict:
        """Starts new episodes in the rows of `mask`. Returns a new TensorDict with `observation`.

        Other rows keep their state; what they hold in the result is ignored.
        """
        raise NotImplementedError

    def _seed(self, seed: int, mask: RowMask) -> None:
        """Seeds every random stream in the rows of `mask`."""
        for module in self.modules():
            if isinstance(module, Stream):
                module.seed(seed, mask)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raises for reset options that `_reset` does not take; by default it takes none."""
        raise ValueError(f"{self._name()}.reset takes no options, but got {options}.")

    def _check_usable(self) -> None:
        """Raises if no `reset` helps any more, because the simulator is gone."""

    # The public verbs.

    @torch.no_grad()
    def reset(self, seed: int | None = None, mask: Tensor | None = None, options: dict[str, Any] | None = None) -> TensorDict:
        """Starts new episodes in every env, or where `mask` is set.

        Args:
            seed: puts env *i* (its global index, whatever `num_envs`) before the first episode of its own random stream. None
                continues with the next episode; the first reset of all then draws a seed from the operating system.
            mask: bool, `(num_envs,)`. Rows outside it keep the observation of the last root, as you left it.
            options: passed on to the env.

        Returns:
            The root of the next step: a TensorDict `(num_envs,)` with `observation`.

        Raises:
            ValueError, TypeError, RuntimeError: for bad input, before anything has changed.
        """
        if mask is None:
            rows = RowMask.full(self.num_envs, self.device, synchronize=self.host_stepped)
        else:
            checks.mask(self, mask, has_reset=self._position.root is not None)
            if self._position.unfinished is not None and not mask.all():
                self._check_finished()
            rows = RowMask(mask, synchronize=self.host_stepped)
        if seed is not None:
            seed = checks.seed(self._name(), seed)
        seed = self.unwrapped._choose_seed(seed, self._position.root is None)
        if options is not None and not isinstance(options, dict):
            raise TypeError(f"{self._name()}.reset needs options as a dict, but got {options!r}.")
        if options:
            self._check_options(options)
        root, self._position.unfinished = self._position.root, "reset()"
        if seed is not None:
            self._seed(seed, rows)
        initial = self._reset(rows, options or None)
        checks.only_observation(self, initial)
        observation = initial["observation"]
        if root is not None:
            observation = rows.where(observation, spaces.to_device(root["observation"], self.device))
        return self._root({"observation": observation, **policy_state.reset(self.signature, rows, root)})

    @without_grad
    def step(self, td: TensorDict | Tensor) -> tuple[TensorDict, TensorDict]:
        """Takes an action in every env, and resets the finished rows.

        Discrete actions are checked on the CPU; numbers of a `Box` are not, and NaN reaches the env (`PassiveEnvChecker` finds
        it). No gradient flows through a step; `FunctionalEnv.simulate` is a differentiable one. The env takes the values of an
        action that requires grad; `next` and the root never do, and the transition keeps the action as you set it.

        Args:
            td: the root TensorDict with `action` set; or the bare action, which is then set in the last root. It must not
                contain `next`, as a TensorDict does that has been stepped.

        Returns:
            transition: that TensorDict with `next` written into it: the true successor.
            td: the root of the next step.

        Raises:
            ValueError, TypeError, RuntimeError: for bad input, before anything has changed.

        >>> from torchwrap.testing import ScriptedEnv
        >>> env = ScriptedEnv(2)
        >>> _ = env.reset()
        >>> transition, td = env.step(env.sample_action())
        >>> transition["next", "reward"].flatten()
        tensor([1., 1.])
        """
        return self._take(self._executor.step, "step()", td)

    @without_grad
    def transition(self, td: TensorDict | Tensor) -> tuple[TensorDict, TensorDict]:
        """Takes an action in every env, and resets none: for libraries that reset by themselves.

        The second result holds the observation of `transition["next"]` in every row. Reset the finished rows before the next
        step: `td = env.reset(mask=transition["next", "done"].squeeze(-1))`. Both together are a `step`.

        Args, Returns, Raises: as for `step`.

        >>> from torchwrap.testing import ScriptedEnv
        >>> env = ScriptedEnv(1, (1,), episode_lengths=1)
        >>> transition, td = env.transition(env.reset().set("action", env.sample_action()))
        >>> td["observation"], env.reset(mask=transition["next", "done"].squeeze(-1))["observation"]
        (tensor([[1.]]), tensor([[0.]]))
        """
        return self._take(self._executor.step_without_reset, "transition()", td, resets=False)

    def _take(self, run: Any, call: str, td: TensorDict | Tensor, resets: bool = True) -> tuple[TensorDict, TensorDict]:
        given = checks.transition(self, td, self._check_has_reset(call))
        action, state = given["action"], policy_state.read(self, given) if self.signature.policy_state else {}
        self._position.unfinished = call
        successor, observation = run(self, action.detach() if action.requires_grad else action)
        root = self._following(state, successor, observation, resets)
        if isinstance(given, dict):
            transition = nested.tensordict({**given, "next": successor}, self.num_envs)
        else:
            transition = given.set("next", successor)
        return transition, self._root(root)

    # What a step computes, without checks. This is what gets compiled: as a whole, or up to the auto-reset.

    def _step_and_reset(self, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        successor, observation = self._step_without_reset(action)
        self._auto_reset(RowMask(successor["done"], synchronize=self.host_stepped, zeros=self._zero_pool), observation)
        return successor, observation

    def _step_without_reset(self, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        successor = self._step(action)
        successor.set("done", realize(successor["terminated"] | successor["truncated"]))
        return successor, successor["observation"].clone()

    def _auto_reset(self, mask: RowMask, observation: spaces.Value) -> None:
        if mask.any():
            mask.assign_(observation, self._reset(mask)["observation"])

    def _following(
        self, state: policy_state.State, successor: TensorDict, observation: spaces.Value, resets: bool = True
    ) -> dict[str, spaces.Value]:
        # The entries of the next root. The successor holds the state of a recurrent policy too, as it was not reset.
        if not state:
            return {"observation": observation}
        done = successor["done"] if resets else None
        successor.update(state)
        return {"observation": observation, **policy_state.following(self.signature, state, done)}

    def _root(self, entries: dict[str, spaces.Value]) -> TensorDict:
        position, root = self._position, nested.tensordict(entries, self.num_envs)
        position.root, position.unfinished = root, None
        return root

    # State.

    def snapshot(self) -> TensorDict:
        """The whole state of the env (simulator, RNG streams, frames, returns, statistics) and the last root.

        The root's observation is saved as you left it.

        Raises:
            RuntimeError: before the first reset, and if a simulator outside of PyTorch holds state.
        """
        root = self._check_has_reset("snapshot()")
        self._check_can_snapshot()
        return snapshots.take(self, {key: root[key] for key in ("observation", *policy_state.keys(self.signature))})

    def restore(self, snapshot: TensorDict | dict[str, Any]) -> TensorDict:
        """Returns to a snapshot of this env, bit for bit.

        Args:
            snapshot: what `snapshot()` returned, or its `to_dict()`, which `torch.load(weights_only=True)` reads back with
                every version of tensordict.

        Returns:
            The root of the next step.

        Raises:
            RuntimeError, TypeError, ValueError: if it is no snapshot of an env like this one, before anything has changed.
        """
        self._check_can_snapshot()
        state = policy_state.initial(self.signature)
        snapshots.check(self._name(), self, snapshot, state)
        observation = snapshot["observation"]
        if isinstance(observation, dict):
            observation = TensorDict(observation)
        observation = spaces.to_device(observation, self.device)
        what = "a snapshot with observations"
        spaces.check(f"{self._name()}.restore", what, self.single_observation_space, observation, self.num_envs, self.device)
        observation = observation.clone()
        if isinstance(observation, TensorDict):
            observation = TensorDict(observation.to_dict(), batch_size=[self.num_envs])
        self._position.unfinished = "restore()"
        snapshots.load(self, snapshot)
        return self._root({"observation": observation, **{key: snapshot[key].to(self.device, copy=True) for key in state}})

    @property
    def is_compiled(self) -> bool:
        """Whether `torchwrap.compile` has compiled this env. A copy of a compiled env runs eagerly."""
        return type(self._executor) is not Eager

    @property
    def unwrapped(self) -> Env:
        return self

    def _check_has_reset(self, call: str) -> TensorDict:
        if self._position.root is None:
            self.unwrapped._check_usable()
            raise RuntimeError(f"Call reset() before {call} of {self._name()}.")
        self._check_finished()
        return self._position.root

    def _check_finished(self) -> None:
        if self._position.unfinished is not None:
            self.unwrapped._check_usable()
            remedy = "reset(), or restore() of a snapshot" if self.can_snapshot else "reset()"
            raise RuntimeError(
                f"{self._name()} needs {remedy}, because an earlier {self._position.unfinished} did not finish: "
                "its state may belong to two different steps."
            )

    def _check_can_snapshot(self) -> None:
        if not self.can_snapshot:
            raise RuntimeError(
                f"{self._name()} needs its state in tensors for snapshot and restore, but a simulator outside of PyTorch "
                "holds some of it. What its transforms have learned is in state_dict()."
            )
