"""An oracle's env: random observations of any space, and episodes that end in every way."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import torchwrap as tw
from torchwrap.interop.gymnasium import from_gymnasium


class Chance(gymnasium.Env):
    # Random observations; episodes of 1 to 4 steps that terminate, are truncated, or both.
    def __init__(self, space):
        self.observation_space, self.action_space = copy.deepcopy(space), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left, self.way = (int(number) for number in self.np_random.integers([1, 0], [5, 3]))
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        ended = self.left == 0
        return self.observation_space.sample(), 0.0, ended and self.way != 1, ended and self.way != 0, {}


def make(space, *transforms, num_envs=3):
    vector_env = SyncVectorEnv([lambda: Chance(space)] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    return tw.TransformedEnv(from_gymnasium(vector_env), *transforms)


def assert_same(ours, theirs):
    ours, theirs = ours.numpy(), np.stack(theirs)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
