"""examples/gym_pages.py: the wrappers of Gymnasium's tutorial pages match the pages' own."""

import functools

import gym_pages as pages
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import torchwrap as tw
from torchwrap.testing import ScriptedEnv, check_env, check_transform

# The wrappers of the pages, for a single env.


# Both, step by step.


def batch(singles, **arguments):
    makers = [lambda env=env: env for env in singles]
    vector_env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    return tw.from_gymnasium(vector_env, **arguments)


# The contract, and errors


class Reaching(ScriptedEnv):
    """Has Reacher's terms as info."""

    def _step(self, action):
        successor = super()._step(action)
        successor["info", "reward_dist"] = -successor["reward"]
        successor["info", "reward_ctrl"] = -action.square().sum(-1, keepdim=True)
        return successor


PARTS = {"agent": Box(0, 4, (2,), np.int64), "target": Box(0, 6, (2,), np.int64)}


@pytest.mark.full
def test_grid_world_keeps_the_contract():
    def make(num_envs, first_index):
        grids = [pages.GridWorld() for _ in range(num_envs)]
        return batch(grids, first_index=first_index)

    check_env(make)


GRID = functools.partial(ScriptedEnv, observation_space=Dict({**PARTS, "rest": Discrete(3)}))


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "make_env"),
    [
        (lambda: pages.DiscreteActions([np.ones(6), -np.ones(6), np.zeros(6)]), ScriptedEnv),
        (pages.RelativePosition, GRID),
        (lambda: pages.ClipReward(2, 3), ScriptedEnv),
        (lambda: pages.ReacherRewardWrapper(2, 0.5), Reaching),
    ],
    ids=["DiscreteActions", "RelativePosition", "ClipReward", "ReacherRewardWrapper"],
)
def test_wrapper_keeps_the_contract(make, make_env):
    check_transform(make, make_env)


def test_main_prints_the_effect_of_each_wrapper(capsys):
    pages.main()
    output = capsys.readouterr().out
    for words in (
        "Discrete(3), which reach the env as [-2.0, 0.0, 2.0]",
        "[[2, 1], [3, 4], [0, 1]] from [[4, 3], [2, 2], [4, 1]]: [[-2, -2], [1, 2], [-4, 0]]",
        "rewards: from -5 to -1",
        "<ReacherRewardWrapper(reward_dist_weight=1.0, reward_ctrl_weight=0.1)<Reacher-v5(",
        "terminal reward: 0.0",
    ):
        assert words in output
