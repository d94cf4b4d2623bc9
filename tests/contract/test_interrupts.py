"""An exception in the middle of a call: the next call raises and asks for a reset or a restore."""

import itertools

import pytest
import torch
from helpers import after, assert_same, play
from torch.utils._python_dispatch import TorchDispatchMode

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

NUM_ENVS = 4
ACTION = torch.zeros(NUM_ENVS, 6)


class Fails(T.Transform):
    """Raises KeyboardInterrupt in the hook that `at` names, once."""

    at = None

    def action(self, action):
        return self.passed("action", action)

    def step(self, td):
        return self.passed("step", td)

    def reset(self, td, mask):
        return self.passed("reset", td)

    def passed(self, hook, value):
        if self.at == hook:
            self.at = None
            raise KeyboardInterrupt
        return value


def make():
    around = T.FrameStackObservation(2), T.RecordEpisodeStatistics()
    env = ScriptedEnv(NUM_ENVS, (3,), (2, 3))
    return tw.TransformedEnv(
        env,
        T.NormalizeReward(),
        Fails(),
        *around,
    )


def step(env, td):
    for _ in range(3):  # in which every env ends an episode
        _, td = env.step(td.set("action", ACTION))
    return td


def step_alone(env, td):
    env.step_without_reset(ACTION)


def collect(env, td):
    tw.rollout(env, None, 3)
    return env.root


def reset_all(env, td):
    return env.reset()


def reset_some(env, td):
    return env.reset(mask=torch.tensor([True, False, True, False]))


def snapshot(env, td):
    return env.snapshot()


def assert_unfinished(env, td, name):
    """Every call but a reset or a restore of all envs raises, and names the call that failed."""
    for call in (step, collect, reset_some, snapshot):
        with pytest.raises(RuntimeError, match=rf"{name}.*reset\(\), or restore\(\)"):
            call(env, td)


CALLS = {
    "action": (step, "action", r"step\(\)"),
    "step": (step, "step", r"step\(\)"),
    "step without reset": (step_alone, "step", r"step_without_reset\(\)"),
    "auto-reset": (step, "reset", r"step\(\)"),
    "collection": (collect, "step", r"step\(\)"),
    "auto-reset of a collection": (collect, "reset", r"step\(\)"),
    "reset": (reset_all, "reset", r"reset\(\)"),
    "partial reset": (reset_some, "reset", r"reset\(\)"),
}


def interrupt(env, call, hook, td):
    env.transforms[1].at = hook
    with pytest.raises(KeyboardInterrupt):
        call(env, td)


@pytest.mark.parametrize("call, hook, name", CALLS.values(), ids=CALLS)
def test_restore_after_an_interrupted_call_continues_as_before(call, hook, name):
    env = make()
    td = after(env, 4)
    saved = env.snapshot()
    expected, _ = play(env, 20, td)
    td = env.restore(saved)
    interrupt(env, call, hook, td)
    assert_unfinished(env, td, name)
    assert_same(
        play(env, 20, env.restore(saved))[0],
        expected,
    )


class StopsAt(TorchDispatchMode):
    """Raises at an operator, counted among those of a name or among all."""

    def __init__(self, error, name=None, after=0):
        super().__init__()
        self.error = error
        self.name = name
        self.left = after

    def __torch_dispatch__(
        self,
        operator,
        types,
        args=(),
        kwargs=None,
    ):
        if self.name in (None, operator.overloadpacket.__name__):
            self.left -= 1
            if self.left < 0:
                raise self.error
        return operator(*args, **(kwargs or {}))


def test_policy_that_raises_in_a_collection_leaves_the_root_of_its_last_step():
    env = make()
    other = make()
    actions = iter([ACTION])

    def policy(td):
        return next(actions)

    env.reset(seed=0)
    with pytest.raises(StopIteration):
        tw.rollout(env, policy, 3)
    _, td = other.step(other.reset(seed=0).set("action", ACTION))
    assert_same(env.root, td)
    assert_same(env.snapshot(), other.snapshot())


@pytest.mark.parametrize("number", range(0, 90, 15))
def test_statistics_interrupted_at_an_operator_have_no_negative_variance(number):
    env = tw.TransformedEnv(
        ScriptedEnv(2, (1,)),
        T.NormalizeObservation(),
    )
    env.reset(seed=0)
    with pytest.raises(KeyboardInterrupt), StopsAt(KeyboardInterrupt(), after=number):
        for _ in range(9):
            env.step(env.sample_action())
    assert env.reset()["observation"].isfinite().all()


def same(first, second):
    return bool((first == second).all())


@pytest.mark.parametrize("call", [step, reset_all, reset_some])
def test_call_interrupted_at_any_operator_is_undone_or_done_or_unfinished(call):
    env = make()
    td = after(env, 4)
    before = env.snapshot()
    call(env, td)
    done = env.snapshot()
    refusals = 0
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
        except RuntimeError:
            refusals += 1
        else:
            assert same(found, before) or same(found, done)
    assert refusals and number > 26
    env.restore(before)
    assert same(env.snapshot(), before)


def test_env_without_snapshots_asks_for_a_reset_only():
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 2, backend="gymnasium"),
        Fails(),
    )
    td = env.reset(seed=0)
    env.transforms[0].at = "step"
    action = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KeyboardInterrupt):
        env.step(td.set("action", action))
    with pytest.raises(RuntimeError, match=r"step\(\) .*reset\(\)\.$") as caught:
        env.step(action)
    assert "restore" not in str(caught.value)
    env.reset()
    env.step(action)
