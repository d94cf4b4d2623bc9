"""Collector: chunks of transitions, what they keep, and refused roots and policies."""

import functools

import pytest
import torch
from gymnasium import spaces
from helpers import assert_same, buffers, from_reset, leaves
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def ones(td):
    return torch.ones(len(td), 6)


POLICIES = {
    "action": ones,
    "root": lambda td: td.set("action", ones(td)),
    "new td": lambda td: TensorDict(
        {"observation": td["observation"], "action": ones(td)},
        [2],
    ),
    "dict": lambda td: {"action": ones(td)},
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policy_may_return_action_or_td(policy):
    data = tw.rollout(ScriptedEnv(2), policy, 3)
    assert (data["next", "info", "action"] == 1).all()


def test_policy_may_return_a_dict_of_actions():
    space = spaces.Dict(gear=spaces.Discrete(3), arm=spaces.Dict(joint=spaces.Box(-1, 1, (2,))))
    action = {"gear": torch.ones(2).long(), "arm": {"joint": torch.ones(2, 2)}}
    data = tw.rollout(ScriptedEnv(2, action_space=space), lambda td: action, 3)
    received = data["next", "info", "action"]
    assert (received["gear"] == 1).all() and (received["arm", "joint"] == 1).all()


REPLACEMENTS = {
    "values": lambda seen: seen + 0.5,
    "shape": lambda seen: seen[:, :3],
    "dtype": lambda seen: seen.double(),
    "in place": lambda seen: seen.add_(0.5),
}
REPLACED = [pytest.param(change, False, id=name) for name, change in REPLACEMENTS.items()]
REPLACED.append(pytest.param(REPLACEMENTS["shape"], True, id="shape, compiled"))


@pytest.mark.parametrize("change, compiled", REPLACED)
def test_observation_that_the_policy_replaces_is_kept_as_replaced(change, compiled):
    def policy(td):
        assert td["observation"].dtype == torch.float32
        return td.update(
            {
                "observation": change(td["observation"]),
                "action": ones(td),
            }
        )

    collect = tw.Collector(
        ScriptedEnv(3, episode_lengths=(2, 3)),
        policy,
        5,
    )
    plain = tw.Collector(
        ScriptedEnv(3, episode_lengths=(2, 3)),
        ones,
        5,
    )
    if compiled:
        tw.compile(collect, backend="eager")
    for _ in range(3):
        data = collect()
        expected = plain()
        seen = change(expected["observation"].flatten(0, 1).clone()).unflatten(0, (3, 5))
        assert data["observation"].dtype == seen.dtype and (data["observation"] == seen).all()
        assert (data["next", "observation"] == expected["next", "observation"]).all()
        assert_same(collect.env.root, plain.env.root)


def test_policy_runs_without_gradient():
    network = torch.nn.Linear(17, 6)

    def policy(td):
        return network(td["observation"] / 1000).clamp(-1, 1)

    data = tw.rollout(ScriptedEnv(2), policy, 3)
    assert not data["action"].requires_grad and network(data["observation"]).requires_grad


REST = spaces.Tuple(
    [
        spaces.Discrete(3),
        spaces.MultiBinary(2),
    ]
)
DICT = spaces.Dict(
    where=spaces.Box(-9, 9, (2,)),
    rest=REST,
)


def test_keys_restrict_the_entries_that_are_kept():
    kept = [
        "action",
        ("observation", "where"),
        ("next", "observation", "rest", "1"),
        ("next", "info", "action"),
        ("next", "done"),
    ]
    make = functools.partial(
        ScriptedEnv,
        3,
        observation_space=DICT,
        episode_lengths=(2, 3),
    )
    whole = tw.rollout(make(), ones, 5)
    keys = [("next", "info") if "info" in key else key for key in kept]
    collect = tw.Collector(make(), ones, 5, keys=keys)
    for _ in range(2):  # the first call also learns which keys there are
        data = from_reset(collect)
        assert set(data.keys(True, True)) == set(kept)
        assert data.batch_size == (3, 5) and data.names == [None, "time"]
        assert_same(data, whole.select(*kept))
        parts = (
            ("where",),
            ("rest", "0"),
            ("rest", "1"),
        )
        assert set(collect.env.root.keys(True, True)) == {("observation", *path) for path in parts}


def test_repeated_calls_equal_one_run_of_steps():
    def make():
        transforms = T.NormalizeObservation(), T.TimeLimit(4), T.FrameStackObservation(2)
        return tw.TransformedEnv(ScriptedEnv(3), *transforms)

    env = make()
    other = make()
    collect = tw.Collector(env, None, 6)
    env.reset(seed=0)
    other_td = other.reset(seed=0)
    for _ in range(4):
        data = collect()
        assert data.names == [None, "time"]
        for step in range(6):
            transition, other_td = other.step(other_td.set("action", other.sample_action()))
            assert_same(data[:, step], transition)
        assert_same(env.root, other_td)
    assert_same(buffers(env), buffers(other))


BAD_ARGUMENTS = {
    "no keys": (dict(keys=[]), ValueError),
    "a string": (dict(keys="action"), ValueError),
    "a list of lists": (dict(keys=[["action"]]), ValueError),
    "an unknown key": (dict(keys=["action", "value"]), ValueError),
    "0 steps": (dict(num_steps=0), ValueError),
    "1.5 steps": (dict(num_steps=1.5), TypeError),
    "a transform": (dict(env=T.TimeLimit(3)), TypeError),
    "a string as policy": (dict(policy="random"), TypeError),
}


@pytest.mark.parametrize("arguments, error", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_collector_of_bad_arguments_raises(arguments, error):
    (name,) = arguments
    with pytest.raises(error, match=f"Collector: {name}"):
        tw.Collector(
            **{
                "env": ScriptedEnv(2),
                "policy": None,
                "num_steps": 3,
                **arguments,
            }
        )()


BAD_POLICIES = {
    "shape": (lambda td: torch.zeros(2, 5), ValueError),
    "no action": (lambda td: td, ValueError),
    "nothing": (lambda td: None, TypeError),
}


@pytest.mark.parametrize("policy, error", BAD_POLICIES.values(), ids=BAD_POLICIES)
def test_policy_without_valid_action_raises_before_the_env_steps(policy, error):
    env = ScriptedEnv(2)
    env.reset()
    before = buffers(env)
    collect = tw.Collector(env, policy, 3)
    with pytest.raises(error, match="action"):
        collect()
    assert_same(buffers(env), before)
    collect.policy = None
    collect()  # no reset is needed


def test_outputs_that_are_held_never_overlap():
    collect = tw.Collector(
        ScriptedEnv(3, (4,)),
        lambda td: torch.zeros(3, 6),
        4,
    )
    held = []
    collect.env.reset()
    for number in range(8):
        data = collect()
        assert (data["next", "info", "action"] == 0).all()
        for leaf in leaves(data):
            leaf.fill_(number % 2)
        held.append(data if number % 3 else data.select("observation")[1])  # sometimes one env
        del data
    for number, value in enumerate(held):
        assert all((leaf == number % 2).all() for leaf in leaves(value))


@pytest.mark.parametrize(
    "keys",
    [[("next", "reward")], ["observation"], None],
    ids=str,
)
def test_policy_that_keeps_its_input_sees_it_unchanged_by_later_calls(keys):
    kept = []

    def policy(td):
        kept.append(td["observation"])
        return ones(td)

    collect = tw.Collector(
        ScriptedEnv(3, (1,), None),
        policy,
        5,
        keys=keys,
    )
    collect.env.reset()
    for _ in range(8):
        data = collect()
        for leaf in leaves(data):
            leaf.fill_(-1)
    assert [observation[0].item() for observation in kept] == list(range(40))


LATE = {
    "shape": lambda: {"log_prob": torch.zeros(2, 1)},  # would broadcast
    "dtype": lambda: {"log_prob": torch.zeros(2, 3).double()},
    "missing": dict,
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_policy_that_returns_another_entry_in_a_later_step_raises(late):
    results = [{"log_prob": torch.zeros(2, 3)}] * 2 + [late()]

    def policy(td):
        return td.update({"action": torch.zeros(2, 6), **results.pop(0)})

    with pytest.raises((TypeError, ValueError), match="Collector: log_prob"):
        tw.rollout(ScriptedEnv(2), policy, 3)


def test_policy_that_returns_other_keys_or_shapes_in_another_call_is_followed():
    extra = {}
    collect = tw.Collector(
        ScriptedEnv(2),
        lambda td: td.update({"action": ones(td), **extra}),
        3,
    )
    for value in (
        torch.ones(2),
        torch.ones(2, 4),
        torch.zeros(2, 1).double(),
        None,
    ):
        extra = {} if value is None else {"value": value}
        data = collect()
        assert set(data.keys()) == {"observation", "action", "next", *extra}
        if value is not None:
            assert data["value"].shape == (
                2,
                3,
                *value.shape[1:],
            )
            assert data["value"].dtype == value.dtype
