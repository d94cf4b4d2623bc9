"""CUDA graphs on the CPU: operators are recorded with their memory, and `replay` runs them again.

In a block of `simulated`, torchwrap captures tensors on the CPU as on CUDA. There too, a captured
operator computes nothing, Python does not run again, memory stays in its place, and a host read is
an error. The backend must run operators one by one: "eager" or "aot_eager".
"""

import contextlib
from unittest import mock

import torch
from tensordict.nn import CudaGraphModule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
_HOST_READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
}
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


def tensors(result):
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


class CUDAGraph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.tape = None

    def replay(self):
        with torch.no_grad(), torch.inference_mode(), torch._C._AutoDispatchBelowAutograd():
            for function, args, kwargs, outputs in self.tape:
                values = tensors(function(*args, **kwargs))
                for output, value in zip(tensors(outputs), values, strict=True):
                    if output.data_ptr() != value.data_ptr():
                        output.copy_(value)


class _Capture(TorchDispatchMode):
    """In place of `torch.cuda.graph`."""

    def __init__(self, graph, stream, capture_error_mode="thread_local"):
        super().__init__()
        assert stream.device is not None, "a stream of whichever device is the current one"
        assert capture_error_mode == "thread_local", "what another thread does would fail"
        self.graph = graph
        self.tape = []

    def __exit__(self, kind, *error):
        super().__exit__(kind, *error)
        if kind is None:
            self.graph.tape = self.tape

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # By its memory: a parameter that gets other memory later gets it without the graph.
        args, kwargs = tree_map_only(torch.nn.Parameter, Tensor.detach, (args, kwargs or {}))
        if function.overloadpacket in _HOST_READS or (
            function.overloadpacket is aten.index and _has_mask(args[1])
        ):
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        if function.overloadpacket in _EMPTY or function.namespace == "profiler":
            return function(*args, **kwargs)
        if function._schema.is_mutable:
            return self._write(function, args, kwargs)
        result = function(*args, **kwargs)
        memory = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        new = [
            leaf for leaf in tree_leaves(result) if leaf.untyped_storage().data_ptr() not in memory
        ]
        if new:  # and no view
            for leaf in new:
                leaf.fill_(
                    leaf.is_floating_point()
                )  # nothing has been computed yet; integers can be indices
            self.tape.append((function, args, kwargs, result))
        return result

    def _write(self, function, args, kwargs):
        schema = function._schema
        given = (
            dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
        )
        written = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info and argument.alias_info.is_write
        ]
        results = [given[name] for name in written][: len(schema.returns)]
        self.tape.append((function, args, kwargs, results))
        return results[0] if len(results) == 1 else tuple(results) or None


def _has_mask(indices):
    return any(index is not None and index.dtype == torch.bool for index in indices)


class _Device(contextlib.AbstractContextManager):
    """In place of `torch.cuda.device`: the current device in its block."""

    current = None

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        self.before, _Device.current = _Device.current, self.device

    def __exit__(self, *error):
        _Device.current = self.before


class _Stream:
    def __init__(self, device=None):
        self.device = _Device.current

    def wait_stream(self, other):
        assert other.device == self.device is not None


@contextlib.contextmanager
def simulated():
    """In this block, compiled envs and collectors on the CPU are captured."""
    with contextlib.ExitStack() as stack:
        for name, value in {
            "Stream": _Stream,
            "current_stream": _Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "device": _Device,
            "get_rng_state": lambda device: torch.get_rng_state(),
            "set_rng_state": lambda state, device: torch.set_rng_state(state),
            "CUDAGraph": CUDAGraph,
            "graph": _Capture,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch("torchwrap._compile.graph.captures", lambda device: True))
        yield


@contextlib.contextmanager
def simulated_module():
    """In this block of `simulated`, TensorDict's CudaGraphModule captures, too."""
    construct = CudaGraphModule.__init__

    def init(self, *args, **kwargs):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            construct(self, *args, **kwargs)

    names = {"__init__": init, "_check_device_and_clone": CudaGraphModule._clone}
    with mock.patch.multiple(CudaGraphModule, **names), torch.cuda.device("cuda"):
        yield
