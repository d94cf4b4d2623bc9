"""Attributes of envs, against the `get_attr` and `set_attr` of Gymnasium's vector envs."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import torchwrap as tw
from torchwrap import transforms as T


class Level(gymnasium.Env):
    """A single env of Gymnasium with attributes of two kinds."""

    observation_space = spaces.Box(-9, 9, (1,))
    action_space = spaces.Discrete(2)
    level = 1.0
    push = (0.0, 0.0)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(np.sum(self.level)), False, False, {}

    def scaled(self, factor):
        return factor * self.level


class NativeLevel(FuncEnv):
    """Functions with two parameters that have the attributes of `Level`."""

    observation_space = Level.observation_space
    action_space = Level.action_space

    def initial(self, rng, params):
        return {"height": params["level"].float()}

    def transition(self, state, action, rng, params):
        return {"height": params["level"].float()}

    def observation(self, state, rng, params):
        return torch.zeros(1)

    def reward(self, state, action, next_state, rng, params):
        return params["level"]

    def terminal(self, state, rng, params):
        return state["height"] > 99


def native(num_envs, **params):
    params = {"level": torch.ones(num_envs), "push": torch.zeros(num_envs, 2), **params}
    return tw.FunctionalEnv(NativeLevel(), num_envs, params=params)


@pytest.fixture
def make(registry):
    """Makes three envs of each kind."""
    gymnasium.register("test/Level-v0", entry_point=Level)
    opened = []

    def make(kind):
        if kind == "native":
            return native(3)
        mode = AutoresetMode.DISABLED
        if kind == "from_gymnasium":
            vector_env = SyncVectorEnv([Level] * 3, autoreset_mode=mode)
            opened.append(tw.from_gymnasium(vector_env))
        else:
            opened.append(tw.make("test/Level-v0", 3, vectorization_mode=kind))
        return tw.TransformedEnv(opened[-1], T.TimeLimit(9))

    yield make
    for env in opened:
        env.close()


def by_oracle(name, values):
    """The attributes of three envs after Gymnasium's `set_attr`."""
    vector_env = SyncVectorEnv([Level] * 3)
    vector_env.set_attr(name, values)
    return vector_env.get_attr(name)


SIMULATORS = ["sync", "async", "from_gymnasium"]

VALUES = {
    "one number": ("level", 2.5),
    "list": ("level", [1.0, 2.0, 3.0]),
    "tuple": ("level", (1.0, 2.0, 3.0)),
    "array": ("level", np.array([1.0, 2.0, 3.0])),
    "list of vectors": ("push", [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]),
}


@pytest.mark.parametrize("kind", SIMULATORS)
@pytest.mark.parametrize("name, values", VALUES.values(), ids=VALUES)
def test_set_wrapper_attr_sets_what_gymnasiums_set_attr_sets(make, kind, name, values):
    env = make(kind)
    assert env.set_wrapper_attr(name, values)
    given = env.get_wrapper_attr(name)
    np.testing.assert_array_equal(given, by_oracle(name, values))


LISTS = {name: VALUES[name] for name in ("list", "tuple", "list of vectors")}


@pytest.mark.parametrize("name, values", LISTS.values(), ids=LISTS)
def test_set_wrapper_attr_of_a_param_gives_each_env_an_item_of_a_list(name, values):
    env = native(3)
    env.set_wrapper_attr(name, values)
    np.testing.assert_array_equal(env.params[name], by_oracle(name, values))


def test_set_wrapper_attr_with_a_list_of_numbers_fills_each_row_of_a_param_with_one():
    env = native(2)
    env.set_wrapper_attr("push", [1.0, 2.0])
    assert env.params["push"].tolist() == [[1, 1], [2, 2]]


def test_set_wrapper_attr_with_a_tensor_broadcasts_it_to_a_param():
    env = native(2)
    env.set_wrapper_attr("push", torch.tensor([1.0, 2.0]))
    assert env.params["push"].tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("kind", SIMULATORS)
@pytest.mark.parametrize("name, values", LISTS.values(), ids=LISTS)
def test_attributes_that_were_read_can_be_written_back(make, kind, name, values):
    env = make(kind)
    env.set_wrapper_attr(name, values)
    read = env.get_wrapper_attr(name)
    env.set_wrapper_attr(name, 0.0)
    env.set_wrapper_attr(name, read)
    np.testing.assert_array_equal(env.get_wrapper_attr(name), by_oracle(name, values))


@pytest.mark.parametrize("kind", [*SIMULATORS, "native"])
def test_set_wrapper_attr_with_a_list_of_another_length_raises_and_changes_nothing(make, kind):
    env = make(kind)
    with pytest.raises(ValueError, match="level"):
        env.set_wrapper_attr("level", [5.0, 5.0])
    assert list(env.get_wrapper_attr("level")) == [1, 1, 1]


# Dtypes of params.

CHANGED = {
    "fraction in int64": (torch.int64, 1.5),
    "uint8 overflow": (torch.uint8, 300),
    "negative uint8": (torch.uint8, -1),
    "int32 overflow": (torch.int32, 2**40),
    "NaN in int64": (torch.int64, float("nan")),
    "int8 in uint8": (torch.uint8, torch.tensor(-1, dtype=torch.int8)),
    "int in bool": (torch.bool, 2),
    "tensor of fractions": (torch.int64, torch.tensor([1.0, 1.5])),
    "array of large ints": (torch.int32, np.array([1, 2**40])),
    "list with one fraction": (torch.int64, [1, 1.5]),
    "float16 overflow": (torch.float16, 70000.0),
    "float32 overflow": (torch.float32, 1e300),
}


@pytest.mark.parametrize("dtype, value", CHANGED.values(), ids=CHANGED)
def test_set_wrapper_attr_with_a_value_that_a_cast_would_change_raises(dtype, value):
    env = native(2, level=torch.ones(2, dtype=dtype))
    with pytest.raises(ValueError, match="level"):
        env.set_wrapper_attr("level", value)
    assert env.params["level"].tolist() == [1, 1]


KEPT = {
    "whole float in int64": (torch.int64, 3.0),
    "large int64": (torch.int64, 2**53 + 1),
    "int in bool": (torch.bool, 0),
    "float64": (torch.float64, 0.1),
    "infinity": (torch.float32, float("inf")),
    "NaN": (torch.float32, float("nan")),
    "rounded": (torch.float32, 0.1),
}


@pytest.mark.parametrize("dtype, value", KEPT.values(), ids=KEPT)
def test_set_wrapper_attr_stores_what_numpy_stores(dtype, value):
    env = native(2, level=torch.ones(2, dtype=dtype))
    env.set_wrapper_attr("level", value)
    expected = np.full(2, value, str(dtype).removeprefix("torch."))
    np.testing.assert_array_equal(env.params["level"].numpy(), expected)


def as_tensor(value):
    return value


def as_list(value):
    return [value, value]


@pytest.mark.parametrize("form", [as_tensor, as_list], ids=["tensor", "list"])
def test_set_wrapper_attr_leaves_no_graph_of_autograd_in_a_param(form):
    env = native(2)
    weight = torch.tensor(3.0, requires_grad=True)
    env.set_wrapper_attr("level", form(2 * weight))
    assert env.params["level"].tolist() == [6, 6]
    assert not env.params["level"].requires_grad


def test_params_at_construction_leave_no_graph_of_autograd():
    env = native(2, level=torch.ones(2, requires_grad=True))
    assert not env.params["level"].requires_grad


def test_set_wrapper_attr_reaches_a_param_that_a_transform_has_an_attribute_of():
    class Level(T.Transform):
        level = 7

    env = tw.TransformedEnv(native(2), Level())
    assert env.set_wrapper_attr("level", 2.5)
    assert env.get_wrapper_attr("level").tolist() == [2.5, 2.5]
    assert env.transforms[0].level == 7
