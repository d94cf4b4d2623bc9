"""deploy: a policy and its env's transforms as one module, from raw observations to actions."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchwrap import policy as policies
from torchwrap import spaces
from torchwrap._compile.inputs import places_of, swap
from torchwrap._core import rows, validation
from torchwrap._core.buffers import BatchedModule, EnvBuffer
from torchwrap._core.errors import refusal
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.operators import OperatorMode
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.env import Env
from torchwrap.policy import Policy, modules_of
from torchwrap.random import Stream
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.groups import ObservationGroups, ObservationKeys
from torchwrap.transforms.transform import Compose, ObservationTransform, Transform
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper

Tree = Any
"""A tensor, or a dict of trees for a `Dict` or `Tuple` space; a `Tuple` has the keys "0", "1"..."""

Part = Transform | Wrapper
State = Mapping[str, Tensor]
Names = Sequence[str | type]
"""Transforms and wrappers, by the name of their class or by the class."""

Copies = dict[Any, Any]
"""Copies by the id of the original, as `copy.deepcopy` keeps them; of a function, by itself."""

Faults = dict[str, str]
"""Why a transform or wrapper cannot be deployed, by the name of its class."""

OWNER = "This deployed policy"
_MOST_NUMBERS = 10_000_000  # of data to copy: a replay buffer has more, and no policy reads it
_CONSTANTS = (
    *(Number, str, bytes, slice, range, type, Enum, PurePath),
    *(torch.device, torch.dtype, np.generic, np.dtype),
    *(FunctionType, BuiltinFunctionType, logging.Logger),
)
_NUM_SAMPLES = 256  # observations that show whether an entry has an effect
_ROW = "row_"
PASS_MODULE = "Pass the module itself, or a bound method of it"


def deploy(
    env: Env,
    policy: Policy,
    *,
    observations: Sequence[str] | None = None,
    without: Names = (),
) -> DeployedPolicy:
    """One module from the raw observation to the env's action, for a robot, a game or a service.

    It consists of copies of the env's observation transforms, the policy, and the env's action
    transforms, with frozen statistics, and computes the actions of `evaluate`, bit for bit. A
    function computes with copies of what it and other functions of its file name; of a plain object
    with modules, these, tensors, arrays and constants are copied. Rewards, time limits and
    statistics of episodes are left out.

    The result is called as `module(observation) -> action`. If something lasts from step to step
    (frames, delays, clocks, the states of `PolicyState`), it is called as `module(observation,
    state) -> (action, state)`, with a dict of tensors `(batch, ...)`. The entry `is_first`, bool
    `(batch, 1)`, is set in `initial_state(batch)`; set rows of it to start episodes in them.

    `torch.export.export(module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes())`
    makes a program for PyTorch alone, ONNX Runtime and AOTInductor, with torch 2.11 or later.

    Args:
        env: the env that the policy was trained in, or a sibling with its `state_dict`.
        policy: as for `evaluate`. It has to be deterministic: `argmax(-1)` of logits, or the mean,
            instead of a sample.
        observations: the entries of a `Dict` observation that the policy reads, such as
            `["actor"]`. Other entries are left out, with the groups of `ObservationGroups` and the
            raw observations that only they need. None keeps everything.
        without: names or classes of transforms and wrappers to leave out, such as noise,
            `StickyAction` and `RepeatAction`, because the caller takes over their work.

    Raises:
        TypeError, ValueError: for a policy that draws random numbers, carries state of its own or
            cannot be copied, and transforms and wrappers that draw random numbers, drive the env,
            or need the reward.

    >>> import torchwrap as tw; from torchwrap import transforms as T
    >>> env = tw.make("CartPole-v1", 8)
    >>> env = tw.TransformedEnv(env, T.NormalizeObservation(), T.FrameStackObservation(2))
    >>> _, network = env.reset(seed=0), nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    >>> module = deploy(env, lambda td: network(td["observation"]).argmax(-1))
    >>> action, state = module(torch.zeros(3, 4), module.initial_state(3))
    >>> action.shape, list(state)
    (torch.Size([3]), ['FrameStackObservation.histories.0.frames', 'is_first'])
    """
    if not isinstance(env, Env):
        raise TypeError(refusal("deploy", "env must be an Env", type(env).__name__))
    parts = [part for module in modules_of(policy) for part in module.modules()]
    if not callable(policy) or any(isinstance(part, Env) for part in parts):
        must = "policy must be callable, without an Env"
        remedy = "If an agent holds its env, pass `agent.network` or a function of `network`"
        raise TypeError(refusal("deploy", must, repr(policy), remedy))
    if isinstance(without, str | type):
        raise TypeError(refusal("deploy", "without must be a list", repr(without)))
    if observations is not None:
        keys = list(spaces.children(env.single_observation_space) or ())
        if isinstance(observations, str) or not observations or set(observations) - set(keys):
            must = f"observations must be a list of entries of a Dict observation, among {keys}"
            raise ValueError(refusal("deploy", must, repr(observations)))
    return DeployedPolicy(env, policy, observations, without)


class DeployedPolicy(nn.Module):
    """A policy with the transforms of its env, as one module. `torchwrap.deploy` makes it.

    Gradients do not flow through it. While it computes, its transforms hold the state, so only one
    thread at a time may call it. An exported program has no such limit.

    Attributes:
        metadata: inputs and outputs, as JSON can represent them: the spaces with their bounds
            (equal bounds are one number, None is infinity), the state, and the transforms.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        observations: Sequence[str] | None,
        without: Names,
    ) -> None:
        super().__init__()
        faults: Faults = {}
        kept, raw_spaces = _deployable(env, without, faults)
        self._signature = env.signature
        self._observations = None if observations is None else list(observations)
        self._space = raw_spaces["observation"]
        self._action_space = raw_spaces["action"]
        copies: Copies = {}
        self.transforms = Compose([_copied(part, copies) for part in kept])
        if observations is not None:
            _drop_groups(self.transforms, observations)
        _keep_one_row(self.transforms, env.device, faults)
        described = _replace(self.transforms, without, faults)
        _find_streams(self.transforms, faults)
        if faults:
            raise _unusable(faults)
        for transform in self.transforms.modules():
            if isinstance(transform, Transform):
                # A Compose would check results of hooks, and refuse another number of rows.
                transform._trusted = frozenset(("action", "step", "reset"))
        self.policy = policy
        if isinstance(policy, nn.Module):
            self.policy = _copied(policy, copies)
        self.networks = self._copy_functions(copies)
        self.eval().requires_grad_(False)
        # The state consists of the rows that transforms hold, and of those that start here.
        self._held = self.transforms._paths("_env_buffer_names")
        self.start = BatchedModule()
        is_first = EnvBuffer((1,), torch.bool, fill=True)
        for name, row in {**env.signature.policy_state, "is_first": is_first}.items():
            # With a prefix, because a module has attributes of many names.
            self.start.register_env_buffer(_ROW + name, row.allocate(None, 1, env.device))
        stateless = itertools.takewhile(_ignores_starts, self.transforms)
        self._num_stateless = len(list(stateless))
        has_stateful = self._num_stateless < len(self.transforms)
        self._is_stateful = has_stateful or bool(env.signature.policy_state)
        if observations is not None:
            self._space = self._needed_space()
        self._check(env, copies)
        self.metadata = self._describe(env, described)

    def train(self, mode: bool = True) -> DeployedPolicy:
        """It stays in eval mode, also as a part of another module."""
        return super().train(False)

    @property
    def _device(self) -> torch.device:
        return self.start.get_buffer(_ROW + "is_first").device

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        """The state with which every row starts an episode. Empty if nothing lasts."""
        return self._initial_state(validation.integer(OWNER, "batch_size", batch_size, 1))

    def _initial_state(self, number: int) -> dict[str, Tensor]:
        """As `initial_state`. In an export, the number is a symbol."""
        if not self._is_stateful:
            return {}
        state = {name: self.transforms.get_buffer(name) for name in self._held}
        for name, row in self.start.named_buffers():
            state[name.removeprefix(_ROW)] = row
        for name, row in state.items():
            state[name] = row.expand(number, *row.shape[1:]).clone()
        return state

    def example_inputs(self, batch_size: int = 2) -> tuple[Tree, ...]:
        """Arguments for exports: an observation of zeros, and the initial state if there is one.

        A program that is exported with a batch of 1 takes no other batch.
        """
        zeros = spaces.zeros(self._space, batch_size, self._device)
        observation = _plain(self._space, zeros)
        if not self._is_stateful:
            return (observation,)
        return observation, self.initial_state(batch_size)

    def dynamic_shapes(self) -> dict[str, Any]:
        """The argument of `torch.export.export` that leaves the batch size open."""
        # The first dimension of every tensor is the batch.
        dimensions: Any = itertools.repeat({0: torch.export.Dim("batch")})
        shapes = rows.builder(self.example_inputs(1))(dimensions)
        return dict(zip(("observation", "state"), shapes, strict=False))

    def onnx_names(self) -> dict[str, list[str]]:
        """Names of inputs and outputs for `torch.onnx.export`. Next states begin with "next."."""
        state = list(self.initial_state(1))
        inputs = _paths("observation", self._space) + state
        outputs = _paths("action", self._action_space) + [f"next.{name}" for name in state]
        return {"input_names": inputs, "output_names": outputs}

    def forward(self, observation: Tree, state: State | None = None) -> Tree:
        """The action for each row, and with a state also the next state.

        Args:
            observation: raw, `(batch, *shape)` in the dtype of its space.
            state: of the last call, or `initial_state`; for a module that has one.

        Raises:
            TypeError, ValueError: for another structure, shape or dtype.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            must = "torch.jit cannot trace it, and would record the example alone"
            raise TypeError(refusal(OWNER, must, remedy="Use torch.export.export"))
        number = _num_rows(observation)
        raw = _value(self._space, observation, number)
        remedy = "Observations have a batch: `torch.as_tensor(observation)[None]`"
        spaces.check(OWNER, "an observation", self._space, raw, number, self._device, remedy=remedy)
        if state is None:
            state = {}
        if not isinstance(state, Mapping):
            must = "state must be a dict of tensors"
            raise TypeError(refusal(OWNER, must, type(state).__name__))
        got = _shapes(state)
        needed = _shapes(self._initial_state(number))
        if got != needed:
            remedy = "Start with `module.initial_state(batch_size)`"
            raise ValueError(refusal(OWNER, f"state must hold {needed}", got, remedy))
        (action, next_state), held = self._with_state(state, self._act, raw, state)
        action = _plain(self._action_space, action)
        if not needed:
            return action
        next_state.update(held)
        return action, {name: next_state[name].detach() for name in needed}

    def _copy_functions(self, copies: Copies) -> nn.ModuleList:
        """Replaces functions by copies. Returns the outermost modules that these name."""
        modules = list(self.modules())
        # Functions that name one of them get it, and not a second copy.
        copies.update({id(module): module for module in modules})
        number_before = len(copies)
        for module in modules:
            for name, value in vars(module).items():
                if callable(value) and not isinstance(value, nn.Module | type):
                    vars(module)[name] = _copied(value, copies)
        added = itertools.islice(copies.values(), number_before, None)
        named = [value for value in added if isinstance(value, nn.Module)]
        inner = {child for module in named for child in module.children()}
        return nn.ModuleList(module for module in named if module not in inner)

    def _with_state(
        self, state: State, function: Callable[..., Any], *args: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Calls a function while transforms hold a state. Returns its result, and theirs then."""
        place_of = places_of(self.transforms)
        places = [place_of[name] for name in self._held]
        own = swap(places, [state[name].clone() for name in self._held])
        try:
            result = function(*args)
        finally:
            next_rows = swap(places, own)
        return result, dict(zip(self._held, next_rows, strict=True))

    def _act(self, raw: Value, state: State) -> tuple[Value, State]:
        """The action, and the part of the next state that no transform holds."""
        is_first = state.get("is_first")
        root = {"observation": self._observe(raw, is_first)}
        policy_state = {name: state[name] for name in self._signature.policy_state}
        if policy_state:
            root |= policies.following(self._signature, policy_state, state["is_first"])
        number = _num_rows(raw)
        td: Any = tensordict(root, number)
        action_space = self._signature.single_action_space
        action: Any = policies.call("deploy", self.policy, td, action_space)
        parts = spaces.children(action_space) or {}
        if isinstance(action, TensorDictBase) and set(action.keys()) != set(parts):
            if action is not td:
                td.update(action)
            action = td["action"]
        if not isinstance(action, Tensor | TensorDictBase):
            got = type(action).__name__
            raise TypeError(refusal("deploy", "policy must return tensors", got))
        action = action.clone()  # which a transform may write to
        for transform in reversed(list(self.transforms)):
            action = transform.action(action)
        policies.check("deploy", self._signature, td, number)
        next_state: dict[str, Tensor] = {name: td["next", name] for name in policy_state}
        if is_first is not None:
            next_state["is_first"] = torch.zeros_like(is_first)
        return action, next_state

    def _observe(self, raw: Value, is_first: Tensor | None) -> Any:
        """The observation that the policy reads.

        As in an env, every row takes a step, and then the rows that start an episode are reset.
        Stateless transforms below the others do the same in both, so they run once.
        """
        number = _num_rows(raw)
        running = torch.zeros(number, 1, dtype=torch.bool, device=self._device)
        td = tensordict({"observation": raw.clone()}, number)
        td.update({"terminated": running, "truncated": running.clone()})
        for transform in self.transforms[: self._num_stateless]:
            td = transform.step(td)
        initial = tensordict({"observation": td["observation"].clone()}, number)
        above = self.transforms[self._num_stateless :]
        mask = None if is_first is None else RowMask(is_first)
        try:
            for transform in above:
                td = transform.step(td)
            observation = td["observation"]
            if mask is not None and mask.any():
                for transform in above:
                    initial = transform.reset(initial, mask)
                observation = mask.where(initial["observation"], observation)
        except KeyError as error:
            fault = f"it reads {error}, as only an env provides"
            raise _unusable({type(transform).__name__: fault}) from error
        if self._observations is None:
            return observation
        return observation.select(*self._observations)

    def _needed_space(self) -> Space[Any]:
        """The raw space without the entries that no observation of the policy depends on."""
        needed = spaces.children(self._space)
        if needed is None:
            return self._space
        raw = self._sample(_NUM_SAMPLES)
        is_first = torch.arange(_NUM_SAMPLES, device=self._device).unsqueeze(1) % 2 == 0
        state = self._initial_state(_NUM_SAMPLES)
        observe = functools.partial(self._with_state, state, self._observe)
        expected, _ = observe(raw, is_first)
        for key in list(needed):
            others = raw.exclude(key)
            try:
                observation, _ = observe(others, is_first)
            except Exception:  # a transform reads the entry
                continue
            if _equal(observation, expected):
                raw = others
                del needed[key]
        return gym_spaces.Dict(list(needed.items()))

    def _sample(self, number: int, seed: int = 0) -> Any:
        """Random raw observations."""
        return spaces.sample(self._space, Stream(number, seed=seed, device=self._device))

    @torch.no_grad()
    def _check(self, env: Env, copies: Copies) -> None:
        """Raises for faults of the policy and the transforms that an export would not report."""
        raw = _plain(self._space, self._sample(2))
        other = _plain(self._space, self._sample(2, seed=1))
        state = self.example_inputs()[1:]
        inputs = (raw, *state)
        result = self._check_repeats(inputs, (other, *state), env.device)
        self._check_tensors(inputs, copies)
        action = _value(self._action_space, result[0] if self._is_stateful else result, 2)
        spaces.check("deploy", "the env's actions", self._action_space, action, 2, env.device)

    def _check_repeats(
        self, inputs: tuple[Any, ...], others: tuple[Any, ...], device: torch.device
    ) -> Any:
        """Raises unless calls return the same, whatever came between. Returns the result."""
        before = copy.deepcopy(self.state_dict())
        remedy = "Take the mode instead of a sample"
        with no_foreign_draws("deploy: the policy", remedy, device):
            try:
                first = self(*inputs)
            except KeyError as error:
                must = "policy must read observations and the states of PolicyState alone"
                raise ValueError(refusal("deploy", must, f"{error}")) from error
            except RuntimeError as error:
                must = "policy must act on 2 rows, as on any number"
                declare = "If it carries state from step to step, declare it with PolicyState"
                raise ValueError(refusal("deploy", must, f"{error!r}", declare)) from error
            self(*others)
            second = self(*inputs)
        after = self.state_dict()
        written = [name for name in before if not _equal(before[name], after[name])]
        if written or not _equal(first, second, 1e-3):
            must = "policy and transforms must return the same in every call"
            got = f"changes of {written}" if written else "two results"
            remedy = "Declare state with PolicyState or EnvBuffer, and put modules into eval mode"
            raise ValueError(refusal("deploy", must, got, remedy))
        return first

    def _check_tensors(self, inputs: tuple[Any, ...], copies: Copies) -> None:
        """Raises unless all tensors that the module reads or writes belong to it."""
        calls = policies.FirstCalls("deploy", self)  # refuses state outside of the module
        for _ in range(policies.NUM_FIRST_CALLS):
            calls(*inputs)
        own = [*copies.values(), *self.parameters(), *self.buffers()]
        ids = set(map(id, own))
        read = [value for value in calls.read.values() if isinstance(value, Tensor)]
        foreign = [value for value in read if id(value) not in ids]
        if foreign:
            must = "policy and transforms must name each module and tensor that they compute with"
            got = f"{validation.described(foreign[0])} that was not copied"
            remedy = f"Make tensors buffers of a module. {PASS_MODULE}"
            raise TypeError(refusal("deploy", must, got, remedy))

    def _describe(self, env: Env, transforms: list[str]) -> dict[str, Any]:
        import torchwrap

        state = {}
        for name, row in self.initial_state(1).items():
            dtype = str(row.dtype).removeprefix("torch.")
            state[name] = {"shape": list(row.shape[1:]), "dtype": dtype}
        return {
            "torchwrap": torchwrap.__version__,
            "env": env._label,
            "observation": _described(self._space),
            "action": _described(self._action_space),
            "state": state,
            "transforms": transforms,
        }


class _Detached(OperatorMode):
    """Copies a tensor without its graph of gradients."""

    def operator(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **kwargs)


class _Function:
    """A function that computes with copies of the variables that it names."""

    def __init__(self, function: FunctionType, copies: Copies) -> None:
        copies[function] = self  # first, because the function may name itself
        self.function = function
        self.variables: dict[str, Any] = {}
        for name, value in policies.variables_of(function).items():
            self.variables[name] = _copied(value, copies)
        self.defaults = tuple([_copied(value, copies) for value in function.__defaults__ or ()])
        self.keywords: dict[str, Any] = {}
        for name, value in (function.__kwdefaults__ or {}).items():
            self.keywords[name] = _copied(value, copies)
        for name, value in vars(function).items():  # `function.name`
            vars(self).setdefault(name, _copied(value, copies))

    @functools.cached_property
    def _copy(self) -> FunctionType:
        # Made when it is called, because a cell cannot be copied or pickled.
        function: Any = self.function
        code = function.__code__
        # Without `__name__`, by which Dynamo would find the original variables.
        variables = {"__builtins__": function.__builtins__}
        for name in policies.global_names(code):
            if name in function.__globals__:
                variables[name] = function.__globals__[name]
        variables.update(self.variables)
        cells = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            cells.append(CellType(self.variables[name]) if name in self.variables else cell)
        copied = FunctionType(code, variables, None, self.defaults, tuple(cells))
        copied.__kwdefaults__ = self.keywords
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._copy(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state.pop("_copy", None)  # a copy makes its own
        return state


def _copied(value: Any, copies: Copies) -> Any:
    """A deep copy of a module, a function, or a variable of a function, unless there is one."""
    if isinstance(value, FunctionType) and not str(value.__module__).startswith("torch."):
        value = policies.uncompiled(value)
        return copies.get(value) or _Function(value, copies)
    holder = getattr(value, "__self__", value)
    if not isinstance(holder, nn.Module | type):
        # A plain object with modules keeps what is no data: some of it cannot be copied.
        attributes = list(getattr(holder, "__dict__", {}).values())
        others = [part for part in attributes if not isinstance(part, nn.Module)]
        if len(others) < len(attributes):
            others = [part for part in others if not _is_data(part)]
            copies.update({id(part): part for part in others})
    try:
        with _Detached():
            if isinstance(value, functools.partial):
                function = _copied(value.func, copies)
                keywords = copy.deepcopy(value.keywords, copies)
                return functools.partial(function, *copy.deepcopy(value.args, copies), **keywords)
            return copy.deepcopy(value, copies)
    except Exception as error:
        must = f"copy.deepcopy must be able to copy {type(holder).__name__}"
        raise TypeError(refusal("deploy", must, f"{error!r}", PASS_MODULE)) from error


def _is_data(value: Any) -> bool:
    """Whether a value consists of arrays and constants, and not of a replay buffer's size.

    An optimizer has parameters.
    """
    values = [value]
    known: set[int] = set()
    number = 0
    for value in values:  # the list grows
        if id(value) in known:
            continue
        known.add(id(value))
        match value:
            case nn.Parameter() | nn.Module():
                return False
            case Tensor() | np.ndarray():
                number += math.prod(value.shape)
                if number > _MOST_NUMBERS:
                    return False
            case _ if value is None or isinstance(value, _CONSTANTS):
                pass
            case dict():
                values += value.values()
            case tuple() | list() | set() | frozenset() | collections.deque():
                values += value
            case _ if getattr(value, "__dict__", {}):
                values += vars(value).values()
            case _:
                return False
    return True


def _shapes(state: State) -> dict[str, Any]:
    shapes = {}
    for name, row in state.items():
        shapes[name] = (tuple(row.shape), row.dtype)
    return shapes


def _equal(first: Any, second: Any, tolerance: float = 0) -> bool:
    """Whether two nested values have the same keys, and equal tensors. NaN equals NaN."""
    leaves: list[Tensor] = []
    others: list[Tensor] = []
    if rows.flatten(first, leaves) != rows.flatten(second, others):
        return False
    if list(map(rows.layout, leaves)) != list(map(rows.layout, others)):
        return False
    close = functools.partial(torch.allclose, rtol=tolerance, atol=1e-5 * tolerance, equal_nan=True)
    return all(map(close, leaves, others))


def _paths(name: str, space: Space[Any]) -> list[str]:
    return [".".join((name, *path)) for path, _ in spaces.leaves(space)]


def _num_rows(tree: Tree) -> int:
    while isinstance(tree, Mapping | TensorDictBase) and len(tree.keys()):
        tree = next(iter(tree.values()))
    return tree.shape[0] if isinstance(tree, Tensor) and tree.dim() else 1


def _value(space: Space[Any], tree: Tree, number: int) -> Any:
    """A tree with TensorDicts in place of dicts, in the order of the space."""
    children = spaces.children(space)
    if children is None or not isinstance(tree, Mapping | TensorDictBase):
        return tree
    values = {}
    for key, child in children.items():
        if key in tree.keys():
            values[key] = _value(child, tree[key], number)
    return tensordict(values, number)


def _plain(space: Space[Any], value: Value) -> Tree:
    """A value with dicts, which need no library, in place of TensorDicts."""
    if isinstance(value, Tensor):
        return value.detach()
    tree = {}
    for key, child in (spaces.children(space) or {}).items():
        tree[key] = _plain(child, value[key])
    return tree


def _deployable(
    env: Env,
    without: Names,
    faults: Faults,
) -> tuple[list[Transform], dict[str, Space[Any]]]:
    """The transforms of the module, innermost first, and the spaces of raw values below them."""
    _check_without(env, without)
    kept: list[Transform] = []
    hooks_of = {"observation": ("step", "reset"), "action": ("action",)}
    raw_spaces = {name: getattr(env.unwrapped, f"single_{name}_space") for name in hooks_of}
    for part, below, above in _parts(env):
        if not _is_named(part, without):
            if _deployed(part, faults) is not None:
                kept.append(part)  # type: ignore[arg-type]
            continue
        must = f"without must name the transforms below {type(part).__name__} too"
        drives_env: Faults = {}
        if isinstance(part, Wrapper):
            _deployed(part, drives_env)
        if drives_env and any(map(_counts_actions, kept)):
            remedy = "Their state changes in each step of the env"
            raise ValueError(refusal("deploy", must, remedy=remedy))
        # The caller takes over this part, and with it those below: the space above is raw.
        for name, hooks in hooks_of.items():
            if not _changes_space(part, name, below, above):
                continue
            if any(_overrides(other, hooks) for other in kept):
                raise ValueError(refusal("deploy", must, remedy=f"They change the {name}"))
            raw_spaces[name] = getattr(above, f"single_{name}_space")
    return kept, raw_spaces


def _changes_space(part: Part, name: str, below: Signature, above: Signature) -> bool:
    """Whether raw values have another space without the part. Noise may only widen the bounds."""
    first, second = [getattr(each, f"single_{name}_space") for each in (below, above)]
    if first == second:
        return False
    return not _draws(part) or _layout(first) != _layout(second)


def _layout(space: Space[Any]) -> list[Any]:
    return [(path, leaf.shape, leaf.dtype) for path, leaf in spaces.leaves(space)]


def _draws(part: nn.Module) -> bool:
    return any(isinstance(child, Stream) for child in part.children())


def _counts_actions(transform: Transform) -> bool:
    """Whether the transform keeps a state from action to action."""
    return _overrides(transform, ("action",)) and bool(transform._paths("_env_buffer_names"))


def _check_without(env: Env, without: Names) -> None:
    parts = [part for part, _, _ in _parts(env)]
    for part in env.modules():
        if isinstance(part, Transform) and not isinstance(part, Compose):
            parts.append(part)  # also inside of groups
    unknown = []
    for entry in without:
        if not any(_is_named(part, [entry]) for part in parts):
            unknown.append(entry)
    if unknown:
        names = sorted({type(part).__name__ for part in parts})
        must = f"without must name transforms and wrappers of the env, among {names}"
        raise ValueError(refusal("deploy", must, unknown))


def _parts(env: Env | Compose) -> Iterator[tuple[Part, Signature, Signature]]:
    """Transforms and wrappers, innermost first, with the signatures below and above."""
    if isinstance(env, Compose):
        for part in env:
            if isinstance(part, Compose):
                yield from _parts(part)
            else:
                yield part, part._below, part._above
    elif isinstance(env, Wrapper):
        yield from _parts(env.env)
        if isinstance(env, TransformedEnv):
            yield from _parts(env.transforms)
        else:
            yield env, env.env.signature, env.signature


def _is_named(part: Part, without: Names) -> bool:
    kinds = tuple(entry for entry in without if isinstance(entry, type))
    return type(part).__name__ in without or isinstance(part, kinds)


def _overrides(transform: Transform, hooks: Sequence[str]) -> bool:
    kind = type(transform)
    return any(getattr(kind, hook) is not getattr(Transform, hook) for hook in hooks)


def _deployed(part: Part, faults: Faults) -> Transform | None:
    try:
        _check_own(part)
        return part.deployed()
    except ValueError as error:
        faults[type(part).__name__] = str(error)
        return None


def _check_own(part: Part) -> None:
    """Raises a ValueError if a class of the user changes hooks, but not their `deployed`."""
    for kind in type(part).__mro__:
        if "deployed" in vars(kind) or kind.__module__.startswith("torchwrap."):
            return
        hooks = sorted({"step", "reset", "action", "observation"} & vars(kind).keys())
        inherited = part.deployed.__func__  # type: ignore[attr-defined]
        if hooks and inherited not in (Transform.deployed, Wrapper.deployed):
            owner = inherited.__qualname__.partition(".")[0]
            raise ValueError(f"it has {hooks} of its own, but {owner}'s deployed(): define it, too")


def _drop_groups(transforms: Compose, observations: Sequence[str]) -> None:
    """Deletes the groups that the policy does not read, if it reads another one of them."""
    for part in reversed(list(transforms.flat())):
        if isinstance(part, ObservationGroups | ObservationKeys):
            others = set(part.parts) - set(observations)
            if isinstance(part, ObservationGroups) and len(others) == len(part.parts):
                return  # another layer has the observations
            for name in others:
                del part.parts[name]
        is_ours = type(part).__module__.startswith("torchwrap.") and not hasattr(part, "func")
        if isinstance(part, ObservationGroups) or not is_ours:  # it may join those below
            return


def _keep_one_row(transforms: Compose, device: torch.device, faults: Faults) -> None:
    """Sets eval mode, and replaces the state of running episodes by one initial row."""
    transforms.eval()
    for module in transforms.modules():
        if isinstance(module, BatchedModule):
            module._warn_untrained(OWNER)
    for transform in transforms.flat():
        # `setup` may write to the rows. It would also replace what the transform has learned.
        fresh = copy.deepcopy(transform)
        fresh.attached = False
        fresh.allocate(1, device)
        try:
            fresh.setup(transform._below.replace(num_envs=1, device=device))
        except (TypeError, ValueError) as error:
            reason = str(error).removesuffix(".")
            faults.setdefault(type(transform).__name__, f"it cannot serve a single env: {reason}")
            continue
        place_of = places_of(transform)
        for path in fresh._paths("_env_buffer_names"):
            store, name = place_of[path]
            store[name] = fresh.get_buffer(path)


def _replace(transforms: Compose, without: Names, faults: Faults) -> list[str]:
    """Replaces transforms by their `deployed()`, and deletes those that are left out.

    Returns a description of each before it is replaced.
    """
    replacements: list[tuple[Compose, str, Transform]] = []
    for compose in list(transforms.modules()):
        if not isinstance(compose, Compose):
            continue
        for name, part in list(compose._modules.items()):
            replacement: Transform | None = part
            if not isinstance(part, Compose) and _is_named(part, without):
                replacement = None
                if _changes_space(part, "observation", part._below, part._above):
                    # A group has no raw observation of its own.
                    must = f"without cannot name {type(part).__name__} inside of a group"
                    remedy = "Put it on the env, below the groups"
                    raise ValueError(refusal("deploy", must, remedy=remedy))
            elif not isinstance(part, Compose):
                replacement = _deployed(part, faults)
            if replacement is None or type(replacement) is Transform:  # the identity
                delattr(compose, name)
            else:
                replacements.append((compose, name, replacement))
    # without the addresses of functions
    described = [re.sub(r" at 0x[0-9a-f]+", "", repr(part)) for part in transforms]
    for compose, name, replacement in replacements:
        compose.add_module(name, replacement)
    return described


def _find_streams(transforms: Compose, faults: Faults) -> None:
    """Adds the transforms that draw random numbers to the faults."""
    for module in transforms.modules():
        if _draws(module):
            faults[type(module).__name__] = "it draws random numbers"


def _ignores_starts(transform: Transform) -> bool:
    """Whether the transform computes the same whether or not a row starts an episode."""
    if isinstance(transform, ObservationGroups | ObservationKeys):
        parts = itertools.chain.from_iterable(part.flat() for part in transform.parts.values())
        return all(map(_ignores_starts, parts))
    hooks = (type(transform).step, type(transform).reset)
    stateless = [(kind.step, kind.reset) for kind in (Transform, ObservationTransform)]
    return hooks in stateless and not transform._paths("_env_buffer_names")


def _unusable(faults: Faults) -> ValueError:
    reasons = [f"{name}, because {fault}" for name, fault in faults.items()]
    must = f"cannot use {' and '.join(reasons)}"
    remedy = (
        f"Leave it out with `without={json.dumps(list(faults))}`, if the caller takes over its work"
    )
    return ValueError(refusal("deploy", must, remedy=remedy))


def _described(space: Space[Any]) -> dict[str, Any]:
    """A space as JSON: its kind, and for a leaf its shape, dtype and bounds."""
    described: dict[str, Any] = {"type": type(space).__name__}
    children = spaces.children(space)
    if children is not None:
        described["spaces"] = {key: _described(child) for key, child in children.items()}
        return described
    described["shape"] = list(space.shape or ())
    described["dtype"] = str(space.dtype)
    if not isinstance(space, gym_spaces.MultiBinary):
        for name in ("low", "high", "n", "start", "nvec"):
            if hasattr(space, name):
                described[name] = _bound(getattr(space, name))
    return described


def _bound(bound: Any) -> Any:
    """Numbers as JSON, which has no infinity; equal ones as one number."""
    numbers = np.asarray(bound).astype(object)
    numbers[~np.isfinite(numbers.astype(float))] = None
    values = set(numbers.flat)
    return values.pop() if len(values) == 1 else numbers.tolist()
