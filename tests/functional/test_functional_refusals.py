"""Wrong functions, arguments and inputs, which are refused before anything has changed."""

import pytest
import torch
from func_envs import BroadcastWalk, Walk, changed, play, some_actions, variant
from helpers import buffers

from torchwrap import FunctionalEnv

COUNT = torch.zeros((), dtype=torch.int64)
FLAGS = torch.zeros(2, dtype=torch.bool)
STATE = {"position": torch.zeros(2), "count": COUNT}
ROWS = {"position": torch.zeros(3, 2)}

WRONG_RESULTS = [  # function, error, and results for a single env
    ("initial", TypeError, [torch.zeros(2), {"count": 0}]),
    ("observation", ValueError, [torch.zeros(1)]),
    ("observation", TypeError, [torch.zeros(2).double(), {"a": torch.zeros(2)}]),
    ("terminal", ValueError, [FLAGS]),
    ("terminal", TypeError, [COUNT, False]),
    ("truncated", TypeError, [COUNT]),
    ("reward", ValueError, [torch.zeros(1)]),
    ("reward", TypeError, [1.0]),
    ("transition", ValueError, [{"count": COUNT}, {**STATE, "more": COUNT}]),
    ("transition", TypeError, [{**STATE, "count": torch.zeros(())}]),
    ("state_info", TypeError, [COUNT, {"a": 1.0}, {"a": {"b": COUNT}}, {3: COUNT}]),
    ("transition_info", TypeError, [None]),
]
WRONG_BATCHES = [  # of functions in broadcasting style
    ("initial", ValueError, [{**ROWS, "count": COUNT}, {**ROWS, "count": torch.zeros(1)}]),
    ("observation", ValueError, [torch.zeros(2)]),
    ("reward", ValueError, [torch.zeros(())]),
    ("state_info", ValueError, [{"a": COUNT}]),
]


CASES = []
for base, table in ((Walk, WRONG_RESULTS), (BroadcastWalk, WRONG_BATCHES)):
    for name, error, results in table:
        CASES += [pytest.param(base, name, error, result, id=name) for result in results]


@pytest.mark.parametrize(("base", "name", "error", "result"), CASES)
def test_function_with_a_wrong_result_raises_at_construction(base, name, error, result):
    function = {name: lambda *_, **__: result}
    with pytest.raises(error, match=f"^Variant.*{name}"):
        FunctionalEnv(variant(base, **function), 3)


def on_position(function):
    """A walk whose reward is a function of the position."""
    return variant(reward=lambda state, action, next_state, rng: function(state["position"]))


def branching(position):
    if position[0] > 0:
        return torch.zeros(())
    return torch.ones(())


UNFIT_REWARDS = {
    "raises": lambda x: 1 / 0,
    "dynamic shape": lambda x: x[x > 0].sum(),
}


@pytest.mark.parametrize("function", UNFIT_REWARDS.values(), ids=UNFIT_REWARDS)
def test_function_that_vmap_cannot_batch_raises_at_construction(function):
    with pytest.raises(TypeError, match="reward"):
        FunctionalEnv(on_position(function), 3)


HOST_READS = {
    "branch": branching,
    "item": lambda x: x[0] * x[1].item(),
}


@pytest.mark.parametrize("function", HOST_READS.values(), ids=HOST_READS)
def test_function_that_reads_on_the_host_is_named(function):
    with pytest.raises(TypeError, match=r"Variant\.reward.*torchwrap\.random"):
        FunctionalEnv(on_position(function), 3)


def test_infos_with_equal_names_raise():
    same = variant(
        state_info=lambda state: {"a": state["count"]},
        transition_info=lambda state, *_: {"a": state["count"]},
    )
    with pytest.raises(ValueError, match="transition_info and state_info"):
        FunctionalEnv(same, 3)


ARGUMENTS = [
    ("num_envs", 0),
    ("num_envs", True),
    ("max_episode_steps", 0),
    ("max_episode_steps", 2.5),
    ("first_index", -1),
    ("func_env", Walk),
    ("params", {"gravity": 9.8}),
    ("params", {"gravity": torch.ones(2)}),
    ("device", "nope"),
]


@pytest.mark.parametrize(("name", "value"), ARGUMENTS, ids=str)
def test_wrong_argument_raises(name, value):
    arguments = {"func_env": Walk(), "num_envs": 3, name: value}
    with pytest.raises((TypeError, ValueError), match=name):
        FunctionalEnv(**arguments)


# Calls.


@pytest.fixture
def env():
    env = FunctionalEnv(Walk(), 2)
    play(env, env.reset(seed=0), some_actions(env, 3))
    return env


ZEROS = torch.zeros(2, 1)


@pytest.fixture
def assert_refused(env):
    """Asserts that a call raises, and that it changes nothing."""
    before = buffers(env)

    def check(error, name, call, *args, **kwargs):
        with pytest.raises(error, match=name):
            call(*args, **kwargs)
        assert changed(env, before) == []

    return check


ACTIONS = [
    pytest.param(ValueError, torch.zeros(2), id="shape"),
    pytest.param(TypeError, ZEROS.double(), id="dtype"),
]


@pytest.mark.parametrize(("error", "action"), ACTIONS)
def test_wrong_action_raises_and_changes_nothing(env, assert_refused, error, action):
    assert_refused(error, "action", env.step, action)
    assert_refused(error, "action", env.simulate, env.state, action)


OPTIONS = {
    "unknown": {"unknown": 1},
    "speed": {"state": {"speed": ZEROS}},
    "count": {"state": {"count": ZEROS}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_reset_options_raise_and_change_nothing(env, assert_refused, name):
    assert_refused(ValueError, name, env.reset, seed=1, options=OPTIONS[name])


FIELDS = [
    pytest.param(TypeError, {"position": [0, 0]}, id="no tensor"),
    pytest.param(ValueError, {"position": torch.zeros(3, 2)}, id="shape"),
    pytest.param(TypeError, {"count": torch.zeros(2)}, id="dtype"),
    pytest.param(ValueError, {"speed": ZEROS}, id="more fields"),
]


@pytest.mark.parametrize(("error", "fields"), FIELDS)
def test_simulate_from_a_wrong_field_raises_and_changes_nothing(env, assert_refused, error, fields):
    (name,) = fields
    assert_refused(error, name, env.simulate, {**env.state, **fields}, ZEROS)


def test_simulate_from_no_state_or_with_a_wrong_offset_raises(env, assert_refused):
    assert_refused(TypeError, "state", env.simulate, ZEROS, ZEROS)
    assert_refused(ValueError, "offset", env.simulate, env.state, ZEROS, offset=-1)
    assert_refused(TypeError, "offset", env.simulate, env.state, ZEROS, offset=0.5)
