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
from helpers import Held, assert_same, buffers, from_reset
from single_envs import (
    BOX,
    DISABLED,
    LENGTHS,
    NEVER,
    SAME_STEP,
    SPACES,
    Scripted,
    Singles,
    assert_equal_trees,
    check_transitions,
    every_kind,
    every_mode,
    follow,
    sample_and_step,
    scripted,
    stack_values,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

STAGGERED = [(4,), (2, 5), (1,)]
CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")
by_vectorization = pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
in_process_or_not = pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])


def make(id="TorchwrapTest/Scripted-v0", num_envs=2, **kwargs):
    return tw.make(id, num_envs, backend="gymnasium", **kwargs)


# Transitions.


@pytest.mark.parametrize("id, limit", [("HalfCheetah-v5", 7), ("CartPole-v1", None)])
@every_kind
def test_transitions_of_every_vector_env_match_single_envs(bridge, kind, mode, id, limit):
    makers = [functools.partial(gymnasium.make, id, max_episode_steps=limit)] * 3
    assert check_transitions(bridge(makers, kind, mode), makers, steps=40) >= 3


@every_kind
@every_space
def test_transitions_with_every_observation_space_match_single_envs(bridge, kind, mode, space):
    makers = scripted(3, lengths=STAGGERED, space=space)
    options = [{}, {"copy": False}]
    if kind is AsyncVectorEnv:
        options.append({"shared_memory": False})
    for arguments in options:
        assert check_transitions(bridge(makers, kind, mode, **arguments), makers, steps=12) > 12


class Returning(gymnasium.Env):
    """Returns the same observation, of a dtype that may not be the space's, in every step."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, observation):
        self.observation_space = space
        self.observation = observation

    def reset(self, *, seed=None, options=None):
        return self.observation, {}

    def step(self, action):
        return self.observation, 1, np.array([False]), np.False_, {}


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
    "float64 and float32": (FLOATS, [np.array([0.1, 2.0]), np.float32([0.1, 3])]),
    "int64 and uint8": (BYTES, [np.array([200, 3]), np.uint8([255, 0])]),
    "bool and int64": (spaces.MultiBinary(2), [np.array([True, False]), np.array([0, 1])]),
    "array and int": (spaces.Discrete(3), [np.array(2), 1]),
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


@every_kind
@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_transitions_with_every_ending_match_single_envs(bridge, kind, mode, lengths, ending):
    makers = scripted(4, lengths=lengths, ending=ending)
    ends = check_transitions(bridge(makers, kind, mode), makers, steps=13)
    last_steps = [np.cumsum(each * 13) for each in lengths]
    assert ends == sum((steps <= 13).sum() for steps in last_steps)


ACTION_SPACES = [
    spaces.Discrete(4, start=3),
    spaces.MultiDiscrete([3, 5]),
    spaces.MultiBinary(3),
    spaces.Box(0, 9, (2, 2), np.int64),
    spaces.Tuple([BOX, spaces.Discrete(3)]),
    spaces.Dict({"b": BOX, "a": spaces.Discrete(3)}),
]


@by_vectorization
@pytest.mark.parametrize("space", ACTION_SPACES, ids=lambda space: type(space).__name__)
def test_transitions_with_every_action_space_match_single_envs(vectorization_mode, space):
    arguments = {"lengths": (3,), "action_space": space}
    with make(vectorization_mode=vectorization_mode, **arguments) as env:
        check_transitions(env, scripted(2, **arguments), steps=5)


@pytest.mark.parametrize(
    "shared_memory, observation_mode",
    [(True, "same"), (False, "different")],
)
def test_workers_of_make_take_every_option_of_async_vector_env(shared_memory, observation_mode):
    options = {
        "shared_memory": shared_memory,
        "observation_mode": observation_mode,
    }
    if "max_concurrency" in AsyncVectorEnv.__init__.__annotations__:  # from Gymnasium 1.4 on
        options["max_concurrency"] = 1
    with make(
        num_envs=3,
        vectorization_mode="async",
        lengths=(3,),
        vector_kwargs=options,
    ) as env:
        singles = Singles(scripted(3, lengths=(3,)), 3)
        follow(env, singles, env.reset(seed=3), 5)
        singles.reset([1])
        follow(env, singles, env.reset(mask=torch.arange(3) == 1), 5)
        env.vector_env.set_attr("mark", [1, 2, 3])
        assert env.vector_env.get_attr("mark") == (1, 2, 3)


@every_kind
def test_time_limit_in_every_autoreset_mode_matches_gymnasium(bridge, kind, mode):
    makers = scripted(4, lengths=[(3, 9), NEVER, (4, 1, 9), (1,)])
    limited = [lambda maker=maker: gymnasium.wrappers.TimeLimit(maker(), 4) for maker in makers]
    env = tw.TransformedEnv(bridge(makers, kind, mode), T.TimeLimit(4))
    assert check_transitions(env, limited, steps=17) > 17


# Resets, seeds and options.


@pytest.mark.parametrize(
    "seed, first_index",
    [(40, 0), (40, 3), (2**63, 0), (2**64 - 1, 1), (np.int64(5), 0)],
)
def test_seed_of_env_i_is_seed_plus_its_global_index(bridge, seed, first_index):
    seeds = [int(seed) + first_index + i for i in range(2)]
    expected = [Scripted().reset(seed=each)[0] for each in seeds]
    env = bridge(scripted(2), first_index=first_index)
    assert_equal_trees(env.reset(seed=seed)["observation"], np.stack(expected))


@pytest.mark.parametrize("seed", [None, 77])
@every_kind
def test_partial_reset_starts_episodes_in_its_rows_only(bridge, kind, mode, seed):
    makers = scripted(4, lengths=[(3, 9), (9,), (2, 9), NEVER])
    env = bridge(makers, kind, mode)
    singles = Singles(makers, 3)
    td, _ = follow(env, singles, env.reset(seed=3), 2)
    for rows in (
        [],
        [1, 2],
        [0, 1, 2, 3],
    ):  # env 2 has just been reset automatically
        singles.reset(rows, seed)
        td = env.reset(seed=seed, mask=torch.tensor([row in rows for row in range(4)]))
        assert_equal_trees(td["observation"], stack_values(singles.now))
        td, _ = follow(env, singles, td, 4)


@every_kind
def test_options_are_passed_to_the_rows_of_the_mask_only(bridge, kind, mode):
    env = bridge([CARTPOLE] * 3, kind, mode)
    options = {"low": 0.06, "high": 0.07}
    first = env.reset(seed=0)["observation"]
    mask = torch.tensor([True, False, True])
    observation = env.reset(mask=mask, options=options)["observation"]
    assert torch.equal(observation[1], first[1])
    for given in (
        observation[mask],
        env.reset(seed=0, options=options)["observation"],
    ):
        assert ((given >= 0.06) & (given <= 0.07)).all()
    assert options == {"low": 0.06, "high": 0.07}


@every_mode
def test_each_episode_starts_with_one_reset_and_options_apply_to_one(bridge, mode):
    env = bridge(scripted(3, lengths=[(1,), (2,), NEVER]), mode=mode)

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
    env.reset(mask=torch.arange(3) == 0, options={"difficulty": 3})
    assert has_options() == [True, False, True]


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


@every_kind
def test_collector_keeps_the_infos_of_roots(bridge, kind, mode):
    env = bridge(scripted(3, lengths=[(3,), (2,), (4, 1)]), kind, mode, NUMBERS)
    data = from_reset(tw.Collector(env, None, 7), seed=3)
    following = data["info"][:, 1:]
    ended = data["next", "done"][:, :-1]
    elapsed = torch.where(ended, -1, data["next", "info", "elapsed"][:, :-1])
    assert (following["elapsed"] == elapsed).all()
    assert (following["reset only"] == ended).all()
    assert "info" in env.root


class Ragged(Scripted):
    """Its infos do not fit into one array, because their vectors have different lengths."""

    def add_ragged(self, info):
        return {
            **info,
            "ragged": np.zeros(int(self.np_random.integers(1, 9))),
        }

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return observation, self.add_ragged(info)

    def step(self, action):
        *results, info = super().step(action)
        return *results, self.add_ragged(info)


gymnasium.register("TorchwrapTest/Ragged-v0", entry_point=Ragged)


@by_vectorization
def test_entries_that_are_not_asked_for_need_not_fit_into_a_batch(
    vectorization_mode,
):
    arguments = {"vectorization_mode": vectorization_mode, "lengths": NEVER}
    with make(
        "TorchwrapTest/Ragged-v0",
        info_keys=("elapsed", "late"),
        **arguments,
    ) as env:
        td = env.reset(seed=0)
        for step in range(1, 5):
            transition, td = sample_and_step(env, td)
            late = 10 * step if step > 1 else 0
            assert (transition["next", "info", "elapsed"] == step).all()
            assert (transition["next", "info", "late"] == late).all()


@by_vectorization
def test_misspelt_key_raises_at_the_end_of_an_episode(vectorization_mode):
    arguments = {"vectorization_mode": vectorization_mode, "lengths": (2,)}
    with make(info_keys=("elapsed", "elapsd"), **arguments) as env:
        _, td = sample_and_step(env, env.reset())
        with pytest.raises(ValueError, match=r"info_keys.*\['elapsd'\]"):
            sample_and_step(env, td)


class Named(Scripted):
    def __init__(self, name):
        super().__init__()
        self.name = name


@pytest.mark.parametrize(
    "info_keys",
    [
        pytest.param(("name",), id="string"),
        pytest.param(("position",), id="vector"),
        pytest.param({"position": spaces.Box(0, 1, (3,))}, id="shape"),
    ],
)
def test_info_that_does_not_fit_its_space_raises(bridge, info_keys):
    env = bridge(scripted(2), info_keys=info_keys)
    name = next(iter(info_keys))
    with pytest.raises(ValueError, match=rf"info\['{name}'\].*get_wrapper_attr"):
        sample_and_step(env, env.reset())


def test_attributes_of_each_env_are_read_where_infos_do_not_fit(bridge):
    env = bridge([functools.partial(Named, each) for each in "ab"])
    assert env.get_wrapper_attr("name") == ("a", "b")
    assert "info" not in sample_and_step(env, env.reset())[0]["next"]


# Ownership.


class Overwriting(Scripted):
    def step(self, action):
        result = super().step(action)
        action[...] = 7
        return result


gymnasium.register("TorchwrapTest/Overwriting-v0", entry_point=Overwriting)


@every_kind
@pytest.mark.parametrize("space", [BOX, SPACES["nested"]], ids=["Box", "nested"])
def test_returned_tensors_are_never_changed(bridge, kind, mode, space):
    makers = scripted(3, lengths=[(2,), (3,), NEVER], space=space)
    env = bridge(makers, kind, mode, copy=False, info_keys=("elapsed",))
    held = Held()
    td = env.reset(seed=0)
    for _ in range(6):
        held.add(td)
        transition, td = sample_and_step(env, td)
        held.add(transition["next"])
    env.reset()
    held.assert_unchanged()


@every_kind
def test_writing_into_returned_tensors_does_not_change_the_env(bridge, kind, mode):
    makers = scripted(3, lengths=[(2,), (3,), NEVER])
    env = bridge(makers, kind, mode, copy=False)
    untouched = bridge(makers, kind, mode, copy=False)
    mask = torch.tensor([False, True, False])
    td = env.reset(seed=0)
    expected = untouched.reset(seed=0)
    for step in range(8):
        td.apply_(lambda leaf: leaf.fill_(9))
        if step in (0, 3):
            td = env.reset(mask=mask)
            expected = untouched.reset(mask=mask)
            assert torch.equal(td["observation"][mask], expected["observation"][mask])
            assert (td["observation"][~mask] == 9).all()  # as the caller left it
            td.apply_(lambda leaf: leaf.fill_(9))
        transition, td = sample_and_step(env, td)
        reference, expected = sample_and_step(untouched, expected)
        assert_same(transition["next"], reference["next"])
        assert torch.equal(td["observation"], expected["observation"])
        transition.apply_(lambda leaf: leaf.fill_(1))
    assert_same(*[buffers(each) for each in (env, untouched)])


@by_vectorization
def test_actions_of_the_caller_and_of_the_simulator_do_not_share_memory(
    vectorization_mode,
):
    with make(
        "TorchwrapTest/Overwriting-v0",
        vectorization_mode=vectorization_mode,
    ) as env:
        transition, _ = env.step(env.reset(seed=0).set("action", torch.zeros(2, 2)))
        assert torch.equal(transition["action"], torch.zeros(2, 2))


# Refusals, before the simulator moves.


class NoMode(SyncVectorEnv):
    def __init__(self, makers):
        super().__init__(makers)
        self.metadata = {"render_modes": []}


def of_different_spaces():
    makers = [*scripted(1), *scripted(1, space=spaces.Box(-5, 5, (3,)))]
    return SyncVectorEnv(makers, autoreset_mode=DISABLED, observation_mode="different")


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
        pytest.param(
            of_different_spaces,
            ValueError,
            "observation_space",
            id="different spaces",
        ),
    ],
)
def test_from_gymnasium_without_a_suitable_vector_env_raises(make_one, error, match):
    with pytest.raises(error, match=match):
        tw.from_gymnasium(make_one())


@in_process_or_not
@pytest.mark.parametrize(
    "space, action",
    [
        pytest.param(spaces.Box(-1, 1, (2,)), torch.zeros(2, 3), id="shape"),
        pytest.param(spaces.Discrete(3, start=5), torch.tensor([5, 0]), id="bounds"),
        pytest.param(spaces.Dict(a=BOX), torch.zeros(2, 3), id="structure"),
    ],
)
def test_invalid_action_raises_before_the_simulator_moves(bridge, kind, space, action):
    env = bridge(scripted(2, action_space=space), kind)
    td = env.reset(seed=0)
    with pytest.raises((ValueError, TypeError), match="action"):
        env.step(td.set("action", action))
    assert env.vector_env.get_attr("steps") == (0, 0)


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("call", ["snapshot", "restore"])
def test_snapshot_and_restore_of_a_simulator_raise(bridge, call, limit):
    env = bridge([CARTPOLE] * 2)
    if limit is not None:
        env = tw.TransformedEnv(env, T.TimeLimit(limit))
    env.reset(seed=0)
    native = tw.make("CartPole-v1", 2)
    native.reset(seed=0)
    arguments = [native.snapshot()] if call == "restore" else []
    with pytest.raises(RuntimeError, match="simulator"):
        getattr(env, call)(*arguments)


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
    "spec of an export": lambda *kind: tw.make(made_of_an_export(*kind).spec),
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


def test_step_of_rows_that_the_vector_env_has_reset_itself_raises():
    single = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=3)
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    env = tw.from_gymnasium(AsyncVectorEnv([single], autoreset_mode=mode))
    env.reset(seed=0)
    for _ in range(3):
        env.step_without_reset(torch.tensor([0]))
    with pytest.raises(RuntimeError, match=r"reset .*\[0\]"):
        env.step(torch.tensor([0]))
    env.close()
