"""Inductor and Triton for an H200, on a machine without a GPU: the kernels that a compiled env or collector consists of.

It needs a CUDA build of PyTorch 2.14, whose internals it patches. Tensors are fake, whatever asks for the GPU gets an answer,
and kernels are compiled to machine code, but never launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
os.environ.setdefault("TRITON_CACHE_DIR", os.environ["TORCHINDUCTOR_CACHE_DIR"])

import torch
import triton
from torch import Tensor
from torch._dynamo import device_interface
from torch._inductor import config, dependencies
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.fx_passes import fuse_attention, joint_graph, pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import torchwrap as tw
from torchwrap._compile import stand_ins, trace

SMS = 132
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclasses.dataclass
class Kernel:
    """One launch."""

    name: str
    reads: int
    """Bytes of its inputs that its index expressions reach, each once."""
    writes: int
    elements: int
    """Of each sum."""
    rounds: int = 0
    """Of the loop of a reduction, of which each waits for the one before."""
    registers: int = 0
    spills: int = 0
    """Bytes per thread."""


@dataclasses.dataclass
class Program:
    """A compiled graph."""

    kernels: list[Kernel]
    external: int
    """Operators that Inductor leaves to PyTorch's own kernels."""
    host_copies: int
    floor: int
    """Bytes of inputs, of the state that is written, and of outputs, each once."""


class _Properties:
    """What Inductor asks a device for."""

    name, major, minor, uuid, is_integrated, gcnArchName = "NVIDIA H200", 9, 0, "", 0, ""
    multi_processor_count, warp_size, max_threads_per_multi_processor, max_threads_per_block = SMS, 32, 2048, 1024
    regs_per_multiprocessor, total_memory, L2_cache_size = 65536, 141 * 2**30, 50 * 2**20
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472
    clock_rate, memory_clock_rate, memory_bus_width = 1980000, 3201000, 6144


class _Driver:
    """What Triton asks a driver for."""

    utils = mock.Mock(get_device_properties=lambda _: {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_device_capability(self, _: int = 0) -> tuple[int, int]:
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


_ANSWERS: dict[str, Callable[..., Any]] = {
    **{name: lambda *_: True for name in ("is_available", "is_initialized")},
    **{name: lambda *_: None for name in ("_lazy_init", "synchronize", "set_device", "set_rng_state")},
    **{name: lambda *_: 0 for name in ("current_device", "_exchange_device", "_maybe_exchange_device")},
    "device_count": lambda: 1,
    "get_device_properties": lambda *_: _Properties,
    "get_device_capability": lambda *_: (9, 0),
    "get_arch_list": lambda: ["sm_90"],
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
}


class _OnHost(TorchDispatchMode):
    """Computes on the CPU what Inductor computes with values while it compiles."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [torch.device("cpu") if isinstance(arg, torch.device) else arg for arg in args]
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if (kwargs or {}).get("device") else {})})


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _OnHost():
            return function(*args, **kwargs)

    return call


def _on_gpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` and `torch.as_tensor`, which would copy values to the GPU: the result has none."""

    def call(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        made = make(data, **more)
        return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)

    return call


@contextlib.contextmanager
def _pretended() -> Iterator[None]:
    """A block in which PyTorch and Triton believe to have an H200."""
    torch._C._ensureCUDADeviceGuardSet()  # fake tensors do this themselves if CUDA is not available
    driver.set_active(_Driver())
    device_interface.caching_worker_device_properties["cuda"] = [_Properties]
    device_interface.caching_worker_current_devices["cuda"] = 0
    folder, tuner = joint_graph.UniformValueConstantFolder, triton_heuristics.CachingAutotuner
    nothing = lambda *_, **__: None  # noqa: E731
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            if name in vars(device_interface.CudaInterface):
                stack.enter_context(mock.patch.object(device_interface.CudaInterface, name, staticmethod(answer)))
        patches = [
            *[(fuse_attention, "_sfdp_init", nothing), (pad_mm, "_pad_mm_init", nothing)],  # which trace on the device
            *[(tuner, "_make_launchers", nothing), (tuner, "_dynamic_scale_rblock", nothing)],  # which load kernels
            (triton_helpers, "set_driver_to_gpu", nothing),
            (folder, "run", _on_host(folder.run)),
            *[(torch, name, _on_gpu(getattr(torch, name))) for name in ("tensor", "as_tensor")],
        ]
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def compile_for_h200(target: Any, options: dict[str, Any] | None = None) -> Program:
    """What `tw.compile` makes of an env or a collector, which is on the CPU, once it is moved to the GPU."""
    env = target.env if isinstance(target, tw.Collector) else target
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    kernels: dict[str, Kernel] = {}
    tuners: dict[str, Any] = {}
    codes: list[str] = []
    floors: list[int] = []
    define, precompile = TritonScheduling.define_kernel, triton_heuristics.CachingAutotuner._precompile_worker
    inductor_compile, find = torch._inductor.compile, stand_ins.StandIns.of

    def define_kernel(self: Any, src_code: str, node_schedule: Any, kernel: Any) -> str:
        name: str = define(self, src_code, node_schedule, kernel)
        parts = getattr(kernel, "sub_kernels", [kernel])
        elements = max(int(V.graph.sizevars.optimization_hint(part.numels.get("r0_", 1))) for part in parts)
        kernels[name] = Kernel(name, *_traffic(kernel), elements)
        return name

    def precompile_worker(self: Any) -> None:
        precompile(self)
        tuners[self.fn.__name__] = self

    def compile(graph: Any, inputs: Any, **more: Any) -> Any:
        floors.append(_floor(graph, inputs))
        return inductor_compile(graph, inputs, **more)

    def stand_in(self: Any, value: Any) -> Any:  # a trace takes fake tensors for its own
        return self.by_id.get(id(value)) if id(value) in self.by_id else find(self, value)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_pretended())
        stack.enter_context(
            config.patch({"compile_threads": 1, "use_static_triton_launcher": False, "force_disable_caches": True})
        )
        for owner, name, value in (
            (TritonScheduling, "define_kernel", define_kernel),
            (triton_heuristics.CachingAutotuner, "_precompile_worker", precompile_worker),
            (GraphLowering, "save_output_code", staticmethod(codes.append)),
            (torch._inductor, "compile", compile),
            (trace, "FakeTensorMode", lambda **_: mode),
            *[(module, "memory", id) for module in (stand_ins, trace)],
            (stand_ins.StandIns, "of", stand_in),
            (trace, "_overlap", lambda first, second: False),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mode)
        env._apply(lambda own: torch.empty_strided(own.size(), own.stride(), dtype=own.dtype, device="cuda:0"))
        tw.compile(target, options=options)
    body = re.sub("#.*", "", codes[-1].split("def call(", 1)[1].split("\ndef ")[0])
    launched = [kernels[name] for name in re.findall(r"(triton_\w+)\.run\(", body)]
    for kernel in launched:
        _inspect(kernel, tuners[kernel.name])
    external = re.findall(r"(?:extern_kernels|torch\.ops|aten)\.(?!view)[\w.]+\(", body)
    copies = re.findall(r"empty_strided_cpu|\.item\(\)", body)
    return Program(launched, len(external), len(copies), floors[-1])


def _size(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def _floor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> int:
    nodes, changed, copy = graph.graph.find_nodes(op="placeholder"), trace._written(graph.graph), torch.ops.aten.copy_.default
    given = list(zip(nodes, inputs, strict=True))
    read = [
        tensor for node, tensor in given if any(user.target is not copy or user.args[0] is not node for user in node.users)
    ]
    written = [tensor for node, tensor in given if node in changed]
    (output,) = graph.graph.find_nodes(op="output")
    return sum(map(_size, [*read, *written, *(node.meta["val"] for node in output.args[0])]))


def _traffic(kernel: Any) -> tuple[int, int]:
    """Bytes that a kernel reads and writes: of each buffer the part that its index expressions reach, once."""
    if hasattr(kernel, "sub_kernels"):  # several small ones in one launch
        reads, writes = zip(*map(_traffic, kernel.sub_kernels), strict=True)
        return sum(reads), sum(writes)
    hint = V.graph.sizevars.optimization_hint
    real = V.graph.scheduler.mutation_real_name
    arguments = kernel.args
    loaded, stored = [
        {
            name
            for group in (groups, arguments.inplace_buffers)
            for name, value in group.items()
            if "REMOVED" not in str(value).upper()
        }
        for groups in (arguments.input_buffers, arguments.output_buffers)
    ]
    nodes = list(kernel.features.scheduler_nodes())
    made = {dep.name for node in nodes for dep in node.read_writes.writes}

    def count(deps: Any, known: set[str]) -> int:
        parts: dict[str, dict[Any, int]] = {}
        for dep in deps:
            name = real.get(dep.name, dep.name)
            if isinstance(dep, dependencies.WeakDep) or not {name, dep.name} & known:
                continue
            total = int(hint(V.graph.get_numel(name)))
            reached, index = total, None
            if isinstance(dep, dependencies.MemoryDep):
                index, symbols = dep.index, dep.index.free_symbols
                is_indirect = any(str(symbol).startswith(("indirect", "tmp")) for symbol in symbols)
                sizes = zip(dep.var_names, dep.size, strict=True)
                reached = 1
                for symbol, extent in sizes:
                    reached *= int(hint(extent)) if is_indirect or symbol in symbols else 1
            parts.setdefault(name, {})[index] = min(reached, total)
        return sum(
            min(sum(found.values()), int(hint(V.graph.get_numel(name)))) * V.graph.get_dtype(name).itemsize
            for name, found in parts.items()
        )

    reads = [dep for node in nodes for dep in node.read_writes.reads if dep.name not in made]
    return count(reads, loaded), count([dep for node in nodes for dep in node.read_writes.writes], stored)


def _inspect(kernel: Kernel, tuner: Any) -> None:
    # The first of the configurations that Inductor would try.
    result = tuner.compile_results[0]
    binary, blocks = result.kernel, [size for name, size in result.config.kwargs.items() if name.startswith("R0_BLOCK")]
    if blocks and not kernel.name.startswith("triton_spl"):  # of a scan that is split, each block reduces its own part
        kernel.rounds = math.ceil(kernel.elements / max(blocks))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    kernel.registers, stack, local = map(int, found)
    kernel.spills = stack + local
