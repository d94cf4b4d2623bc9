"""What the user's functions read is read at each call, computed by PyTorch, and by the process that calls them."""

import dataclasses

import numpy as np
import torch
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Discrete
from torch import nn

from torchwrap import FunctionalEnv, random


@dataclasses.dataclass
class Config:
    gain: float = 0.0


class Reading(FuncEnv):
    """Its initial state and its reward are sums of whatever the functions of an env can read."""

    observation_space, action_space = Box(-np.inf, np.inf, (1,)), Discrete(2)
    broadcasts = True
    shared = 0.0

    def __init__(self):
        self.number, self.tensor, self.array = 0.0, torch.zeros(1), np.zeros(1, np.float32)
        self.items, self.named, self.config, self.module = (
            [0.0],
            {"a": 0.0},
            Config(),
            nn.BatchNorm1d(1),
        )

    def total(self):
        total = (
            self.number
            + self.shared
            + self.items[0]
            + self.named["a"]
            + self.config.gain
            + float(self.array[0])
        )
        return total + self.tensor[0] + self.module.running_mean[0]

    def initial(self, rng, params=None):
        return {"x": 0 * random.uniform(rng) + self.total()}

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] + 0}

    def observation(self, state, rng, params=None):
        return state["x"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params=None):
        return torch.zeros_like(state["x"]) + self.total()

    def terminal(self, state, rng, params=None):
        return state["x"] < 0


def test_values_that_change_are_followed_by_the_next_step_and_reset():
    class Own(Reading):
        pass

    env = FunctionalEnv(Own(), 2)
    env.reset(seed=0)
    func_env, expected = env.func_env, 0.0
    changes = [
        lambda: setattr(func_env, "number", 1.0),
        lambda: func_env.tensor.add_(1),
        lambda: func_env.tensor.data.add_(1),
        lambda: setattr(func_env, "tensor", func_env.tensor + 1),
        lambda: func_env.array.__iadd__(1),
        lambda: func_env.items.__setitem__(0, 1.0),
        lambda: func_env.named.update(a=1.0),
        lambda: setattr(func_env.config, "gain", 1.0),
        lambda: func_env.module.running_mean.add_(1),
        lambda: setattr(Own, "shared", 1.0),
    ]
    for change in changes:
        change()
        expected += 1
        assert (
            env.step(torch.zeros(2, dtype=torch.int64))[0]["next", "reward"].tolist()
            == [[expected]] * 2
        )
        assert (
            env.reset()["observation"].tolist()
            == env.reset(seed=0)["observation"].tolist()
            == [[expected]] * 2
        )
    env.state["x"].data = torch.tensor([7.0, 8.0])
    env.share_memory()  # moves the memory of each buffer
    assert env.step(torch.zeros(2, dtype=torch.int64))[0]["next", "observation"].tolist() == [
        [7],
        [8],
    ]
