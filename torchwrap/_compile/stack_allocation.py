"""Small tensors of a graph on the stack, which saves half of the time of a graph over few envs. It imports Inductor."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch._inductor import config, ir
from torch._inductor.codegen.common import device_codegens, init_backend_registration
from torch._inductor.codegen.cpp_wrapper_cpu_array_ref import MAX_STACK_ALLOCATION_SIZE, CppWrapperCpuArrayRef
from torch._inductor.codegen.wrapper import EnterSubgraphLine, ReuseLine
from torch._inductor.virtualized import V


class StackWrapper(CppWrapperCpuArrayRef):
    """The wrapper around the kernels of a graph, with what fits on the stack there, if it lies nowhere but in kernels.

    PyTorch's own class has all tensors on the stack or none: none if they are large together or an operator is not a kernel,
    such as `cumsum` or a matrix product. It copies results into memory that the next call overwrites. Here results, and what
    other operators read or write, are tensors.
    """

    bytes_left = 0
    kept: frozenset[str] = frozenset()
    """The names of buffers that are not on the stack."""

    @staticmethod
    def create(*arguments: Any, **keywords: Any) -> StackWrapper:
        return StackWrapper()  # PyTorch's class ignores the arguments too

    @property
    def allow_stack_allocation(self) -> bool:
        return config.aot_inductor.allow_stack_allocation

    @allow_stack_allocation.setter
    def allow_stack_allocation(self, value: bool) -> None:
        pass  # PyTorch's class takes the permission back for what `kept` excludes

    def memory_plan_reuse(self) -> None:
        super().memory_plan_reuse()
        kept = set(V.graph.get_output_names())
        for operation in V.graph.operations:
            if isinstance(operation, ir.ExternKernel):
                kept.update(buffer.get_name() for buffer in operation.get_outputs())
                kept.update(node.get_name() for node in pytree.tree_leaves(operation.inputs))
        for line in reversed(self.lines):
            if isinstance(line, ReuseLine) and line.reused_as.get_name() in kept:
                kept.add(line.node.get_name())
        self.kept, self.bytes_left = frozenset(kept), MAX_STACK_ALLOCATION_SIZE
        if any(isinstance(line, EnterSubgraphLine) for line in self.lines):  # results of a branch are not `kept`
            self.bytes_left = 0

    def can_stack_allocate_buffer(self, buffer: Any) -> bool:
        if buffer.get_name() in self.kept or not super().can_stack_allocate_buffer(buffer):
            return False
        size = buffer.get_numel() * buffer.get_dtype().itemsize
        if size > self.bytes_left:
            return False
        self.bytes_left -= size
        return True

    def is_safe_to_use_borrow_arrayref_tensor_as_tensor(self) -> bool:
        return True  # what other operators get is a tensor


def install() -> None:
    """Makes it the wrapper of all graphs of this process that have one in C++ and `allow_stack_allocation`."""
    init_backend_registration()
    device_codegens["cpu"].cpp_wrapper_codegen = StackWrapper
