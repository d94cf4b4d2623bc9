"""One row of one side in a separate process: versions may conflict, thread pools do not interfere.

`python -m tests.benchmarks.worker <module> <function> <arguments> [time | call]` calls the function
with arguments in JSON. An answer is a line of JSON. With "time", the function returns a `Timed`.
The first answer is the time to build and warm it up. Each line "turn <seconds>" on stdin is
answered with microseconds per step. With "call", the answer is the function's result. After an
error, the answer has the reason as `skipped`.

This module imports only the side, because its interpreter may have neither PyTorch nor torchwrap.
"""

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple


def nothing() -> None:
    """The `wait` of work that is done when the call returns."""


class Timed(NamedTuple):
    """A function to time.

    A call takes `steps` steps of all envs, and `wait` returns when all queued work is done. `bytes`
    is the minimum memory traffic of a step, or 0 if it was not counted. `clock` returns seconds.
    """

    call: Callable[[], Any]
    steps: int = 1
    wait: Callable[[], Any] = nothing
    bytes: int = 0
    clock: Callable[[], float] = time.perf_counter


def turn(timed: Timed, seconds: float) -> float:
    """Microseconds per step, measured for about `seconds`.

    `wait` is called after 5, 10, 20, 40 calls and so on. Without it, a device that falls behind the
    host could have seconds of queued work at the end; after every call, it would add its own time.
    """
    calls = 0
    more = 5
    start = timed.clock()
    while calls == 0 or timed.clock() - start < seconds:
        for _ in range(more):
            timed.call()
        calls += more
        if timed.wait is not nothing:
            timed.wait()
            more = calls
    return (timed.clock() - start) / calls / timed.steps * 1e6


def build(function: Callable[..., Timed], arguments: dict[str, Any]) -> tuple[Timed, float]:
    """A warm `Timed` and the seconds to build it. It is called thrice: a compiler may recompile."""
    # glibc hands freed memory back, and faults it in again, up to twice the largest block that was
    # freed before. A training run has freed rollouts; without this line, each step with 16,384 envs
    # would wait for the kernel's zeros, on every side.
    bytearray(2**25 - 2**16)
    start = time.perf_counter()
    timed = function(**arguments)
    for _ in range(3):
        timed.call()
    timed.wait()
    return timed, time.perf_counter() - start


def main(module: str, name: str, arguments: str, what: str = "time") -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # keeps the output of libraries out of the answers

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        function = getattr(importlib.import_module(f".{module}", __package__), name)
        keywords = json.loads(arguments)
        if what == "call":
            return answer(function(**keywords))
        timed, seconds = build(function, keywords)
    except Exception as error:
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        return answer({"skipped": reason, "trace": traceback.format_exc()})
    answer({"build_seconds": seconds, "bytes": timed.bytes})
    for line in sys.stdin:
        answer(turn(timed, float(line.removeprefix("turn "))))


if __name__ == "__main__":
    main(*sys.argv[1:])
