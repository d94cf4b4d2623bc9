"""Reads: what a graph reads besides its arguments. Tensors, wherever they are kept, and how modules compute."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from torchwrap._core.env_buffers import BatchedModule
from torchwrap._core.reachable import Edge, Reachable

_training = operator.itemgetter("training")


class Reads:
    """What a graph reads besides its arguments.

    Buffers and parameters of all modules in reach, and every other tensor that a trace has met, are looked up at each call
    where they were found. So tensors and modules can be replaced.

    Args:
        roots: `(container, key)` of each object whose methods the graph consists of.
    """

    def __init__(self, *roots: tuple[dict[str, Any], str]) -> None:
        self.roots = list(roots)
        self.version = 0
        """Another number whenever the list of tensors or modules is another one."""
        self._look()

    def _look(self) -> None:
        reachable = Reachable(self.roots)
        self.version += 1
        self.modules = reachable.modules
        self.slots: list[tuple[Any, Any]] = [slot for module in self.modules for slot in _slots(module)]
        # Envs and transforms are built once. A policy can be taken apart, and its tensors can get other `.data`.
        self.foreign = [module for module in self.modules if not _is_ours(module)]
        self.ours = [vars(module) for module in self.modules if _is_ours(module)]  # an attribute takes twice as long
        edges = [Edge(container, key, container[key]) for container, key in self.roots]
        edges += [edge for module in self.foreign for edge in reachable.edges_to(module)]
        self.edges = list({(id(edge.container), edge.key): edge for edge in edges}.values())
        self.is_foreign = bool(self.foreign)

    def refresh(self) -> None:
        """Looks again if a module is not where it was."""
        for edge in self.edges:
            if not edge.holds():
                return self._look()

    def add(self, tensors: list[Tensor], modules: list[nn.Module], reachable: Reachable) -> None:
        """Adds what a trace has met: tensors that no module in reach owns, and modules that are not in reach."""
        known = set(map(id, self.modules))
        modules = [module for module in modules if id(module) not in known]
        self.modules, self.foreign = [*self.modules, *modules], [*self.foreign, *modules]
        places = {id(container[key]): (container, key) for module in modules for container, key in _slots(module)}
        for tensor in tensors:
            _, edge = reachable.tensors.get(id(tensor), (tensor, None))
            found = places.get(id(tensor), ([tensor], 0))  # the tensor itself, if it is nowhere to be found
            self.slots.append(found if edge is None else (edge.container, edge.key))
        if tensors or modules:
            self.version, self.is_foreign = self.version + 1, True

    def tensors(self) -> list[Tensor]:
        """The tensors. They are looked up at each call, because `.to(device)` replaces them."""
        try:
            return [container[key] for container, key in self.slots]
        except LookupError:  # a parametrization takes the parameter away that it computes
            self._look()
            return self.tensors()

    def modes(self) -> tuple[Any, ...]:
        """What decides how modules compute, besides tensors: `train()` and `eval()`; and what a policy may depend on."""
        modes = tuple(map(_training, self.ours))
        if not self.is_foreign:
            return modes
        kinds = [
            (type(module), module.training, *module._forward_pre_hooks, *module._forward_hooks, vars(module).get("forward"))
            for module in self.foreign
        ]
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        dtypes = (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")) if autocast else ()
        return (*modes, *kinds, autocast, *dtypes, torch.get_default_dtype())


def _slots(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    return [
        (tensors, name)
        for tensors in (module._buffers, module._parameters)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def _is_ours(module: nn.Module) -> bool:
    # Or a container, of which only what it contains matters.
    if isinstance(module, BatchedModule | nn.ModuleList | nn.ModuleDict):
        return True
    return type(module).__module__.startswith("torchwrap.")
