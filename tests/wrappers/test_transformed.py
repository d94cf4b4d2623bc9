"""TransformedEnv: an env with transforms on it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers import assert_same
from oracles import scripted

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

# How transforms are given, and the classes of what `env.transforms` then holds.
GIVEN = {
    "none": (lambda: [], []),
    "one": (lambda: [T.TimeLimit(4)], [T.TimeLimit]),
    "several": (lambda: [T.NormalizeObservation(), T.TimeLimit(4)], [T.NormalizeObservation, T.TimeLimit]),
    "one Compose": (
        lambda: [T.Compose([T.TimeLimit(4), T.ScaleReward(2), T.ClipReward(-5, 5)])],
        [T.TimeLimit, T.ScaleReward, T.ClipReward],
    ),
    "a nested Compose": (lambda: [T.Compose([T.Compose([T.TimeLimit(4)]), T.ScaleReward(2)])], [T.Compose, T.ScaleReward]),
    "a Compose and more": (lambda: [T.Compose([T.TimeLimit(4)]), T.ScaleReward(2)], [T.Compose, T.ScaleReward]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_transformed_env_transforms_are_a_compose_whatever_was_given(name):
    make, kinds = GIVEN[name]
    transforms = tw.TransformedEnv(ScriptedEnv(2), *make()).transforms
    assert type(transforms) is T.Compose and len(transforms) == len(kinds)
    assert [type(part) for part in transforms] == kinds
    for index, kind in enumerate(kinds):
        assert type(transforms[index]) is kind and transforms[index - len(kinds)] is transforms[index]
    assert [type(part) for part in transforms[1:]] == kinds[1:] and transforms[:] == list(transforms)
    assert name != "one Compose" or tw.TransformedEnv(ScriptedEnv(2), compose := make()[0]).transforms is compose
    for index in (len(kinds), -len(kinds) - 1):
        with pytest.raises(IndexError):
            transforms[index]


@pytest.mark.parametrize("name", GIVEN)
def test_transformed_env_spec_builds_the_same_stack(name):
    env = tw.TransformedEnv(tw.make("CartPole-v1", 3), *GIVEN[name][0]())
    other = tw.make(env.spec)
    assert repr(other) == repr(env) and repr(other.transforms) == repr(env.transforms)
    assert other.spec.additional_wrappers == env.spec.additional_wrappers
    one, two = (tw.rollout(each, None, 9, each.reset(seed=3))[0] for each in (env, other))
    assert_same(one, two)


def test_transformed_env_actions_pass_outermost_first():
    env = tw.TransformedEnv(ScriptedEnv(1), T.RescaleAction(0, 1), T.ClipAction())
    transition, _ = env.step(env.reset().set("action", torch.tensor([[-3.0, 0.0, 0.25, 0.5, 1.0, 3.0]])))
    assert transition["next", "info", "action"].tolist() == [[-1, -1, -0.5, 0, 1, 1]]


def test_transformed_env_of_wrong_parts_raises():
    normalize = T.NormalizeObservation()
    tw.TransformedEnv(ScriptedEnv(2), normalize)
    for make, error, message in (
        (
            lambda: tw.TransformedEnv(T.TimeLimit(3)),
            TypeError,
            "TransformedEnv needs a torchwrap.Env first, but got TimeLimit",
        ),
        (lambda: tw.TransformedEnv(ScriptedEnv(), T.TimeLimit(3), None), TypeError, r"got NoneType at transforms\[1\]"),
        (lambda: tw.TransformedEnv(ScriptedEnv(3), normalize), ValueError, "belong to no other env, but got NormalizeObserva"),
    ):
        with pytest.raises(error, match=message):
            make()


def test_transformed_env_compiled_copy_and_pickle_run_eagerly_and_independently():
    env = tw.compile(scripted(T.TimeLimit(3), num_envs=2), backend="eager")
    env.reset(seed=0)
    other = pickle.loads(pickle.dumps(copy.deepcopy(env)))
    tw.rollout(other, None, 2)
    assert env.is_compiled and not other.is_compiled
    assert (env.unwrapped.elapsed == 0).all() and (env.transforms[0].elapsed == 0).all()
