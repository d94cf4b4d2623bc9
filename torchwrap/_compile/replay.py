"""Replay: a function of tensors captured as a CUDA graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Run = Callable[[list[Tensor]], Sequence[Tensor]]


class Replay:
    """A function of tensors as a CUDA graph, which is one launch. It is captured again when a buffer is replaced.

    Args:
        run: from buffers and inputs to outputs.
        num_buffers: so many of the first tensors are buffers, which are used in place.
        static_outputs: return the graph's own memory, which the next replay overwrites.
    """

    def __init__(self, run: Run, num_buffers: int, static_outputs: bool) -> None:
        self.run, self.num_buffers, self.static_outputs = run, num_buffers, static_outputs
        self.buffers: list[Tensor] = []

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        buffers, inputs = tensors[: self.num_buffers], tensors[self.num_buffers :]
        if len(self.buffers) != len(buffers) or not all(map(operator.is_, self.buffers, buffers)):
            self._capture(buffers, inputs)
        for static, value in zip(self.inputs, inputs, strict=True):
            static.copy_(value)
        self.graph.replay()
        return self.outputs if self.static_outputs else [output.clone() for output in self.outputs]

    def _capture(self, buffers: list[Tensor], inputs: list[Tensor]) -> None:
        self.buffers, self.inputs = buffers, [value.clone() for value in inputs]
        before = [buffer.clone() for buffer in buffers]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate their workspaces before the capture
            for _ in range(3):
                self.run([*self.buffers, *self.inputs])
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.run([*self.buffers, *self.inputs])
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
