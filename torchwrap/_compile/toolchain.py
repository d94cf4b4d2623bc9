"""toolchain: Inductor's way from C++ to a function, without what takes longest. It imports Inductor, so import it late."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions, get_compiler_version_info, is_gcc
from torch._inductor.exc import CppCompileError

from torchwrap._compile import kernels
from torchwrap._compile.builds import Builds, compiling

_log = logging.getLogger(__name__)
_WRAPPER = "#include <torch/csrc/inductor/cpp_wrapper/array_ref.h>"
_INCLUDE = re.compile(r"#include <torch/csrc/inductor/cpp_wrapper/(?:array_ref|cpu)\.h>")
# Headers whose text takes the place of the line that includes them, and those that are left out.
_INLINED = ("cpp_wrapper/common.h", "array_ref_impl.h")
_LEFT_OUT = ("filesystem", "torch/csrc/stable/library.h", "torch/csrc/inductor/aoti_torch/utils.h")
_PYBIND = re.compile(r"#if __has_include\(<pybind11/gil_simple\.h>\).*?#endif\n", re.DOTALL)
_GIL = """
namespace pybind11 {
struct gil_scoped_release_simple {
  PyThreadState* state = PyEval_SaveThread();
  ~gil_scoped_release_simple() { PyEval_RestoreThread(state); }
};
struct gil_scoped_acquire_simple {
  PyGILState_STATE state = PyGILState_Ensure();
  ~gil_scoped_acquire_simple() { PyGILState_Release(state); }
};
}  // namespace pybind11
"""

# What replaces PyTorch's functions and constants of vectors, and how the code of Inductor writes PyTorch's.
_VECTORS = Path(__file__).with_name("vectors.h")
_LOAD = re.compile(r"\bat::vec::VectorizedN?<(\w+(?:,\w+)?)>::loadu\(")
_STORE = re.compile(rf"\b(tmp\w+)\.({re.escape(kernels.MARK)})?store\(")
_CONSTANT = re.compile(
    r"(\b(tmp\d+) = static_cast<int64_t>\((\d+)\);\s+auto tmp\d+ = )at::vec::VectorizedN<int64_t,(\d)>\(\2\);"
)


class _AVX512(cpu_vec_isa.VecAVX512):
    def __bool__(self) -> bool:  # type: ignore[override]
        return True


class _AVX2(cpu_vec_isa.VecAVX2):
    def build_arch_flags(self) -> str:
        # Unless it optimizes for a processor like this one, g++ copies 32 bytes in two halves, and a load of the whole waits
        # until both are in memory. The kernels of a graph can be one large function, in which g++ would stop inlining, so that
        # each operator on a vector would be a call.
        flags = f"{super().build_arch_flags()} -mtune=skylake-avx512"
        return f"{flags} --param=large-function-insns=100000" if is_gcc() else flags

    def __bool__(self) -> bool:
        return True


@contextlib.contextmanager
def installed(builds: Builds, later: bool = False) -> Iterator[None]:
    """Within this block, what this thread compiles is built by `builds`, which does not wait for it if that is for `later`.

    - Inductor asks g++ for every set of vector instructions that the CPU has, with up to eleven programs, which takes 9 s,
      and runs them at each start, 2 s. Kernels use AVX-512 or AVX2 only, which any g++ that knows C++20 has.
    - The headers of a graph take g++ 5 s. What most graphs need takes 2 s, and is precompiled, once per machine, while Python
      traces and prepares the first graph; others are built with all headers, and the log says why, at level INFO.
    - g++ runs in another thread.
    - Kernels use `vectors.h`, and with AVX2, g++ copies whole vectors.
    """
    thread = threading.get_ident()
    list_isas, load, load_async = (
        cpu_vec_isa.valid_vec_isa_list,
        CppWrapperCodeCache.load_pybinding,
        CppWrapperCodeCache.load_pybinding_async,
    )

    def list_isas_here() -> list[Any]:
        return (threading.get_ident() == thread and _isas()) or list_isas()

    def load_here(**keywords: Any) -> Any:
        if threading.get_ident() != thread:
            return load(**keywords)
        futures = []

        def submit(work: Callable[[], None]) -> Any:
            def build() -> None:
                header.precompile()
                work()

            futures.append(builds.pool.submit(build))
            return futures[-1]

        header = Header()
        code = _INCLUDE.sub(lambda _: header.line, keywords["main_code"])
        if isinstance(cpu_vec_isa.pick_vec_isa(), _AVX2 | _AVX512):
            code = _STORE.sub(_call_store, _LOAD.sub(r"torchwrap::load<\1>(", code))
            code = _CONSTANT.sub(r"\1torchwrap::Constant<\3,\4>();", code)
        slim = load_async(**{**keywords, "main_code": code}, submit_fn=submit)
        entry = _Entry(slim, load_async(**keywords), sys._getframe(1).f_globals)
        if not futures:  # it was built before
            return entry.wait()
        if not later:
            builds.pending.append(entry.wait)
        return entry

    name = "load_pybinding"
    inherited = name not in vars(CppWrapperCodeCache)
    cpu_vec_isa.valid_vec_isa_list = list_isas_here  # type: ignore[assignment]
    setattr(CppWrapperCodeCache, name, staticmethod(load_here))
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = list_isas
        if inherited:
            delattr(CppWrapperCodeCache, name)
        else:
            setattr(CppWrapperCodeCache, name, load)


class _Entry:
    """Stands for a function that is being built in the module that Inductor has generated. It is replaced when it is built."""

    def __init__(self, slim: Callable[[], Any], whole: Callable[[], Any], namespace: dict[str, Any]) -> None:
        self.slim, self.whole, self.namespace = slim, whole, namespace

    def __call__(self, *arguments: Any) -> Any:
        with compiling() as builds:  # which shows the progress
            builds.num_graphs += 1
            function = self.wait()
        return function(*arguments)

    def wait(self) -> Any:
        try:
            function = self.slim()
        except (CppCompileError, OSError, ImportError) as error:  # it needs another header
            _log.info("a graph is built again, with all of PyTorch's headers, because of %s: %s", type(error).__name__, error)
            function = self.whole()
        for cell in getattr(self.namespace.get("call"), "__closure__", None) or ():
            if cell.cell_contents is self:
                cell.cell_contents = function
        return function


class Header:
    """What most graphs need, as one header for the options of Inductor that are set now.

    It lies next to PyTorch's own precompiled headers, because it depends on the machine only. Precompiled it has 160 MB.
    """

    failed: set[str] = set()

    def __init__(self) -> None:
        flags = {"vec_isa": cpu_vec_isa.pick_vec_isa(), "device_type": "cpu", **CppWrapperCodeCache.cpp_compile_command_flags}
        options = CppTorchDeviceOptions(**flags, precompiling=True)
        command = CppBuilder("o", "i", options).get_command_line()
        kind = f"{command} {get_compiler_version_info(options.get_compiler())} {torch.__version__}"
        text = f"{_text(_WRAPPER)}\n#include <torch/csrc/inductor/cpp_prefix.h>\n{_VECTORS.read_text()}"
        try:
            _, self.path = codecache.write(text, "h", extra=kind, specified_dir=codecache._HEADER_DIR)
            self.line = f'#include "{self.path}"'
        except OSError:  # another user's directory, for example
            self.path, self.line = "", text
        self.builder = CppBuilder(f"{self.path}.{os.getpid()}", self.path, options)

    def precompile(self) -> None:
        """Returns when it is precompiled, by this process or another one. If it cannot be, g++ reads the text."""
        if not self.path or self.path in self.failed or not is_gcc():
            return
        lock = Path(codecache._HEADER_LOCK_DIR, f"{Path(self.path).stem}.lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            codecache._worker_compile_cpp(str(lock), (self,))  # type: ignore[arg-type]
        except (CppCompileError, OSError):
            self.failed.add(self.path)

    def get_target_file_path(self) -> str:
        return f"{self.path}.gch"

    def build(self) -> None:
        self.builder.build()
        os.replace(self.builder.get_target_file_path(), self.get_target_file_path())  # there is never half of it


def _call_store(match: re.Match[str]) -> str:
    return f"torchwrap::{'stream' if match[2] else 'store'}({match[1]}, "


@functools.cache
def _isas() -> list[Any]:
    # None on other CPUs than x86, where Inductor compiles no programs to find out.
    supported = cpu_vec_isa.x86_isa_checker()
    return [isa for isa in (_AVX512(), _AVX2()) if str(isa) in supported]


@functools.cache
def _text(line: str) -> str:
    # The text of the header that is included, with fewer headers.
    found = re.fullmatch(r"\s*#include <(.*)>\s*", line)
    if found is None:
        return line
    name = found[1]
    if name in _LEFT_OUT:
        return ""
    path = Path(torch.__file__).parent / "include" / name
    if not (_INCLUDE.fullmatch(line.strip()) or name.removeprefix("torch/csrc/inductor/") in _INLINED) or not path.exists():
        return line
    text = _PYBIND.sub(lambda match: _GIL, path.read_text()).replace("#pragma once", "")
    return "\n".join(map(_text, re.sub(r"\bTORCH_CHECK\(", "STD_TORCH_CHECK(", text).splitlines()))
