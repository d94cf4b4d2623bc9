"""BatchedFunctions: the functions of a single env, called for a batch."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.experimental.functional import FuncEnv
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchwrap import spaces
from torchwrap._core import nested
from torchwrap.random import Key

OPTIONAL = ("truncated", "transition_info", "state_info")
_INFO = OPTIONAL[1:]  # they get no random numbers


class BatchedFunctions:
    """Calls the functions of a `FuncEnv` for a batch: by `torch.vmap`, or directly if they broadcast.

    Args:
        func_env: the functions.
    """

    def __init__(self, func_env: Any) -> None:
        self.func_env = func_env
        self._to_clone: set[str] = set()

    @property
    def owner(self) -> str:
        """The name for error messages."""
        return type(self.func_env).__name__

    def defines(self, name: str) -> bool:
        """Whether the env has an optional function, other than the empty one of `FuncEnv`."""
        function = getattr(self.func_env, name, None)
        return callable(function) and getattr(function, "__func__", function) is not getattr(FuncEnv, name, None)

    def __call__(
        self, name: str, key: Key, params: dict[str, Tensor], arguments: tuple[Any, ...], options: dict[str, Any] | None = None
    ) -> Any:
        """The result of a function for each row of the key. A nested observation is a TensorDict."""
        function, options = getattr(self.func_env, name), options or {}

        def run(key: Key, params: dict[str, Tensor], *arguments: Any) -> Any:
            rng = {} if name in _INFO else {"rng": key}
            return function(*arguments, **rng, **({"params": params} if params else {}), **options)

        if getattr(self.func_env, "broadcasts", False):
            result = run(key, params, *arguments)
        else:
            words, tag = key[:-1], key.tag
            result = torch.vmap(lambda words, *rest: run(Key(*words, tag), *rest))(words, params, *arguments)  # type: ignore[call-arg]
        if name == "observation":
            result = _nested(result, len(key.env))
        if name not in self._to_clone:
            return result
        return {key: value.clone() for key, value in result.items()} if isinstance(result, dict) else result.clone()

    def inspect(self, name: str, key: Key, params: dict[str, Tensor], *arguments: Any) -> Any:
        """The result of the first call of a function, which has to leave PyTorch's global generators alone.

        The function is called twice. If the two results share memory with each other or with the arguments, or if rows of a
        result or entries of an info share memory, later calls clone the result.

        Raises:
            TypeError: if the function cannot be batched, or draws from a global generator.
        """
        owner, device = f"{self.owner}.{name}", key.env.device
        global_states = _global_states(device)
        try:
            result, second = self(name, key, params, arguments), self(name, key, params, arguments)
            storages, other_storages = _storages(result), _storages(second, *arguments)
        except Exception as error:
            raise TypeError(f"{owner} needs {_requirement(error)}, but got {type(error).__name__}: {error}") from error
        if not all(map(torch.equal, global_states, _global_states(device))):
            _set_global_states(device, global_states)
            raise TypeError(f"{owner} needs to draw from its rng, but drew from PyTorch's global generator.")
        leaves = tree_leaves(result)
        shared = bool(storages & other_storages) or any(0 in leaf.stride() for leaf in leaves)
        if shared or (name in _INFO and len(storages) < len(leaves)):  # the caller gets each entry
            self._to_clone.add(name)
        return result


def _nested(observation: Any, num_rows: int) -> spaces.Value:
    if not isinstance(observation, dict):
        return observation
    return nested.tensordict({key: _nested(child, num_rows) for key, child in observation.items()}, num_rows)


def _requirement(error: Exception) -> str:
    # What the function has to do instead: PyTorch's own message assumes that the reader knows torch.vmap.
    if "data-dependent control flow" in str(error):
        return "tensor operators, torch.where instead of `if`"
    return "to draw from its rng" if "random operation" in str(error) else "to return tensors"


def _storages(*values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values)}


def _global_states(device: torch.device) -> list[Tensor]:
    """The states of PyTorch's global generators: that of the CPU, and that of the device if it is another one."""
    own = _own_generator(device)
    return [torch.get_rng_state(), *([own.get_rng_state(device)] if own else [])]


def _set_global_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        _own_generator(device).set_rng_state(state, device)


def _own_generator(device: torch.device) -> Any:
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "get_rng_state") and device.type != "mps" else None  # that of MPS takes no device
