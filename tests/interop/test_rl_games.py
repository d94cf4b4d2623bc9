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
    LOGGED,
    VECTOR,
    assert_two_ranks_share_statistics,
    moments,
    normalized,
    simulator,
    staggered,
    staggered_steps,
)
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from helpers import RewardTerms
from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import IsaacAlgoObserver
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
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


def test_step_returns_the_steps_of_the_env_with_staggered_ends():
    env = to_rl_games(staggered(), seed=0)
    env.reset()
    for action, successor, td, time_outs in staggered_steps():
        obs, rewards, dones, infos = env.step(action)
        assert torch.equal(obs, td["observation"])
        assert torch.equal(infos["final_observation"], successor["observation"])
        assert torch.equal(rewards, successor["reward"].squeeze(-1))
        assert torch.equal(dones, successor["done"].squeeze(-1))
        assert torch.equal(infos["time_outs"], time_outs)


def test_tensors_are_passed_on_without_copies(monkeypatch):
    inner = ScriptedEnv(4, (2,))
    env = to_rl_games(inner)
    env.reset()
    step = inner.step
    seen = []

    def recorded(action):
        seen.extend([action, *step(action)])
        return seen[1:]

    monkeypatch.setattr(inner, "step", recorded)
    action = inner.sample_action()
    obs, rewards, _, infos = env.step(action)
    given, transition, td = seen
    successor = transition["next"]
    assert given.data_ptr() == action.data_ptr()
    assert obs.data_ptr() == td["observation"].data_ptr()
    assert rewards.data_ptr() == successor["reward"].data_ptr()
    assert infos["final_observation"].data_ptr() == successor["observation"].data_ptr()


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


def first_scalars_of_training(agent, monkeypatch):
    logged = {}
    monkeypatch.setattr(
        agent.writer,
        "add_scalar",
        lambda name, value, step: logged.setdefault(name, float(value)),
    )
    agent.train()
    return logged


def test_isaac_observer_logs_the_numbers_of_the_info(make_runner, monkeypatch):
    def make_env(num_envs):
        env = ScriptedEnv(num_envs, (3,), 2)
        recorder = T.RecordEpisodeStatistics(metrics={"twice": "sum"})
        return tw.TransformedEnv(env, RewardTerms(), recorder, T.ScaleReward(9))

    agent = make_agent(make_runner(make_env, observer=IsaacAlgoObserver(), max_epochs=1))
    logged = first_scalars_of_training(agent, monkeypatch)
    assert logged["Episode/episode_twice"] == 6
    assert logged["Episode/episode_return"] == 3
    assert logged["Episode/twice"] == 3  # rewards 1 and 2
    assert logged["Episode/terms/half"] == 0.75
    assert "Episode/vector" not in logged


def test_isaac_observer_logs_what_the_simulator_logs(make_runner, monkeypatch):
    def make_env(num_envs):
        return simulator()

    agent = make_agent(make_runner(make_env, observer=IsaacAlgoObserver(), max_epochs=1))
    logged = first_scalars_of_training(agent, monkeypatch)
    for name in LOGGED:
        # The horizon is 8: resets 0, 1, 1, 2, 2, 3, 3, 4.
        factor = LOGGED[name][1]
        assert logged[f"Episode/{name}"] == factor * 2


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


def test_runner_rescales_clipped_actions_to_the_box(make_runner):
    space = Box(10, 14, (1,), np.float32)
    agent = make_agent(make_runner(lambda n: ScriptedEnv(n, (3,), action_space=space)))
    seen = []
    step = agent.vec_env.step
    agent.vec_env.step = lambda actions: seen.append(actions) or step(actions)
    agent.train()
    actions = torch.cat(seen)
    assert actions.min() == 10
    assert actions.max() == 14
    assert ((actions > 10) & (actions < 14)).any()


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


@pytest.mark.parametrize(("mode", "expected"), [(True, [7, 8]), (False, [1, 2])])
def test_params_of_an_env_state_are_those_of_the_env_that_trains(mode, expected):
    def make(first):
        params = {"length": first + torch.arange(2.0)}
        env = tw.FunctionalEnv(Pendulum(), 2, params=params)
        return tw.TransformedEnv(env, T.NormalizeObservation())

    training, other = make(7), make(1).train(mode)
    tw.rollout(training, None, 5)
    venv = to_rl_games(other)
    venv.set_env_state(to_rl_games(training).get_env_state())
    venv.reset()
    assert other.unwrapped.params["length"].tolist() == expected
    assert other.transforms[0].statistics.mean.any()


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


def test_sac_stores_the_observation_acted_in_at_time_outs(make_runner):
    # The first episodes of envs 0 and 3 are terminated, of env 1 truncated, and of env 2 both.
    rates = dict.fromkeys(("actor_lr", "critic_lr", "alpha_lr", "critic_tau"), 1e-3)
    network = {"name": "soft_actor_critic", "log_std_bounds": [-5, 2]}
    params = {
        "algo": {"name": "sac"},
        "model": {"name": "soft_actor_critic"},
        "network": {
            **NETWORK,
            **network,
            "space": {"continuous": None},
        },
    }
    runner = make_runner(
        lambda num_envs: ScriptedEnv(num_envs, (1,), 2),
        4,
        params=params,
        max_epochs=4,
        num_steps_per_episode=1,
        num_warmup_steps=2,
        num_seed_steps=2,
        init_alpha=1.0,
        batch_size=4,
        learnable_temperature=True,
        replay_buffer_size=16,
        normalize_input=False,
        **rates,
    )
    agent = make_agent(runner)
    agent.train()
    buffer = agent.replay_buffer
    assert buffer.obses[4:8, 0].tolist() == [1, 1001, 2001, 3001]
    assert buffer.next_obses[4:8, 0].tolist() == [0, 1001, 2000, 3000]
    assert buffer.dones[4:8, 0].tolist() == [True, False, True, True]
    assert buffer.actions.abs().max() <= 1


# Refusals.

REFUSED = {
    "MultiDiscrete actions": (
        {"action_space": MultiDiscrete([2, 3])},
        "actions",
    ),
    "actions from 1": (
        {"action_space": Discrete(3, start=1)},
        "action",
    ),
    "unbounded actions": ({"action_space": VECTOR}, "actions"),
    "Discrete observations": (
        {"observation_space": Discrete(3)},
        "observations",
    ),
    "other keys": (
        {"observation_space": Dict(a=VECTOR)},
        "observations",
    ),
    "integers": (
        {"observation_space": Box(0, 9, (3,), np.int64)},
        "observations",
    ),
}


@pytest.mark.parametrize(("spaces", "name"), REFUSED.values(), ids=REFUSED)
def test_spaces_that_rl_games_does_not_take_are_refused(spaces, name):
    with pytest.raises(ValueError, match=f"to_rl_games.*{name}"):
        to_rl_games(ScriptedEnv(2, **spaces))


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="to_rl_games"):
        to_rl_games(torch.nn.Linear(1, 1))


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
