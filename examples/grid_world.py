"""A grid world with image observations: walls, a key and a door, as pure functions of tensors for FunctionalEnv.

python examples/grid_world.py        steps 1,024 envs and prints one of them
"""

import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict, Discrete

import torchwrap as tw
from torchwrap import random
from torchwrap import transforms as T

# Colors as 24 bits, because a table of them would be copied to the GPU at each step.
FLOOR, WALL, KEY, DOOR, AGENT = 0x000000, 0x5A5A5A, 0xFFDC00, 0x00A03C, 0xDC1E1E


class KeyAndDoor(FuncEnv):
    """Fetch the key (reward 0.5), then reach the door (reward 1, terminal). Steps cost 0.01. Walls differ by episode."""

    size, tile = 8, 6
    action_space = Discrete(4)  # up, down, left, right
    observation_space = Dict(
        pixels=Box(0, 255, (size * tile, size * tile, 3), "uint8"), has_key=Discrete(2)
    )

    def initial(self, rng, params=None):
        cells = torch.arange(self.size**2, device=rng.env.device)
        inner = torch.zeros(self.size, self.size, dtype=torch.bool, device=cells.device)
        inner[1:-1, 1:-1].fill_(True)
        # Agent, key and door take three distinct inner cells, the first of a random order. Walls avoid these.
        order = torch.where(
            inner.flatten(), random.uniform(rng, shape=(self.size**2,)), 2.0
        ).argsort()
        agent, key, door = order[0], order[1], order[2]
        is_wall = random.uniform(rng.fold_in(1), shape=(self.size**2,)) < 0.15
        walls = is_wall & (cells != agent) & (cells != key) & (cells != door)
        return {
            "agent": agent,
            "key": key,
            "door": door,
            "walls": walls | ~inner.flatten(),
            "has_key": torch.zeros_like(agent, dtype=torch.bool),
        }

    def transition(self, state, action, rng, params=None):
        distance = torch.where(action < 2, self.size, 1)
        target = state["agent"] + torch.where(action % 2 == 0, -distance, distance)
        agent = torch.where(state["walls"].gather(0, target), state["agent"], target)
        return {**state, "agent": agent, "has_key": state["has_key"] | (agent == state["key"])}

    def observation(self, state, rng, params=None):
        cells = torch.arange(self.size**2, device=rng.env.device)
        grid = torch.where(state["walls"], WALL, FLOOR)
        grid = torch.where((cells == state["key"]) & ~state["has_key"], KEY, grid)
        grid = torch.where(cells == state["door"], DOOR, grid)
        grid = torch.where(cells == state["agent"], AGENT, grid).view(self.size, self.size)
        colors = torch.stack([grid >> 16, grid >> 8, grid], -1).bitwise_and(255).to(torch.uint8)
        pixels = colors.repeat_interleave(self.tile, 0).repeat_interleave(self.tile, 1)
        return {"pixels": pixels, "has_key": state["has_key"].long()}

    def reward(self, state, action, next_state, rng, params=None):
        fetched = next_state["has_key"] & ~state["has_key"]
        return 0.5 * fetched + 1.0 * self.terminal(next_state, rng) - 0.01

    def terminal(self, state, rng, params=None):
        return state["has_key"] & (state["agent"] == state["door"])


def main():
    env = tw.FunctionalEnv(KeyAndDoor(), num_envs=1024, max_episode_steps=100)
    env = tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.FilterObservation(["pixels"]))
    data, td = tw.rollout(env, None, num_steps=100, td=env.reset(seed=0))
    print(
        f"{env}\n{data['next', 'terminated'].sum().item()} of {data['next', 'done'].sum().item()} episodes found the door"
    )
    signs = {FLOOR: ".", WALL: "#", KEY: "k", DOOR: "D", AGENT: "A"}
    for row in td["observation", "pixels"][0, :: KeyAndDoor.tile, :: KeyAndDoor.tile].tolist():
        print(" ".join(signs[red << 16 | green << 8 | blue] for red, green, blue in row))


if __name__ == "__main__":
    main()
