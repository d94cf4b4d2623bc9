"""A world model from pixels: a recurrent network predicts observations, rewards and ends.

python examples/world_model.py      of a ball that vanishes before it can be caught

The model learns from sequences of 50 rows, which go on where an episode ends. In a row are an
observation, and the action and the reward that led to it. `PolicyState` declares the model's state
and the last action. The buffer stores the state with each row, so that a sequence may begin in
mid-episode, as in Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement
Learning" (2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Discrete
from ppo import Flags
from replay import SequenceBuffer
from tensordict import TensorDict
from torch import Tensor, nn

import torchwrap as tw
from torchwrap import random


@dataclass
class Args(Flags):
    seed: int = 1
    """seed of the environments and of PyTorch"""
    total_timesteps: int = 64_000
    """total number of env steps"""
    num_envs: int = 64
    """number of parallel environments"""
    num_steps: int | None = None
    """steps of each environment between two training phases; None makes 3,200 of all"""
    updates: int = 20
    """number of gradient steps after each collection"""
    buffer_size: int = 100_000
    """number of rows in the buffer"""
    length: int = 50
    """number of rows of a sequence"""
    batch_size: int = 32
    """number of sequences per gradient step"""
    learning_rate: float = 3e-3
    """learning rate of the optimizer"""
    latent_size: int = 64
    """size of the model's state"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is None:  # as many updates per env step for any number of envs
            self.num_steps = max(1, 3_200 // self.num_envs)


class Catch(FuncEnv):
    """Reward 1 if the paddle is below the ball when it arrives, and -1 elsewhere.

    The ball falls straight down, and cannot be seen in the lower half. After Osband et al.,
    "Behaviour Suite for Reinforcement Learning" (2020).
    """

    size = 5  # cells
    tile = 3  # pixels of a cell
    action_space = Discrete(3)  # left, stay, right
    observation_space = Box(0, 255, (size * tile, size * tile, 1), "uint8")

    def initial(self, rng):
        row = random.integers(rng, 0, self.size // 2)
        return {
            "row": row,
            "column": random.integers(rng.fold_in(1), 0, self.size),
            "paddle": torch.full_like(row, self.size // 2),
        }

    def transition(self, state, action, rng):
        paddle = (state["paddle"] + action - 1).clamp(0, self.size - 1)
        return {"row": state["row"] + 1, "column": state["column"], "paddle": paddle}

    def observation(self, state, rng):
        cells = torch.arange(self.size, device=rng.env.device)
        is_seen = (cells < self.size // 2) | (cells == self.size - 1)
        is_row = (cells == state["row"]) & is_seen
        is_ball = is_row.unsqueeze(1) & (cells == state["column"])
        is_paddle = (cells == self.size - 1).unsqueeze(1) & (cells == state["paddle"])
        board = 255 * (is_ball | is_paddle).to(torch.uint8)
        rows = board.repeat_interleave(self.tile, 0)
        return rows.repeat_interleave(self.tile, 1).unsqueeze(-1)

    def reward(self, state, action, next_state, rng):
        is_caught = next_state["column"] == next_state["paddle"]
        return torch.where(is_caught, 1.0, -1.0) * self.terminal(next_state, rng)

    def terminal(self, state, rng):
        return state["row"] == self.size - 1


def make_env(args: Args) -> tw.Env:
    env = tw.FunctionalEnv(Catch(), args.num_envs)
    num_actions = int(env.single_action_space.n)
    shapes = {"latent": (args.latent_size,), "last_action": (num_actions,)}
    return tw.TransformedEnv(env, tw.PolicyState(shapes))


class WorldModel(nn.Module):
    """The state after all observations of an episode so far, and predictions of the next row."""

    def __init__(self, env: tw.Env, args: Args) -> None:
        super().__init__()
        self.shape = env.single_observation_space.shape
        self.num_actions = int(env.single_action_space.n)
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=Catch.tile, stride=Catch.tile),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * Catch.size**2, args.latent_size),
            nn.ReLU(),
        )
        inputs = args.latent_size + self.num_actions
        self.cell = nn.GRUCell(inputs, args.latent_size)
        self.hidden = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU())
        self.pixels = nn.Linear(128, math.prod(self.shape))
        self.reward = nn.Linear(128, 1)
        self.terminal = nn.Linear(128, 1)

    def embed(self, observation: Tensor) -> Tensor:
        """Features `(n, latent_size)` of images `(n, height, width, 1)`."""
        return self.encoder(observation.movedim(-1, 1) / 255)

    def observe(self, embedding: Tensor, action: Tensor, latent: Tensor) -> Tensor:
        """The state after an observation, and after the one-hot action that led to it."""
        return self.cell(torch.cat([embedding, action], -1), latent)

    def predict(self, rows: TensorDict) -> dict[str, Tensor]:
        """Predictions of the rows `(n, length)`, from the state before each one and the action."""
        action = rows["last_action"]
        flat = self.embed(rows["observation"].flatten(0, 1))
        embeddings = flat.unflatten(0, rows.shape)
        latent = rows["latent"][:, 0]
        latents = []
        for step, is_first in enumerate(rows["is_first"].unbind(1)):
            latent = latent.masked_fill(is_first.unsqueeze(1), 0)
            latents.append(latent)
            latent = self.observe(embeddings[:, step], action[:, step], latent)
        before = torch.stack(latents, 1)
        hidden = self.hidden(torch.cat([before, action], -1))
        return {
            "pixels": self.pixels(hidden).unflatten(-1, self.shape),
            "reward": self.reward(hidden).squeeze(-1),
            "terminal": self.terminal(hidden).squeeze(-1),
        }

    def act(self, td: TensorDict) -> TensorDict:
        """Explores at random. An agent would choose its action by the state."""
        embedding = self.embed(td["observation"])
        td["next", "latent"] = self.observe(embedding, td["last_action"], td["latent"])
        td["action"] = torch.randint(self.num_actions, td.shape, device=embedding.device)
        last_action = nn.functional.one_hot(td["action"], self.num_actions)
        td["next", "last_action"] = last_action.float()
        return td


def losses(model: WorldModel, rows: TensorDict) -> dict[str, Tensor]:
    """Means over the rows that an action led to. Nothing predicts an initial observation."""
    prediction = model.predict(rows)
    pixels = prediction["pixels"] - rows["observation"] / 255
    reward = prediction["reward"] - rows["reward"]
    is_terminal = rows["is_terminal"].float()
    terminal = nn.functional.binary_cross_entropy_with_logits(
        prediction["terminal"], is_terminal, reduction="none"
    )
    parts = {
        "pixels": pixels.square().sum((-1, -2, -3)),
        "reward": reward.square(),
        "terminal": terminal,
    }
    is_led_to = ~rows["is_first"]
    return {name: part[is_led_to].mean() for name, part in parts.items()}


@torch.no_grad()
def evaluate(model: WorldModel, args: Args) -> float:
    """The share of the variance of rewards at ends that the model predicts, in new episodes."""
    env = make_env(args)
    env.reset(seed=args.seed + 1_000_000)
    data = tw.rollout(env, model.act, 4 * args.length)
    buffer = SequenceBuffer(2 * data.numel(), args.length)
    buffer.extend(data)
    rows = buffer.sample(64)
    is_last = rows["is_last"]
    reward = rows["reward"][is_last]
    error = model.predict(rows)["reward"][is_last] - reward
    return 1 - (error.square().mean() / reward.var(correction=0)).item()


def main(args: Args) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    env = make_env(args)
    model = WorldModel(env, args)
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate, fused=True)
    buffer = SequenceBuffer(args.buffer_size, args.length)
    collect = tw.Collector(env, model.act, args.num_steps)
    env.reset(seed=args.seed)
    steps = args.num_envs * args.num_steps
    for global_step in range(steps, args.total_timesteps + 1, steps):
        data = collect()
        buffer.extend(data)
        if global_step < args.num_envs * args.length:
            continue  # there are no sequences of this length yet
        for _ in range(args.updates):
            parts = losses(model, buffer.sample(args.batch_size))
            optimizer.zero_grad()
            sum(parts.values()).backward()
            optimizer.step()
        means = ", ".join(f"{name} {loss:.4f}" for name, loss in parts.items())
        print(f"{global_step:>8} env steps: {means}")
    share = evaluate(model, args)
    print(f"evaluation: the model predicts {share:.0%} of the variance of rewards")
    return share


if __name__ == "__main__":
    main(tyro.cli(Args))
