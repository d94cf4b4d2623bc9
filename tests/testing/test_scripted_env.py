"""ScriptedEnv: values at the ends of what its integers hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from torchwrap.testing import ScriptedEnv

SPACES = [spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Box(0, 2**40, (3,), np.int64)]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("first_index", [0, 2**20, 2**22, 2**24 - 2])
def test_scripted_env_with_large_indices_gives_exact_observations(space, first_index):
    env = ScriptedEnv(2, episode_lengths=None, observation_space=space, first_index=first_index)
    env.reset(seed=0)
    for time in (1, 2):
        transition, _ = env.step(env.sample_action())
        expected = [[1000 * (first_index + i) + 10 * j + time for j in range(3)] for i in range(2)]
        assert transition["next", "observation"].tolist() == expected


@pytest.mark.parametrize("index", [0, 1, 5])
def test_scripted_env_takes_lengths_and_endings_in_turn(index):
    env = ScriptedEnv(1, (1,), episode_lengths=(5, 2), first_index=index)
    td, seen = env.reset(seed=0), []
    for _ in range(12):
        transition, td = env.step(td.set("action", env.sample_action()))
        following = transition["next"]
        if following["done"]:
            seen.append((following["reward"].item(), following["terminated"].item(), following["truncated"].item()))
    endings = [(True, False), (False, True), (True, True)]
    assert seen == [((5, 2)[(index + e) % 2], *endings[(index + e) % 3]) for e in range(len(seen))] and len(seen) >= 3
