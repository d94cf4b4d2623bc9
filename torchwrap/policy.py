"""The state of a recurrent policy, its action, and its modules."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import Transform

State = dict[str, Tensor]
"""Tensors `(num_envs, ...)` by name."""

Policy = Callable[[TensorDict], Tensor | TensorDictBase | dict[str, Any]]
"""From a root, `(num_envs,)` with `observation`, to the root with `action`, or to the action."""

IS_INIT = "is_init"
_IS_INIT = EnvBuffer((1,), torch.bool, fill=True)
DECLARED = "Declare what the policy carries from step to step with PolicyState"

# Keys of roots and steps, and of the state of a deployed policy and of snapshots.
_RESERVED = {"observation", "action", "next", "reward", "terminated", "truncated", "done", "info"}
_RESERVED |= {IS_INIT, "is_first", "buffers"}


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
        dtype: of the states, or its name.
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
        dtype: torch.dtype | str = torch.float32,
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
        self.dtype: Any = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(refusal("PolicyState", "dtype must be a torch.dtype", repr(dtype)))
        self.fill = validation.number("PolicyState", "fill", fill)

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
    return ["observation", *root_buffers(signature)]


def root_buffers(signature: Signature) -> dict[str, EnvBuffer]:
    """The entries of a root that belong to the policy."""
    entries = dict(signature.policy_state)
    if entries:
        entries[IS_INIT] = _IS_INIT
    return entries


def initial_entries(signature: Signature) -> State:
    """The entries of a root, without `observation`, where every episode starts."""
    entries = {}
    for name, row in root_buffers(signature).items():
        entries[name] = row.allocate(None, signature.num_envs, signature.device)
    return entries


def reset(signature: Signature, mask: RowMask, root: TensorDict | None) -> State:
    """The entries of a root after a reset. Rows outside the mask keep those of the last root."""
    entries = initial_entries(signature)
    if root is not None:
        for name, value in entries.items():
            entries[name] = mask.where(value, root[name])
    return entries


def check(owner: str, signature: Signature, td: TensorDictBase, num_envs: int) -> None:
    """Raises unless the policy has set its next state, under `next`, as declared."""
    for name, row in signature.policy_state.items():
        value = td.get(("next", name), None)
        shape = (num_envs, *row.shape)
        what = f'("next", "{name}")'
        remedy = f'Set `td["next", "{name}"] = ...`, as PolicyState asks for'
        validation.tensor(owner, what, value, shape, row.dtype, signature.device, remedy)


def next_entries(signature: Signature, state: Any, done: Tensor) -> State:
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
        entries = td.items(True, True)  # of the observation and the info, too
        masks = [value for key, value in entries if key[-1] == "action_masks"]
        return td.set("action", env.sample_action(*masks[:1]))
    result = policy(td)
    if isinstance(result, dict):
        result = TensorDict(result, td.batch_size)
    if not isinstance(result, Tensor | TensorDictBase | np.ndarray):
        must = 'policy must return the action, or a TensorDict or dict with "action"'
        raise TypeError(refusal(env._label, must, type(result).__name__))
    if isinstance(result, TensorDictBase):
        # An action of a Dict or Tuple space is a TensorDict too.
        parts = spaces.children(env.single_action_space)
        if parts is None or set(result.keys()) != set(parts):
            if result is not td:
                td.update(result)
            return td
    if result.shape[:1] != td.batch_size:
        must = f"an action must have a row for each of {td.batch_size[0]} envs"
        raise ValueError(refusal(env._label, must, validation.described(result)))
    return td.set("action", result)


def modules_of(policy: Any) -> list[nn.Module]:
    """The modules of a policy: itself, the object of a method, and what a function names.

    A function names variables of its closure and globals. A plain object, such as the model in
    `model.policy`, stands for the modules among its attributes.
    """
    found: list[nn.Module] = []
    for value in named_by(policy):
        if isinstance(value, nn.Module):
            found.append(value)
        elif not isinstance(value, types.ModuleType | type):
            for part in getattr(value, "__dict__", {}).values():
                if isinstance(part, nn.Module):
                    found.append(part)
    return found


def named_by(policy: Any) -> list[Any]:
    """A policy, the object of a method, or what a function and those in it name."""
    if isinstance(policy, types.MethodType):
        return [policy.__self__]
    if not isinstance(policy, types.FunctionType):
        return [policy]
    named = inspect.getclosurevars(policy)
    # A decorator, such as `torch.no_grad` or `torch.compile`, holds another function.
    inner = named_by(getattr(policy, "__wrapped__", None))
    return [*inner, *named.nonlocals.values(), *named.globals.values()]
