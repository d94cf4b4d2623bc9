"""Workers: the processes of Gymnasium's `AsyncVectorEnv`. Errors name the env at fault, and no process is left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from torchwrap.interop import _checks

PATIENCE = 5.0  # seconds in which workers can end by themselves before `close` terminates them
CONSTRUCTOR = "its constructor"
AGENT = "torchwrap_agent"


class Workers:
    """The workers of a vector env, of which most kinds have none. A context manager around each call of the vector env.

    A call that follows an interrupted one finds idle workers and empty pipes. A call that follows a fault raises. So does one
    that follows an interrupted one if the vector env has threads, which may still hold the results.
    """

    def __init__(self, vector_env: Any, name: str, timeout: float | None, has_threads: bool = False) -> None:
        self.vector_env, self._base, self._unfinished = vector_env, vector_env.unwrapped, False
        self._name, self._has_threads, self.reach_envs = name, has_threads, isinstance(self._base, SyncVectorEnv)
        pipes, processes = (getattr(self._base, attribute, []) for attribute in ("parent_pipes", "processes"))
        if vector_env.closed or not all(isinstance(pipe, Connection) for pipe in pipes):
            pipes, processes = [], []
        self.processes: list[BaseProcess] = processes
        self.pipes = pipes[:] = [WorkerPipe(self._base, index, name, timeout) for index in range(len(pipes))]

    def check(self) -> None:
        """Raises if there was a fault, or an interrupted call whose results cannot be discarded."""
        if self._has_threads and self._unfinished:
            needed = f"{self._name} needs every call to finish, because its threads keep the results of an interrupted one"
            raise RuntimeError(f"{needed}, but an earlier call did not. Call env.close() and make a new env.")
        for pipe in self.pipes:
            if pipe.fault is not None:
                raise RuntimeError(pipe.fault)

    def __enter__(self) -> None:
        if self._unfinished:
            self.check()
            for pipe in () if self.vector_env.closed else self.pipes:
                pipe.discard()
                self._base._state = AsyncState.DEFAULT
        self._unfinished = True

    def __exit__(self, kind: Any, *error: object) -> None:
        self._unfinished = kind is not None

    def install_agents(self) -> None:
        """Gives each worker an `Agent`, unless it would have to import torchwrap first."""
        if self.processes and all(isinstance(process, ForkProcess) for process in self.processes):
            with self:
                self._base.set_attr(AGENT, Agent())
                answers = self._base.call(AGENT, _check_results, self._base.single_observation_space)
            self.reach_envs = all(error is None for _, error in answers)  # unless the workers of a Gymnasium differ

    def each(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The results of a function of each of Gymnasium's envs, in its process; (None,) if they cannot be reached."""
        if not self.reach_envs:
            return (None,)
        if isinstance(self._base, SyncVectorEnv):
            return tuple([function(env, *args, **kwargs) for env in self._base.envs])
        with self:
            answers = self._base.call(AGENT, function, *args, **kwargs)
        for index, (_, error) in enumerate(answers):
            if error is not None:
                raise RuntimeError(f"{self._name} needs every env to answer, but env {index} raised {error} in {args[0]}.")
        return tuple([result for result, _ in answers])

    def close(self) -> None:
        """Closes the vector env: terminates and then kills the workers that do not end by themselves."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                os.set_blocking(pipe.fileno(), False)
                Connection.send(pipe, ("close", None))
        for end, seconds in ((BaseProcess.is_alive, PATIENCE), (BaseProcess.terminate, PATIENCE / 5), (BaseProcess.kill, 1.0)):
            alive, deadline = [process for process in self.processes if process.is_alive()], time.monotonic() + seconds
            for process in alive:
                end(process)
            for process in alive:
                process.join(max(0.0, deadline - time.monotonic()))
        for pipe in self.pipes:
            pipe.close()
            self._base._state = AsyncState.DEFAULT
        self.vector_env.close()


class WorkerPipe(Connection):
    """This process' end of the pipe to a worker. A fault raises a RuntimeError with the env, the command and a remedy."""

    is_idle = False  # if set, the next question is not sent, and its answer is the last one
    _answer: Any = None

    def __init__(self, base: Any, index: int, name: str, timeout: float | None) -> None:
        end = socket.socket(fileno=os.dup(base.parent_pipes[index].fileno()))
        end.setblocking(True)  # whatever socket.setdefaulttimeout says
        if timeout is not None:
            # The kernel ends a call that takes longer. Polling would add a system call per answer.
            limit = struct.pack("@ll", *divmod(max(1, round(timeout * 1e6)), 10**6))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        super().__init__(end.detach())
        base.parent_pipes[index].close()
        self.fault: str | None = None
        self._index, self._name, self._timeout = index, name, timeout
        self._processes, self._errors = base.processes, base.error_queue
        self._message: tuple[str, Any] = (CONSTRUCTOR, None)

    def send(self, message: Any) -> None:
        self._message = message
        if self.is_idle:
            return
        try:
            Connection.send(self, message)
        except OSError as error:
            self.fail(error)

    def recv(self) -> Any:
        if self.is_idle:
            self.is_idle = False
            return self._answer
        try:
            self._answer = answer = Connection.recv(self)
        except (EOFError, OSError) as error:
            self.fail(error)
        if not answer[1]:
            self.fail(None)
        return answer

    def discard(self) -> None:
        """Discards what the worker has yet to answer. An interrupt may have come between any two bytes of it.

        Questions with 32 random bits as their answers mark the end, even if an earlier `discard` was interrupted too.
        """
        self.is_idle = False
        bits = [bit == "1" for byte in os.urandom(4) for bit in f"{byte:08b}"]
        answers = [bytes(ForkingPickler.dumps((bit, True))) for bit in bits]
        expected, received = b"".join([struct.pack("!i", len(answer)) + answer for answer in answers]), b""
        try:
            for bit in bits:
                Connection.send(self, ("_call", ("has_wrapper_attr", ("step" if bit else "no attribute",), {})))
            while received != expected:
                chunk = os.read(self.fileno(), 2**16)
                if not chunk:
                    raise EOFError
                received = (received + chunk)[-len(expected) :]
        except (EOFError, OSError) as error:
            self.fail(error)

    def fail(self, error: Exception | None) -> NoReturn:
        """Raises for a worker that has ended or does not answer (`error`), or that reports an exception (None)."""
        verb, arguments = self._message
        command, slow, cause, trace = arguments[0] if verb == "_call" else verb, False, None, ""
        if command == AGENT:
            command = arguments[1][1]
        try:
            index, _, cause, trace = self._errors.get(timeout=5.0 if error is None else 0.05)
            what = f"env {index} raised {cause!r} in {command}"
        except Exception:  # the queue is empty, or the exception cannot be unpickled
            # A worker that does not answer may wait for one that has ended. One whose pipe is closed is about to end.
            sentinels: list[Any] = [process.sentinel for process in self._processes]
            is_silent = isinstance(error, BlockingIOError)
            ended = wait(sentinels, 0.0 if is_silent or error is None else 5.0)
            index = self._index if sentinels[self._index] in ended or not ended else sentinels.index(ended[0])
            code = self._processes[index].exitcode
            slow = (is_silent and not ended) or (code == -signal.SIGALRM and command == CONSTRUCTOR)
            if error is None:
                what = f"env {self._index} raised an exception in {command} that could not be sent to this process"
            elif slow:
                what = f"env {index} did not finish {command} within {self._timeout} s"
            else:
                reason = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
                what = f"the process of env {index} {reason} in {command}"
        remedy = "Call env.close() and make a new env"
        if command == CONSTRUCTOR:
            remedy = 'Pass vectorization_mode="sync" to construct the envs in this process'
        patience = ", or pass a longer worker_timeout" if slow else ""
        self.fault = f"{self._name} needs every env to answer, but {what}. {remedy}{patience}."
        raise RuntimeError(f"{self.fault}\n\n{trace}".rstrip()) from cause


class Agent:
    """An attribute of an env in a worker: a function that Gymnasium calls there, and that finds the env in its caller's frame.

    Returns the result of a function of the env, and None; or None, and the exception as text. The worker goes on.
    """

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
        try:
            result = function(sys._getframe(1).f_locals["env"], *args, **kwargs)
            ForkingPickler.dumps(result)
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"
        return result, None


def find(env: Any, name: str) -> tuple[bool, Any] | None:
    """Whether an attribute is a method, and its value if it is none; None if the env has no such attribute."""
    if not env.has_wrapper_attr(name):
        return None
    value = env.get_wrapper_attr(name)
    return callable(value), None if callable(value) else value


def call(env: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """The result of a method of the env."""
    return env.get_wrapper_attr(name)(*args, **kwargs)


def assign(env: Any, name: str, value: Any) -> None:
    """Sets an attribute of the env, on the layer that has it."""
    env.set_wrapper_attr(name, value)


def _check_results(env: Any, space: Any) -> None:
    """From now on, `step` and `reset` check what they return before it is cast, and exceptions can be sent as they are."""
    owner = type(env.unwrapped).__name__
    for call in ("step", "reset"):
        setattr(env, call, functools.partial(_checked, owner, call, space, getattr(env, call)))


def _checked(owner: str, call: str, space: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise
    _checks.result(owner, call, space, result)
    return result


def construct(make_one: Callable[[], Any], parent: int, timeout: float | None) -> Any:
    """Makes an env. In a worker, a constructor that exceeds the timeout is ended, and Ctrl-C is ignored."""
    if os.getpid() == parent or not hasattr(signal, "setitimer"):  # Windows lacks it
        return make_one()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes, but it is for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    signal.setitimer(signal.ITIMER_REAL, timeout or 0.0)
    env = make_one()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return env


@contextlib.contextmanager
def constructing(name: str, timeout: float | None) -> Iterator[None]:
    """Names the worker that fails while a vector env is made, and ends the others."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            vector_env = frame.f_locals.get("self")
            if isinstance(vector_env, AsyncVectorEnv) and hasattr(vector_env, "_state"):  # it has started its workers
                workers = Workers(vector_env, name, timeout)
                try:
                    for pipe in workers.pipes:
                        pipe.fail(error)  # finds the worker that has ended
                finally:
                    workers.close()
        raise
