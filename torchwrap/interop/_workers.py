"""Workers: the processes of Gymnasium's `AsyncVectorEnv`. Errors name the env at fault, and no process is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from torchwrap.interop import _checks

PATIENCE = 5.0  # seconds in which workers can end by themselves before `close` terminates them
REMEDY = "Call env.close() and make a new env"
ERROR = "torchwrap_error"  # the key in `info` of what an env has raised
FIND = "torchwrap_find"  # a method of `WorkerEnv`


class Workers:
    """Calls of a vector env, and the processes that its envs are in, of which most kinds have none.

    With processes, a thread makes the calls: Ctrl-C ends the wait for a call, but not the call, so that the next one does not
    get its answers.
    """

    def __init__(
        self, vector_env: Any, name: str, timeout: float | None, has_threads: bool = False
    ) -> None:
        self.vector_env, self.base, self._name, self._timeout = (
            vector_env,
            vector_env.unwrapped,
            name,
            timeout,
        )
        is_async, self._fault = isinstance(self.base, AsyncVectorEnv), ""
        fault = (
            f"An earlier call of {name} did not finish, and its threads may still hold the results"
        )
        self._interrupted = f"{fault}. {REMEDY}." if has_threads else ""
        self.processes: Sequence[BaseProcess] = self.base.processes if is_async else []
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), daemon=True)
        if is_async:
            self._thread.start()
        self.reach_envs = isinstance(self.base, SyncVectorEnv)
        self.reach_envs |= is_async and all(
            self.call("has_wrapper_attr", self.base.call, "has_wrapper_attr", FIND)
        )

    def check(self) -> None:
        """Raises if there was a fault, or an interrupted call whose results cannot be discarded."""
        if self._fault:
            raise RuntimeError(self._fault)

    def call(self, command: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of a function that calls the vector env. A fault raises a RuntimeError that names the command."""
        self.check()
        if not self.processes:
            self._fault = self._interrupted
            result = function(*args, **kwargs)
            self._fault = ""
            return result
        answer: SimpleQueue[Any] = SimpleQueue()
        self._calls.put((answer, function, args, kwargs))
        try:
            result, errors = answer.get(timeout=self._timeout)
        except Empty as silence:
            result, errors = None, [silence]
        if errors:
            raise self._named(
                command, errors.pop()
            )  # no frame keeps it, because its traceback keeps the env
        return result

    def find(self, name: str) -> Sequence[Any]:
        """By env, as `find`; (None,) if the envs cannot be reached."""
        if isinstance(self.base, SyncVectorEnv):
            return [find(env, name) for env in self.base.envs]
        return self.call(name, self.base.call, FIND, name) if self.reach_envs else (None,)

    def _named(self, command: str, error: BaseException) -> BaseException:
        """The exception to raise for one of a call: it names the env whose process has ended, or does not answer."""
        sentinels: list[Any] = [process.sentinel for process in self.processes]
        # A worker that does not answer may wait for one that has ended. One whose pipe is closed is about to end.
        ended = wait(sentinels, PATIENCE if isinstance(error, EOFError | OSError) else 0.1)
        if not ended and not isinstance(error, Empty):
            return error
        if ended:
            index = sentinels.index(ended[0])
            self.processes[index].join(1.0)
            what = f"the process of env {index} exited with code {self.processes[index].exitcode} in {command}"
        else:  # Gymnasium reads the answers in the order of the envs. The last one with nothing to read has not answered.
            index = max(
                (
                    row
                    for row, pipe in enumerate(self.base.parent_pipes)
                    if pipe and not pipe.poll()
                ),
                default=0,
            )
            what = f"env {index} did not finish {command} within worker_timeout={self._timeout} s"
        self._fault = f"In {self._name}, {what}. {REMEDY}."
        fault = RuntimeError(self._fault)
        fault.__cause__ = error
        return fault

    def close(self) -> None:
        """Closes the vector env, and kills the workers that do not end by themselves."""
        if not self.processes:
            return self.vector_env.close()  # type: ignore[no-any-return]
        pipes = [
            pipe for pipe in self.base.parent_pipes if pipe
        ]  # None where Gymnasium has ended a worker
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        deadline = time.monotonic() + PATIENCE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join(1.0)
        self._fault = self._fault or f"{self._name} is closed: make a new env."
        self._calls.put(None)
        self._thread.join(1.0)
        for pipe in pipes:
            pipe.close()
        self.base.closed = (
            True  # for Gymnasium, which would wait for the answers to the call of a fault
        )
        self.vector_env.close()


def _serve(calls: SimpleQueue[Any]) -> None:
    for answer, function, args, kwargs in iter(calls.get, None):
        try:
            answer.put((function(*args, **kwargs), []))
        except BaseException as error:
            answer.put((None, [error]))


def find(env: Any, name: str) -> tuple[bool, Any] | None:
    """Whether an attribute is a method, and its value if it is none; None if the env has no such attribute."""
    if not env.has_wrapper_attr(name):
        return None
    value = env.get_wrapper_attr(name)
    return callable(value), None if callable(value) else value


class WorkerEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env in a worker, which checks results before they are cast. What it raises is an answer too, and the worker goes on.

    Entries of `info` that are not asked for are dropped, because Gymnasium batches each of them, or cannot.
    """

    torchwrap_find = find

    def __init__(
        self,
        make_one: Callable[[], Any],
        info_keys: Sequence[str],
        parent: int,
        timeout: float | None,
    ) -> None:
        has_timer = os.getpid() != parent and hasattr(signal, "setitimer")  # Windows lacks it
        if has_timer:
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # a terminal sends it to all processes, but it is for the parent
            signal.signal(
                signal.SIGALRM, signal.SIG_DFL
            )  # ends the process if the constructor exceeds the timeout
            signal.setitimer(signal.ITIMER_REAL, timeout or 0.0)
        super().__init__(make_one())
        if has_timer:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._space, self._owner, self._info_keys = (
            self.observation_space,
            type(self.unwrapped).__name__,
            info_keys,
        )

    def step(self, action: Any) -> Any:
        return self._answer("step", action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._answer("reset", seed=seed, options=options)

    def _answer(self, command: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        try:
            result = getattr(self.env, command)(*args, **kwargs)
            _checks.result(self._owner, command, self._space, result)
        except Exception as error:
            blank = next(
                iter(iterate(batch_space(self._space, 1), create_empty_array(self._space, 1)))
            )
            info = {ERROR: f"{error!r} in {command}.\n\n{traceback.format_exc()}"}
            return (blank, 0.0, False, False, info) if command == "step" else (blank, info)
        *others, info = result
        if not any(
            others[2:]
        ):  # at the end of an episode all remain, for the error about missing names
            info = {name: info[name] for name in self._info_keys if name in info}
        return *others, info
