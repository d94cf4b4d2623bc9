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


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
def test_auto_reset_step_equals_values_by_hand(ending):
    # Episode e of env i has (2, 1, 3)[(i + e) % 3] steps; observations are 1000 * i + step.
    env = ScriptedEnv(3, (1,), episode_lengths=(2, 1, 3), ending=ending)
    env.reset()
    for new, reward, done, terminal in [
        ([1, 1000, 2001], [1, 1, 1], [False, True, False], [1, 1001, 2001]),
        ([0, 1001, 2002], [2, 1, 2], [True, False, False], [2, 1001, 2002]),
        ([0, 1002, 2000], [1, 2, 3], [True, False, True], [1, 1002, 2003]),
        ([1, 1000, 2001], [1, 3, 1], [False, True, False], [1, 1003, 2001]),
        ([2, 1001, 2000], [2, 1, 2], [False, False, True], [2, 1001, 2002]),
    ]:
        action = env.sample_action()
        new_obs, terminal_reward, terminal_done, info = pages.auto_reset_step(env, action)
        assert new_obs.flatten().tolist() == new
        assert terminal_reward.flatten().tolist() == reward
        assert terminal_done.flatten().tolist() == done
        assert info["terminal_observation"].flatten().tolist() == terminal
        assert info["terminal_info"]["action"].equal(action)
