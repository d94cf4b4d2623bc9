"""StandIns: what operators compute with while a function is traced, and what they must not do."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# What reads values on the host without an operator.
_HOST_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__deepcopy__}
# `torch.tensor(0.5)` makes a new tensor.
_LITERALS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default}
# What can copy between the host and a device. A CUDA graph would copy from memory of the host that is freed by then.
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class StandIns(TorchDispatchMode):
    """Gives operators the tensors of a trace in place of those that they stand for."""

    def __init__(self, tensors: list[Tensor], stand_ins: tuple[Tensor, ...], mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.by_id = dict(zip(map(id, tensors), stand_ins, strict=False))
        # `tensor.data` and `torch.as_tensor(array)` are another tensor each time, in the same memory.
        self.by_memory = {memory(tensor): stand_in for tensor, stand_in in zip(tensors, stand_ins, strict=False)}
        self.met: dict[str, Tensor] = {}
        """Tensors that were unknown before the trace, by the names of their placeholders."""

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, FakeTensor):
                return value
            stand_in = self.by_id.get(id(value))
            if stand_in is None:
                stand_in = self.by_memory.get(memory(value))
            return self._meet(value) if stand_in is None else stand_in
        if isinstance(value, list | tuple):
            return type(value)(map(self.of, value))
        return value

    def _meet(self, tensor: Tensor) -> Tensor:
        name = f"met_{len(self.met)}"
        self.met[name] = tensor
        with _disable_current_modes():
            own = plain(tensor)
        stand_in = self.by_memory[memory(tensor)] = self.mode.from_tensor(own)
        proxy_mode = get_proxy_mode()
        if proxy_mode is not None:
            _add_input(proxy_mode.tracer, name, stand_in)
        return stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LITERALS:
            return func(*args, **(kwargs or {}))
        args, kwargs = [self.of(value) for value in args], {name: self.of(value) for name, value in (kwargs or {}).items()}
        if func in _COPIES:
            _check_copy(*args[:2], to=kwargs.get("device"))
        return func(*args, **kwargs)


class NoHostReads(TorchFunctionMode):
    """Refuses to read values on the host without an operator, which a module's own tensors would allow."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            raise HostRead(f"Tensor.{func.__name__} reads values")
        return func(*args, **(kwargs or {}))


class HostRead(RuntimeError):
    """A value that was read on the host."""


class HostCopy(RuntimeError):
    """A tensor that was copied from the host to a device."""


def _add_input(tracer: Any, name: str, tensor: Tensor) -> None:
    # After those that there are.
    first = next((node for node in tracer.graph.nodes if node.op != "placeholder"), None)
    with tracer.graph.inserting_before(first) if first is not None else contextlib.nullcontext():
        node = tracer.graph.placeholder(name)
    node.meta["val"] = tensor  # as make_fx does for its own inputs
    track_tensor_tree(tensor, Proxy(node, tracer), constant=None, tracer=tracer)


def _check_copy(tensor: Tensor, source: Tensor | None = None, *, to: torch.device | None) -> None:
    source, to = (tensor, to) if source is None else (source, tensor.device)
    if to is None or source.device.type == to.type:
        return
    if to.type == "cpu":
        raise HostRead(f"a copy from {source.device} to the host reads values")
    raise HostCopy(
        f"{tuple(source.shape)} {source.dtype} from {source.device} to {to}: keep it in a buffer, which `.to` moves"
    )


def plain(tensor: Tensor) -> Tensor:
    """The tensor without a gradient, as one that was not made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def memory(tensor: Tensor) -> tuple[Any, ...]:
    """Where the tensor lies. Two with the same answer have the same elements."""
    return tensor.data_ptr(), *layout(tensor)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """How the tensor lies in memory."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device
