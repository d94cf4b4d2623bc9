import functools

import pytest
import torch
from gymnasium import spaces
from helpers import assert_same, buffers
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def test_policy_may_return_action_or_td():
    action = torch.full((2, 6), 0.5)
    for policy in (
        lambda td: action,
        lambda td: td.set("action", action),
        lambda td: TensorDict({"observation": td["observation"], "action": action}, [2]),
    ):
        data, _ = tw.rollout(ScriptedEnv(2), policy, 3)
        assert (data["next", "info", "action"] == 0.5).all()


REPLACEMENTS = {
    "another of the same shape": lambda seen: seen + 0.5,
    "another of another shape": lambda seen: seen[:, :3],
    "another of another dtype": lambda seen: seen.double(),
    "the same, written in place": lambda seen: seen.add_(0.5),
}


@pytest.mark.parametrize("compiled", [False, True])
def test_observation_that_policy_replaces_is_kept_as_replaced(compiled):
    for name in ["another of another shape"] if compiled else REPLACEMENTS:
        change = REPLACEMENTS[name]

        def policy(td, change=change):
            assert td["observation"].dtype == torch.float32
            return td.update({"observation": change(td["observation"]), "action": torch.ones(3, 6)})

        collect, plain = (
            tw.Collector(ScriptedEnv(3, episode_lengths=(2, 3)), each, 5)
            for each in (policy, lambda td: torch.ones(3, 6))
        )
        if compiled:
            tw.compile(collect, backend="eager")
        td, plain_td = collect.env.reset(), plain.env.reset()
        for _ in range(3):
            (data, td), (expected, plain_td) = collect(td), plain(plain_td)
            seen = change(expected["observation"].flatten(0, 1).clone()).unflatten(0, (3, 5))
            assert data["observation"].dtype == seen.dtype and (data["observation"] == seen).all()
            assert (data["next", "observation"] == expected["next", "observation"]).all()
            assert (td["observation"] == plain_td["observation"]).all()


def test_policy_runs_without_gradient():
    network = torch.nn.Linear(17, 6)
    data, _ = tw.rollout(
        ScriptedEnv(2), lambda td: network(td["observation"] / 1000).clamp(-1, 1), 3
    )
    assert not data["action"].requires_grad and network(data["observation"]).requires_grad


DICT = spaces.Dict(
    where=spaces.Box(-9, 9, (2,)), rest=spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])
)


def test_keys_restrict_what_is_kept():
    keys = [
        "action",
        ("observation", "where"),
        ("next", "observation", "rest", "1"),
        ("next", "info"),
        ("next", "done"),
    ]
    make = functools.partial(ScriptedEnv, 3, observation_space=DICT, episode_lengths=(2, 3))
    whole, _ = tw.rollout(make(), lambda td: torch.ones(3, 6), 5)
    collect = tw.Collector(make(), lambda td: torch.ones(3, 6), 5, keys=keys)
    for _ in range(2):  # the first call also learns which keys there are
        data, td = collect(collect.env.reset(seed=0))
        expected = {
            "action",
            "observation where",
            "next observation rest 1",
            "next info action",
            "next done",
        }
        assert {
            key if isinstance(key, str) else " ".join(key) for key in data.keys(True, True)
        } == expected
        assert data.batch_size == (3, 5) and data.names == [None, "time"]
        for key in data.keys(True, True):
            assert data[key].shape == whole[key].shape and data[key].dtype == whole[key].dtype
            assert (data[key] == whole[key]).all()
        assert set(td.keys(True, True)) == {
            ("observation", *path) for path in (("where",), ("rest", "0"), ("rest", "1"))
        }


def test_repeated_calls_equal_one_run_of_steps():
    assert tw.rollout(ScriptedEnv(3), None, 6)[0].names == [None, "time"]
    make = lambda: tw.TransformedEnv(  # noqa: E731
        ScriptedEnv(3), T.NormalizeObservation(), T.TimeLimit(4), T.FrameStackObservation(2)
    )
    env, other = make(), make()
    collect, td, other_td = tw.Collector(env, None, 6), env.reset(seed=0), other.reset(seed=0)
    for _ in range(4):
        data, td = collect(td)
        for step in range(6):
            transition, other_td = other.step(other_td.set("action", other.sample_action()))
            assert set(transition.keys(True, True)) == set(data.keys(True, True))
            assert all(
                (data[key][:, step] == transition[key]).all() for key in transition.keys(True, True)
            )
        assert (
            set(td.keys()) == {"observation"}
            and (td["observation"] == other_td["observation"]).all()
        )
    for (name, buffer), (_, same) in zip(env.named_buffers(), other.named_buffers(), strict=True):
        assert (buffer == same).all(), name


def test_call_without_td_resets_the_env_and_leaves_it_at_the_last_root():
    collect = tw.Collector(ScriptedEnv(2, episode_lengths=None), None, 3)
    for _ in range(2):
        data, td = collect()
        assert data["next", "reward"].squeeze(-1).tolist() == [[1, 2, 3]] * 2
        assert (collect.env.snapshot()["observation"] == td["observation"]).all()
    assert collect.env.reset(mask=torch.tensor([False, True]))["observation"][:, 0].tolist() == [
        3,
        1000,
    ]


LIST = "Collector needs keys as a non-empty list of strings and tuples of strings, but got "
AT_LEAST = "Collector needs num_steps as an integer of at least 1, but got "
POLICY = "needs a callable policy, or None, but got "
BAD_ARGUMENTS = [  # of Collector
    (dict(keys=[]), ValueError, LIST + r"\[\]"),
    (dict(keys="action"), ValueError, LIST + "'action'"),
    (dict(keys=3), ValueError, LIST + "3"),
    (dict(keys=[["action"]]), ValueError, LIST + r"\[\['action'\]\]"),
    (dict(keys=[("next", 3)]), ValueError, LIST + r"\[\('next', 3\)\]"),
    (
        dict(keys=["action", "value"]),
        ValueError,
        r"Collector needs keys among .*reward.*, but got \['value'\]",
    ),
    (
        dict(keys=[("next", "value")]),
        ValueError,
        r"Collector needs keys among .*, but got \[\('next', 'value'\)\]",
    ),
    (dict(num_steps=0), ValueError, AT_LEAST + "0"),
    (dict(num_steps=-1), ValueError, AT_LEAST + "-1"),
    (dict(num_steps=True), ValueError, AT_LEAST + "True"),
    (dict(num_steps=1.5), TypeError, AT_LEAST + "1.5"),
    (dict(num_steps=None), TypeError, AT_LEAST + "None"),
    (dict(env=T.TimeLimit(3)), TypeError, "Collector needs an Env, but got TimeLimit"),
    (dict(env=None), TypeError, "Collector needs an Env, but got NoneType"),
    (dict(policy="random"), TypeError, f"Collector {POLICY}'random'"),
    (dict(policy=torch.zeros(2, 6)), TypeError, f"Collector {POLICY}tensor"),
]
BAD_ROOTS = [
    (lambda: ScriptedEnv(3).reset(), ValueError, r"shape \(2, 17\) .*but got \(3, 17\)"),
    (lambda: ScriptedEnv(2, (4,)).reset(), ValueError, r"shape \(2, 17\) .*but got \(2, 4\)"),
    (
        lambda: TensorDict({"observation": torch.zeros(2, 17).double()}, [2]),
        TypeError,
        "dtype torch.float32",
    ),
    (
        lambda: ScriptedEnv(2, observation_space=DICT).reset(),
        TypeError,
        "as a torch.Tensor, but got",
    ),
    (
        lambda: TensorDict({"observation": torch.zeros(2, 17, device="meta")}, [2]),
        ValueError,
        "device cpu, but got meta",
    ),
    (lambda: TensorDict({"action": torch.zeros(2, 6)}, [2]), ValueError, "observation"),
    (lambda: torch.zeros(2, 17), TypeError, "TensorDict"),
]
BAD_POLICIES = [
    (lambda td: torch.zeros(2, 5), ValueError, r"needs an action of shape \(2, 6\)"),
    (lambda td: torch.zeros(2, 6).double(), TypeError, "needs an action of dtype torch.float32"),
    (lambda td: td, ValueError, r'needs td\["action"\]'),
    (lambda td: None, (TypeError, ValueError), "action"),
]


def test_bad_arguments_are_refused():
    for arguments, error, message in BAD_ARGUMENTS:
        with pytest.raises(error, match=message):
            tw.Collector(**{"env": ScriptedEnv(2), "policy": None, "num_steps": 3, **arguments})()
    for arguments, error, message in BAD_ARGUMENTS:
        if not {"keys", "num_steps"} & set(arguments):
            with pytest.raises(error, match=message.replace("Collector", "evaluate")):
                tw.evaluate(
                    **{"env": ScriptedEnv(2), "policy": None, "num_episodes": 3, **arguments}
                )


@pytest.mark.parametrize("collected", [False, True])
def test_root_of_another_env_is_refused_and_changes_nothing(collected):
    env = ScriptedEnv(2)
    collect = tw.Collector(env, None, 3)
    with pytest.raises(
        RuntimeError, match=r"ScriptedEnv has not been reset yet: call reset\(\) before a rollout"
    ):
        collect(ScriptedEnv(2).reset())
    env.reset()
    if collected:
        collect()
    for make, error, message in BAD_ROOTS:
        before = buffers(env)
        with pytest.raises(error, match=message):
            collect(make())
        assert_same(buffers(env), before)


def test_policy_without_valid_action_is_refused_before_the_env_steps():
    for policy, error, message in BAD_POLICIES:
        env = ScriptedEnv(2)
        td, before = env.reset(), buffers(env)
        with pytest.raises(error, match=message):
            tw.Collector(env, policy, 3)(td)
        assert_same(buffers(env), before)


def test_outputs_that_are_held_never_overlap():
    collect = tw.Collector(ScriptedEnv(3, (4,)), lambda td: torch.zeros(3, 6), 4)
    held, td = [], collect.env.reset()
    for number in range(8):
        data, td = collect(td)
        assert (data["next", "info", "action"] == 0).all()
        for leaf in data.values(True, True):
            leaf.fill_(number % 2)
        held.append(data if number % 3 else data["observation"][1])  # of every third, one env only
        del data
    for number, value in enumerate(held):
        assert all(
            (leaf == number % 2).all()
            for leaf in ([value] if isinstance(value, torch.Tensor) else value.values(True, True))
        )


def test_policy_that_keeps_its_input_sees_it_unchanged_by_later_steps_and_calls():
    def policy(td):
        kept.append(td["observation"])
        return torch.zeros(len(td), 6)

    for keys in ([("next", "reward")], ["observation"], None):
        kept = []
        collect = tw.Collector(ScriptedEnv(3, (1,), None), policy, 5, keys=keys)
        td = collect.env.reset()
        for _ in range(8):
            data, td = collect(td)
            for leaf in data.values(True, True):
                leaf.fill_(-1)
        assert [observation[0].item() for observation in kept] == list(range(40))


def test_collector_keeps_what_it_was_made_with():
    collect = tw.Collector(ScriptedEnv(2), None, 3)
    for name, value in (("env", None), ("num_steps", 7), ("keys", ["observation"])):
        before = getattr(collect, name)
        with pytest.raises(
            AttributeError,
            match=rf"Collector\.{name} is fixed at construction, but got .*: make a new Collector",
        ):
            setattr(collect, name, value)
        assert getattr(collect, name) is before


def test_policy_that_returns_other_keys_or_shapes_in_another_call_is_followed():
    collect, extra = (
        tw.Collector(
            ScriptedEnv(2), lambda td: td.update({"action": torch.zeros(2, 6), **extra}), 3
        ),
        {},
    )
    for extra in (
        {"value": torch.ones(2)},
        {"value": torch.ones(2, 4)},
        {"logits": torch.zeros(2, 1).double()},
        {},
    ):
        data, _ = collect()
        assert set(extra) == set(data.keys()) - {"observation", "action", "next"}
        for key, value in extra.items():
            assert data[key].shape == (2, 3, *value.shape[1:]) and data[key].dtype == value.dtype
