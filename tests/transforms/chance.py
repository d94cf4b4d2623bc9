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
    # Ours a batch; theirs one value an env, dicts and tuples included.
    if isinstance(theirs[0], dict | tuple):
        parts = dict(enumerate(theirs[0])) if isinstance(theirs[0], tuple) else theirs[0]
        assert set(ours.keys()) == set(map(str, parts))
        for key in parts:
            assert_same(ours[str(key)], [value[key] for value in theirs])
        return
    ours, theirs = ours.numpy(), np.stack(theirs)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


def assert_agree(env, oracles, num_steps=25):
    # Ours against single envs with Gymnasium's wrapper, which are reset by hand where their episode ended.
    num_ended = 0
    assert env.single_observation_space == oracles[0].observation_space
    td = env.reset(seed=5)
    assert_same(td["observation"], [oracle.reset(seed=5 + i)[0] for i, oracle in enumerate(oracles)])
    for _ in range(num_steps):
        transition, td = env.step(td.set("action", env.sample_action()))
        steps = [oracle.step(0) for oracle in oracles]
        assert_same(transition["next", "observation"], [step[0] for step in steps])
        ended = [step[2] or step[3] for step in steps]
        begun = [oracle.reset()[0] if over else step[0] for oracle, step, over in zip(oracles, steps, ended, strict=True)]
        assert_same(td["observation"], begun)
        num_ended += sum(ended)
    assert num_ended > num_steps / 4
