"""Workers that raise, exit, hang or are killed, and calls that are interrupted."""

import contextlib
import copy
import functools
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from helpers import OtherVectorEnv, mostly_full, through_pickle
from single_envs import (
    BOX,
    SAME_STEP,
    Scripted,
    check_transitions,
    every_mode,
    sample_and_step,
    scripted,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop import _workers

FAULTS = {
    "exit": (lambda: sys.exit(4), r"the process of env 1 exited with code 4 in {}\."),
    "_exit": (lambda: os._exit(3), r"the process of env 1 exited with code 3 in {}\."),
    "kill": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        r"the process of env 1 exited with code -9 in {}\.",
    ),
    "hang": (lambda: time.sleep(1000), r"env 1 did not finish {} within worker_timeout=0.4 s\."),
}


def ignore_sigterm_and_hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


class Faulty(Scripted):
    """Has a fault in one method, in the worker of env 1."""

    def __init__(self, fault=None, method=None, render_mode=None):
        super().__init__(lengths=(3,), render_mode=render_mode)
        self.fault, self.method = fault, method
        self.run("__init__")

    def run(self, method):
        if (
            self.fault
            and method == self.method
            and multiprocessing.current_process().name.endswith("-1")
        ):
            ignore_sigterm_and_hang() if self.fault == "stubborn" else 1 / 0 if self.fault == "raise" else FAULTS[
                self.fault
            ][0]()

    def reset(self, *, seed=None, options=None):
        self.run("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.run("step")
        return super().step(action)

    def render(self):
        self.run("render")
        return super().render()

    def close(self):
        self.run("close")


gymnasium.register("TorchwrapTest/Faulty-v0", entry_point=Faulty)
gymnasium.register(
    "TorchwrapTest/Text-v0", entry_point=Scripted, kwargs={"space": gymnasium.spaces.Text(5)}
)


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch):
    monkeypatch.setattr(_workers, "PATIENCE", 0.4)
    before = set(multiprocessing.active_children())
    yield
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.kill()
        process.join()
    assert not left


def make(num_envs=3, **kwargs):
    return tw.make("TorchwrapTest/Faulty-v0", num_envs, vectorization_mode="async", **kwargs)


def close(env):
    """Closes an env, which takes at most a few seconds and leaves no process."""
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 3
    assert not any(process.is_alive() for process in env.unwrapped.vector_env.processes)
    env.close()
    with pytest.raises(RuntimeError, match="make a new env"):
        env.reset()


def play(env, steps=10**9):
    td = env.reset(seed=0)
    for _ in range(steps):
        _, td = sample_and_step(env, td)


# Faults of workers.


@pytest.mark.parametrize(
    "where",
    mostly_full(itertools.product(FAULTS, ["reset", "step"]), ("exit", "reset"), ("hang", "step")),
    ids=str,
)
def test_fault_of_a_worker_raises_with_its_env_and_command_and_so_do_all_later_calls(where):
    fault, method = where
    env = tw.TransformedEnv(make(fault=fault, method=method, worker_timeout=0.4), T.TimeLimit(9))
    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match=f"In TorchwrapTest/Faulty-v0, {FAULTS[fault][1].format(method)}"
    ):
        play(env)
    assert time.monotonic() - start < 3
    for call in (lambda: env.step(env.sample_action()), env.reset, lambda: env.reset(seed=1)):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"env 1 .* Call env.close\(\) and make a new env"):
            call()
        assert time.monotonic() - start < 0.4  # without another wait
    close(env)


@pytest.mark.parametrize("fault", mostly_full(["raise", *FAULTS], "raise", "hang"))
def test_fault_in_a_constructor_makes_make_raise(fault):
    with pytest.raises(
        RuntimeError,
        match=r"could not construct .*Faulty-v0 in worker processes.* worker_timeout=0\.4 s.*\"sync\"",
    ):
        make(fault=fault, method="__init__", worker_timeout=0.4)


@pytest.mark.filterwarnings("ignore:.*ERROR")  # of Gymnasium's, with the traceback
def test_worker_that_gymnasium_ends_is_named_with_the_command_and_the_cause():
    env = make(fault="raise", method="render", render_mode="rgb_array")
    env.reset(seed=0)
    with pytest.raises(
        RuntimeError, match=r"env 1 exited with code 0 in render. Call env.close"
    ) as info:
        env.render()
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="make a new env"):
        env.render()
    close(env)


@pytest.mark.parametrize("fault", mostly_full(["raise", "_exit", "hang", "stubborn"], "hang"))
def test_close_returns_if_a_worker_fails_to_close(fault):
    env = make(fault=fault, method="close")
    sample_and_step(env, env.reset(seed=0))
    close(env)


def test_env_that_is_dropped_ends_its_workers_whatever_their_state():
    for fault, method in ((None, None), ("kill", "step"), ("stubborn", "step")):
        env = make(fault=fault, method=method, worker_timeout=0.4)
        processes = env.vector_env.processes
        td = env.reset(seed=0)
        with contextlib.nullcontext() if fault is None else contextlib.suppress(RuntimeError):
            sample_and_step(env, td)
        del env
        assert not any(process.is_alive() for process in processes)


# Results that do not fit.


class TwoArguments(Exception):
    """pickle gives its constructor one argument."""

    def __init__(self, what, where):
        super().__init__(f"{what} in {where}")


class Lying(Scripted):
    """Has another observation, reward or result in its third step, or raises, with seed 1."""

    def __init__(self, key=None, value=None, space=BOX):
        super().__init__(space)
        self.key, self.value, self.level = key, value, 1

    def step(self, action):
        result = dict(
            zip(
                ("observation", "reward", "terminated", "truncated", "info"),
                super().step(action),
                strict=True,
            )
        )
        lies = self.steps == 3 and self.np_random_seed == 1
        if lies and self.key == "raise":
            raise TwoArguments("100 % of a leak", "the tank")
        result |= {self.key: self.value} if lies and self.key in result else {}
        return tuple(result.values())[: 4 if lies and self.key == "old" else None]

    def set_level(self, level, plus=0):
        self.level = level + plus
        return self.np_random.integers(9)


gymnasium.register("TorchwrapTest/Lying-v0", entry_point=Lying)
by_kind = pytest.mark.parametrize("kind", ["sync", "async"])


def lying(kind, key=None, value=None, space=BOX):
    return tw.make(
        "TorchwrapTest/Lying-v0", 2, vectorization_mode=kind, key=key, value=value, space=space
    )


LIES = [
    (
        "observation",
        np.array([300, -1]),
        spaces.Box(0, 255, (2,), np.uint8),
        r"observation in .*\[300,  -1\]\) of int64",
    ),
    ("observation", None, BOX, "observation in .*, but got None"),
    ("observation", 0.5, BOX, "observation in .*, but got 0.5"),
    ("observation", {}, spaces.Dict(x=BOX), r"observation\['x'\] in Box.*, but got {}"),
    ("reward", np.ones(2), BOX, r"a reward that is one number.*array\(\[1., 1.\]\)"),
    ("terminated", None, BOX, "a terminated that is one number.*None"),
    (
        "observation",
        np.array([2**40, 1]),
        spaces.Box(0, 255, (2,), np.int32),
        r"observation in .*\[1099511627776, ",
    ),
    (
        "old",
        None,
        BOX,
        r"\(observation, reward, terminated, truncated, info\) with a dict as info, but got",
    ),
]


@by_kind
def test_result_that_does_not_fit_raises_with_its_name_in_sync_and_in_workers(kind):
    for key, value, space, match in LIES[:: 1 if kind == "sync" else 2]:
        with (
            lying(kind, key, value, space) as env,
            pytest.raises(
                (RuntimeError, TypeError, ValueError),
                match=f"needs step( of env 1)? to return {match}",
            ),
        ):
            play(env, 4)


@by_kind
def test_exception_of_an_env_is_shown_and_reset_continues(kind):
    with lying(kind, "raise") as env:
        by_worker = r"(?s)env 1 raised TwoArguments\('100 % of a leak in the tank'\) in step\..*Traceback.*raise TwoArguments"
        expected = (TwoArguments, "leak") if kind == "sync" else (RuntimeError, by_worker)
        with pytest.raises(expected[0], match=expected[1]):
            play(env)
        with pytest.raises(
            RuntimeError, match=r"because an earlier step\(\) did not finish: call reset\(\)\.$"
        ):
            env.step(env.sample_action())
        check_transitions(env, [Lying] * 2)


class FinalObs(OtherVectorEnv):
    """Gives final observations in another form, and its mode by name."""

    def __init__(self, space, change):
        super().__init__(scripted(2, lengths=(1,), space=space), autoreset_mode=SAME_STEP)
        self.metadata["autoreset_mode"], self.change = "SAME_STEP", change

    def step(self, actions):
        *result, infos = super().step(actions)
        final = infos.pop("final_obs")
        return *result, {**infos, **self.change(final)}


def test_final_observations_of_any_form_are_the_successors_and_missing_ones_raise():
    for space, change in (
        (BOX, lambda final: {"final_obs": list(final)}),
        (BOX, lambda final: {"final_obs": np.stack(final)}),
        (
            spaces.Dict(x=BOX),
            lambda final: {"final_obs": {"x": np.stack([each["x"] for each in final])}},
        ),
    ):
        check_transitions(
            tw.from_gymnasium(FinalObs(space, change)),
            scripted(2, lengths=(1,), space=space),
            steps=3,
        )
    for change in (
        lambda final: {},
        lambda final: {"final_obs": [None, None]},
        lambda final: {"final_obs": final[:1]},
    ):
        env = tw.from_gymnasium(FinalObs(BOX, change))
        with pytest.raises(
            ValueError,
            match=r"needs info\[\"final_obs\"\] to hold the final observations of envs \[0, 1\]",
        ):
            play(env, 4)


@by_kind
def test_attributes_and_methods_of_the_simulators_envs_are_reached_from_every_layer(kind):
    env = tw.TransformedEnv(lying(kind), T.TimeLimit(9))
    env.reset(seed=0)
    expected = [Lying() for _ in range(2)]
    [each.reset(seed=seed) for seed, each in enumerate(expected)]
    assert env.set_wrapper_attr("level", 7) and env.get_wrapper_attr("level") == (7, 7)
    env.unwrapped.level = [3]
    assert env.unwrapped.vector_env.get_attr("level") == ([3], [3]) and "level" not in vars(
        env.unwrapped
    )
    assert env.get_wrapper_attr("set_level")(5, plus=1) == tuple(
        each.set_level(5) for each in expected
    )
    assert env.unwrapped.get_wrapper_attr("level") == (6, 6) and not env.has_wrapper_attr("levle")
    env.close()


def test_copies_of_an_env_over_a_simulator_are_refused_by_name(bridge):
    for kind, replicate in itertools.product(
        [SyncVectorEnv, AsyncVectorEnv], [copy.deepcopy, through_pickle]
    ):
        below = bridge(scripted(2), kind)
        with pytest.raises(
            TypeError,
            match=r"GymnasiumEnv cannot be copied or pickled.* make a new env; load_state_dict",
        ):
            replicate(tw.TransformedEnv(below, T.NormalizeReward()))
        check_transitions(below, scripted(2), steps=2)


# Interrupts.


def interrupt(call, after):
    """Repeats a call until KeyboardInterrupt is raised after some seconds, and again if it is lost in a `__del__`."""

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, after, 0.5)
            while True:
                call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        torch.set_grad_enabled(
            True
        )  # `torch.no_grad` of the interrupted call may not have come to its end


@pytest.mark.parametrize("shared_memory", mostly_full([True, False], True))
@every_mode
def test_reset_after_an_interrupt_at_a_random_moment_starts_over(bridge, mode, shared_memory):
    makers, rng = scripted(2, lengths=[(3,), (2,)]), random.Random(0)
    env = bridge(makers, AsyncVectorEnv, mode, shared_memory=shared_memory)
    for seed in range(6):
        interrupt(lambda: play(env), after=rng.uniform(0.0001, 0.004))
        for _ in range(seed % 3):
            interrupt(env.reset, after=rng.uniform(0.0001, 0.001))
        check_transitions(env, makers, steps=3, seed=seed)


def test_same_step_reset_after_an_interrupt_resets_every_row(bridge, monkeypatch):
    env = bridge(scripted(2, lengths=[(1,), (5,)]), mode=SAME_STEP)
    td = env.reset(seed=0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(env, "_reset", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
        sample_and_step(env, td)
    reset = env.vector_env.reset

    def interrupted(**kwargs):
        reset(**kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(env.vector_env, "reset", interrupted)
        env.reset(seed=1)
    episodes = env.vector_env.get_attr("episode")
    env.reset()
    assert env.vector_env.get_attr("episode") == tuple(episode + 1 for episode in episodes)


def test_ctrl_c_in_a_terminal_does_not_end_the_workers_of_make(bridge):
    env = make(2)
    own = bridge(scripted(2), AsyncVectorEnv)
    own.reset(seed=0)
    for process in env.vector_env.processes + own.vector_env.processes:
        os.kill(process.pid, signal.SIGINT)
    check_transitions(env, [Faulty] * 2)
    with pytest.raises(RuntimeError, match=r"the process of env \d exited"):
        play(own)
    close(env)
    close(own)


# Arguments.


def test_make_that_fails_leaves_no_process_behind():
    for id, kwargs in (("Text", {}), ("Scripted", {"first_index": -1})):
        with pytest.raises((TypeError, ValueError)):
            tw.make(
                f"TorchwrapTest/{id}-v0",
                2,
                backend="gymnasium",
                vectorization_mode="async",
                **kwargs,
            )


def test_invalid_worker_timeout_raises(bridge):
    for make_env in (functools.partial(tw.from_gymnasium, bridge(scripted(2)).vector_env), make):
        with pytest.raises(ValueError, match="needs a finite worker_timeout above 0, but got 0"):
            make_env(worker_timeout=0)


def test_worker_timeout_is_part_of_the_spec():
    env = make(2, worker_timeout=1e300)
    for each in (env, tw.make(env.spec, num_envs=1)):
        assert each.spec.kwargs["worker_timeout"] == 1e300
        check_transitions(each, [Faulty] * each.num_envs)
        close(each)
