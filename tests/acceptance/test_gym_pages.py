"""examples/gym_pages.py: the wrappers of Gymnasium's tutorial pages match the pages' own."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import load_example, numpy_2_promotion

import torchwrap as tw
import torchwrap.testing
from torchwrap.testing import ScriptedEnv, check_env, check_transform

LIMITS = (11, 7, 4, 9)  # of the length of an episode, by env, so that ends are staggered


@pytest.fixture(scope="module")
def pages():
    return load_example("gym_pages")


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
            distance, control = (
                self.reward_dist_weight * info["reward_dist"],
                self.reward_ctrl_weight * info["reward_ctrl"],
            )
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
    vector_env = SyncVectorEnv(
        [lambda env=env: env for env in singles], autoreset_mode=AutoresetMode.DISABLED
    )
    return tw.from_gymnasium(vector_env, **arguments)


def assert_equal_to_singles(env, singles, num_steps=60):
    """Steps a batch and single envs with the same random actions, and asserts that all values are equal.

    Returns the successors of the batch, `(num_envs, num_steps)`.
    """
    td = env.reset(seed=3)
    for row, single in enumerate(singles):
        assert_equal_arrays(td["observation"][row], single.reset(seed=3 + row)[0])
    transitions = []
    for _ in range(num_steps):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        after = transition["next"]
        transitions.append(after)
        for row, single in enumerate(singles):
            given = action[row].numpy() if action.dim() > 1 else action[row].item()
            observation, reward, terminated, truncated, _ = single.step(given)
            assert_equal_arrays(after["observation"][row], observation)
            assert_equal_arrays(after["reward"][row, 0], np.float32(reward))
            assert (after["terminated"][row].item(), after["truncated"][row].item()) == (
                terminated,
                truncated,
            )
            if terminated or truncated:
                observation, _ = single.reset()
            assert_equal_arrays(td["observation"][row], observation)
    return torch.stack(transitions, 1)


def assert_equal_arrays(tensor, array):
    assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)


def ends_are_staggered(data):
    ends = [tuple(row.nonzero().flatten().tolist()) for row in data["done"].squeeze(-1)]
    return len(set(ends)) == len(ends) and all(len(row) > 3 for row in ends)


def test_discrete_actions_match_the_page(pages):
    for id, actions in (
        ("Pendulum-v1", [np.float32([-2]), np.float32([0]), np.float32([1.5])]),
        (
            "Reacher-v5",
            [np.array([1, 0]), np.array([-1, 0]), np.array([0, 1]), np.array([0, -1])],
        ),  # the page's integers
    ):
        env = tw.TransformedEnv(batch(single_envs(id)), pages.DiscreteActions(actions))
        assert env.single_action_space == Discrete(len(actions))
        assert ends_are_staggered(
            assert_equal_to_singles(
                env, [DiscreteActions(single, actions) for single in single_envs(id)]
            )
        )


def test_relative_position_matches_the_page(pages):
    def grids():
        return [gymnasium.wrappers.TimeLimit(pages.GridWorld(), limit) for limit in LIMITS]

    env = tw.TransformedEnv(batch(grids()), pages.RelativePosition())
    assert env.single_observation_space == Box(-4, 4, (2,), np.int64)
    data = assert_equal_to_singles(env, [RelativePosition(grid) for grid in grids()])
    assert ends_are_staggered(data) and data["terminated"].any() and data["truncated"].any()
    assert len(data["observation"].view(-1, 2).unique(dim=0)) > 20


def test_clip_reward_matches_the_page(pages):
    env = tw.TransformedEnv(batch(single_envs("Pendulum-v1")), pages.ClipReward(-5.1, -0.7))
    data = assert_equal_to_singles(
        env, [ClipReward(single, -5.1, -0.7) for single in single_envs("Pendulum-v1")]
    )
    low, high = np.float32([-5.1, -0.7])
    assert (
        ends_are_staggered(data)
        and data["reward"].aminmax() == (low, high)
        and len(data["reward"].unique()) > 50
    )


def test_reacher_reward_in_float32_matches_the_page(pages):
    env = tw.make("Reacher-v5", 3, info_keys=["reward_dist", "reward_ctrl"])
    singles = [Float32Info(gymnasium.make("Reacher-v5")) for _ in range(3)]
    env = tw.TransformedEnv(env, pages.ReacherRewardWrapper(0.7, 0.3))
    data = assert_equal_to_singles(
        env, [ReacherRewardWrapper(single, 0.7, 0.3) for single in singles], 104
    )
    assert data["done"].squeeze(-1).nonzero()[:, 1].tolist() == [49, 99] * 3


# The contract, and errors.


class Reaching(ScriptedEnv):
    """Its info has Reacher's terms."""

    def _step(self, action):
        after = super()._step(action)
        after["info"].set("reward_dist", -after["reward"]).set(
            "reward_ctrl", -action.square().sum(-1, keepdim=True)
        )
        return after


PARTS = {"agent": Box(0, 4, (2,), np.int64), "target": Box(0, 6, (2,), np.int64)}


@pytest.mark.full
def test_grid_world_and_every_wrapper_keep_the_contract(pages):
    check_env(
        lambda num_envs, first_index: batch(
            [pages.GridWorld() for _ in range(num_envs)], first_index=first_index
        )
    )
    grid = functools.partial(ScriptedEnv, observation_space=Dict({**PARTS, "rest": Discrete(3)}))
    for make, make_env in (
        (lambda: pages.DiscreteActions([np.ones(6), -np.ones(6), np.zeros(6)]), ScriptedEnv),
        (pages.RelativePosition, grid),
        (lambda: pages.ClipReward(2, 3), ScriptedEnv),
        (lambda: pages.ReacherRewardWrapper(2, 0.5), Reaching),
    ):
        check_transform(make, make_env)


def test_wrappers_and_arguments_that_do_not_fit_an_env_raise(pages):
    actions = r"DiscreteActions needs disc_to_cont with actions in Box\(-1.0, 1.0, \(6,\), float32\), but got \["
    number = r"DiscreteActions needs a Box action space, but got Discrete\(2\)\."
    for given, kind, error, message in (
        ([], {}, ValueError, actions),
        ([[0.0] * 6, [0.0]], {}, ValueError, actions),
        ([[0.0] * 6, [2.0] * 6], {}, ValueError, actions),
        ([[0.0] * 6], {"action_space": Discrete(2)}, TypeError, number),
    ):
        with pytest.raises(error, match=message):
            tw.TransformedEnv(ScriptedEnv(2, **kind), pages.DiscreteActions(given))
    for space, needs in (
        (Box(0, 1, (2,)), 'a Dict observation space with "agent" and "target", but got Box'),
        (Dict({**PARTS, "agent": Discrete(3)}), '"agent" and "target" as Boxes'),
        (Dict({**PARTS, "agent": Box(0, 4, (3,), np.int64)}), "of one shape"),
        (Dict({name: Box(0, 4, (2,), np.uint8) for name in PARTS}), "signed dtype, but got Dict"),
    ):
        with pytest.raises(TypeError, match=f"RelativePosition needs .*{needs}"):
            tw.TransformedEnv(ScriptedEnv(2, observation_space=space), pages.RelativePosition())
    with pytest.raises(
        ValueError, match=r"ClipReward needs min_reward <= max_reward, but got 1 and 0\."
    ):
        pages.ClipReward(1, 0)
    env = tw.TransformedEnv(
        tw.make("Reacher-v5", 2, info_keys=["reward_dist"]), pages.ReacherRewardWrapper(1, 1)
    )
    with pytest.raises(
        ValueError, match=r"needs info_keys=.* of its env, but got \['reward_dist'\]\."
    ):
        env.step(env.reset(seed=0).set("action", env.sample_action()))


def test_main_prints_what_each_wrapper_does(pages, capsys):
    pages.main()
    said = capsys.readouterr().out
    for words in (
        "Discrete(3), which reach the env as [-2.0, 0.0, 2.0]",
        "[[2, 1], [3, 4], [0, 1]] from [[4, 3], [2, 2], [4, 1]]: [[-2, -2], [1, 2], [-4, 0]]",
        "rewards: from -5 to -1",
        "<ReacherRewardWrapper(reward_dist_weight=1.0, reward_ctrl_weight=0.1)<Reacher-v5(num_envs=3",
        "terminal reward: 0.0",
    ):
        assert words in said


# `auto_reset_step` shows the last step of an episode and the first observation of the next.


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
def test_auto_reset_step_matches_values_computed_by_hand(pages, ending):
    # By hand: episode e of env i has (2, 1, 3)[(i + e) % 3] steps, and observations are 1000 * i and the step.
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
        shown = (new_obs, terminal_reward, terminal_done, info["terminal_observation"])
        assert [value.flatten().tolist() for value in shown] == [new, reward, done, terminal]
        assert info["terminal_info"]["action"].equal(action)
