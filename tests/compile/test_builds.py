"""The C++ of graphs is built side by side, with few headers and no other programs; what takes long shows its progress."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
import time

import pytest
import torch
from helpers import INDUCTOR, assert_plays_the_same

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import builds, host_reset
from torchwrap.testing import ScriptedEnv

N = 64


def stack(*transforms):
    return tw.TransformedEnv(ScriptedEnv(N), *transforms)


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """An empty cache of compiled code, on disk and in this process, and none of precompiled headers."""
    from torch._inductor import codecache
    from torch._inductor.utils import fresh_cache

    monkeypatch.setattr(host_reset, "_MIN_HOST_RESET_ENVS", N)
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "headers"))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(tmp_path / "locks"))
    with fresh_cache(dir=tmp_path):
        yield tmp_path
    shutil.rmtree(tmp_path / "headers", ignore_errors=True)  # 160 MB


class Runs(list):
    """What the C++ compiler ran, and for which headers. The third run starts when the gate is open."""

    def __init__(self):
        super().__init__()
        self.gate, self.headers = threading.Event(), []


@pytest.fixture
def commands(monkeypatch):
    """Each run of the C++ compiler: when it started and ended, its command, and the code that it compiled."""
    from torch._inductor import cpp_builder

    started, run = [], cpp_builder.run_compile_cmd

    def recording(command, cwd):
        if "c++-header" in command:
            runs.headers.append(command)
            return run(command, cwd)
        started.append(command)
        if len(started) == 3:
            runs.gate.wait(60)
        start = time.monotonic()
        try:
            return run(command, cwd)
        finally:
            source = next(word for word in command.split() if word.endswith(".cpp"))
            with open(source) as file:
                runs.append((start, time.monotonic(), command, file.read()))

    runs = Runs()
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", recording)
    return runs


@pytest.mark.full
def test_graphs_are_built_side_by_side_that_of_full_resets_later_and_nothing_else(cold, commands):
    env = tw.compile(stack(T.NormalizeObservation()))
    assert len(commands) == 2  # of the step, and of resets of a few rows
    commands.gate.set()
    (start, end, *_), (other_start, other_end, *_) = commands
    assert start < other_end and other_start < end
    assert len(commands.headers) == len(list(cold.rglob("*.gch"))) == 1
    assert not any("cpp_wrapper/array_ref.h>" in code or "stable/library.h" in code for *_, code in commands)
    assert_plays_the_same(stack(T.NormalizeObservation()), env, 30, INDUCTOR)  # episodes end together, which waits for it
    assert len(commands) == 3


@pytest.mark.full
def test_code_that_needs_other_headers_is_built_with_all_of_them(cold, commands, monkeypatch, caplog):
    from torchwrap._compile import toolchain

    caplog.set_level("INFO", "torchwrap")
    monkeypatch.setattr(toolchain, "_GIL", "")  # what every wrapper needs
    toolchain._text.cache_clear()
    make = lambda: tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1))  # noqa: E731
    with contextlib.ExitStack() as stack:
        stack.callback(toolchain._text.cache_clear)
        env = tw.compile(make())
    assert ["cpp_wrapper/array_ref.h>" in code for *_, code in commands] == [False, True]
    assert "CppCompileError" in caplog.text
    assert_plays_the_same(make(), env, 30, INDUCTOR)


@pytest.mark.full
def test_headers_are_precompiled_for_the_options_of_a_graph(cold, commands):
    for bits in (256, 1):
        tw.compile(tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1)), options={"cpp.simdlen": bits})
    assert len(commands) == len(commands.headers) == 2
    for _, _, command, _ in commands:  # with -H, g++ marks the precompiled header that it uses
        listed = subprocess.run([*shlex.split(command), "-H", "-o", os.devnull], capture_output=True, text=True).stderr
        assert re.match(r"! .*\.h\.gch\n", listed)


@pytest.mark.full
@pytest.mark.parametrize("broken", ["build", "directory"])
def test_headers_that_cannot_be_precompiled_are_read(cold, commands, monkeypatch, broken):
    from torch._inductor import codecache
    from torch._inductor.exc import CppCompileError

    from torchwrap._compile import toolchain

    failures = []

    def failing(header):
        failures.append(header.path)
        raise CppCompileError([], "no space left")

    if broken == "build":
        monkeypatch.setattr(toolchain.Header, "build", failing)
    else:
        (cold / "file").touch()
        monkeypatch.setattr(codecache, "_HEADER_DIR", str(cold / "file" / "headers"))
    make = lambda: tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1))  # noqa: E731
    assert_plays_the_same(make(), tw.compile(make()), 30, INDUCTOR)
    assert len(failures) == (broken == "build")  # not again for the graph
    assert len(commands) == 1 and not commands.headers and not list(cold.rglob("*.gch"))


def test_inductor_in_another_thread_and_after_a_block_is_as_before():
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import CppWrapperCodeCache

    from torchwrap._compile import toolchain

    original, load = cpu_vec_isa.valid_vec_isa_list, CppWrapperCodeCache.load_pybinding
    own = "load_pybinding" in vars(CppWrapperCodeCache)  # from torch 2.15 on
    cpu_vec_isa.valid_vec_isa_list = marked = lambda: ["marked"]
    try:
        with builds.compiling() as current, toolchain.installed(current):
            here, there = cpu_vec_isa.valid_vec_isa_list(), []
            thread = threading.Thread(target=lambda: there.append(cpu_vec_isa.valid_vec_isa_list()))
            thread.start()
            thread.join()
            assert CppWrapperCodeCache.load_pybinding != load
        assert there == [["marked"]] and cpu_vec_isa.valid_vec_isa_list is marked
        assert CppWrapperCodeCache.load_pybinding == load and ("load_pybinding" in vars(CppWrapperCodeCache)) == own
    finally:
        cpu_vec_isa.valid_vec_isa_list = original
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert all(here) and {str(isa) for isa in here} <= {"avx2", "avx512"}


def test_a_build_that_fails_leaves_the_env_eager(monkeypatch):
    def failing(self):
        raise OSError("no space left")

    monkeypatch.setattr(builds.Builds, "wait", failing)
    env = ScriptedEnv(2)
    with pytest.raises(OSError, match="no space left"):
        tw.compile(env, backend="eager")
    assert not env.is_compiled and builds._current is None


def test_progress_is_shown_only_for_what_takes_long(monkeypatch, capfd):
    with builds.compiling():
        pass
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(builds, "_FIRST_NOTE", 0.05)
    monkeypatch.setattr(builds, "_NEXT_NOTE", 0.05)
    with builds.compiling() as current:
        current.num_graphs = 2
        with builds.compiling() as inner:  # which neither waits nor shows anything
            assert inner is current
        time.sleep(0.5)
    out, err = capfd.readouterr()
    *notes, last = err.splitlines()
    assert not out and len(notes) > 1
    assert all(re.fullmatch(r"torchwrap: compiling graph 2, \d+ s so far", note) for note in notes)
    assert re.match(r"torchwrap: compiled 2 graph\(s\) in \d+ s", last)


def test_progress_ends_with_an_error(monkeypatch, capfd):
    monkeypatch.setattr(builds, "_FIRST_NOTE", 0.05)
    with pytest.raises(ValueError, match="wrong"), builds.compiling():
        raise ValueError("wrong")
    time.sleep(0.2)
    assert capfd.readouterr() == ("", "") and not any(t.name == "torchwrap-progress" for t in threading.enumerate())


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_while_graphs_are_compiled(enabled):
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(ValueError, match="wrong"), builds.compiling():
            assert not gc.isenabled()
            raise ValueError("wrong")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_what_compilation_leaves_is_not_collected_at_once():
    collections, kept = [], []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with builds.compiling():
            kept += [[] for _ in range(10_000)]
        kept += [[] for _ in range(100)]
        assert not collections and gc.isenabled() and gc.get_freeze_count() == 0
        gc.freeze()
        frozen = gc.get_freeze_count()
        with builds.compiling():
            kept += [[] for _ in range(10_000)]
        assert gc.get_freeze_count() == frozen > 0  # what the caller has frozen stays so
    finally:
        gc.callbacks.pop()
        gc.unfreeze()


on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 processor")


@on_x86
def test_a_vector_of_avx2_is_copied_as_a_whole(tmp_path):
    from torch._inductor.cpp_builder import get_cpp_compiler

    from torchwrap._compile import toolchain

    # What `at::vec::Vectorized<int32_t>::loadu` does.
    code = """
    #include <cstring>
    #include <immintrin.h>
    extern "C" __m256i load(const int* numbers) {
      alignas(32) int copies[8] = {};
      std::memcpy(copies, numbers, 32);
      return _mm256_load_si256((__m256i*)copies);
    }
    """
    source, assembly = tmp_path / "load.cpp", tmp_path / "load.s"
    source.write_text(code)
    flags = ["-O3", "-march=x86-64-v3", *toolchain._AVX2().build_arch_flags().split()]
    subprocess.run([get_cpp_compiler(), *flags, "-S", source, "-o", assembly], check=True)
    assert "%xmm" not in assembly.read_text()


@pytest.mark.compiles
@on_x86
def test_graphs_for_avx2_are_built_like_that(cold, commands):
    tw.compile(stack(T.ClipReward(-1, 1)), options={"cpp.simdlen": 256})
    flags = "-mavx2 -mfma -mf16c -mtune=skylake-avx512 --param=large-function-insns=100000"
    assert commands and all(flags in command for _, _, command, _ in commands)
