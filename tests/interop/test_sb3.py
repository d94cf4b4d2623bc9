"""to_sb3: what Stable-Baselines3's algorithms, wrappers and evaluation see of an env."""

import pytest

pytest.importorskip("stable_baselines3")

import gymnasium
import numpy as np
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from stable_baselines3 import PPO, SAC, HerReplayBuffer
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.sb3 import to_sb3
from torchwrap.testing import ScriptedEnv

IMAGE = Box(0, 255, (36, 40, 3), np.uint8)
DISABLED = gymnasium.vector.AutoresetMode.DISABLED


def play(venv, num_steps):
    """The results of steps with the action 0."""
    return [venv.step(np.zeros((venv.num_envs, 6), np.float32)) for _ in range(num_steps)]


def assert_equal(ours, theirs):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_equal(ours[key], theirs[key])
    else:
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and (ours == theirs).all()


# The same Gymnasium envs in SB3's own DummyVecEnv.


@pytest.mark.parametrize(("id", "limit"), [("CartPole-v1", 16), ("Pendulum-v1", 7)])
def test_steps_equal_those_of_dummy_vec_env(id, limit):
    theirs = DummyVecEnv([lambda: gymnasium.make(id, max_episode_steps=limit)] * 3)
    ours = to_sb3(tw.make(id, 3, backend="gymnasium", max_episode_steps=limit))
    assert ours.seed(11) == theirs.seed(11)
    assert_equal(ours.reset(), theirs.reset())
    assert (ours.observation_space, ours.action_space) == (
        theirs.observation_space,
        theirs.action_space,
    )
    theirs.action_space.seed(0)
    num_ended, causes = 0, set()
    for _ in range(80):
        actions = np.stack([theirs.action_space.sample() for _ in range(3)])
        *given, infos = ours.step(actions)
        *expected, their_infos = theirs.step(actions)
        for value, other in zip(given, expected, strict=True):
            assert_equal(value, other)
        for done, info, other in zip(given[-1], infos, their_infos, strict=True):
            assert ("terminal_observation" in info) == ("terminal_observation" in other) == done
            if done:
                num_ended += 1
                causes.add(info["TimeLimit.truncated"])
                assert_equal(info["terminal_observation"], other["terminal_observation"])
                assert info["TimeLimit.truncated"] is bool(other["TimeLimit.truncated"])
    assert num_ended > 9 and (id != "CartPole-v1" or causes == {True, False})
    assert_equal(ours.reset(), theirs.reset())  # without a seed: the next episode of each env
    ours.close()
    theirs.close()


def test_episode_infos_equal_those_of_monitor():
    theirs = make_vec_env("CartPole-v1", 3, seed=5)
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 3, backend="gymnasium"),
        T.RecordEpisodeStatistics(),
        T.ClipReward(0, 0.5),
    )
    ours = to_sb3(env)
    ours.seed(5)
    ours.reset()
    theirs.reset()
    generator, num_ended = np.random.default_rng(0), 0
    for _ in range(100):
        actions = generator.integers(0, 2, 3)
        infos, their_infos = ours.step(actions)[-1], theirs.step(actions)[-1]
        for info, other in zip(infos, their_infos, strict=True):
            assert ("episode" in info) == ("episode" in other)
            if "episode" in info:
                num_ended += 1
                assert {key: info["episode"][key] for key in "rl"} == {
                    key: other["episode"][key] for key in "rl"
                }
                assert 0 <= info["episode"]["t"] < 60
    assert num_ended > 9
    ours.close()


# Hand-computed episodes.


def test_step_returns_initial_observations_and_terminal_ones_in_infos():
    venv = to_sb3(ScriptedEnv(3, (1,), (1, 2, 3), ending="in turn"))
    assert venv.reset().tolist() == [[0], [1000], [2000]]
    # Env i takes (1, 2, 3)[(i + e) % 3] steps in episode e: env 0 ends at steps 1 and 3, env 1 at 2, env 2 at 3.
    results = play(venv, 3)
    assert [result[0].ravel().tolist() for result in results] == [
        [0, 1001, 2001],
        [1, 1000, 2002],
        [0, 1001, 2000],
    ]
    assert [result[1].tolist() for result in results] == [[1, 1, 1], [1, 2, 2], [2, 1, 3]]
    assert [result[2].tolist() for result in results] == [
        [True, False, False],
        [False, True, False],
        [True, False, True],
    ]
    ends = [
        (step, row)
        for step, result in enumerate(results)
        for row, info in enumerate(result[3])
        if info
    ]
    assert ends == [(0, 0), (1, 1), (2, 0), (2, 2)]
    infos = [results[step][3][row] for step, row in ends]
    assert [info["terminal_observation"].tolist() for info in infos] == [[1], [1002], [2], [2003]]
    # Terminated; truncated; truncated; both at once, which is no truncation.
    assert [info["TimeLimit.truncated"] for info in infos] == [False, True, True, False]
    assert all(info["action"].tolist() == [0] * 6 for info in infos)  # the env's own info
    for observations, rewards, dones, _ in results:
        assert (observations.dtype, rewards.dtype, dones.dtype) == (
            np.float32,
            np.float32,
            np.bool_,
        )
        assert rewards.shape == dones.shape == (3,)


def test_arrays_actions_and_infos_are_the_callers():
    # SB3 adds values of final observations to the rewards in place, and keeps observations and dones until the next step.
    (venv, clean), kept, live = (to_sb3(ScriptedEnv(2, (1,), (1, 5))) for _ in range(2)), [], []
    venv.reset(), clean.reset()
    for _ in range(6):
        actions = np.zeros((2, 6), np.float32)
        venv.step_async(actions)
        actions += 0.5
        *arrays, infos = venv.step_wait()
        *expected, _ = clean.step(np.zeros((2, 6), np.float32))
        kept += [(array, array.copy()) for array in expected]
        for array, other in zip(arrays, expected, strict=True):
            assert_equal(array, other)
            array += np.ones((), array.dtype)
        assert all(info["action"].tolist() == [0] * 6 for info in infos if info)
        live += [info for info in infos if not info]
        for number, info in enumerate(infos):
            info["number"] = number  # as a VecEnvWrapper does
        assert [info["number"] for info in infos] == [0, 1]
    assert live
    assert all((array == copy).all() for array, copy in kept)


# Spaces.


def test_actions_reach_the_env_in_its_own_dtype():
    for space, given in (
        (Discrete(3), np.array([2, 1])),
        (MultiDiscrete([3, 4]), np.array([[2, 3], [1, 0]])),
        (
            MultiBinary(3),
            np.array([[1, 0, 1], [0, 1, 0]], np.float32),
        ),  # as SB3's Bernoulli policy gives them
        (Box(-1, 1, (2, 2)), np.full((2, 2, 2), 0.5)),
        (Box(-1, 1, (1,)), [[0.5], [0.25]]),
    ):
        venv = to_sb3(ScriptedEnv(2, (1,), 1, action_space=space))
        venv.reset()
        infos = venv.step(given)[-1]
        assert all(
            (info["action"] == np.asarray(given)[row]).all() for row, info in enumerate(infos)
        )


def test_dict_observations_reach_a_multi_input_policy():
    space = Dict(
        {"z": Box(-9, 9, (2,)), "a": Discrete(3), "image": IMAGE, "m": MultiDiscrete([2, 3])}
    )
    venv = to_sb3(ScriptedEnv(2, observation_space=space, episode_lengths=(1, 2)))
    expected = {key: ((2, *part.shape), part.dtype) for key, part in space.spaces.items()}
    assert {key: (array.shape, array.dtype) for key, array in venv.reset().items()} == expected
    info = play(venv, 1)[0][-1][0]
    assert space.contains(
        {**info["terminal_observation"], "a": np.int64(info["terminal_observation"]["a"])}
    )
    assert info["terminal_observation"]["a"] == 1
    model = PPO("MultiInputPolicy", venv, n_steps=4, batch_size=8, n_epochs=1, device="cpu")
    assert isinstance(model.get_env(), VecTransposeImage)
    model.learn(16)


def test_what_sb3_cannot_hold_is_refused_by_name():
    for env, message in (
        (gymnasium.make("CartPole-v1"), "needs a torchwrap.Env, but got TimeLimit"),
        (
            ScriptedEnv(2, observation_space=Tuple([Discrete(2)])),
            "without a Tuple.*FlattenObservation",
        ),
        (
            ScriptedEnv(2, observation_space=Dict(a=Dict(b=Discrete(2)))),
            "without a Tuple or nested Dict",
        ),
        (
            ScriptedEnv(2, observation_space=Discrete(2, start=1)),
            "observations that start at 0.*TransformObservation",
        ),
        (
            ScriptedEnv(2, action_space=Dict(a=Discrete(2))),
            "actions in a Box, Discrete, MultiDiscrete or MultiBinary",
        ),
        (
            ScriptedEnv(2, action_space=Discrete(2, start=1)),
            "actions that start at 0.*TransformAction",
        ),
        (
            ScriptedEnv(2, action_space=MultiDiscrete([[2, 3]])),
            "MultiDiscrete actions with one dimension",
        ),
        (
            ScriptedEnv(2, action_space=MultiBinary((2, 3))),
            "MultiBinary actions with one dimension",
        ),
        (ScriptedEnv(2, action_space=Box(-np.inf, 1, (2,))), "finite bounds.*TransformAction"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"to_sb3.*{message}"):
            to_sb3(env)


# SB3's wrappers.


def test_vec_normalize_equals_that_over_dummy_vec_env():
    theirs = VecNormalize(
        DummyVecEnv([lambda: gymnasium.make("Pendulum-v1", max_episode_steps=7)] * 3)
    )
    ours = VecNormalize(to_sb3(tw.make("Pendulum-v1", 3, backend="gymnasium", max_episode_steps=7)))
    ours.seed(1)
    theirs.seed(1)
    assert_equal(ours.reset(), theirs.reset())
    for _ in range(20):
        action = np.full((3, 1), 0.5, np.float32)
        *given, infos = ours.step(action)
        *expected, their_infos = theirs.step(action)
        for value, other in zip(given, expected, strict=True):
            assert_equal(value, other)
        for info, other in zip(infos, their_infos, strict=True):
            if "terminal_observation" in other:
                assert_equal(info["terminal_observation"], other["terminal_observation"])
    ours.close()


# Statistics that the env has learned.


def make_normalized(num_envs):
    transforms = T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.NormalizeReward()
    return tw.TransformedEnv(tw.make("Pendulum-v1", num_envs, max_episode_steps=20), *transforms)


def test_callbacks_save_and_copy_what_the_env_has_learned(tmp_path):
    env, eval_env = make_normalized(4), make_normalized(2).eval()
    model = PPO(
        "MlpPolicy",
        VecCheckNan(to_sb3(env)),
        n_steps=16,
        batch_size=64,
        n_epochs=1,
        device="cpu",
        seed=0,
    )
    checkpoints = CheckpointCallback(16, str(tmp_path), save_vecnormalize=True)
    model.learn(
        128, [checkpoints, EvalCallback(VecCheckNan(to_sb3(eval_env)), eval_freq=16, verbose=0)]
    )
    path = tmp_path / "rl_model_vecnormalize_128_steps.pkl"
    loaded = [
        VecNormalize.load(path, wrap(to_sb3(make_normalized(3))))
        for wrap in (lambda venv: venv, VecCheckNan)
    ]
    for other in (eval_env, *(venv.unwrapped.env for venv in loaded)):
        for name, value in env.state_dict().items():
            assert (other.state_dict()[name] == value).all() and value.any(), name
    loaded[0].training = False
    assert not loaded[0].unwrapped.env.training and not loaded[0].training
    with pytest.raises(AttributeError, match="norm_obs and norm_reward cannot be set"):
        loaded[0].norm_reward = False
    with pytest.raises(TypeError, match=r"VecNormalize.load needs a venv from to_sb3.*DummyVecEnv"):
        VecNormalize.load(path, DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")]))


# Attributes, methods, seeds, rendering.


def test_attributes_are_read_and_set_as_sb3_does():
    env = tw.TransformedEnv(ScriptedEnv(3, (1,), 2), T.TimeLimit(9))
    venv = to_sb3(env)
    assert venv.get_attr("render_mode") == [None] * 3 and venv.render_mode is None
    assert venv.get_attr("max_episode_steps", indices=[0, 2]) == [9, 9]
    assert venv.get_attr("ending", indices=1) == ["in turn"]
    assert venv.get_attr("observation_space", 0) == [env.single_observation_space]
    assert venv.get_attr("action_space", 0) == [env.single_action_space]
    assert not venv.has_attr("no_such_thing") and venv.has_attr("num_envs")
    calls, env.env.compute_reward = [], lambda *args: calls.append(args) or 7
    assert (
        venv.env_method("compute_reward", 1, 2, indices=[0]) == [7]
        and venv.env_method("compute_reward") == [7] * 3
    )
    assert calls == [(1, 2), ()]  # once for the batch
    for layer, owner in ((venv, env), (to_sb3(env.env), env.env)):
        layer.set_attr("difficulty", 2)
        layer.set_attr("difficulty", 3, indices=range(3))
        assert owner.difficulty == 3 and layer.get_attr("difficulty", indices=[1]) == [3]
        with pytest.raises(ValueError, match=r"set_attr for all 3 envs.*\[1\]"):
            layer.set_attr("difficulty", 4, indices=[1])
    makers = [lambda: Balanced(gymnasium.make("CartPole-v1"))] * 3
    simulator = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=DISABLED)
    venv = to_sb3(tw.TransformedEnv(tw.from_gymnasium(simulator), T.TimeLimit(9)))
    for number, single in enumerate(simulator.envs):
        single.unwrapped.gravity = number
    assert venv.get_attr("gravity") == [0, 1, 2] and venv.get_attr("gravity", indices=[2, 0]) == [
        2,
        0,
    ]
    venv.set_attr("gravity", 7)
    assert [single.unwrapped.gravity for single in simulator.envs] == [7] * 3
    assert venv.env_method("fall", 2, indices=[1]) == [14]


def test_env_is_monitored_if_it_has_record_episode_statistics():
    recorded = to_sb3(tw.TransformedEnv(ScriptedEnv(2, (1,), 2), T.RecordEpisodeStatistics()))
    assert recorded.env_is_wrapped(Monitor) == [True] * 2 and recorded.env_is_wrapped(
        Monitor, indices=[1]
    ) == [True]
    assert recorded.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [False] * 2
    assert to_sb3(ScriptedEnv(2, (1,), 2)).env_is_wrapped(Monitor) == [False] * 2


def test_seed_is_used_once_and_by_the_algorithm():
    first, second = (to_sb3(tw.make("CartPole-v1", 4)) for _ in range(2))
    assert first.seed(3) == [3, 4, 5, 6]
    second.seed(3)
    start = first.reset()
    assert (start == second.reset()).all() and (
        start == tw.make("CartPole-v1", 4).reset(seed=3)["observation"].numpy()
    ).all()
    assert (first.reset() != start).any()
    again = to_sb3(tw.make("CartPole-v1", 4))
    PPO("MlpPolicy", again, seed=3, n_steps=2, batch_size=8, device="cpu")
    assert (again.reset() == start).all()


def test_options_reach_the_env_once_and_must_agree():
    venv = to_sb3(tw.make("CartPole-v1", 2, backend="gymnasium"))
    venv.set_options({"low": 0.03, "high": 0.04})
    assert (venv.reset() >= 0.03).all()
    assert (venv.reset() < 0.03).any()
    venv.set_options([{"low": 0.5}, {}])
    with pytest.raises(ValueError, match="the same reset options"):
        venv.reset()
    venv.close()


class Balanced(gymnasium.Wrapper):
    def fall(self, factor):
        return factor * self.get_wrapper_attr("gravity")

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, "is_success": float(result[0][0] > 0)}


def test_infos_are_scalars_that_monitor_writes_as_those_of_sb3s_envs(tmp_path):
    makers = [lambda: Balanced(gymnasium.make("CartPole-v1", max_episode_steps=12))] * 3
    vector_env = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=DISABLED)
    ours = to_sb3(tw.from_gymnasium(vector_env, info_keys=["is_success"]))
    written = []
    for venv in (ours, DummyVecEnv(makers)):
        venv = VecMonitor(venv, str(tmp_path / str(len(written))), info_keywords=("is_success",))
        venv.seed(0)
        venv.reset()
        generator = np.random.default_rng(0)
        infos = [
            info
            for _ in range(60)
            for info in venv.step(generator.integers(0, 2, 3))[-1]
            if "episode" in info
        ]
        lines = (tmp_path / f"{len(written)}.monitor.csv").read_text().splitlines()[2:]
        written.append(
            (
                [info["is_success"] for info in infos],
                [line.split(",")[:2] + line.split(",")[3:] for line in lines],
            )
        )
        venv.close()
    assert (
        written[0] == written[1]
        and {*written[0][0]} == {0.0, 1.0}
        and not any(map(np.ndim, written[0][0]))
    )


GOALS = dict.fromkeys(
    ("observation", "achieved_goal", "desired_goal"), Box(-9, 9, (2,), np.float32)
)


class Reach(gymnasium.Env):
    """A point moves to a goal, written as Gymnasium's goal envs are: `compute_reward` takes batches."""

    observation_space, action_space = Dict(GOALS), Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return self.observation(), {}

    def observation(self):
        return {
            "observation": self.position.copy(),
            "achieved_goal": self.position.copy(),
            "desired_goal": self.goal.copy(),
        }

    def step(self, action):
        self.position = np.clip(self.position + np.float32(0.2) * action, -9, 9).astype(np.float32)
        reward = float(self.compute_reward(self.position, self.goal, {}))
        return self.observation(), reward, False, False, {}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return np.float32(np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.2) - 1


class NativeReach(FuncEnv):
    """The same as functions of a single env, with a norm over all of a goal's numbers."""

    observation_space, action_space = Dict(GOALS), Box(-1, 1, (2,))

    def initial(self, rng, params=None):
        position, goal = tw.random.uniform(rng, -1, 1, (2, 2))
        return {"position": position, "goal": goal}

    def transition(self, state, action, rng, params=None):
        return {**state, "position": (state["position"] + 0.2 * action).clamp(-9, 9)}

    def observation(self, state, rng, params=None):
        return {
            "observation": state["position"],
            "achieved_goal": state["position"],
            "desired_goal": state["goal"],
        }

    def compute_reward(self, achieved_goal, desired_goal, info):
        return (torch.linalg.vector_norm(achieved_goal - desired_goal) < 0.2).float() - 1

    def reward(self, state, action, next_state, rng, params=None):
        return self.compute_reward(next_state["position"], state["goal"], {})

    def terminal(self, state, rng, params=None):
        return torch.zeros((), dtype=torch.bool)


class BatchedReach(NativeReach):
    broadcasts = True

    def initial(self, rng, params=None):
        position, goal = tw.random.uniform(rng, -1, 1, (2, 2)).unbind(-2)
        return {"position": position, "goal": goal}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return (torch.linalg.vector_norm(achieved_goal - desired_goal, dim=-1) < 0.2).float() - 1

    def terminal(self, state, rng, params=None):
        return state["goal"][..., 0] > 99


HER = {
    "replay_buffer_class": HerReplayBuffer,
    "learning_starts": 60,
    "buffer_size": 600,
    "batch_size": 32,
    "device": "cpu",
}


def test_her_gives_new_goals_the_rewards_that_the_env_would(registry):
    gymnasium.register("test/Reach-v0", Reach, max_episode_steps=9)
    makers = [lambda: gymnasium.make("test/Reach-v0")] * 2
    for env in (
        tw.make("test/Reach-v0", 2, vectorization_mode="async", vector_kwargs={"context": "fork"}),
        tw.from_gymnasium(gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=DISABLED)),
        tw.FunctionalEnv(NativeReach(), 2, max_episode_steps=9),
        tw.FunctionalEnv(BatchedReach(), 2, max_episode_steps=9),
    ):
        learning = T.ObservationKeys(
            {"observation": [T.NormalizeObservation()]}
        )  # a VecNormalize to SB3
        venv = to_sb3(tw.TransformedEnv(env, T.RecordEpisodeStatistics(), learning))
        model = SAC("MultiInputPolicy", venv, policy_kwargs={"net_arch": [8]}, seed=0, **HER).learn(
            80
        )
        data = model.replay_buffer.sample(500)
        achieved = data.next_observations["achieved_goal"]
        near = (achieved - data.observations["desired_goal"]).norm(dim=1, keepdim=True) < 0.2
        assert (
            data.rewards == near.float() - 1
        ).all() and 0.1 < near.float().mean() < 0.9  # 4 of 5 goals are new
        assert not data.dones.any() and len(data.observations["desired_goal"].unique(dim=0)) > 20
        assert (model.replay_buffer.next_observations["achieved_goal"][:30] != 0).all()
        venv.close()


def test_her_refuses_goals_and_rewards_that_transforms_change():
    for transform, changed in (
        (T.NormalizeObservation(), r"\['achieved_goal', 'desired_goal'\]"),
        (T.NormalizeReward(), r"\['reward'\]"),
        (T.ClipReward(-1, 1), r"\['reward'\]"),
    ):
        env = tw.TransformedEnv(tw.FunctionalEnv(NativeReach(), 2, max_episode_steps=9), transform)
        model = SAC("MultiInputPolicy", to_sb3(env), **{**HER, "learning_starts": 1000}).learn(20)
        with pytest.raises(
            ValueError,
            match=rf"goals and rewards that no .*, but transforms change {changed}: use VecNorm",
        ):
            model.replay_buffer.sample(5)


# Algorithms.


class Fixed:
    """A policy for `evaluate_policy`."""

    def predict(self, observations, state=None, episode_start=None, deterministic=True):
        return np.zeros((len(observations), 6), np.float32), None


def test_evaluate_policy_counts_what_episodes_return():
    with pytest.warns(UserWarning, match="not wrapped with a ``Monitor``"):
        returns, lengths = evaluate_policy(
            Fixed(), to_sb3(ScriptedEnv(2, (1,), (2, 3))), 4, return_episode_rewards=True
        )
    assert sorted(returns) == [3, 3, 6, 6] and sorted(lengths) == [2, 2, 3, 3]
    clipped = tw.TransformedEnv(
        ScriptedEnv(2, (1,), (2, 3)), T.RecordEpisodeStatistics(), T.ClipReward(-0.5, 0.5)
    )
    returns, lengths = evaluate_policy(
        Fixed(), to_sb3(clipped), 4, return_episode_rewards=True
    )  # as under Monitor
    assert sorted(returns) == [3, 3, 6, 6] and sorted(lengths) == [2, 2, 3, 3]


@pytest.mark.parametrize("ending", ["truncated", "terminated"])
def test_sac_stores_terminal_observations(ending):
    env = ScriptedEnv(2, (1,), (2, 3), ending=ending)
    venv = to_sb3(
        tw.TransformedEnv(env, T.NormalizeReward()) if ending == "truncated" else env
    )  # a VecNormalize to SB3
    model = SAC("MlpPolicy", venv, learning_starts=10**6, buffer_size=100, device="cpu").learn(8)
    buffer = model.replay_buffer
    # Env 0 takes episodes of 2 and 3 steps, env 1 of 3 and 2.
    assert buffer.observations[:4, :, 0].tolist() == [[0, 1000], [1, 1001], [0, 1002], [1, 1000]]
    assert buffer.next_observations[:4, :, 0].tolist() == [
        [1, 1001],
        [2, 1002],
        [1, 1003],
        [2, 1001],
    ]
    assert buffer.dones[:4].tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]
    assert (
        buffer.timeouts[:4].tolist()
        == (np.array(buffer.dones[:4]) * (ending == "truncated")).tolist()
    )


def test_ppo_bootstraps_truncated_episodes_with_the_value_of_the_terminal_observation():
    for ending in ("truncated", "both"):
        venv = to_sb3(ScriptedEnv(2, (1,), 2, ending=ending))
        model = PPO("MlpPolicy", venv, n_steps=2, batch_size=4, gamma=0.9, device="cpu", seed=0)
        model.learning_rate = 0.0
        _, callback = model._setup_learn(4)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, 2)
        with torch.no_grad():
            value = model.policy.predict_values(torch.tensor([[2.0], [1002.0]])).flatten()
        last = 2 + 0.9 * value.numpy() * (ending == "truncated")
        np.testing.assert_allclose(model.rollout_buffer.rewards, [[1, 1], last], rtol=1e-6)
