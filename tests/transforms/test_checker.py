"""PassiveEnvChecker on envs with one error each."""

import pytest
import torch
from catalogue import DICT
from gymnasium.spaces import Box, Discrete
from oracles import scripted, step

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Wrong(ScriptedEnv):
    """Writes a wrong value into env 1 at step 3, or at its second reset."""

    def __init__(self, key, value, when, space=None):
        super().__init__(3, episode_lengths=4, observation_space=space)
        self.key = key
        self.value = value
        self.when = when
        self.resets = 0

    def _step(self, action):
        td = super()._step(action)
        if self.when == "step" and self.elapsed[1] == 3:
            td[self.key][1] = self.value
        return td

    def _reset(self, mask, options=None):
        td = super()._reset(mask)
        self.resets += 1
        if self.when == "reset" and self.resets == 2:
            td[self.key][1] = self.value
        return td


BOX = Box(0, 100, (2,))
FAULTS = [
    ("observation", 100.5, "step", BOX),
    ("observation", -1.0, "reset", BOX),
    ("observation", torch.nan, "step", None),
    ("observation", torch.inf, "reset", None),
    ("observation", 7, "step", Discrete(3)),
    (("observation", "position"), 0, "step", DICT),
    ("reward", torch.nan, "step", None),
]


@pytest.mark.parametrize(
    ("key", "value", "when", "space"),
    FAULTS,
    ids=str,
)
def test_checker_raises_in_the_step_or_reset_with_a_wrong_value(key, value, when, space):
    env = tw.TransformedEnv(
        Wrong(key, value, when, space),
        T.PassiveEnvChecker(),
    )
    _, td = step(
        env,
        env.reset(seed=0),
        2 if when == "step" else 3,
    )
    name = key if isinstance(key, str) else r"observation\['position'\]"
    with pytest.raises(ValueError, match=f"{name} .*{value} in env 1"):
        step(env, td)


@pytest.mark.parametrize(
    "value",
    [torch.nan, 1.5, -torch.inf],
)
def test_checker_raises_for_a_wrong_action(value):
    env = scripted(T.PassiveEnvChecker())
    action = torch.zeros(3, 6)
    action[1, 3] = value
    with pytest.raises(ValueError, match=r"action .* in env 1"):
        env.step(env.reset().set("action", action))


def test_checker_accepts_an_action_that_is_clipped_below():
    env = scripted(T.PassiveEnvChecker(), T.ClipAction())
    env.step(env.reset().set("action", torch.full((3, 6), 1.5)))


def test_checker_over_a_transform_outside_its_space_raises():
    logarithm = T.TransformObservation(torch.log)
    env = scripted(
        T.ClipObservation(-5, 5),
        logarithm,
        T.PassiveEnvChecker(),
    )
    with pytest.raises(ValueError, match=r"observation .*-inf in env 0"):
        env.reset(seed=0)
