"""Parameters that differ between envs, and tensors that functions hold."""

import gymnasium
import numpy as np
import pytest
import torch
from func_envs import equal, play
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from torch import nn

import torchwrap as tw
from torchwrap import FunctionalEnv, random
from torchwrap import transforms as T


class Falling(FuncEnv):
    """Falls as fast as its own parameter says."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def initial(self, rng, params=None):
        return {"height": params["from"][0] + random.uniform(rng)}

    def transition(self, state, action, rng, params=None):
        return {"height": state["height"] - params["gravity"]}

    def observation(self, state, rng, params=None):
        return state["height"].reshape(1)

    def reward(self, state, action, next_state, rng, params=None):
        return params["gravity"]

    def terminal(self, state, rng, params=None):
        return state["height"] < 0


class BroadcastFalling(Falling):
    broadcasts = True

    def initial(self, rng, params=None):
        return {"height": params["from"][:, 0] + random.uniform(rng)}

    def observation(self, state, rng, params=None):
        return state["height"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params=None):
        return params["gravity"].clone()


def different(n, first=0):
    return {"gravity": torch.arange(first, first + n) + 1.0, "from": 10 * torch.ones(n, 1)}


@pytest.mark.parametrize("func_env", [Falling(), BroadcastFalling()], ids=["vmap", "broadcast"])
def test_params_differ_between_envs(func_env):
    env = FunctionalEnv(func_env, 4, params=different(4))
    singles = [
        FunctionalEnv(func_env, 1, first_index=row, params=different(1, row)) for row in range(4)
    ]
    actions = torch.zeros(20, 4, dtype=torch.int64)
    together, _ = play(env, env.reset(seed=1), actions)
    for row, single in enumerate(singles):
        assert equal(
            together[:, :, row], play(single, single.reset(seed=1), actions[:, [row]])[0][:, :, 0]
        )
    assert together[0, 0]["reward"].flatten().tolist() == [1, 2, 3, 4]
    env.params["gravity"].fill_(7)
    assert play(env, env.reset(), actions[:1])[0][0, 0]["reward"].flatten().tolist() == [7, 7, 7, 7]


class Level(gymnasium.Env):
    """A single env of Gymnasium whose reward is its level."""

    observation_space, action_space, level = spaces.Box(-9, 9, (1,)), spaces.Discrete(2), 1.0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self.level, False, False, {}


class NativeLevel(Falling):
    def reward(self, state, action, next_state, rng, params=None):
        return params["level"]


@pytest.mark.parametrize("kind", ["native", "compiled", "sync", "async"])
def test_one_call_raises_a_number_during_training_in_every_kind_of_env(kind, registry):
    if kind in ("native", "compiled"):
        tw.register("test/Level-v0", NativeLevel, max_episode_steps=50)
        env = tw.make("test/Level-v0", 2, params={**different(2), "level": torch.ones(2)})
        assert torch.equal(tw.make(env.spec).params["level"], torch.ones(2))
        with pytest.raises(
            ValueError,
            match="params only for ids of register, whose functions read them, but got 'CartPo",
        ):
            tw.make("CartPole-v1", 2, params={"level": torch.ones(2)})
    else:
        gymnasium.register("test/Level-v1", entry_point=Level)
        env = tw.make("test/Level-v1", 2, vectorization_mode=kind)
    with tw.TransformedEnv(env, T.RecordEpisodeStatistics()) as env:
        env = tw.compile(env, backend="eager") if kind == "compiled" else env
        env.reset(seed=0)
        for level in (1.0, 3.0, 7.0):
            assert env.set_wrapper_attr("level", level)
            reward = env.step(torch.zeros(2, dtype=torch.int64))[0]["next", "reward"]
            assert reward.tolist() == [[level], [level]] and list(
                env.get_wrapper_attr("level")
            ) == [level, level]
        if kind in ("native", "compiled"):
            with pytest.raises(
                ValueError,
                match=r"a value for params\['level'\] that broadcasts to \(2,\), but got \[1, 2",
            ):
                env.set_wrapper_attr("level", [1, 2, 3])


class Maze(nn.Module, FuncEnv):
    """Functions with tensors of their own, such as prepared initial states: a module, whose buffers they are."""

    observation_space, action_space = spaces.Box(0, 9, (2,)), spaces.Discrete(2)

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
    env = tw.compile(env, backend="aot_eager") if compiled else env
    td = env.reset(seed=0)
    for start in (0.0, 1.0):
        env.func_env.starts.copy_(torch.arange(8.0).view(4, 2) + start)
        transition, td = env.step(torch.zeros(64, dtype=torch.int64))
        assert (transition["next", "reward"] == 28 + 8 * start).all()
        assert td["observation"].unique(dim=0).tolist() == env.func_env.starts.tolist()
    assert list(env.state_dict()) == ["func_env.starts"]
