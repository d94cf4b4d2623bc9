"""The oracle of trainers' adapters: hand-computed episodes of a `ScriptedEnv`, stepped directly."""

import torch

from torchwrap.testing import ScriptedEnv


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
