"""One row of one side, in a process of its own: versions may clash, and no thread pool meets another.

`python -m tests.benchmarks.worker <module> <function> <arguments> [time | memory | call]` calls the function with arguments in
JSON, and answers in JSON, a line each. With "time" the function gives a `Timed`; the first answer says what it took to make it
and to warm it up, and each "turn <seconds>" on stdin is answered with microseconds a step. With "memory" it is bytes an env,
with "call" what the function gave. Something that does not work is answered with a reason, `skipped`.

It imports nothing but the side: that side's interpreter may have neither PyTorch nor torchwrap.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple


def _nothing() -> None:
    pass


class Timed(NamedTuple):
    """Something to call again and again.

    `steps` is how many steps of all envs a call does, `wait` returns once all that calls have queued is done, and `bytes` is
    what a step has to move through memory at least, where that was counted.
    """

    call: Callable[[], Any]
    steps: int = 1
    wait: Callable[[], Any] = _nothing
    bytes: int = 0


def turn(timed: Timed, seconds: float) -> float:
    """Microseconds a step, over about so many seconds."""
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < seconds:
        for _ in range(5):
            timed.call()
        calls += 5
    timed.wait()
    return (time.perf_counter() - start) / calls / timed.steps * 1e6


def build(function: Callable[..., Timed], arguments: dict[str, Any]) -> tuple[Timed, float]:
    """What is to be called, warm, and the seconds that this took: a compiler may look twice before it is content."""
    start = time.perf_counter()
    timed = function(**arguments)
    for _ in range(3):
        timed.call()
    timed.wait()
    return timed, time.perf_counter() - start


def memory(function: Callable[..., Timed], arguments: dict[str, Any]) -> dict[str, float]:
    """Bytes an env, resident after some steps and at worst within them; all that one env needs is subtracted."""
    one = build(function, {**arguments, "num_envs": 1})
    gc.collect()
    before, n = resident("VmRSS"), arguments["num_envs"]
    many, _ = build(function, arguments)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # what compiling took at worst is forgotten
    for _ in range(20):
        many.call()
    many.wait()
    figures = {"bytes_per_env": (resident("VmRSS") - before) / n, "peak_bytes_per_env": (resident("VmHWM") - before) / n}
    del one  # until here, so that its memory is not used again
    return figures


def resident(which: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def main(module: str, name: str, arguments: str, what: str = "time") -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        function, keywords = getattr(importlib.import_module(f".{module}", __package__), name), json.loads(arguments)
        if what != "time":
            return answer(function(**keywords) if what == "call" else memory(function, keywords))
        timed, seconds = build(function, keywords)
    except Exception as error:
        return answer({"skipped": f"{type(error).__name__}: {error}".splitlines()[0], "trace": traceback.format_exc()})
    answer({"build_seconds": seconds, "bytes": timed.bytes})
    for line in sys.stdin:
        answer(turn(timed, float(line.removeprefix("turn "))))


if __name__ == "__main__":
    main(*sys.argv[1:])
