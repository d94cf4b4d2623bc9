"""Habits of newcomers: each raises, changes nothing, and its message shows a line that works."""

import collections.abc
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import assert_same, buffers
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


@pytest.fixture
def script():
    """The variables of a newcomer's script."""
    env = tw.make("CartPole-v1", 2)
    collect = tw.Collector(env, None, 3)
    return SimpleNamespace(
        env=env,
        td=env.reset(seed=0),
        network=nn.Linear(4, 2),
        collect=collect,
        max_episode_steps=3,
    )


def refused(habit, error, name, script):
    """The message of a habit that must raise and leave the env as it was."""
    state = buffers(script.env)
    with pytest.raises(error, match=name) as raised:
        habit(script)
    assert type(raised.value) is error
    assert_same(buffers(script.env), state)
    return str(raised.value)


def follow(message, script):
    """Run the lines of code in a message, and return the value of the last one."""
    lines = re.findall(r"`(.+?)`", message)
    assert lines, message
    names = {**vars(tw), "T": T, "torch": torch, **vars(script)}
    value = None
    for line in lines:
        try:
            value = eval(line, names)
        except SyntaxError:
            exec(line, names)
    for name in ("env", "td", "transition", "data"):
        setattr(script, name, names.get(name))
    return value


# Making envs and transforms.


@pytest.mark.parametrize("make", [tw.TransformedEnv, lambda _, kind: tw.Compose([kind])])
def test_class_in_place_of_a_transform_raises(make, script):
    refused(lambda s: make(s.env, T.TimeLimit), TypeError, "not its class", script)


def test_env_given_to_make_raises_and_names_the_id(script):
    refused(lambda s: tw.make(s.env), TypeError, "id", script)


# Policies.


def return_nothing(s):
    return tw.rollout(s.env, lambda td: None, 3)


def return_a_tuple(s):
    return tw.rollout(s.env, lambda td: (td, 0), 3)


@pytest.mark.parametrize("habit", [return_nothing, return_a_tuple])
def test_policy_without_an_action_raises(habit, script):
    refused(habit, TypeError, "policy", script)


def test_policy_that_raises_for_a_reason_of_its_own_raises_that():
    with pytest.raises(TypeError, match=r"^unsupported operand type\(s\) for \+: 'int' and 'str'$"):
        tw.rollout(ScriptedEnv(2), lambda td: 1 + "1", 3)


# Results of steps and resets, mixed up.


def step(script):
    return script.env.step(script.td.set("action", script.env.sample_action()))


def swapped(script):
    script.td, _ = step(script)


def dropped(script):
    step(script)  # `transition, _ = env.step(td)`


@pytest.mark.parametrize(
    ("slip", "error"),
    [(swapped, ValueError), (dropped, ValueError)],
)
def test_step_of_another_result_raises_and_shows_the_step(slip, error, script):
    slip(script)
    message = refused(lambda s: s.env.step(s.td), error, "env.step", script)
    script.td = script.env.reset()
    script.td["action"] = script.env.sample_action()
    follow(message, script)
    assert "next" in script.transition
    assert set(script.td.keys()) == {"observation"}


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


def test_collector_starts_from_a_restored_root():
    env = ScriptedEnv(2)
    td = env.reset()
    snapshot = env.snapshot()
    env.step(env.sample_action())
    env.restore(snapshot)
    data = tw.rollout(env, None, 3)
    assert_same(data[:, 0].select("observation"), td.select("observation"))


# Further habits.


class Forgetful(T.RewardTransform):
    def reward(self, reward):
        reward.abs()  # without `return`


class Silent(T.Transform):
    def setup(self, signature):
        signature.replace()  # without `return`


def reset_with_flags(env):
    return env.reset(mask=torch.ones(2, 1, dtype=torch.bool))


def a_list_of_transforms(env):
    return tw.TransformedEnv(env, [T.TimeLimit(3)])


def a_collector_of_a_vector_env(env):
    return tw.Collector(tw.to_gymnasium(env), None, 1)


def setup_without_return(env):
    return tw.TransformedEnv(env, Silent())


def hook_without_return(env):
    return tw.rollout(tw.TransformedEnv(env, Forgetful()), None, 1)


def a_function_without_its_space(env):
    halve = T.TransformObservation(lambda obs: obs[:, :2])
    return tw.TransformedEnv(env, halve)


def metrics_of_a_missing_info(env):
    statistics = T.RecordEpisodeStatistics(metrics={"wins": "max"})
    return tw.rollout(tw.TransformedEnv(env, statistics), None, 1)


@pytest.mark.parametrize(
    ("habit", "name"),
    [
        (reset_with_flags, r"mask\.squeeze\(-1\)"),
        (a_list_of_transforms, "not its class or a list"),
        (a_collector_of_a_vector_env, r"\.env"),
        (setup_without_return, "setup"),
        (hook_without_return, "reward"),
        (a_function_without_its_space, "observation"),
        (metrics_of_a_missing_info, "wins"),
    ],
)
def test_habit_raises_and_names_its_remedy(habit, name):
    with pytest.raises((TypeError, ValueError), match=name):
        habit(tw.make("CartPole-v1", 2))


def test_unregistered_id_raises_and_names_the_import(monkeypatch, tmp_path, registry):
    entry_point = "gymnasium.envs.classic_control:CartPoleEnv"
    module = f'import gymnasium\ngymnasium.register("Maze/Walk-v0", "{entry_point}")\n'
    (tmp_path / "maze_package.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="module:"):
        tw.make("Maze/Walk-v0")
    assert tw.make("maze_package:Maze/Walk-v0").spec.id == "Maze/Walk-v0"


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
