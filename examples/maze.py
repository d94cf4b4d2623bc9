"""A maze that the agent sees through a window of 7 x 7 cells, for the convolutions of ppo.py.

python examples/maze.py                         prints a maze and what the agent sees
python examples/ppo.py --env-id maze:Maze-v0 --num-envs 1024
python examples/ablation.py                     compares networks and observations
"""

import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Discrete
from torch.nn.functional import pad

import torchwrap as tw
from torchwrap import random


class Maze(FuncEnv):
    """Find the goal (reward 1, terminal). Walls differ by episode, and every goal can be reached.

    The window shows what is free, the goal, and the agent's trail, which fades.

    Args:
        trail: False hides the trail.
    """

    rooms = 5  # in a row; walls and passages between them are cells, too
    window = 7
    margin = window // 2
    width = 2 * rooms + 1 + 2 * margin
    action_space = Discrete(4)  # up, down, left, right
    observation_space = Box(0, 1, (3, window, window))

    def __init__(self, trail=True):
        super().__init__()
        self.trail = trail

    def initial(self, rng, params=None):
        shape = (self.rooms, self.rooms)
        index = torch.arange(self.rooms, device=rng.env.device).expand(shape)
        is_left = index == 0
        is_top = index.T == 0
        # Each room has one passage, up or to the left, so all are connected: a binary tree.
        is_up = (random.uniform(rng, shape=shape) < 0.5) | is_left
        up = is_up & ~is_top
        left = (~is_up | is_top) & ~is_left
        room = torch.ones_like(up)
        blocks = torch.stack([~room, up, left, room], -1).view(*shape, 2, 2)
        cells = blocks.transpose(1, 2).reshape(2 * self.rooms, 2 * self.rooms)
        free = pad(cells.float(), (self.margin, self.margin + 1) * 2).flatten()
        draws = random.uniform(rng.fold_in(1), shape=(self.rooms**2,))
        y, x = (draws.argsort()[:2] // self.rooms, draws.argsort()[:2] % self.rooms)
        corner = (self.margin + 1) * (self.width + 1)
        agent, goal = corner + 2 * (y * self.width + x)
        trail = torch.zeros_like(free)
        return {"free": free, "goal": goal, "agent": agent, "trail": trail}

    def transition(self, state, action, rng, params=None):
        distance = torch.where(action < 2, self.width, 1)
        target = state["agent"] + torch.where(action % 2 == 0, -distance, distance)
        is_free = state["free"].gather(0, target) > 0
        agent = torch.where(is_free, target, state["agent"])
        cells = torch.arange(self.width**2, device=agent.device)
        trail = torch.where(cells == state["agent"], 1, 0.95 * state["trail"])
        return {**state, "agent": agent, "trail": trail}

    def observation(self, state, rng, params=None):
        offsets = torch.arange(self.window, device=rng.env.device) - self.margin
        window = (offsets[:, None] * self.width + offsets).flatten() + state["agent"]
        free = state["free"].gather(0, window)
        goal = (window == state["goal"]).float()
        trail = self.trail * state["trail"].gather(0, window)
        return torch.stack([free, goal, trail]).view(3, self.window, self.window)

    def reward(self, state, action, next_state, rng, params=None):
        return self.terminal(next_state, rng).float()

    def terminal(self, state, rng, params=None):
        return state["agent"] == state["goal"]


tw.register("Maze-v0", Maze, max_episode_steps=100)

if __name__ == "__main__":
    env = tw.make("Maze-v0", num_envs=1)
    td = env.reset(seed=0)
    signs = torch.where(env.state["free"] > 0, 0, 1)
    signs[0, env.state["goal"]] = 2
    signs[0, env.state["agent"]] = 3
    for row in signs.view(Maze.width, Maze.width).tolist():
        print(*[".#GA"[sign] for sign in row])
    print(td["observation"])
