"""Env: a batch of environments that step together on tensors and reset themselves."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchwrap import policy, spaces
from torchwrap._core import validation
from torchwrap._core.buffers import BatchedModule
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask, leaves, tensordict
from torchwrap.policy import State
from torchwrap.random import Stream, fresh_seed
from torchwrap.spaces import Signature, Value

AnyEnv = TypeVar("AnyEnv", bound="Env")
Result = TypeVar("Result")
Options = dict[str, Any]
"""Reset options by name."""

Root = dict[str, Value]
"""The entries of a root: `observation`, and the state of a recurrent policy."""

Step = Callable[[Value, State], tuple[TensorDict, Root]]
"""Takes an action and the policy's state. Returns the successor and the next root."""

NEXT_ROOT = "Pass the second result of the last step, `transition, td = env.step(td)`"


class CompiledStep(Protocol):
    """The graphs of an env's step, which `torchwrap.compile` makes."""

    def __call__(self, action: Value, state: State) -> tuple[TensorDict, Root]:
        """As `Env._step_and_reset`."""

    def without_reset(self, action: Value, state: State) -> tuple[TensorDict, Root]:
        """As `Env._step_only`."""


class _Status:
    """The progress of an env. A plain object, because `nn.Module.__setattr__` is slow."""

    root: TensorDict | None = None
    """The last root. None before the first reset."""
    unfinished: str | None = None
    """The call that has begun to change the env and has not returned."""


class Env(BatchedModule):
    """`num_envs` environments that step together on tensors and reset themselves.

    `td = env.reset(seed)` returns the initial observations. `transition, td = env.step(td)` takes
    `td["action"]`: `transition` holds the true successor, final observations included; the second
    `td` is the root of the next step. In rows whose episode ended, the root holds the initial
    observation of a new episode; elsewhere it equals `transition["next"]`.

    | key | shape, dtype |
    |---|---|
    | `observation` | `(num_envs, *shape)`, a nested TensorDict for `Dict` and `Tuple` spaces |
    | `action` | `(num_envs, *shape)` |
    | `("next", "observation")` | as `observation` |
    | `("next", "reward")` | `(num_envs, 1)` float32 |
    | `("next", "terminated")`, `("next", "truncated")`, `("next", "done")` | `(num_envs, 1)` bool |
    | `("next", "info", name)` | as the env declares |
    | `("info", name)` | with Gymnasium's `info_keys`: the info of `observation` |
    | `is_init`, and states by name | with `PolicyState`, for recurrent policies |

    Returned tensors belong to the caller: no later step changes them, and changing them in place
    does not change the env. Bad input raises a ValueError, TypeError or RuntimeError before
    anything has changed.

    Subclasses implement `_step` and `_reset`, both over the whole batch and without auto-reset,
    and declare the state of running episodes as `EnvBuffer`s. `step`, `step_without_reset` and
    `reset` cannot be overridden. The result of a hook is checked in its first call, where a draw
    from a global random generator is an error too; `torchwrap.testing.check_env` checks 40 steps.
    Hooks get a copy of the action.

    Args:
        signature: `num_envs`, the spaces of a single env, and the device.
        spec: Gymnasium's `EnvSpec`, if there is one.
        metadata: as Gymnasium's `Env.metadata`.
        render_mode: as Gymnasium's.

    >>> from gymnasium.spaces import Box
    >>> class Echo(Env):
    ...     def _step(self, action):
    ...         flags = {"terminated": action > 0.9, "truncated": action > 2}
    ...         return TensorDict({"observation": action, "reward": -action, **flags}, [2])
    ...     def _reset(self, mask, options=None):
    ...         return TensorDict({"observation": torch.zeros(2, 1)}, [2])
    >>> env = Echo(Signature(2, Box(-1, 1, (1,)), Box(-1, 1, (1,)), torch.device("cpu")))
    >>> td = env.reset().set("action", torch.tensor([[0.5], [1.0]]))
    >>> transition, td = env.step(td)
    >>> transition["next", "observation"].flatten(), td["observation"].flatten()
    (tensor([0.5000, 1.0000]), tensor([0.5000, 0.0000]))
    """

    can_snapshot = True
    """Whether all state is in buffers, so that `snapshot` and `restore` work."""

    host_stepped = False
    """True if a simulator outside of PyTorch steps this env. Only its transforms are compiled."""

    _not_copied: tuple[str, ...] = ("_compiled",)
    """Attributes that belong to this object, and are None in a copy, which runs eagerly."""

    info_spaces: Mapping[str, Space[Any]] = {}
    """The infos of a simulator on the host by name, for which its transforms are compiled."""

    def __init__(
        self,
        signature: Signature,
        *,
        spec: EnvSpec | None = None,
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__()
        num_envs = signature.num_envs
        device = signature.device
        self.signature = signature
        self.metadata = metadata or {}
        self.render_mode = render_mode
        self.action_stream = Stream(num_envs, signature.first_index, tag=1, device=device)
        self.action_sampler = spaces.Sampler(signature.single_action_space, device)
        # Actions of a Dict or Tuple space are TensorDicts with these keys.
        self._action_keys = set(spaces.children(signature.single_action_space) or ())
        # The name in messages.
        self._label = type(self).__name__ if spec is None else spec.id
        self._spec = spec
        self._compiled: CompiledStep | None = None
        self._batched_spaces: dict[str, Space[Any]] = {}
        self._status = _Status()
        self.allocate(num_envs, device)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for verb in ("step", "step_without_reset", "reset"):
            if getattr(cls, verb) is not getattr(Env, verb):
                fault = f"{verb}() cannot be overridden, because other layers do not call it"
                remedy = "Override _step(action) or _reset(mask, options=None)"
                raise TypeError(refusal(cls.__name__, fault, remedy=remedy))

    # Hooks for subclasses.

    def _step(self, action: Value) -> TensorDict:
        """Takes an action in every env.

        Returns a new TensorDict with `observation`, `reward`, `terminated`, `truncated`, and `info`
        if the env declares any.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement _step(action).")

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        """Starts new episodes in the rows of `mask`. Returns a new TensorDict with `observation`.

        Other rows keep their state, and their values in the result are ignored.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement _reset(mask, options)."
        )

    def _leave_out(self, rows: RowMask) -> None:
        """Lets finished rows wait in the next step, whose results for them are dropped.

        Repeated actions call it. Raises if the simulator's other rows cannot go on without them.
        """

    def _seed(self, seed: int, mask: RowMask) -> None:
        """Seeds every random stream in the rows of `mask`, each of a transform by its name."""
        counts: collections.Counter[str] = collections.Counter()
        for path, module in self.named_modules():  # inner layers first
            if isinstance(module, Stream):
                name = re.sub(r"^(env\.)+", "", path)  # whatever the number of layers above
                counts[name] += 1
                is_of_transform = module.tag > 1  # the env's own streams have the tags 0 and 1
                module.seed(seed, mask, f"{name} {counts[name]}" if is_of_transform else "")

    def _choose_seed(
        self, seed: int | None, is_first: bool, mask: Tensor | None = None
    ) -> int | None:
        """Returns the seed of a reset, or None to continue the random streams.

        The first reset always has a seed, so that an unseeded run can be repeated. Raises for a
        seed that the simulator does not take.
        """
        return fresh_seed() if seed is None and is_first else seed

    def _check_options(self, options: Options) -> None:
        """Raises for reset options that `_reset` does not take; by default it takes none."""
        raise ValueError(refusal(f"{self._label}.reset", "options must be None", options))

    def _check_usable(self) -> None:
        """Raises if the simulator is gone, so that reset() cannot recover."""

    def _root_info(self) -> Root:
        """The infos of the current observations, for the roots of a simulator on the host."""
        return {}

    # The public verbs.

    @torch.no_grad()
    def reset(
        self, seed: int | None = None, mask: Tensor | None = None, options: Options | None = None
    ) -> TensorDict:
        """Starts new episodes in every env, or where `mask` is set.

        Args:
            seed: restarts the random streams. That of env *i* depends on the seed and its global
                index only. None continues with the next episode; the first reset then draws a seed
                from the operating system.
            mask: bool, `(num_envs,)`. Other rows keep the observation of the last root, as you
                left it.
            options: passed on to the env. A `FunctionalEnv` takes initial states,
                `{"state": {...}}`.

        Returns:
            The root of the next step: a TensorDict `(num_envs,)` with `observation`.
        """
        seed = self._check_reset_input(seed, mask, options)
        last: TensorDict | None = None
        if mask is None:
            rows = RowMask.full(self.num_envs, self.device)
        else:
            last = self._status.root
            rows = RowMask(mask, synchronize=self.host_stepped)
        _, root = self._drive("reset()", self._start, seed, rows, last, options)
        return root

    @torch.no_grad()
    def step(self, td: TensorDict | Tensor) -> tuple[TensorDict, TensorDict]:
        """Takes an action in every env, and resets the finished rows.

        Discrete actions are checked on the CPU; numbers of a `Box` are not (`PassiveEnvChecker`
        does it). No gradient flows through a step; `FunctionalEnv.simulate` is differentiable.

        Args:
            td: the root TensorDict with `action` set; or the bare action, which is then set in the
                last root. It must not contain the `next` of an earlier step. Only the action is
                read, with the policy's next state, so a root from before a reset is not noticed.

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
        step = self._compiled or self._step_and_reset
        given = self._with_action(self._check_ready("step()"), td)
        return self._drive("step()", self._transition, given, step)

    @torch.no_grad()
    def step_without_reset(self, td: TensorDict | Tensor) -> tuple[TensorDict, TensorDict]:
        """Takes an action in every env, and resets none: for libraries that reset by themselves.

        The second result holds the observation of `transition["next"]` in every row. Reset the
        finished rows before the next step: `env.reset(mask=transition["next", "done"].squeeze(-1))`
        returns the root that `step` would. The arguments are those of `step`.

        >>> from torchwrap.testing import ScriptedEnv
        >>> env = ScriptedEnv(1, (1,), episode_lengths=1)
        >>> _ = env.reset()
        >>> transition, td = env.step_without_reset(env.sample_action())
        >>> td["observation"], env.reset(mask=transition["next", "done"].squeeze(-1))["observation"]
        (tensor([[1.]]), tensor([[0.]]))
        """
        step = self._step_only
        if self._compiled is not None:
            step = self._compiled.without_reset
        given = self._with_action(self._check_ready("step_without_reset()"), td)
        return self._drive("step_without_reset()", self._transition, given, step)

    def _drive(
        self, call: str, function: Callable[..., tuple[Result, Root]], *args: Any
    ) -> tuple[Result, TensorDict]:
        """Calls a function that changes the env, and keeps the root that it returns.

        If it raises, the env has no root to step from until a reset.
        """
        status = self._status
        status.unfinished = call
        result, entries = function(*args)
        if self.host_stepped:
            entries |= self.unwrapped._root_info()
        root = tensordict(entries, self.signature.num_envs)
        status.root = root
        status.unfinished = None
        return result, root

    def _transition(self, td: TensorDict, step: Step) -> tuple[TensorDict, Root]:
        """Takes a step from a checked root. Returns the transition and the next root."""
        action = td["action"]
        if action.requires_grad:
            action = action.detach()
        state: State = {}
        for name in self.signature.policy_state:
            state[name] = td["next", name].detach()
        successor, root = step(action, state)
        return td.set("next", successor), root

    def _with_action(self, root: TensorDict, given: Any, bounds: bool = True) -> Any:
        """Returns a checked root with an action. A bare one is put into a copy of the last root.

        Then the policy's state does not change in this step.
        """
        is_action = isinstance(given, Tensor)
        if self._action_keys and isinstance(given, TensorDictBase):
            # If the space itself has a key "action", only the root holds a TensorDict there.
            is_root = isinstance(given.get("action", None), TensorDictBase)
            is_action = set(given.keys()) == self._action_keys and not is_root
        if is_action:
            entries: dict[str, Any] = dict(root.items())
            entries["action"] = given
            entries.pop("next", None)
            state = {name: root[name] for name in self.signature.policy_state}
            if state:
                entries["next"] = tensordict(state, self.num_envs)
            given = tensordict(entries, self.num_envs)
        self._check_step_input(given, bounds)
        return given

    # Resets and steps without checks. `torchwrap.compile` and `pure` trace each as a whole.

    def _start(self, seed: int | None, rows: RowMask, *args: Any) -> Any:
        """Seeds some rows, and starts new episodes in them. Returns None and the next root."""
        if seed is not None and rows.any():
            self._seed(seed, rows)
        return None, self._restart(rows, *args)

    def _restart(
        self, rows: RowMask, last: TensorDict | None, options: Options | None = None
    ) -> Root:
        """Starts new episodes in some rows. The others keep what they have in the last root."""
        if last is not None and not rows.any():
            observation = last["observation"]
        else:
            observation = self._run("_reset", rows, options or None)["observation"]
        if last is not None:
            observation = rows.where(observation, last["observation"])
        observation = observation.contiguous()
        return {"observation": observation, **policy.reset(self.signature, rows, last)}

    def _step_and_reset(
        self, action: Value, state: State, resets: bool = True
    ) -> tuple[TensorDict, Root]:
        # A copy, because a layer may write to it.
        successor, observation = self._advance(action.clone())
        done = successor["done"]
        if resets:
            finished = RowMask(done, synchronize=self.host_stepped)
            if finished.any():
                initial = self._run("_reset", finished)
                finished.assign_(observation, initial["observation"])
        root: Root = {"observation": observation}
        if state:
            successor.update(state)
            ended = done if resets else torch.zeros_like(done)
            root |= policy.next_entries(self.signature, state, ended)
        return successor, root

    def _advance(self, action: Value) -> tuple[TensorDict, Value]:
        """Takes a step of every layer. Returns its successor, and a copy of its observation."""
        successor = with_done(self._run("_step", action))
        return successor, spaces.apply(_contiguous_copy, successor["observation"])

    def _step_only(self, action: Value, state: State) -> tuple[TensorDict, Root]:
        return self._step_and_reset(action, state, resets=False)

    def _check_result(self, hook: str, result: Any, device: torch.device) -> None:
        owner = self._hook_name(hook)
        spaces.check_layer(owner, self.signature, result, flags=hook == "_step")
        if hook == "_reset" and len(result.keys()) > 1:
            raise ValueError(
                refusal(
                    owner,
                    'the result must hold "observation" alone',
                    f"the keys {sorted(result.keys())}",
                    "Make other values part of a Dict observation, or set them in step()",
                )
            )

    # State.

    @torch.no_grad()
    def snapshot(self) -> TensorDict:
        """The whole state of the env, and the last root as you left it.

        It holds the simulator's state, RNG streams, frames, returns and statistics. A RuntimeError
        says that a simulator outside of PyTorch holds state.
        """
        root = self._check_ready("snapshot()")
        self._check_can_snapshot()
        buffers = {name: buffer.clone() for name, buffer in self._state_buffers().items()}
        entries: Any = {"buffers": TensorDict(buffers, [])}
        for key in policy.keys(self.signature):
            entries[key] = root[key].clone()
        return TensorDict(entries, [])

    @torch.no_grad()
    def restore(
        self, snapshot: TensorDict | dict[str, Any], mask: Tensor | None = None
    ) -> TensorDict:
        """Returns to a snapshot of this env, bit for bit.

        Args:
            snapshot: the result of `snapshot()`, or its `to_dict()`, which
                `torch.load(weights_only=True)` reads with every version of tensordict.
            mask: bool, `(num_envs,)`: the envs that return to it. Values that all envs share, such
                as statistics, then stay.

        Returns:
            The root of the next step.
        """
        self._check_can_snapshot()
        given = self._check_snapshot(snapshot)
        entries: Root = {}
        for key in policy.keys(self.signature):
            value = given[key]
            if isinstance(value, TensorDict):
                # A snapshot that was a dict has lost the batch size.
                value = TensorDict(value.to_dict(), [self.num_envs])
            entries[key] = spaces.to_device(value, self.device).clone()
        spaces.check(
            f"{self._label}.restore",
            "observation",
            self.single_observation_space,
            entries["observation"],
            self.num_envs,
            self.device,
        )
        rows: RowMask | None = None
        if mask is not None:
            self._check_mask(mask, "restore")
            last = self._check_ready("restore() of some envs")
            rows = RowMask(mask)
            for key, value in entries.items():
                entries[key] = rows.where(value, last[key])

        def write() -> tuple[None, Root]:
            for name, buffer in self._state_buffers(per_env=rows is not None).items():
                value = given["buffers", name]
                if rows is None:
                    buffer.copy_(value)
                else:
                    rows.assign_(buffer, value.to(buffer.device))
            return None, entries

        _, root = self._drive("restore()", write)
        return root

    def _state_buffers(self, per_env: bool = False) -> dict[str, Tensor]:
        """The buffers of a snapshot by name; with `per_env`, only those with one row per env."""
        names = set(self._paths("_env_buffer_names"))
        tensors = dict(self.named_buffers())
        if not per_env:
            names.update(tensors.keys() & self.state_dict().keys())
            names.update(self._paths("_state_buffer_names"))
            tensors |= self.named_parameters()  # functions may be networks
        return {name: tensor for name, tensor in tensors.items() if name in names}

    @property
    def elapsed_steps(self) -> Tensor:
        """Steps since the start of each running episode: int64 `(num_envs,)`, a copy.

        Assigning it moves the clocks of every layer, including native limits and `TimeLimit`, so
        that episodes can be truncated at different times from the start. Observations show the new
        time from the next step on. A RuntimeError says that no layer has a clock, because a
        simulator counts the steps, or that actions are repeated.

        >>> from torchwrap.envs.cartpole import CartPole; from torchwrap import FunctionalEnv
        >>> env = FunctionalEnv(CartPole(), num_envs=2, max_episode_steps=500)
        >>> _ = env.reset()
        >>> env.elapsed_steps = torch.tensor([0, 499])
        >>> env.step(env.sample_action())[0]["next", "truncated"].flatten()
        tensor([False,  True])
        """
        first = self._find_clocks()[0]
        return first.reshape(-1).to(torch.int64, copy=True)

    @elapsed_steps.setter
    def elapsed_steps(self, steps: Tensor) -> None:
        shape = self.elapsed_steps.shape
        limit = self.signature.max_episode_steps or 2**63 - 1
        is_integer = isinstance(steps, Tensor) and steps.dtype in (torch.int32, torch.int64)
        fits = is_integer and steps.shape == shape
        if not fits or not ((steps >= 0) & (steps < limit)).all():
            must = f"elapsed_steps must be a torch.int64 {tuple(shape)} in [0, {limit - 1}]"
            raise ValueError(refusal(self._label, must, steps))
        self._check_ready("elapsed_steps is assigned")
        for clock in self._find_clocks():
            clock.copy_(steps.view_as(clock))

    def _find_clocks(self) -> list[Tensor]:
        """The tensors in which the layers count the steps of each episode."""
        clocks: list[Tensor] = []
        for module in self.modules():
            if isinstance(module, BatchedModule):
                clocks += module._clocks()
        if not clocks:
            fault = "elapsed_steps needs a layer that counts steps in a tensor"
            remedy = "Put transforms.TimeLimit on the env"
            raise RuntimeError(refusal(self._label, fault, remedy=remedy))
        return clocks

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
        return self._batched_space("single_observation_space")

    @property
    def action_space(self) -> Space[Any]:
        return self._batched_space("single_action_space")

    def _batched_space(self, name: str) -> Space[Any]:
        # Kept, because it has a generator. Made when asked for: bounds of images are large.
        if name not in self._batched_spaces:
            self._batched_spaces[name] = batch_space(getattr(self, name), self.num_envs)
        return self._batched_spaces[name]

    @property
    def device(self) -> torch.device:
        return self.signature.device

    @property
    def unwrapped(self) -> Env:
        return self

    @property
    def root(self) -> TensorDict:
        """The root of the next step, of the last reset, step or collection, as you left it.

        >>> from torchwrap.testing import ScriptedEnv
        >>> env = ScriptedEnv(2)
        >>> env.reset() is env.root
        True
        """
        return self._check_ready("root is read")

    @property
    def spec(self) -> EnvSpec | None:
        """Gymnasium's `EnvSpec`, with every wrapper and transform.

        `torchwrap.make(env.spec)` builds another env like this.
        """
        return self._spec

    @property
    def np_random_seed(self) -> int | None:
        """The seed in use, of env 0: given to a reset, or drawn by the first one."""
        if self._status.root is None:
            return None
        stream = self.action_stream
        return int(stream.seed_low[0]) + (int(stream.seed_high[0]) << 32)

    @property
    def is_compiled(self) -> bool:
        """Whether `torchwrap.compile` has compiled this env. A copy of it runs eagerly."""
        return self._compiled is not None

    def sample_action(self, action_masks: Tensor | None = None) -> Value:
        """Random actions, drawn on the env's device from a separate stream.

        The streams of the env and its transforms do not move.

        Args:
            action_masks: the allowed actions of each env, not 0 in `(num_envs, n)`, as those of
                sb3-contrib: `n` is that of `Discrete`, the sum of `nvec` of `MultiDiscrete`, and
                twice that of `MultiBinary`.

        >>> from gymnasium.spaces import Discrete; from torchwrap.testing import ScriptedEnv
        >>> env = ScriptedEnv(2, action_space=Discrete(3))
        >>> env.sample_action(torch.tensor([[0, 1, 0], [0, 0, 1]]))
        tensor([1, 2])
        """
        return self.action_sampler(self.action_stream, action_masks)

    def render(self, envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Renders all envs, or those with the given indices.

        The env needs `render_mode="rgb_array"` at construction. Returns NumPy arrays
        `(height, width, 3)` uint8.
        """
        raise NotImplementedError(f"{self._label} does not implement render().")

    def close(self) -> None:
        """Releases what the env holds outside of PyTorch. `with env:` calls it at the end."""

    def __enter__(self: AnyEnv) -> AnyEnv:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to(device)` comes here: the signature follows the buffers.
        super()._apply(fn, recurse)
        root = self._status.root
        if root is not None:
            self._status.root = root.apply(fn)
        moved = fn(torch.empty(0, device=self.device))
        self.signature = self.signature.replace(device=moved.device)
        return self

    def _dtypes(self) -> set[torch.dtype]:
        dtypes = super()._dtypes() | {torch.float32}  # float32 for rewards
        for space in (self.single_observation_space, self.single_action_space):
            dtypes.update(spaces.dtype(leaf) for _, leaf in spaces.leaves(space))
        return dtypes

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(self._not_copied)}

    # Attributes of layers.

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether `get_wrapper_attr` returns an attribute."""
        try:
            self.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def get_wrapper_attr(self, name: str) -> Any:
        """Returns the attribute of the outermost layer that has it, or of functions or a simulator.

        That of a simulator's envs is a tuple with one value per env; a method is a function that
        calls all of them. Raises an AttributeError if nothing has the attribute.
        """
        return getattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets the attribute of the outermost layer that has it, or else of the innermost env.

        Over Gymnasium's envs, that is each of them: a list or tuple has one value per env, as for
        Gymnasium's `set_attr`, and another value, such as an array, is for all. Other simulators
        hold no attributes. An array `(num_envs, ...)` for `params` is written by
        `env.unwrapped.params[name].copy_(array)`. In Python, `env.name = value` sets an attribute
        of this layer alone.

        Without `force`, a name that nothing has is not set. Returns whether it was set. Raises an
        AttributeError for a constructor argument of a transform, for `params`, and where a
        simulator or a function would not see the value, and a ValueError for a list of another
        length.
        """
        if not force and not hasattr(self, name):
            return False
        setattr(self, name, value)
        return True

    def __repr__(self) -> str:
        return f"<{self._label}(num_envs={self.num_envs}, device={self.device})>"

    # Checks of the caller's input. All of them run before anything has changed.

    def _check_ready(self, call: str) -> TensorDict:
        """Returns the last root. Raises before the first reset, and after an unfinished call."""
        root = self._status.root
        unfinished = self._status.unfinished
        if root is not None and unfinished is None:
            return root
        self.unwrapped._check_usable()
        if root is None:
            raise RuntimeError(refusal(self._label, f"call reset() before {call}"))
        fault = f"an earlier {unfinished} did not finish, so it may hold the state of two steps"
        remedy = "Call reset()"
        if self.can_snapshot:
            remedy += ", or restore() with a snapshot"
        raise RuntimeError(refusal(self._label, fault, remedy=remedy))

    def _check_can_snapshot(self) -> None:
        if not self.can_snapshot:
            fault = "cannot snapshot or restore the state of a simulator outside of PyTorch"
            raise RuntimeError(refusal(self._label, fault))

    def _check_reset_input(
        self, seed: int | None, mask: Tensor | None, options: Options | None
    ) -> int | None:
        """Returns the seed to use. The first reset also warns about untrained statistics."""
        owner = f"{self._label}.reset"
        is_first = self._status.root is None
        if mask is not None:
            self._check_mask(mask, "reset")
            if self._status.unfinished is not None and not mask.all():
                self._check_ready("reset()")
        if seed is not None:
            seed = validation.integer(owner, "seed", seed, 0, 2**64 - 1)
        seed = self.unwrapped._choose_seed(seed, is_first, mask)
        if options is not None and not isinstance(options, dict):
            raise TypeError(refusal(owner, "options must be a dict", repr(options)))
        if options:
            self._check_options(options)
        if is_first and not torch.compiler.is_compiling():
            for name, module in self.named_modules():
                if isinstance(module, BatchedModule) and not module.training:
                    module._warn_untrained(f"{self._label}: {name}")
        return seed

    def _check_mask(self, mask: Tensor, call: str) -> None:
        """Raises unless `mask` is one, and the last root, as the user left it, has rows to keep."""
        owner = f"{self._label}.{call}"
        shape = (self.num_envs,)
        remedy = "Use `mask.squeeze(-1)` for a column, and `.to(env.device)`"
        validation.tensor(owner, "mask", mask, shape, torch.bool, self.device, remedy)
        root = self._status.root
        if root is not None:
            self._check_root(owner, root)
        elif not mask.all():
            fault = "the mask of the first reset must hold every env"
            raise RuntimeError(refusal(owner, fault, remedy="Call reset() first"))

    def _check_root(self, owner: str, root: Any) -> None:
        """Raises unless the last root has the layout that it had, however the user left it."""
        signature = self.signature
        size = signature.num_envs
        device = signature.device
        space = signature.single_observation_space
        what = "observation of the last root"
        observation = root.get("observation", None)
        spaces.check(owner, what, space, observation, size, device, bounds=False)
        for name, row in policy.root_buffers(signature).items():
            what = f"{name} of the last root"
            shape = (size, *row.shape)
            spaces.check_tensor(owner, what, root.get(name, None), shape, row.dtype, device)

    def _root_like(self, device: torch.device) -> dict[str, Any]:
        """The entries of a root without info, with any values."""
        signature = self.signature.replace(device=device)
        space = signature.single_observation_space
        observation = spaces.zeros(space, signature.num_envs, device)
        return {**policy.initial_entries(signature), "observation": observation}

    def _check_step_input(self, td: object, bounds: bool = True) -> None:
        """Raises unless `td` is a root with an action, to which `next` can be written."""
        owner = self._label
        signature = self.signature
        if not isinstance(td, TensorDictBase):
            must = 'td must be a TensorDict with "action", or the action as tensors'
            raise TypeError(refusal(f"{owner}.step", must, type(td).__name__))
        action = td.get("action", None)
        if action is None:
            must = 'td must contain "action"'
            raise ValueError(refusal(f"{owner}.step", must, sorted(td.keys())))
        space = signature.single_action_space
        num_envs = signature.num_envs
        spaces.check(owner, "an action", space, action, num_envs, signature.device, bounds)
        if signature.policy_state:
            policy.check(owner, signature, td, num_envs)
        keys: set[str] = set()
        if "next" in td.keys():
            keys.update(td["next"].keys())
        if keys - set(signature.policy_state):
            must = 'td["next"] must hold only the declared state of the policy'
            remedy = NEXT_ROOT if "reward" in keys else policy.DECLARED
            raise ValueError(refusal(f"{owner}.step", must, sorted(keys), remedy))
        if td.batch_size != (num_envs,) or td.is_locked:
            must = f"td must be an unlocked TensorDict of batch size {(num_envs,)}"
            got = f"{tuple(td.batch_size)}, is_locked={td.is_locked}"
            raise ValueError(refusal(f"{owner}.step", must, got))

    def _check_snapshot(self, snapshot: Any) -> TensorDict:
        """Returns a snapshot as a TensorDict. Raises unless its env was like this one."""
        owner = f"{self._label}.restore"
        try:
            leaves(snapshot)  # TensorDict would make tensors of lists, which may be very large
            given = TensorDict(dict(snapshot), [])
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise TypeError(
                refusal(owner, "snapshot must be the result of snapshot()", type(snapshot).__name__)
            ) from None
        buffers = TensorDict(self._state_buffers(), [])
        root = self._root_like(torch.device("meta"))  # only shapes and dtypes are compared
        entries = TensorDict({"buffers": buffers, **root}, [])
        expected = dict(entries.items(True, True))
        found = dict(given.items(True, True))
        others = sorted(map(str, found.keys() ^ expected.keys()))
        if others:
            fault = f"snapshot must be one of the same env; only one of the two has {others}"
            raise ValueError(refusal(owner, fault))
        for key, leaf in expected.items():
            if str(key[-1]).endswith((".records", ".synced")):
                found[key] = given[key] = _layout_of_today(found[key], leaf, self.num_envs)
            needed = validation.described(leaf)
            got = validation.described(found[key])
            if got != needed:
                raise ValueError(refusal(owner, f"{key} must be {needed}", got))
        for prefix, module in self.named_modules():
            limits = module.buffer_limits if isinstance(module, BatchedModule) else {}
            for name, (least, most) in limits.items():
                value = given["buffers", f"{prefix}.{name}"]
                if (value != value.clamp(least, most)).any():
                    must = f"{prefix}.{name} must be in [{least}, {most}]"
                    raise ValueError(refusal(owner, must, value))
        return given


def _layout_of_today(value: Any, leaf: Any, num_envs: int) -> Any:
    """Records and statistics as snapshots of 0.2.0 have them, in the layout of a buffer."""
    if value.dim() != 2 or leaf.dim() < 2:
        return value
    if value.shape == leaf.flatten(1).shape:
        return value.reshape(leaf.shape)
    rest = value[len(leaf) - 1 :]  # holds zeros: another `buffer_length` is not taken for it
    is_old = len(rest) == num_envs and not rest.any()
    return value[: len(leaf)] if is_old else value


def _contiguous_copy(path: spaces.Path, leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)


def check_is_env(owner: str, env: Any) -> None:
    """Raises unless `env` is one. A trainer's adapter holds it."""
    if not isinstance(env, Env):
        is_adapter = isinstance(getattr(env, "env", None), Env)
        remedy = "Pass its `.env`" if is_adapter else ""
        raise TypeError(refusal(owner, "env must be a torchwrap.Env", type(env).__name__, remedy))


def with_done(successor: TensorDict) -> TensorDict:
    """Sets `done` in a successor, and returns it."""
    return successor.set("done", successor["terminated"] | successor["truncated"])


@torch.no_grad()
def take(env: Env, action: Value) -> tuple[TensorDict, TensorDict]:
    """As `env.step(action)`, with the successor in place of the transition, for trainers' adapters.

    The policy has no state.
    """
    env._check_ready("step()")
    signature = env.signature
    space = signature.single_action_space
    spaces.check(env._label, "an action", space, action, signature.num_envs, signature.device)
    return env._drive("step()", env._compiled or env._step_and_reset, action, {})
