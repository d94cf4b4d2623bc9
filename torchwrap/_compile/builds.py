"""compiling: graphs that are compiled together. Their C++ is built side by side, and what takes long shows its progress."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_FIRST_NOTE, _NEXT_NOTE = 3.0, 10.0  # seconds
_lock = threading.RLock()
_current: Builds | None = None


class Builds:
    """Graphs that are compiled together. While g++ builds one, Python prepares the next."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], Any]] = []
        self.num_graphs = 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.pool = concurrent.futures.ThreadPoolExecutor(cores or 1, "torchwrap-build")  # starts no thread yet

    def wait(self) -> None:
        """Returns when everything is built. Raises what a build raised."""
        while self.pending:
            self.pending.pop()()


@contextlib.contextmanager
def compiling() -> Iterator[Builds]:
    """The builds of this block, which are done when it is left. A block within another one leaves waiting to that one."""
    global _current
    with _lock:  # Inductor compiles one graph at a time
        if _current is not None:
            yield _current
            return
        _current = builds = Builds()
        try:
            with _progress(builds), _without_collection():
                yield builds
                builds.wait()
        finally:
            _current = None
            builds.pool.shutdown(wait=False)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    # Compilation makes millions of objects, few of them in cycles, and Python would go through all of them again and again.
    # Then they count as old, because the first collection of the young ones would take half a second.
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _progress(builds: Builds) -> Iterator[None]:
    # Says on stderr what takes more than a few seconds.
    start, done, notes = time.monotonic(), threading.Event(), 0

    def seconds() -> str:
        return f"{time.monotonic() - start:.0f} s"

    def watch() -> None:
        nonlocal notes
        while not done.wait(_NEXT_NOTE if notes else _FIRST_NOTE):
            _note(f"compiling graph {builds.num_graphs}, {seconds()} so far")
            notes += 1

    thread = threading.Thread(target=watch, name="torchwrap-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if notes and builds.num_graphs:
        _note(f"compiled {builds.num_graphs} graph(s) in {seconds()}; later runs find them in the cache of torch.compile")
    elif notes:
        _note(f"traced in {seconds()}")


def _note(text: str) -> None:
    print(f"torchwrap: {text}", file=sys.stderr, flush=True)
