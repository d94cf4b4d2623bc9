"""CudaGraph: a function of tensors captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UPS = 3  # as PyTorch recommends


class CudaGraph:
    """A function of tensors, always of the same shapes and dtypes, as one launch: a CUDA graph.

    A graph reads and writes fixed memory. The first `num_buffers` tensors are used in place, and
    the function is captured again when a buffer's address changes. The other tensors and the
    results are copied.
    """

    def __init__(
        self,
        run: Callable[[list[Tensor]], Sequence[Tensor]],
        num_buffers: int,
    ) -> None:
        self.run = run
        self.num_buffers = num_buffers
        self._addresses: list[int] | None = None

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        return [output.clone() for output in self.replay(tensors)]

    def replay(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Results that the next call overwrites."""
        buffers = tensors[: self.num_buffers]
        inputs = tensors[self.num_buffers :]
        addresses = [buffer.data_ptr() for buffer in buffers]
        if addresses != self._addresses:
            self._addresses = None
            self._graph: torch.cuda.CUDAGraph | None = None  # frees its memory first
            self._outputs: Sequence[Tensor] = ()
            self._capture(buffers, inputs)
            self._addresses = addresses
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value)
        self._graph.replay()  # type: ignore[union-attr]
        return self._outputs

    def _capture(self, buffers: list[Tensor], inputs: list[Tensor]) -> None:
        """Captures the function. The buffers and the generator stay as they were."""
        device = [*buffers, *inputs][0].device
        # Tensors made in inference mode can be written to in inference mode only.
        with torch.inference_mode(False), torch.no_grad():
            self._inputs = [value.clone() for value in inputs]
            before = [buffer.clone() for buffer in buffers]
        tensors = [*buffers, *self._inputs]
        is_inference = any(buffer.is_inference() for buffer in buffers)
        with torch.cuda.device(device), torch.inference_mode(is_inference), torch.no_grad():
            generator = torch.cuda.get_rng_state(device)
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream()
            side.wait_stream(current)
            graph = torch.cuda.CUDAGraph()
            try:
                # Libraries allocate workspaces and kernels are loaded before the capture.
                with torch.cuda.stream(side):
                    for _ in range(_WARM_UPS):
                        self.run(tensors)
                # Other threads may use the device meanwhile.
                mode = "thread_local"
                with torch.cuda.graph(graph, stream=side, capture_error_mode=mode):
                    self._outputs = self.run(tensors)
            finally:
                current.wait_stream(side)
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
                torch.cuda.set_rng_state(generator, device)
        self._graph = graph
