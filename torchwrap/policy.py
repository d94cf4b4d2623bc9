"""The state of a recurrent policy, its action, and its modules."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import rows, validation
from torchwrap._core.buffers import EnvBuffer
from torchwrap._core.errors import refusal
from torchwrap._core.operators import OperatorMode
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import Transform

State = dict[str, Tensor]
"""Tensors `(num_envs, ...)` by name."""

Policy = Callable[[TensorDict], Tensor | TensorDictBase]
"""From a root, `(num_envs,)` with `observation`, to the root with `action`, or to the action."""

IS_INIT = "is_init"
_IS_INIT = EnvBuffer((1,), torch.bool, fill=True)
DECLARED = "Declare what the policy carries from step to step with PolicyState"
NUM_FIRST_CALLS = 3

# Keys of roots and steps, and of the state of a deployed policy and of snapshots.
_RESERVED = {"observation", "action", "next", "reward", "terminated", "truncated", "done", "info"}
_RESERVED |= {IS_INIT, "is_first", "buffers"}

_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}


# The state of a recurrent policy.


class PolicyState(Transform):
    """Declares the state of a recurrent policy, which then travels with the episodes.

    Every root holds the state under its name, and `is_init`, which is set where the observation is
    an initial one. The policy reads `td[name]` and sets `td["next", name]`, as TorchRL's recurrent
    modules do. In rows whose episode ended, the next root holds the initial state, `fill`;
    elsewhere it holds the state that the policy has set. A bare action, `env.step(action)`, does
    not change it.

    Args:
        shapes: shape of each state by name, for one env, such as `{"hidden": (64,)}`.
        dtype: of the states.
        fill: the initial value of each element. For a learned initial state, the policy reads
            `is_init`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=2), PolicyState({"count": ()}))
    >>> td = env.reset()
    >>> td["action"] = env.sample_action()
    >>> td["next", "count"] = td["count"] + 1
    >>> env.step(td)[1]["count"]
    tensor([1.])
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype = torch.float32,
        fill: float = 0,
    ) -> None:
        super().__init__()
        if not isinstance(shapes, Mapping) or not shapes:
            raise TypeError(
                refusal(
                    "PolicyState",
                    'shapes must be shapes by name, such as {"hidden": (64,)}',
                    repr(shapes),
                )
            )
        for name, shape in shapes.items():
            if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
                raise ValueError(
                    refusal(
                        "PolicyState",
                        "names in shapes must be identifiers that roots and steps do not use",
                        repr(name),
                    )
                )
            validation.sizes("PolicyState", f"the shape of {name}", shape, at_least=1)
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.dtype = dtype
        self.fill = validation.fill("PolicyState", fill, dtype)

    def deployed(self) -> None:
        return None

    def setup(self, signature: Signature) -> Signature:
        states = dict(signature.policy_state)
        for name, shape in self.shapes.items():
            if name in states:
                raise ValueError(
                    refusal(
                        "PolicyState",
                        "names in shapes must differ from those of the env's other PolicyState",
                        repr(name),
                    )
                )
            states[name] = EnvBuffer(shape, self.dtype, self.fill)
        return signature.replace(policy_state=states)


def keys(signature: Signature) -> list[str]:
    """The keys of a root, without infos."""
    return ["observation", *declared(signature)]


def declared(signature: Signature) -> dict[str, EnvBuffer]:
    """The entries of a root that belong to the policy."""
    entries = dict(signature.policy_state)
    if entries:
        entries[IS_INIT] = _IS_INIT
    return entries


def initial(signature: Signature) -> State:
    """The entries of a root, without `observation`, where every episode starts."""
    entries = {}
    for name, row in declared(signature).items():
        entries[name] = row.allocate(None, signature.num_envs, signature.device)
    return entries


def reset(signature: Signature, mask: RowMask, root: TensorDict | None) -> State:
    """The entries of a root after a reset. Rows outside the mask keep those of the last root."""
    entries = initial(signature)
    if root is not None:
        for name, value in entries.items():
            entries[name] = mask.where(value, root[name].to(signature.device))
    return entries


def check(owner: str, signature: Signature, td: TensorDictBase) -> None:
    """Raises unless the policy has set its next state, under `next`, as declared."""
    for name, row in signature.policy_state.items():
        value = td.get(("next", name), None)
        shape = (signature.num_envs, *row.shape)
        layout = (value.shape, value.dtype) if isinstance(value, Tensor) else None
        if layout != (shape, row.dtype):
            raise ValueError(
                refusal(
                    owner,
                    f'("next", "{name}") must be a tensor of shape {shape} and dtype {row.dtype}',
                    validation.described(value),
                    f'Set `td["next", "{name}"] = ...`, as PolicyState asks for',
                )
            )


def following(signature: Signature, state: Any, done: Tensor) -> State:
    """The entries of the next root, in new memory: initial where `done` is set."""
    mask = RowMask(done.clone())
    entries = {}
    for name, row in signature.policy_state.items():
        value = state[name]
        entries[name] = value.masked_fill(mask.like(value), row.fill)
    entries[IS_INIT] = mask.column
    return entries


# The action of a policy, and its modules.


def act(env: Any, policy: Policy | None, td: TensorDict) -> TensorDict:
    """The root with the action of the policy, and the other entries that the policy has set."""
    if policy is None:
        for name in env.signature.policy_state:
            td["next", name] = td[name].clone()
        return td.set("action", env.sample_action())
    result = policy(td)
    if not isinstance(result, Tensor | TensorDictBase | np.ndarray):
        choice = ".argmax(-1)" if isinstance(env.single_action_space, Discrete) else ""
        raise TypeError(
            refusal(
                env._name(),
                'policy must return the action, or the TensorDict with "action"',
                type(result).__name__,
                f'Wrap a network as `lambda td: network(td["observation"]){choice}`',
            )
        )
    if isinstance(result, TensorDictBase):
        # An action of a Dict or Tuple space is a TensorDict too.
        parts = spaces.children(env.single_action_space)
        if parts is None or set(result.keys()) != set(parts):
            if result is not td:
                td.update(result)
            return td
    return td.set("action", result)


class FirstCalls(OperatorMode):
    """Calls a policy. In its first calls, refuses state of its own, which no episode resets.

    State is a tensor that the policy computes or is given in its second call and reads in its
    third (one from its first call may be a cache), or that a call reads and then writes in place.

    Args:
        owner: of the error.
        policy: runs eagerly, also if `torch.compile` has compiled it.
        num_envs: if given, only tensors with a row per env are refused, because the policy may
            learn others.
    """

    def __init__(self, owner: str, policy: Policy, num_envs: int | None = None) -> None:
        super().__init__()
        self.owner = owner
        self.policy = policy
        self.num_envs = num_envs
        self.number = 0
        self.read: dict[int, Tensor] = {}
        """Tensors from outside that this call has read, by id."""
        self.known = weakref.WeakValueDictionary[int, Tensor]()
        """Tensors that this call is given or computes, by id, as long as something holds them."""
        self.earlier = self.known
        """Those of the call before."""

    def __call__(self, td: TensorDict) -> Tensor | TensorDictBase:
        if self.number == NUM_FIRST_CALLS:
            return self.policy(td)
        given = rows.leaves(td)
        self.read = {}
        self.earlier = self.known
        self.known = weakref.WeakValueDictionary[int, Tensor]()
        for tensor in given:
            self.earlier.pop(id(tensor), None)
            self.known[id(tensor)] = tensor
        if any(map(rows.is_traced, given)):
            with self:
                return self.policy(td)
        self.number += 1
        with self, torch.compiler.set_stance("force_eager"):
            return self.policy(td)

    def operator(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        written = list(_tensors(args[:1] if is_in_place else result))
        read = list(_tensors((args[is_in_place:], kwargs)))
        state = [tensor for tensor in written if is_in_place and id(tensor) in self.read]
        if self.number == NUM_FIRST_CALLS:
            state += [tensor for tensor in read if id(tensor) in self.earlier]
        for tensor in state:
            if self.num_envs is None or self.num_envs in tensor.shape[:-1]:
                must = "policy must not carry a tensor from call to call"
                got = f"one of shape {tuple(tensor.shape)}"
                raise ValueError(refusal(self.owner, must, got, DECLARED))
        if name in _OVERWRITES:
            self.earlier.pop(id(result), None)
        for tensor in read:
            if id(tensor) not in self.known:
                self.read[id(tensor)] = tensor
        for tensor in written:
            if id(tensor) not in self.read:  # `flatten` and others may return what they are given
                self.known[id(tensor)] = tensor
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | TensorDictBase):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def modules_of(policy: Any) -> list[nn.Module]:
    """The modules of a policy that are in plain sight.

    These are the policy, the object of a method, the variables that a function names (globals,
    closure and defaults), and the parts of a `functools.partial`. Each counts if it is a module; so
    do the attributes of a plain object, such as `model.policy`. Modules anywhere else, such as in a
    list or in another function, are not found.
    """
    if isinstance(policy, functools.partial):
        parts = (policy.func, *policy.args, *policy.keywords.values())
        return list(dict.fromkeys(itertools.chain(*map(modules_of, parts))))
    named: list[Any] = [policy]
    if isinstance(policy, types.MethodType):
        named = [policy.__self__]
    elif isinstance(policy, types.FunctionType):
        function: Any = inspect.unwrap(policy)  # without decorators such as `torch.no_grad`
        named = list(variables_of(function).values())
        named += function.__defaults__ or ()
    found: dict[nn.Module, None] = {}
    for value in named:
        if isinstance(value, nn.Module):
            found[value] = None
        elif not isinstance(value, types.ModuleType | types.FunctionType | type):
            for attribute in getattr(value, "__dict__", {}).values():
                if isinstance(attribute, nn.Module):
                    found[attribute] = None
    return list(found)


def variables_of(function: types.FunctionType) -> dict[str, Any]:
    """The variables of a function's closure, and the globals that it or a function in it names."""
    found = dict(inspect.getclosurevars(function).nonlocals)
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            found.setdefault(name, function.__globals__[name])
    return found


@functools.lru_cache  # because a compiled collector looks for modules in each call
def _global_names(code: types.CodeType) -> list[str]:
    """The globals that code or a function in it names."""
    names = []
    codes = [code]
    for part in codes:  # the list grows
        codes += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]
        for instruction in dis.get_instructions(part):
            if instruction.opname == "LOAD_GLOBAL":
                names.append(instruction.argval)
    return names
