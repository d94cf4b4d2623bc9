"""Image observations of examples/ppo.py; examples/maze.py and ablation.py."""

import dataclasses

import ablation
import cv2
import maze
import numpy as np
import ppo
import ppo_presets
import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from stable_baselines3.common.preprocessing import is_image_space_channels_first, preprocess_obs
from stable_baselines3.common.vec_env import VecTransposeImage

import torchwrap as tw
from torchwrap.testing import ScriptedEnv, check_env


def pixels(*shape, high=255, dtype="uint8"):
    return spaces.Box(0, high, shape, dtype)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        pytest.param(pixels(210, 160, 3), (3, 210, 160), id="channels last"),
        pytest.param(pixels(4, 84, 84), (4, 84, 84), id="channels first"),
        pytest.param(pixels(7, 7, 20, high=1), (20, 7, 7), id="many channels last"),
        pytest.param(pixels(20, 7, 7, high=1), (20, 7, 7), id="many channels first"),
        pytest.param(pixels(5, 6, 2, high=1, dtype="float32"), (2, 5, 6), id="floats"),
        pytest.param(pixels(96, 96), (1, 96, 96), id="gray"),
        pytest.param(pixels(7, 8, high=10, dtype="int64"), (11, 7, 8), id="grid"),
        pytest.param(spaces.Box(-1, 3, (7, 8), "int64"), (1, 7, 8), id="grid below zero"),
        pytest.param(pixels(4, 4, dtype="float32"), None, id="matrix of floats"),
        pytest.param(pixels(2, 9, high=3), None, id="too narrow for a grid"),
        pytest.param(pixels(4, 2, 3), None, id="too narrow for an image"),
        pytest.param(pixels(9), None, id="vector"),
        pytest.param(spaces.Dict(image=pixels(9, 9, 3)), None, id="Dict"),
    ],
)
def test_image_shape_is_channels_height_and_width(space, expected):
    assert ppo_presets.image_shape(space) == expected


@pytest.mark.parametrize("shape", [(3, 64, 48), (64, 48, 3), (1, 36, 36), (84, 84, 4)], ids=str)
def test_images_equal_those_of_stable_baselines(shape):
    space = pixels(*shape)
    observation = np.stack([space.sample(), space.sample()])
    images = observation
    if not is_image_space_channels_first(space):
        images = VecTransposeImage.transpose_image(observation)
    expected = preprocess_obs(torch.from_numpy(images), pixels(*images.shape[1:]))
    network = ppo_presets.ImageNetwork(space, 2, 1.0)
    found = network.to_images(torch.from_numpy(observation).float())
    torch.testing.assert_close(found, expected)


def test_grid_is_one_hot():
    space = pixels(4, 5, high=6, dtype="int64")
    grid = space.sample()
    found = ppo_presets.ImageNetwork(space, 2, 1.0).to_images(torch.from_numpy(grid).float())
    assert found.numpy().tolist() == np.moveaxis(np.eye(7)[grid], -1, 0).tolist()


@pytest.mark.parametrize(
    ("space", "scale"),
    [
        pytest.param(spaces.Box(-1, 0, (5, 5, 3)), 1, id="nothing above zero"),
        pytest.param(spaces.Box(-8, 2, (5, 5, 3)), 8, id="lower bound"),
        pytest.param(spaces.Box(0, np.inf, (5, 5, 3)), 1, id="unbounded floats"),
        pytest.param(spaces.Box(-np.inf, np.inf, (5, 5), "int64"), 1, id="unbounded integers"),
    ],
)
def test_pixels_are_divided_by_the_largest_magnitude_of_their_bounds(space, scale):
    assert ppo_presets.ImageNetwork(space, 2, 1.0).scale == scale


@pytest.mark.parametrize(
    ("space", "convolutions"),
    [(pixels(35, 50, 3), [(16, 3)]), (pixels(36, 50, 3), [(16, 8), (32, 4)])],
    ids=["small", "large"],
)
def test_network_takes_rows_of_any_batch_alone(space, convolutions):
    network = ppo_presets.ImageNetwork(space, 4, 1.0)
    layers = [layer for layer in network.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert [(layer.out_channels, layer.kernel_size[0]) for layer in layers] == convolutions
    observation = torch.randint(256, (2, 3, *space.shape)).float()
    with torch.no_grad():
        outputs = network(observation)
        single = network(observation[1, 2])
    assert outputs.shape == (2, 3, 4)
    torch.testing.assert_close(outputs[1, 2], single)


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
    agent.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["agent"])
    module = tw.deploy(env, lambda td: td.set("action", agent.actor(td["observation"]).argmax(-1)))
    td = env.reset(options={"state": {"cell": torch.arange(36)}})
    correct = module(td["observation"]) == (torch.arange(36) % 6 > 2)
    assert correct.sum() > 32


@pytest.mark.full
def test_ppo_resumed_after_its_end_returns_the_same_metrics(tmp_path):
    arguments = {"num_envs": 4, "num_steps": 8, "total_timesteps": 128, "out": tmp_path}
    first = ppo.main(ppo.Args(**arguments))
    again = ppo.main(ppo.Args(**arguments, resume=True))
    for name in ("env_steps", "final_mean_return", "seed"):
        assert again[name] == first[name]


# The maze


@pytest.mark.long
@pytest.mark.full
def test_maze_keeps_the_contract():
    check_env(lambda num_envs, **arguments: tw.make("Maze-v0", num_envs, **arguments))


@pytest.fixture(scope="module")
def mazes():
    env = tw.make("Maze-v0", 64)
    td = env.reset(seed=1)
    return env, td


def squares(flat):
    return flat.view(-1, maze.Maze.width, maze.Maze.width).numpy()


def test_every_maze_is_one_tree_of_25_rooms(mazes):
    env, _ = mazes
    free = squares(env.state["free"]).astype(np.uint8)
    assert len({each.tobytes() for each in free}) > 60  # of 64
    for each in free:
        count, _ = cv2.connectedComponents(each, connectivity=4)
        assert count == 2  # the walls, and one piece of free cells
        assert each.sum() == 25 + 24  # rooms, and the fewest passages that connect them


def test_agent_and_goal_start_in_different_rooms(mazes):
    state = mazes[0].state
    assert (state["agent"] != state["goal"]).all()
    for name in ("agent", "goal"):
        y, x = divmod(state[name].numpy(), maze.Maze.width)
        assert set(y) == set(x) == {4, 6, 8, 10, 12}


def test_window_is_a_square_around_the_agent():
    env = tw.make("Maze-v0", 16)
    env.reset(seed=0)
    for action in (0, 3, 1, 2, 0):
        before = env.state["agent"].clone()
        transition, _ = env.step(torch.full((16,), action))
    state = env.state
    rows = ~transition["next", "done"].squeeze(-1)
    assert rows.sum() > 10
    goal = torch.nn.functional.one_hot(state["goal"], maze.Maze.width**2)
    planes = [squares(plane) for plane in (state["free"], goal, state["trail"])]
    for row in rows.nonzero().flatten().tolist():
        y, x = divmod(state["agent"][row].item(), maze.Maze.width)
        windows = [plane[row, y - 3 : y + 4, x - 3 : x + 4] for plane in planes]
        assert transition["next", "observation"][row].numpy().tolist() == np.stack(windows).tolist()
        assert state["trail"][row, before[row]] == 1


@pytest.mark.parametrize("trail", [True, False])
def test_trail_fades_and_walls_stop_the_agent(trail):
    env = tw.make("Maze-v0", 1, trail=trail)
    env.reset(seed=0)
    free = torch.zeros(maze.Maze.width**2)
    free[140:143] = 1  # a corridor of three cells in row 8
    state = {"free": free[None], "agent": torch.tensor([140]), "goal": torch.tensor([142])}
    env.reset(options={"state": state})
    successors = []
    for action in (0, 3, 3):  # up, against the wall; then right
        transition, _ = env.step(torch.tensor([action]))
        successors.append(transition["next"])
    successors = torch.cat(successors)
    assert successors["reward"].flatten().tolist() == [0, 0, 1]
    assert successors["terminated"].flatten().tolist() == [False, False, True]
    middle = successors["observation"][:, :, 3]
    assert middle[:, 1].tolist() == [[0] * 5 + [1, 0], [0] * 4 + [1, 0, 0], [0] * 3 + [1, 0, 0, 0]]
    expected = torch.tensor([0, 0.85, 1, 0]) * trail
    torch.testing.assert_close(middle[2, 2, :4], expected)


def test_another_number_of_envs_keeps_the_batch_of_the_maze():
    args = dataclasses.replace(maze.ARGS, num_envs=64)
    ppo_presets.fill_in(args, tw.make)
    assert args.num_steps == 1024 * 16 / 64


@pytest.mark.full
def test_ablation_draws_one_plot_and_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "SEEDS", 2)
    monkeypatch.setattr(ablation, "VARIANTS", {"CNN": tw.make, "MLP": ablation.flat})
    args = ppo.Args(
        env_id="Maze-v0",
        num_envs=4,
        num_steps=100,
        total_timesteps=800,
        update_epochs=1,
        out=tmp_path,
    )
    ablation.main(args)
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"CNN-1", "CNN-2", "MLP-1", "MLP-2"}
    inputs = {"CNN": "actor.network.0.weight", "MLP": "actor.0.weight"}
    sizes = {"CNN": (16, 3, 3, 3), "MLP": (64, 3 * 7 * 7)}
    for variant, key in inputs.items():
        curve = ablation.learning_curve(args, variant, 1)
        assert curve[:, 0].tolist() == [400, 800]
        checkpoint = torch.load(tmp_path / f"{variant}-1" / "checkpoint.pt", weights_only=True)
        assert checkpoint["agent"][key].shape == sizes[variant]
