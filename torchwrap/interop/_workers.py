"""Async: the engine of Gymnasium's `AsyncVectorEnv`, whose envs run in worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap.interop._engines import (
    NEW_ENV,
    Engine,
    check_result,
    common_limit,
    find,
    interrupted,
)

PATIENCE = 5.0  # seconds in which workers can end by themselves before they are killed
ERROR = "torchwrap_error"  # the key in `info` of an exception that an env raised
FIND = "torchwrap_find"  # a method of `WorkerEnv`


class Async(Engine):
    """Gymnasium's `AsyncVectorEnv`. Errors name the env at fault, and no process is left behind.

    Args:
        vector_env, name, info_names: as for `Engine`.
        timeout: seconds for the workers to answer a call. None disables it.
    """

    is_interruptible = False

    def __init__(
        self,
        vector_env: AsyncVectorEnv[Any, Any],
        name: str,
        info_names: Collection[str],
        timeout: float | None,
    ) -> None:
        self._timeout = timeout
        # At the end of the program, too, before Python waits for the processes.
        self._end_workers = Finalize(self, _end_workers, (vector_env,), exitpriority=10)
        super().__init__(vector_env, name, info_names)
        self._reaches_envs = all(self.call("has_wrapper_attr", FIND))

    def attributes(self, name: str) -> Sequence[tuple[bool, Any] | None]:
        return self.call(FIND, name) if self._reaches_envs else [None]

    def set_attribute(self, name: str, value: Any) -> bool | None:
        if not self._reaches_envs:
            return None
        has_attribute = all(self.call("has_wrapper_attr", name))
        if has_attribute:
            self.call("set_wrapper_attr", name, value)
        return has_attribute

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        values: tuple[Any, ...] = self._call("call", name, *args, **kwargs)
        return values

    def render(self, rows: Sequence[int] | None) -> Any:
        frames = self.call("render")
        return frames if rows is None else [frames[row] for row in rows]

    def close(self) -> None:
        """Ends the workers, and kills those that do not end by themselves."""
        self.fault = self.fault or refusal(self.name, "already closed", remedy="make a new env")
        self._end_workers()

    def _step_limit(self) -> int | None:
        name = "_max_episode_steps"
        if not all(self.call("has_wrapper_attr", name)):
            return None
        return common_limit({*self.call(name)})

    def _call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        self.check_usable()
        self.fault = interrupted(self.name)
        try:
            getattr(self.vector_env, f"{command}_async")(*args, **kwargs)
            result = getattr(self.vector_env, f"{command}_wait")(timeout=self._timeout)
        except Exception as error:
            method = args[0] if command == "call" else command
            self.fault = self._fault_of(method, error)
            if not self.fault:
                raise
            raise RuntimeError(self.fault) from error
        self.fault = ""
        return result

    def _fault_of(self, method: str, error: Exception) -> str:
        """Names the env whose worker has ended or does not answer; empty if all workers go on."""
        processes = self.vector_env.processes
        sentinels = [process.sentinel for process in processes]
        # A worker that does not answer may wait for a dead one. A closed pipe's worker is ending.
        is_ending = isinstance(error, EOFError | OSError)
        ended: list[Any] = wait(sentinels, PATIENCE if is_ending else 0.1)
        if ended:
            index = sentinels.index(ended[0])
            processes[index].join(1.0)
            exit_code = processes[index].exitcode
            fault = f"the process of env {index} exited with code {exit_code} in {method}"
        elif isinstance(error, multiprocessing.TimeoutError):
            pipes = self.vector_env.parent_pipes
            index = next((row for row, pipe in enumerate(pipes) if pipe and not pipe.poll()), 0)
            limit = f"worker_timeout={self._timeout} s"
            fault = f"env {index} did not finish {method} within {limit}"
        else:
            return ""
        return refusal(self.name, fault, remedy=NEW_ENV)

    def _check(self, call: str, result: Any) -> Any:
        super()._check(call, result)
        for index, error in enumerate(result[-1].get(ERROR, ())):
            if error is not None:
                raise RuntimeError(refusal(self.name, f"env {index} raised {error}"))
        return result


def answer_time(owner: str, worker_timeout: float | None) -> float | None:
    """A checked `worker_timeout`. The operating system takes at most 24 days."""
    if worker_timeout is None:
        return None
    return min(validation.positive(owner, "worker_timeout", worker_timeout), 2e6)


def _end_workers(vector_env: AsyncVectorEnv[Any, Any]) -> None:
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

    An exception of the env is returned in the info, and the worker goes on. Entries of `info` that
    are not asked for are dropped, because Gymnasium batches each of them, or cannot.
    """

    torchwrap_find = find

    def __init__(
        self,
        make_one: Callable[[], Any],
        info_names: Collection[str],
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
        self._info_names = info_names

    def step(self, action: Any) -> Any:
        try:
            result = self._checked("step", self.env.step(action))
        except Exception as error:
            return self._blank(), 0.0, False, False, _error_info("step", error)
        *values, info = result
        _, _, terminated, truncated = values
        if not terminated and not truncated:  # at the end all remain, to list the names in an error
            info = {name: info[name] for name in self._info_names if name in info}
        return *values, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        try:
            result = self._checked("reset", self.env.reset(seed=seed, options=options))
        except Exception as error:
            return self._blank(), _error_info("reset", error)
        observation, info = result
        return observation, {name: info[name] for name in self._info_names if name in info}

    def _checked(self, call: str, result: Any) -> Any:
        check_result(type(self.unwrapped).__name__, call, self.observation_space, result)
        return result

    def _blank(self) -> Any:
        space = self.observation_space
        return next(iter(iterate(batch_space(space, 1), create_empty_array(space, 1))))


def _error_info(call: str, error: Exception) -> dict[str, Any]:
    return {ERROR: f"{error!r} in {call}.\n\n{traceback.format_exc()}"}
