"""Attributes of envs, against the `get_attr`, `set_attr` and `call` of Gymnasium's vector envs."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from helpers import mostly_full

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.sb3 import to_sb3
from torchwrap.interop.tensors import from_functions


class Level(gymnasium.Env):
    """Its reward tells its attributes, also one that it lacks at first."""

    observation_space = spaces.Box(-9, 9, (1,))
    action_space = spaces.Discrete(2)
    level = 1.0
    push = (0.0, 0.0)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        reward = np.sum(self.level) + 10 * getattr(self, "wind", 0)
        return np.zeros(1, np.float32), float(reward), False, False, {}

    def scaled(self, factor):
        return factor * self.level


VECTOR_ENVS = {"SyncVectorEnv": SyncVectorEnv, "AsyncVectorEnv": AsyncVectorEnv}
KINDS = ["sync", "async", *VECTOR_ENVS]
by_kind = pytest.mark.parametrize("kind", mostly_full(KINDS, "sync", "async", "SyncVectorEnv"))


@pytest.fixture
def make(registry):
    """Makes three envs of each kind."""
    gymnasium.register("test/Level-v0", entry_point=Level)
    opened = []

    def make(kind):
        if kind in VECTOR_ENVS:
            vector_env = VECTOR_ENVS[kind]([Level] * 3, autoreset_mode=AutoresetMode.DISABLED)
            opened.append(tw.from_gymnasium(vector_env))
        else:
            opened.append(tw.make("test/Level-v0", 3, vectorization_mode=kind))
        return tw.TransformedEnv(opened[-1], T.TimeLimit(9))

    yield make
    for env in opened:
        env.close()


def rewards(env):
    env.reset(seed=0)
    return env.step(torch.zeros(3, dtype=torch.int64))[0]["next", "reward"].flatten().tolist()


VALUES = {
    "one number": ("level", 2.5),
    "list": ("level", [1.0, 2.0, 3.0]),
    "array": ("level", np.array([1.0, 2.0, 3.0])),
    "tuple of vectors": ("push", ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))),
    "new number": ("wind", 2),
    "new list": ("wind", [1, 2, 3]),
}


@by_kind
@pytest.mark.parametrize("name, values", VALUES.values(), ids=VALUES)
def test_set_wrapper_attr_sets_what_gymnasiums_set_attr_sets(make, kind, name, values):
    env = make(kind)
    oracle = SyncVectorEnv([Level] * 3)
    oracle.set_attr(name, values)
    assert env.set_wrapper_attr(name, values)
    assert not hasattr(env, name) and not hasattr(env.unwrapped, name)
    oracle.reset()
    assert rewards(env) == oracle.step([0, 0, 0])[1].tolist()
    read = env.get_wrapper_attr(name)
    assert env.set_wrapper_attr(name, 0)
    assert env.set_wrapper_attr(name, read)
    np.testing.assert_array_equal(env.get_wrapper_attr(name), oracle.get_attr(name))


def test_attribute_set_in_python_does_not_reach_the_envs(make):
    env = make("sync")
    env.level = env.unwrapped.level = 3
    assert rewards(env) == [1, 1, 1]


@by_kind
@pytest.mark.parametrize("name", ["level", "wind"])
def test_list_of_another_length_raises_and_changes_nothing(make, kind, name):
    env = make(kind)
    with pytest.raises(ValueError):
        env.set_wrapper_attr(name, [5.0, 5.0])
    assert rewards(env) == [1, 1, 1]


@by_kind
def test_new_name_is_not_set_without_force(make, kind):
    env = make(kind)
    assert not env.set_wrapper_attr("wind", 2, force=False)
    assert env.set_wrapper_attr("level", 2, force=False)
    assert rewards(env) == [2, 2, 2]
    assert not env.has_wrapper_attr("wind") and env.has_wrapper_attr("level")


@by_kind
def test_method_of_the_envs_returns_what_gymnasiums_call_returns(make, kind):
    assert make(kind).get_wrapper_attr("scaled")(2) == SyncVectorEnv([Level] * 3).call("scaled", 2)


def test_method_of_some_envs_of_a_foreign_vector_env_is_refused(make):
    env = make("AsyncVectorEnv")
    with pytest.raises(AttributeError, match='vectorization_mode="async"'):
        to_sb3(env).env_method("scaled", 2, indices=[1])
    assert rewards(env) == [1, 1, 1]


def test_envs_that_are_not_held_cannot_be_set():
    env = from_functions(print, print, 3, Level.observation_space, Level.action_space)
    with pytest.raises(AttributeError, match="'wind'"):
        env.set_wrapper_attr("wind", 2)
    assert not env.set_wrapper_attr("wind", 2, force=False)
    assert env.set_wrapper_attr("reuses_memory", False) and not env.reuses_memory
