"""The oracle of trainers' adapters: hand-computed episodes of a `ScriptedEnv`, stepped directly."""

import torch

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

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
