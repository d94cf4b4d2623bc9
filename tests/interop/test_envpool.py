"""EnvPool's envs in the bridge, step by step against pools of one env each that are stepped by hand through EnvPool's API."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Held
from single_envs import assert_equal_trees, sample_and_step, to_tree
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

envpool = pytest.importorskip("envpool")

# EnvPool's spaces have bounds in float64.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


def make_pool(id, num_envs, seed=0, **kwargs):
    return envpool.make(id, env_type="gymnasium", num_envs=num_envs, seed=seed, **kwargs)


def to_values(observations, space):
    """Observations of pools of one env as one batch of the space's dtype."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: to_values([each[key] for each in observations], part) for key, part in space.items()}
    return np.concatenate(observations).astype(space.dtype)


class Pools:
    """Pools of one env each. Where an episode has ended, they take EnvPool's own auto-reset: a step without a transition."""

    def __init__(self, id, num_envs, seed, **kwargs):
        self.pools = [make_pool(id, 1, seed + i, **kwargs) for i in range(num_envs)]
        self.space, self.now = self.pools[0].observation_space, [pool.reset()[0] for pool in self.pools]

    def reset(self, rows):
        for i in rows:
            self.now[i] = self.pools[i].reset()[0]

    def observation(self):
        return to_values(self.now, self.space)

    def step(self, actions):
        results = [pool.step(actions[i : i + 1].copy()) for i, pool in enumerate(self.pools)]
        self.now, reward, terminated, truncated, self.infos = [list(part) for part in zip(*results, strict=True)]
        columns = {"reward": (reward, np.float32), "terminated": (terminated, bool), "truncated": (truncated, bool)}
        flat = {name: np.stack(values).astype(dtype) for name, (values, dtype) in columns.items()}
        flat["done"], successor = flat["terminated"] | flat["truncated"], self.observation()
        for i in np.flatnonzero(flat["done"]):
            self.now[i] = self.pools[i].step(actions[i : i + 1].copy())[0]
        return {"observation": successor, **flat}


def follow(env, pools, td, steps):
    """Steps both with the same actions and asserts that all values are equal. Returns the root and the numbers of ends."""
    ends = np.zeros(2, int)
    for step in range(steps):
        transition, td = sample_and_step(env, td)
        expected, actual = pools.step(transition["action"].numpy()), to_tree(transition["next"])
        actual.pop("info", None)
        assert_equal_trees(actual, expected, f"step {step}")
        assert_equal_trees(to_tree(td["observation"]), pools.observation(), f"root after step {step}")
        ends += expected["terminated"].sum(), expected["truncated"].sum()
    return td, ends


TASKS = {  # steps, and the least number of terminations and truncations in them
    "CartPole-v1": ({}, 200, (20, 0)),
    "CartPole-v1 with a limit": ({"max_episode_steps": 14}, 100, (1, 5)),
    "Pendulum-v1": ({"max_episode_steps": 7}, 40, (0, 15)),
    "FrozenLake-v1": ({}, 60, (10, 0)),
    "HalfCheetah-v5": ({"max_episode_steps": 7}, 30, (0, 12)),
    "Hopper-v5": ({}, 150, (10, 0)),
    "WalkerWalk-v1": ({"max_episode_steps": 9}, 30, (0, 9)),
    "Pong-v5": ({"max_episode_steps": 30}, 70, (0, 6)),
    "Breakout-v5 with episodic_life": ({"episodic_life": True}, 200, (10, 0)),
}


@pytest.mark.parametrize("task", TASKS)
def test_transitions_match_envpool_stepped_by_hand(task):
    kwargs, steps, (terminations, truncations) = TASKS[task]
    id = task.partition(" ")[0]
    env = tw.from_gymnasium(make_pool(id, 3, seed=5, **kwargs))
    pools, td = Pools(id, 3, seed=5, **kwargs), env.reset()
    assert_equal_trees(to_tree(td["observation"]), pools.observation())
    _, ends = follow(env, pools, td, steps)
    assert ends[0] >= terminations and ends[1] >= truncations
    assert env.signature.max_episode_steps == env.vector_env.config["max_episode_steps"]


@pytest.mark.parametrize("id", ["CartPole-v1", "WalkerWalk-v1"])
def test_masked_reset_starts_episodes_in_its_rows_only(id):
    env = tw.from_gymnasium(make_pool(id, 4, seed=3, max_episode_steps=11))
    pools = Pools(id, 4, seed=3, max_episode_steps=11)
    td, _ = follow(env, pools, env.reset(), 5)
    for rows in ([1, 2], [0], [0, 1, 2, 3]):
        pools.reset(rows)
        mask = torch.zeros(4, dtype=torch.bool)
        mask[rows] = True
        td = env.reset(mask=mask)
        assert_equal_trees(to_tree(td["observation"]), pools.observation())
        td, _ = follow(env, pools, td, 4)
    assert follow(env, pools, env.reset(mask=torch.zeros(4, dtype=torch.bool)), 20)[1].sum() >= 4


def test_reset_of_finished_rows_keeps_lives_whatever_other_rows_do():
    env = tw.from_gymnasium(make_pool("Breakout-v5", 2, seed=5, episodic_life=True), info_keys=["lives"])
    td, done = env.reset(), torch.ones(2, dtype=torch.bool)
    while done.all() or not done.any():
        td = env.reset(mask=done)
        transition, td = env.transition(td.set("action", env.sample_action()))
        done, lives = transition["next", "done"].flatten(), transition["next", "info", "lives"].flatten()
    td = env.reset(mask=torch.ones(2, dtype=torch.bool))
    after = sample_and_step(env, td)[0]["next", "info", "lives"].flatten()
    assert 0 < lives[done].item() == after[done].item() < 5 == after[~done].item()


def test_second_reset_of_a_finished_row_starts_another_episode():
    env, pools = tw.from_gymnasium(make_pool("CartPole-v1", 3, seed=1)), Pools("CartPole-v1", 3, seed=1)
    td, done = env.reset(), torch.zeros(3, dtype=torch.bool)
    while not done.any():
        transition, td = sample_and_step(env, td)
        pools.step(transition["action"].numpy())
        done = transition["next", "done"].flatten()
    pools.reset(np.flatnonzero(done))
    td = env.reset(mask=done)
    assert_equal_trees(to_tree(td["observation"]), pools.observation())
    follow(env, pools, td, 5)


# Seeds.


def test_seed_of_env_i_is_the_seed_of_make_plus_its_global_index():
    env = tw.make("Pendulum-v1", 2, backend="envpool", seed=40, first_index=3)
    expected = np.concatenate([make_pool("Pendulum-v1", 1, 43 + i).reset()[0] for i in range(2)])
    assert_equal_trees(to_tree(env.reset()["observation"]), expected)
    assert env.np_random_seed == 40


def test_shards_by_first_index_equal_their_rows_of_the_whole():
    env = tw.make("CartPole-v1", 4, backend="envpool", seed=5)
    shards = [tw.make("CartPole-v1", 2, backend="envpool", seed=5, first_index=first) for first in (0, 2)]
    td, halves = env.reset(), [shard.reset() for shard in shards]
    for _ in range(40):
        assert torch.equal(td["observation"], torch.cat([half["observation"] for half in halves]))
        _, td = sample_and_step(env, td)
        halves = [sample_and_step(shard, half)[1] for shard, half in zip(shards, halves, strict=True)]


def test_first_reset_takes_the_seed_of_make():
    for seed in (7, 2**31 + 7, 2**64 - 1):
        env, same = [tw.make("CartPole-v1", 2, backend="envpool", seed=seed, first_index=2) for _ in range(2)]
        assert torch.equal(env.reset(seed=seed)["observation"], same.reset()["observation"])


def test_first_reset_draws_a_seed_that_repeats_the_run():
    env, other = [tw.make("CartPole-v1", 2, backend="envpool") for _ in range(2)]
    first = env.reset()["observation"]
    assert (first != other.reset()["observation"]).any()
    assert torch.equal(tw.make("CartPole-v1", 2, backend="envpool", seed=env.np_random_seed).reset()["observation"], first)


def test_seed_of_a_pool_that_was_made_elsewhere_is_reported():
    env = tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=12), first_index=2)
    wrapped = tw.TransformedEnv(env, T.StickyAction(0.5))
    wrapped.reset()
    assert wrapped.np_random_seed == 10
    assert tw.from_gymnasium(make_pool("CartPole-v1", 2, seed=[3, 9])).reset().batch_size == (2,)


@pytest.mark.parametrize(
    "made, seeds, mask",
    [(4, [5], None), (4, [4, 4], None), (4, [None, 4], None), (4, [None, 4], [True, False])],
    ids=["another", "twice", "late", "masked"],
)
def test_seed_that_envpool_would_ignore_raises_and_changes_nothing(made, seeds, mask):
    env, same = [tw.make("CartPole-v1", 2, backend="envpool", seed=made) for _ in range(2)]
    for seed in seeds[:-1]:
        env.reset(seed=seed)
    match = r"needs seed=4, with which EnvPool made it.*first reset, but got \d: .*backend=\"envpool\", seed=\d\)"
    with pytest.raises(ValueError, match=match):
        env.reset(seed=seeds[-1], mask=None if mask is None else torch.tensor(mask))
    if len(seeds) == 1:
        env.reset()
    assert torch.equal(env._root["observation"], same.reset()["observation"])
    assert torch.equal(sample_and_step(env, env._root)[0]["next", "reward"], torch.ones(2, 1))


# Ownership.


@pytest.mark.parametrize("id", ["CartPole-v1", "WalkerWalk-v1", "Pong-v5"])
def test_returned_tensors_are_never_changed(id):
    env, held = tw.make(id, 3, backend="envpool", max_episode_steps=6, info_keys=["elapsed_step"]), Held()
    td = env.reset()
    for step in range(15):
        held.add(td)
        transition, td = sample_and_step(env, td)
        held.add(transition["next"])
        if step == 8:
            td = env.reset(mask=torch.tensor([True, False, True]))
    env.reset()
    held.assert_unchanged()


# With the rest of torchwrap.


def test_info_of_final_steps_is_that_of_the_transition():
    env = tw.make("CartPole-v1", 3, backend="envpool", seed=1, max_episode_steps=12, info_keys=["elapsed_step"])
    pools, td = Pools("CartPole-v1", 3, 1, max_episode_steps=12), env.reset()
    for _ in range(30):
        transition, td = sample_and_step(env, td)
        pools.step(transition["action"].numpy())
        elapsed = np.stack([info["elapsed_step"] for info in pools.infos])
        np.testing.assert_array_equal(transition["next", "info", "elapsed_step"], elapsed)


def test_transforms_see_true_episodes():
    env = tw.make("CartPole-v1", 4, backend="envpool", seed=1)
    env = tw.TransformedEnv(env, T.TimeLimit(15), T.RecordEpisodeStatistics())
    td, lengths = env.reset(), torch.zeros(4, 1, dtype=torch.int64)
    for _ in range(60):
        transition, td = sample_and_step(env, td)
        lengths += 1
        done = transition["next", "done"]
        assert torch.equal(transition["next", "episode_length"][done].long(), lengths[done])
        lengths[done] = 0


def test_spec_makes_the_same_env_again():
    env = tw.TransformedEnv(tw.make("Pong-v5", 2, backend="envpool", seed=3, noop_max=5), T.ClipReward(-1, 1))
    again = tw.make(env.spec)
    assert repr(again) == repr(env) and again.unwrapped.vector_env.config == env.unwrapped.vector_env.config
    assert torch.equal(again.reset()["observation"], env.reset()["observation"])
    assert tw.make(env.spec, num_envs=3).num_envs == 3


@pytest.mark.parametrize("given, limit", [(None, 500), (9, 9), (-1, None)])
def test_max_episode_steps_replaces_the_limit_of_envpool(given, limit):
    env = tw.make("CartPole-v1", 2, backend="envpool", max_episode_steps=given)
    assert env.signature.max_episode_steps == env.spec.max_episode_steps == limit
    assert env.vector_env.config["max_episode_steps"] == (limit or 2**31 - 1)


def test_render_returns_a_frame_of_each_env():
    env = tw.make("CartPole-v1", 3, backend="envpool", render_mode="rgb_array", seed=1)
    env.reset()
    frames = env.render()
    assert len(frames) == 3 and (frames[0] != frames[1]).any()
    np.testing.assert_array_equal(env.render([2])[0], frames[2])


# Refusals.


def test_make_with_invalid_arguments_raises():
    for arguments, match in (
        ({"id": "NoSuchTask-v0"}, r"needs an id that EnvPool has .*'NoSuchTask-v0': `envpool.list_all_envs\(\)` lists them"),
        ({"id": "ALE/Pong-v5"}, r"needs an id that EnvPool has .*'ALE/Pong-v5': make\('Pong-v5'\)"),
        ({"gravity": 3.0}, "needs arguments that EnvPool's CartPole-v1 takes, but got: .*gravity"),
        ({"vectorization_mode": "async"}, 'with backend="gymnasium" only'),
        ({"worker_timeout": 3.0}, 'with backend="gymnasium" only'),
        ({"batch_size": 1}, "needs EnvPool to step all 2 envs at once, but got batch_size=1"),
        ({"seed": -1}, "needs seed of at least 0, but got -1"),
        ({"first_index": -1}, "^make needs first_index of at least 0, but got -1"),
    ):
        with pytest.raises(ValueError, match=match):
            tw.make(**{"id": "CartPole-v1", "num_envs": 2, "backend": "envpool", **arguments})


def test_make_without_envpool_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ImportError, match=r"needs the package envpool for backend=\"envpool\".*torchwrap\[envpool\]"):
        tw.make("CartPole-v1", 2, backend="envpool")


def test_wrapper_of_gymnasium_around_envpool_raises():
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(make_pool("CartPole-v1", 2))
    with pytest.raises(ValueError, match="needs EnvPool's env itself, but got RecordEpisodeStatistics around it"):
        tw.from_gymnasium(wrapped)


def test_options_and_envs_of_several_players_raise(monkeypatch):
    env = tw.make("CartPole-v1", 2, backend="envpool")
    with pytest.raises(ValueError, match=r"CartPole-v1.reset takes no options, but got \{'low': 0\}"):
        env.reset(options={"low": 0})
    pool = make_pool("CartPole-v1", 2)
    monkeypatch.setattr(type(pool), "config", {**pool.config, "max_num_players": 2}, raising=False)
    with pytest.raises(ValueError, match="needs envs of one player, but got max_num_players=2"):
        tw.from_gymnasium(pool)


def test_call_after_an_interrupted_one_raises_and_asks_for_a_new_env(monkeypatch):
    env = tw.make("CartPole-v1", 2, backend="envpool")
    td = env.reset().set("action", env.sample_action())
    monkeypatch.setattr(type(env.vector_env), "recv", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        env.step(td)
    monkeypatch.undo()
    for call in (env.reset, lambda: env.step(td)):
        with pytest.raises(RuntimeError, match=r"threads keep the results of an interrupted one.*make a new env"):
            call()
    env.close()
    assert env.vector_env.closed


def test_action_is_checked_before_envpool_moves():
    env = tw.make("CartPole-v1", 2, backend="envpool", info_keys=["elapsed_step"])
    td = env.reset()
    with pytest.raises(ValueError, match=r"needs an action in .*, but got values from"):
        env.step(TensorDict({"action": torch.tensor([0, 2])}, [2]))
    assert (sample_and_step(env, td)[0]["next", "info", "elapsed_step"] == 1).all()
