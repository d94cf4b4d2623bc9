"""Stacks of transforms on real envs match Gymnasium's wrappers of the same names, step by step."""

import ale_py
import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from helpers import mostly_full
from single_envs import check_transitions

import torchwrap as tw
from torchwrap import transforms as T

gymnasium.register_envs(ale_py)

# Gymnasium warns about bounds that it rounds to the space's dtype.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
PONG = {"frameskip": 4, "repeat_action_probability": 0.0}  # deterministic
STACK = "FrameStackObservation"
STACKS = {  # the limit and other arguments of an env, and transforms, innermost first
    "CartPole-v1": (
        {"max_episode_steps": 15},
        [("TimeLimit", 9), ("TimeAwareObservation",), ("DelayObservation", 1), (STACK, 3)],
    ),
    "Pendulum-v1": (
        {"max_episode_steps": 7},
        [("DiscretizeAction", 4), ("ClipReward", -0.1, 0.5)],
    ),
    "Reacher-v5": (
        {"max_episode_steps": 5},
        [("DtypeObservation", np.float32), ("RescaleAction", -1, 5), ("ClipAction",)],
    ),
    "ALE/Pong-v5": (
        {"max_episode_steps": 6, **PONG},
        [("GrayscaleObservation",), ("ResizeObservation", (84, 84)), (STACK, 4)],
    ),
}


@pytest.mark.parametrize("id", mostly_full(STACKS, "CartPole-v1", "Pendulum-v1"))
def test_stack_on_a_real_env_matches_gymnasiums_wrappers(id):
    arguments, stack = STACKS[id]

    def make():
        env = gymnasium.make(id, **arguments)
        for name, *given in stack:
            env = getattr(wrappers, name)(env, *given)
        return env

    env = tw.make(id, 3, backend="gymnasium", **arguments)
    for name, *given in stack:
        env = tw.TransformedEnv(env, getattr(T, name)(*given))
    assert env.single_observation_space == make().observation_space
    assert check_transitions(env, [make] * 3, 21) >= 6
