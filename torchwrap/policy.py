"""PolicyState: the hidden state of a recurrent policy, and the functions with which `Env` and `Collector` carry it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import Transform

State = dict[str, Tensor]
"""Tensors `(num_envs, ...)` by name."""

Policy = Callable[[TensorDict], Tensor | TensorDictBase]
"""Takes a root, a TensorDict `(num_envs,)` with `observation`; returns it with `action` set, or the action itself."""

IS_INIT = "is_init"
DECLARED = "declare what the policy carries from step to step with PolicyState"

_STEP = {"observation", "action", "next", "reward", "terminated", "truncated", "done", "info"}
_RESERVED = _STEP | {
    "is_init",
    "is_first",
    "buffers",
}  # of roots, of the state of a deployed policy, and of snapshots


class PolicyState(Transform):
    """Declares the state of a recurrent policy, which then travels with the episodes.

    Every root holds the state under its name, and `is_init`, which is set where the observation is an initial one. The policy
    reads `td[name]` and sets `td["next", name]`, as TorchRL's recurrent modules do. In rows whose episode ended, the next root
    holds the initial state, `fill`; elsewhere it is what the policy has set. A bare action, `env.step(action)`, does not
    change it.

    Args:
        shapes: shape of each state by name, for one env, such as `{"hidden": (64,)}`.
        dtype: of the states.
        fill: the initial value of each element. A learned initial state is a matter of the policy: it reads `is_init`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=2), PolicyState({"count": ()}))
    >>> td = env.reset()
    >>> td["action"], td["next", "count"] = env.sample_action(), td["count"] + 1
    >>> env.step(td)[1]["count"]
    tensor([1.])
    """

    is_passive = True

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype = torch.float32,
        fill: float = 0,
    ) -> None:
        super().__init__()
        if not isinstance(shapes, Mapping) or not shapes:
            raise TypeError(
                f'PolicyState needs shapes by name, such as {{"hidden": (64,)}}, but got {shapes!r}.'
            )
        for name, shape in shapes.items():
            if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
                raise ValueError(
                    f"PolicyState needs identifiers that roots and steps do not use as names, but got {name!r}."
                )
            validation.sizes("PolicyState", f"the shape of {name}", shape, at_least=1)
        self.shapes, self.dtype = {name: tuple(shape) for name, shape in shapes.items()}, dtype
        self.fill = validation.fill("PolicyState", fill, dtype)

    def setup(self, signature: Signature) -> Signature:
        declared = {
            name: EnvBuffer(shape, self.dtype, self.fill) for name, shape in self.shapes.items()
        }
        if twice := sorted(declared.keys() & signature.policy_state.keys()):
            raise ValueError(
                f"PolicyState needs names that no other PolicyState of the env has, but got {twice}."
            )
        return signature.replace(policy_state={**signature.policy_state, **declared})


def keys(signature: Signature) -> list[str]:
    """The keys of a root, without `observation`."""
    return [*signature.policy_state, IS_INIT] if signature.policy_state else []


def initial(signature: Signature) -> State:
    """The entries of a root, without `observation`, where every episode starts."""
    n, device = signature.num_envs, signature.device
    entries = {name: row.allocate(None, n, device) for name, row in signature.policy_state.items()}
    return (
        {**entries, IS_INIT: torch.ones(n, 1, dtype=torch.bool, device=device)} if entries else {}
    )


def reset(signature: Signature, mask: RowMask, root: TensorDict | None) -> State:
    """The entries of a root after a reset: initial in the rows of `mask`, and as in the last root elsewhere."""
    entries = initial(signature)
    if root is None:
        return entries
    return {
        name: mask.where(value, root[name].to(signature.device)) for name, value in entries.items()
    }


def read(owner: str, signature: Signature, td: TensorDict) -> State:
    """The state after the step, which the policy has set under `next`."""
    state = {key: td.get(("next", key), None) for key in signature.policy_state}
    for key, row in signature.policy_state.items():
        value, shape = state[key], (signature.num_envs, *row.shape)
        if not isinstance(value, Tensor):
            remedy = f'set it with `td["next", "{key}"] = ...`, as PolicyState asks for'
            raise ValueError(
                f'{owner} needs the state of the policy in ("next", "{key}"), but got {value!r}: {remedy}.'
            )
        if value.shape != shape or value.dtype != row.dtype:
            got = validation.described(value)
            raise ValueError(
                f'{owner} needs ("next", "{key}") of shape {shape} {row.dtype}, but got {got}.'
            )
    return {key: value.detach() for key, value in state.items()}


def following(signature: Signature, state: State, done: Tensor) -> State:
    """The entries of the next root, in memory of their own: initial where `done`, bool `(num_envs, 1)`, is set."""
    mask = RowMask(done.clone())
    entries = {
        name: value.masked_fill(mask.like(value), signature.policy_state[name].fill)
        for name, value in state.items()
    }
    return {**entries, IS_INIT: mask.column}


def act(env: Any, policy: Policy | None, td: TensorDict) -> TensorDict:
    """The root with the action of the policy, and whatever else the policy has set."""
    if policy is None:
        for key in env.signature.policy_state:
            td["next", key] = td[key].clone()
        return td.set("action", env.sample_action())
    try:
        given = policy(td)
    except (TypeError, KeyError) as error:
        if "TensorDict" not in str(error):
            raise
        raise _policy_error(
            env, policy, f"raised {str(error).strip().splitlines()[0]!r}"
        ) from error
    if not issubclass(type(given), Tensor | TensorDictBase | np.ndarray):
        raise _policy_error(env, policy, f"returned {type(given).__name__}")
    parts = spaces.children(env.single_action_space)  # an action may be a TensorDict too
    if isinstance(given, TensorDictBase) and (parts is None or set(given.keys()) != set(parts)):
        return given if given is td else td.update(given)
    return td.set("action", given)


def modules_of(policy: Callable[..., Any] | None) -> list[nn.Module]:
    """The modules that a policy computes with: itself, or those that it names or closes over.

    A function's variables are followed into functions of the same package, a method and an object with `__call__` into the
    attributes of the object. Modules that are hidden deeper, such as in a list, are not found.
    """
    function: Any = policy
    while isinstance(function, functools.partial):
        function = function.func
    package = str(getattr(function, "__module__", None)).partition(".")[0]
    seen: dict[int, Any] = {}
    waiting: list[Any] = [policy, *getattr(function, "__dict__", {}).values()]
    while waiting:
        value = waiting.pop(0)
        if id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, functools.partial):
                waiting += [value.func, *value.args, *value.keywords.values()]
            elif isinstance(value, types.MethodType):
                waiting += [
                    value.__func__,
                    value.__self__,
                    *getattr(value.__self__, "__dict__", {}).values(),
                ]
            elif (
                isinstance(value, types.FunctionType)
                and str(value.__module__).partition(".")[0] == package
            ):
                variables = inspect.getclosurevars(value)
                waiting += [*variables.nonlocals.values(), *variables.globals.values()]
                waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return [value for value in seen.values() if isinstance(value, nn.Module)]


def _policy_error(env: Any, policy: Policy, fault: str) -> TypeError:
    needed = (
        'a policy that takes a TensorDict, and returns the action or the TensorDict with "action"'
    )
    name = getattr(policy, "__name__", type(policy).__name__)
    choice = ".argmax(-1)" if isinstance(env.single_action_space, Discrete) else ""
    remedy = (
        DECLARED
        if "not found" in fault
        else f'wrap a network as `lambda td: network(td["observation"]){choice}`'
    )
    return TypeError(f"{env._name()} needs {needed}, but got {name}, which {fault}: {remedy}.")
