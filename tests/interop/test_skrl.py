"""to_skrl: what skrl's trainers and agents see of an env, and the memories of its agents."""

import pytest

pytest.importorskip("skrl")

import gymnasium
import numpy as np
import skrl
import torch
from adapters import (
    DIVERGED,
    assert_two_ranks_share_statistics,
    diverging,
    moments,
    normalized,
)
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    Tuple,
)
from helpers import COPIES
from skrl.agents.torch.ppo import PPO
from skrl.agents.torch.sac import SAC
from skrl.envs.wrappers.torch.gymnasium_envs import GymnasiumWrapper
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.trainers.torch import SequentialTrainer, SequentialTrainerCfg
from skrl.utils.spaces.torch import (
    flatten_tensorized_space,
    tensorize_space,
)

from torchwrap import spaces
from torchwrap.interop.skrl import to_skrl, true_successors
from torchwrap.interop.tensors import from_functions
from torchwrap.testing import ScriptedEnv

NEVER = 10**9


def network(num_inputs, num_outputs):
    layers = (
        torch.nn.Linear(num_inputs, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, num_outputs),
    )
    return torch.nn.Sequential(*layers)


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
    described = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    models = {"policy": Gaussian(**described)}
    if kind is PPO:
        models["value"] = Value(**described)
    cfg["experiment"] = {"write_interval": 0, "checkpoint_interval": 0}
    memory = RandomMemory(
        memory_size=memory_size,
        num_envs=env.num_envs,
        device=env.device,
    )
    return kind(models=models, memory=memory, cfg=cfg, **described)


def make_idle_agent(env, memory_size=4):
    """An off-policy agent that draws its actions and does not learn."""
    return make_agent(
        SAC,
        env,
        memory_size,
        learning_starts=NEVER,
        random_timesteps=NEVER,
    )


def train(env, agent, timesteps):
    cfg = SequentialTrainerCfg(
        timesteps=timesteps,
        headless=True,
        disable_progressbar=True,
        close_environment_at_exit=False,
    )
    SequentialTrainer(cfg=cfg, env=env, agents=agent).train()


def stored(env, timesteps, wrap=lambda agent: agent):
    """The memory of an idle agent after so many steps of skrl's own trainer."""
    agent = wrap(make_idle_agent(env, timesteps))
    train(env, agent, timesteps)
    names = (
        "observations",
        "next_observations",
        "rewards",
        "terminated",
    )
    tensors = [agent.memory.get_tensor_by_name(name) for name in names]
    return {name: tensor[..., 0] for name, tensor in zip(names, tensors, strict=True)}


# Shapes and spaces.


IMAGE = Box(0, 255, (3, 2), np.uint8)
DOUBLE = Box(-1, 1, (1,), np.float64)
MATRIX = Box(-1, 1, (2, 2), np.float64)
INNER = Dict([("y", MultiDiscrete([3, 4])), ("x", DOUBLE)])
OBSERVATIONS = {
    "image": IMAGE,
    "Discrete": Discrete(4),
    "unsorted Dict": Dict([("b", INNER), ("a", Discrete(3)), ("m", IMAGE)]),
    "long Tuple": Tuple([Box(-1, 1, (2,)), *(Discrete(n) for n in range(3, 14))]),
}


@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_observations_equal_skrls_own_flattening(space):
    env = ScriptedEnv(3, observation_space=space)
    value = spaces.to_numpy(space, env.reset()["observation"])
    theirs = flatten_tensorized_space(tensorize_space(space, value))
    ours, _ = to_skrl(ScriptedEnv(3, observation_space=space)).reset()
    assert ours.is_floating_point() == theirs.is_floating_point()
    torch.testing.assert_close(ours.float(), theirs.float())


@pytest.mark.parametrize(
    ("space", "given"),
    [(Discrete(3), torch.tensor([[2], [1]])), (MATRIX, torch.arange(8).view(2, 4) / 8)],
    ids=["Discrete", "float64 matrix"],
)
def test_actions_reach_the_env_in_its_own_shape_and_dtype(space, given):
    env = to_skrl(ScriptedEnv(2, (1,), action_space=space))
    env.reset()
    received = env.step(given)[-1]["action"]
    assert received.shape == (2, *space.shape)
    assert received.dtype == spaces.dtype(space)
    assert (received.reshape(2, -1) == given).all()


# Transitions.


def test_single_env_in_skrls_trainer_loses_no_episode():
    inner = ScriptedEnv(1, (1,), (2, 1, 3), ending="truncated")
    data = stored(to_skrl(inner), 7)
    assert data["observations"].flatten().tolist() == [
        0,
        1,
        0,
        0,
        1,
        2,
        0,
    ]
    assert data["next_observations"].flatten().tolist() == [
        1,
        2,
        1,
        1,
        2,
        3,
        1,
    ]
    assert torch.equal(data["rewards"], data["next_observations"])
    assert not data["terminated"].any()
    assert int(inner.episode) == 3  # the fourth; two resets at each end would make it the seventh


# States, for a critic that sees more than the actor.

PAIRS = [("policy", "critic"), ("actor", "critic"), ("obs", "states")]
ACTOR = Box(-np.inf, np.inf, (2,), np.float32)
CRITIC = Dict(b=Box(-np.inf, np.inf, (1,), np.float32), a=Discrete(4))
KEYS = {f"{actor}, {critic}": (actor, critic) for actor, critic in PAIRS}


def asymmetric(num_envs=2, keys=("policy", "critic"), **kwargs):
    space = Dict({keys[0]: ACTOR, keys[1]: CRITIC, "other": ACTOR})
    return to_skrl(ScriptedEnv(num_envs, observation_space=space, **kwargs))


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_groups_of_actor_and_critic_are_observations_and_states(keys):
    env = asymmetric(keys=keys)
    assert env.observation_space == ACTOR
    assert env.state_space == CRITIC
    oracle = asymmetric(keys=keys)._env
    td = oracle.reset(seed=0)
    skrl.config.torch.key = 0
    observations, _ = env.reset()
    for _ in range(6):
        assert torch.equal(observations, td["observation", keys[0]])
        value = spaces.to_numpy(CRITIC, td["observation", keys[1]])
        theirs = flatten_tensorized_space(tensorize_space(CRITIC, value))
        torch.testing.assert_close(env.state(), theirs)
        observations, *_ = env.step(torch.zeros(2, 6))
        _, td = oracle.step(torch.zeros(2, 6))


def test_states_of_finished_episodes_are_in_infos_and_with_true_successors_in_the_memory():
    env = asymmetric(episode_lengths=1, ending="truncated")
    agent = make_idle_agent(env, 1)
    seen = {}
    agent.record_transition = lambda **kwargs: seen.update(kwargs)
    train(env, true_successors(agent), 1)
    final = seen["infos"]["final_states"]
    assert (final != env.state()).any()
    assert torch.equal(seen["next_states"], final)
    assert torch.equal(seen["states"], env.state())  # initial ones of two episodes
    # A state that diverged is replaced where the episode terminated.
    diverged = {"infos": {**seen["infos"], "final_states": final * torch.nan}}
    agent.record_transition(**{**seen, **diverged, "terminated": seen["truncated"]})
    assert torch.equal(seen["next_states"], seen["states"])


def test_states_of_a_single_env_are_of_the_observation_that_goes_with_them():
    env = asymmetric(1, episode_lengths=1)
    env.reset()
    first = env.state()
    *_, infos = env.step(torch.zeros(1, 6))
    assert torch.equal(env.state(), infos["final_states"])
    env.reset()
    assert torch.equal(env.state(), first)
    env.reset()  # without a step before: another episode
    assert env.unwrapped.episode == 2


# Agents.


def test_agent_stores_true_successors():
    env = to_skrl(ScriptedEnv(2, (1,), (2, 3), ending="truncated"))
    data = stored(env, 4, true_successors)
    # Env 0 takes episodes of 2 and 3 steps, env 1 of 3 and 2.
    assert data["observations"].tolist() == [[0, 1000], [1, 1001], [0, 1002], [1, 1000]]
    assert data["next_observations"].tolist() == [[1, 1001], [2, 1002], [1, 1003], [2, 1001]]


def test_ppo_bootstraps_truncated_episodes_alone_from_the_final_observation():
    torch.manual_seed(0)
    env = to_skrl(ScriptedEnv(2, (1,), 2))
    cfg = {"rollouts": NEVER, "time_limit_bootstrap": True, "discount_factor": 0.9}
    agent = make_agent(PPO, env, 4, **cfg)
    train(env, true_successors(agent), 4)
    rewards = agent.memory.get_tensor_by_name("rewards")[..., 0]
    with torch.no_grad():
        of_0, of_1 = agent.value.net(torch.tensor([[2.0], [1002.0]])).flatten()
    # The endings are terminated and truncated; truncated and both.
    expected = [1, 2, 1, 2 + 0.9 * of_0], [1, 2 + 0.9 * of_1, 1, 2]
    torch.testing.assert_close(rewards, torch.tensor(expected).T)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("value", DIVERGED.values(), ids=DIVERGED)
def test_memory_holds_the_last_observation_for_a_final_one_that_diverged(value, num_envs):
    env = to_skrl(diverging(value, num_envs, (1,), 2))
    data = stored(env, 2, true_successors)
    expected = torch.tensor([[1, 1001, 2001], [1, 1002, 2001]])  # env 1 is truncated
    assert data["next_observations"].tolist() == expected[:, :num_envs].tolist()


def test_true_successors_replaces_once():
    agent = make_idle_agent(to_skrl(ScriptedEnv(2, (1,), 2)))
    replaced = true_successors(agent).record_transition
    assert true_successors(agent).record_transition is replaced


def test_true_successors_refuses_other_objects_and_other_envs():
    with pytest.raises(TypeError, match="agent"):
        true_successors(object())
    theirs = GymnasiumWrapper(gymnasium.make_vec("Pendulum-v1", 2))
    with pytest.raises(ValueError, match="final_observations"):
        stored(theirs, 1, true_successors)
    theirs.close()


def test_true_successors_refuses_several_agents_in_one_trainer():
    env = to_skrl(ScriptedEnv(2, (1,), 2))
    agents = [true_successors(make_idle_agent(env)) for _ in range(2)]
    for agent in agents:
        agent.memory = RandomMemory(memory_size=4, num_envs=1)
    with pytest.raises(ValueError, match="agent"):
        train(env, agents, 2)


# Checkpoints, infos and seeds.


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_infos_are_copied_without_the_env(copied):
    env = to_skrl(ScriptedEnv(2, (1,)))
    env.reset()
    *_, infos = env.step(torch.zeros(2, 6))
    found = copied(infos)
    assert type(found) is dict
    torch.testing.assert_close(found, dict(infos), rtol=0, atol=0)


def test_later_reset_in_eval_mode_without_statistics_warns():
    env = normalized(2)
    venv = to_skrl(env)
    venv.reset()
    env.eval()
    with pytest.warns(UserWarning, match=r"to_skrl.*statistics"):
        venv.reset()


def test_agent_that_is_not_given_the_env_knows_it_from_the_first_step():
    env = to_skrl(normalized(2))
    other = object()
    agents = [true_successors(make_idle_agent(env)) for _ in range(2)]
    agents[1].checkpoint_modules["env"] = other
    for agent in agents:
        train(env, agent, 1)
    assert agents[0].checkpoint_modules["env"] is env
    assert agents[1].checkpoint_modules["env"] is other


def moments_of_a_rank(rank, group, is_module):
    skrl.config.torch._is_distributed = True
    env = normalized(3, first_index=3 * rank)
    venv = to_skrl(env)
    agent = make_agent(PPO, venv, 8, rollouts=8, mini_batches=1, learning_epochs=1)
    true_successors(agent)
    if is_module:
        agent.checkpoint_modules["env"] = env
    train(venv, agent, 16)
    return moments(env)


@pytest.mark.parametrize("is_module", [True, False], ids=["checkpoint module", "first step"])
def test_two_ranks_share_the_statistics_of_all_their_envs(is_module):
    assert_two_ranks_share_statistics(moments_of_a_rank, is_module)


def test_simulator_without_a_seed_refuses_one_that_was_set():
    def reset(mask):
        return torch.zeros(2, 1)

    space = Box(-1, 1, (1,))
    assert (to_skrl(from_functions(reset, reset, 2, space, space)).reset()[0] == 0).all()
    skrl.config.torch.key = 3
    with pytest.raises(ValueError, match="seed"):
        to_skrl(from_functions(reset, reset, 2, space, space)).reset()
    skrl.config.torch.key = 0
