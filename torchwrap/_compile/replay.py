"""Replay: a function of tensors captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[list[Tensor]], Sequence[Tensor]]

_WARM_UPS = 3  # as PyTorch recommends


def captures(device: torch.device) -> bool:
    """Whether functions of tensors on this device are captured."""
    return device.type == "cuda"


class Replay:
    """A function of tensors as a CUDA graph, which is one launch.

    A graph reads and writes fixed memory. It is captured again when a buffer lies elsewhere, however it got there.

    Args:
        run: from buffers and inputs to outputs. Shapes and dtypes are the same at each call.
        num_buffers: so many of the first tensors are buffers, which are used in place. The others are copied.
        num_static: so many of the first outputs are returned in the graph's own memory, which the next replay overwrites.
    """

    def __init__(self, run: Run, num_buffers: int, num_static: int = 0) -> None:
        self.run, self.num_buffers, self.num_static = run, num_buffers, num_static
        self.captured: _Captured | None = None

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        buffers, inputs = tensors[: self.num_buffers], tensors[self.num_buffers :]
        addresses = [buffer.data_ptr() for buffer in buffers]
        captured = self.captured
        if captured is None or captured.addresses != addresses:
            self.captured = None  # which frees its memory first
            self.captured = captured = _capture(self.run, buffers, inputs)
        for static, value in zip(captured.inputs, inputs, strict=True):
            static.copy_(value)
        captured.graph.replay()
        return [*captured.outputs[: self.num_static], *_copies(captured.outputs[self.num_static :])]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    addresses: list[int]
    inputs: list[Tensor]
    outputs: Sequence[Tensor]


def _capture(run: Run, buffers: list[Tensor], inputs: list[Tensor]) -> _Captured:
    # Leaves the buffers, and the generator that a policy draws from, as they were, even if it fails.
    device = [*buffers, *inputs][0].device
    # Tensors made in inference mode can be written to in inference mode only.
    with torch.inference_mode(False), torch.no_grad():
        own = [value.clone() for value in inputs]
        before = [buffer.clone() for buffer in buffers]
    is_inference = any(buffer.is_inference() for buffer in buffers)
    with torch.cuda.device(device), torch.inference_mode(is_inference), torch.no_grad():
        generator, current, side = torch.cuda.get_rng_state(device), torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):  # libraries allocate their workspaces, and kernels are loaded, before the capture
                for _ in range(_WARM_UPS):
                    run([*buffers, *own])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # other threads may go on
                outputs = run([*buffers, *own])
        finally:
            current.wait_stream(side)
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            torch.cuda.set_rng_state(generator, device)
    return _Captured(graph, [buffer.data_ptr() for buffer in buffers], own, outputs)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    # One launch per dtype.
    copies = [torch.empty_like(tensor) for tensor in tensors]
    for dtype in {tensor.dtype for tensor in tensors}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        torch._foreach_copy_([copies[index] for index in indices], [tensors[index] for index in indices])
    return copies
