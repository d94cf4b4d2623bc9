"""A maze, seen through a window of 7 x 7 cells: images of an own env, for the CNN of ppo.py.

python examples/maze.py             writes runs/ppo-Maze-v0/learning_curve.png, in some minutes
python examples/ablation.py         compares networks and what the agent sees
"""

import ppo
import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Discrete
from torch.nn.functional import pad

import torchwrap as tw
from torchwrap import random


class Maze(FuncEnv):
    """Find the goal (reward 1, terminal). Walls differ by episode; every goal can be reached.

    The agent sees free cells, the goal, and its own trail, which fades.

    Args:
        trail: False hides the trail.
    """

    rooms = 5  # in a row; the passages and walls between them are cells, too
    window = 7
    margin = window // 2
    width = 2 * rooms + 1 + 2 * margin
    action_space = Discrete(4)  # up, down, left, right
    observation_space = Box(0, 1, (3, window, window))

    def __init__(self, trail=True):
        super().__init__()
        self.trail = trail

    def initial(self, rng):
        # Each room has a passage up or to the left. So the rooms are a tree: all are connected.
        shape = (self.rooms, self.rooms)
        coin = random.uniform(rng, shape=shape) < 0.5
        is_left = torch.arange(self.rooms, device=rng.env.device) == 0
        is_top = is_left.unsqueeze(-1)
        up = (coin | is_left) & ~is_top
        left = (~coin | is_top) & ~is_left
        room = torch.ones_like(coin)
        blocks = torch.stack([~room, up, left, room], -1).view(*shape, 2, 2)
        cells = blocks.transpose(1, 2).reshape(2 * self.rooms, -1)
        free = pad(cells.float(), (self.margin, self.margin + 1) * 2).flatten()

        rooms = random.permutation(rng.fold_in(1), self.rooms**2)[:2]
        y = 2 * (rooms // self.rooms) + self.margin + 1
        x = 2 * (rooms % self.rooms) + self.margin + 1
        agent, goal = y * self.width + x
        return {"free": free, "goal": goal, "agent": agent, "trail": torch.zeros_like(free)}

    def transition(self, state, action, rng):
        distance = torch.where(action < 2, self.width, 1)
        target = state["agent"] + torch.where(action % 2 == 0, -distance, distance)
        is_free = state["free"].gather(0, target) > 0
        agent = torch.where(is_free, target, state["agent"])
        cells = torch.arange(self.width**2, device=agent.device)
        trail = torch.where(cells == state["agent"], 1, 0.85 * state["trail"])
        return {**state, "agent": agent, "trail": trail}

    def observation(self, state, rng):
        offsets = torch.arange(self.window, device=rng.env.device) - self.margin
        square = offsets.unsqueeze(-1) * self.width + offsets
        cells = state["agent"] + square.flatten()
        free = state["free"].gather(0, cells)
        goal = cells == state["goal"]
        trail = self.trail * state["trail"].gather(0, cells)
        return torch.stack([free, goal, trail]).view(3, self.window, self.window)

    def reward(self, state, action, next_state, rng):
        return self.terminal(next_state, rng).float()

    def terminal(self, state, rng):
        return state["agent"] == state["goal"]


tw.register("Maze-v0", Maze, max_episode_steps=100)
ARGS = ppo.Args(env_id="Maze-v0", ent_coef=0.01)

if __name__ == "__main__":
    ppo.main(tyro.cli(ppo.Args, default=ARGS))
