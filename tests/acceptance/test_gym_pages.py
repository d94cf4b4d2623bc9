"""examples/gym_pages.py: the wrappers of Gymnasium's tutorial pages match the pages' own."""

import functools

import gym_pages as pages
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import numpy_2_promotion

import torchwrap as tw
from torchwrap.testing import ScriptedEnv, check_env, check_transform

LIMITS = (11, 7, 4, 9)  # time limits by env, so that ends are staggered


# The wrappers of the pages, for a single env.


class DiscreteActions(gymnasium.ActionWrapper):
    def __init__(self, env, disc_to_cont):
        super().__init__(env)
        self.disc_to_cont = disc_to_cont
        self.action_space = Discrete(len(disc_to_cont))

    def action(self, action):
        return self.disc_to_cont[action]


class RelativePosition(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = Box(-np.inf, np.inf, (2,))

    def observation(self, observation):
        return observation["target"] - observation["agent"]


class ClipReward(gymnasium.RewardWrapper):
    def __init__(self, env, min_reward, max_reward):
        super().__init__(env)
        self.min_reward = min_reward
        self.max_reward = max_reward

    def reward(self, reward):
        return np.clip(reward, self.min_reward, self.max_reward)


class ReacherRewardWrapper(gymnasium.Wrapper):
    def __init__(self, env, reward_dist_weight, reward_ctrl_weight):
        super().__init__(env)
        self.reward_dist_weight = reward_dist_weight
        self.reward_ctrl_weight = reward_ctrl_weight

    def step(self, action):
        with numpy_2_promotion():  # with a float32, the product is a float32
            observation, _, terminated, truncated, info = self.env.step(action)
            distance = self.reward_dist_weight * info["reward_dist"]
            control = self.reward_ctrl_weight * info["reward_ctrl"]
            return observation, distance + control, terminated, truncated, info


# Both, step by step.


class Float32Info(gymnasium.Wrapper):
    """Info in float32, which is torchwrap's default."""

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {name: np.float32(value) for name, value in info.items()}


def single_envs(id):
    """One env per time limit."""
    return [gymnasium.make(id, max_episode_steps=limit) for limit in LIMITS]


def batch(singles, **arguments):
    makers = [lambda env=env: env for env in singles]
    vector_env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    return tw.from_gymnasium(vector_env, **arguments)


def assert_equal_to_singles(env, singles, num_steps=60):
    """Steps a batch and single envs with the same random actions.

    Returns the successors of the batch, `(num_envs, num_steps)`.
    """
    td = env.reset(seed=3)
    for row, single in enumerate(singles):
        observation, _ = single.reset(seed=3 + row)
        assert_equal_arrays(td["observation"][row], observation)
    successors = []
    for _ in range(num_steps):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        successor = transition["next"]
        successors.append(successor)
        for row, single in enumerate(singles):
            observation, reward, terminated, truncated, _ = single.step(action[row].numpy())
            assert_equal_arrays(successor["observation"][row], observation)
            assert_equal_arrays(successor["reward"][row, 0], np.float32(reward))
            assert successor["terminated"][row] == terminated
            assert successor["truncated"][row] == truncated
            if terminated or truncated:
                observation, _ = single.reset()
            assert_equal_arrays(td["observation"][row], observation)
    return torch.stack(successors, 1)


def assert_equal_arrays(tensor, array):
    np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def assert_ends_are_staggered(data):
    done = data["done"].squeeze(-1)
    assert len(done.unique(dim=0)) == len(done)
    assert (done.sum(1) > 3).all()


@pytest.mark.parametrize(
    ("env_id", "actions"),
    [
        ("Pendulum-v1", np.float32([[-2], [0], [1.5]])),
        ("Reacher-v5", np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])),  # the page's integers
    ],
    ids=["Pendulum", "Reacher"],
)
def test_discrete_actions_match_the_page(env_id, actions):
    env = tw.TransformedEnv(batch(single_envs(env_id)), pages.DiscreteActions(actions))
    assert env.single_action_space == Discrete(len(actions))
    singles = [DiscreteActions(single, actions) for single in single_envs(env_id)]
    assert_ends_are_staggered(assert_equal_to_singles(env, singles))


def test_relative_position_matches_the_page():
    def grids():
        return [gymnasium.wrappers.TimeLimit(pages.GridWorld(), limit) for limit in LIMITS]

    env = tw.TransformedEnv(batch(grids()), pages.RelativePosition())
    assert env.single_observation_space == Box(-4, 4, (2,), np.int64)
    data = assert_equal_to_singles(env, [RelativePosition(grid) for grid in grids()])
    assert_ends_are_staggered(data)
    assert data["terminated"].any()
    assert data["truncated"].any()
    assert len(data["observation"].view(-1, 2).unique(dim=0)) > 20


def test_clip_reward_matches_the_page():
    env = tw.TransformedEnv(batch(single_envs("Pendulum-v1")), pages.ClipReward(-5.1, -0.7))
    singles = [ClipReward(single, -5.1, -0.7) for single in single_envs("Pendulum-v1")]
    data = assert_equal_to_singles(env, singles)
    assert_ends_are_staggered(data)
    low, high = data["reward"].aminmax()
    assert (low, high) == (np.float32(-5.1), np.float32(-0.7))
    assert len(data["reward"].unique()) > 50


def test_reacher_reward_matches_the_page():
    env = tw.make("Reacher-v5", 3, info_keys=["reward_dist", "reward_ctrl"])
    env = tw.TransformedEnv(env, pages.ReacherRewardWrapper(0.7, 0.3))
    singles = []
    for _ in range(3):
        single = Float32Info(gymnasium.make("Reacher-v5"))
        singles.append(ReacherRewardWrapper(single, 0.7, 0.3))
    data = assert_equal_to_singles(env, singles, 104)
    assert data["done"].squeeze(-1).nonzero()[:, 1].tolist() == [49, 99] * 3


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


@pytest.mark.parametrize(
    "actions",
    [[], [[0.0] * 6, [0.0]], [[0.0] * 6, [2.0] * 6]],
    ids=["none", "another shape", "out of bounds"],
)
def test_discrete_actions_outside_the_space_are_refused(actions):
    with pytest.raises(ValueError, match="disc_to_cont"):
        tw.TransformedEnv(ScriptedEnv(2), pages.DiscreteActions(actions))


def test_discrete_actions_of_a_discrete_space_are_refused():
    with pytest.raises(TypeError, match="action space"):
        env = ScriptedEnv(2, action_space=Discrete(2))
        tw.TransformedEnv(env, pages.DiscreteActions([[0.0] * 6]))


@pytest.mark.parametrize(
    "space",
    [
        pytest.param(Box(0, 1, (2,)), id="Box"),
        pytest.param(Dict({**PARTS, "agent": Discrete(3)}), id="Discrete"),
        pytest.param(Dict({**PARTS, "agent": Box(0, 4, (3,), np.int64)}), id="two shapes"),
        pytest.param(Dict(dict.fromkeys(PARTS, Box(0, 4, (2,), np.uint8))), id="unsigned"),
    ],
)
def test_relative_position_in_an_unfit_space_is_refused(space):
    with pytest.raises(TypeError, match="agent"):
        tw.TransformedEnv(ScriptedEnv(2, observation_space=space), pages.RelativePosition())


def test_clip_reward_with_crossed_bounds_is_refused():
    with pytest.raises(ValueError, match="min_reward"):
        pages.ClipReward(1, 0)


def test_reacher_reward_without_its_infos_is_refused():
    env = tw.make("Reacher-v5", 2, info_keys=["reward_dist"])
    env = tw.TransformedEnv(env, pages.ReacherRewardWrapper(1, 1))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="info_keys"):
        env.step(env.sample_action())


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
