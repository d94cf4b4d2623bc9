"""Compose: laws of composition, state and errors."""

import functools
import traceback

import numpy as np
import oracles
import pytest
import torch
from gymnasium import spaces
from helpers import assert_same
from oracles import TYPICAL
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

BOX = spaces.Box(-1, 1, (2,), np.float32)
scripted = functools.partial(oracles.scripted, action_space=BOX)


def add(number):
    return T.TransformObservation(lambda observation: observation + number)


def double():
    return T.TransformObservation(lambda observation: 2 * observation)


def stack():
    return [make() for make in list(TYPICAL.values())[:9]]


def rollout(env, num_steps=12):
    return tw.rollout(env, None, num_steps, env.reset(seed=0))[0]


def test_compose_equals_wrapping_one_by_one():
    nested = scripted()
    for transform in stack():
        nested = tw.TransformedEnv(nested, transform)
    assert_same(rollout(scripted(tw.Compose(stack()))), rollout(nested))


def test_compose_is_associative():
    expected = rollout(scripted(*stack()))
    for cut in (0, 1, 4, 9):
        parts = stack()
        assert_same(
            rollout(scripted(tw.Compose([tw.Compose(parts[:cut]), tw.Compose(parts[cut:])]))),
            expected,
        )


def test_compose_of_nothing_is_the_identity():
    for nothing in ([], [T.Transform()], [tw.Compose([tw.Compose([])])]):
        assert_same(rollout(scripted(tw.Compose(nothing))), rollout(scripted()))
    assert_same(
        rollout(scripted()),
        tw.rollout(env := ScriptedEnv(3, action_space=BOX), None, 12, env.reset(seed=0))[0],
    )


def test_compose_observations_and_rewards_pass_in_order():
    data = rollout(
        scripted(
            add(1), double(), T.TransformReward(lambda reward: 10 * reward), T.ClipReward(0, 5)
        ),
        1,
    )
    assert (
        data["next", "reward"].flatten().tolist() == [5, 5, 5] and data["observation"][0, 0, 0] == 2
    )


# Standalone calls


def test_compose_standalone_actions_pass_in_reverse_as_in_an_env():
    compose = tw.Compose([T.RescaleAction(-10, 10), T.ClipAction()])
    env, action = scripted(compose), torch.full((3, 2), 40.0)
    transition, _ = env.step(env.reset().set("action", action))
    torch.testing.assert_close(
        compose(TensorDict({"action": action}, [3]))["action"], transition["next", "info", "action"]
    )


# Errors


def test_compose_unfit_transform_in_a_nested_compose_raises_with_every_position():
    match = r"transforms\[1\] \(Compose\): transforms\[0\] \(RescaleAction\): RescaleAction needs .* finite bounds"
    with pytest.raises(ValueError, match=match):
        scripted(T.ClipAction(), tw.Compose([T.RescaleAction(-1, 1)]))


def test_compose_error_in_a_users_function_keeps_its_traceback():
    def broken(observation):
        raise ValueError("a user's error")

    with pytest.raises(ValueError, match="a user's error") as caught:
        scripted(T.TimeLimit(3), T.TransformObservation(broken))
    error, functions = caught.value, []
    while error is not None:
        functions += [entry.name for entry in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__
    assert "broken" in functions
