"""Parameters that differ between envs, and pools of initial states."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from func_envs import BroadcastNoisy, Walk, equal, odd, play, some_actions
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

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
    singles = [FunctionalEnv(func_env, 1, first_index=row, params=different(1, row)) for row in range(4)]
    actions = torch.zeros(20, 4, dtype=torch.int64)
    together, _ = play(env, env.reset(seed=1), actions)
    for row, single in enumerate(singles):
        assert equal(together[:, :, row], play(single, single.reset(seed=1), actions[:, [row]])[0][:, :, 0])
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
        with pytest.raises(ValueError, match="params for ids of register, whose functions read them, but got 'CartPole-v1'"):
            tw.make("CartPole-v1", 2, params={"level": torch.ones(2)})
    else:
        vector = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[kind]
        env = tw.from_gymnasium(vector([Level, Level], autoreset_mode=AutoresetMode.DISABLED))
    with tw.TransformedEnv(env, T.RecordEpisodeStatistics()) as env:
        env = tw.compile(env, backend="eager") if kind == "compiled" else env
        env.reset(seed=0)
        for level in (1.0, 3.0, 7.0):
            assert env.set_wrapper_attr("level", level)
            reward = env.step(torch.zeros(2, dtype=torch.int64))[0]["next", "reward"]
            assert reward.tolist() == [[level], [level]] and list(env.get_wrapper_attr("level")) == [level, level]
        if kind in ("native", "compiled"):
            with pytest.raises(ValueError, match=r"needs params\['level'\] that fit \(2,\), but got \[1, 2, 3\]"):
                env.set_wrapper_attr("level", [1, 2, 3])


# Pools of initial states.


def test_pool_provides_initial_states_and_is_refreshed():
    # Initial states tell the generation and the slot that they were drawn for.
    numbered = odd(initial=lambda rng: {"position": random.uniform(rng, shape=(2,)), "count": rng.episode * 1000 + rng.env})
    env = FunctionalEnv(numbered, 6, max_episode_steps=2, reset_pool=512)
    td, counts = env.reset(seed=0), [env.state["count"].clone()]
    for _ in range(300):
        transition, td = env.step(td.set("action", torch.zeros(6, 1)))
        if transition["next", "done"].any():
            counts.append(env.state["count"].clone())
    counts = torch.stack(counts)
    generations, slots = counts // 1000, counts % 1000
    assert slots.max() < 512 and len(slots.unique()) > 400  # of 906 draws
    # Two slots are drawn again per step: 256 steps for the whole pool.
    assert (generations[0] == 0).all() and generations[-1].unique().tolist() == [1, 2]
    assert env.pool.generation.sum() == 600


def test_envs_with_a_pool_do_not_depend_on_each_other():
    actions = some_actions(FunctionalEnv(BroadcastNoisy(), 5), 30)
    whole = FunctionalEnv(BroadcastNoisy(), 5, reset_pool=16)
    together, _ = play(whole, whole.reset(seed=3), actions)
    for row in range(5):
        single = FunctionalEnv(BroadcastNoisy(), 1, reset_pool=16, first_index=row)
        assert equal(together[:, :, row], play(single, single.reset(seed=3), actions[:, [row]])[0][:, :, 0])


def test_pool_is_in_snapshots_and_restarts_with_a_seed():
    env = FunctionalEnv(BroadcastNoisy(), 4, reset_pool=8)
    actions = some_actions(env, 40)
    once, _ = play(env, env.reset(seed=2), actions)
    _, td = play(env, env.reset(seed=2), actions[:9])
    snapshot = env.snapshot()
    play(env, td, actions)
    again, _ = play(env, env.restore(snapshot), actions[9:])
    assert equal(once[9:], again)
    other, _ = play(env, env.reset(seed=5), actions)
    assert not equal(once, other)


def test_reset_options_bypass_the_pool():
    env = FunctionalEnv(Walk(), 3, reset_pool=4)
    assert equal(env.reset(options={"start": 2.0})["observation"], torch.full((3, 2), 20.0))
