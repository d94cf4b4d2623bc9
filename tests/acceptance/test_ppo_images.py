"""Image observations of examples/ppo.py; examples/maze.py and ablation.py."""

import ppo
import ppo_parts
import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv

import torchwrap as tw
from torchwrap.testing import ScriptedEnv, check_env


def pixels(*shape, high=255, dtype="uint8"):
    return spaces.Box(0, high, shape, dtype)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        pytest.param(pixels(210, 160, 3), (3, 210, 160), id="channels last"),
        pytest.param(pixels(7, 7, 20, high=1), (20, 7, 7), id="many channels last"),
        pytest.param(pixels(96, 96), (1, 96, 96), id="gray"),
        pytest.param(pixels(7, 8, high=10, dtype="int64"), (11, 7, 8), id="grid"),
        pytest.param(pixels(2, 9, high=3), None, id="too narrow for a grid"),
        pytest.param(pixels(9), None, id="vector"),
    ],
)
def test_image_shape_is_channels_height_and_width(space, expected):
    assert ppo_parts.image_shape(space) == expected


def linear(inputs, outputs, std=2**0.5):
    layer = torch.nn.Linear(inputs, outputs)
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.zeros_(layer.bias)
    return [layer.weight, layer.bias]


def test_agent_of_a_vector_has_the_parameters_of_cleanrl_bit_for_bit():
    torch.manual_seed(1)
    agent = ppo.Agent(ppo.make_env(ppo.Args(), 2))
    torch.manual_seed(1)
    critic = linear(4, 64) + linear(64, 64) + linear(64, 1, 1.0)
    actor = linear(4, 64) + linear(64, 64) + linear(64, 2, 0.01)
    for parameter, expected in zip(agent.parameters(), critic + actor, strict=True):
        assert parameter.equal(expected)


def scripted(id, num_envs, **_):
    return ScriptedEnv(num_envs, observation_space=pixels(7, 7, 3), action_space=spaces.Discrete(2))


def test_images_are_neither_flattened_nor_normalized_and_rewards_are():
    args = ppo.Args(env_id="scripted", gamma=0.99, normalize=True)
    env = ppo.make_env(args, 2, scripted)
    names = [type(transform).__name__ for transform in env.transforms]
    assert names == ["RecordEpisodeStatistics", "NormalizeReward", "ClipReward"]
    assert env.single_observation_space == pixels(7, 7, 3)


class Lamp(FuncEnv):
    """Rewards the action that names the side of the lamp in a picture."""

    observation_space = pixels(6, 6, 3)
    action_space = spaces.Discrete(2)

    def initial(self, rng, params=None):
        return {"cell": tw.random.integers(rng, 36)}

    def transition(self, state, action, rng, params=None):
        return self.initial(rng)

    def observation(self, state, rng, params=None):
        cells = torch.arange(36, device=rng.env.device)
        picture = 255 * (cells == state["cell"]).to(torch.uint8)
        return picture.view(6, 6, 1).expand(6, 6, 3)

    def reward(self, state, action, next_state, rng, params=None):
        return (action == (state["cell"] % 6 > 2)).float()

    def terminal(self, state, rng, params=None):
        return state["cell"] < 0


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ppo_learns_from_pictures_and_is_deployed(registry, tmp_path, compiled):
    tw.register("test/Lamp-v0", Lamp, max_episode_steps=16)
    args = ppo.Args(
        env_id="test/Lamp-v0",
        num_envs=32,
        num_steps=32,
        total_timesteps=10_240,
        learning_rate=2e-3,
        compile=compiled,
        out=tmp_path,
    )
    assert ppo.main(args)["final_mean_return"] > 13  # of 16; at random 8
    env = ppo.make_env(args, 36)
    agent = ppo.Agent(env)
    agent.load_state_dict(torch.load(tmp_path / "agent.pt", weights_only=True)["agent"])
    deployed = tw.deploy(env, lambda td: agent.actor(td["observation"]).argmax(-1))
    td = env.reset(options={"state": {"cell": torch.arange(36)}})
    correct = deployed(td["observation"]) == (torch.arange(36) % 6 > 2)
    assert correct.sum() > 32


# The maze


@pytest.mark.long
@pytest.mark.full
def test_maze_keeps_the_contract():
    check_env(lambda num_envs, **arguments: tw.make("Maze-v0", num_envs, **arguments))
