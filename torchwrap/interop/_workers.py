"""Async: the engine of Gymnasium's `AsyncVectorEnv`, whose envs run in worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

import gymnasium

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap.interop._engines import (
    NEW_ENV,
    Engine,
    check_result,
    interrupted,
    set_attribute,
)
from torchwrap.interop._infos import Mask, cast_info

PATIENCE = 5.0  # seconds in which workers can end by themselves before they are killed


class Async(Engine):
    """Gymnasium's `AsyncVectorEnv`. Errors name the env at fault, and no process is left behind.

    Args:
        vector_env, name, info_names: as for `Engine`.
        timeout: seconds for the workers to answer a call. None disables it.
    """

    is_interruptible = False

    def __init__(
        self, vector_env: Any, name: str, info_names: Collection[str], timeout: float | None
    ) -> None:
        self._timeout = timeout
        # At the end of the program, too, before Python waits for the processes.
        self._end_workers = Finalize(self, _end_workers, (vector_env,), exitpriority=10)
        super().__init__(vector_env, name, info_names)
        self.is_ours = all(self.call("has_wrapper_attr", "torchwrap_call"))

    def close(self) -> None:
        """Ends the workers, and kills those that do not end by themselves."""
        self.fault = self.fault or refusal(self.name, "already closed", remedy="Make a new env")
        self._end_workers()

    def _call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        """Calls `step` or `reset`, or another method of every env."""
        self.check_usable()
        self.fault = interrupted(self.name)
        verb = command
        if command not in ("step", "reset"):
            verb = "call"
            args = (command, *args)
        try:
            getattr(self.vector_env, f"{verb}_async")(*args, **kwargs)
            result = getattr(self.vector_env, f"{verb}_wait")(timeout=self._timeout)
        except Exception as error:
            self.fault = self._fault_of(command, error)
            raise RuntimeError(self.fault) from error
        self.fault = ""
        return result

    call = _call

    def call_method(
        self,
        rows: Sequence[int],
        name: str,
        args: Any,
        kwargs: Any,
    ) -> list[Any]:
        if self.is_ours:
            results = self.call("torchwrap_call", name, rows, args, kwargs)
        elif len(rows) < len(self._all):
            fault = f"cannot call {name}() of some envs of an AsyncVectorEnv of your own"
            remedy = 'Make it with torchwrap.make(id, num_envs, vectorization_mode="async")'
            raise AttributeError(refusal(self.name, fault, remedy=remedy))
        else:
            results = self.call(name, *args, **kwargs)
        return [results[row] for row in rows]

    def leave_out(self, rows: Mask) -> None:
        if not self.is_ours:
            super().leave_out(rows)  # raises
        self.call("torchwrap_leave_out", rows)

    def _fault_of(self, command: str, error: Exception) -> str:
        """Names the env whose worker has ended or does not answer, or whose results do not fit."""
        processes = self.vector_env.processes
        sentinels = [process.sentinel for process in processes]
        # A worker that does not answer may wait for a dead one. A worker that raised is ending.
        is_late = isinstance(error, multiprocessing.TimeoutError)
        ended: list[Any] = wait(sentinels, 0.1 if is_late else PATIENCE)
        # Gymnasium reads the results of the envs in order. A late one has none.
        results = [pipe is not None and pipe.poll() for pipe in self.vector_env.parent_pipes]
        if ended:
            index = sentinels.index(ended[0])
            processes[index].join(1.0)
            code = processes[index].exitcode
            fault = f"env {index} exited with code {code} in {command} ({error!r})"
        elif is_late:
            index = [*results, False].index(False)
            fault = f"env {index} did not finish {command} in worker_timeout={self._timeout} s"
        else:
            index = [*results, True].index(True) - 1
            fault = f"could not batch the results of {command} up to env {index} ({error!r})"
        return refusal(self.name, fault, remedy=NEW_ENV)


def answer_time(owner: str, worker_timeout: float | None) -> float | None:
    """A checked `worker_timeout`. The operating system takes at most 24 days."""
    if worker_timeout is None:
        return None
    return min(validation.positive(owner, "worker_timeout", worker_timeout), 2e6)


def _end_workers(vector_env: Any) -> None:
    # None where Gymnasium has ended a worker.
    pipes = [pipe for pipe in vector_env.parent_pipes if pipe is not None]
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(("close", None))
    deadline = time.monotonic() + PATIENCE
    for process in vector_env.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join(1.0)
    for pipe in pipes:
        pipe.close()
    # Gymnasium's own close() would wait for the answers to an interrupted call.
    vector_env.closed = True


class WorkerEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env in a worker, which checks results before they are cast.

    Entries of `info` that are not asked for are dropped, because Gymnasium batches each of them, or
    cannot.
    """

    def __init__(
        self,
        make_one: Callable[[], Any],
        row: int,
        info_spaces: Mapping[str, Any],
        parent: int,
        timeout: float | None,
    ) -> None:
        has_timer = os.getpid() != parent and hasattr(signal, "setitimer")  # Windows lacks it
        if has_timer:
            # A terminal sends SIGINT to all processes, but it is for the parent.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # Ends the process if the constructor exceeds the timeout.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout or 0.0)
        super().__init__(make_one())
        if has_timer:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._row = row
        self._is_left_out = False
        self._result: Any = None
        self._info_spaces = info_spaces
        self._leaves = list(spaces.leaves(self.observation_space))

    def step(self, action: Any) -> Any:
        if not self._is_left_out:
            self._result = self._checked("step", self.env.step(action))
        self._is_left_out = False
        return self._result

    def reset(self, **kwargs: Any) -> Any:
        self._is_left_out = False
        return self._checked("reset", self.env.reset(**kwargs))

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        return set_attribute(self.env, name, value)

    def torchwrap_leave_out(self, rows: Mask) -> None:
        """Lets the next step return the last result again, if this env is in the mask."""
        self._is_left_out = rows[self._row]

    def torchwrap_call(
        self,
        name: str,
        rows: Sequence[int] = (),
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """An attribute, or the result of a method if this env is among the rows.

        Elsewhere, `callable` is sent in place of the method, which cannot be sent.
        """
        value = self.env.get_wrapper_attr(name)
        if self._row in rows:
            return value(*args, **kwargs)
        return callable if callable(value) else value

    def _checked(self, call: str, result: Any) -> Any:
        owner = type(self.unwrapped).__name__
        check_result(owner, call, self._leaves, result)
        *values, given = result
        info = {}
        for name, space in self._info_spaces.items():
            if name in given:
                # Gymnasium takes the dtype of the first env for all.
                try:
                    info[name] = cast_info(given[name], space.shape, space.dtype)
                except (OverflowError, TypeError, ValueError):
                    must = f"info[{name!r}] must fit {space}"
                    raise ValueError(refusal(owner, must, repr(given[name]))) from None
        return *values, info
