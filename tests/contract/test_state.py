"""State that is loaded and restored, as a whole or not at all; and configuration, which stays."""

import copy

import pytest
import torch
from catalogue import DICT, TRANSFORMS, UNCAPTURED
from helpers import after, assert_same, params, play, through_file
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def normalized(num_envs=3, **arguments):
    env = ScriptedEnv(num_envs, (2,), **arguments)
    return tw.TransformedEnv(
        env,
        T.NormalizeObservation(),
        T.NormalizeReward(),
    )


# The names of buffers.


def copies_of(parts, number):
    """Copies for one of several places. The keys of recorders have to differ."""
    parts = copy.deepcopy(parts)
    for part in parts:
        if isinstance(part, T.RecordEpisodeStatistics):
            part.stats_key = f"episode_{number}"
    return parts


def nested(*between):
    """A stack of layers that learn, with other transforms between them."""
    env = tw.TransformedEnv(
        tw.make("Pendulum-v1", 3),
        T.NormalizeReward(),
    )
    for part in copies_of(between, 1):
        env = tw.TransformedEnv(env, part)
    inner = T.Compose([*copies_of(between, 2), T.NormalizeReward()])
    groups = T.ObservationGroups(
        {
            "a": [T.NormalizeObservation()],
            "b": [],
        }
    )
    parts = T.NormalizeObservation(), *between, inner, T.NormalizeObservation(), groups
    return tw.TransformedEnv(env, *parts)


STATELESS = T.ClipReward(-9, 9), T.TimeLimit(7), T.RecordEpisodeStatistics(), T.DelayObservation(1)
LEARNING = (
    "env.transforms.NormalizeReward",
    "transforms.NormalizeObservation",
    "transforms.Compose.NormalizeReward",
    "transforms.NormalizeObservation_2",
    "transforms.ObservationGroups.parts.a.NormalizeObservation",
)


def test_keys_of_a_state_dict_are_the_paths_of_its_buffers():
    env = nested()
    fields = ("reference", "total", "squares", "count")
    names = {f"{path}.statistics.{field}" for path in LEARNING for field in fields}
    assert set(env.state_dict()) == names <= dict(env.named_buffers()).keys()


@pytest.mark.parametrize(
    "first, second",
    [((), STATELESS), (STATELESS, ())],
    ids=["more", "fewer"],
)
def test_state_dict_loads_with_more_or_fewer_stateless_layers(first, second):
    env = nested(*copy.deepcopy(first))
    after(env, 5)
    other = nested(*copy.deepcopy(second))
    other.load_state_dict(env.state_dict())
    found = {name.replace("env.", ""): value for name, value in other.state_dict().items()}
    expected = {name.replace("env.", ""): value for name, value in env.state_dict().items()}
    assert_same(TensorDict(found, []), TensorDict(expected, []))


# load_state_dict.

COUNT = "transforms.NormalizeObservation.statistics.count"
TOTAL = "transforms.NormalizeObservation.statistics.total"
LAST = "transforms.NormalizeReward.statistics.count"
WRONG = {  # changes of a state_dict, at the last entry that nn.Module would reach
    "shape": {LAST: torch.zeros(2, dtype=torch.int64)},
    "type": {LAST: "3"},
    "none": {LAST: None},
    "meta": {LAST: torch.zeros(1, dtype=torch.int64, device="meta")},
    "unexpected": {"transforms.2.extra": torch.zeros(1)},
    "missing": {LAST: ...},
}


def taught():
    """An env that has learned something, and the state_dict of another that has learned more."""
    env = normalized()
    teacher = normalized(episode_lengths=9)
    after(env, 3)
    after(teacher, 20)
    return env, teacher.state_dict()


def changed(state, change):
    return {name: value for name, value in {**state, **change}.items() if value is not ...}


def assert_load_raises(module, state, error=RuntimeError, **arguments):
    before = TensorDict(dict(module.named_buffers()), []).clone()
    parameters = TensorDict(dict(module.named_parameters()), []).clone()
    tensors = module.state_dict(keep_vars=True)
    with pytest.raises(error):
        module.load_state_dict(state, **arguments)
    for name, value in module.state_dict(keep_vars=True).items():
        assert value is tensors[name]
    assert_same(TensorDict(dict(module.named_buffers()), []), before)
    assert_same(TensorDict(dict(module.named_parameters()), []), parameters)


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_load_state_dict_that_raises_changes_nothing(change):
    env, learned = taught()
    twin = copy.deepcopy(env)
    snapshot = env.snapshot()
    assert_load_raises(env, changed(learned, change))
    assert_same(
        play(env, 5, env.restore(snapshot))[0],
        play(twin, 5, twin.restore(snapshot))[0],
    )


def test_load_state_dict_of_no_dict_raises():
    assert_load_raises(normalized(), 3, TypeError)


def test_load_state_dict_not_strict_returns_the_keys_that_differ():
    env, learned = taught()
    total = learned.pop(TOTAL)
    result = env.load_state_dict(
        {**learned, "extra": torch.zeros(1)},
        strict=False,
    )
    assert (result.missing_keys, result.unexpected_keys) == ([TOTAL], ["extra"])
    assert (env.state_dict()[COUNT] == learned[COUNT]).all()
    assert (env.state_dict()[TOTAL] != total).any()
    assert_load_raises(
        env,
        changed(env.state_dict(), WRONG["shape"]),
        strict=False,
    )


MODULES = {"env": lambda env: env, "outer": torch.nn.Sequential}


@pytest.mark.parametrize("module", params(MODULES, quick=["env"]))
def test_assigned_statistics_keep_their_dtypes_and_reach_the_functions_of_the_env(module):
    env, learned = taught()
    pure = tw.pure(env)
    outer = module(env)
    prefix = "" if outer is env else "0."
    state = {f"{prefix}{name}": value.float() for name, value in learned.items()}
    dtypes = [value.dtype for value in learned.values()]
    outer.load_state_dict(state, assign=True)
    assert [value.dtype for value in env.state_dict().values()] == dtypes
    _, root = pure.init(1)
    assert_same(root, env.reset(seed=1))


# restore.

each_store = pytest.mark.parametrize(
    "store", [lambda snapshot: snapshot, through_file], ids=["snapshot", "file"]
)


@each_store
def test_restore_of_another_configuration_keeps_the_own_one(store):
    def make(limit):
        return tw.TransformedEnv(
            ScriptedEnv(2),
            T.RescaleAction(-limit, limit),
            T.TimeLimit(limit),
        )

    other = make(1)
    env = make(10)
    after(other, 1)
    td = env.restore(store(other.snapshot()))
    transition, _ = env.step(
        td.set(
            "action",
            torch.full((2, 6), 10.0),
        )
    )
    assert (transition["next", "info", "action"] == 1).all()
    assert not transition["next", "truncated"].all()


class Tables(T.Transform):
    """A user's transform with a table of configuration, and one that all envs write to."""

    def setup(self, signature):
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_state_buffer("seen", torch.zeros(1))
        return signature


def test_snapshot_holds_state_buffers_and_no_configuration():
    env = tw.TransformedEnv(ScriptedEnv(2), Tables())
    env.reset()
    names = {name for name in env.snapshot()["buffers"].keys() if "Tables" in name}
    assert names == {"transforms.Tables.seen"} and env.state_dict() == {}


@each_store
def test_restore_of_another_num_envs_raises_before_anything_changed(store):
    env = ScriptedEnv(2, observation_space=DICT)
    other = ScriptedEnv(3, observation_space=DICT)
    td = after(env, 3)
    after(other, 5)
    before = env.snapshot()
    with pytest.raises(ValueError, match=r"\(2,.*\(3,"):
        env.restore(store(other.snapshot()))
    assert_same(env.snapshot(), before)
    env.step(td.set("action", env.sample_action()))


def test_restore_of_more_records_raises_before_anything_changed():
    def make(buffer_length):
        recorder = T.RecordEpisodeStatistics(buffer_length)
        return tw.TransformedEnv(ScriptedEnv(3, episode_lengths=1), recorder)

    env, other = make(10), make(12)
    after(env, 1)
    after(other, 5)
    before = env.snapshot()
    with pytest.raises(ValueError, match="records"):
        env.restore(other.snapshot())
    assert_same(env.snapshot(), before)


ELAPSED = ("buffers", "elapsed")
GARBLED = {  # entries of a snapshot; ... deletes one
    "shape of the observation": {"observation": {"position": torch.zeros(2)}},
    "no observation": {"observation": None},
    "no buffers": {"buffers": None},
    "another key": {"extra": torch.zeros(1)},
    "a number": {ELAPSED: 3},
    "dtype": {ELAPSED: torch.zeros(2)},
    "shape": {ELAPSED: torch.zeros(3, dtype=torch.int64)},
    "a missing buffer": {ELAPSED: ...},
    "another buffer": {("buffers", "other"): torch.zeros(2)},
    "a sparse buffer": {ELAPSED: torch.zeros(2, dtype=torch.int64).to_sparse()},
}


@pytest.mark.parametrize("entries", GARBLED.values(), ids=GARBLED)
def test_restore_of_a_garbled_snapshot_raises_before_anything_changed(entries):
    env = ScriptedEnv(2, observation_space=DICT)
    td = after(env, 3)
    before = env.snapshot()
    garbled = before.to_dict()
    for key, value in entries.items():
        parent = garbled[key[0]] if isinstance(key, tuple) else garbled
        name = key[-1] if isinstance(key, tuple) else key
        parent[name] = value
        if value is ...:
            del parent[name]
    after(env, 0, seed=1)
    now = env.snapshot()
    with pytest.raises((TypeError, ValueError), match=r"^ScriptedEnv\.restore: "):
        env.restore(garbled)
    assert_same(env.snapshot(), now)
    assert_same(env.restore(before), td)


def test_restore_reads_no_attribute_of_an_authors_module():
    class Network(T.ObservationTransform):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(1, 1)
            self.network._limits = self.network.buffer_limits = 3

        def observation(self, observation):
            return observation

    env = tw.TransformedEnv(ScriptedEnv(2), Network())
    td = env.reset(seed=0)
    assert env.restore(env.snapshot())["observation"].equal(td["observation"])


OUT_OF_RANGE = {  # the end of a key of a snapshot, and a number that no env has there
    "delays": 9,
    "RecordEpisodeStatistics.count": -1,
    "statistics.count": -1,
    "position": 7,
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_restore_of_numbers_that_fit_no_index_raises_before_anything_changed(name):
    keys = T.ObservationKeys({"image": [T.DelayObservation((0, 2)), T.NormalizeObservation()]})
    env = ScriptedEnv(2, observation_space=DICT)
    env = tw.TransformedEnv(env, keys, T.RecordEpisodeStatistics())
    after(env, 3)
    before = env.snapshot()
    wrong = before.clone()
    (key,) = [key for key in wrong.keys(True, True) if str(key[-1]).endswith(name)]
    wrong[key] = torch.full_like(wrong[key], OUT_OF_RANGE[name])
    with pytest.raises(ValueError, match=name.rpartition(".")[2]):
        env.restore(wrong)
    assert_same(env.snapshot(), before)


# Constructor arguments.


def arguments(part):
    names = type(part).__init__.__code__.co_varnames[1 : type(part).__init__.__code__.co_argcount]
    return [name for name in names if hasattr(part, name)]


CASES = {**TRANSFORMS, **UNCAPTURED}


@pytest.mark.parametrize("make, make_env", CASES.values(), ids=CASES)
def test_arguments_of_every_attached_transform_stay(make, make_env):
    for part in tw.TransformedEnv(make_env(2), make()).transforms.flat():
        for name in arguments(part):
            with pytest.raises(AttributeError, match=name):
                setattr(part, name, getattr(part, name))


class Adjustable(T.RewardTransform):
    """A user's transform whose arguments may be assigned: a buffer, and a property."""

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


def test_arguments_that_are_properties_with_a_setter_or_buffers_can_be_assigned():
    env = tw.TransformedEnv(
        ScriptedEnv(1, episode_lengths=None),
        Adjustable(2.0, 1.0),
    )
    env.reset()
    assert env.step(env.sample_action())[0]["next", "reward"].item() == 1 * 2 + 1
    env.set_wrapper_attr("factor", 3.0)
    env.transforms[0].offset = torch.tensor(5.0)
    assert env.step(env.sample_action())[0]["next", "reward"].item() == 2 * 3 + 5


class Counts(T.Transform):
    """Has extra state, which is no tensor."""

    number = 0

    def get_extra_state(self):
        return {"number": self.number}

    def set_extra_state(self, state):
        self.number = state["number"]


def test_extra_state_of_a_transform_is_loaded():
    env, other = (tw.TransformedEnv(ScriptedEnv(2), Counts()) for _ in range(2))
    env.transforms[0].number = 7
    other.load_state_dict(env.state_dict())
    assert other.transforms[0].number == 7
