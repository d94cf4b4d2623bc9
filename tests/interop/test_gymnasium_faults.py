"""Workers that raise, exit, hang or are killed, and calls that are interrupted."""

import contextlib
import copy
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
from helpers import OtherVectorEnv, mostly_full, params, through_pickle
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


def ignore_sigterm_and_hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


FAULTS = {
    "exit": lambda: sys.exit(4),
    "_exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
    "stubborn": ignore_sigterm_and_hang,
    "raise": lambda: 1 / 0,
}
MESSAGES = {
    "exit": "env 1 exited with code 4 in",
    "_exit": "env 1 exited with code 3 in",
    "kill": "env 1 exited with code -9 in",
    "hang": "env 1 did not finish",
}


class Faulty(Scripted):
    """Has a fault in one method, in the worker of env 1."""

    def __init__(self, fault=None, method=None, render_mode=None):
        super().__init__(lengths=(3,), render_mode=render_mode)
        self.fault = fault
        self.method = method
        self.run("__init__")

    def run(self, method):
        is_env_1 = multiprocessing.current_process().name.endswith("-1")
        if is_env_1 and method == self.method:
            FAULTS[self.fault]()

    def reset(self, **kwargs):
        self.run("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.run("step")
        return super().step(action)

    def render(self):
        self.run("render")
        return super().render()

    def close(self):
        self.run("close")


gymnasium.register("TorchwrapTest/Faulty-v0", entry_point=Faulty)
text = {"space": spaces.Text(5)}
gymnasium.register("TorchwrapTest/Text-v0", entry_point=Scripted, kwargs=text)


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
    return tw.make(
        "TorchwrapTest/Faulty-v0",
        num_envs,
        vectorization_mode="async",
        **kwargs,
    )


@contextlib.contextmanager
def takes_less_than(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def close(env):
    """Closes an env, which takes at most a few seconds and leaves no process."""
    with takes_less_than(3):
        env.close()
    processes = env.unwrapped.vector_env.processes
    assert not any(process.is_alive() for process in processes)
    env.close()
    with pytest.raises(RuntimeError, match="new env"):
        env.reset()


def play(env, steps=10**9):
    td = env.reset(seed=0)
    for _ in range(steps):
        _, td = sample_and_step(env, td)


# Faults of workers.


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("fault", mostly_full(MESSAGES, "exit", "hang"))
def test_worker_fault_names_its_env_and_ends_all_later_calls(fault, method):
    below = make(fault=fault, method=method, worker_timeout=0.4)
    env = tw.TransformedEnv(below, T.TimeLimit(9))
    match = f"Faulty-v0: {MESSAGES[fault]} {method}"
    with takes_less_than(3), pytest.raises(RuntimeError, match=match):
        play(env)
    for call in (
        lambda: env.step(env.sample_action()),
        env.reset,
        lambda: env.reset(seed=1),
    ):
        with (
            takes_less_than(0.4),
            pytest.raises(RuntimeError, match=r"env 1 .*new env"),
        ):
            call()
    close(env)


@pytest.mark.parametrize("fault", mostly_full(["raise", *MESSAGES], "raise", "hang"))
def test_fault_in_a_constructor_makes_make_raise(fault):
    with pytest.raises(RuntimeError, match=r"Faulty-v0 .*worker_timeout=0\.4 .*sync"):
        make(fault=fault, method="__init__", worker_timeout=0.4)


@pytest.mark.filterwarnings("ignore:.*ERROR")  # Gymnasium's, with the traceback
@pytest.mark.parametrize("method", ["render", "step"])
def test_exception_in_a_worker_names_its_env_and_is_the_cause(method):
    env = make(fault="raise", method=method, render_mode="rgb_array")
    td = env.reset(seed=0)
    call = env.render if method == "render" else lambda: sample_and_step(env, td)
    match = f"env 1 exited .* in {method} .*division"
    with pytest.raises(RuntimeError, match=match) as info:
        call()
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="new env"):
        call()
    close(env)


@pytest.mark.parametrize("fault", mostly_full(["raise", "_exit", "hang", "stubborn"], "hang"))
def test_close_returns_if_a_worker_fails_to_close(fault):
    env = make(fault=fault, method="close")
    sample_and_step(env, env.reset(seed=0))
    close(env)


@pytest.mark.parametrize("fault", [None, "kill", "stubborn"])
def test_dropped_env_ends_its_workers(fault):
    method = fault and "step"
    env = make(
        fault=fault,
        method=method,
        worker_timeout=0.4,
        info_keys=["elapsed"],
    )
    processes = env.vector_env.processes
    td = env.reset(seed=0)
    with contextlib.suppress(RuntimeError):
        sample_and_step(env, td)
    del env
    assert not any(process.is_alive() for process in processes)


# Results that do not fit.


class TwoArguments(Exception):
    """pickle gives its constructor one argument."""

    def __init__(self, what, where):
        super().__init__(f"{what} in {where}")


class Lying(Scripted):
    """Changes the result of its third step, or raises, with seed 1."""

    def __init__(self, lie=None, value=None, space=BOX):
        super().__init__(space)
        self.lie = lie
        self.value = value

    def step(self, action):
        names = ("observation", "reward", "terminated", "truncated", "info")
        result = dict(zip(names, super().step(action), strict=True))
        if self.steps == 3 and self.np_random_seed == 1:
            if self.lie == "raise":
                raise TwoArguments("100 % of a leak", "the tank")
            if self.lie == "old":
                return tuple(result.values())[:4]
            if self.lie is not None:
                result[self.lie] = self.value
        return tuple(result.values())


gymnasium.register("TorchwrapTest/Lying-v0", entry_point=Lying)
by_kind = pytest.mark.parametrize("kind", ["sync", "async"])


def lying(kind, lie=None, value=None, space=BOX):
    arguments = {"lie": lie, "value": value, "space": space}
    return tw.make("TorchwrapTest/Lying-v0", 2, vectorization_mode=kind, **arguments)


def integers(dtype):
    return spaces.Box(0, 255, (2,), dtype)


LIES = [
    pytest.param("observation", np.array([300, -1]), integers(np.uint8), id="narrow"),
    pytest.param("observation", np.array([2**40, 1]), integers(np.int32), id="wide"),
    pytest.param("observation", None, BOX, id="None"),
    pytest.param("observation", np.array(["1"] * 3), BOX, id="text"),
    pytest.param("observation", 0.5, BOX, id="scalar"),
    pytest.param("observation", {}, spaces.Dict(x=BOX), id="keys"),
    pytest.param("reward", np.ones(2), BOX, id="rewards"),
    pytest.param("terminated", None, BOX, id="flag"),
    pytest.param("old", None, BOX, id="old API"),
]


@pytest.mark.filterwarnings("ignore:.*ERROR")
@by_kind
@pytest.mark.parametrize("lie, value, space", LIES)
def test_result_that_does_not_fit_raises_with_its_name_and_env(kind, lie, value, space):
    errors = (RuntimeError, TypeError, ValueError)
    name = "info" if lie == "old" else lie
    match = f"{name}.* env 1|env 1.*{name}"
    with (
        lying(kind, lie, value, space) as env,
        pytest.raises(errors, match=match),
    ):
        play(env, 4)


@pytest.mark.filterwarnings("ignore:.*ERROR")
@by_kind
def test_exception_of_an_env_in_sync_allows_a_reset_and_ends_workers(kind):
    with lying(kind, "raise") as env:
        error = TwoArguments if kind == "sync" else RuntimeError
        with pytest.raises(error, match=r"leak|env 1"):
            play(env)
        with pytest.raises(RuntimeError, match="reset" if kind == "sync" else "new env"):
            env.step(env.sample_action())
        if kind == "sync":
            check_transitions(env, [Lying] * 2)


class FinalObs(OtherVectorEnv):
    """Gives final observations in another form, and its mode by name."""

    def __init__(self, space, change):
        super().__init__(scripted(2, lengths=(1,), space=space), autoreset_mode=SAME_STEP)
        self.metadata["autoreset_mode"] = "SAME_STEP"
        self.change = change

    def step(self, actions):
        *result, infos = super().step(actions)
        final = infos.pop("final_obs")
        return *result, {**infos, **self.change(final)}


def stacked_by_key(final):
    return {"final_obs": {"x": np.stack([each["x"] for each in final])}}


@pytest.mark.parametrize(
    "space, change",
    [
        pytest.param(BOX, lambda final: {"final_obs": np.stack(final)}, id="batch"),
        pytest.param(spaces.Dict(x=BOX), stacked_by_key, id="batch of a Dict"),
    ],
)
def test_final_observations_of_any_form_are_the_successors(space, change):
    env = tw.from_gymnasium(FinalObs(space, change))
    check_transitions(env, scripted(2, lengths=(1,), space=space), steps=3)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda final: {}, id="none"),
        pytest.param(lambda final: {"final_obs": final[:1]}, id="one"),
    ],
)
def test_missing_final_observations_raise(change):
    env = tw.from_gymnasium(FinalObs(BOX, change))
    with pytest.raises(ValueError, match=r"final_obs.* envs \[0, 1\]"):
        play(env, 4)


ENTRIES = {
    "function": lambda number: lambda: number,
    "generator": lambda number: (each for each in range(number)),
    "vectors": np.zeros,
    "numbers and strings": lambda number: number if number % 2 else "even",
}


class Entries(Scripted):
    """Has an entry in its infos that is not a number of every env."""

    def __init__(self, make_entry=None):
        super().__init__()
        self.make_entry = make_entry

    def reset(self, **kwargs):
        observation, _ = super().reset(**kwargs)
        return observation, {}

    def step(self, action):
        *result, _ = super().step(action)
        return *result, {"entry": self.make_entry(int(self.np_random.integers(1, 99)))}


gymnasium.register("TorchwrapTest/Entries-v0", entry_point=Entries)


@pytest.mark.parametrize("make_entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_entries_that_are_not_asked_for_can_be_anything(kind, make_entry):
    makers = [lambda: Entries(make_entry)] * 3
    id = "TorchwrapTest/Entries-v0"
    with tw.make(id, 3, vectorization_mode=kind, make_entry=make_entry) as env:
        check_transitions(env, makers, steps=4)


@pytest.mark.parametrize("make_entry", params(ENTRIES, quick=["generator"]))
def test_entries_that_gymnasiums_workers_cannot_send_name_the_env(bridge, make_entry):
    env = bridge([lambda: Entries(make_entry)] * 3, AsyncVectorEnv)
    with pytest.raises(RuntimeError, match=r"env \d "):
        play(env, 4)
    with pytest.raises(RuntimeError, match="new env"):
        env.reset()
    close(env)


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("info", [None, []], ids=["None", "list"])
@pytest.mark.parametrize("is_own", [False, True], ids=["make", "own"])
def test_late_info_that_is_no_dict_names_env_and_cause(bridge, is_own, info):
    if is_own:
        env = bridge([lambda: Lying("info", info)] * 3, AsyncVectorEnv)
    else:
        env = lying("async", "info", info)
    cause = "no attribute 'items'" if is_own else "info"
    with pytest.raises(RuntimeError, match=f"env 1 .*{cause}.*new env"):
        play(env, 4)
    close(env)


CHANGED = {
    "fraction": (2.7, spaces.Discrete(5)),
    "beyond uint8": (300, spaces.Box(0, 255, (), np.uint8)),
    "below 0": (-1, spaces.Box(0, 255, (), np.uint8)),
    "nan": (np.nan, spaces.Discrete(3)),
    "fraction of a bool": (0.4, spaces.Box(0, 1, (), bool)),
    "beyond int32": (2**31 + 5, spaces.Box(-9, 9, (), np.int32)),
    "text": ("12", spaces.Box(-99, 99, ())),
    "vector": (np.zeros(2), spaces.Box(-9, 9, ())),
}


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.full)])
@pytest.mark.parametrize(("entry", "space"), CHANGED.values(), ids=CHANGED)
def test_entry_that_its_space_would_change_raises(kind, entry, space):
    kwargs = {
        "vectorization_mode": kind,
        "info_keys": {"entry": space},
        "make_entry": lambda number: entry,
    }
    env = tw.make("TorchwrapTest/Entries-v0", 2, **kwargs)
    with env, pytest.raises((ValueError, RuntimeError), match=r"info\['entry'\] must fit"):
        play(env, 1)


# Copies.


@pytest.mark.parametrize("replicate", [copy.deepcopy, through_pickle], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_copy_of_an_env_over_a_simulator_raises(bridge, kind, replicate):
    below = bridge(scripted(2), kind)
    with pytest.raises(TypeError, match=r"GymnasiumEnv.* copied"):
        replicate(tw.TransformedEnv(below, T.NormalizeReward()))
    check_transitions(below, scripted(2), steps=2)


# Interrupts.


def interrupt(call, after):
    """Repeats a call until Ctrl-C is raised after some seconds, and again if `__del__` loses it."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, after, 0.5)
            while True:
                call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        torch.set_grad_enabled(True)  # `torch.no_grad` of the call may not have come to its end


@pytest.mark.parametrize("shared_memory", mostly_full([True, False], True))
@every_mode
def test_interrupted_workers_start_over_or_ask_for_a_new_env(bridge, mode, shared_memory):
    makers = scripted(2, lengths=[(3,), (2,)])
    rng = random.Random(0)
    outcomes = set()
    for seed in range(6):
        env = bridge(makers, AsyncVectorEnv, mode, shared_memory=shared_memory)
        interrupt(lambda env=env: play(env), after=rng.uniform(0.0001, 0.004))
        try:
            check_transitions(env, makers, steps=3, seed=seed)
            outcomes.add("over")
        except RuntimeError as error:
            assert "did not finish" in str(error) and "new env" in str(error)
            outcomes.add("new env")
        close(env)
    assert "new env" in outcomes


def raise_interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_same_step_reset_after_an_interrupt_resets_every_row(bridge, monkeypatch):
    env = bridge(scripted(2, lengths=[(1,), (5,)]), mode=SAME_STEP)
    td = env.reset(seed=0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(env, "_reset", raise_interrupt)
        sample_and_step(env, td)
    reset = env.vector_env.reset
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            env.vector_env,
            "reset",
            lambda **kwargs: raise_interrupt(reset(**kwargs)),
        )
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
    with pytest.raises(RuntimeError, match=r"env \d exited"):
        play(own)
    close(env)
    close(own)


# Arguments.


@pytest.mark.parametrize("id, kwargs", [("Text", {}), ("Scripted", {"first_index": -1})])
def test_make_that_fails_leaves_no_process_behind(id, kwargs):
    id = f"TorchwrapTest/{id}-v0"
    with pytest.raises((TypeError, ValueError)):
        tw.make(id, 2, backend="gymnasium", vectorization_mode="async", **kwargs)


def test_worker_timeout_of_zero_raises(bridge):
    vector_env = bridge(scripted(2)).vector_env
    with pytest.raises(ValueError, match="worker_timeout"):
        tw.from_gymnasium(vector_env, worker_timeout=0)
    with pytest.raises(ValueError, match="worker_timeout"):
        make(worker_timeout=0)


def test_worker_timeout_is_part_of_the_spec():
    env = make(2, worker_timeout=1e300)
    for each in (env, tw.make(env.spec, num_envs=1)):
        assert each.spec.kwargs["worker_timeout"] == 1e300
        check_transitions(each, [Faulty] * each.num_envs)
        close(each)
