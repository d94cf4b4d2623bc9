"""to_sb3: what Stable-Baselines3's algorithms, wrappers and evaluation see of an env."""

import functools
import sys

import pytest

pytest.importorskip("stable_baselines3")

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
)
from gymnasium.vector import SyncVectorEnv
from helpers import OtherVectorEnv
from single_envs import DISABLED, Returning
from stable_baselines3 import PPO, SAC, HerReplayBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecNormalize,
    sync_envs_normalization,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.envs.cartpole import CartPole
from torchwrap.interop.sb3 import to_sb3
from torchwrap.testing import ScriptedEnv

IMAGE = Box(0, 255, (36, 40, 3), np.uint8)
assert_equal = functools.partial(np.testing.assert_array_equal, strict=True)


# The same Gymnasium envs in SB3's own DummyVecEnv.


class Balanced(gymnasium.Wrapper):
    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, "is_success": float(result[0][0] > 0)}


def test_steps_and_final_infos_equal_those_of_dummy_vec_env_under_monitor():
    makers = [lambda: Balanced(gymnasium.make("CartPole-v1", max_episode_steps=16))] * 3
    vector_env = SyncVectorEnv(makers, autoreset_mode=DISABLED)
    env = tw.from_gymnasium(vector_env, info_keys=["is_success"])
    ours = to_sb3(tw.TransformedEnv(env, T.RecordEpisodeStatistics()))
    theirs = DummyVecEnv([lambda: Monitor(makers[0]())] * 3)
    assert ours.seed(11) == theirs.seed(11)
    assert_equal(ours.reset(), theirs.reset())
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    generator = np.random.default_rng(0)
    finals = []
    for _ in range(80):
        action = generator.integers(0, 2, 3)
        *given, infos = ours.step(action)
        *expected, their_infos = theirs.step(action)
        for value, other in zip(given, expected, strict=True):
            assert_equal(value, other)
        for info, other in zip(infos, their_infos, strict=True):
            assert bool(info) == ("terminal_observation" in other)
            if info:
                assert_equal(info.pop("terminal_observation"), other.pop("terminal_observation"))
                del other["episode"]["t"]  # seconds, which ours leaves out
                assert info == other
                assert type(info["TimeLimit.truncated"]) is bool
                assert type(info["is_success"]) is float
                finals.append(info)
    assert len(finals) > 9
    for name in ("TimeLimit.truncated", "is_success"):
        assert {info[name] for info in finals} == {False, True}
    assert_equal(ours.reset(), theirs.reset())  # without a seed: the next episode of each env
    ours.close()


def test_step_makes_one_call_per_env():
    """That of the env: conversions and checks are calls per array."""
    space = Dict(a=Box(-1, 1, (3,)), b=Discrete(3), c=IMAGE, d=MultiBinary(2))

    def count_calls(num_envs):
        makers = [lambda: Returning(space, space.sample())] * num_envs
        vector_env = SyncVectorEnv(makers, autoreset_mode=DISABLED)
        venv = to_sb3(tw.from_gymnasium(vector_env))
        venv.reset()
        action = np.zeros(num_envs, int)
        venv.step(action)  # results are checked env by env in the first step
        calls = []
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        venv.step(action)
        sys.setprofile(None)
        return len(calls) - calls.count("return") - calls.count("c_return")

    assert count_calls(20) - count_calls(10) == 10


# Spaces.


def test_dict_observations_reach_a_multi_input_policy():
    parts = {
        "z": Box(-9, 9, (2,)),
        "a": Discrete(3),
        "image": IMAGE,
        "m": MultiDiscrete([2, 3]),
    }
    space = Dict(parts)
    venv = to_sb3(ScriptedEnv(2, observation_space=space, episode_lengths=(1, 2)))
    for key, array in venv.reset().items():
        assert array.shape == (2, *space[key].shape)
        assert array.dtype == space[key].dtype
    infos = venv.step(np.zeros((2, 6), np.float32))[-1]
    final = infos[0]["terminal_observation"]
    assert final["a"] == 1
    assert space.contains({**final, "a": np.int64(final["a"])})
    PPO("MultiInputPolicy", venv, n_steps=4, batch_size=8, n_epochs=1, device="cpu").learn(16)


# Statistics that the env has learned.


def make_normalized(num_envs):
    transforms = (
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.NormalizeReward(),
    )
    return tw.TransformedEnv(
        tw.make("Pendulum-v1", num_envs, max_episode_steps=20),
        *transforms,
    )


def test_saved_statistics_are_loaded_and_copied(tmp_path):
    env = make_normalized(4)
    tw.rollout(env, None, 25)
    path = tmp_path / "statistics.pkl"
    to_sb3(env).save(path)
    loaded = VecNormalize.load(path, to_sb3(make_normalized(3)))
    wrapped = VecNormalize.load(path, VecCheckNan(to_sb3(make_normalized(3))))
    evaluation = to_sb3(make_normalized(2))
    sync_envs_normalization(loaded, evaluation)
    assert all(value.any() for value in env.state_dict().values())
    for venv in (loaded, wrapped, evaluation):
        torch.testing.assert_close(venv.unwrapped.env.state_dict(), env.state_dict())
    loaded.training = False
    assert not loaded.training
    assert not loaded.unwrapped.env.training
    with pytest.raises(AttributeError, match=r"to_sb3.*norm_reward"):
        loaded.norm_reward = False


def with_levels(num_envs, level):
    params = {"gravity": level + torch.arange(float(num_envs))}
    env = tw.FunctionalEnv(Masked(), num_envs, params=params)
    return tw.TransformedEnv(env, T.NormalizeObservation())


@pytest.mark.parametrize("num_envs", [2, 3])
def test_env_for_evaluation_gets_statistics_and_keeps_its_params(num_envs):
    training, evaluation = with_levels(3, 0), with_levels(num_envs, 50)
    tw.rollout(training, None, 5)
    sync_envs_normalization(to_sb3(training), to_sb3(evaluation))
    mean = training.transforms[0].statistics.mean
    assert (evaluation.transforms[0].statistics.mean == mean).all() and mean.any()
    assert evaluation.unwrapped.params["gravity"].tolist() == [50, 51, 52][:num_envs]
    assert to_sb3(training.env).save  # also with params alone


def trained_by_ppo(venv):
    PPO("MlpPolicy", venv, n_steps=2, batch_size=4, device="cpu").learn(4)
    return venv


FORMULAS = ["normalize_obs", "unnormalize_obs", "normalize_reward", "unnormalize_reward"]


@pytest.mark.parametrize("held", [VecCheckNan, trained_by_ppo])
def test_formulas_of_vec_normalize_refer_to_deploy(held):
    venv = held(to_sb3(make_normalized(2)))
    venv.reset()
    venv.step(np.zeros((2, 1)))
    for name in FORMULAS:
        with pytest.raises(NotImplementedError, match="deploy"):
            getattr(venv, name)(np.ones((2, 3)))


def test_replay_buffers_hold_data_as_normalized_when_collected():
    venv = to_sb3(make_normalized(2))
    model = SAC("MlpPolicy", venv, learning_starts=30, batch_size=8, device="cpu", seed=0)
    model.learn(60)
    buffer = model.replay_buffer
    assert np.abs(buffer.observations).max() < 10  # of velocities up to 8, and rewards to -16
    stored = {tuple(row) for row in buffer.observations[: buffer.pos].reshape(-1, 3)}
    env = model.get_vec_normalize_env()
    sampled = buffer.sample(16, env=env).observations
    assert stored.issuperset(map(tuple, sampled.numpy()))
    # A replay buffer of the user's calls the formulas, too.
    assert_equal(env.normalize_obs(buffer.observations), buffer.observations)


# Attributes, methods, seeds, rendering.


def test_method_is_called_once_for_the_batch():
    calls = []
    env = tw.TransformedEnv(ScriptedEnv(3, (1,), 2), T.TimeLimit(9))
    env.env.compute_reward = lambda *args: calls.append(args) or 7
    venv = to_sb3(env)
    assert venv.env_method("compute_reward", 1, 2, indices=[0]) == [7]
    assert venv.env_method("compute_reward") == [7] * 3
    assert calls == [(1, 2), ()]
    env.env.describe = lambda env, name: (env, name)
    assert venv.env_method("describe", env=1, name=2, indices=[0]) == [(1, 2)]


def test_attribute_is_set_for_all_envs_and_refused_for_some():
    env = tw.TransformedEnv(ScriptedEnv(3, (1,), 2), T.TimeLimit(9))
    venv = to_sb3(env)
    venv.set_attr("difficulty", 2)
    venv.set_attr("difficulty", [3], indices=range(3))
    assert env.unwrapped.difficulty == [3]
    assert venv.get_attr("difficulty", indices=[1]) == [[3]]
    with pytest.raises(ValueError, match="set_attr"):
        venv.set_attr("difficulty", 4, indices=[1])


class Adding(gymnasium.Wrapper):
    total = 0

    def add(self, number):
        self.total += number
        return self.total


@pytest.mark.parametrize("kind", ["sync", "async", "own"])
def test_method_and_attribute_of_some_envs_of_a_simulator_are_those_of_dummy_vec_env(kind):
    makers = [lambda: Adding(gymnasium.make("CartPole-v1"))] * 3
    if kind == "own":
        env = tw.from_gymnasium(OtherVectorEnv(makers, autoreset_mode=DISABLED))
    else:
        arguments = {"backend": "gymnasium", "vectorization_mode": kind, "wrappers": [Adding]}
        env = tw.make("CartPole-v1", 3, **arguments)
    ours = to_sb3(env)
    theirs = DummyVecEnv(makers)
    for venv in (ours, theirs):
        assert venv.env_method("add", 2, indices=[1]) == [2]
        assert venv.env_method("add", 5, indices=[2, 0]) == [5, 5]
        assert venv.env_method("add", 0) == [5, 2, 5]
        venv.set_attr("gravity", 1)
        venv.set_attr("gravity", 7, indices=[0, 2])
        assert venv.get_attr("gravity") == [7, 1, 7]
        assert venv.get_attr("gravity", indices=[2, 1]) == [7, 1]
        venv.set_attr("wind", [1, 2, 3])  # a new name, and a list is one value
        assert venv.get_attr("wind") == [[1, 2, 3]] * 3
    ours.close()


class Masked(CartPole):
    """Its action 0 is allowed where the cart is on the right."""

    def action_masks(self, state, params=None):
        is_right = state["x"] > 0
        return torch.stack([is_right, torch.ones_like(is_right)], -1)


def masks_of(env):
    is_right = env.unwrapped.state["x"].numpy() > 0
    return np.stack([is_right, np.ones_like(is_right)], 1)


class MaskLayer(tw.Wrapper):
    form = np.asarray

    def action_masks(self):
        return self.form(masks_of(self))


class TensorMasks(MaskLayer):
    form = torch.as_tensor


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("layer", [tw.Wrapper, MaskLayer, TensorMasks])
def test_action_masks_are_those_of_each_env(layer, num_envs):
    env = layer(tw.FunctionalEnv(Masked(), num_envs))
    venv = to_sb3(tw.TransformedEnv(env, T.TimeLimit(9)))
    venv.reset()
    venv.step(np.zeros(num_envs))
    assert venv.has_attr("action_masks")
    # As MaskablePPO reads them.
    masks = np.stack(venv.env_method("action_masks"))
    np.testing.assert_array_equal(masks, masks_of(env))
    chosen = venv.env_method("action_masks", indices=[num_envs - 1])
    np.testing.assert_array_equal(chosen, masks[-1:])


def test_env_is_monitored_if_it_has_record_episode_statistics():
    env = ScriptedEnv(2, (1,), 2)
    assert to_sb3(env).env_is_wrapped(Monitor) == [False] * 2
    recorded = to_sb3(tw.TransformedEnv(env, T.RecordEpisodeStatistics()))
    assert recorded.env_is_wrapped(Monitor) == [True] * 2
    assert recorded.env_is_wrapped(Monitor, indices=[1]) == [True]
    assert recorded.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [False] * 2


def test_seeds_and_options_are_for_one_reset_even_if_it_is_refused():
    venv = to_sb3(tw.make("CartPole-v1", 2))
    refused = [
        lambda: venv.seed(2**70),
        lambda: venv.set_options({"no such": 0}),
    ]
    for refuse in refused:
        refuse()
        with pytest.raises(ValueError, match=r"reset|to_sb3"):
            venv.reset()
        venv.reset()
    venv.set_options({"low": 0.03, "high": 0.04})
    assert (venv.reset() >= 0.03).all()
    assert (venv.reset() < 0.03).any()


def test_attribute_of_an_own_env_is_not_taken_for_a_simulators_functions():
    env = ScriptedEnv(2)
    env.functions = ["initial", "transition"]
    assert to_sb3(env).reset().shape == (2, 17)


# Hindsight experience replay.

GOAL = Box(-np.inf, np.inf, (2,), np.float32)  # normalized ones have the same space
GOALS = Dict(observation=GOAL, achieved_goal=GOAL, desired_goal=GOAL)


def reach(*transforms):
    """Rewards of new goals are not positive, because they are of later steps; those of steps are.

    `compute_reward` takes batches of NumPy, as in Gymnasium's envs.
    """
    env = ScriptedEnv(2, episode_lengths=9, observation_space=GOALS)
    env.compute_reward = lambda achieved, desired, info: (achieved - desired)[:, 0]
    return tw.TransformedEnv(env, *transforms)


def test_her_gives_new_goals_the_rewards_of_the_env():
    keys = T.ObservationKeys({"observation": [T.NormalizeObservation()]})  # a VecNormalize to SB3
    env = reach(T.RecordEpisodeStatistics(), keys)
    settings = {"seed": 0, "device": "cpu", "learning_starts": 100, "buffer_size": 600}
    model = SAC("MultiInputPolicy", to_sb3(env), replay_buffer_class=HerReplayBuffer, **settings)
    data = model.learn(80).replay_buffer.sample(500)
    missed = data.next_observations["achieved_goal"] - data.observations["desired_goal"]
    is_new = data.rewards[:, 0] <= 0
    assert torch.equal(data.rewards[is_new, 0], missed[is_new, 0])
    assert 0.7 < is_new.float().mean() < 0.9  # 4 of 5 goals


def test_her_refuses_goals_and_rewards_that_transforms_change():
    keys = T.ObservationKeys({"desired_goal": [T.NormalizeObservation()]})
    for transform in (T.NormalizeObservation(), keys, T.NormalizeReward(), T.ScaleReward(2)):
        venv = to_sb3(reach(transform))
        with pytest.raises(ValueError, match="HER"):
            venv.env_method("compute_reward", *np.zeros((2, 1, 2)), None)
