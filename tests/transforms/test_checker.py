"""PassiveEnvChecker on envs with one error each."""

import pytest
import torch
from catalogue import DICT
from gymnasium import spaces
from oracles import scripted, step

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Wrong(ScriptedEnv):
    """Writes a wrong value into env 1 at step 3, or at its second reset."""

    def __init__(self, key, value, when="step", **arguments):
        super().__init__(3, episode_lengths=4, **arguments)
        self.key, self.value, self.when, self.resets = key, value, when, 0

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


BOX = {"observation_space": spaces.Box(0, 100, (2,))}
COUNT, TREE = {"observation_space": spaces.Discrete(3)}, {"observation_space": DICT}
CASES = [
    (
        "observation",
        100.5,
        "step",
        BOX,
        r"observations in Box\(0.0, 100.0, \(2,\), float32\), but got 100.5 in env 1",
    ),
    (
        "observation",
        -1.0,
        "reset",
        BOX,
        r"observations in Box\(0.0, 100.0, .*, but got -1.0 in env 1",
    ),
    ("observation", torch.nan, "step", {}, "observations in .*, but got nan in env 1"),
    ("observation", torch.inf, "reset", {}, "observations in .*, but got inf in env 1"),
    ("observation", 7, "step", COUNT, r"observations in Discrete\(3\), but got 7 in env 1"),
    (
        ("observation", "position"),
        0,
        "step",
        TREE,
        r"observations\['position'\] in Disc.*, but got 0 in env 1",
    ),
    ("reward", torch.nan, "step", {}, "rewards in .*, but got nan in env 1"),
]


def test_checker_wrong_observations_and_rewards_raise_in_the_step_they_occur():
    for key, value, when, arguments, words in CASES:
        env = tw.TransformedEnv(Wrong(key, value, when, **arguments), T.PassiveEnvChecker())
        _, td = step(env, env.reset(seed=0), 2 if when == "step" else 3)
        with pytest.raises(ValueError, match=f"PassiveEnvChecker needs {words}"):
            step(env, td)
            pytest.fail(f"{key} {value} is accepted")


def test_checker_wrong_actions_raise():
    for value in (torch.nan, 1.5, -torch.inf):
        env, clipped = (
            scripted(T.PassiveEnvChecker(), *above, num_envs=2) for above in ([], [T.ClipAction()])
        )
        action = torch.zeros(2, 6)
        action[1, 3] = value
        with pytest.raises(
            ValueError,
            match=r"PassiveEnvChecker needs actions in Box\(-1.0, 1.0, .*, but got .* in env 1",
        ):
            env.step(env.reset().set("action", action))
            pytest.fail(f"{value} is accepted")
        clipped.step(clipped.reset().set("action", action.nan_to_num()))


def test_checker_over_a_transform_outside_its_space_raises():
    with pytest.raises(
        ValueError, match=r"PassiveEnvChecker needs observations in .*, but got -inf in env 0"
    ):
        scripted(
            T.ClipObservation(-5, 5), T.TransformObservation(torch.log), T.PassiveEnvChecker()
        ).reset(seed=0)
