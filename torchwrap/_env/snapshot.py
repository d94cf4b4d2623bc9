"""Snapshots: the whole state of a running env, as a TensorDict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap._core.env_buffers import ConstantBuffer


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Buffers by name, but for constants."""
    found = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(getattr(type(part), name, None), ConstantBuffer):
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def take(module: nn.Module, root: dict[str, Any]) -> TensorDict:
    """The state, and the root to act on, in memory of their own."""
    buffers = TensorDict({name: buffer.clone() for name, buffer in state_of(module).items()}, batch_size=[])
    return TensorDict({"buffers": buffers, **{key: value.clone() for key, value in root.items()}}, batch_size=[])


def check(owner: str, module: nn.Module, snapshot: Any, state: dict[str, Tensor]) -> None:
    """Raises unless this is a snapshot of a module like this one. Configuration may differ: it stays that of the module.

    Besides buffers and an observation it needs tensors like those in `state`, of a recurrent policy.
    """
    parts = dict(snapshot.items()) if isinstance(snapshot, TensorDict | dict) else {}
    kinds: dict[str, Any] = {"buffers": TensorDict | dict, "observation": Tensor | TensorDict | dict}
    if not kinds.keys() <= parts.keys() or not all(isinstance(parts[name], kind) for name, kind in kinds.items()):
        raise TypeError(f"{owner}.restore needs what snapshot() returned, but got {type(snapshot).__name__}.")
    own = {**state_of(module), **state}
    found = {**dict(parts["buffers"].items()), **{name: part for name, part in parts.items() if name not in kinds}}
    if found.keys() != own.keys():
        different = sorted(found.keys() ^ own.keys())
        raise ValueError(f"{owner}.restore needs a snapshot of the same env, but got one that differs in {different}.")
    for name, buffer in own.items():
        value = found[name]
        if not isinstance(value, Tensor) or value.shape != buffer.shape or value.dtype != buffer.dtype:
            got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{owner}.restore needs {name} of shape {tuple(buffer.shape)} {buffer.dtype}, but got {got}.")


@torch.no_grad()
def load(module: nn.Module, snapshot: Any) -> None:
    """Writes a checked snapshot into the module's buffers, in place."""
    for name, buffer in state_of(module).items():
        buffer.copy_(snapshot["buffers"][name])
