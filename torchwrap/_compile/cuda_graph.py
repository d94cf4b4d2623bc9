"""CudaGraph: a function of tensors captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WARM_UPS = 3  # as PyTorch recommends


class CudaGraph:
    """A function of tensors, always of the same shapes and dtypes, as a CUDA graph, which is one launch.

    A graph reads and writes fixed memory. The first `num_buffers` tensors are used in place, and it is captured again when one
    of them lies elsewhere, however it got there. The others are copied, and so are the results.
    """

    def __init__(self, run: Callable[[list[Tensor]], Sequence[Tensor]], num_buffers: int) -> None:
        self.run, self.num_buffers = run, num_buffers
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
        return [output.clone() for output in captured.outputs]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    addresses: list[int]
    inputs: list[Tensor]
    outputs: Sequence[Tensor]


def _capture(
    run: Callable[[list[Tensor]], Sequence[Tensor]], buffers: list[Tensor], inputs: list[Tensor]
) -> _Captured:
    # Leaves the buffers, and the generator that a policy draws from, as they were, even if it fails.
    device = [*buffers, *inputs][0].device
    # Tensors made in inference mode can be written to in inference mode only.
    with torch.inference_mode(False), torch.no_grad():
        own = [value.clone() for value in inputs]
        before = [buffer.clone() for buffer in buffers]
    is_inference = any(buffer.is_inference() for buffer in buffers)
    with torch.cuda.device(device), torch.inference_mode(is_inference), torch.no_grad():
        generator, current, side = (
            torch.cuda.get_rng_state(device),
            torch.cuda.current_stream(),
            torch.cuda.Stream(),
        )
        side.wait_stream(current)
        try:
            with torch.cuda.stream(
                side
            ):  # libraries allocate their workspaces, and kernels are loaded, before the capture
                for _ in range(_WARM_UPS):
                    run([*buffers, *own])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, stream=side, capture_error_mode="thread_local"
            ):  # other threads may go on
                outputs = run([*buffers, *own])
        finally:
            current.wait_stream(side)
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            torch.cuda.set_rng_state(generator, device)
    return _Captured(graph, [buffer.data_ptr() for buffer in buffers], own, outputs)
