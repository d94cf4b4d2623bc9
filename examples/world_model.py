"""A world model from pixels: a recurrent network predicts observations, rewards and ends.

python examples/world_model.py                     of grid_world.py, small and explored at random
python examples/world_model.py --torchrl-buffer    with TorchRL's SliceSampler

It learns from sequences that go on where an episode ends. Their rows are those of Dreamer: the
action and the reward belong to the observation that they led to. The state that the policy had,
declared by `PolicyState`, is stored with each row, so a sequence may begin in mid-episode (Kapturowski
et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import tyro
from grid_world import KeyAndDoor
from gymnasium.spaces import Box
from replay import SequenceBuffer, TorchRLSequenceBuffer
from tensordict import TensorDict
from torch import Tensor, nn

import torchwrap as tw
from torchwrap import transforms as T


@dataclass
class Args:
    seed: int = 1
    """seed of the environments and of PyTorch"""
    torchrl_buffer: bool = False
    """store transitions in TorchRL's replay buffer"""
    total_timesteps: int = 40_000
    """total number of env steps"""
    num_envs: int = 16
    """number of parallel environments"""
    num_steps: int = 32
    """steps of each environment between two training phases"""
    buffer_size: int = 50_000
    """number of rows in the buffer"""
    length: int = 50
    """number of rows of a sequence"""
    batch_size: int = 16
    """number of sequences per gradient step"""
    updates: int = 8
    """number of gradient steps after each collection"""
    learning_rate: float = 1e-3
    """learning rate of the optimizer"""
    latent_size: int = 128
    """size of the model's state"""


class Room(KeyAndDoor):
    size = 6
    tile = 4
    observation_space = Box(0, 255, (size * tile, size * tile, 3), "uint8")

    def observation(self, state, rng, params=None):
        return super().observation(state, rng, params)["pixels"]


def make_env(args: Args) -> tw.Env:
    env = tw.FunctionalEnv(Room(), args.num_envs, max_episode_steps=100)
    shapes = {"latent": (args.latent_size,), "last_action": (int(Room.action_space.n),)}
    return tw.TransformedEnv(env, T.RecordEpisodeStatistics(), tw.PolicyState(shapes))


class WorldModel(nn.Module):
    """The latent state of all observations so far, and the prediction of the next one."""

    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        self.shape = env.single_observation_space.shape
        self.num_actions = int(env.single_action_space.n)
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, kernel_size=Room.tile, stride=Room.tile),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * Room.size**2, args.latent_size),
            nn.ReLU(),
        )
        self.cell = nn.GRUCell(args.latent_size + self.num_actions, args.latent_size)
        self.features = nn.Sequential(
            nn.Linear(args.latent_size + self.num_actions, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
        )
        self.pixels = nn.Linear(256, math.prod(self.shape))
        self.reward = nn.Linear(256, 1)
        self.terminal = nn.Linear(256, 1)

    def embed(self, observation: Tensor) -> Tensor:
        """Features `(*, latent_size)` of images `(*, height, width, 3)`."""
        batch = observation.shape[:-3]
        images = observation.flatten(0, -4).movedim(-1, 1) / 255 - 0.5
        return self.encoder(images).unflatten(0, batch)

    def observe(self, embedding: Tensor, action: Tensor, latent: Tensor) -> Tensor:
        """The state after an observation, and after the one-hot action that led to it."""
        return self.cell(torch.cat([embedding, action], -1), latent)

    def states(self, rows: TensorDict) -> Tensor:
        """The states before each row, `(batch_size, length, latent_size)`."""
        embeddings = self.embed(rows["observation"])
        latent = rows["latent"][:, 0]
        states = []
        for step in range(rows.shape[1]):
            latent = latent.masked_fill(rows["is_first"][:, step : step + 1], 0)
            states.append(latent)
            latent = self.observe(embeddings[:, step], rows["last_action"][:, step], latent)
        return torch.stack(states, 1)

    def predict(self, rows: TensorDict) -> dict[str, Tensor]:
        """Predictions of each row from the state before it and the action."""
        inputs = torch.cat([self.states(rows), rows["last_action"]], -1)
        features = self.features(inputs)
        return {
            "pixels": self.pixels(features).unflatten(-1, self.shape),
            "reward": self.reward(features).squeeze(-1),
            "is_terminal": self.terminal(features).squeeze(-1),
        }

    def act(self, td: TensorDict) -> TensorDict:
        """Explores at random. An agent's actions would depend on the state."""
        embedding = self.embed(td["observation"])
        latent = self.observe(embedding, td["last_action"], td["latent"])
        td["action"] = torch.randint_like(td["is_init"][:, 0].long(), self.num_actions)
        td["next", "latent"] = latent
        one_hot = nn.functional.one_hot(td["action"], self.num_actions)
        td["next", "last_action"] = one_hot.float()
        return td


def losses(model: WorldModel, rows: TensorDict) -> dict[str, Tensor]:
    """Nothing predicts an initial observation, so its row has no loss."""
    prediction = model.predict(rows)
    is_led_to = ~rows["is_first"]
    pixels = (prediction["pixels"] - rows["observation"] / 255).square().mean((-1, -2, -3))
    reward = (prediction["reward"] - rows["reward"]).square()
    target = rows["is_terminal"].float()
    terminal = nn.functional.binary_cross_entropy_with_logits(
        prediction["is_terminal"], target, reduction="none"
    )
    parts = {"pixels": pixels, "reward": reward, "terminal": terminal}
    return {name: loss[is_led_to].mean() for name, loss in parts.items()}


@torch.no_grad()
def evaluate(model: WorldModel, args: Args) -> dict[str, float]:
    """The explained variance of rewards and the losses of new episodes."""
    data, _ = tw.rollout(env := make_env(args), model.act, 200, env.reset(seed=args.seed + 1_000))
    ...


def main(args: Args) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    env = make_env(args)
    model = WorldModel(env, args)
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate, fused=True)
    kind = TorchRLSequenceBuffer if args.torchrl_buffer else SequenceBuffer
    buffer = kind(args.buffer_size, args.length)
    collect = tw.Collector(env, model.act, args.num_steps)
    td = env.reset(seed=args.seed)
    num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    for iteration in range(num_iterations):
        data, td = collect(td)
        buffer.extend(data)
        if iteration * args.num_steps < args.length:
            continue
        for _ in range(args.updates):
            parts = losses(model, buffer.sample(args.batch_size))
            optimizer.zero_grad()
            sum(parts.values()).backward()
            optimizer.step()
        if iteration % 8 == 0:
            figures = ", ".join(f"{name} {loss:.4f}" for name, loss in parts.items())
            print(f"{(iteration + 1) * args.num_envs * args.num_steps:>8} env steps: {figures}")


if __name__ == "__main__":
    main(tyro.cli(Args))
