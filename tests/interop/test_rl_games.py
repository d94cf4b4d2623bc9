"""to_rl_games and register under rl_games' own Runner, and against hand-computed episodes."""

import random
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

STATE = Box(0, 255, (5,), np.uint8)
PAIR = Dict(policy=VECTOR, critic=STATE, other=STATE)
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


# Steps.


def test_env_info_has_the_spaces_and_the_state_space():
    env = to_rl_games(ScriptedEnv(2, observation_space=PAIR, action_space=Discrete(3)))
    assert env.get_env_info() == {
        "observation_space": VECTOR,
        "state_space": STATE,
        "action_space": Discrete(3),
    }
    initial = env.reset()
    final = env.step(torch.tensor([0, 2]))[3]["final_observation"]
    for observation in (initial, final):
        assert set(observation) == {"obs", "states"}
        assert observation["obs"].shape == (2, 3)
        assert observation["states"].shape == (2, 5)
    assert "state_space" not in to_rl_games(ScriptedEnv(2)).get_env_info()


def test_action_of_a_single_env_may_lack_its_dimension():
    env = to_rl_games(ScriptedEnv(1, (3,), action_space=Discrete(3)))
    env.reset()
    assert env.step(torch.tensor(2))[0].shape == (1, 3)


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


def test_runner_trains_a_central_value_network_on_the_states(make_runner):
    network = {**NETWORK, "separate": False, "central_value": True}
    runner = make_runner(
        lambda num_envs: ScriptedEnv(num_envs, observation_space=PAIR),
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


def test_player_of_one_env_has_the_statistics_of_the_runner_and_learns_none(make_runner, tmp_path):
    made = []

    def make_env(num_envs):
        base = tw.make("Pendulum-v1", num_envs)
        made.append(tw.TransformedEnv(base, T.NormalizeObservation()))
        return made[-1]

    runner = make_runner(make_env, 4, player={"games_num": 1})
    runner.run({"train": True})
    learned = dict(made[0].state_dict())
    player = runner.create_player()
    (path,) = tmp_path.glob("test/nn/last_*")
    player.restore(str(path))
    player.run()
    played = player.env.env
    assert played is not made[0]
    torch.testing.assert_close(dict(played.state_dict()), learned, rtol=0, atol=0)


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
