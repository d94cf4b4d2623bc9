"""Our side: seven transforms on a ScriptedEnv, eager."""

from __future__ import annotations

import torchwrap as tw
from torchwrap import transforms as T

from . import script
from .measure import Step


def bare(num_envs: int) -> Step:
    return _stepper(script.scripted(num_envs))


def whole(num_envs: int) -> Step:
    env = tw.TransformedEnv(
        script.scripted(num_envs),
        T.ClipAction(),
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.ClipObservation(-10, 10),
        T.FrameStackObservation(4),
        T.NormalizeReward(),
        T.ClipReward(-10, 10),
    )
    return _stepper(env)


def _stepper(env: tw.Env) -> Step:
    action = script.actions(env.num_envs)
    td = env.reset(seed=0)
    env.unwrapped.elapsed.copy_(script.elapsed(env.num_envs))

    def step():
        nonlocal td
        transition, td = env.step(td.set("action", action))
        return transition["next", "done"]

    return step
