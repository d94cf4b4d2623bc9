"""The oracle of trainers' adapters: hand-computed episodes of a `ScriptedEnv`, stepped directly."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from processes import Processes

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.tensors import from_functions
from torchwrap.testing import ScriptedEnv

VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
DIVERGED = {"NaN": torch.nan, "infinite": torch.inf}


class Diverge(T.Transform):
    """A simulator that blows up where an episode terminates: its final observation is a value."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def step(self, td):
        observation = torch.where(td["terminated"], self.value, td["observation"])
        return td.set("observation", observation)


def diverging(value, *args, **kwargs):
    return tw.TransformedEnv(ScriptedEnv(*args, **kwargs), Diverge(value))


def staggered():
    """Four envs whose episodes end by all three causes, and by none in some steps."""
    return ScriptedEnv(4, (2,), (5, 3, 1, 4))


def staggered_steps(num_steps=40):
    """Yields an action, its successor, the next root, and a mask of time-outs, from seed 0."""
    env = staggered()
    td = env.reset(seed=0)
    causes = set()
    for _ in range(num_steps):
        transition, td = env.step(td.set("action", env.sample_action()))
        successor = transition["next"]
        flags = torch.cat([successor["terminated"], successor["truncated"]], 1)
        causes |= {tuple(row) for row in flags.tolist()}
        time_outs = flags[:, 1] & ~flags[:, 0]
        yield transition["action"], successor, td, time_outs
    assert len(causes) == 4


def normalized(num_envs, first_index=0):
    base = ScriptedEnv(num_envs, (3,), (5, 2), first_index=first_index)
    return tw.TransformedEnv(base, T.NormalizeObservation())


def moments(env):
    """Count, mean and variance of an env's `NormalizeObservation`."""
    statistics = env.transforms[0].statistics
    return [statistics.count.tolist(), statistics.mean.tolist(), statistics.var.tolist()]


def moments_after(num_envs, num_steps):
    """The oracle of statistics on several ranks: one process that steps all their envs."""
    env = normalized(num_envs)
    env.reset(seed=0)
    for _ in range(num_steps):
        env.step(torch.zeros(num_envs, 6))
    return moments(env)


def assert_two_ranks_share_statistics(moments_of_a_rank, *arguments):
    """Two processes with three envs each have the moments of one process with all six."""
    processes = Processes(2)
    try:
        ranks = processes.run(2, moments_of_a_rank, *arguments)
    finally:
        processes.close()
    assert ranks[0] == ranks[1]
    for given, expected in zip(ranks[0], moments_after(6, 16), strict=True):
        assert given == pytest.approx(expected)


def simulator(key="log"):
    """Two envs with episodes of 2 steps. Like Isaac Lab, a reset replaces a dict of logs.

    It holds a number for each reset, in a scalar tensor, a float and an array.
    """
    extras = {}
    elapsed = torch.zeros(2, dtype=torch.int64)
    resets = 0

    def reset(mask):
        nonlocal resets
        elapsed[mask] = 0
        extras[key] = {
            "Curriculum/terrain_levels": torch.tensor(float(resets)),
            "Episode_Reward/alive": 2.0 * resets,
            "Metrics/error": np.float32(3 * resets),
        }
        resets += 1
        return torch.zeros(2, 3)

    def step(action):
        elapsed.add_(1)
        return torch.zeros(2, 3), torch.ones(2), elapsed >= 2, torch.zeros(2), extras

    actions = Box(-1, 1, (6,), np.float32)
    return from_functions(reset, step, 2, VECTOR, actions, seed=lambda seed: None)


# The last reset is the first one until the second step, which ends both episodes.
LOGGED = {
    "Curriculum/terrain_levels": [0, 1, 1, 2],
    "Episode_Reward/alive": [0, 2, 2, 4],
    "Metrics/error": [0, 3, 3, 6],
}
