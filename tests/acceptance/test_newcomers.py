"""Habits of newcomers: each works, or raises and names its remedy."""

import collections.abc

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import assert_same

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Forgetful(T.RewardTransform):
    def reward(self, reward):
        reward.abs()  # without `return`


class Silent(T.Transform):
    def setup(self, signature):
        signature.replace()  # without `return`


def with_transform(transform):
    return lambda env: tw.rollout(tw.TransformedEnv(env, transform), None, 1)


def with_policy(policy):
    return lambda env: tw.rollout(env, policy, 1)


HALVE = T.TransformObservation(lambda observation: observation[:, :2])
WINS = T.RecordEpisodeStatistics(metrics={"wins": "max"})
HABITS = {
    "class": (with_transform(T.TimeLimit), TypeError, "not its class or a list"),
    "env for an id": (tw.make, TypeError, "id"),
    "policy of tuples": (with_policy(lambda td: (td, 0)), TypeError, "policy"),
    "setup without return": (with_transform(Silent()), TypeError, "setup"),
    "hook without return": (with_transform(Forgetful()), TypeError, "reward"),
    "function without its space": (with_transform(HALVE), ValueError, "observation"),
    "metrics of a missing info": (with_transform(WINS), ValueError, "wins"),
}


@pytest.mark.parametrize(("habit", "error", "name"), HABITS.values(), ids=HABITS)
def test_habit_raises_and_names_its_remedy(habit, error, name):
    with pytest.raises(error, match=name):
        habit(tw.make("CartPole-v1", 2))


# Roots.


@pytest.mark.parametrize("values", ["as they are", "changed in place", "NaN"])
def test_collector_starts_from_the_root_as_the_caller_left_it(values):
    space = spaces.Dict(position=spaces.Box(-9, 9, (2,)), gear=spaces.Discrete(3))
    env = ScriptedEnv(2, episode_lengths=None, observation_space=space)
    td = env.reset()
    for leaf in td.values(True, True):
        if values == "changed in place":
            leaf += 1
        elif values == "NaN" and leaf.is_floating_point():
            leaf[0] = torch.nan
    data = tw.rollout(env, None, 3)
    assert_same(data[:, 0].select("observation"), td.select("observation"))


# Scripts.


def test_env_without_len_is_true_and_a_with_statement_closes_it():
    env = tw.make("CartPole-v1", 2, backend="gymnasium")
    outer = tw.TransformedEnv(env, T.TimeLimit(3))
    assert outer and not isinstance(outer, collections.abc.Iterable)
    assert np.array([outer, None], dtype=object).tolist() == [outer, None]
    with pytest.raises(KeyError), outer as inside:
        assert inside is outer and not env.vector_env.closed
        inside.reset(seed=0)
        raise KeyError
    assert env.vector_env.closed


# Gradients.


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_step_takes_the_values_of_an_action_that_requires_grad(compiled):
    env = ScriptedEnv(2, action_space=spaces.Box(-2, 2, (1,)))
    if compiled:
        tw.compile(env, backend="eager")
    td = env.reset(seed=0)
    action = torch.zeros(2, 1, requires_grad=True).tanh() + 0.5
    transition, td = env.step(td.set("action", action))
    assert transition["action"] is action and action.requires_grad
    assert (transition["next", "info", "action"] == 0.5).all()
    for result in (transition["next"], td):
        leaves = result.values(True, True)
        assert not any(leaf.requires_grad for leaf in leaves)
