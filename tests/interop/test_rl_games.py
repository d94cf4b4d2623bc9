"""to_rl_games and register under rl_games' own Runner, and against hand-computed episodes."""

import random
from pathlib import Path

import pytest

pytest.importorskip("rl_games")

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from helpers import RewardTerms
from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import IsaacAlgoObserver

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.rl_games import register, to_rl_games
from torchwrap.testing import ScriptedEnv

# rl_games looks NumPy's scalars up under their old path when it reads a checkpoint.
pytestmark = pytest.mark.filterwarnings("ignore:numpy.core is deprecated:DeprecationWarning")

VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
STATES = Dict({"obs": VECTOR, "states": Box(-np.inf, np.inf, (5,), np.float32)})
DEFAULT = {"name": "default"}
NETWORK = {
    "name": "actor_critic",
    "separate": True,
    "mlp": {"units": [16], "activation": "tanh", "initializer": DEFAULT},
}
CONTINUOUS = {
    "mu_activation": "None",
    "sigma_activation": "None",
    "mu_init": DEFAULT,
    "fixed_sigma": True,
}
CONTINUOUS["sigma_init"] = {"name": "const_initializer", "val": 0}


@pytest.fixture
def make_runner(tmp_path, monkeypatch):
    """Makes a Runner of an env, and undoes what it, and its import, change for the whole process."""
    state = (
        (
            lambda options: torch.set_printoptions(**options),
            dict(vars(torch._tensor_str.PRINT_OPTS)),
        ),
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (
            lambda limit: setattr(torch._dynamo.config, "cache_size_limit", limit),
            torch._dynamo.config.cache_size_limit,
        ),
        (torch.set_rng_state, torch.get_rng_state()),
        (np.random.set_state, np.random.get_state()),
        (random.setstate, random.getstate()),
    )
    from rl_games.torch_runner import Runner

    def make(
        make_env,
        num_actors=2,
        *,
        discrete=False,
        network=(),
        sac=False,
        seed=1,
        observer=None,
        **config,
    ):
        for registry in (vecenv.vecenv_config, env_configurations.configurations):
            monkeypatch.setitem(
                registry, "torchwrap", None
            )  # register replaces it, and the end of the test removes it
        register("torchwrap", make_env)
        config = {
            **{
                "env_name": "torchwrap",
                "name": "test",
                "full_experiment_name": "test",
                "train_dir": str(tmp_path),
            },
            **{
                "device": "cpu",
                "device_name": "cpu",
                "torch_compile": False,
                "num_actors": num_actors,
                "horizon_length": 8,
            },
            **{
                "minibatch_size": num_actors * config.get("horizon_length", 8),
                "mini_epochs": 1,
                "gamma": 0.5,
                "tau": 1.0,
            },
            **{
                "learning_rate": 1e-3,
                "lr_schedule": None,
                "e_clip": 0.2,
                "clip_value": False,
                "critic_coef": 1,
            },
            **{
                "entropy_coef": 0.0,
                "grad_norm": 1.0,
                "truncate_grads": True,
                "bounds_loss_coef": 0.0,
            },
            **{
                "normalize_input": True,
                "normalize_advantage": True,
                "reward_shaper": {},
                "max_epochs": 2,
                "env_config": {},
            },
            **{"print_stats": False, "save_best_after": 10_000, **config},
        }
        space = {"discrete": None} if discrete else {"continuous": CONTINUOUS}
        algo, model = (
            ("a2c_discrete", "discrete_a2c")
            if discrete
            else ("a2c_continuous", "continuous_a2c_logstd")
        )
        algo, model = ("sac", "soft_actor_critic") if sac else (algo, model)
        params = {
            "algo": {"name": algo},
            "model": {"name": model},
            "network": {**NETWORK, "space": space, **dict(network)},
        }
        runner = Runner(observer)
        runner.load({"params": {"seed": seed, "torch_threads": 1, "config": config, **params}})
        return runner

    yield make
    for restore, value in state:
        restore(value)


def make_agent(runner):
    return runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)


def checkpoint(tmp_path):
    (path,) = Path(tmp_path, "test", "nn").glob("last_*")
    return str(path)


# What rl_games is given.


def test_step_returns_what_the_env_does_with_staggered_ends(monkeypatch):
    lengths = (5, 3, 1, 4)  # ended by all three causes, and by none in some steps
    inner, oracle, seen = ScriptedEnv(4, (2,), lengths), ScriptedEnv(4, (2,), lengths), []
    env, step = to_rl_games(inner, seed=0), inner.step
    monkeypatch.setattr(
        inner, "step", lambda action: seen.append((action, *step(action))) or seen[-1][1:]
    )
    td = oracle.reset(seed=0)
    assert (env.reset() == td["observation"]).all()
    causes = set()
    for _ in range(40):
        actions = oracle.sample_action()
        obs, rewards, dones, infos = env.step(actions)
        transition, td = oracle.step(td.set("action", actions))
        successor = transition["next"]
        assert (obs == td["observation"]).all() and (
            infos["final_observation"] == successor["observation"]
        ).all()
        assert (
            rewards.tolist() == successor["reward"].flatten().tolist()
            and rewards.dtype == torch.float32
        )
        assert dones.tolist() == successor["done"].flatten().tolist() and dones.dtype == torch.bool
        pairs = list(
            zip(
                successor["terminated"].flatten().tolist(),
                successor["truncated"].flatten().tolist(),
                strict=True,
            )
        )
        assert infos["time_outs"].tolist() == [
            truncated and not terminated for terminated, truncated in pairs
        ]
        causes |= set(pairs)
    assert len(causes) == 4
    given, transition, td = seen[-1]  # passed on without copies
    assert given.data_ptr() == actions.data_ptr() and obs.data_ptr() == td["observation"].data_ptr()
    assert rewards.data_ptr() == transition["next", "reward"].data_ptr()
    assert infos["final_observation"].data_ptr() == transition["next", "observation"].data_ptr()


def test_seed_is_that_of_the_next_reset_alone():
    env = to_rl_games(tw.make("Pendulum-v1", 2), seed=3)
    first, second = env.reset(), env.reset()
    assert not (first == second).any()
    env.seed(3)
    assert (env.reset() == first).all()


def test_env_info_has_the_spaces_and_the_state_space():
    env = to_rl_games(ScriptedEnv(2, observation_space=STATES))
    expected = {
        "observation_space": VECTOR,
        "state_space": STATES["states"],
        "action_space": env.env.single_action_space,
    }
    assert env.get_env_info() == expected
    assert {key: value.shape for key, value in env.reset().items()} == {
        "obs": (2, 3),
        "states": (2, 5),
    }
    assert type(env.step(torch.zeros(2, 6))[3]["final_observation"]) is dict
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


def test_runner_trains_a_central_value_network_on_the_states(make_runner):
    central = {
        "minibatch_size": 16,
        "mini_epochs": 1,
        "learning_rate": 1e-3,
        "clip_value": False,
        "normalize_input": True,
    }
    central |= {"network": {**NETWORK, "separate": False, "central_value": True}}
    central |= {"e_clip": 0.2, "truncate_grads": False, "grad_norm": 1.0}
    runner = make_runner(
        lambda num_envs: ScriptedEnv(num_envs, observation_space=STATES),
        central_value_config=central,
    )
    agent = make_agent(runner)
    agent.train()
    assert agent.central_value_net.model.running_mean_std.running_mean.shape == (5,)
    assert agent.model.running_mean_std.running_mean.shape == (3,)


def test_isaac_observer_logs_the_numbers_of_the_info(make_runner, monkeypatch):
    make_env = lambda num_envs: tw.TransformedEnv(  # noqa: E731
        ScriptedEnv(num_envs, (3,), 2), RewardTerms(), T.ScaleReward(9)
    )
    agent, logged = (
        make_agent(make_runner(make_env, observer=IsaacAlgoObserver(), max_epochs=1)),
        {},
    )
    monkeypatch.setattr(
        agent.writer, "add_scalar", lambda name, value, step: logged.setdefault(name, float(value))
    )
    agent.train()
    assert (logged["Episode/twice"], logged["Episode/terms/half"]) == (3, 0.75)  # rewards 1 and 2
    assert "Episode/vector" not in logged


def test_runner_rescales_clipped_actions_to_the_box(make_runner):
    agent = make_agent(
        make_runner(lambda n: ScriptedEnv(n, (3,), action_space=Box(10, 14, (1,), np.float32)))
    )
    seen, step = [], agent.vec_env.step
    agent.vec_env.step = lambda actions: seen.append(actions) or step(actions)
    agent.train()
    actions = torch.cat(seen)
    assert actions.min() == 10 and actions.max() == 14 and ((actions > 10) & (actions < 14)).any()


def test_runner_saves_what_the_env_has_learned_and_restores_it(make_runner, tmp_path):
    made = []

    def make_env(num_envs):
        made.append(tw.TransformedEnv(tw.make("Pendulum-v1", num_envs), T.NormalizeObservation()))
        return made[-1]

    runner = make_runner(make_env, 4, player={"use_vecenv": True, "games_num": 4})
    runner.run({"train": True})
    learned = {name: value.clone() for name, value in made[0].state_dict().items()}
    assert learned and not all(
        (value == made[0].state_dict()[name]).all()
        for name, value in make_env(1).state_dict().items()
    )
    player = runner.create_player()
    player.restore(checkpoint(tmp_path))
    agent = make_agent(runner)
    agent.restore(checkpoint(tmp_path))
    agent.vec_env.set_env_state(None)  # as of the checkpoint of another env
    for env in (player.env.env, agent.vec_env.env):
        assert env is not made[0]
        for name, value in learned.items():
            assert (env.state_dict()[name] == value).all(), name


@pytest.mark.parametrize(("use_vecenv", "num_envs"), [(True, 4), (False, 1)])
def test_runner_trains_and_plays_images_and_discrete_actions(
    make_runner, tmp_path, capsys, use_vecenv, num_envs
):
    made = []

    def make_env(num_envs):
        image = Box(0, 255, (12, 12, 3), np.uint8)
        made.append(
            ScriptedEnv(num_envs, (3,), 3, observation_space=image, action_space=Discrete(3))
        )
        return made[-1]

    convs = [{"filters": 4, "kernel_size": 3, "strides": 2, "padding": 0}]
    cnn = {
        "type": "conv2d",
        "activation": "relu",
        "initializer": {"name": "default"},
        "convs": convs,
    }
    discrete = {
        "discrete": True,
        "network": {"cnn": cnn, "permute_input": True},
        "normalize_input": False,
    }
    player = {"use_vecenv": use_vecenv, "games_num": 4, "print_stats": False}
    runner = make_runner(make_env, 4, player=player, **discrete)
    runner.run({"train": True})
    capsys.readouterr()
    runner.run({"train": False, "play": True, "checkpoint": checkpoint(tmp_path)})
    assert made[-1].num_envs == num_envs
    assert "av reward: 6.0 av steps: 3.0" in capsys.readouterr().out


def test_ppo_bootstraps_time_outs_and_nothing_else(make_runner):
    # Rewards 1, 2 in each episode, from observations 0 and 1 to the final observation 2; gamma is 0.5. The first episode is
    # terminated, the second one truncated, the third one both, and the fourth one terminated.
    agent = make_agent(make_runner(lambda num_envs: ScriptedEnv(num_envs, (1,), 2), 1))
    values, agent.get_values = agent.get_action_values, lambda obs: obs["obs"]
    agent.get_action_values = lambda obs: {
        **values(obs),
        "values": obs["obs"],
    }  # the value of an observation is itself
    agent.init_tensors()
    agent.obs = agent.env_reset()
    with torch.no_grad():
        batch = agent.play_steps()
    assert batch["obses"].flatten().tolist() == [0, 1] * 4
    # 2 + 0.5 * V(1) at the time-out; with the final observation, it would be 2 + 0.5 * V(2).
    assert batch["returns"].flatten().tolist() == [2, 2, 1 + 0.5 * 2.5, 2.5, 2, 2, 2, 2]


def test_sac_stores_the_observation_acted_in_at_time_outs(make_runner):
    # Of the first episodes in four envs, those of envs 0 and 3 are terminated, that of env 1 is truncated, and of env 2 both.
    sac = {"name": "soft_actor_critic", "log_std_bounds": [-5, 2], "space": {"continuous": None}}
    rates = dict.fromkeys(("actor_lr", "critic_lr", "alpha_lr", "critic_tau"), 1e-3)
    settings = {
        "num_steps_per_episode": 1,
        "num_warmup_steps": 2,
        "num_seed_steps": 2,
        "init_alpha": 1.0,
        "batch_size": 4,
    }
    settings |= {"learnable_temperature": True, "replay_buffer_size": 16, "normalize_input": False}
    runner = make_runner(
        lambda n: ScriptedEnv(n, (1,), 2),
        4,
        sac=True,
        network=sac,
        max_epochs=4,
        **rates,
        **settings,
    )
    agent = make_agent(runner)
    agent.train()
    buffer = agent.replay_buffer
    assert buffer.obses[4:8, 0].tolist() == [1, 1001, 2001, 3001]
    assert buffer.next_obses[4:8, 0].tolist() == [0, 1001, 2000, 3000]
    assert buffer.dones[4:8, 0].tolist() == [True, False, True, True]
    assert buffer.actions.abs().max() <= 1


# Refusals.


def test_to_rl_games_refuses_what_rl_games_does_not_take():
    integers = ScriptedEnv(2, observation_space=Box(0, 9, (3,), np.int64))
    for env, message in (
        (torch.nn.Linear(1, 1), "needs a torchwrap.Env, but got Linear"),
        (
            ScriptedEnv(2, action_space=MultiDiscrete([2, 3])),
            "needs actions in a Discrete space or a bounded",
        ),
        (
            ScriptedEnv(2, action_space=Discrete(3, start=1)),
            r"actions that start at 0, but got Discrete\(3, start=1\)",
        ),
        (
            tw.TransformedEnv(tw.make("Pendulum-v1", 2), T.ClipAction()),
            "bounded float32 Box.*leave out transforms.ClipAction",
        ),
        (
            ScriptedEnv(2, observation_space=Discrete(3)),
            "needs observations in a Box with a dimension.*FlattenObs",
        ),
        (
            ScriptedEnv(2, observation_space=Dict({"a": VECTOR})),
            'of two of them, "obs" and "states", but got Dict',
        ),
        (
            integers,
            r'observations in float32 or uint8, but got Box.*int64\): put transforms.DtypeObservation\("float32"\)',
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=f"to_rl_games.*{message}"):
            to_rl_games(env)


def test_register_refuses_what_makes_no_env_or_another_number_of_envs(make_runner):
    for make_env in (ScriptedEnv(2), 3):
        with pytest.raises(TypeError, match="register needs a function that makes an env, but got"):
            register("refused", make_env)
    assert (
        "refused" not in vecenv.vecenv_config and "refused" not in env_configurations.configurations
    )
    runner = make_runner(lambda num_envs: ScriptedEnv(3), 2)
    with pytest.raises(
        ValueError, match=r"make_env\(2\) to make 2 envs, but got <ScriptedEnv\(num_envs=3"
    ):
        make_agent(runner)
