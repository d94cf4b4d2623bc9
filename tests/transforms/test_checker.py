from __future__ import annotations

import functools

import pytest
import torch
from catalogue import DICT
from gymnasium import spaces

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Wrong(ScriptedEnv):
    """Writes something wrong into env 1 at step 3, or at its second reset."""

    def __init__(self, key, value, when="step", **arguments):
        super().__init__(3, episode_lengths=4, **arguments)
        self.key, self.value, self.when, self.resets = key, value, when, 0

    def _step(self, td):
        td = super()._step(td)
        if self.when == "step" and self.elapsed[1] == 3:
            td[self.key][1] = self.value
        return td

    def _reset(self, mask):
        td = super()._reset(mask)
        self.resets += 1
        if self.when == "reset" and self.resets == 2:
            td[self.key][1] = self.value
        return td


BOX = {"observation_space": spaces.Box(0, 100, (2,))}
CASES = [
    ("observation", 100.5, "step", BOX, r"observations in Box\(0.0, 100.0, \(2,\), float32\), but got 100.5 in env 1"),
    ("observation", -1.0, "reset", BOX, r"observations in Box\(0.0, 100.0, .*, but got -1.0 in env 1"),
    ("observation", torch.nan, "step", {}, "observations in .*, but got nan in env 1"),
    ("observation", torch.inf, "reset", {}, "observations in .*, but got inf in env 1"),
    (
        "observation",
        7,
        "step",
        {"observation_space": spaces.Discrete(3)},
        r"observations in Discrete\(3\), but got 7 in env 1",
    ),
    (
        ("observation", "position"),
        0,
        "step",
        {"observation_space": DICT},
        r"observations\['position'\] in Disc.*, but got 0 in env 1",
    ),
    ("reward", torch.nan, "step", {}, "rewards in .*, but got nan in env 1"),
]


@pytest.mark.parametrize(("key", "value", "when", "arguments", "words"), CASES)
def test_what_is_wrong_is_found_where_it_happens(key, value, when, arguments, words):
    env = tw.TransformedEnv(Wrong(key, value, when, **arguments), T.PassiveEnvChecker())
    td = env.reset(seed=0)
    for _ in range(2 if when == "step" else 3):
        _, td = env.step(td.set("action", env.sample_action()))
    with pytest.raises(ValueError, match=f"PassiveEnvChecker needs {words}"):
        env.step(td.set("action", env.sample_action()))


@pytest.mark.parametrize("value", [torch.nan, 1.5, -torch.inf])
def test_actions_are_checked_on_their_way_in(value):
    env = tw.TransformedEnv(ScriptedEnv(2), T.PassiveEnvChecker())
    td = env.reset()
    action = torch.zeros(2, 6)
    action[1, 3] = value
    with pytest.raises(ValueError, match=r"PassiveEnvChecker needs actions in Box\(-1.0, 1.0, .*, but got .* in env 1"):
        env.step(td.set("action", action))
    clipped = tw.TransformedEnv(ScriptedEnv(2), T.PassiveEnvChecker(), T.ClipAction())
    clipped.step(clipped.reset().set("action", action.nan_to_num()))


def test_a_transform_that_breaks_its_word_is_found_by_a_checker_above_it():
    env = tw.TransformedEnv(ScriptedEnv(2), T.ClipObservation(-5, 5), T.TransformObservation(torch.log), T.PassiveEnvChecker())
    with pytest.raises(ValueError, match=r"PassiveEnvChecker needs observations in .*, but got -inf in env 0"):
        env.reset(seed=0)


@pytest.mark.parametrize("make", [functools.partial(tw.make, "CartPole-v1"), functools.partial(tw.make, "Pendulum-v1")])
def test_real_envs_pass(make):
    env = tw.TransformedEnv(make(4), T.PassiveEnvChecker())
    tw.rollout(env, None, 60)


def test_a_graph_of_it_is_refused_by_name():
    env = tw.TransformedEnv(ScriptedEnv(2), T.PassiveEnvChecker())
    with pytest.raises(ValueError, match=r"looks at on the host, but got PassiveEnvChecker\.action"):
        tw.compile(env)
