"""to_skrl: what skrl's trainers and agents see of an env, and what its agents store."""

# because the library may not be installed

from collections import OrderedDict

import pytest

skrl = pytest.importorskip("skrl")

import gymnasium  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402
from helpers import RewardTerms  # noqa: E402
from skrl.agents.torch.ppo import PPO  # noqa: E402
from skrl.agents.torch.sac import SAC  # noqa: E402
from skrl.envs.wrappers.torch.gymnasium_envs import GymnasiumWrapper  # noqa: E402
from skrl.memories.torch import RandomMemory  # noqa: E402
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model  # noqa: E402
from skrl.trainers.torch import SequentialTrainer, SequentialTrainerCfg  # noqa: E402
from skrl.utils.spaces.torch import flatten_tensorized_space, tensorize_space  # noqa: E402

import torchwrap as tw  # noqa: E402
from torchwrap import spaces  # noqa: E402
from torchwrap import transforms as T  # noqa: E402
from torchwrap.interop.skrl import to_skrl, true_successors  # noqa: E402
from torchwrap.testing import ScriptedEnv  # noqa: E402

QUIET = {"experiment": {"write_interval": 0, "checkpoint_interval": 0}}
NEVER = 10**9


def network(num_inputs, num_outputs):
    return torch.nn.Sequential(
        torch.nn.Linear(num_inputs, 16), torch.nn.Tanh(), torch.nn.Linear(16, num_outputs)
    )


class Value(DeterministicMixin, Model):
    def __init__(self, **kwargs):
        Model.__init__(self, **kwargs)
        DeterministicMixin.__init__(self)
        self.net = network(self.num_observations, 1)

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {}


class Gaussian(GaussianMixin, Model):
    def __init__(self, **kwargs):
        Model.__init__(self, **kwargs)
        GaussianMixin.__init__(self, clip_actions=True)
        self.net = network(self.num_observations, self.num_actions)
        self.log_std = torch.nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {"log_std": self.log_std}


def make_agent(kind, env, memory_size, **cfg):
    described = dict(
        observation_space=env.observation_space, action_space=env.action_space, device=env.device
    )
    models = {"policy": Gaussian(**described)}
    if kind is PPO:
        models["value"] = Value(**described)
    memory = RandomMemory(memory_size=memory_size, num_envs=env.num_envs, device=env.device)
    return kind(models=models, memory=memory, cfg={**QUIET, **cfg}, **described)


def train(env, agent, timesteps):
    cfg = dict(
        timesteps=timesteps,
        headless=True,
        disable_progressbar=True,
        close_environment_at_exit=False,
    )
    SequentialTrainer(cfg=SequentialTrainerCfg(**cfg), env=env, agents=agent).train()


def stored(env, timesteps, wrap=lambda agent: agent):
    """What an off-policy agent that does not learn has stored after so many steps of skrl's own trainer."""
    agent = wrap(make_agent(SAC, env, timesteps, learning_starts=NEVER, random_timesteps=NEVER))
    train(env, agent, timesteps)
    names = ("observations", "next_observations", "rewards", "terminated")
    return {name: agent.memory.get_tensor_by_name(name)[..., 0].clone() for name in names}


# Shapes and spaces.


def test_env_describes_itself_as_skrls_wrappers_do():
    env = to_skrl(ScriptedEnv(3, (2, 4), 2, action_space=Discrete(3)))
    assert isinstance(env, skrl.envs.wrappers.torch.Wrapper)
    assert (env.num_envs, env.num_agents, env.device, env.state_space) == (
        3,
        1,
        torch.device("cpu"),
        None,
    )
    assert (
        env.observation_space.shape == (2, 4)
        and env.action_space == Discrete(3)
        and env.state() is None
    )


def test_observations_equal_skrls_own_flattening():
    for space in (
        Box(0, 255, (3, 2), np.uint8),
        Discrete(4),
        Dict(
            OrderedDict(
                {"z": Box(-9, 9, (2,)), "a": Discrete(3), "m": Box(0, 255, (2, 2), np.uint8)}
            )
        ),  # kept in this order
        Dict(
            {
                "b": Dict({"y": MultiDiscrete([3, 4]), "x": Box(-1, 1, (1,), np.float64)}),
                "a": Box(-1, 1, (3,)),
            }
        ),
        Tuple([Box(-1, 1, (2,)), *(Discrete(n) for n in range(3, 14))]),
    ):
        env = ScriptedEnv(3, observation_space=space)
        theirs = flatten_tensorized_space(
            tensorize_space(space, spaces.to_numpy(space, env.reset()["observation"]))
        )
        ours, _ = to_skrl(ScriptedEnv(3, observation_space=space)).reset()
        assert ours.is_floating_point() == theirs.is_floating_point() and ours.shape == theirs.shape
        torch.testing.assert_close(ours.float(), theirs.float())


def test_actions_reach_the_env_in_its_own_shape_and_dtype():
    for space, given in (
        (Discrete(3), torch.tensor([[2], [1]], dtype=torch.int32)),
        (MultiDiscrete([3, 4]), torch.tensor([[2, 3], [1, 0]])),
        (Box(-1, 1, (2, 2)), torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]])),
        (Box(-1, 1, (1,), np.float64), torch.tensor([[0.25], [0.5]])),
    ):
        env = to_skrl(ScriptedEnv(2, (1,), action_space=space))
        env.reset()
        received = env.step(given)[-1]["action"]
        assert received.shape == (2, *space.shape) and received.dtype == spaces.dtype(space)
        assert (received.reshape(2, -1) == given).all()


def test_what_skrl_cannot_hold_is_refused_by_name():
    for env, message in (
        (gymnasium.make("CartPole-v1"), "needs a torchwrap.Env, but got TimeLimit"),
        (
            ScriptedEnv(2, observation_space=MultiBinary(3)),
            "observations in Box.*got MultiBinary.*Flatten",
        ),
        (ScriptedEnv(2, action_space=MultiBinary(3)), "actions in Box, Discrete.*got MultiBinary"),
        (
            ScriptedEnv(2, action_space=MultiDiscrete([[2, 3]])),
            "actions in .*one-dimensional MultiDiscrete",
        ),
        (ScriptedEnv(2, action_space=Discrete(3, start=1)), "start at 0.*TransformAction"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"to_skrl.*{message}"):
            to_skrl(env)


# Transitions.


def test_steps_equal_those_of_skrls_own_wrapper_of_gymnasium():
    skrl.config.torch.key = 7  # the seed of both
    mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
    theirs = GymnasiumWrapper(
        gymnasium.make_vec("CartPole-v1", 4, "sync", vector_kwargs=mode, max_episode_steps=14)
    )
    ours = to_skrl(tw.make("CartPole-v1", 4, backend="gymnasium", max_episode_steps=14))
    assert (ours.reset()[0] == theirs.reset()[0]).all()
    generator, ended = torch.Generator().manual_seed(0), np.zeros(2, int)
    for _ in range(60):
        action = torch.randint(2, (4, 1), generator=generator)
        *mine, infos = ours.step(action)
        *expected, their_infos = theirs.step(action)
        for value, other in zip(mine, expected, strict=True):
            assert (value == other).all() and value.dtype == other.dtype
        for row in (mine[2] | mine[3]).flatten().nonzero().flatten():
            assert (infos["final_observations"][row].numpy() == their_infos["final_obs"][row]).all()
        ended += [int(mine[2].sum()), int(mine[3].sum())]
    assert (ended > 3).all()
    ours.close()
    theirs.close()


def test_tensors_are_the_callers():
    # skrl's PPO adds to the reward in place. Nothing that the env computes later may depend on it.
    def make():
        transforms = T.RecordEpisodeStatistics(), T.NormalizeObservation(), T.NormalizeReward()
        return to_skrl(tw.TransformedEnv(ScriptedEnv(3, (1,), (2, 5)), *transforms))

    clean, disturbed = make(), make()
    assert (clean.reset()[0] == disturbed.reset()[0]).all()
    for _ in range(8):
        results = [env.step(torch.zeros(3, 6)) for env in (clean, disturbed)]
        tensors, others = ([*result[:4], result[4]["final_observations"]] for result in results)
        for tensor, other in zip(tensors, others, strict=True):
            assert (tensor == other).all()
            other.fill_(1)


# A single env, which skrl's trainers reset by themselves.


def test_single_env_in_skrls_trainer_loses_no_episode():
    inner = ScriptedEnv(1, (1,), (2, 1, 3), ending="truncated")
    data = stored(to_skrl(inner), 7)
    assert data["observations"].flatten().tolist() == [0, 1, 0, 0, 1, 2, 0]
    assert data["next_observations"].flatten().tolist() == [1, 2, 1, 1, 2, 3, 1]
    assert data["rewards"].flatten().tolist() == [1, 2, 1, 1, 2, 3, 1]
    assert not data["terminated"].any()
    assert (
        int(inner.episode) == 3
    )  # the fourth; with a second reset at each end it would be the seventh


# Agents.


def test_agent_stores_initial_observations_as_successors_unless_true_successors_is_called():
    first, second = (to_skrl(ScriptedEnv(2, (1,), (2, 3), ending="truncated")) for _ in range(2))
    plain, fixed = stored(first, 4), stored(second, 4, true_successors)
    # Env 0 takes episodes of 2 and 3 steps, env 1 of 3 and 2.
    assert (
        plain["observations"].tolist()
        == fixed["observations"].tolist()
        == [[0, 1000], [1, 1001], [0, 1002], [1, 1000]]
    )
    assert plain["next_observations"].tolist() == [[1, 1001], [0, 1002], [1, 1000], [2, 1001]]
    assert fixed["next_observations"].tolist() == [[1, 1001], [2, 1002], [1, 1003], [2, 1001]]


def bootstrapped(ending, wrap):
    """The rewards that PPO has stored for episodes of 2 steps in 2 envs, and its value function."""
    torch.manual_seed(0)
    env = to_skrl(ScriptedEnv(2, (1,), 2, ending=ending))
    agent = make_agent(PPO, env, 4, rollouts=NEVER, time_limit_bootstrap=True, discount_factor=0.9)
    train(env, wrap(agent), 4)
    return agent.memory.get_tensor_by_name("rewards")[..., 0], agent.value


def test_ppo_bootstraps_truncated_episodes_with_the_value_of_the_final_observation():
    def expected(value, reached):
        with torch.no_grad():
            bootstrap = 0.9 * value.net(torch.tensor([[reached], [1000.0 + reached]])).flatten()
        first, last = torch.ones(2), 2 + bootstrap
        return torch.stack([first, last, first, last])

    rewards, value = bootstrapped("truncated", true_successors)
    torch.testing.assert_close(rewards, expected(value, 2.0))
    rewards, value = bootstrapped(
        "truncated", lambda agent: agent
    )  # skrl on its own: that of the next episode's start
    torch.testing.assert_close(rewards, expected(value, 0.0))
    assert not torch.allclose(expected(value, 0.0), expected(value, 2.0))


def test_ppo_does_not_bootstrap_terminated_episodes():
    for ending in ("terminated", "both"):
        rewards, _ = bootstrapped(ending, true_successors)
        assert rewards.tolist() == [[1, 1], [2, 2], [1, 1], [2, 2]]


def test_true_successors_refuses_an_env_without_them_and_several_agents():
    with pytest.raises(
        TypeError, match="needs an skrl agent with record_transition, but got object"
    ):
        true_successors(object())
    theirs = GymnasiumWrapper(gymnasium.make_vec("Pendulum-v1", 2))
    with pytest.raises(
        ValueError, match=r"final_observations.*got none: make the env with to_skrl"
    ):
        stored(theirs, 1, true_successors)
    theirs.close()
    env = to_skrl(ScriptedEnv(2, (1,), 2))
    agents = [
        make_agent(SAC, env, 4, learning_starts=NEVER, random_timesteps=NEVER) for _ in range(2)
    ]
    for agent in agents:
        replaced = true_successors(agent).record_transition
        assert true_successors(agent).record_transition is replaced  # once
        agent.memory = RandomMemory(memory_size=4, num_envs=1)
    with pytest.raises(ValueError, match="got 2 for an agent with 1: use one agent for all envs"):
        train(env, agents, 2)


# Checkpoints, infos, seeds, rendering.


def test_agent_that_knows_the_env_saves_and_loads_what_it_has_learned(tmp_path):
    envs = [tw.TransformedEnv(ScriptedEnv(n, (1,), 2), T.NormalizeObservation()) for n in (3, 2)]
    agents = [
        make_agent(SAC, to_skrl(env), 4, learning_starts=NEVER, random_timesteps=NEVER)
        for env in envs
    ]
    for env, agent in zip(envs, agents, strict=True):
        agent.checkpoint_modules = {"env": to_skrl(env)}
    train(agents[0].checkpoint_modules["env"], agents[0], 4)
    agents[0].save(str(tmp_path / "agent.pt"))
    agents[1].load(str(tmp_path / "agent.pt"))
    assert all(
        (value == envs[1].state_dict()[name]).all() for name, value in envs[0].state_dict().items()
    )
    assert int(envs[1].transforms[0].statistics.count) == 3 + 3 * 4 + 3 * 2 and not envs[1].training


def test_episode_statistics_are_logged_by_skrls_trainer_as_means_of_the_finished_episodes():
    inner = tw.TransformedEnv(
        ScriptedEnv(3, (1,), (2, 3, 2)),
        RewardTerms(),
        T.RecordEpisodeStatistics(metrics={"most": ("twice", "max")}),
    )
    env = to_skrl(tw.TransformedEnv(inner, T.ClipReward(-1, 1)))  # of the rewards below
    agent = make_agent(SAC, env, 4, learning_starts=NEVER, random_timesteps=NEVER)
    train(env, agent, 3)
    # Envs 0 and 2 end with 1 + 2 after step 2, env 1 with 1 + 2 + 3 after step 3.
    assert agent.tracking_data["Info / return"] == [3, 6] and agent.tracking_data[
        "Info / length"
    ] == [2, 3]
    # Rewards 1, 1, 1; 2, 2, 2; and 1, 3, 1.
    assert agent.tracking_data["Info / twice"] == pytest.approx([2, 4, 10 / 3])
    assert agent.tracking_data["Info / most"] == [4, 6]
    assert (
        agent.tracking_data["terms/half"] == pytest.approx([1 / 2, 1, 5 / 6])
        and "Info / vector" not in agent.tracking_data
    )
    env = to_skrl(ScriptedEnv(2, (1,), 1))
    env.reset()
    assert "episode" not in env.step(torch.zeros(2, 6))[-1]


def test_seed_is_skrls_unless_the_env_was_reset_before():
    def first(seed=None, own=None):
        env = tw.make("CartPole-v1", 2)
        if own is not None:
            env.reset(seed=own)
        skrl.config.torch.key = seed
        return to_skrl(env).reset()[0]

    assert (first(3) == first(3)).all() and (first(3) != first(4)).any()
    assert (first(3, own=5) == first(4, own=5)).all() and (first(3, own=5) != first(3)).any()
    skrl.config.torch.key = 0
