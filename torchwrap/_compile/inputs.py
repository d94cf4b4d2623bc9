"""Inputs: the buffers and parameters that a graph reads and writes, and the modes of their modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchwrap._core.env_buffers import BatchedModule
from torchwrap._core.rows import Nested

Function: TypeAlias = Callable[..., Nested]
Layout: TypeAlias = tuple[object, ...]
Tensors: TypeAlias = dict[str, Tensor | None]

_training = operator.attrgetter("training")


class Inputs:
    """The implicit inputs of a graph: all buffers and parameters of some modules, looked up at each call.

    So they can be written, moved and replaced, and a module of a policy can be replaced by another. `key` tells when a graph
    that was made before does not fit any more.

    Args:
        find_modules: returns the modules. It is called at each call.
        find_functions: returns functions that belong to them, whose variables no graph can change.
    """

    def __init__(
        self,
        find_modules: Callable[[], Sequence[nn.Module]],
        find_functions: Callable[[], Sequence[object]] = lambda: (),
    ) -> None:
        self.find_modules, self.find_functions = find_modules, find_functions
        self.version = 0
        """Another number whenever the modules are others."""
        self._look()

    def _look(self) -> None:
        self.version += 1
        self.roots = list(self.find_modules())
        self.modules = nn.ModuleList(self.roots)
        self.names: dict[str, int] = {}
        """Positions of tensors by name. Tied tensors have the same position."""
        self._slots: list[tuple[Tensors, str]] = []
        self._ties: list[tuple[Tensors, str, int]] = []
        self._foreign: list[int] = []  # positions of tensors whose owners are not torchwrap's
        self._edges: list[tuple[dict[str, nn.Module | None], str]] = []
        known: dict[int, int] = {}
        for prefix, module in self.modules.named_modules():
            stores: list[Tensors] = [module._parameters, module._buffers]
            held = [(store, name) for store in stores for name in store if store[name] is not None]
            for store, name in held:
                position = known.setdefault(id(store[name]), len(self._slots))
                if position == len(self._slots):
                    self._slots.append((store, name))
                    if not isinstance(module, BatchedModule):
                        self._foreign.append(position)
                else:
                    self._ties.append((store, name, position))
                self.names[f"{prefix}.{name}"] = position
            if module is not self.modules:
                self._edges += [(module._modules, name) for name in module._modules]
        self._children = [store[name] for store, name in self._edges]
        self._all = list(self.modules.modules())
        self._hooked = [module for module in self._all if not isinstance(module, BatchedModule)]
        self._seen: list[Tensor] = []
        self._layout: Layout = ()

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._slots)

    def current(self) -> tuple[Layout, list[Tensor]]:
        """What a graph depends on besides the values of tensors, and the tensors."""
        tensors: list[Tensor] = [store.get(name) for store, name in self._slots]  # type: ignore[misc]
        if not (
            _same([store.get(name) for store, name in self._edges], self._children)
            and _same(self.find_modules(), self.roots)
            and all(tensor is not None for tensor in tensors)
            and all(store.get(name) is tensors[position] for store, name, position in self._ties)
        ):
            self._look()
            return self.current()
        if not _same(tensors, self._seen):
            self._seen, self._layout = tensors, tuple(map(_layout, tensors))
        # A parameter keeps its identity when `module.half()` gives it other data.
        foreign = tuple([_layout(tensors[index]) for index in self._foreign])
        modes = tuple(map(_training, self._all)), tuple([hook for module in self._hooked for hook in _hooks(module)])
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return (self.version, self._layout, foreign, modes, autocast and _autocast_dtypes()), tensors

    def call(self, function: Function, tensors: Sequence[Tensor], *values: Nested) -> tuple[Nested, list[str]]:
        """The result of a function while these tensors take the place of the modules' own.

        Returns:
            The result, and the names of tensors that the function has replaced instead of writing to them.
        """
        state = {f"modules_.{name}": tensors[position] for name, position in self.names.items()}
        result = functional_call(_Call(self.modules, function), state, values, tie_weights=False)
        # `functional_call` writes what the modules hold in the end to the dict.
        replaced = [name for name, position in self.names.items() if state[f"modules_.{name}"] is not tensors[position]]
        return result, replaced


def _same(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _hooks(module: nn.Module) -> Layout:
    return (*module._forward_pre_hooks, *module._forward_hooks)


def _layout(tensor: Tensor) -> Layout:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _autocast_dtypes() -> Layout:
    return torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")


class _Call(nn.Module):
    def __init__(self, modules: nn.ModuleList, function: Function) -> None:
        super().__init__()
        self.modules_, self.function = modules, function

    def forward(self, *values: Nested) -> Nested:
        return self.function(*values)
