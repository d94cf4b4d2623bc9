"""to_rsl_rl and PPO under rsl_rl's own OnPolicyRunner, and against hand-computed episodes."""

import pytest

pytest.importorskip("rsl_rl")

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from helpers import AOT, Held, RewardTerms
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.rsl_rl import to_rsl_rl
from torchwrap.testing import ScriptedEnv

THEIRS, OURS = "PPO", "torchwrap.interop.rsl_rl:PPO"
VECTOR = Box(-np.inf, np.inf, (3,), np.float32)


def config(algorithm=OURS, steps=8, groups=("policy", "policy"), critic=None, **settings):
    network = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "tanh"}
    actor = {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}}
    models = {
        "actor": actor,
        "critic": {**network, **(critic or {})},
        "algorithm": {"class_name": algorithm, **settings},
    }
    obs_groups = {"actor": [groups[0]], "critic": [groups[1]]}
    return {"num_steps_per_env": steps, "save_interval": 1000, "obs_groups": obs_groups, **models}


def make_pendulum(num_envs=4, *transforms, **kwargs):
    return tw.TransformedEnv(
        tw.make("Pendulum-v1", num_envs, **kwargs),
        T.RescaleAction(-1, 1),
        T.ClipAction(),
        *transforms,
    )


def make_learned(num_envs=3):
    """Statistics, running episodes and random numbers: everything that a step can change."""
    transforms = T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.NormalizeReward()
    return make_pendulum(num_envs, *transforms, max_episode_steps=5)


# What rsl_rl is given.


def test_step_returns_what_the_env_does_with_staggered_ends():
    lengths = (5, 3, 1, 4)  # ended by all three causes, and by none in some steps
    env, oracle, held = (
        to_rsl_rl(ScriptedEnv(4, (2,), lengths), seed=0),
        ScriptedEnv(4, (2,), lengths),
        Held(),
    )
    td = oracle.reset(seed=0)
    assert (env.get_observations()["policy"] == td["observation"]).all()
    causes = set()
    for _ in range(40):
        actions = oracle.sample_action()
        obs, rewards, dones, extras = env.step(actions)
        transition, td = oracle.step(td.set("action", actions))
        successor = transition["next"]
        assert (
            isinstance(obs, TensorDict) and obs.batch_size == (4,) and set(obs.keys()) == {"policy"}
        )
        assert (obs["policy"] == td["observation"]).all() and (
            env.get_observations()["policy"] == obs["policy"]
        ).all()
        assert (extras["final_obs"]["policy"] == successor["observation"]).all()
        assert (
            rewards.tolist() == successor["reward"].flatten().tolist()
            and rewards.dtype == torch.float32
        )
        assert (
            dones.tolist() == successor["done"].flatten().long().tolist()
            and dones.dtype == torch.int64
        )
        pairs = list(
            zip(
                successor["terminated"].flatten().tolist(),
                successor["truncated"].flatten().tolist(),
                strict=True,
            )
        )
        assert extras["time_outs"].tolist() == [
            truncated and not terminated for terminated, truncated in pairs
        ]
        causes |= set(pairs)
        held.add(
            obs,
            extras["final_obs"],
            TensorDict(rewards=rewards, dones=dones, time_outs=extras["time_outs"]),
        )
    assert len(causes) == 4
    held.assert_unchanged()


def test_dict_observation_becomes_groups_that_the_runner_finds():
    space = Dict({"actor": VECTOR, "critic": Box(-np.inf, np.inf, (5,), np.float32)})
    env = to_rsl_rl(ScriptedEnv(2, observation_space=space))
    runner = OnPolicyRunner(env, config(groups=("actor", "critic")))
    runner.learn(2)
    assert runner.alg.actor.obs_dim == 3 and runner.alg.critic.obs_dim == 5
    extras = env.step(torch.zeros(2, 6))[3]
    assert {key: value.shape for key, value in extras["final_obs"].items()} == {
        "actor": (2, 3),
        "critic": (2, 5),
    }


def test_finite_horizon_has_no_time_outs():
    env = to_rsl_rl(ScriptedEnv(2, (1,), 1, ending="truncated"), {"is_finite_horizon": True})
    extras = env.step(torch.zeros(2, 6))[3]
    assert "time_outs" not in extras and extras["final_obs"]["policy"].tolist() == [[1], [1001]]
    OnPolicyRunner(env, config()).learn(1)  # nor does PPO miss them


def test_seed_repeats_the_first_episode_and_reset_starts_new_ones():
    env, same, other = (to_rsl_rl(make_pendulum(), seed=seed) for seed in (3, 3, 4))
    first = env.get_observations()["policy"]
    assert (first == same.get_observations()["policy"]).all() and not (
        first == other.get_observations()["policy"]
    ).any()
    env.step(torch.zeros(4, 1))
    obs, extras = env.reset()
    assert (
        env.episode_length_buf.tolist() == [0] * 4
        and not (obs["policy"] == first).any()
        and extras == {}
    )
    assert (env.get_observations()["policy"] == obs["policy"]).all()


# The episode clock.


def test_random_episode_lengths_move_the_clock_and_truncate():
    torch.manual_seed(0)
    env = to_rsl_rl(make_pendulum(50, max_episode_steps=20), seed=0)
    assert env.max_episode_length == 20 and env.episode_length_buf.tolist() == [0] * 50
    results, step = [], env.step
    env.step = lambda actions: results.append(step(actions)) or results[-1]
    OnPolicyRunner(env, config(steps=20)).learn(1, init_at_random_ep_len=True)
    time_outs = torch.stack([extras["time_outs"] for *_, extras in results])
    first = time_outs.long().argmax(0)
    assert time_outs.sum(0).tolist() == [1] * 50  # each env once in 20 steps
    assert len(first.unique()) > 10  # and at different times
    assert env.episode_length_buf.tolist() == (19 - first).tolist()


def test_env_without_a_limit_learns_but_has_no_random_episode_lengths():
    runner = OnPolicyRunner(to_rsl_rl(ScriptedEnv(2, (3,), None)), config())
    runner.learn(1)
    with pytest.raises(
        RuntimeError,
        match=r"init_at_random_ep_len needs an env with a time limit.*put transforms\.TimeLimit",
    ):
        runner.learn(1, init_at_random_ep_len=True)


# Inference mode.


@pytest.mark.parametrize("compiled", [False, True])
def test_training_in_inference_mode_leaves_an_env_that_steps_and_restores_outside_of_it(compiled):
    env, oracle = make_learned(), make_learned()
    if compiled:
        tw.compile(env, backend="aot_eager")
    adapter = to_rsl_rl(env, seed=0)
    oracle.reset(seed=0)
    actions = [oracle.sample_action() for _ in range(12)]
    with torch.inference_mode():
        for action in actions:
            adapter.step(action.clone())
    for action in actions:
        oracle.step(action)
    tolerance = AOT if compiled else 0
    for name, buffer in oracle.state_dict().items():
        torch.testing.assert_close(env.state_dict()[name], buffer, rtol=tolerance, atol=tolerance)
    OnPolicyRunner(adapter, config()).learn(2)
    assert not any(buffer.is_inference() for buffer in env.buffers())
    assert not adapter.get_observations()["policy"].is_inference()
    snapshot = env.snapshot()
    first = [env.step(action)[0]["next"].clone() for action in actions]
    env.reset(mask=torch.tensor([True, False, True]))
    env.restore(snapshot)
    for action, successor in zip(actions, first, strict=True):
        assert (env.step(action)[0]["next"] == successor).all()


# Logs.


def test_logger_writes_the_mean_over_episodes(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    transforms = (
        RewardTerms(),
        T.RecordEpisodeStatistics(metrics={"most": ("twice", "max")}),
        T.ScaleReward(100),
    )
    env = to_rsl_rl(tw.TransformedEnv(ScriptedEnv(3, (1,), (1, 3, 3)), *transforms))
    runner = OnPolicyRunner(env, config(steps=3), log_dir=str(tmp_path))
    runner.logger.git_status_repos = []  # it writes the diffs of these repositories
    runner.learn(1)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    # In the first step the return 1 of length 1, in the third one twice the return 6 of length 3.
    assert [event.value for event in events.Scalars("Episode/episode_return")] == [
        pytest.approx((1 + 6 + 6) / 3)
    ]
    assert [event.value for event in events.Scalars("Episode/episode_length")] == [
        pytest.approx((1 + 3 + 3) / 3)
    ]
    assert [event.value for event in events.Scalars("Episode/episode_most")] == [
        pytest.approx((2 + 6 + 6) / 3)
    ]
    # The mean reward of all steps is 16 / 9: 1, 1 and 2 of env 0; 1, 2 and 3 of the others.
    assert [event.value for event in events.Scalars("Episode/twice")] == [pytest.approx(32 / 9)]
    assert [event.value for event in events.Scalars("terms/half")] == [pytest.approx(8 / 9)]
    assert "Episode/vector" not in events.Tags()["scalars"]


def test_runner_saves_what_the_env_has_learned_and_loads_it(tmp_path):
    env, path = make_learned(), tmp_path / "model.pt"
    runner = OnPolicyRunner(to_rsl_rl(env), config())
    runner.learn(1)
    runner.save(path)
    loaded, unloaded = make_learned(2), make_learned(2)
    OnPolicyRunner(to_rsl_rl(loaded), config()).load(path)
    OnPolicyRunner(to_rsl_rl(unloaded), config()).load(path, {"actor": True, "env": False})
    for name, value in env.state_dict().items():
        assert (loaded.state_dict()[name] == value).all() and (
            unloaded.state_dict()[name] != value
        ).any(), name


def test_a_trained_policy_is_deployed():
    env = make_learned()
    runner = OnPolicyRunner(to_rsl_rl(env), config())
    runner.learn(1)
    network = runner.get_inference_policy()
    module = tw.deploy(
        env, lambda td: network(TensorDict({"policy": td["observation"]}, td.batch_size))
    )
    raw = torch.randn(5, 3)
    with torch.no_grad():
        groups = TensorDict(
            {"policy": env.transforms[3].observation(raw)}, [5]
        )  # NormalizeObservation
        assert module(raw).numpy() == pytest.approx(
            2 * network(groups).clamp(-1, 1).numpy(), abs=1e-6
        )


def test_observations_follow_a_restored_env():
    env = make_learned()
    venv = to_rsl_rl(env, seed=0)
    venv.step(torch.zeros(3, 1))
    snapshot, before = env.snapshot(), venv.get_observations()["policy"].clone()
    after, *_ = venv.step(torch.ones(3, 1))
    td = env.restore(snapshot)
    assert (venv.get_observations()["policy"] == td["observation"]).all() and (
        after["policy"] != before
    ).any()
    assert (before == td["observation"]).all()


# The bootstrap.


def collect(monkeypatch, algorithm, env, steps, critic=None, **settings):
    """Runs one iteration of the runner without an update, and returns its algorithm."""
    runner = OnPolicyRunner(to_rsl_rl(env), config(algorithm, steps, critic=critic, **settings))
    monkeypatch.setattr(runner.alg, "update", dict)
    if critic is None:
        runner.alg.critic.mlp = (
            torch.nn.Identity()
        )  # the value of an observation is its only component
    runner.learn(1)
    return runner.alg


def test_targets_at_the_ends_of_a_hand_computed_episode(monkeypatch):
    # Rewards 1, 2 in each episode, from observations 0 and 1 to the final observation 2; gamma is 0.5. The first episode is
    # terminated, the second one truncated, and the third one both.
    for algorithm, rewards, returns in (
        (THEIRS, [1, 2, 1, 2.5, 1, 2], [2, 2, 2.25, 2.5, 2, 2]),  # + 0.5 * V(1)
        (OURS, [1, 2, 1, 3, 1, 2], [2, 2, 2.5, 3, 2, 2]),  # + 0.5 * V(2)
    ):
        storage = collect(
            monkeypatch, algorithm, ScriptedEnv(1, (1,), 2), 6, gamma=0.5, lam=1.0
        ).storage
        assert (
            storage.observations["policy"].flatten().tolist()
            == storage.dones.flatten().tolist()
            == [0, 1, 0, 1, 0, 1]
        )
        assert storage.rewards.flatten().tolist() == rewards
        assert storage.returns.flatten().tolist() == returns


def test_bootstrap_leaves_the_critic_normalization_to_rsl_rl():
    def learned(algorithm):
        torch.manual_seed(0)
        env = to_rsl_rl(
            ScriptedEnv(2, (3,), (5, 3, 1, 4), ending="truncated")
        )  # whatever the actions are
        runner = OnPolicyRunner(env, config(algorithm, critic={"obs_normalization": True}))
        runner.learn(2)
        return runner.alg.critic.obs_normalizer.state_dict()

    theirs, ours = learned(THEIRS), learned(OURS)
    assert theirs["count"] == 2 * 8 * 2
    for name, value in theirs.items():
        assert (ours[name] == value).all(), name


def test_bootstrap_leaves_the_state_of_a_recurrent_critic_to_rsl_rl(monkeypatch):
    def states(algorithm):
        torch.manual_seed(0)
        critic = {
            "class_name": "RNNModel",
            "rnn_type": "gru",
            "rnn_hidden_dim": 4,
            "rnn_num_layers": 1,
        }
        alg = collect(
            monkeypatch, algorithm, ScriptedEnv(3, (3,), (2, 3), ending="truncated"), 4, critic
        )
        return alg.critic.get_hidden_state(), alg.storage.values, alg.storage.rewards

    (theirs, their_values, their_rewards), (ours, our_values, our_rewards) = (
        states(THEIRS),
        states(OURS),
    )
    assert (theirs == ours).all() and (their_values == our_values).all()
    assert ours.abs().sum() > 0 and (their_rewards != our_rewards).any()


def test_ppo_of_an_env_without_final_observations_names_the_remedy():
    env = to_rsl_rl(ScriptedEnv(2, (3,)))
    runner, step = OnPolicyRunner(env, config()), env.step
    env.step = lambda actions: (
        *(result := step(actions))[:3],
        {"time_outs": result[3]["time_outs"]},
    )
    with pytest.raises(
        ValueError, match=r'needs extras\["final_obs"\].*but got \[\'time_outs\'\].*to_rsl_rl'
    ):
        runner.learn(1)


def test_to_rsl_rl_refuses_what_rsl_rl_does_not_take_before_a_reset():
    integers = ScriptedEnv(2, observation_space=Box(0, 9, (3,), np.int64))
    doubles = ScriptedEnv(2, observation_space=Dict(a=VECTOR, b=Box(0, 1, (2,), np.float64)))
    for env, message in (
        (torch.nn.Linear(1, 1), "needs a torchwrap.Env, but got Linear"),
        (
            tw.make("CartPole-v1", 2),
            r"needs actions in a Box with one dimension, but got Discrete\(2\)",
        ),
        (ScriptedEnv(2, action_space=Box(-1, 1, (2,), np.float64)), "needs actions in float32"),
        (
            ScriptedEnv(2, observation_shape=(3, 8, 8)),
            "needs observations in a Box.*FlattenObservation",
        ),
        (
            integers,
            r'observations in float32, but got Box.*int64\): put transforms.DtypeObservation\("float32"\)',
        ),
        (
            ScriptedEnv(2, observation_space=Dict(a=VECTOR, b=Discrete(2))),
            "needs observations in a Box",
        ),
        (doubles, "needs observations in float32.*put transforms.TransformObservation"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"to_rsl_rl.*{message}"):
            to_rsl_rl(env)
        assert getattr(env, "np_random_seed", None) is None
    with pytest.raises(TypeError, match="to_rsl_rl needs cfg as a dict, but got list"):
        to_rsl_rl(ScriptedEnv(2, (3,)), [])
