"""Streaming stores: a graph writes what nobody reads soon into memory, past the caches. It imports Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._inductor import config
from torch._inductor.codegen.common import DeferredLine, device_codegens, init_backend_registration
from torch._inductor.codegen.cpp import CppKernelProxy, CppScheduling, CppTile2DKernel, CppVecKernel
from torch._inductor.virtualized import V

MARK = "/* streaming */"
"""What precedes the name of the function in a store of this kind. Without `toolchain` it is a comment."""

_KEY = "streamed"


def metadata(streamed: Sequence[int]) -> dict[str, str]:
    """What tells Inductor, and the key of its cache, to which inputs of a graph it writes like this, by their indices."""
    return {_KEY: " ".join(map(str, streamed))} if streamed else {}


class _VectorKernel(CppVecKernel):
    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
        written = len(self.stores._lines)
        super().store(name, index, value, mode)
        streamed = [V.graph.graph_input_names[int(number)] for number in config.aot_inductor.metadata.get(_KEY, "").split()]
        if V.graph.scheduler.mutation_real_name.get(name) in streamed:
            store = f"store({self.args.output(name)} + "  # other ones are to the stack
            for line in self.stores._lines[written:]:
                if isinstance(line, DeferredLine):
                    line.line = line.line.replace(f".{store}", f".{MARK}{store}")


class _TileKernel(CppTile2DKernel, _VectorKernel):  # Inductor needs it to be a kernel of the other class
    pass


class _KernelProxy(CppKernelProxy):
    vec_kernel_cls = _VectorKernel
    tile2d_kernel_cls = _TileKernel


class _Scheduling(CppScheduling):
    kernel_proxy_cls = _KernelProxy


def install() -> None:
    """Lets all graphs of this process have such stores. Those without `metadata` are generated as before."""
    init_backend_registration()
    if config.cpu_backend == "cpp":
        device_codegens["cpu"].scheduling = _Scheduling
