"""Parameters that differ between envs, and tensors that functions hold."""

import gymnasium
import numpy as np
import pytest
import torch
from func_envs import both_styles, equal, play, unbounded
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from torch import nn

import torchwrap as tw
from torchwrap import FunctionalEnv, random
from torchwrap import transforms as T

LEFT = torch.zeros(2, dtype=torch.int64)


class Falling(FuncEnv):
    """Falls as fast as its own parameter says."""

    observation_space = unbounded(1)
    action_space = spaces.Discrete(2)
    broadcasts = False

    def initial(self, rng, params):
        return {"height": params["from"][..., 0] + random.uniform(rng)}

    def transition(self, state, action, rng, params):
        return {"height": state["height"] - params["gravity"]}

    def observation(self, state, rng, params):
        return state["height"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params):
        return params["gravity"]

    def terminal(self, state, rng, params):
        return state["height"] < 0


class BroadcastFalling(Falling):
    broadcasts = True


def parameters(num_envs, first=0):
    gravity = torch.arange(first, first + num_envs) + 1.0
    return {"gravity": gravity, "from": 10 * torch.ones(num_envs, 1)}


@both_styles(Falling(), BroadcastFalling())
def test_params_differ_between_envs(func_env):
    env = FunctionalEnv(func_env, 4, params=parameters(4))
    actions = torch.zeros(20, 4, dtype=torch.int64)
    together, _ = play(env, env.reset(seed=1), actions)
    assert together[0]["next", "reward"].flatten().tolist() == [1, 2, 3, 4]
    for row in range(4):
        single = FunctionalEnv(func_env, 1, first_index=row, params=parameters(1, row))
        alone, _ = play(single, single.reset(seed=1), actions[:, [row]])
        assert equal(together[:, [row]], alone)
    env.params["gravity"].fill_(7)
    changed, _ = play(env, env.reset(), actions[:1])
    assert changed["next", "reward"].flatten().tolist() == [7, 7, 7, 7]


class Level(gymnasium.Env):
    """A single env of Gymnasium whose reward is its level."""

    observation_space = spaces.Box(-9, 9, (1,))
    action_space = spaces.Discrete(2)
    level = 1.0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self.level, False, False, {}


class NativeLevel(Falling):
    def reward(self, state, action, next_state, rng, params):
        return params["level"]


@pytest.fixture
def native_level(registry):
    tw.register("test/Level-v0", NativeLevel, max_episode_steps=50)
    params = {**parameters(2), "level": torch.ones(2)}
    return tw.make("test/Level-v0", 2, params=params)


@pytest.fixture
def make_level(native_level, registry):
    """Makes an env of each kind."""

    def make(kind):
        if kind in ("native", "compiled"):
            return native_level
        gymnasium.register("test/Level-v1", entry_point=Level)
        return tw.make("test/Level-v1", 2, vectorization_mode=kind)

    return make


@pytest.mark.parametrize("kind", ["native", "compiled", "sync", "async"])
def test_set_wrapper_attr_changes_a_number_of_every_kind_of_env(kind, make_level):
    with tw.TransformedEnv(make_level(kind), T.RecordEpisodeStatistics()) as env:
        if kind == "compiled":
            tw.compile(env, backend="eager")
        env.reset(seed=0)
        for level in (1.0, 3.0, 7.0):
            assert env.set_wrapper_attr("level", level)
            transition, _ = env.step(LEFT)
            assert transition["next", "reward"].tolist() == [[level], [level]]
            assert list(env.get_wrapper_attr("level")) == [level, level]


def test_set_wrapper_attr_with_a_value_that_does_not_broadcast_raises(native_level):
    with pytest.raises(ValueError, match="level"):
        native_level.set_wrapper_attr("level", [1, 2, 3])


def test_params_are_part_of_the_spec(native_level):
    assert equal(tw.make(native_level.spec).params["level"], torch.ones(2))


def test_make_with_params_for_another_id_raises():
    with pytest.raises(ValueError, match="params"):
        tw.make("CartPole-v1", 2, params={"level": torch.ones(2)})


class Maze(nn.Module, FuncEnv):
    """Functions that are a module, whose buffers are prepared initial states."""

    observation_space = spaces.Box(0, 9, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self):
        super().__init__()
        self.register_buffer("starts", torch.arange(8.0).view(4, 2))

    def initial(self, rng):
        return {"at": self.starts[random.integers(rng, 4)]}

    def transition(self, state, action, rng):
        return {"at": state["at"] + 0}

    def observation(self, state, rng):
        return state["at"]

    def reward(self, state, action, next_state, rng):
        return self.starts.sum()

    def terminal(self, state, rng):
        return (state["at"] >= 0).all()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_buffers_of_functions_are_read_at_each_step_and_saved(compiled):
    env = FunctionalEnv(Maze(), 64)
    if compiled:
        tw.compile(env, backend="aot_eager")
    env.reset(seed=0)
    for start in (0.0, 1.0):
        env.func_env.starts.copy_(torch.arange(8.0).view(4, 2) + start)
        transition, td = env.step(torch.zeros(64, dtype=torch.int64))
        assert equal(transition["next", "reward"], torch.tensor(28 + 8 * start))
        assert equal(td["observation"].unique(dim=0), env.func_env.starts)
    assert list(env.state_dict()) == ["func_env.starts"]
