"""Kernels: how Inductor writes the loops of a graph in C++. It imports Inductor.

What nobody reads soon is written into memory, past the caches, with streaming stores; and a function has a few loops only.
"""

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

# A function that takes more than that ends, and the next loop begins another one. As one function, the loops of four steps
# took a third longer: g++ probably allocates the registers of very large functions by simpler rules.
_MAX_ARGUMENTS = 30


def metadata(streamed: Sequence[int]) -> dict[str, str]:
    """What tells Inductor, and the key of its cache, how to write a graph.

    Args:
        streamed: indices of the inputs that are written with streaming stores.
    """
    return {_KEY: " ".join(map(str, streamed)), "max arguments": str(_MAX_ARGUMENTS)}


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


class _TileKernel(CppTile2DKernel, _VectorKernel):  # the proxy's tiles have to be vector kernels of the proxy
    pass


class _KernelProxy(CppKernelProxy):
    vec_kernel_cls = _VectorKernel
    tile2d_kernel_cls = _TileKernel


class _Scheduling(CppScheduling):
    kernel_proxy_cls = _KernelProxy

    def codegen_node(self, node: Any) -> None:
        super().codegen_node(node)
        if _KEY in config.aot_inductor.metadata and self._get_scheduled_num_args() > _MAX_ARGUMENTS:
            self._set_flush_status(True)


def install() -> None:
    """Lets Inductor write graphs like this in this process. Those without `metadata` are generated as before."""
    init_backend_registration()
    if config.cpu_backend == "cpp":
        device_codegens["cpu"].scheduling = _Scheduling
