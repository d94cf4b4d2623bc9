"""Wrong functions, arguments and inputs, which are refused before anything has changed."""

from __future__ import annotations

import pytest
import torch
from func_envs import (
    BroadcastWalk,
    Noisy,
    Walk,
    changed,
)
from helpers import buffers
from tensordict import TensorDict

from torchwrap import FunctionalEnv


def walk(**functions):
    return type("Odd", (Walk,), {name: staticmethod(function) for name, function in functions.items()})()


def broadcast_walk(**functions):
    return type("Odd", (BroadcastWalk,), {name: staticmethod(function) for name, function in functions.items()})()


@pytest.mark.parametrize(
    "func_env, match",
    [
        (walk(), None),
        (broadcast_walk(), None),
        (
            walk(observation=lambda state, rng: state["position"][:1]),
            r"Odd.observation needs to return observations of shape \(3, 2\).*\(3, 1\)",
        ),
        (
            walk(observation=lambda state, rng: state["position"].double()),
            "Odd.observation needs to return observations of dtype torch.float32",
        ),
        (
            walk(observation=lambda state, rng: {"position": state["position"]}),
            "Odd.observation needs to return observations as a torch.Tensor",
        ),
        (broadcast_walk(observation=lambda state, rng: state["position"][0]), r"Odd.observation .*\(3, 2\).*, but got \(2,\)"),
        (
            walk(reward=lambda state, action, next_state, rng: action),
            r"Odd.reward needs to return one scalar per env.*\(3, 1\)",
        ),
        (broadcast_walk(reward=lambda state, action, next_state, rng: action.sum()), "Odd.reward needs to return one scalar"),
        (walk(reward=lambda state, action, next_state, rng: 1.0), "Odd.reward"),
        (broadcast_walk(reward=lambda state, action, next_state, rng: 1.0), "Odd.reward"),
        (walk(terminal=lambda state, rng: state["count"]), "Odd.terminal needs to return torch.bool, but got torch.int64"),
        (
            walk(terminal=lambda state, rng: state["position"] > 3),
            r"Odd.terminal needs to return one scalar per env.*\(3, 2\)",
        ),
        (walk(terminal=lambda state, rng: False), "Odd.terminal"),
        (broadcast_walk(terminal=lambda state, rng: False), "Odd.terminal"),
        (
            walk(transition=lambda state, action, rng: {"position": state["position"]}),
            r"Odd.transition needs to return fields \['position', 'count'\], but got \['position'\]",
        ),
        (
            walk(transition=lambda state, action, rng: {**state, "more": state["count"]}),
            r"Odd.transition needs to return fields \['position', 'count'\], but got \['position', 'count', 'more'\]",
        ),
        (
            walk(transition=lambda state, action, rng: {**state, "count": state["count"] + 0.5}),
            r"Odd.transition needs to return 'count' of shape \(3,\) torch.int64, but got \(3,\) torch.float32",
        ),
        (
            walk(transition=lambda state, action, rng: {**state, "position": state["position"][:1]}),
            r"Odd.transition needs to return 'position' of shape \(3, 2\)",
        ),
        (walk(transition=lambda state, action, rng: state["position"]), "Odd.transition"),
        (walk(initial=lambda rng: torch.zeros(2)), "Odd.initial"),
        (walk(initial=lambda rng: {"position": torch.zeros(2), "count": 0}), "Odd.initial"),
        (
            broadcast_walk(initial=lambda rng: {"position": torch.zeros(3, 2), "count": torch.tensor(0)}),
            "Odd.initial.*'count'",
        ),
        (
            broadcast_walk(initial=lambda rng: {"position": torch.zeros(3, 2), "count": torch.zeros(1).long()}),
            "Odd.initial.*'count'",
        ),
    ],
)
def test_function_that_does_not_fit_raises_at_construction(func_env, match):
    if match is None:
        FunctionalEnv(func_env, 3).reset(seed=0)
    else:
        with pytest.raises((ValueError, TypeError), match=match):
            FunctionalEnv(func_env, 3)


def test_transition_may_return_fields_in_another_order():
    env = FunctionalEnv(walk(transition=lambda state, action, rng: dict(reversed(state.items()))), 2)
    env.step(env.reset(seed=0).set("action", torch.zeros(2, 1)))


class GlobalNumbers(Walk):
    def transition(self, state, action, rng, params=None):
        return {**super().transition(state, action, rng), "position": torch.rand(2)}


class BroadcastGlobalNumbers(BroadcastWalk):
    def initial(self, rng, params=None):
        return {**super().initial(rng), "position": torch.rand(*rng.env.shape, 2)}


class Branching(Walk):
    def reward(self, state, action, next_state, rng, params=None):
        return torch.zeros(()) if state["position"][0] > 0 else torch.ones(())


@pytest.mark.parametrize(
    ("func_env", "words"),
    [
        (GlobalNumbers, "GlobalNumbers.transition needs to draw from its rng, but got RuntimeError"),
        (BroadcastGlobalNumbers, "BroadcastGlobalNumbers.initial needs to draw from its rng, but drew from PyTorch's global"),
        (Branching, "Branching.reward needs tensor operators, torch.where instead of `if`, but got RuntimeError"),
    ],
)
def test_function_that_cannot_be_batched_raises_at_construction(func_env, words):
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=words):
        FunctionalEnv(func_env(), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"num_envs": 0}, "num_envs of at least 1, but got 0"),
        ({"num_envs": -1}, "num_envs of at least 1, but got -1"),
        ({"num_envs": True}, "num_envs of at least 1, but got True"),
        ({"num_envs": 2.0}, "num_envs of at least 1, but got 2.0"),
        ({"num_envs": 2, "max_episode_steps": 0}, "max_episode_steps of at least 1, but got 0"),
        ({"num_envs": 2, "max_episode_steps": -3}, "max_episode_steps of at least 1, but got -3"),
        ({"num_envs": 2, "max_episode_steps": 2.5}, "max_episode_steps of at least 1, but got 2.5"),
        ({"num_envs": 2, "first_index": -1}, "first_index of at least 0, but got -1"),
        ({"num_envs": 2, "first_index": 0.5}, "first_index of at least 0, but got 0.5"),
        ({"num_envs": 2, "device": "nope"}, "FunctionalEnv needs a torch.device or its name, but got 'nope'"),
        ({"num_envs": 2, "max_episode_steps": 1, "first_index": 3}, None),
    ],
)
def test_invalid_arguments_raise(arguments, match):
    if match is None:
        assert FunctionalEnv(Walk(), **arguments).num_envs == 2
    else:
        with pytest.raises((ValueError, TypeError), match=match):
            FunctionalEnv(Walk(), **arguments)


@pytest.mark.parametrize("func_env", [None, Walk, 3, object()], ids=repr)
def test_func_env_without_spaces_raises(func_env):
    with pytest.raises(TypeError, match="FunctionalEnv needs functions with observation_space and action_space, but got"):
        FunctionalEnv(func_env, 2)


@pytest.mark.parametrize(
    "action, error, match",
    [
        (torch.zeros(2), ValueError, r"an action of shape \(2, 1\)"),
        (torch.zeros(2, 1, dtype=torch.float64), TypeError, "dtype torch.float32"),
        (torch.zeros(1, 1), ValueError, r"an action of shape \(2, 1\)"),
        (None, ValueError, r'needs td\["action"\], but got a TensorDict with keys \[\]'),
    ],
)
def test_invalid_action_raises_and_changes_nothing(action, error, match):
    env = FunctionalEnv(Walk(), 2)
    env.reset(seed=0)
    before = buffers(env)
    with pytest.raises(error, match=match):
        env.step(TensorDict({} if action is None else {"action": action}, []))
    assert changed(env, before) == []


def test_invalid_seed_raises_and_changes_nothing():
    env = FunctionalEnv(Noisy(), 2)
    env.reset(seed=0)
    before = buffers(env)
    for seed in (-1, 1.5, True, 2**64, "0"):
        with pytest.raises(ValueError, match=r"reset needs a seed that is an integer in \[0, 2\*\*64\), but got"):
            env.reset(seed=seed)
    assert changed(env, before) == []


def test_invalid_mask_raises_and_changes_nothing():
    env = FunctionalEnv(Noisy(), 2)
    env.reset(seed=0)
    before = buffers(env)
    for mask in ([True, False], torch.ones(2), torch.ones(3, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"reset needs a mask of shape \(2,\) torch.bool on cpu, but got"):
            env.reset(seed=1, mask=mask)
    assert changed(env, before) == []


def test_step_and_partial_reset_before_reset_raise():
    env = FunctionalEnv(Walk(), 2)
    with pytest.raises(RuntimeError, match=r"Call reset\(\) before step\(\)"):
        env.step(TensorDict({"action": torch.zeros(2, 1)}, [2]))
    with pytest.raises(RuntimeError, match="needs a first reset of every env"):
        env.reset(mask=torch.tensor([True, False]))
