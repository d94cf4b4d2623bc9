"""State that is loaded and restored, as a whole or not at all; and configuration, which stays as it was made."""

import copy
import functools

import pytest
import torch
from catalogue import ACTIONS, DICT, TRANSFORMS, UNCAPTURED, WRAPPERS
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from helpers import after, assert_same, each_copy, play, through_file
from tensordict import TensorDict
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def normalized(num_envs=3, **arguments):
    return tw.TransformedEnv(
        ScriptedEnv(num_envs, (2,), **arguments), T.NormalizeObservation(), T.NormalizeReward()
    )


# The names of buffers.


def nested(*between):
    below = tw.TransformedEnv(tw.make("Pendulum-v1", 3), T.NormalizeReward())
    for part in between:
        below = tw.TransformedEnv(below, copy.deepcopy(part))
    inner = T.Compose([*copy.deepcopy(between), T.NormalizeReward()])
    groups = T.ObservationGroups({"a": [T.NormalizeObservation()], "b": []})
    return tw.TransformedEnv(
        below, T.NormalizeObservation(), *between, inner, T.NormalizeObservation(), groups
    )


WITHOUT_STATISTICS = (
    T.ClipReward(-9, 9),
    T.TimeLimit(7),
    T.RecordEpisodeStatistics(),
    T.DelayObservation(1),
)


def test_buffers_are_named_by_class_and_load_with_other_transforms_between():
    env, other, again = nested(), nested(*WITHOUT_STATISTICS), nested()
    after(env, 5)
    parts = ["NormalizeObservation", "Compose.NormalizeReward", "NormalizeObservation_2"]
    names = [
        f"transforms.{part}." for part in (*parts, "ObservationGroups.parts.a.NormalizeObservation")
    ]
    learned, fields = env.state_dict(), ("reference", "total", "squares", "count")
    assert set(learned) == {
        f"{n}statistics.{f}" for n in (*names, "env.transforms.NormalizeReward.") for f in fields
    }
    other.load_state_dict(learned)
    again.load_state_dict(other.state_dict())
    assert_same(TensorDict(again.state_dict(), []), TensorDict(learned, []))


def test_names_that_are_given_are_in_the_state_dict_and_in_the_spec():
    env = tw.TransformedEnv(
        tw.make("Pendulum-v1"),
        T.Compose({"seen": T.NormalizeObservation(), "paid": T.NormalizeReward()}),
    )
    for made in (env, tw.make(env.spec), tw.make(EnvSpec.from_json(env.spec.to_json()))):
        assert list(dict.fromkeys(key.split(".")[1] for key in made.state_dict())) == [
            "seen",
            "paid",
        ]


# load_state_dict.

SEEN, PAID = "transforms.NormalizeObservation.statistics", "transforms.NormalizeReward.statistics"
COUNT, TOTAL, LAST = f"{SEEN}.count", f"{SEEN}.total", f"{PAID}.count"
# What is wrong with a state_dict, by the last entry that nn.Module would reach; and what the message says.
WRONG = {
    "shape": ({LAST: torch.zeros(2, dtype=torch.int64)}, f"size mismatch for {LAST}"),
    "type": ({LAST: "3"}, LAST),
    "none": ({LAST: None}, LAST),
    "unexpected key": (
        {"transforms.2.extra": torch.zeros(1)},
        r"Unexpected key\(s\) in state_dict: .*transforms\.2\.extra",
    ),
    "meta": ({LAST: torch.zeros(1, dtype=torch.int64, device="meta")}, LAST),
}


def taught():
    """An env that has learned something, and the state_dict of another one that has learned more."""
    env, teacher = normalized(), normalized(episode_lengths=9)
    after(env, 3)
    after(teacher, 20)
    return env, teacher.state_dict()


def assert_load_raises(module, state, message, **arguments):
    before, held = (
        {name: value.clone() for name, value in module.state_dict().items()},
        module.state_dict(keep_vars=True),
    )
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state, **arguments)
    assert all(value is held[name] for name, value in module.state_dict(keep_vars=True).items())
    assert_same(TensorDict(module.state_dict(), []), TensorDict(before, []))


def test_load_state_dict_that_raises_changes_nothing():
    env, learned = taught()
    snapshot = env.snapshot()
    for wrong, message in WRONG.values():
        assert_load_raises(env, {**learned, **wrong}, message)
    missing = {name: value for name, value in learned.items() if name != LAST}
    assert_load_raises(env, missing, rf"Missing key\(s\) in state_dict: .*{LAST}")
    with pytest.raises(TypeError, match="state_dict"):
        env.load_state_dict(3)
    twin = copy.deepcopy(env)
    assert_same(play(env, 5, env.restore(snapshot))[0], play(twin, 5, twin.restore(snapshot))[0])
    part = tw.TransformedEnv(ScriptedEnv(2, (2,)), Encoder(1.0), T.NormalizeReward()).transforms
    more = {name: value + 1 for name, value in part.state_dict().items()}
    assert_load_raises(
        part,
        {**more, "NormalizeReward.statistics.count": torch.zeros(3, dtype=torch.int64)},
        "size mismatch",
    )
    part.load_state_dict(more)
    assert (
        all((part.state_dict()[name] == value).all() for name, value in more.items())
        and part[0].scale == 2
    )


class Encoder(T.ObservationTransform):
    """A user's transform with parameters, and a buffer under the name of an argument."""

    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", torch.as_tensor(scale))
        self.linear = nn.Linear(2, 2)

    def observation(self, observation):
        return self.linear(observation) * self.scale


def test_load_state_dict_not_strict_returns_the_keys_that_differ():
    env, learned = taught()
    total = learned.pop(TOTAL)
    result = env.load_state_dict({**learned, "extra": torch.zeros(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([TOTAL], ["extra"])
    assert (env.state_dict()[COUNT] == learned[COUNT]).all() and (
        env.state_dict()[TOTAL] != total
    ).any()
    with pytest.raises(RuntimeError, match="size mismatch"):
        env.load_state_dict({**env.state_dict(), **WRONG["shape"][0]}, strict=False)


# restore.


@pytest.mark.parametrize(
    "store", [lambda snapshot: snapshot, through_file], ids=["snapshot", "file"]
)
def test_restore_of_another_configuration_keeps_the_own_one(store):
    other, env = (
        tw.TransformedEnv(ScriptedEnv(2), T.RescaleAction(-limit, limit), T.TimeLimit(limit))
        for limit in (1, 10)
    )
    after(other, 1)
    td = env.restore(store(other.snapshot()))
    transition, _ = env.step(td.set("action", torch.full((2, 6), 10.0)))
    assert (transition["next", "info", "action"] == 1).all() and not transition[
        "next", "truncated"
    ].all()


ENVS = [
    functools.partial(ScriptedEnv, observation_space=DICT, action_space=ACTIONS),
    functools.partial(tw.make, "CartPole-v1"),
    normalized,
]


@pytest.mark.parametrize(
    "store", [lambda snapshot: snapshot, through_file], ids=["snapshot", "file"]
)
def test_restore_of_another_num_envs_raises_before_anything_changed(store):
    for make in ENVS:
        env, other = make(2), make(3)
        td = after(env, 3)
        after(other, 5)
        before = env.snapshot()
        with pytest.raises(ValueError, match=r"restore needs .* of shape \(2,.*, but got \(3,"):
            env.restore(store(other.snapshot()))
        assert_same(env.snapshot(), before)
        env.step(td.set("action", env.sample_action()))


def test_root_of_restore_shares_no_memory_with_the_snapshot():
    env = ScriptedEnv(2, observation_space=spaces.Dict(a=spaces.Box(1, 9, (2,))))
    env.reset(seed=0)
    snapshot = env.snapshot()
    env.restore(snapshot)["observation", "a"].zero_()
    assert (snapshot["observation", "a"] > 0).all()


# What is wrong with a snapshot, as a function that changes its dict.
GARBLED = {
    "observations of another shape": lambda found: found.update(
        observation={"position": torch.zeros(2)}
    ),
    "no observation": lambda found: found.update(observation=None),
    "no buffers": lambda found: found.update(buffers=None),
    "another key": lambda found: found.update(extra=torch.zeros(1)),
    "a number": lambda found: found["buffers"].update({"elapsed": 3}),
    "another dtype": lambda found: found["buffers"].update({"elapsed": torch.zeros(2)}),
    "another shape": lambda found: found["buffers"].update(
        {"elapsed": torch.zeros(3, dtype=torch.int64)}
    ),
    "a missing buffer": lambda found: found["buffers"].pop("elapsed"),
    "another buffer": lambda found: found["buffers"].update({"other": torch.zeros(2)}),
}


def test_restore_of_a_garbled_snapshot_raises_before_anything_changed():
    env = ScriptedEnv(2, observation_space=DICT)
    td = after(env, 3)
    before = env.snapshot()
    for name, garble in GARBLED.items():
        garbled = {key: dict(value) for key, value in before.to_dict().items()}
        after(env, 0, seed=1)
        garble(garbled)
        now = env.snapshot()
        with pytest.raises((TypeError, ValueError), match=r"^ScriptedEnv\.restore needs "):
            env.restore(garbled)
            pytest.fail(name)
        assert_same(env.snapshot(), now)
    assert_same(env.restore(before), td)


# Constructor arguments and parts.

KEPT = r"\.{} is fixed at construction, but got"
PARTS = [  # a module, and the name of one of its constructor arguments or parts
    (lambda: T.ClipReward(-1, 1), "max_reward"),
    (lambda: T.Compose([]), "transforms"),
    (lambda: tw.Wrapper(ScriptedEnv(1)), "env"),
    (normalized, "transforms"),
    (normalized, "signature"),
    (lambda: tw.make("CartPole-v1"), "func_env"),
    (lambda: tw.make("CartPole-v1"), "render_mode"),
    (lambda: ScriptedEnv(1), "action_stream"),
    (lambda: normalized().transforms[1], "statistics"),
]


@each_copy
def test_constructor_argument_or_part_assigned_raises(replicate):
    for make, name in PARTS:
        for module in (make(), replicate(make())):
            before = getattr(module, name)
            for value in (3, before):
                with pytest.raises(
                    AttributeError, match=f"{type(module).__name__}{KEPT.format(name)}"
                ):
                    setattr(module, name, value)
            assert getattr(module, name) is before or name == "transforms"


def assert_arguments_stay(module):
    for argument in set(type(module)._constructor_arguments) - {"self"}:
        with pytest.raises(AttributeError, match=KEPT.format(argument)):
            setattr(module, argument, getattr(module, argument, None))


def test_constructor_arguments_of_every_transform_and_wrapper_stay():
    for make, make_env in {**TRANSFORMS, **UNCAPTURED}.values():
        loose, attached = make(), tw.TransformedEnv(make_env(2), make()).transforms
        for part in [*loose.flat(), *attached.flat()]:
            assert_arguments_stay(part)
    for make in WRAPPERS.values():
        with make(2) as env:
            assert_arguments_stay(env)


class Adjustable(T.RewardTransform):
    """A user's transform whose argument may be assigned, because it says what an assignment does."""

    def __init__(self, factor, offset):
        super().__init__()
        self.register_buffer("offset", torch.as_tensor(offset), persistent=False)
        self.register_buffer("_factor", torch.as_tensor(factor), persistent=False)

    @property
    def factor(self):
        return self._factor.item()

    @factor.setter
    def factor(self, value):
        self._factor.fill_(value)

    def reward(self, reward):
        return reward * self._factor + self.offset


@pytest.mark.parametrize("compiled", [False, True])
def test_arguments_that_are_properties_with_a_setter_or_buffers_can_be_assigned(compiled):
    env = tw.TransformedEnv(ScriptedEnv(1, episode_lengths=None), Adjustable(2.0, 1.0))
    if compiled:
        tw.compile(env, backend="aot_eager")
    env.reset()
    assert env.step(env.sample_action())[0]["next", "reward"].item() == 1 * 2 + 1
    env.set_wrapper_attr("factor", 3.0)
    env.transforms[0].offset = torch.tensor(5.0)
    assert env.step(env.sample_action())[0]["next", "reward"].item() == 2 * 3 + 5


def test_remedy_of_an_assignment_makes_the_env_that_was_wanted():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 2), T.NormalizeObservation())
    after(env, 9)
    remedy = r"torchwrap\.make\(env\.spec, \.\.\.\); new\.load_state_dict\(old\.state_dict\(\)\) copies what was learned"
    with pytest.raises(AttributeError, match=remedy):
        env.env = tw.make("CartPole-v1", 3)
    new = tw.make(env.spec, num_envs=3)
    new.load_state_dict(env.state_dict())
    assert_same(TensorDict(new.state_dict(), []), TensorDict(env.state_dict(), []))
    assert new.num_envs == 3
