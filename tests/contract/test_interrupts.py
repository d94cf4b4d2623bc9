"""An exception in the middle of a call: the next one raises and asks for a reset or a restore, after which all is well."""

import itertools

import pytest
import torch
from helpers import after, assert_same, play
from torch.utils._python_dispatch import TorchDispatchMode

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

NUM_ENVS = 4


class Fails(T.Transform):
    """Raises KeyboardInterrupt in a hook, when it is told to."""

    at = None

    def action(self, action):
        return self.raised("action", action)

    def step(self, td):
        return self.raised("step", td)

    def reset(self, td, mask):
        return self.raised("reset", td)

    def raised(self, hook, value):
        if self.at == hook:
            self.at = None
            raise KeyboardInterrupt
        return value


def make():
    transforms = (
        T.NormalizeReward(),
        Fails(),
        T.FrameStackObservation(2),
        T.RecordEpisodeStatistics(),
    )
    return tw.TransformedEnv(ScriptedEnv(NUM_ENVS, (3,), (2, 3)), *transforms)


ACTION = torch.zeros(NUM_ENVS, 6)


def step(env, td):
    for _ in range(3):  # in which every env ends an episode
        _, td = env.step(td.set("action", ACTION))
    return td


def collect(env, td):
    return tw.rollout(env, None, 3, td)[1]


def reset_again(env, td):
    return env.reset()


def reset_some(env, td):
    return env.reset(mask=torch.tensor([True, False, True, False]))


CALLS = {
    "a step, in an action": (step, "action", r"step\(\)"),
    "a step, in a transform": (step, "step", r"step\(\)"),
    "an auto-reset": (step, "reset", r"step\(\)"),
    "a collection": (collect, "step", "collection"),
    "an auto-reset of a collection": (collect, "reset", "collection"),
    "a reset": (reset_again, "reset", r"reset\(\)"),
    "a partial reset": (reset_some, "reset", r"reset\(\)"),
}


def refused(env, td, name):
    message = rf"TransformedEnv may hold .*, because an earlier {name} did not finish: call reset\(\), or restore\(\)"
    for call in (step, collect, reset_some, lambda env, td: env.snapshot()):
        with pytest.raises(RuntimeError, match=message):
            call(env, td)


@pytest.mark.parametrize("remedy", ["restore", "reset of every env"])
@pytest.mark.parametrize("case", CALLS)
def test_call_after_an_interrupted_one_raises_until(case, remedy):
    call, hook, name = CALLS[case]
    env, twin = make(), make()
    for one in (env, twin):
        after(one, 1)  # learns
    td, twin_td = (after(one.train(remedy == "restore"), 4) for one in (env, twin))
    snapshot = env.snapshot()
    env.transforms[1].at = hook
    with pytest.raises(KeyboardInterrupt):
        call(env, td)
    refused(env, td, name)
    roots = (
        (env.restore(snapshot), twin_td)
        if remedy == "restore"
        else (env.reset(seed=3), twin.reset(seed=3))
    )
    found, expected = (play(one, 20, root)[0] for one, root in zip((env, twin), roots, strict=True))
    if remedy != "restore":
        found, expected = (
            found.exclude("buffers"),
            expected.exclude("buffers"),
        )  # episodes were recorded
    assert_same(found, expected)


class StopsAt(TorchDispatchMode):
    """Raises at an operator: the one of a name, or the one after so many."""

    def __init__(self, error, name=None, after=0):
        super().__init__()
        self.error, self.name, self.left = error, name, after

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.name in (None, operator.overloadpacket.__name__):
            self.left -= 1
            if self.left < 0:
                raise self.error
        return operator(*args, **(kwargs or {}))


def test_policy_that_raises_in_a_collection_is_an_interrupt():
    env, calls = make(), []

    def policy(td):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return torch.zeros(NUM_ENVS, 6)

    td = env.reset(seed=0)
    with pytest.raises(ZeroDivisionError):
        tw.rollout(env, policy, 3, td)
    refused(env, td, "collection")


def test_interrupted_restore_is_an_interrupt():
    env = make()
    td = after(env, 4)
    snapshot = env.snapshot()
    with pytest.raises(KeyboardInterrupt), StopsAt(KeyboardInterrupt(), "copy_", after=2):
        env.restore(snapshot)
    refused(env, td, r"restore\(\)")
    env.restore(snapshot)
    assert_same(env.snapshot(), snapshot)


def test_statistics_of_a_step_interrupted_at_any_operator_have_no_negative_variance():
    for number in range(0, 90, 3):
        env = tw.TransformedEnv(ScriptedEnv(2, (1,)), T.NormalizeObservation())
        env.reset(seed=0)
        with pytest.raises(KeyboardInterrupt), StopsAt(KeyboardInterrupt(), after=number):
            for _ in range(9):
                env.step(env.sample_action())
        assert env.reset()["observation"].isfinite().all()


@pytest.mark.parametrize("call", [step, collect, reset_again, reset_some])
def test_call_interrupted_at_any_operator_has_not_happened_or_is_over_or_the_env_refuses_to_go_on(
    call,
):
    env, outcomes = make(), set()
    td = after(env, 4)
    before = env.snapshot()
    call(env, td)
    states = {"had not happened": before, "was over": env.snapshot()}
    for number in itertools.count(0, 13):
        td = env.restore(before)
        try:
            with StopsAt(KeyboardInterrupt(), after=number):
                call(env, td)
            break
        except KeyboardInterrupt:
            pass
        try:
            found = env.snapshot()
            outcomes.add(next(name for name, state in states.items() if equal(found, state)))
        except RuntimeError as error:
            assert "call reset(), or restore() with a snapshot" in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes and number > 26
    td = env.restore(before)
    assert equal(env.snapshot(), before)


def equal(one, other):
    return all(torch.equal(value, other[key]) for key, value in one.items(True, True))


@pytest.mark.parametrize("compiled", [False, True])
def test_error_of_an_operator_is_an_interrupt(compiled):
    env = tw.compile(make(), backend="eager") if compiled else make()
    td = after(env, 4)
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        StopsAt(RuntimeError("out of memory"), after=20),
    ):
        step(env, td)
    refused(env, td, r"step\(\)")
    step(env, env.reset())


def test_bad_input_is_no_interrupt():
    env = make()
    td = after(env, 4)
    before = env.snapshot()
    for call in (
        lambda: env.step(torch.zeros(3)),
        lambda: env.reset(seed=-1),
        lambda: env.restore({}),
        lambda: env.step(td),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert_same(env.snapshot(), before)


def test_env_without_snapshots_asks_for_a_reset_only():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 2, backend="gymnasium"), Fails())
    td = env.reset(seed=0)
    env.transforms[0].at = "step"
    action = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KeyboardInterrupt):
        env.step(td.set("action", action))
    with pytest.raises(
        RuntimeError,
        match=r"CartPole-v1 may hold .* earlier step\(\) did not finish: call reset\(\)\.$",
    ):
        env.step(action)
    env.reset()
    env.step(action)
