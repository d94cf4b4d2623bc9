"""to_rsl_rl and PPO under rsl_rl's own OnPolicyRunner, and against hand-computed episodes."""

import copy
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("rsl_rl")

import numpy as np
import torch
from adapters import (
    VECTOR,
    assert_two_ranks_share_statistics,
    diverging,
    moments,
    normalized,
)
from gymnasium.spaces import Box, Dict
from helpers import assert_same_files
from rsl_rl.runners import DistillationRunner, OnPolicyRunner
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
from torchwrap.interop.rsl_rl import RslRlPolicy, to_rsl_rl
from torchwrap.testing import ScriptedEnv

# Bounds that no step of ScriptedEnv depends on.
pytestmark = pytest.mark.filterwarnings("ignore:to_rsl_rl.*unbounded:UserWarning")

THEIRS = "PPO"
OURS = "torchwrap.interop.rsl_rl:PPO"
DISTILLATION = "torchwrap.interop.rsl_rl:Distillation"


def make_runner(
    env,
    algorithm=OURS,
    steps=8,
    critic=None,
    log_dir=None,
    runner=OnPolicyRunner,
    models=None,
    sets=None,
    **settings,
):
    """A runner of an env with groups "policy", or "actor" and "critic"."""
    adapter = to_rsl_rl(env) if isinstance(env, tw.Env) else env
    groups = list(adapter.get_observations().keys())
    network = {
        "class_name": "MLPModel",
        "hidden_dims": [16],
        "activation": "tanh",
    }
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    cfg = {
        "num_steps_per_env": steps,
        "save_interval": 1000,
        "algorithm": {"class_name": algorithm, **settings},
        "obs_groups": {},
    }
    names = (
        ("student", "teacher") if issubclass(runner, DistillationRunner) else ("actor", "critic")
    )
    for name, group in zip(names, (groups[0], groups[-1]), strict=True):
        cfg[name] = {**network, **(models or {})}
        cfg["obs_groups"][name] = [group]
        if name != "critic":
            cfg[name]["distribution_cfg"] = dict(gaussian)  # rsl_rl 5.4 takes an entry out
    cfg.get("critic", {}).update(critic or {})
    cfg["obs_groups"].update(sets or {})
    return runner(adapter, cfg, log_dir=log_dir)


def make_distillation(env, algorithm=DISTILLATION):
    return make_runner(env, algorithm, runner=DistillationRunner, gradient_length=8)


def make_pendulum(num_envs=4, *transforms, **kwargs):
    env = tw.make("Pendulum-v1", num_envs, **kwargs)
    actions = T.RescaleAction(-1, 1), T.ClipAction()
    return tw.TransformedEnv(env, *actions, *transforms)


def make_learned(num_envs=3):
    """Statistics, running episodes and random numbers: everything that a step can change."""
    transforms = (
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.NormalizeReward(),
    )
    return make_pendulum(num_envs, *transforms, max_episode_steps=5)


# Steps.


def test_finite_horizon_has_no_time_outs():
    base = ScriptedEnv(2, (1,), 1, ending="truncated")
    env = to_rsl_rl(base, {"is_finite_horizon": True})
    extras = env.step(torch.zeros(2, 6))[3]
    assert "time_outs" not in extras
    assert extras["final_obs"]["policy"].tolist() == [[1], [1001]]
    make_runner(env).learn(1)  # nor does PPO miss them


# The episode clock.


def test_random_episode_lengths_move_the_clock_and_truncate():
    env = to_rsl_rl(tw.make("Pendulum-v1", 50, max_episode_steps=20))
    results = []
    step = env.step
    env.step = lambda actions: results.append(step(actions)) or results[-1]
    make_runner(env, steps=20).learn(1, init_at_random_ep_len=True)
    time_outs = torch.stack([extras["time_outs"] for *_, extras in results])
    assert time_outs.sum(0).tolist() == [1] * 50  # each env once in 20 steps
    first = time_outs.long().argmax(0)
    assert len(first.unique()) > 10  # and at different times
    assert env.episode_length_buf.tolist() == (19 - first).tolist()


def test_env_without_a_limit_learns_but_has_no_random_episode_lengths():
    runner = make_runner(tw.make("Pendulum-v1", 2, max_episode_steps=-1))
    runner.learn(1)
    with pytest.raises(RuntimeError, match="init_at_random_ep_len"):
        runner.learn(1, init_at_random_ep_len=True)


# Inference mode.


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_training_in_inference_mode_leaves_an_env_that_steps_and_restores(
    compiled,
):
    env = make_learned()
    if compiled:
        tw.compile(env, backend="aot_eager")
    adapter = to_rsl_rl(env, seed=0)
    actions = [env.sample_action() for _ in range(12)]
    make_runner(adapter).learn(2)
    assert not any(buffer.is_inference() for buffer in env.buffers())
    assert not adapter.get_observations()["policy"].is_inference()
    snapshot = env.snapshot()
    first = [env.step(action)[0]["next"].clone() for action in actions]
    env.reset(mask=torch.tensor([True, False, True]))
    env.restore(snapshot)
    root = adapter.get_observations()["policy"]  # of the restored env
    for action, successor in zip(actions, first, strict=True):
        transition, _ = env.step(action)
        assert (transition["observation"] == root).all()
        assert (transition["next"] == successor).all()
        root = adapter.get_observations()["policy"]


# Logs, checkpoints and deployment.


def test_checkpoint_without_the_statistics_of_the_env_is_loaded_with_a_warning(tmp_path):
    make_runner(make_learned(), THEIRS).save(tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="env_state_dict"):
        make_runner(make_learned()).load(tmp_path / "model.pt")
    make_runner(make_learned()).load(tmp_path / "model.pt", {"actor": True, "env": False})
    make_runner(make_pendulum()).load(tmp_path / "model.pt")


def test_first_step_in_eval_mode_without_statistics_warns():
    env = make_learned()
    venv = to_rsl_rl(env)
    env.eval()
    with pytest.warns(UserWarning, match="to_rsl_rl.*statistics"):
        venv.step(torch.zeros(3, 1))
    venv.step(torch.zeros(3, 1))  # without a warning


class TwoRanks:
    """The runner in the process group of the test, which has no GPU."""

    def _configure_multi_gpu(self):
        rank = torch.distributed.get_rank()
        self.is_distributed = True
        self.gpu_world_size = 2
        self.gpu_local_rank = rank
        self.gpu_global_rank = rank
        self.cfg["multi_gpu"] = {"global_rank": rank, "local_rank": rank, "world_size": 2}


class TwoRanksOnPolicy(TwoRanks, OnPolicyRunner):
    pass


class TwoRanksDistillation(TwoRanks, DistillationRunner):
    pass


def moments_of_a_rank(rank, group, algorithm):
    env = normalized(3, first_index=3 * rank)
    if algorithm == OURS:
        runner = make_runner(env, algorithm, runner=TwoRanksOnPolicy)
    else:
        settings = {"runner": TwoRanksDistillation, "gradient_length": 8}
        runner = make_runner(env, algorithm, **settings)
        runner.alg.teacher_loaded = True
    runner.learn(2)
    return moments(env)


@pytest.mark.parametrize("algorithm", [OURS, DISTILLATION], ids=["PPO", "Distillation"])
def test_two_ranks_share_the_statistics_of_all_their_envs(algorithm):
    assert_two_ranks_share_statistics(moments_of_a_rank, algorithm)


# Policies for `evaluate` and `deploy`.

MODELS = {
    "MLP": {},
    "GRU": {"class_name": "RNNModel", "rnn_type": "gru", "rnn_hidden_dim": 6},
    "LSTM": {
        "class_name": "RNNModel",
        "rnn_type": "lstm",
        "rnn_hidden_dim": 5,
        "rnn_num_layers": 2,
    },
}


def trained(name):
    """A policy, and rsl_rl's model, which keeps its own state."""
    torch.manual_seed(0)
    settings = {"env": make_pendulum(3, max_episode_steps=5), "models": MODELS[name]}
    runner = make_runner(**settings)
    runner.learn(1)
    policy = RslRlPolicy(runner.get_inference_policy())
    model = make_runner(**settings).get_inference_policy()
    model.load_state_dict(policy.model.state_dict())
    return policy, model


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_of_a_model_equals_the_loop_of_rsl_rl(name):
    policy, model = trained(name)
    num_steps = 5
    venv = to_rsl_rl(make_pendulum(4, max_episode_steps=num_steps), seed=7)
    obs = venv.get_observations()
    model.reset()
    returns = torch.zeros(4)
    with torch.no_grad():
        for _ in range(num_steps):
            obs, rewards, dones, _ = venv.step(model(obs))
            model.reset(dones)
            returns += rewards
    with torch.inference_mode():
        policy.model(TensorDict({"policy": torch.randn(3, 3)}, [3]))
    before = policy.model.get_hidden_state()
    env = tw.TransformedEnv(make_pendulum(4, max_episode_steps=num_steps), *policy.transforms)
    for _ in range(2):
        episodes = tw.evaluate(env, policy, 4, seed=7)
        given = episodes["episode_return"].flatten().sort().values
        torch.testing.assert_close(given, returns.sort().values)
    assert policy.model.get_hidden_state() is before


@pytest.mark.parametrize("name", MODELS)
def test_deployed_model_acts_as_the_model(name):
    policy, model = trained(name)
    env = tw.TransformedEnv(make_pendulum(1), *policy.transforms)
    deployed = tw.deploy(env, policy)
    state = deployed.initial_state(4)
    model.reset()
    with torch.no_grad():
        for _ in range(3):
            raw = torch.randn(4, 3)
            expected = 2 * model(TensorDict({"policy": raw}, [4])).clamp(-1, 1)
            results = deployed(raw, state)
            action, state = results if state else (results, state)
            torch.testing.assert_close(action, expected)


def test_policy_of_another_object_is_refused():
    with pytest.raises(TypeError, match=r"RslRlPolicy.*model"):
        RslRlPolicy(lambda td: td)


# Runs that go on.


class Pair(Pendulum):
    """Its `length` is a level."""

    def __init__(self):
        super().__init__()
        self.observation_space = Dict(student=VECTOR, teacher=VECTOR)

    def observation(self, state, rng, params):
        value = super().observation(state, rng, params)
        return {"student": value, "teacher": value}


def make_pair(level):
    params = {"length": torch.full((3,), level)}
    base = tw.FunctionalEnv(Pair(), 3, max_episode_steps=2, params=params)
    groups = {"student": [T.NormalizeObservation()], "teacher": [T.NormalizeObservation()]}
    return tw.TransformedEnv(base, T.NormalizeReward(), T.ObservationKeys(groups))


CURIOUS = {
    "num_outputs": 4,
    "predictor_hidden_dims": [8],
    "target_hidden_dims": [8],
    "weight": 0.5,
    "state_normalization": True,
    "reward_normalization": True,
    "weight_schedule": {"mode": "linear", "initial_step": 0, "final_step": 9, "final_value": 0.1},
}


def make_curious(env, num_steps=3):
    """Asymmetric observations, and random network distillation with all that it can learn."""
    sets = {"rnd_state": ["teacher"]}
    return make_runner(env, steps=num_steps, sets=sets, rnd_cfg=copy.deepcopy(CURIOUS))


def resumed(path, env, load_cfg=None):
    """A runner of this env that has loaded a checkpoint."""
    runner = make_curious(env)
    runner.load(path, load_cfg)
    return runner


@pytest.fixture
def saved_path(tmp_path):
    """The checkpoint of a run of two iterations at level 4."""
    runner = make_curious(make_pair(4.0))
    runner.learn(2)
    runner.save(tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_resumed_run_has_the_step_of_random_network_distillation(saved_path):
    assert resumed(saved_path, make_pair(1.0)).alg.rnd.update_counter == 6


@pytest.mark.parametrize("is_played", [True, False], ids=["no iteration", "no env"])
def test_parts_of_a_checkpoint_that_load_cfg_leaves_out_stay(is_played, saved_path):
    env = make_pair(1.0)
    load_cfg = {"actor": True, "env": is_played, "iteration": not is_played}
    resumed(saved_path, env, load_cfg).alg.train_mode()
    assert env.unwrapped.params["length"].tolist() == [1, 1, 1]
    state = torch.load(saved_path, weights_only=True)["env_state_dict"]
    assert all((env.state_dict()[name] == state[name]).all() for name in state) == is_played


@pytest.mark.full
def test_student_learns_statistics_while_those_of_the_teacher_stay(saved_path):
    def numbers(env):
        parts = env.transforms[-1].parts
        return [parts[name][0].statistics.sums().clone() for name in ("student", "teacher")]

    env = make_pair(1.0)
    runner = make_runner(env, DISTILLATION, 2, runner=DistillationRunner, gradient_length=2)
    runner.load(saved_path)
    student, teacher = numbers(env)
    runner.learn(2)
    learned, kept = numbers(env)
    assert torch.equal(kept, teacher)
    # Four steps of three envs, and two initial observations of each
    assert (learned[-1] - student[-1] == 3 * (4 + 2)).all()


@pytest.mark.parametrize("is_dict", [False, True], ids=["Box", "Dict"])
def test_statistics_that_student_and_teacher_share_stay(is_dict, tmp_path):
    space = Dict(student=VECTOR, teacher=VECTOR) if is_dict else VECTOR

    def make():
        base = ScriptedEnv(3, (3,), 2, **({"observation_space": space} if is_dict else {}))
        return tw.TransformedEnv(base, T.NormalizeObservation())

    def restored(path):
        runner = make_distillation(make())
        runner.load(path)
        return runner, dict(runner.alg.env.state_dict())

    teacher = make_runner(make())
    teacher.learn(1)
    teacher.save(tmp_path / "teacher.pt")
    runner, before = restored(tmp_path / "teacher.pt")
    assert_same_files(before, dict(teacher.alg.env.state_dict()))
    before = copy.deepcopy(before)
    runner.learn(1)
    runner.save(tmp_path / "student.pt")
    assert_same_files(restored(tmp_path / "student.pt")[1], before)


# The bootstrap.


def collect(monkeypatch, algorithm, env, steps, critic=None, **settings):
    """Runs one iteration of the runner without an update, and returns its algorithm."""
    runner = make_runner(env, algorithm, steps, critic=critic, **settings)
    monkeypatch.setattr(runner.alg, "update", dict)
    if critic is None:
        runner.alg.critic.mlp = torch.nn.Identity()  # V is the observation's only component
    runner.learn(1)
    return runner.alg


# Rewards 1, 2 in each episode, from observations 0 and 1 to the final observation 2; gamma is 0.5.
# The first episode is terminated, the second one truncated, and the third one both.
TARGETS = {
    THEIRS: (
        [1, 2, 1, 2.5, 1, 2],
        [2, 2, 2.25, 2.5, 2, 2],
    ),  # + 0.5 * V(1)
    OURS: ([1, 2, 1, 3, 1, 2], [2, 2, 2.5, 3, 2, 2]),  # + 0.5 * V(2)
}


@pytest.mark.parametrize("algorithm", TARGETS)
def test_targets_at_the_ends_of_a_hand_computed_episode(monkeypatch, algorithm):
    rewards, returns = TARGETS[algorithm]
    alg = collect(
        monkeypatch,
        algorithm,
        diverging(torch.nan, 1, (1,), 2),  # which changes no target
        6,
        gamma=0.5,
        lam=1.0,
    )
    storage = alg.storage
    assert storage.observations["policy"].flatten().tolist() == [0, 1] * 3
    assert storage.dones.flatten().tolist() == [0, 1] * 3
    assert storage.rewards.flatten().tolist() == rewards
    assert storage.returns.flatten().tolist() == returns


def test_bootstrap_leaves_the_critic_normalization_to_rsl_rl():
    def learned(algorithm):
        torch.manual_seed(0)
        env = ScriptedEnv(2, (3,), (5, 3, 1, 4), ending="truncated")  # whatever the actions are
        runner = make_runner(env, algorithm, critic={"obs_normalization": True})
        runner.learn(2)
        return dict(runner.alg.critic.obs_normalizer.state_dict())

    theirs = learned(THEIRS)
    assert theirs["count"] == 2 * 8 * 2
    torch.testing.assert_close(learned(OURS), theirs, rtol=0, atol=0)


def test_bootstrap_leaves_the_state_of_a_recurrent_critic_to_rsl_rl(
    monkeypatch,
):
    gru = {"rnn_type": "gru", "rnn_hidden_dim": 4, "rnn_num_layers": 1}

    def collected(algorithm):
        torch.manual_seed(0)
        env = ScriptedEnv(3, (3,), (2, 3), ending="truncated")
        return collect(
            monkeypatch,
            algorithm,
            env,
            4,
            {"class_name": "RNNModel", **gru},
        )

    theirs = collected(THEIRS)
    ours = collected(OURS)
    state = ours.critic.get_hidden_state()
    assert state.any()
    assert torch.equal(state, theirs.critic.get_hidden_state())
    assert torch.equal(ours.storage.values, theirs.storage.values)
    assert (ours.storage.rewards != theirs.storage.rewards).any()


# RND, images and writers.


@pytest.mark.parametrize(("cfg", "weight"), [({}, 0.5), ({"step_dt": 0.02}, 0.01)])
def test_weight_of_random_network_distillation_is_per_step_or_per_second(cfg, weight):
    env = to_rsl_rl(ScriptedEnv(2, (3,)), cfg)
    rnd_cfg = {
        "num_outputs": 4,
        "predictor_hidden_dims": [8],
        "target_hidden_dims": [8],
        "weight": 0.5,
    }
    runner = make_runner(env, sets={"rnd_state": ["policy"]}, rnd_cfg=rnd_cfg)
    runner.learn(2)
    assert runner.alg.rnd.initial_weight == pytest.approx(weight)
    assert (runner.alg.intrinsic_rewards > 0).all()


def test_groups_of_images_reach_the_convolutions_of_rsl_rl():
    space = Dict(policy=VECTOR, camera=Box(0, 1, (1, 12, 12), np.float32))
    env = to_rsl_rl(ScriptedEnv(2, observation_space=space))
    cnn = {"output_channels": [4], "kernel_size": 3, "stride": 2}
    groups = ["policy", "camera"]
    runner = make_runner(
        env,
        models={"class_name": "CNNModel", "cnn_cfg": cnn},
        sets={"actor": groups, "critic": groups},
    )
    runner.learn(2)
    assert runner.alg.actor.obs_groups_2d == ["camera"]
    assert env.step(torch.zeros(2, 6))[3]["final_obs"]["camera"].shape == (2, 1, 12, 12)


def test_cfg_is_what_the_writers_of_weights_and_biases_and_neptune_take():
    from rsl_rl.utils.neptune_log_writer import NeptuneLogWriter
    from rsl_rl.utils.wandb_log_writer import WandbLogWriter

    env = to_rsl_rl(ScriptedEnv(2, (3,)), {"task": "arm"})
    stored = {}
    with pytest.MonkeyPatch.context() as patch:
        wandb = SimpleNamespace(config=stored)
        patch.setattr("rsl_rl.utils.wandb_log_writer.wandb", wandb)
        WandbLogWriter.store_config(None, env.cfg, {})
    assert stored["env_cfg"] == {"task": "arm"}
    run = {}
    NeptuneLogWriter.store_config(SimpleNamespace(run=run), env.cfg, {})
    assert run["env_cfg"] == {"task": "arm"}


# Refusals.


def test_bounds_of_actions_warn_unless_the_env_clips():
    env = tw.make("Pendulum-v1", 2)
    with pytest.warns(UserWarning, match=r"to_rsl_rl.*unbounded.*Box\(-2.0, 2.0.*ClipAction"):
        to_rsl_rl(env)
    with warnings.catch_warnings(action="error"):
        to_rsl_rl(tw.TransformedEnv(env, T.ClipAction()))


def test_cfg_of_another_type_is_refused():
    with pytest.raises(TypeError, match="cfg"):
        to_rsl_rl(ScriptedEnv(2, (3,)), [])
