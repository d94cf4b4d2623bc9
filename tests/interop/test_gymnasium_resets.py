from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from single_envs import (
    NEVER,
    Scripted,
    Singles,
    assert_equal_trees,
    every_kind,
    every_mode,
    follow,
    sample_and_step,
    scripted,
    stack_values,
    to_tree,
)

import torchwrap as tw


class Failing(Scripted):
    """Refuses options."""

    def reset(self, *, seed=None, options=None):
        if options:
            raise ValueError("no such option")
        return super().reset(seed=seed)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_shards_by_first_index_equal_their_rows_of_the_whole(bridge, kind):
    makers = scripted(4, lengths=(3,))
    env = bridge(makers, kind)
    shards = [bridge(makers[:2], kind, first_index=first) for first in (0, 2)]
    td, halves = env.reset(seed=5), [shard.reset(seed=5) for shard in shards]
    for _ in range(8):
        assert torch.equal(td["observation"], torch.cat([half["observation"] for half in halves]))
        transition, td = sample_and_step(env, td)
        actions = transition["action"].split(2)
        stepped = [s.step(h.set("action", a)) for s, h, a in zip(shards, halves, actions, strict=True)]
        halves = [half for _, half in stepped]
        assert torch.equal(transition["next", "reward"], torch.cat([each["next", "reward"] for each, _ in stepped]))


@pytest.mark.parametrize("first_index", [0, 3])
def test_seed_of_env_i_is_seed_plus_its_global_index(first_index):
    env = tw.make("CartPole-v1", 2, backend="gymnasium", first_index=first_index)
    expected = [gymnasium.make("CartPole-v1").reset(seed=40 + first_index + i)[0] for i in range(2)]
    assert_equal_trees(to_tree(env.reset(seed=40)["observation"]), np.stack(expected))


@pytest.mark.parametrize("seed", [None, 77])
@every_kind
def test_partial_reset_starts_episodes_in_its_rows_only(bridge, kind, mode, seed):
    makers = scripted(4, lengths=[(3, 9), (9,), (2, 9), NEVER])
    env, singles = bridge(makers, kind, mode), Singles(makers, 3)
    td, _ = follow(env, singles, env.reset(seed=3), 2)
    for i in (1, 2):  # env 2 has just been reset automatically
        singles.now[i] = singles.envs[i].reset(seed=None if seed is None else seed + i)[0]
    td = env.reset(seed=seed, mask=torch.tensor([False, True, True, False]))
    assert_equal_trees(to_tree(td["observation"]), stack_values(singles.now))
    follow(env, singles, td, 12)


@every_kind
def test_full_reset_in_mid_episode_starts_episodes_everywhere(bridge, kind, mode):
    makers = scripted(3, lengths=[(3, 9), (9,), (2, 9)])
    env, singles = bridge(makers, kind, mode), Singles(makers, 3)
    follow(env, singles, env.reset(seed=3), 2)
    singles.now = [single.reset()[0] for single in singles.envs]
    td = env.reset()
    assert_equal_trees(to_tree(td["observation"]), stack_values(singles.now))
    follow(env, singles, td, 10)


@every_kind
def test_reset_with_an_empty_mask_changes_nothing(bridge, kind, mode):
    makers = scripted(2, lengths=[(3,), (1,)])
    env, singles = bridge(makers, kind, mode), Singles(makers, 3)
    td, _ = follow(env, singles, env.reset(seed=3), 2)
    again = env.reset(seed=9, mask=torch.zeros(2, dtype=torch.bool), options={"low": 0.0})
    assert torch.equal(again["observation"], td["observation"])
    follow(env, singles, again, 5)


@every_kind
def test_options_are_passed_to_the_envs(bridge, kind, mode):
    env = bridge([functools.partial(gymnasium.make, "CartPole-v1")] * 3, kind, mode)
    options = {"low": 0.03, "high": 0.04}
    observation = env.reset(seed=0, options=options)["observation"]
    assert ((observation >= 0.03) & (observation <= 0.04)).all()
    assert options == {"low": 0.03, "high": 0.04}


@every_kind
def test_options_with_a_mask_are_passed_to_its_rows_only(bridge, kind, mode):
    env, options = bridge([functools.partial(gymnasium.make, "CartPole-v1")] * 3, kind, mode), {"low": 0.06, "high": 0.07}
    first = env.reset(seed=0)["observation"]
    observation = env.reset(mask=torch.tensor([True, False, True]), options=options)["observation"]
    assert torch.equal(observation[1], first[1])
    assert ((observation[[0, 2]] >= 0.06) & (observation[[0, 2]] <= 0.07)).all()
    assert options == {"low": 0.06, "high": 0.07}


@every_mode
def test_options_apply_to_one_reset(bridge, mode):
    env = bridge(scripted(2, lengths=[(1,), NEVER]), mode=mode)
    _, _ = sample_and_step(env, env.reset(options={"difficulty": 3}))
    assert not env.vector_env.get_attr("options")[0]
    assert env.vector_env.get_attr("options")[1] == {"difficulty": 3}


@every_mode
def test_each_episode_starts_with_one_reset(bridge, mode):
    env = bridge(scripted(3, lengths=[(1,), (2,), NEVER]), mode=mode)
    td = env.reset(seed=0)
    for _ in range(4):
        _, td = sample_and_step(env, td)
    assert env.vector_env.get_attr("episode") == (5, 3, 1)


@pytest.mark.parametrize("seed", [-1, 1.0, True, "a", 2**64])
def test_invalid_seed_raises_and_changes_nothing(bridge, seed):
    makers = scripted(2, lengths=(3,))
    env, singles = bridge(makers), Singles(makers, 3)
    td = env.reset(seed=3)
    with pytest.raises(ValueError, match=r"reset needs a seed that is an integer in \[0, 2\*\*64\), but got"):
        env.reset(seed=seed)
    follow(env, singles, td, 5)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, np.int64(5)])
def test_large_or_numpy_seed_is_accepted(bridge, seed):
    env, expected = bridge(scripted(2)), [Scripted().reset(seed=int(seed) + i)[0] for i in range(2)]
    assert_equal_trees(to_tree(env.reset(seed=seed)["observation"]), np.stack(expected))


def test_reset_that_an_env_refuses_leaves_no_seed_behind(bridge):
    makers = [functools.partial(Failing, lengths=(3,))] * 2
    env, singles = bridge(makers), Singles(makers, 3)
    env.reset(seed=3)
    with pytest.raises(ValueError, match="no such option"):
        env.reset(seed=9, options={"a": 1})
    singles.now = [single.reset()[0] for single in singles.envs]
    follow(env, singles, env.reset(), 7)
