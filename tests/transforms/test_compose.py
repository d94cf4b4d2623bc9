"""Compose: laws of composition, state and errors."""

import functools
import traceback

import oracles
import pytest
import torch
from gymnasium.spaces import Box
from helpers import assert_same, from_reset
from oracles import TYPICAL
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

BOX = Box(-1, 1, (2,))
scripted = functools.partial(oracles.scripted, action_space=BOX)


def parts():
    return [make() for make in list(TYPICAL.values())[:9]]


def play(env, num_steps=12):
    return from_reset(tw.Collector(env, None, num_steps))


def test_compose_equals_wrapping_one_by_one():
    nested = scripted()
    for transform in parts():
        nested = tw.TransformedEnv(nested, transform)
    assert_same(
        play(scripted(tw.Compose(parts()))),
        play(nested),
    )


@pytest.mark.parametrize(
    "cut",
    [0, 1, 4, 9],
)
def test_compose_is_associative(cut):
    whole = parts()
    nested = tw.Compose([tw.Compose(whole[:cut]), tw.Compose(whole[cut:])])
    assert_same(
        play(scripted(nested)),
        play(scripted(*parts())),
    )


def test_compose_standalone_actions_pass_in_reverse_as_in_an_env():
    compose = tw.Compose([T.RescaleAction(-10, 10), T.ClipAction()])
    env = scripted(compose)
    action = torch.full((3, 2), 40.0)
    transition, _ = env.step(env.reset().set("action", action))
    alone = compose(TensorDict({"action": action}, [3]))["action"]
    torch.testing.assert_close(alone, transition["next", "info", "action"])


def test_compose_unfit_transform_in_a_nested_compose_raises_with_every_position():
    positions = r"transforms\[1\] \(Compose\): transforms\[0\] \(RescaleAction\): "
    with pytest.raises(ValueError, match=positions):
        scripted(
            T.ClipAction(),
            tw.Compose([T.RescaleAction(-1, 1)]),
        )


def test_compose_error_in_a_users_function_keeps_its_traceback():
    def broken(observation):
        raise ValueError("a user's error")

    with pytest.raises(ValueError, match="a user's error") as caught:
        scripted(T.TimeLimit(3), T.TransformObservation(broken))
    error = caught.value
    functions = []
    while error is not None:
        functions += [entry.name for entry in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__
    assert "broken" in functions


def test_transform_of_the_user_may_take_a_transform_that_knows_an_action_space():
    class Sometimes(T.Transform):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    bounded = T.TransformAction(lambda action: action, None)
    assert Sometimes(bounded).inner is bounded
