"""to_sb3: what Stable-Baselines3's algorithms, wrappers and evaluation see of an env."""

import sys

import pytest

pytest.importorskip("stable_baselines3")

import gymnasium
import numpy as np
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
)
from gymnasium.vector import SyncVectorEnv
from helpers import OtherVectorEnv
from stable_baselines3 import PPO, SAC, HerReplayBuffer
from stable_baselines3.common.callbacks import (
    CheckpointCallback,
    EvalCallback,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecNormalize,
    sync_envs_normalization,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.sb3 import to_sb3
from torchwrap.testing import ScriptedEnv

IMAGE = Box(0, 255, (36, 40, 3), np.uint8)
DISABLED = gymnasium.vector.AutoresetMode.DISABLED


def play(venv, num_steps):
    """The results of steps with the action 0."""
    action = np.zeros((venv.num_envs, 6), np.float32)
    return [venv.step(action) for _ in range(num_steps)]


def assert_equal(ours, theirs):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_equal(ours[key], theirs[key])
    else:
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, strict=True)


def assert_steps_equal(ours, theirs, action):
    """Steps both, compares all values, and returns the infos."""
    *given, infos = ours.step(action)
    *expected, their_infos = theirs.step(action)
    for value, other in zip(given, expected, strict=True):
        assert_equal(value, other)
    for info, other in zip(infos, their_infos, strict=True):
        assert ("terminal_observation" in info) == ("terminal_observation" in other)
        if "terminal_observation" in info:
            assert_equal(
                info["terminal_observation"],
                other["terminal_observation"],
            )
            truncated = info["TimeLimit.truncated"]
            assert truncated is bool(other["TimeLimit.truncated"])
    return infos


# The same Gymnasium envs in SB3's own DummyVecEnv.


@pytest.mark.parametrize(
    ("id", "limit", "causes"),
    [("CartPole-v1", 16, {True, False}), ("Pendulum-v1", 7, {True})],
)
def test_steps_equal_those_of_dummy_vec_env(id, limit, causes):
    theirs = DummyVecEnv([lambda: gymnasium.make(id, max_episode_steps=limit)] * 3)
    ours = to_sb3(tw.make(id, 3, backend="gymnasium", max_episode_steps=limit))
    assert ours.seed(11) == theirs.seed(11)
    assert_equal(ours.reset(), theirs.reset())
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    theirs.action_space.seed(0)
    truncated = []
    for _ in range(80):
        actions = np.stack([theirs.action_space.sample() for _ in range(3)])
        infos = assert_steps_equal(ours, theirs, actions)
        truncated += [info["TimeLimit.truncated"] for info in infos if info]
    assert len(truncated) > 9
    assert set(truncated) == causes
    assert_equal(ours.reset(), theirs.reset())  # without a seed: the next episode of each env
    ours.close()
    theirs.close()


class Still(gymnasium.Env):
    action_space = Box(-1, 1, (6,))

    def __init__(self, space):
        self.observation_space = space
        self.observation = space.sample()

    def reset(self, *, seed=None, options=None):
        return self.observation, {}

    def step(self, action):
        return self.observation, 1.0, False, False, {}


PARTS = {"a": Box(-1, 1, (3,)), "b": Discrete(3), "c": IMAGE, "d": MultiBinary(2)}


def test_step_makes_one_call_per_env():
    """That of the env: conversions and checks are calls per array."""

    def count_calls(num_envs):
        makers = [lambda: Still(Dict(PARTS))] * num_envs
        vector_env = SyncVectorEnv(makers, autoreset_mode=DISABLED)
        venv = to_sb3(tw.from_gymnasium(vector_env))
        venv.reset()
        play(venv, 2)  # results are checked env by env in the first step
        calls = []
        action = np.zeros((num_envs, 6), np.float32)
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        venv.step(action)
        sys.setprofile(None)
        return len(calls) - calls.count("return") - calls.count("c_return")

    assert count_calls(20) - count_calls(10) == 10


def test_episode_infos_equal_those_of_monitor():
    theirs = make_vec_env("CartPole-v1", 3, seed=5)
    env = tw.make("CartPole-v1", 3, backend="gymnasium")
    ours = to_sb3(tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.ClipReward(0, 0.5)))
    ours.seed(5)
    ours.reset()
    theirs.reset()
    generator = np.random.default_rng(0)
    episodes = [], []
    for _ in range(100):
        actions = generator.integers(0, 2, 3)
        for found, venv in zip(episodes, (ours, theirs), strict=True):
            infos = venv.step(actions)[-1]
            found += [info.get("episode") for info in infos]
    seconds = [each.pop("t") for each in episodes[1] if each]  # which ours leaves out
    assert episodes[0] == episodes[1] and len(seconds) > 9
    ours.close()


# Hand-computed episodes.


# Spaces.

ACTIONS = {
    "Discrete": (Discrete(3), [2, 1]),
    "MultiDiscrete": (MultiDiscrete([3, 4]), [[2, 3], [1, 0]]),
    "MultiBinary, floats of SB3's policy": (
        MultiBinary(3),
        [[1.0, 0, 1], [0, 1, 0]],
    ),
    "Box": (Box(-1, 1, (2, 2)), np.full((2, 2, 2), 0.5)),
    "lists": (Box(-1, 1, (2,)), [[0.5, 1], [0.25, 0]]),
}


@pytest.mark.parametrize(("space", "given"), ACTIONS.values(), ids=ACTIONS)
def test_actions_reach_the_env_in_its_own_dtype(space, given):
    venv = to_sb3(ScriptedEnv(2, (1,), 1, action_space=space))
    venv.reset()
    infos = venv.step(given)[-1]
    np.testing.assert_array_equal([info["action"] for info in infos], given)


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
    final = play(venv, 1)[0][-1][0]["terminal_observation"]
    assert final["a"] == 1
    assert space.contains({**final, "a": np.int64(final["a"])})
    PPO("MultiInputPolicy", venv, n_steps=4, batch_size=8, n_epochs=1, device="cpu").learn(16)


# SB3's wrappers.


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


def test_callbacks_save_and_copy_the_statistics_of_the_env(tmp_path):
    env = make_normalized(4)
    eval_env = make_normalized(2).eval()
    settings = {
        "n_steps": 16,
        "batch_size": 64,
        "n_epochs": 1,
        "device": "cpu",
        "seed": 0,
    }
    model = PPO("MlpPolicy", VecCheckNan(to_sb3(env)), **settings)
    checkpoints = CheckpointCallback(16, str(tmp_path), save_vecnormalize=True)
    evaluation = EvalCallback(VecCheckNan(to_sb3(eval_env)), eval_freq=16, verbose=0)
    model.learn(128, [checkpoints, evaluation])
    path = tmp_path / "rl_model_vecnormalize_128_steps.pkl"
    loaded = VecNormalize.load(path, to_sb3(make_normalized(3)))
    wrapped = VecNormalize.load(path, VecCheckNan(to_sb3(make_normalized(3))))
    for other in (
        eval_env,
        loaded.unwrapped.env,
        wrapped.unwrapped.env,
    ):
        for name, value in env.state_dict().items():
            assert value.any(), name
            assert (other.state_dict()[name] == value).all(), name
    evaluation = to_sb3(make_normalized(2))
    sync_envs_normalization(loaded, evaluation)
    torch.testing.assert_close(evaluation.unwrapped.env.state_dict(), env.state_dict())
    loaded.training = False
    assert not loaded.training
    assert not loaded.unwrapped.env.training
    with pytest.raises(AttributeError, match="norm_reward"):
        loaded.norm_reward = False


def with_levels(num_envs, level):
    params = {"level": level + torch.arange(num_envs)}
    env = tw.FunctionalEnv(Masked(), num_envs, params=params)
    return tw.TransformedEnv(env, T.NormalizeObservation())


@pytest.mark.parametrize("num_envs", [2, 3])
def test_env_for_evaluation_gets_statistics_and_keeps_its_params(num_envs):
    training, evaluation = with_levels(3, 0), with_levels(num_envs, 50)
    tw.rollout(training, None, 5)
    sync_envs_normalization(to_sb3(training), to_sb3(evaluation))
    mean = training.transforms[0].statistics.mean
    assert (evaluation.transforms[0].statistics.mean == mean).all() and mean.any()
    assert evaluation.unwrapped.params["level"].tolist() == [50, 51, 52][:num_envs]
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


def test_attributes_of_layers_are_read_as_sb3_does():
    env = tw.TransformedEnv(ScriptedEnv(3, (1,), 2), T.TimeLimit(9))
    venv = to_sb3(env)
    assert venv.get_attr("render_mode") == [None] * 3
    assert venv.get_attr("max_episode_steps", indices=[0, 2]) == [9, 9]
    assert venv.get_attr("ending", indices=1) == ["in turn"]
    assert venv.get_attr("observation_space", 0) == [env.single_observation_space]
    assert venv.get_attr("action_space", 0) == [env.single_action_space]
    assert venv.has_attr("num_envs")
    assert not venv.has_attr("no_such_thing")


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


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_attribute_is_set_for_all_envs_and_refused_for_some(is_wrapped):
    env = ScriptedEnv(3, (1,), 2)
    if is_wrapped:
        env = tw.TransformedEnv(env, T.TimeLimit(9))
    venv = to_sb3(env)
    venv.set_attr("difficulty", 2)
    venv.set_attr("difficulty", [3], indices=range(3))
    assert env.unwrapped.difficulty == [3]
    assert venv.get_attr("difficulty", indices=[1]) == [[3]]
    with pytest.raises(ValueError, match="set_attr"):
        venv.set_attr("difficulty", 4, indices=[1])


class Balanced(gymnasium.Wrapper):
    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, "is_success": float(result[0][0] > 0)}


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


class Masked(FuncEnv):
    """Functions of an env whose action 0 is allowed where its level is even."""

    observation_space = Box(-9, 9, (1,))
    action_space = Discrete(2)

    def initial(self, rng, params):
        return {"step": params["level"]}

    def transition(self, state, action, rng, params):
        return {"step": state["step"] + 1}

    def observation(self, state, rng, params):
        return state["step"].float().unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params):
        return state["step"].float()

    def terminal(self, state, rng, params):
        return state["step"] > 99

    def action_masks(self, state, params):
        is_even = state["step"] % 2 == 0
        return torch.stack([is_even, torch.ones_like(is_even)])


def make_masked(num_envs):
    return tw.FunctionalEnv(Masked(), num_envs, params={"level": torch.arange(num_envs)})


def masks_of(env):
    even = env.unwrapped.state["step"].numpy() % 2 == 0
    return np.stack([even, np.ones_like(even)], 1)


class MaskLayer(tw.Wrapper):
    form = np.asarray

    def action_masks(self):
        return self.form(masks_of(self))


class TensorMasks(MaskLayer):
    form = torch.as_tensor


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("layer", [tw.Wrapper, MaskLayer, TensorMasks])
def test_action_masks_are_those_of_each_env(layer, num_envs):
    env = layer(make_masked(num_envs))
    venv = to_sb3(tw.TransformedEnv(env, T.TimeLimit(9)))
    venv.reset()
    venv.step(np.zeros(num_envs))
    assert venv.has_attr("action_masks")
    # As MaskablePPO reads them.
    masks = np.stack(venv.env_method("action_masks"))
    np.testing.assert_array_equal(masks, masks_of(env))
    chosen = venv.env_method("action_masks", indices=[num_envs - 1])
    np.testing.assert_array_equal(chosen, masks[-1:])


def infos_of_sixty_steps(venv):
    venv.seed(0)
    venv.reset()
    generator = np.random.default_rng(0)
    infos = []
    for _ in range(60):
        infos += venv.step(generator.integers(0, 2, 3))[-1]
    return infos


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


def test_infos_of_finished_envs_are_scalars_as_those_of_sb3s_envs():
    makers = [lambda: Balanced(gymnasium.make("CartPole-v1", max_episode_steps=12))] * 3
    vector_env = SyncVectorEnv(makers, autoreset_mode=DISABLED)
    successes = []
    for venv in (
        to_sb3(tw.from_gymnasium(vector_env, info_keys=["is_success"])),
        DummyVecEnv(makers),
    ):
        infos = infos_of_sixty_steps(venv)
        successes.append([info["is_success"] for info in infos if "terminal_observation" in info])
    assert successes[0] == successes[1] and set(successes[0]) == {0.0, 1.0}
    assert not any(map(np.ndim, successes[0]))


# Hindsight experience replay.

GOAL = Box(-9, 9, (2,), np.float32)
GOALS = Dict(observation=GOAL, achieved_goal=GOAL, desired_goal=GOAL)


class NativeReach(FuncEnv):
    """A point moves to a goal. `compute_reward` takes batches of NumPy, as in Gymnasium's envs."""

    observation_space = GOALS
    action_space = Box(-1, 1, (2,))

    def initial(self, rng, params=None):
        position, goal = tw.random.uniform(rng, -1, 1, (2, 2)).unbind(-2)
        return {"position": position, "goal": goal}

    def transition(self, state, action, rng, params=None):
        return {
            **state,
            "position": (state["position"] + 0.2 * action).clamp(-9, 9),
        }

    def observation(self, state, rng, params=None):
        here = state["position"]
        return {
            "observation": here,
            "achieved_goal": here,
            "desired_goal": state["goal"],
        }

    def compute_reward(self, achieved_goal, desired_goal, info):
        return np.float32(np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.2) - 1

    def reward(self, state, action, next_state, rng, params=None):
        distance = torch.linalg.vector_norm(next_state["position"] - state["goal"])
        return (distance < 0.2).float() - 1

    def terminal(self, state, rng, params=None):
        return state["goal"][..., 0] > 99


def native_reach():
    return tw.FunctionalEnv(NativeReach(), 2, max_episode_steps=9)


def test_her_gives_new_goals_the_rewards_of_the_env():
    keys = T.ObservationKeys({"observation": [T.NormalizeObservation()]})  # a VecNormalize to SB3
    env = tw.TransformedEnv(native_reach(), T.RecordEpisodeStatistics(), keys)
    settings = {"seed": 0, "device": "cpu", "learning_starts": 100, "buffer_size": 600}
    model = SAC("MultiInputPolicy", to_sb3(env), replay_buffer_class=HerReplayBuffer, **settings)
    data = model.learn(80).replay_buffer.sample(500)
    goals = data.observations["desired_goal"]
    near = (data.next_observations["achieved_goal"] - goals).norm(dim=1, keepdim=True) < 0.2
    assert (data.rewards == near.float() - 1).all()
    assert 0.1 < near.float().mean() < 0.9  # 4 of 5 goals are new
    env.close()


def test_her_refuses_goals_and_rewards_that_transforms_change():
    for transform in (T.NormalizeObservation(), T.NormalizeReward(), T.ScaleReward(2)):
        venv = to_sb3(tw.TransformedEnv(native_reach(), transform))
        with pytest.raises(ValueError, match="HER"):
            venv.env_method("compute_reward", *np.zeros((2, 1, 2)), None)


# Algorithms.


class Zero:
    """A policy for `evaluate_policy`."""

    def predict(
        self,
        observations,
        state=None,
        episode_start=None,
        deterministic=True,
    ):
        return np.zeros((len(observations), 6), np.float32), None


def evaluated(env):
    returns, lengths = evaluate_policy(Zero(), to_sb3(env), 4, return_episode_rewards=True)
    return sorted(returns), sorted(lengths)


def test_evaluate_policy_counts_raw_rewards_as_under_monitor():
    expected = [3, 3, 6, 6], [2, 2, 3, 3]
    with pytest.warns(UserWarning, match="not wrapped with a ``Monitor``"):
        assert evaluated(ScriptedEnv(2, (1,), (2, 3))) == expected
    transforms = T.RecordEpisodeStatistics(), T.ClipReward(-0.5, 0.5)
    env = ScriptedEnv(2, (1,), (2, 3))
    assert evaluated(tw.TransformedEnv(env, *transforms)) == expected


@pytest.mark.parametrize(("ending", "factor"), [("truncated", 0.9), ("both", 0)])
def test_ppo_bootstraps_truncated_episodes_from_the_terminal_observation(ending, factor):
    venv = to_sb3(ScriptedEnv(2, (1,), 2, ending=ending))
    settings = {
        "n_steps": 2,
        "batch_size": 4,
        "n_epochs": 1,
        "device": "cpu",
        "seed": 0,
    }
    model = PPO("MlpPolicy", venv, gamma=0.9, learning_rate=0.0, **settings).learn(4)
    with torch.no_grad():
        final = torch.tensor([[2.0], [1002.0]])
        value = model.policy.predict_values(final).flatten()
    rewards = model.rollout_buffer.rewards.reshape(2, 2)
    last = 2 + factor * value.numpy()
    expected = sorted([1, 1, *last])
    assert sorted(rewards.ravel()) == pytest.approx(expected, rel=1e-6)
