"""`from_gymnasium` and `make(..., backend="gymnasium")`.

The oracle are single Gymnasium envs that are stepped and reset by hand.
"""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from helpers import Held, assert_same, from_reset
from single_envs import (
    BOX,
    DISABLED,
    NEVER,
    SAME_STEP,
    SPACES,
    Returning,
    Scripted,
    Singles,
    assert_equal_trees,
    check_transitions,
    every_kind,
    follow,
    sample_and_step,
    scripted,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

STAGGERED = [(4,), (2, 5), (1,)]
CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")
by_vectorization = pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
in_process_or_not = pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])


def make(id="TorchwrapTest/Scripted-v0", num_envs=2, **kwargs):
    return tw.make(id, num_envs, backend="gymnasium", **kwargs)


# Transitions.


def by_name(batch):
    """Gymnasium's batch in the layout of a TensorDict."""
    if isinstance(batch, tuple):
        batch = {str(index): part for index, part in enumerate(batch)}
    if isinstance(batch, dict):
        return {key: by_name(part) for key, part in batch.items()}
    return batch


FLOATS = spaces.Box(-9, 9, (2,), np.float32)
BYTES = spaces.Box(0, 255, (2,), np.int16)
OTHER_DTYPES = {
    "float64 and list": (FLOATS, [np.array([0.1, 2.0]), [0.1, 3]]),
    "int64 and uint8": (BYTES, [np.array([200, 3]), np.uint8([255, 0])]),
    "bool and int64": (spaces.MultiBinary(2), [np.array([True, False]), np.array([0, 1])]),
    "in a Dict": (
        spaces.Dict(b=FLOATS, a=spaces.Tuple([BYTES, spaces.Discrete(3)])),
        [{"a": (np.array([200, 3]), 1), "b": [1, 2]}, {"a": ([7, 3], np.int32(2)), "b": [0.1, 2]}],
    ),
}


@pytest.mark.parametrize("space, observations", OTHER_DTYPES.values(), ids=OTHER_DTYPES)
def test_observations_of_other_dtypes_are_cast_as_by_sync_vector_env(space, observations):
    makers = [functools.partial(Returning, space, each) for each in observations]
    vector_env, other = [SyncVectorEnv(makers, autoreset_mode=DISABLED) for _ in range(2)]
    env = tw.from_gymnasium(vector_env)
    expected, _ = other.reset()
    td = env.reset()
    for observation in (td["observation"], sample_and_step(env, td)[0]["next", "observation"]):
        assert_equal_trees(observation, by_name(expected))


def test_workers_of_make_take_every_option_of_async_vector_env():
    options = {"shared_memory": False, "observation_mode": "different"}
    if "max_concurrency" in AsyncVectorEnv.__init__.__annotations__:  # from Gymnasium 1.4 on
        options["max_concurrency"] = 1
    with make(num_envs=3, vectorization_mode="async", vector_kwargs=options) as env:
        check_transitions(env, scripted(3), 5)
        env.vector_env.set_attr("mark", [1, 2, 3])
        assert env.vector_env.get_attr("mark") == (1, 2, 3)


def test_seeds_have_64_bits(bridge):
    expected = Scripted().reset(seed=2**64)[0]
    env = bridge(scripted(1), first_index=1)
    assert_equal_trees(env.reset(seed=2**64 - 1)["observation"][0], expected)


@every_kind
def test_each_episode_starts_with_one_reset_and_options_apply_to_one(bridge, kind, mode):
    env = bridge(scripted(3, lengths=[(1,), (2,), NEVER]), kind, mode)

    def has_options():
        return [bool(options) for options in env.vector_env.get_attr("options")]

    td = env.reset(options={"difficulty": 3})
    _, td = sample_and_step(env, td)
    assert has_options() == [False, True, True]
    for _ in range(3):
        _, td = sample_and_step(env, td)
    assert env.vector_env.get_attr("episode") == (5, 3, 1)
    td = td.set("action", env.sample_action())
    env.step_without_reset(td)  # in same-step mode, env 0 is already reset
    options = {"difficulty": 3}
    env.reset(mask=torch.arange(3) == 0, options=options)
    assert has_options() == [True, False, True]
    assert options == {"difficulty": 3}


class Failing(Scripted):
    def reset(self, *, seed=None, options=None):
        if options:
            raise ValueError("no such option")
        return super().reset(seed=seed)


def test_reset_that_is_refused_leaves_no_seed_behind(bridge):
    makers = [functools.partial(Failing, lengths=(3,))] * 2
    env = bridge(makers)
    singles = Singles(makers, 3)
    follow(env, singles, env.reset(seed=3), 2)
    with pytest.raises(ValueError, match="option"):
        env.reset(seed=9, options={"a": 1})
    singles.reset(range(2))
    follow(env, singles, env.reset(), 7)


# Info.


NUMBERS = ("elapsed", "even", "late", "final", "reset only")
DECLARED = {
    "position": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "elapsed": spaces.Box(0, 99, (), np.int64),
    "elapsd": BOX,  # never there
}


def numbers_of(infos):
    """The infos in `NUMBERS`, which are zero where they are missing."""
    columns = {name: [[info.get(name, 0)] for info in infos] for name in NUMBERS}
    return {name: np.array(column).astype(np.float32) for name, column in columns.items()}


def declared_of(infos):
    return {
        "position": np.stack([info["position"] for info in infos]),
        "elapsed": np.array([info["elapsed"] for info in infos], np.int64),
        "elapsd": np.zeros((len(infos), 3), np.float32),
    }


@pytest.mark.parametrize(
    "keys, expected",
    [(NUMBERS, numbers_of), (DECLARED, declared_of)],
    ids=["list", "spaces"],
)
@every_kind
def test_info_of_steps_and_roots_is_that_of_single_envs(bridge, kind, mode, keys, expected):
    makers = scripted(3, lengths=[(3,), (2,), (4, 1)])
    env = bridge(makers, kind, mode, keys)
    singles = Singles(makers, 3)
    held = Held()
    td = env.reset(seed=3)
    for step in range(9):
        assert_equal_trees(td["info"], expected(singles.now_infos), f"root of step {step}")
        held.add(td["info"])
        td, actions = singles.act(td)
        transition, td = env.step(td)
        singles.step(actions)
        assert_equal_trees(transition["next", "info"], expected(singles.infos))
        if step in (
            4,
            6,
        ):  # a masked reset; env 1 has just been reset automatically
            rows = [0, 1] if step == 4 else [2]
            singles.reset(rows)
            td = env.reset(mask=torch.tensor([row in rows for row in range(3)]))
    held.assert_unchanged()


@by_vectorization
def test_misspelt_key_raises_at_the_end_of_an_episode(vectorization_mode):
    arguments = {"vectorization_mode": vectorization_mode, "lengths": (2,)}
    with make(info_keys=("elapsed", "elapsd"), **arguments) as env:
        _, td = sample_and_step(env, env.reset())
        with pytest.raises(ValueError, match=r"info_keys.*\['elapsd'\]"):
            sample_and_step(env, td)


@pytest.mark.parametrize("info_keys", ["elapsed", {"terms": spaces.Dict(x=BOX)}], ids=type)
def test_keys_that_are_no_list_and_nested_infos_raise(info_keys):
    with pytest.raises(TypeError, match="info_keys"):
        make(info_keys=info_keys)


class Named(Scripted):
    def __init__(self, name):
        super().__init__()
        self.name = name


def test_info_that_does_not_fit_its_space_raises(bridge):
    for info_keys in (("name",), ("position",), {"position": spaces.Box(0, 1, (3,))}):
        env = bridge(scripted(2), info_keys=info_keys)
        name = next(iter(info_keys))
        with pytest.raises(ValueError, match=rf"info\['{name}'\]"):
            sample_and_step(env, env.reset())


def test_attributes_of_each_env_are_read_where_infos_do_not_fit(bridge):
    env = bridge([functools.partial(Named, each) for each in "ab"])
    assert env.get_wrapper_attr("name") == ("a", "b")
    assert "info" not in sample_and_step(env, env.reset())[0]["next"]


# Refusals, before the simulator moves.


class NoMode(SyncVectorEnv):
    def __init__(self, makers):
        super().__init__(makers)
        self.metadata = {"render_modes": []}


def of_texts():
    return SyncVectorEnv(scripted(2, space=spaces.Text(5)), autoreset_mode=DISABLED)


@pytest.mark.parametrize(
    "make_one, error, match",
    [
        pytest.param(
            lambda: SyncVectorEnv(scripted(2)),
            ValueError,
            "NEXT_STEP",
            id="next step",
        ),
        pytest.param(
            lambda: NoMode(scripted(2)),
            ValueError,
            "autoreset_mode",
            id="no mode",
        ),
        pytest.param(CARTPOLE, TypeError, "vector_env", id="single env"),
        pytest.param(of_texts, TypeError, "Text", id="text"),
    ],
)
def test_from_gymnasium_without_a_suitable_vector_env_raises(make_one, error, match):
    with pytest.raises(error, match=match):
        tw.from_gymnasium(make_one())


# Description, frames and arguments.


def test_description_matches_the_vector_env():
    mode = {"autoreset_mode": SAME_STEP}
    vector_env = gymnasium.make_vec("HalfCheetah-v5", 3, "sync", vector_kwargs=mode)
    env = tw.from_gymnasium(vector_env)
    for name in (
        "num_envs",
        "single_observation_space",
        "observation_space",
        "action_space",
    ):
        assert getattr(env, name) == getattr(vector_env, name)
    assert env.metadata["autoreset_mode"] is SAME_STEP
    assert env.spec.id == "HalfCheetah-v5"
    assert env.signature.max_episode_steps == 1000
    env.close()
    assert vector_env.closed


def test_make_passes_on_constructor_vector_and_wrapper_arguments():
    reward_of_3 = functools.partial(gymnasium.wrappers.TransformReward, func=lambda reward: 3.0)
    env = make(
        lengths=(2,),
        ending="both",
        vector_kwargs={"observation_mode": "same"},
        wrappers=[reward_of_3],
        render_mode="rgb_array",
    )
    _, td = sample_and_step(env, env.reset(seed=0))
    assert env.render_mode == "rgb_array"
    assert np.array_equal(env.render(), np.ones((2, 2, 2, 3)))
    successor = sample_and_step(env, td)[0]["next"]
    assert successor["terminated"].all() and successor["truncated"].all()
    assert (successor["reward"] == 3).all()


LIMIT = functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=10)
PENDULUM = functools.partial(gymnasium.make, "Pendulum-v1")
MODE = {"autoreset_mode": DISABLED}


def limited_pendulum():
    return LIMIT(PENDULUM())


def made_by_make_vec(kind, name):
    wrappers = {"vector_kwargs": MODE, "wrappers": (LIMIT,)}
    return tw.from_gymnasium(gymnasium.make_vec("Pendulum-v1", 1, name, **wrappers))


def made_by_make(kind, name):
    arguments = {"vectorization_mode": name, "wrappers": (LIMIT,)}
    return tw.make("Pendulum-v1", backend="gymnasium", **arguments)


def made_of_an_export(kind, name):
    env = tw.TransformedEnv(tw.make("Pendulum-v1"), T.TimeLimit(10))
    return tw.from_gymnasium(tw.to_gymnasium(env))


def made_of_an_export_without_spec(kind, name):
    env = ScriptedEnv(1, (3,), episode_lengths=None)
    return tw.from_gymnasium(tw.to_gymnasium(tw.TransformedEnv(env, T.TimeLimit(10))))


LIMITED = {
    "make_vec": made_by_make_vec,
    "own vector env": lambda kind, name: tw.from_gymnasium(kind([limited_pendulum], **MODE)),
    "make": made_by_make,
    "export": made_of_an_export,
    "export without spec": made_of_an_export_without_spec,
    "spec of make": lambda *kind: tw.make(made_by_make(*kind).spec),
}


@in_process_or_not
@pytest.mark.parametrize("make_env", LIMITED.values(), ids=LIMITED)
def test_time_limit_in_force_is_the_one_that_wrappers_set(make_env, kind):
    single = gymnasium.wrappers.TimeAwareObservation(limited_pendulum(), normalize_time=True)
    single.reset()
    times = [single.step(single.action_space.sample())[0][-1] for _ in range(9)]
    env = make_env(kind, kind.__name__.removesuffix("VectorEnv").lower())
    with tw.TransformedEnv(env, T.TimeAwareObservation(normalize_time=True)) as timed:
        successor = from_reset(tw.Collector(timed, None, 10))["next"]
        np.testing.assert_allclose(successor["observation"][0, :9, -1], times)
        assert successor["truncated"].flatten().tolist() == [False] * 9 + [True]
        assert timed.spec is None or timed.spec.max_episode_steps == 10


@in_process_or_not
def test_time_limit_is_unknown_if_the_envs_have_different_ones(kind):
    with tw.from_gymnasium(kind([limited_pendulum, PENDULUM], **MODE)) as env:
        assert env.signature.max_episode_steps is None


# On a GPU.


@pytest.mark.cuda
@every_kind
@pytest.mark.parametrize("space", [*SPACES.values(), spaces.Box(0, 255, (256, 256, 3), np.uint8)])
def test_transitions_on_cuda_match_the_cpu_and_never_change(bridge, kind, mode, space):
    makers = scripted(3, lengths=STAGGERED, space=space)
    env = bridge(makers, kind, mode, copy=False, device="cuda")
    same = bridge(makers, kind, mode)
    td = env.reset(seed=3)
    expected = same.reset(seed=3)
    pairs = []
    for _ in range(12):
        action = same.sample_action()
        transition, td = env.step(td.set("action", action.cuda()))
        reference, expected = same.step(expected.set("action", action))
        pairs.append((transition["next"], reference["next"]))
        pairs.append((td.select("observation"), expected.select("observation")))
    assert transition["next", "reward"].device.type == "cuda"
    torch.cuda.synchronize()
    for ours, theirs in pairs:
        assert_same(ours.cpu(), theirs)


class NeverTerminated(T.Transform):
    def step(self, td):
        return td.set("terminated", torch.zeros_like(td["terminated"]))


@pytest.mark.filterwarnings("ignore:.*You are calling 'step")
@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
def test_env_goes_on_past_a_termination_that_a_transform_clears(vectorization_mode):
    options = {"vectorization_mode": vectorization_mode, "max_episode_steps": 15}
    env = tw.make("CartPole-v1", 2, backend="gymnasium", **options)
    env = tw.TransformedEnv(env, NeverTerminated())
    td = env.reset(seed=0)
    single = gymnasium.make("CartPole-v1", max_episode_steps=15)
    single.reset(seed=1)
    for number in range(1, 16):
        transition, td = env.step(td.set("action", torch.tensor([1, 0])))
        observation, *_ = single.step(0)
        successor = transition["next"]
        np.testing.assert_array_equal(successor["observation"][1], observation)
        assert successor["done"].tolist() == [[number == 15]] * 2
    env.close()
