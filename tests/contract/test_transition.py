"""Steps without auto-reset, and the episode clock: what libraries that reset by themselves build on."""

import gymnasium
import pytest
import torch
from catalogue import stack
from gymnasium.vector import AutoresetMode
from helpers import assert_transition_and_masked_reset_are_a_step, mostly_full

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv
from torchwrap.wrappers import RepeatAction


def finished(transition):
    return transition["next", "done"].squeeze(-1)


def make_cartpole(**kwargs):
    return tw.TransformedEnv(
        tw.make("CartPole-v1", 5, **kwargs),
        T.TimeLimit(7),
        T.NormalizeObservation(),
        T.NormalizeReward(),
    )


MAKERS = {
    "scripted": lambda: stack("Compose of seven"),
    "native": make_cartpole,
    "native, large": lambda: tw.FunctionalEnv(
        tw.envs.cartpole.CartPole(), 1500, max_episode_steps=9
    ),
    "sync": lambda: make_cartpole(backend="gymnasium"),
    "compiled": lambda: tw.compile(make_cartpole(), backend="eager"),
    "compiled over sync": lambda: tw.compile(make_cartpole(backend="gymnasium"), backend="eager"),
    "repeated": lambda: RepeatAction(ScriptedEnv(5), 2),
}


@pytest.mark.parametrize("name", mostly_full(MAKERS, "scripted", "native", "sync"))
def test_transition_and_masked_reset_equal_a_step(name):
    stepped, manual = MAKERS[name](), MAKERS[name]()
    assert assert_transition_and_masked_reset_are_a_step(manual, stepped, 30) > 3
    stepped.close()
    manual.close()


def test_transition_of_a_same_step_vector_env_gives_the_final_observation(bridge):
    makers = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=3)] * 2
    env, other = (
        bridge(makers, mode=mode) for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
    )
    assert assert_transition_and_masked_reset_are_a_step(env, other) > 2


def test_interrupted_transition_asks_for_reset(monkeypatch):
    env = ScriptedEnv(2)
    td = env.reset()
    monkeypatch.setattr(env, "_step", lambda action: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        env.step_without_reset(td.set("action", env.sample_action()))
    with pytest.raises(RuntimeError, match=r"earlier step_without_reset\(\) did not finish"):
        env.snapshot()


# The clock.


CLOCKS = {
    "native": lambda: tw.make("Pendulum-v1", 4, max_episode_steps=10),
    "time limit": lambda: tw.TransformedEnv(
        tw.make("Pendulum-v1", 4, max_episode_steps=-1), T.TimeLimit(10)
    ),
    "both": lambda: tw.TransformedEnv(
        tw.make("Pendulum-v1", 4, max_episode_steps=10), T.TimeLimit(10), T.TimeAwareObservation()
    ),
    "repeated": lambda: RepeatAction(tw.make("Pendulum-v1", 4, max_episode_steps=20), 2),
    "scripted": lambda: ScriptedEnv(4, episode_lengths=10),
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_assigned_clock_truncates_at_once_and_staggered_and_restarts_with_each_episode(compiled):
    for name, make in CLOCKS.items():
        env = tw.compile(make(), backend="eager") if compiled else make()
        td = env.reset(seed=0)
        env.elapsed_steps = torch.tensor([0, 9, 7, 5])
        assert env.elapsed_steps.tolist() == [0, 9, 7, 5], name
        ends = torch.zeros(4, dtype=torch.int64)
        for step in range(1, 11):
            before = env.elapsed_steps.clone()
            transition, td = env.step(td.set("action", env.sample_action()))
            ends = torch.where(finished(transition) & (ends == 0), step, ends)
            assert (
                env.elapsed_steps.tolist()
                == torch.where(finished(transition), 0, before + 1).tolist()
            ), name
        assert ends.tolist() == [10, 1, 3, 5], name


def test_elapsed_steps_of_a_foreign_simulator_needs_a_time_limit():
    env = tw.make("CartPole-v1", 2, backend="gymnasium")
    with pytest.raises(RuntimeError, match=r"put transforms\.TimeLimit on it"):
        env.elapsed_steps  # noqa: B018
    env = tw.TransformedEnv(env, T.TimeLimit(50))
    td = env.reset(seed=0)
    env.elapsed_steps = torch.tensor([49, 0])
    transition, td = env.step(td.set("action", env.sample_action()))
    assert transition["next", "truncated"].flatten().tolist() == [True, False]
    assert env.elapsed_steps.tolist() == [0, 1]
    env.close()


def test_elapsed_steps_of_no_number_of_steps_raises_and_changes_nothing():
    env = ScriptedEnv(2)
    env.reset()
    for steps in (torch.zeros(3, dtype=torch.int64), torch.zeros(2), torch.tensor([0, -1]), [0, 0]):
        with pytest.raises(ValueError, match="elapsed_steps"):
            env.elapsed_steps = steps
        assert env.elapsed_steps.tolist() == [0, 0], steps
