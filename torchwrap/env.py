"""Env: a batch of environments that step together on tensors, followed by an automatic reset of the finished ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchwrap import policy, spaces
from torchwrap._core import validation
from torchwrap._core.buffers import BatchedModule, ConstantBuffer, EpisodeClock
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.rows import RowMask, is_traced, tensordict
from torchwrap.random import Stream, fresh_seed
from torchwrap.spaces import Signature, Value

AnyEnv = TypeVar("AnyEnv", bound="Env")
Options = dict[str, Any]
"""Reset options by name."""

Step = Callable[[Value, bool], tuple[TensorDict, Value]]
"""Takes an action, and whether to reset finished rows; returns the successor, and the observation to act on next."""

_NEXT_ROOT = "pass the second result of the last step, `transition, td = env.step(td)`"


class Env(BatchedModule):
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
    | `("info", name)` | of Gymnasium's envs with `info_keys`: what came with `observation`, from a reset or a step |
    | `is_init`, and states by name | with `PolicyState`, for recurrent policies |

    Returned tensors belong to the caller: no later step changes them, and changing them in place does not change the env.
    Bad input raises a ValueError, TypeError or RuntimeError before anything has changed.

    Subclasses implement `_step` and `_reset`, both over the whole batch and without auto-reset, and declare the state of
    running episodes as `EnvBuffer`s. `step`, `step_without_reset` and `reset` cannot be overridden. What they return is checked the
    first time, layer by layer, and a global random generator that they draw from is an error. They get a copy of the action.

    Args:
        signature: `num_envs`, the spaces of a single env, and the device.
        spec: Gymnasium's `EnvSpec`, if there is one.
        metadata: as Gymnasium's `Env.metadata`.
        render_mode: as Gymnasium's.

    >>> from gymnasium.spaces import Box
    >>> class Echo(Env):
    ...     def _step(self, action):
    ...         flags = {"terminated": action > 0.9, "truncated": torch.zeros(2, 1, dtype=torch.bool)}
    ...         return TensorDict({"observation": action, "reward": -action, **flags}, [2])
    ...     def _reset(self, mask, options=None):
    ...         return TensorDict({"observation": torch.zeros(2, 1)}, [2])
    >>> env = Echo(Signature(2, Box(-1, 1, (1,)), Box(-1, 1, (1,)), torch.device("cpu")))
    >>> transition, td = env.step(env.reset().set("action", torch.tensor([[0.5], [1.0]])))
    >>> transition["next", "observation"].flatten(), td["observation"].flatten()
    (tensor([0.5000, 1.0000]), tensor([0.5000, 0.0000]))
    """

    can_snapshot = True
    """Whether all state is in buffers, so that `snapshot` and `restore` work."""

    host_stepped = False
    """True if an external simulator (not PyTorch) steps this env. `torchwrap.compile` then compiles its transforms."""

    can_repeat = True
    """Whether a step can be followed by others before the envs whose episode has ended in it are reset."""

    _live: RowMask | None = (
        None  # of a simulator on the host: the rows to step, by a wrapper that repeats actions
    )
    _checked: frozenset[str] = frozenset()  # hooks whose results have been checked
    _has_root_info = (
        False  # whether roots hold `info`: what came with the observation, from a step or a reset
    )

    def __init__(
        self,
        signature: Signature,
        *,
        spec: EnvSpec | None = None,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__()
        self.signature = signature
        self.metadata = metadata or {}
        self.render_mode = render_mode
        self.action_stream = Stream(
            signature.num_envs, signature.first_index, tag=1, device=signature.device
        )
        self._spec = spec
        self._compiled: Step | None = None  # takes the place of `_step_and_reset`
        self._root: TensorDict | None = None  # the last one; None before the first reset
        self._unfinished: str | None = (
            None  # the call that has begun to change the env and has not returned
        )
        self.allocate(signature.num_envs, signature.device)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = {
            "step": "_step(action)",
            "step_without_reset": "_step(action)",
            "reset": "_reset(mask, options=None)",
        }
        for verb, hook in hooks.items():
            if getattr(cls, verb) is not getattr(Env, verb):
                got = f"{cls.__name__} overrides {verb}(), which other layers, the auto-reset and compiled graphs do not call"
                raise TypeError(f"{got}: override {hook} instead.")

    def _fix(self) -> None:
        # Only now is the action space of this layer final.
        self.action_sampler = spaces.Sampler(self.single_action_space, self.device)
        self._action_keys = set(spaces.children(self.single_action_space) or ())
        self._label = self._name()
        super()._fix()

    # Hooks for subclasses.

    def _step(self, action: Value) -> TensorDict:
        """Takes an action in every env.

        Returns a new TensorDict with `observation`, `reward`, `terminated`, `truncated`, and `info` if the env declares any.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement _step(action).")

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        """Starts new episodes in the rows of `mask`. Returns a new TensorDict with `observation`.

        Other rows keep their state; what they hold in the result is ignored.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement _reset(mask, options)."
        )

    def _seed(self, seed: int, mask: RowMask) -> None:
        """Seeds every random stream in the rows of `mask`."""
        for module in self.modules():
            if isinstance(module, Stream):
                module.seed(seed, mask)

    def _choose_seed(
        self, seed: int | None, is_first: bool, mask: Tensor | None = None
    ) -> int | None:
        """The seed that a reset uses if it is given `seed` and `mask`. None continues the random streams.

        A first reset has one, so that an unseeded run can be repeated. Raises for a seed that the simulator does not take.
        """
        return fresh_seed() if seed is None and is_first else seed

    def _check_options(self, options: Options) -> None:
        """Raises for reset options that `_reset` does not take; by default it takes none."""
        raise ValueError(f"{self._name()}.reset takes no options, but got {options}.")

    def _root_info(self) -> dict[str, Value]:
        return {}

    def _check_usable(self) -> None:
        """Raises if no `reset` helps any more, because the simulator is gone."""

    # The public verbs.

    @torch.no_grad()
    def reset(
        self, seed: int | None = None, mask: Tensor | None = None, options: Options | None = None
    ) -> TensorDict:
        """Starts new episodes in every env, or where `mask` is set.

        Args:
            seed: puts env *i* (its global index, whatever `num_envs`) before the first episode of its own random stream. None
                continues with the next episode; the first reset of all then draws a seed from the operating system.
            mask: bool, `(num_envs,)`. Rows outside it keep the observation of the last root, as you left it.
            options: passed on to the env. A `FunctionalEnv` takes initial states among them, `{"state": {...}}`.

        Returns:
            The root of the next step: a TensorDict `(num_envs,)` with `observation`.
        """
        root = self._root
        if mask is not None:
            self._check_mask(mask)
            if self._unfinished is not None and not mask.all():
                self._check_ready("reset()")
        if seed is not None:
            seed = validation.integer(f"{self._name()}.reset", "seed", seed, 0, 2**64 - 1)
        seed = self.unwrapped._choose_seed(seed, root is None, mask)
        if options is not None and not isinstance(options, dict):
            raise TypeError(f"{self._name()}.reset needs options as a dict, but got {options!r}.")
        if options:
            self._check_options(options)
        if root is None and not torch.compiler.is_compiling():
            for name, part in self.named_modules():
                if isinstance(part, BatchedModule) and not part.training:
                    part._warn_untrained(f"{self._name()}: {name}")
        rows = (
            RowMask.full(self.num_envs, self.device)
            if mask is None
            else RowMask(mask, synchronize=self.host_stepped)
        )
        self._unfinished = "reset()"
        if root is not None and not rows.any():
            initial = root.select("observation")
        else:
            if seed is not None:
                self._seed(seed, rows)
            given = rows, options or None
            initial = (
                self._reset(*given) if "_reset" in self._checked else self._first("_reset", *given)
            )
        if len(initial.keys()) > 1:
            got = sorted(key for key in initial.keys() if key != "observation")
            needed = (
                f"{self._name()}.reset needs layers that return an observation alone, but got {got}"
            )
            raise ValueError(
                f"{needed}, which no root would hold: make it part of a Dict observation, or set it in step()."
            )
        observation = initial["observation"]
        if root is not None:
            observation = rows.where(
                observation, spaces.to_device(root["observation"], self.device)
            )
        return self._finish(
            {"observation": observation, **policy.reset(self.signature, rows, root)}
        )

    @torch.no_grad()
    def step(self, td: TensorDict | Tensor) -> tuple[TensorDict, TensorDict]:
        """Takes an action in every env, and resets the finished rows.

        Discrete actions are checked on the CPU; numbers of a `Box` are not (`PassiveEnvChecker` does it). No gradient flows
        through a step; `FunctionalEnv.simulate` is a differentiable one. The transition keeps the action as you set it.

        Args:
            td: the root TensorDict with `action` set; or the bare action, which is then set in the last root. It must not
                contain `next`, as a TensorDict does that has been stepped.

        Returns:
            transition: that TensorDict with `next` written into it: the true successor.
            td: the root of the next step.

        >>> from torchwrap.testing import ScriptedEnv
        >>> env = ScriptedEnv(2)
        >>> _ = env.reset()
        >>> transition, td = env.step(env.sample_action())
        >>> transition["next", "reward"].flatten()
        tensor([1., 1.])
        """
        return self._take(td, "step()", resets=True)

    @torch.no_grad()
    def step_without_reset(self, td: TensorDict | Tensor) -> tuple[TensorDict, TensorDict]:
        """Takes an action in every env, and resets none: for libraries that reset by themselves.

        The second result holds the observation of `transition["next"]` in every row. Reset the finished rows before the next
        step: `td = env.reset(mask=transition["next", "done"].squeeze(-1))`. Both together are a `step`, with its arguments.

        >>> from torchwrap.testing import ScriptedEnv
        >>> env = ScriptedEnv(1, (1,), episode_lengths=1)
        >>> transition, td = env.step_without_reset(env.reset().set("action", env.sample_action()))
        >>> td["observation"], env.reset(mask=transition["next", "done"].squeeze(-1))["observation"]
        (tensor([[1.]]), tensor([[0.]]))
        """
        return self._take(td, "step_without_reset()", resets=False)

    def _take(
        self, given: TensorDict | Tensor, call: str, resets: bool
    ) -> tuple[TensorDict, TensorDict]:
        last, policies = self._root, self.signature.policy_state
        if last is None or self._unfinished is not None:
            last = self._check_ready(call)
        if isinstance(given, Tensor) or (self._action_keys and self._is_dict_action(given)):
            held: Any = {key: value for key, value in last.items() if key not in ("action", "next")}
            td = tensordict({**held, "action": given}, self.signature.num_envs)
            self._check_step_input(td)
            state = {
                name: last[name] for name in policies
            }  # a bare action does not change the state
        else:
            self._check_step_input(given)
            td = given
            state = policy.read(self._label, self.signature, td) if policies else {}
        action = td["action"]
        vars(self)["_unfinished"] = call  # nn.Module.__setattr__ would take longer
        step = self._compiled or self._step_and_reset
        successor, observation = step(action.detach() if action.requires_grad else action, resets)
        root = {"observation": observation}
        if state:
            root |= self._carry(state, successor, resets)
        return td.set("next", successor), self._finish(root)

    # The computation of a step, without checks. `torchwrap.compile` compiles it as a whole.

    def _step_and_reset(self, action: Value, resets: bool = True) -> tuple[TensorDict, Value]:
        action = action.clone()  # the agent's stays as it is, whatever a layer writes to
        successor = self._step(action) if "_step" in self._checked else self._first("_step", action)
        done = successor["terminated"] | successor["truncated"]
        successor.set("done", done)
        observation = successor["observation"].clone()
        if resets and (mask := RowMask(done, synchronize=self.host_stepped)).any():
            initial = (
                self._reset(mask) if "_reset" in self._checked else self._first("_reset", mask)
            )
            mask.assign_(observation, initial["observation"])
        return successor, observation

    def _first(self, hook: str, *args: Any) -> TensorDict:
        """A call of `_step` or `_reset` that is checked, as the first one of each layer is, and every one that we trace."""
        if torch.compiler.is_compiling():  # by the user: sizes may be symbols
            return getattr(self, hook)(*args)
        owner, traced = f"{type(self).__name__}.{hook}", is_traced(self.action_stream.draw)
        device = None if traced or self.host_stepped else self.device
        with no_foreign_draws(owner, "draw with torchwrap.random, from a stream", device):
            td: TensorDict = getattr(self, hook)(*args)
        spaces.check_layer(owner, self.signature, td, flags=hook == "_step")
        if not traced:
            vars(self)["_checked"] = self._checked | {hook}
        return td

    def _carry(
        self, state: policy.State, successor: TensorDict, resets: bool = True
    ) -> policy.State:
        """The state of a recurrent policy in the next root. The successor gets it too, before its reset."""
        successor.update(state)
        done = successor["done"] if resets else torch.zeros_like(successor["done"])
        return policy.following(self.signature, state, done)

    def _finish(self, entries: dict[str, Value]) -> TensorDict:
        if self._has_root_info:
            entries = {**entries, **self.unwrapped._root_info()}
        vars(self)["_root"] = root = tensordict(entries, self.signature.num_envs)
        vars(self)["_unfinished"] = None
        return root

    # State.

    def snapshot(self) -> TensorDict:
        """The whole state of the env (simulator, RNG streams, frames, returns, statistics) and the last root, as you left it.

        A RuntimeError says that a simulator outside of PyTorch holds state.
        """
        root = self._check_ready("snapshot()")
        self._check_can_snapshot()
        buffers = TensorDict(
            {name: buffer.clone() for name, buffer in self._state_buffers().items()}, batch_size=[]
        )
        entries = {key: root[key].clone() for key in ("observation", *policy.keys(self.signature))}
        return TensorDict({"buffers": buffers, **entries}, batch_size=[])

    @torch.no_grad()
    def restore(
        self, snapshot: TensorDict | dict[str, Any], mask: Tensor | None = None
    ) -> TensorDict:
        """Returns to a snapshot of this env, bit for bit.

        Args:
            snapshot: what `snapshot()` returned, or its `to_dict()`, which `torch.load(weights_only=True)` reads back with
                every version of tensordict.
            mask: bool, `(num_envs,)`: the envs that return to it. What all envs share, such as statistics, then stays.

        Returns:
            The root of the next step.
        """
        self._check_can_snapshot()
        state = policy.initial(self.signature)
        observation, buffers = self._check_snapshot(snapshot, state)
        entries = {
            "observation": observation,
            **{key: snapshot[key].to(self.device, copy=True) for key in state},
        }
        if mask is not None:
            self._check_mask(mask, "restore")
            root, rows = self._check_ready("restore() of some envs"), RowMask(mask)
            entries = {key: rows.where(value, root[key]) for key, value in entries.items()}
        self._unfinished = "restore()"
        for name, buffer in self._state_buffers(per_env=mask is not None).items():
            buffer.copy_(buffers[name]) if mask is None else rows.assign_(
                buffer, buffers[name].to(buffer.device)
            )
        return self._finish(entries)

    def _state_buffers(self, per_env: bool = False) -> dict[str, Tensor]:
        found = {}
        for prefix, module in self.named_modules():
            rows = getattr(module, "_env_buffer_names", ())
            for name, buffer in module.named_buffers(recurse=False):
                is_state = (
                    name in rows
                    if per_env
                    else not isinstance(getattr(type(module), name, None), ConstantBuffer)
                )
                if is_state:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
        return found

    @property
    def elapsed_steps(self) -> Tensor:
        """Steps since the start of each running episode: int64 `(num_envs,)`, a copy.

        Assigning it moves the clocks of every layer, including native limits and `TimeLimit`, so that episodes can be
        truncated at different times from the start. A RuntimeError says that no layer has a clock: a simulator counts steps.

        >>> from torchwrap.envs.cartpole import CartPole; from torchwrap import FunctionalEnv
        >>> env = FunctionalEnv(CartPole(), num_envs=2, max_episode_steps=500)
        >>> _ = env.reset()
        >>> env.elapsed_steps = torch.tensor([0, 499])
        >>> env.step(env.sample_action())[0]["next", "truncated"].flatten()
        tensor([False,  True])
        """
        if (steps := self._read_clock()) is None:
            needed = f"{self._name()} has no layer that counts steps in a tensor, which elapsed_steps needs"
            raise RuntimeError(f"{needed}: put transforms.TimeLimit on it.")
        return steps.reshape(-1).to(torch.int64, copy=True)

    @elapsed_steps.setter
    def elapsed_steps(self, steps: Tensor) -> None:
        shape = self.elapsed_steps.shape
        if (
            not isinstance(steps, Tensor)
            or steps.shape != shape
            or steps.dtype not in (torch.int32, torch.int64)
        ):
            got = validation.described(steps)
            raise ValueError(
                f"{self._name()} needs elapsed_steps of shape {tuple(shape)} torch.int64, but got {got}."
            )
        if bool((steps < 0).any()):
            raise ValueError(
                f"{self._name()} needs elapsed_steps of at least 0, but got {int(steps.min())}."
            )
        self._write_clock(steps.to(self.device))

    def _clocks(self) -> list[Tensor]:
        """The tensors in which this layer counts the steps."""
        return EpisodeClock.of(self)

    def _read_clock(self) -> Tensor | None:
        """The elapsed steps; None if this env has no clock."""
        return next(iter(self._clocks()), None)

    def _write_clock(self, steps: Tensor) -> None:
        for clock in self._clocks():
            clock.copy_(steps.view_as(clock))

    # Properties, under the names of Gymnasium's VectorEnv.

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
        return self.signature.device

    @property
    def unwrapped(self) -> Env:
        return self

    @property
    def spec(self) -> EnvSpec | None:
        """Gymnasium's `EnvSpec`, with every wrapper and transform: `torchwrap.make(env.spec)` builds another env like this."""
        return self._spec

    @property
    def np_random_seed(self) -> int | tuple[int, ...] | None:
        """The seed in use, drawn by the first reset if it was given none; a tuple with one per env if they differ."""
        if self._root is None:
            return None
        words = zip(
            self.action_stream.seed_low.tolist(), self.action_stream.seed_high.tolist(), strict=True
        )
        seeds = tuple(low + (high << 32) for low, high in words)
        return seeds[0] if len(set(seeds)) == 1 else seeds

    @property
    def is_compiled(self) -> bool:
        """Whether `torchwrap.compile` has compiled this env. A copy of a compiled env runs eagerly."""
        return self._compiled is not None

    def sample_action(self) -> Value:
        """Random actions, drawn on the env's device from a stream of their own, so that the env's streams do not move."""
        return self.action_sampler(self.action_stream)

    def render(self, envs: Sequence[int] | None = None) -> tuple[np.ndarray[Any, Any], ...]:
        """Renders all envs, or those with the given indices, as NumPy arrays `(height, width, 3)` uint8.

        The env needs `render_mode="rgb_array"` at construction.
        """
        raise NotImplementedError(f"{self._name()} does not implement render().")

    def close(self) -> None:
        """Releases what the env holds outside of PyTorch. `with env:` calls it at the end."""

    def __enter__(self: AnyEnv) -> AnyEnv:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to(device)` comes here: the signature follows the buffers.
        super()._apply(fn, recurse)
        vars(self)["signature"] = self.signature.replace(
            device=fn(torch.empty(0, device=self.device)).device
        )
        return self

    def _dtypes(self) -> set[torch.dtype]:
        values = (spaces.REWARD, self.single_observation_space, self.single_action_space)
        return super()._dtypes() | {
            spaces.dtype(leaf) for space in values for _, leaf in spaces.leaves(space)
        }

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_compiled": None,
        }  # a compiled step belongs to this object: copies run eagerly

    # Attributes of layers.

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether this layer or an inner one, or an env of a simulator, has the attribute."""
        return hasattr(self, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """Returns the attribute of the outermost layer that has it, or raises an AttributeError.

        An attribute of a simulator's envs is a tuple with one value per env; a method is a function that calls all of them.
        """
        if not hasattr(self, name):
            raise AttributeError(f"{self!r} has no layer with the attribute {name!r}.")
        return getattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets the attribute on the outermost layer that has it, or in every env of a simulator that has it.

        If none has it, `force` sets it on this layer. Returns whether the attribute was set. Raises an AttributeError for a
        constructor argument, for a part of a layer, and where a simulator or a compiled step would not see the value.
        """
        if force or self.has_wrapper_attr(name):
            setattr(self, name, value)
            return True
        return False

    def _name(self) -> str:
        return self._spec.id if self._spec is not None else type(self).__name__

    def __repr__(self) -> str:
        return f"<{self._name()}(num_envs={self.num_envs}, device={self.device})>"

    # Checks of what a caller gives. All of them run before anything has changed.

    def _check_ready(self, call: str) -> TensorDict:
        """Returns the last root. Raises before the first reset, and after a call that did not finish."""
        if self._root is None or self._unfinished is not None:
            self.unwrapped._check_usable()
        if self._root is None:
            raise RuntimeError(
                f"{self._name()} has not been reset yet: call reset() before {call}."
            )
        if self._unfinished is not None:
            remedy = (
                "call reset(), or restore() with a snapshot"
                if self.can_snapshot
                else "call reset()"
            )
            fault = f"may hold the state of two different steps, because an earlier {self._unfinished} did not finish"
            raise RuntimeError(f"{self._name()} {fault}: {remedy}.")
        return self._root

    def _check_can_snapshot(self) -> None:
        if not self.can_snapshot:
            reason = "a simulator outside of PyTorch holds some of its state: state_dict() saves what transforms have learned"
            raise RuntimeError(f"{self._name()} cannot snapshot or restore, because {reason}.")

    def _check_mask(self, value: object, call: str = "reset") -> None:
        shape = (self.num_envs,)
        if not isinstance(value, Tensor) or (value.dtype, value.shape, value.device) != (
            torch.bool,
            shape,
            self.device,
        ):
            got = (
                f"{validation.described(value)} on {value.device}"
                if isinstance(value, Tensor)
                else repr(value)
            )
            remedy = (
                ": use `mask.squeeze(-1)`"
                if isinstance(value, Tensor) and value.shape == (*shape, 1)
                else ""
            )
            needed = f"a mask of shape {shape} torch.bool on {self.device}"
            raise ValueError(f"{self._name()}.{call} needs {needed}, but got {got}{remedy}.")
        if self._root is None and not value.all():
            raise RuntimeError(
                f"{self._name()} needs a first reset of every env, but got a mask of some: call reset() first."
            )

    def _is_dict_action(self, given: TensorDict) -> bool:
        # Actions of a Dict or Tuple space are TensorDicts with its keys.
        same = isinstance(given, TensorDictBase) and set(given.keys()) == self._action_keys
        return same and not isinstance(given.get("action", None), TensorDictBase)

    def _check_step_input(self, td: object) -> None:
        """Raises unless `td` is a TensorDict with an action of the env, to which `next` can be written."""
        if not isinstance(td, TensorDictBase):
            remedy = f": {_NEXT_ROOT}" if isinstance(td, tuple) else ""
            if isinstance(td, np.ndarray | list):
                remedy = ": call `env.step(torch.as_tensor(action))`"
            needed = (
                f'{self._name()}.step needs a TensorDict with "action", or an action as a tensor'
            )
            raise TypeError(f"{needed}, but got {type(td).__name__}{remedy}.")
        if (action := td.get("action", None)) is None:
            got = f"a TensorDict with keys {sorted(td.keys())}"
            raise ValueError(f'{self._name()}.step needs td["action"], but got {got}.')
        signature = self.signature
        try:
            spaces.check(
                self._label,
                "an action",
                signature.single_action_space,
                action,
                signature.num_envs,
                signature.device,
            )
        except ValueError as error:
            if (space := signature.single_action_space).shape != () or action.shape != (
                self.num_envs,
                getattr(space, "n", 0),
            ):
                raise
            raise ValueError(
                f"{str(error)[:-1]}: turn scores into actions with `scores.argmax(-1)`."
            ) from None
        if (
            "next" in td.keys()
            and not set((found := td["next"]).keys()) <= self.signature.policy_state.keys()
        ):
            if "reward" in found:
                got = f'a TensorDict with "next", which has been stepped: {_NEXT_ROOT}'
                raise ValueError(f"{self._name()}.step needs a root, but got {got}.")
            got = f"{sorted(found.keys())}: declare it with PolicyState"
            raise ValueError(
                f'{self._name()}.step needs only declared state of the policy under "next", but got {got}.'
            )
        if td.batch_size != (self.signature.num_envs,) or td.is_locked:
            got = f"{tuple(td.batch_size)}{', locked' if td.is_locked else ''}"
            needed = f"an unlocked TensorDict of batch size {(self.num_envs,)}"
            raise ValueError(f"{self._name()}.step needs {needed}, but got {got}.")

    def _check_snapshot(
        self, snapshot: object, state: policy.State
    ) -> tuple[Value, dict[str, Tensor]]:
        """The observation of a snapshot, in new memory, and its buffers. Raises unless its env was like this one."""
        owner = f"{self._name()}.restore"
        parts = dict(snapshot.items()) if isinstance(snapshot, TensorDict | dict) else {}
        buffers, observation = parts.pop("buffers", None), parts.pop("observation", None)
        if not isinstance(buffers, TensorDict | dict) or not isinstance(
            observation, Tensor | TensorDict | dict
        ):
            raise TypeError(
                f"{owner} needs the result of snapshot(), but got {type(snapshot).__name__}."
            )
        own, found = {**self._state_buffers(), **state}, {**buffers, **parts}
        if found.keys() != own.keys():
            different = sorted(found.keys() ^ own.keys())
            raise ValueError(
                f"{owner} needs a snapshot of the same env, but got one that differs in {different}."
            )
        for name, buffer in own.items():
            value = found[name]
            if (
                not isinstance(value, Tensor)
                or value.shape != buffer.shape
                or value.dtype != buffer.dtype
            ):
                needed = f"{owner} needs {name} of shape {tuple(buffer.shape)} {buffer.dtype}"
                raise ValueError(f"{needed}, but got {validation.described(value)}.")
        if not isinstance(observation, Tensor):
            observation = TensorDict(
                observation.to_dict() if isinstance(observation, TensorDict) else observation
            )
        observation = spaces.to_device(observation, self.device).clone()
        space, n = self.single_observation_space, self.num_envs
        spaces.check(owner, "a snapshot with observations", space, observation, n, self.device)
        return observation if isinstance(observation, Tensor) else TensorDict(
            observation.to_dict(), batch_size=[n]
        ), buffers
