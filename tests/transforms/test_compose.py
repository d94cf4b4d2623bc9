"""Compose: laws of composition, state and errors."""

from __future__ import annotations

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
        assert_same(rollout(scripted(tw.Compose([tw.Compose(parts[:cut]), tw.Compose(parts[cut:])]))), expected)


def test_compose_of_nothing_is_the_identity():
    for nothing in ([], [T.Transform()], [tw.Compose([tw.Compose([])])]):
        assert_same(rollout(scripted(tw.Compose(nothing))), rollout(scripted()))
    assert_same(rollout(scripted()), tw.rollout(env := ScriptedEnv(3, action_space=BOX), None, 12, env.reset(seed=0))[0])


def test_compose_observations_pass_in_order():
    assert scripted(add(1), double()).reset()["observation"][0, 0].item() == 2
    assert scripted(double(), add(1)).reset()["observation"][0, 0].item() == 1


def test_compose_rewards_pass_in_order():
    env = scripted(T.TransformReward(lambda reward: 10 * reward), T.ClipReward(0, 5))
    assert rollout(env, 1)["next", "reward"].flatten().tolist() == [5, 5, 5]


def test_compose_actions_pass_in_reverse():
    env = scripted(T.RescaleAction(-10, 10), T.ClipAction())
    transition, _ = env.step(env.reset().set("action", torch.full((3, 2), 40.0)))
    torch.testing.assert_close(transition["next", "info", "action"], torch.ones(3, 2))


def test_compose_signature_passes_from_one_transform_to_the_next():
    env = scripted(T.FrameStackObservation(2), T.FlattenObservation(), T.TimeLimit(7), observation_shape=(3,))
    assert env.single_observation_space == spaces.Box(-np.inf, np.inf, (6,), np.float32)
    assert env.signature.max_episode_steps == 7


def test_compose_flat_gives_the_transforms_innermost_first():
    parts = [add(1), double(), T.TimeLimit(3)]
    assert list(tw.Compose([parts[0], tw.Compose(parts[1:])]).flat()) == parts


def test_compose_eval_freezes_and_train_resumes_every_transform():
    env = scripted(*stack())
    rollout(env)
    before = {name: value.clone() for name, value in env.eval().state_dict().items()}
    rollout(env)
    assert all(torch.equal(value, before[name]) for name, value in env.state_dict().items())
    rollout(env.train())
    changed = {name for name, value in env.state_dict().items() if not torch.equal(value, before[name])}
    assert {f"transforms.{i}.statistics.count" for i in (1, 4)} <= changed


# Standalone calls


def test_compose_standalone_observations_pass_in_order():
    td = TensorDict({"observation": torch.ones(2, 5, 1)}, [2, 5])
    assert torch.equal(tw.Compose([add(1), double()])(td)["observation"], torch.full((2, 5, 1), 4.0))
    assert torch.equal(td["observation"], torch.ones(2, 5, 1))


def test_compose_standalone_actions_pass_in_reverse_as_in_an_env():
    compose = tw.Compose([T.RescaleAction(-10, 10), T.ClipAction()])
    env, action = scripted(compose), torch.full((3, 2), 40.0)
    transition, _ = env.step(env.reset().set("action", action))
    outside = compose(TensorDict({"action": action}, [3]))["action"]
    torch.testing.assert_close(outside, transition["next", "info", "action"])


# Errors


def test_compose_unfit_transform_raises_with_its_position():
    match = r"transforms\[2\] \(NormalizeObservation\): NormalizeObservation needs a Box .* but got Discrete\(3\)"
    with pytest.raises(TypeError, match=match):
        parts = T.TimeLimit(3), T.ClipReward(0, 1), T.NormalizeObservation()
        tw.TransformedEnv(ScriptedEnv(2, observation_space=spaces.Discrete(3)), *parts)


def test_compose_unfit_transform_in_a_nested_compose_raises_with_every_position():
    match = r"transforms\[1\] \(Compose\): transforms\[0\] \(RescaleAction\): RescaleAction needs .* finite bounds"
    with pytest.raises(ValueError, match=match):
        scripted(T.ClipAction(), tw.Compose([T.RescaleAction(-1, 1)]))


def test_transformed_env_of_no_transforms_or_one_twice_raises():
    once, twice = "Compose needs each transform once, but got", double()
    limit = T.TimeLimit(3)
    for build, error, words in (
        (lambda: scripted([double()]), TypeError, r"Compose needs Transforms, but got list at transforms\[0\]"),
        (lambda: scripted(None), TypeError, r"Compose needs Transforms, but got NoneType at transforms\[0\]"),
        (lambda: scripted(double(), 3), TypeError, r"needs Transforms, but got int at transforms\[1\]"),
        (lambda: scripted(twice, twice), ValueError, f"{once} TransformObservation.* twice"),
        (lambda: scripted(limit, tw.Compose([limit])), ValueError, rf"{once} TimeLimit\(max_episode_steps=3\) twice"),
        (lambda: tw.TransformedEnv(double()), TypeError, "TransformedEnv needs a torchwrap.Env first, but got Transform"),
    ):
        with pytest.raises(error, match=words):
            build()
            pytest.fail(words)


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
