"""Steps without auto-reset, and the episode clock: for libraries that reset by themselves."""

import pytest
import torch
from catalogue import stack
from gymnasium.spaces import Box
from helpers import assert_transition_and_masked_reset_are_a_step, mostly_full

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv
from torchwrap.wrappers import RepeatAction


def cartpole(**kwargs):
    env = tw.make("CartPole-v1", 5, **kwargs)
    return tw.TransformedEnv(
        env,
        T.TimeLimit(7),
        T.NormalizeObservation(),
        T.NormalizeReward(),
    )


MAKERS = {
    "scripted": lambda: stack("Compose of seven"),
    "native": cartpole,
    "compiled": lambda: tw.compile(cartpole(), backend="eager"),
    "repeated": lambda: RepeatAction(ScriptedEnv(5), 2),
}


@pytest.mark.parametrize(
    "name",
    mostly_full(MAKERS, "native"),
)
def test_step_without_reset_and_masked_reset_equal_a_step(name):
    with MAKERS[name]() as stepped, MAKERS[name]() as manual:
        assert assert_transition_and_masked_reset_are_a_step(manual, stepped, 30) > 3


# The clock.


def pendulum(limit):
    return tw.make("Pendulum-v1", 4, max_episode_steps=limit)


CLOCKS = {  # each ends episodes after 10 steps
    "native": lambda: pendulum(10),
    "time limit": lambda: tw.TransformedEnv(
        pendulum(-1),
        T.TimeLimit(10),
    ),
    "both": lambda: tw.TransformedEnv(
        pendulum(10),
        T.TimeLimit(10),
        T.TimeAwareObservation(),
    ),
}


@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(True, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("make", CLOCKS.values(), ids=CLOCKS)
def test_assigned_clock_staggers_ends_and_restarts_with_each_episode(make, compiled):
    env = make()
    if compiled:
        tw.compile(env, backend="eager")
    env.reset(seed=0)
    env.elapsed_steps = torch.tensor([0, 9, 7, 5])
    assert env.elapsed_steps.tolist() == [0, 9, 7, 5]
    ends = torch.zeros(4, dtype=torch.int64)
    for step in range(1, 11):
        before = env.elapsed_steps
        transition, _ = env.step(env.sample_action())
        done = transition["next", "done"].squeeze(-1)
        ends = torch.where(done & (ends == 0), step, ends)
        assert env.elapsed_steps.tolist() == torch.where(done, 0, before + 1).tolist()
    assert ends.tolist() == [10, 1, 3, 5]


class AddTime(T.ObservationTransform):
    """A transform of a user that shows its clock."""

    elapsed = tw.EpisodeClock()

    def observation(self, observation):
        return torch.cat([observation, self.elapsed], 1)

    def step(self, td):
        self.elapsed.add_(1)
        return super().step(td)

    def reset(self, td, mask):
        mask.fill_(self.elapsed, 0)
        return super().reset(td, mask)

    def setup(self, signature):
        return signature.replace(single_observation_space=Box(-9, 9, (4,)))


def test_assigned_time_is_observed_from_the_next_step_on():
    groups = {"ours": [T.TimeAwareObservation()], "own": [AddTime()]}
    env = tw.TransformedEnv(pendulum(10), T.ObservationGroups(groups))
    root = env.reset(seed=0).clone()
    env.elapsed_steps = torch.tensor([0, 9, 7, 5])
    transition, _ = env.step(env.sample_action())
    for name in groups:
        assert (transition["observation", name] == root["observation", name]).all()
        assert transition["next", "observation", name][:, -1].tolist() == [1, 10, 8, 6]


def test_elapsed_steps_over_repeated_actions_are_refused():
    env = RepeatAction(pendulum(20), 2)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="RepeatAction: elapsed_steps"):
        env.elapsed_steps = torch.zeros(4, dtype=torch.int64)


def test_elapsed_steps_of_a_foreign_simulator_needs_a_time_limit():
    with tw.make("CartPole-v1", 2, backend="gymnasium") as env:
        with pytest.raises(RuntimeError, match="TimeLimit"):
            env.elapsed_steps  # noqa: B018
        env = tw.TransformedEnv(env, T.TimeLimit(50))
        env.reset(seed=0)
        env.elapsed_steps = torch.tensor([49, 0])
        transition, _ = env.step(env.sample_action())
        assert transition["next", "truncated"].flatten().tolist() == [True, False]
        assert env.elapsed_steps.tolist() == [0, 1]


WRONG = {
    "shape": torch.zeros(3, dtype=torch.int64),
    "dtype": torch.zeros(2),
    "negative": torch.tensor([0, -1]),
    "the limit": torch.tensor([0, 200]),
    "list": [0, 0],
}


@pytest.mark.parametrize("steps", WRONG.values(), ids=WRONG)
def test_wrong_elapsed_steps_raise_and_change_nothing(steps):
    env = tw.make("Pendulum-v1", 2)
    env.reset()
    with pytest.raises(ValueError, match="elapsed_steps"):
        env.elapsed_steps = steps
    assert env.elapsed_steps.tolist() == [0, 0]
