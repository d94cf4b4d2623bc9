from __future__ import annotations

import functools
import itertools
import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from single_envs import (
    BOX,
    Scripted,
    Singles,
    assert_equal_trees,
    every_kind,
    every_mode,
    sample_and_step,
    scripted,
    to_tree,
)

import torchwrap as tw
from torchwrap.interop import _workers


@every_kind
def test_requested_info_is_present_at_every_step(bridge, kind, mode):
    keys = ("elapsed", "even", "late", "final")
    makers = scripted(3, lengths=[(3,), (2,), (4, 1)])
    env, singles = bridge(makers, kind, mode, info_keys=keys), Singles(makers, 3)
    td = env.reset(seed=3)
    for _ in range(7):
        td, actions = singles.act(td)
        transition, td = env.step(td)
        singles.step(actions)
        expected = {key: np.array([[info.get(key, 0)] for info in singles.infos]).astype(np.float32) for key in keys}
        assert_equal_trees(to_tree(transition["next", "info"]), expected)


@every_kind
def test_info_arrays_have_the_given_space(bridge, kind, mode):
    keys = {"position": spaces.Box(-np.inf, np.inf, (2,), np.float64), "elapsed": spaces.Box(0, 99, (), np.int64)}
    makers = scripted(3, lengths=[(3,), (2,), (1,)])
    env, singles = bridge(makers, kind, mode, info_keys=keys), Singles(makers, 3)
    td = env.reset(seed=3)
    for _ in range(7):
        td, actions = singles.act(td)
        transition, td = env.step(td)
        singles.step(actions)
        position = np.stack([info["position"] for info in singles.infos])
        elapsed = np.array([info["elapsed"] for info in singles.infos], np.int64)
        assert_equal_trees(to_tree(transition["next", "info"]), {"position": position, "elapsed": elapsed})


@every_kind
def test_info_of_halfcheetah_sums_to_its_reward(bridge, kind, mode):
    makers = [functools.partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=3)] * 2
    env = bridge(makers, kind, mode, info_keys=("reward_forward", "reward_ctrl"))
    td = env.reset(seed=0)
    for _ in range(7):
        transition, td = sample_and_step(env, td)
        following = transition["next"]
        assert torch.allclose(following["info", "reward_forward"] + following["info", "reward_ctrl"], following["reward"])


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
def test_info_of_make_is_that_of_single_envs(vectorization_mode):
    arguments = {"backend": "gymnasium", "vectorization_mode": vectorization_mode, "info_keys": ("elapsed", "late", "final")}
    with tw.make("TorchwrapTest/Scripted-v0", 2, lengths=(3,), **arguments) as env:
        td = env.reset(seed=0)
        for step in range(1, 8):
            transition, td = sample_and_step(env, td)
            elapsed = (step - 1) % 3 + 1
            expected = {"elapsed": elapsed, "late": 10 * elapsed if elapsed > 1 else 0, "final": 3 if elapsed == 3 else 0}
            columns = {name: np.full((2, 1), value, np.float32) for name, value in expected.items()}
            assert_equal_trees(to_tree(transition["next", "info"]), columns)


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
def test_misspelt_info_key_of_make_raises_with_all_keys(vectorization_mode):
    arguments = {"backend": "gymnasium", "vectorization_mode": vectorization_mode, "info_keys": ("elapsed", "elapsd")}
    with tw.make("TorchwrapTest/Scripted-v0", 2, lengths=(2,), **arguments) as env:
        _, td = sample_and_step(env, env.reset())
        known = re.escape("['elapsed', 'even', 'final', 'late', 'name', 'position']")
        with pytest.raises(ValueError, match=rf"but got \['elapsd'\]. It contains {known}"):
            sample_and_step(env, td)


class Ragged(Scripted):
    """Its infos do not fit into one array."""

    sizes = itertools.count(1)

    def step(self, action):
        *results, info = super().step(action)
        return *results, {**info, "ragged": np.zeros(next(self.sizes))}


def test_info_that_is_not_requested_is_not_batched(bridge):
    env = bridge([functools.partial(Ragged, lengths=(3,))] * 2, info_keys={"elapsed": spaces.Box(0, 99, (1,), np.int64)})
    td = env.reset(seed=0)
    for step in range(5):
        transition, td = sample_and_step(env, td)
        assert transition["next", "info", "elapsed"].tolist() == [[step % 3 + 1]] * 2


def test_answer_of_a_worker_has_plain_numbers_and_only_what_is_read():
    class Numbers(Scripted):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, np.float32(reward), np.bool_(terminated), np.bool_(truncated), info

    env = _workers.ShortAnswers(Numbers(lengths=(2,)), ("elapsed", "late"))
    env.reset(seed=0)
    (_, *first, info), (_, *last, whole) = [env.step(np.zeros(2, np.float32)) for _ in range(2)]
    assert [type(number) for number in first + last] == [float, bool, bool] * 2
    assert info == {"elapsed": 1} and whole.keys() == {"elapsed", "position", "even", "name", "late", "final"}


def test_info_without_keys_is_absent(bridge):
    env = bridge(scripted(2))
    transition, _ = sample_and_step(env, env.reset())
    assert "info" not in transition["next"]


@pytest.mark.parametrize("info_keys", [("elapsd",), ("elapsed", "elapsd"), ("reset only",)])
@every_mode
def test_misspelt_info_key_raises_at_the_first_episode_end(bridge, mode, info_keys):
    env = bridge(scripted(2, lengths=[(2,), (3,)]), mode=mode, info_keys=info_keys)
    _, td = sample_and_step(env, env.reset())
    wrong = sorted(set(info_keys) - {"elapsed"})[0]
    with pytest.raises(
        ValueError, match=rf"needs info_keys that its info contains, but got \['{wrong}'\]. It contains .*'elapsed'"
    ):
        sample_and_step(env, td)


@every_mode
def test_misspelt_info_key_with_a_space_is_zero(bridge, mode):
    env = bridge(scripted(2, lengths=[(2,), (3,)]), mode=mode, info_keys={"elapsd": BOX})
    td = env.reset(seed=0)
    for _ in range(7):
        transition, td = sample_and_step(env, td)
        assert_equal_trees(to_tree(transition["next", "info"]), {"elapsd": np.zeros((2, 3), np.float32)})


@pytest.mark.parametrize("info_keys", [("name",), {"position": spaces.Box(0, 1, (3,))}, ("position",)])
def test_info_that_does_not_fit_its_space_raises(bridge, info_keys):
    env = bridge(scripted(2), info_keys=info_keys)
    with pytest.raises((ValueError, TypeError), match=sorted(info_keys)[0]):
        sample_and_step(env, env.reset())
