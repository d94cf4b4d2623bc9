"""A grid world with image observations, as pure functions of tensors: walls, a key and a door.

python examples/grid_world.py        steps 1,024 envs and prints one of them
"""

import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict, Discrete

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T

# Colors as 24 bits, because a table of them would be copied to the GPU at each step.
FLOOR = 0x000000
WALL = 0x5A5A5A
KEY = 0xFFDC00
DOOR = 0x00A03C
AGENT = 0xDC1E1E


class KeyAndDoor(FuncEnv):
    """Fetch the key (reward 0.5), then reach the door (reward 1, terminal). Steps cost 0.01.

    Walls differ by episode.
    """

    size = 8
    tile = 6  # pixels of a cell
    action_space = Discrete(4)  # up, down, left, right
    pixels = Box(0, 255, (size * tile, size * tile, 3), "uint8")
    observation_space = Dict(pixels=pixels, has_key=Discrete(2))

    def initial(self, rng, params=None):
        cells = torch.arange(self.size**2, device=rng.env.device)
        inner = torch.zeros(self.size, self.size, dtype=torch.bool, device=cells.device)
        inner[1:-1, 1:-1].fill_(True)
        inner = inner.flatten()
        # Agent, key and door take the first inner cells in random order. Walls avoid these.
        noise = random.uniform(rng, shape=cells.shape)
        agent, key, door = torch.where(inner, noise, 2.0).argsort()[:3]
        is_wall = random.uniform(rng.fold_in(1), shape=cells.shape) < 0.15
        is_free = (cells != agent) & (cells != key) & (cells != door)
        return {
            "agent": agent,
            "key": key,
            "door": door,
            "walls": (is_wall & is_free) | ~inner,
            "has_key": torch.zeros_like(agent, dtype=torch.bool),
        }

    def transition(self, state, action, rng, params=None):
        distance = torch.where(action < 2, self.size, 1)
        target = state["agent"] + torch.where(action % 2 == 0, -distance, distance)
        is_blocked = state["walls"].gather(0, target)
        agent = torch.where(is_blocked, state["agent"], target)
        has_key = state["has_key"] | (agent == state["key"])
        return {**state, "agent": agent, "has_key": has_key}

    def observation(self, state, rng, params=None):
        cells = torch.arange(self.size**2, device=rng.env.device)
        grid = torch.where(state["walls"], WALL, FLOOR)
        is_key = (cells == state["key"]) & ~state["has_key"]
        grid = torch.where(is_key, KEY, grid)
        grid = torch.where(cells == state["door"], DOOR, grid)
        grid = torch.where(cells == state["agent"], AGENT, grid)
        grid = grid.view(self.size, self.size)
        colors = torch.stack([grid >> 16, grid >> 8, grid], -1) & 255
        rows = colors.to(torch.uint8).repeat_interleave(self.tile, 0)
        pixels = rows.repeat_interleave(self.tile, 1)
        return {"pixels": pixels, "has_key": state["has_key"].long()}

    def reward(self, state, action, next_state, rng, params=None):
        fetched = next_state["has_key"] & ~state["has_key"]
        return 0.5 * fetched + 1.0 * self.terminal(next_state, rng) - 0.01

    def terminal(self, state, rng, params=None):
        return state["has_key"] & (state["agent"] == state["door"])


def main():
    env = tw.FunctionalEnv(KeyAndDoor(), num_envs=1024, max_episode_steps=100)
    env = tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.FilterObservation(["pixels"]))
    env.reset(seed=0)
    data = tw.rollout(env, None, num_steps=100)
    solved = data["next", "terminated"].sum()
    episodes = data["next", "done"].sum()
    print(f"{env}\n{solved} of {episodes} episodes found the door")
    signs = {FLOOR: ".", WALL: "#", KEY: "k", DOOR: "D", AGENT: "A"}
    tile = KeyAndDoor.tile
    for row in env.root["observation", "pixels"][0, ::tile, ::tile].tolist():
        print(*[signs[red << 16 | green << 8 | blue] for red, green, blue in row])


if __name__ == "__main__":
    main()
