"""Values that the user's functions read are read at each call."""

import pytest
import torch
from func_envs import unbounded
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Discrete

from torchwrap import FunctionalEnv, random

ACTION = torch.zeros(2, dtype=torch.int64)


class Reading(FuncEnv):
    """Its initial state and its reward are sums of whatever the functions of an env can read."""

    observation_space = unbounded(1)
    action_space = Discrete(2)
    broadcasts = True
    shared = 0.0

    def __init__(self):
        self.number = 0.0

    def total(self):
        return self.number + self.shared

    def initial(self, rng):
        return {"x": 0 * random.uniform(rng) + self.total()}

    def transition(self, state, action, rng):
        return {"x": state["x"] + 0}

    def observation(self, state, rng):
        return state["x"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng):
        return torch.zeros_like(state["x"]) + self.total()

    def terminal(self, state, rng):
        return state["x"] < 0


CHANGES = {  # each adds 1 to the total
    "a number": lambda f: setattr(f, "number", 1.0),
    "a class attribute": lambda f: setattr(type(f), "shared", 1.0),
}


@pytest.fixture
def env():
    kind = type("Own", (Reading,), {})  # a class attribute is changed
    env = FunctionalEnv(kind(), 2)
    env.reset(seed=0)
    return env


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_value_is_read_by_the_next_step_and_reset(env, change):
    change(env.func_env)
    transition, _ = env.step(ACTION)
    assert transition["next", "reward"].tolist() == [[1], [1]]
    assert env.reset()["observation"].tolist() == [
        [1],
        [1],
    ]
    assert env.reset(seed=0)["observation"].tolist() == [
        [1],
        [1],
    ]


def test_state_whose_memory_moved_is_read_by_the_next_step(env):
    env.state["x"].data = torch.tensor([7.0, 8.0])
    env.share_memory()  # moves the memory of each buffer
    transition, _ = env.step(ACTION)
    assert transition["next", "observation"].tolist() == [[7], [8]]
