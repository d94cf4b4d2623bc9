"""to_rl_games and register under rl_games' own Runner, and against hand-computed episodes."""

import copy
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("rl_games")

import numpy as np
import torch
from adapters import (
    VECTOR,
    assert_two_ranks_share_statistics,
    moments,
    normalized,
    simulator,
)
from gymnasium.spaces import Box, Dict, Discrete
from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import IsaacAlgoObserver
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.rl_games import register, to_rl_games
from torchwrap.testing import ScriptedEnv

# rl_games looks NumPy's scalars up under their old path when it reads a checkpoint.
pytestmark = pytest.mark.filterwarnings("ignore:numpy.core is deprecated:DeprecationWarning")

STATE = Box(-np.inf, np.inf, (5,), np.float32)
STATES = {
    "obs, states": Dict(obs=VECTOR, states=STATE),
    "policy, critic": Dict(policy=VECTOR, critic=STATE, other=STATE),
}
DEFAULT = {"name": "default"}
CONTINUOUS = {
    "mu_activation": "None",
    "sigma_activation": "None",
    "mu_init": DEFAULT,
    "sigma_init": {"name": "const_initializer", "val": 0},
    "fixed_sigma": True,
}
NETWORK = {
    "name": "actor_critic",
    "separate": True,
    "mlp": {
        "units": [16],
        "activation": "tanh",
        "initializer": DEFAULT,
    },
    "space": {"continuous": CONTINUOUS},
}
UPDATE = {
    "mini_epochs": 1,
    "learning_rate": 1e-3,
    "e_clip": 0.2,
    "clip_value": False,
    "grad_norm": 1.0,
    "truncate_grads": True,
    "normalize_input": True,
}
CONFIG = {
    "env_name": "torchwrap",
    "env_config": {},
    "name": "test",
    "full_experiment_name": "test",
    "device": "cpu",
    "device_name": "cpu",
    "torch_compile": False,
    "horizon_length": 8,
    "gamma": 0.5,
    "tau": 1.0,
    "lr_schedule": None,
    "critic_coef": 1,
    "entropy_coef": 0.0,
    "bounds_loss_coef": 0.0,
    "normalize_advantage": True,
    "reward_shaper": {},
    "max_epochs": 2,
    "print_stats": False,
    "save_best_after": 10_000,
    **UPDATE,
}
CONTINUOUS_PPO = {
    "algo": {"name": "a2c_continuous"},
    "model": {"name": "continuous_a2c_logstd"},
    "network": NETWORK,
}


@pytest.fixture
def settings():
    """Restores what rl_games changes for the whole process."""
    options = dict(vars(torch._tensor_str.PRINT_OPTS))
    num_threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    cache_size = torch._dynamo.config.cache_size_limit
    generators = (
        torch.get_rng_state(),
        np.random.get_state(),
        random.getstate(),
    )
    yield
    torch.set_printoptions(**options)
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.config.cache_size_limit = cache_size
    torch.set_rng_state(generators[0])
    np.random.set_state(generators[1])
    random.setstate(generators[2])


@pytest.fixture
def make_runner(settings, tmp_path, monkeypatch):
    """Makes a Runner of an env that is registered until the end of the test."""
    from rl_games.torch_runner import Runner

    def make(
        make_env,
        num_actors=2,
        *,
        params=CONTINUOUS_PPO,
        seed=1,
        observer=None,
        **config,
    ):
        for registry in (
            vecenv.vecenv_config,
            env_configurations.configurations,
        ):
            monkeypatch.setitem(registry, "torchwrap", None)  # register replaces it
        register("torchwrap", make_env)
        sizes = {
            "num_actors": num_actors,
            "minibatch_size": num_actors * 8,
        }
        config = {
            **CONFIG,
            "train_dir": str(tmp_path),
            **sizes,
            **config,
        }
        runner = Runner(observer)
        runner.load(
            {
                "params": {
                    "seed": seed,
                    "torch_threads": 1,
                    "config": config,
                    **params,
                }
            }
        )
        return runner

    return make


def make_agent(runner):
    return runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)


def checkpoint(tmp_path):
    (path,) = Path(tmp_path, "test", "nn").glob("last_*")
    return str(path)


# Steps.


def test_seed_is_that_of_the_next_reset_alone():
    env = to_rl_games(tw.make("Pendulum-v1", 2), seed=3)
    first = env.reset()
    assert not (env.reset() == first).any()
    env.seed(3)
    assert (env.reset() == first).all()


@pytest.mark.parametrize("space", STATES.values(), ids=STATES)
def test_env_info_has_the_spaces_and_the_state_space(space):
    env = to_rl_games(ScriptedEnv(2, observation_space=space))
    assert env.get_env_info() == {
        "observation_space": VECTOR,
        "state_space": STATE,
        "action_space": env.env.single_action_space,
    }
    initial = env.reset()
    final = env.step(torch.zeros(2, 6))[3]["final_observation"]
    for observation in (initial, final):
        assert set(observation) == {"obs", "states"}
        assert observation["obs"].shape == (2, 3)
        assert observation["states"].shape == (2, 5)
    assert "state_space" not in to_rl_games(ScriptedEnv(2)).get_env_info()


# The Runner.


def test_runner_seeds_the_env_and_passes_its_config(make_runner):
    seen = []

    def make_env(num_envs, **env_config):
        seen.append((num_envs, env_config))
        return ScriptedEnv(num_envs, (3,))

    agent = make_agent(make_runner(make_env, 4, seed=7, env_config={"size": 3}))
    assert seen == [(4, {"size": 3})]
    agent.env_reset()
    assert agent.vec_env.env.np_random_seed == 7


@pytest.mark.parametrize("space", STATES.values(), ids=STATES)
def test_runner_trains_a_central_value_network_on_the_states(make_runner, space):
    network = {**NETWORK, "separate": False, "central_value": True}
    runner = make_runner(
        lambda num_envs: ScriptedEnv(num_envs, observation_space=space),
        central_value_config={
            **UPDATE,
            "minibatch_size": 16,
            "network": network,
        },
    )
    agent = make_agent(runner)
    agent.train()
    central = agent.central_value_net.model.running_mean_std
    assert central.running_mean.shape == (5,)
    assert agent.model.running_mean_std.running_mean.shape == (3,)


def test_isaac_observer_takes_logs_that_come_and_go(make_runner, monkeypatch):
    class Rarely(T.Transform):
        """The simulator below logs in every second step; the info of this layer in each."""

        def step(self, td):
            return td.set("info", TensorDict({"reward": td["reward"]}, td.batch_size))

    def make_env(num_envs):
        base = simulator()
        step = base.functions["step"]

        def rarely(action):
            *results, extras = step(action)
            return *results, extras if results[2].any() else {}

        base.functions["step"] = rarely
        return tw.TransformedEnv(base, Rarely())

    agent = make_agent(make_runner(make_env, observer=IsaacAlgoObserver(), max_epochs=2))
    logged = {}
    monkeypatch.setattr(
        agent.writer,
        "add_scalar",
        lambda name, value, step: logged.update({name: float(value)}),
    )
    agent.train()
    assert logged["Episode/reward"] == 1
    # The second epoch has resets 5, 6, 7 and 8.
    assert logged["Episode/Episode_Reward/alive"] == 13


def test_runner_saves_the_statistics_of_the_env_and_restores_them(make_runner, tmp_path):
    made = []

    def make_env(num_envs):
        made.append(
            tw.TransformedEnv(
                tw.make("Pendulum-v1", num_envs),
                T.NormalizeObservation(),
            )
        )
        return made[-1]

    runner = make_runner(make_env, 4, player={"use_vecenv": True, "games_num": 4})
    runner.run({"train": True})
    learned = copy.deepcopy(made[0].state_dict())
    player = runner.create_player()
    player.restore(checkpoint(tmp_path))
    agent = make_agent(runner)
    agent.restore(checkpoint(tmp_path))
    for env in (player.env.env, agent.vec_env.env):
        assert env is not made[0]
        for name, value in learned.items():
            assert value.any(), name
            assert (env.state_dict()[name] == value).all(), name


def test_player_of_one_env_learns_no_statistics(make_runner, tmp_path):
    def make_env(num_envs):
        return tw.TransformedEnv(tw.make("Pendulum-v1", num_envs), T.NormalizeObservation())

    runner = make_runner(make_env, 4, player={"games_num": 1})
    runner.run({"train": True})
    player = runner.create_player()
    player.restore(checkpoint(tmp_path))
    learned = copy.deepcopy(player.env.env.state_dict())
    player.run()
    torch.testing.assert_close(dict(player.env.env.state_dict()), learned, rtol=0, atol=0)


def test_checkpoint_without_the_statistics_of_the_env_is_restored_with_a_warning():
    with pytest.warns(UserWarning, match="env_state"):
        to_rl_games(normalized(2)).set_env_state(None)
    to_rl_games(ScriptedEnv(2)).set_env_state(None)


def moments_of_a_rank(rank, group):
    env = normalized(3, first_index=3 * rank)
    venv = to_rl_games(env, seed=0)
    agent = SimpleNamespace(multi_gpu=True)  # its `train_epoch` begins with this call
    venv.set_train_info(0, agent)
    venv.reset()
    for _ in range(16):
        venv.step(torch.zeros(3, 6))
    venv.set_train_info(48, agent)
    return moments(env)


@pytest.mark.long
@pytest.mark.full
def test_two_ranks_share_the_statistics_of_all_their_envs():
    assert_two_ranks_share_statistics(moments_of_a_rank)


@pytest.mark.parametrize(("use_vecenv", "num_envs"), [(True, 4), (False, 1)])
def test_runner_trains_and_plays_images_and_discrete_actions(
    make_runner, tmp_path, capsys, use_vecenv, num_envs
):
    image = Box(0, 255, (12, 12, 3), np.uint8)
    made = []

    def make_env(num_envs):
        spaces = {
            "observation_space": image,
            "action_space": Discrete(3),
        }
        made.append(ScriptedEnv(num_envs, (3,), 3, **spaces))
        return made[-1]

    conv = {"filters": 4, "kernel_size": 3, "strides": 2, "padding": 0}
    cnn = {
        "type": "conv2d",
        "activation": "relu",
        "initializer": DEFAULT,
        "convs": [conv],
    }
    space = {"discrete": None}
    params = {
        "algo": {"name": "a2c_discrete"},
        "model": {"name": "discrete_a2c"},
        "network": {
            **NETWORK,
            "space": space,
            "cnn": cnn,
            "permute_input": True,
        },
    }
    player = {
        "use_vecenv": use_vecenv,
        "games_num": 4,
        "print_stats": False,
    }
    runner = make_runner(make_env, 4, params=params, player=player, normalize_input=False)
    runner.run({"train": True})
    capsys.readouterr()
    runner.run(
        {
            "train": False,
            "play": True,
            "checkpoint": checkpoint(tmp_path),
        }
    )
    assert made[-1].num_envs == num_envs
    assert "av reward: 6.0 av steps: 3.0" in capsys.readouterr().out


def test_ppo_bootstraps_time_outs_and_nothing_else(make_runner):
    # Rewards 1, 2 in each episode, from observations 0 and 1 to the final observation 2; gamma is
    # 0.5. The first episode is terminated, the second truncated, the third both, the fourth
    # terminated. The value of an observation is itself.
    agent = make_agent(make_runner(lambda num_envs: ScriptedEnv(num_envs, (1,), 2), 1))
    act = agent.get_action_values
    agent.get_values = lambda obs: obs["obs"]
    agent.get_action_values = lambda obs: {
        **act(obs),
        "values": obs["obs"],
    }
    agent.init_tensors()
    agent.obs = agent.env_reset()
    with torch.no_grad():
        batch = agent.play_steps()
    assert batch["obses"].flatten().tolist() == [0, 1] * 4
    # 2 + 0.5 * V(1) at the time-out; with the final observation, it would be 2 + 0.5 * V(2).
    expected = [2, 2, 1 + 0.5 * 2.5, 2.5, 2, 2, 2, 2]
    assert batch["returns"].flatten().tolist() == expected


# Refusals.


@pytest.mark.parametrize("make_env", [ScriptedEnv(2), 3], ids=["an env", "a number"])
def test_register_refuses_other_values_than_functions(make_env):
    with pytest.raises(TypeError, match="make_env"):
        register("refused", make_env)
    assert "refused" not in vecenv.vecenv_config
    assert "refused" not in env_configurations.configurations


def test_function_that_makes_another_number_of_envs_is_refused(
    make_runner,
):
    runner = make_runner(lambda num_envs: ScriptedEnv(3), 2)
    with pytest.raises(ValueError, match="make_env"):
        make_agent(runner)
