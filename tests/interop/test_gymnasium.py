"""`from_gymnasium` and `make(..., backend="gymnasium")`, against single Gymnasium envs that are stepped and reset by hand."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from helpers import Held, assert_same
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
by_vectorization = pytest.mark.parametrize(
    "vectorization_mode", ["sync", pytest.param("async", marks=pytest.mark.full)]
)


def make(id="TorchwrapTest/Scripted-v0", num_envs=2, **kwargs):
    return tw.make(id, num_envs, backend="gymnasium", **kwargs)


# Transitions.


@pytest.mark.parametrize(
    "id, kwargs", [("HalfCheetah-v5", {"max_episode_steps": 7}), ("CartPole-v1", {})]
)
@every_kind
def test_transitions_of_every_vector_env_match_single_envs(bridge, kind, mode, id, kwargs):
    makers = [functools.partial(gymnasium.make, id, **kwargs)] * 3
    assert check_transitions(bridge(makers, kind, mode), makers, steps=40) >= 3


@every_kind
def test_transitions_with_every_observation_space_match_single_envs(bridge, kind, mode):
    for space in SPACES.values():
        makers = scripted(3, lengths=STAGGERED, space=space)
        for arguments in (
            {},
            {"copy": False},
            *([{"shared_memory": False}] if kind is AsyncVectorEnv else []),
        ):
            assert check_transitions(bridge(makers, kind, mode, **arguments), makers, steps=12) > 12


@every_kind
def test_transitions_with_every_ending_match_single_envs(bridge, kind, mode):
    for lengths in LENGTHS.values():
        for ending in ("terminated", "truncated", "both"):
            makers = scripted(4, lengths=lengths, ending=ending)
            ends = check_transitions(bridge(makers, kind, mode), makers, steps=13)
            assert ends == sum(
                int(np.searchsorted(np.cumsum(list(each) * 13), 13, side="right"))
                for each in lengths
            )


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
def test_transitions_with_every_action_space_match_single_envs(vectorization_mode):
    numbers = [spaces.Discrete(4, start=3), spaces.MultiDiscrete([3, 5]), spaces.MultiBinary(3)]
    nested = [
        spaces.Tuple([BOX, spaces.Discrete(3)]),
        spaces.Dict({"b": BOX, "a": spaces.Discrete(3)}),
    ]
    for space in [*numbers, spaces.Box(0, 9, (2, 2), np.int64), *nested]:
        with make(vectorization_mode=vectorization_mode, lengths=(3,), action_space=space) as env:
            check_transitions(env, scripted(2, lengths=(3,), action_space=space), steps=5)


@pytest.mark.parametrize("shared_memory, observation_mode", [(True, "same"), (False, "different")])
def test_workers_of_make_take_every_option_of_async_vector_env(shared_memory, observation_mode):
    options = {"shared_memory": shared_memory, "observation_mode": observation_mode}
    if "max_concurrency" in AsyncVectorEnv.__init__.__annotations__:  # from Gymnasium 1.4 on
        options["max_concurrency"] = 1
    with make(num_envs=3, vectorization_mode="async", lengths=(3,), vector_kwargs=options) as env:
        singles = Singles(scripted(3, lengths=(3,)), 3)
        follow(env, singles, env.reset(seed=3), 5)
        singles.now[1] = singles.envs[1].reset()[0]
        follow(env, singles, env.reset(mask=torch.tensor([False, True, False])), 5)
        env.vector_env.set_attr("mark", [1, 2, 3])
        assert env.vector_env.get_attr("mark") == (1, 2, 3)


@every_kind
def test_time_limit_in_every_autoreset_mode_matches_gymnasium(bridge, kind, mode):
    makers = scripted(4, lengths=[(3, 9), NEVER, (4, 1, 9), (1,)])
    limited = [lambda maker=maker: gymnasium.wrappers.TimeLimit(maker(), 4) for maker in makers]
    for arguments in [{}, {"shared_memory": False}][: 1 + (kind is AsyncVectorEnv)]:
        env = tw.TransformedEnv(bridge(makers, kind, mode, **arguments), T.TimeLimit(4))
        assert check_transitions(env, limited, steps=17) > 17


# Resets, seeds and options.


def test_seed_of_env_i_is_seed_plus_its_global_index(bridge):
    for seed, first_index in ((40, 0), (40, 3), (2**63, 0), (2**64 - 1, 1), (np.int64(5), 0)):
        expected = [Scripted().reset(seed=int(seed) + first_index + i)[0] for i in range(2)]
        env = bridge(scripted(2), first_index=first_index)
        assert_equal_trees(env.reset(seed=seed)["observation"], np.stack(expected))


@pytest.mark.parametrize("seed", [None, 77])
@every_kind
def test_partial_reset_starts_episodes_in_its_rows_only(bridge, kind, mode, seed):
    makers = scripted(4, lengths=[(3, 9), (9,), (2, 9), NEVER])
    env, singles = bridge(makers, kind, mode), Singles(makers, 3)
    td, _ = follow(env, singles, env.reset(seed=3), 2)
    for rows in ([], [1, 2], [0, 1, 2, 3]):  # env 2 has just been reset automatically
        for i in rows:
            singles.now[i] = singles.envs[i].reset(seed=None if seed is None else seed + i)[0]
        td = env.reset(seed=seed, mask=torch.tensor([row in rows for row in range(4)]))
        assert_equal_trees(td["observation"], stack_values(singles.now))
        td, _ = follow(env, singles, td, 4)


@every_kind
def test_options_are_passed_to_the_rows_of_the_mask_only(bridge, kind, mode):
    env, options = (
        bridge([functools.partial(gymnasium.make, "CartPole-v1")] * 3, kind, mode),
        {"low": 0.06, "high": 0.07},
    )
    first = env.reset(seed=0)["observation"]
    observation = env.reset(mask=torch.tensor([True, False, True]), options=options)["observation"]
    assert torch.equal(observation[1], first[1])
    for given in (observation[[0, 2]], env.reset(seed=0, options=options)["observation"]):
        assert ((given >= 0.06) & (given <= 0.07)).all()
    assert options == {"low": 0.06, "high": 0.07}


@every_mode
def test_each_episode_starts_with_one_reset_and_options_apply_to_one(bridge, mode):
    env = bridge(scripted(3, lengths=[(1,), (2,), NEVER]), mode=mode)
    td = env.reset(options={"difficulty": 3})
    _, td = sample_and_step(env, td)
    assert [bool(options) for options in env.vector_env.get_attr("options")] == [False, True, True]
    for _ in range(3):
        _, td = sample_and_step(env, td)
    assert env.vector_env.get_attr("episode") == (5, 3, 1)
    env.step_without_reset(
        td.set("action", env.sample_action())
    )  # in same-step mode, env 0 is already reset
    env.reset(mask=torch.tensor([True, False, False]), options={"difficulty": 3})
    assert [bool(options) for options in env.vector_env.get_attr("options")] == [True, False, True]


class Failing(Scripted):
    def reset(self, *, seed=None, options=None):
        if options:
            raise ValueError("no such option")
        return super().reset(seed=seed)


def test_reset_that_is_refused_leaves_no_seed_behind(bridge):
    makers = [functools.partial(Failing, lengths=(3,))] * 2
    env, singles = bridge(makers), Singles(makers, 3)
    td = env.reset(seed=3)
    follow(env, singles, td, 2)
    with pytest.raises(ValueError, match="no such option"):
        env.reset(seed=9, options={"a": 1})
    singles.now = [single.reset()[0] for single in singles.envs]
    follow(env, singles, env.reset(), 7)


# Info.


def columns_of(infos, names):
    return {
        name: np.array([[info.get(name, 0)] for info in infos]).astype(np.float32) for name in names
    }


@every_kind
def test_requested_info_is_that_of_single_envs_at_every_step_and_reset(bridge, kind, mode):
    names, position = (
        ("elapsed", "even", "late", "final", "reset only"),
        spaces.Box(-np.inf, np.inf, (2,), np.float64),
    )
    declared = {"position": position, "elapsed": spaces.Box(0, 99, (), np.int64), "elapsd": BOX}
    makers = scripted(3, lengths=[(3,), (2,), (4, 1)])
    env, other, singles = (
        bridge(makers, kind, mode, names),
        bridge(makers, kind, mode, declared),
        Singles(makers, 3),
    )
    td, same, held = env.reset(seed=3), other.reset(seed=3), Held()
    for step in range(9):
        assert_equal_trees(td["info"], columns_of(singles.now_infos, names), f"root of step {step}")
        held.add(td["info"])
        td, actions = singles.act(td)
        transition, td = env.step(td)
        typed, same = other.step(same.set("action", transition["action"]))
        singles.step(actions)
        assert_equal_trees(transition["next", "info"], columns_of(singles.infos, names))
        for info, expected in (
            (typed["next", "info"], singles.infos),
            (same["info"], singles.now_infos),
        ):
            stacked = {
                key: np.stack([each[key] for each in expected]) for key in ("elapsed", "position")
            }
            stacked["elapsed"] = stacked["elapsed"].astype(np.int64)
            assert_equal_trees(info, {**stacked, "elapsd": np.zeros((3, 3), np.float32)})
        if step in (4, 6):  # a masked reset; env 1 has just been reset automatically
            rows = [0, 1] if step == 4 else [2]
            for i in rows:
                singles.now[i], singles.now_infos[i] = singles.envs[i].reset()
            mask = torch.tensor([i in rows for i in range(3)])
            td, same = env.reset(mask=mask), other.reset(mask=mask)
    held.assert_unchanged()
    data, td = tw.Collector(env, None, 4)(td)  # keeps the infos of roots, as their observations
    elapsed, goes_on = data["info", "elapsed"][:, 1:], ~data["next", "done"][:, :-1]
    assert (elapsed == torch.where(goes_on, data["next", "info", "elapsed"][:, :-1], -1)).all()
    assert (
        data["info", "reset only"][:, 1:] == data["next", "done"][:, :-1]
    ).all() and "info" in td


class Ragged(Scripted):
    """Its infos do not fit into one array, because the vectors in them have different lengths."""

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return observation, {**info, "ragged": np.zeros(int(self.np_random.integers(1, 9)))}

    def step(self, action):
        *results, info = super().step(action)
        return *results, {**info, "ragged": np.zeros(int(self.np_random.integers(1, 9)))}


gymnasium.register("TorchwrapTest/Ragged-v0", entry_point=Ragged)


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
def test_info_of_make_is_that_of_single_envs_and_a_misspelt_key_raises_with_all_keys(
    vectorization_mode,
):
    arguments = {"vectorization_mode": vectorization_mode, "lengths": NEVER}
    with make("TorchwrapTest/Ragged-v0", info_keys=("elapsed", "late"), **arguments) as env:
        td = env.reset(seed=0)
        for step in range(1, 5):  # a vector env of Gymnasium's could not batch "ragged"
            transition, td = sample_and_step(env, td)
            columns = {
                "elapsed": np.full((2, 1), step, "f4"),
                "late": np.full((2, 1), 10 * step if step > 1 else 0, "f4"),
            }
            assert_equal_trees(transition["next", "info"], columns)
    with make(info_keys=("elapsed", "elapsd"), **{**arguments, "lengths": (2,)}) as env:
        _, td = sample_and_step(env, env.reset())
        known = r"\['elapsed', 'even', 'final', 'late', 'name', 'position'\]"
        with pytest.raises(ValueError, match=rf"but got \['elapsd'\]. It contains {known}"):
            sample_and_step(env, td)


class Named(Scripted):
    def __init__(self, name):
        super().__init__()
        self.name = name


def test_info_that_does_not_fit_its_space_raises_and_without_keys_it_is_absent(bridge):
    for info_keys in (("name",), {"position": spaces.Box(0, 1, (3,))}, ("position",)):
        env = bridge(scripted(2), info_keys=info_keys)
        name = next(iter(info_keys))
        with pytest.raises(
            ValueError,
            match=rf'{name}.*Declare its space.*env.get_wrapper_attr\("{name}"\) reads an attribute',
        ):
            sample_and_step(env, env.reset())
    assert bridge([functools.partial(Named, each) for each in "ab"]).get_wrapper_attr("name") == (
        "a",
        "b",
    )
    env = bridge(scripted(2))
    assert "info" not in sample_and_step(env, env.reset())[0]["next"]


# Ownership.


class Overwriting(Scripted):
    def step(self, action):
        result = super().step(action)
        action[...] = 7
        return result


gymnasium.register("TorchwrapTest/Overwriting-v0", entry_point=Overwriting)


@every_kind
def test_returned_tensors_are_never_changed(bridge, kind, mode):
    for space in (BOX, SPACES["nested"]):
        makers = scripted(3, lengths=[(2,), (3,), NEVER], space=space)
        env, held = bridge(makers, kind, mode, copy=False, info_keys=("elapsed",)), Held()
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
    env, untouched = bridge(makers, kind, mode, copy=False), bridge(makers, kind, mode, copy=False)
    mask = torch.tensor([False, True, False])
    td, expected = env.reset(seed=0), untouched.reset(seed=0)
    for step in range(8):
        td.apply_(lambda leaf: leaf.fill_(9))
        if step in (0, 3):
            td, expected = env.reset(mask=mask), untouched.reset(mask=mask)
            assert torch.equal(td["observation"][mask], expected["observation"][mask])
            assert (td["observation"][~mask] == 9).all()  # as the caller left it
            td.apply_(lambda leaf: leaf.fill_(9))
        transition, td = sample_and_step(env, td)
        reference, expected = sample_and_step(untouched, expected)
        assert_same(transition, reference.clone(False).set("observation", torch.full((3, 3), 9.0)))
        assert torch.equal(td["observation"], expected["observation"])
        transition.apply_(lambda leaf: leaf.fill_(1))
    ours, theirs = dict(env.named_buffers()), dict(untouched.named_buffers())
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


@by_vectorization
def test_actions_of_the_caller_and_of_the_simulator_do_not_share_memory(vectorization_mode):
    with make("TorchwrapTest/Overwriting-v0", vectorization_mode=vectorization_mode) as env:
        transition, _ = env.step(env.reset(seed=0).set("action", torch.zeros(2, 2)))
        assert torch.equal(transition["action"], torch.zeros(2, 2))


# Refusals, before the simulator moves.


class NoMode(SyncVectorEnv):
    def __init__(self, makers):
        super().__init__(makers)
        self.metadata = {"render_modes": []}


def test_from_gymnasium_without_a_suitable_vector_env_raises_with_a_remedy():
    text = scripted(2, space=spaces.Text(5))
    different = [*scripted(1), *scripted(1, space=spaces.Box(-5, 5, (3,)))]
    for make_one, error, match in (
        (
            lambda: SyncVectorEnv(scripted(2)),
            ValueError,
            "DISABLED or SAME_STEP, but got .*NEXT_STEP.*vector_kwargs=",
        ),
        (lambda: NoMode(scripted(2)), ValueError, "DISABLED or SAME_STEP, but got None"),
        (
            lambda: gymnasium.make("CartPole-v1"),
            TypeError,
            r"needs a gymnasium.vector.VectorEnv, but got .*make_vec",
        ),
        (
            lambda: SyncVectorEnv(text, autoreset_mode=DISABLED),
            TypeError,
            "Dict or Tuple, but got Text",
        ),
        (
            lambda: SyncVectorEnv(different, autoreset_mode=DISABLED, observation_mode="different"),
            ValueError,
            "same space",
        ),
    ):
        with pytest.raises(error, match=match):
            tw.from_gymnasium(make_one())


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_invalid_action_raises_before_the_simulator_moves(bridge, kind):
    for space, action, error, match in (
        (
            spaces.Box(-1, 1, (2,)),
            torch.zeros(2, 3),
            ValueError,
            r"an action of shape \(2, 2\) \(num_envs first\)",
        ),
        (
            spaces.Discrete(3, start=5),
            torch.tensor([5, 0]),
            ValueError,
            "needs an action in .*, but got values from",
        ),
        (
            spaces.Dict(a=BOX),
            torch.zeros(2, 3),
            TypeError,
            r"an action as a TensorDict with keys \['a'\], but got Tensor",
        ),
    ):
        env = bridge(scripted(2, action_space=space), kind)
        td = env.reset(seed=0)
        with pytest.raises(error, match=match):
            env.step(td.set("action", action))
        assert env.vector_env.get_attr("steps") == (0, 0)


def test_snapshot_and_restore_of_a_simulator_on_the_host_raise(bridge):
    env, native = (
        bridge([functools.partial(gymnasium.make, "CartPole-v1")] * 2),
        tw.make("CartPole-v1", 2),
    )
    env.reset(seed=0)
    native.reset(seed=0)
    taken = native.snapshot()
    for call in (
        env.snapshot,
        lambda: env.restore(taken),
        lambda: tw.TransformedEnv(env, T.TimeLimit(4)).restore(taken),
    ):
        with pytest.raises(
            RuntimeError, match="cannot snapshot or restore, because a simulator outside of PyTorch"
        ):
            call()


# Description, frames and arguments.


def test_description_matches_the_vector_env():
    vector_env = gymnasium.make_vec(
        "HalfCheetah-v5", 3, "sync", vector_kwargs={"autoreset_mode": SAME_STEP}
    )
    env = tw.from_gymnasium(vector_env)
    for name in ("num_envs", "single_observation_space", "observation_space", "action_space"):
        assert getattr(env, name) == getattr(vector_env, name)
    assert env.metadata["autoreset_mode"] is SAME_STEP
    assert env.spec.id == "HalfCheetah-v5" and env.signature.max_episode_steps == 1000
    env.close()
    assert vector_env.closed


def test_make_passes_on_constructor_vector_and_wrapper_arguments():
    options = {"observation_mode": "same"}
    wrappers = [functools.partial(gymnasium.wrappers.TransformReward, func=lambda reward: 3.0)]
    env = make(
        lengths=(2,),
        ending="both",
        vector_kwargs=options,
        wrappers=wrappers,
        render_mode="rgb_array",
    )
    _, td = sample_and_step(env, env.reset(seed=0))
    assert env.render_mode == "rgb_array" and np.array_equal(env.render(), np.ones((2, 2, 2, 3)))
    transition, _ = sample_and_step(env, td)
    assert transition["next", "terminated"].all() and transition["next", "truncated"].all()
    assert (transition["next", "reward"] == 3).all()


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_time_limit_in_force_is_the_one_that_wrappers_set(kind):
    limit = functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=10)
    make_one = functools.partial(gymnasium.make, "Pendulum-v1")
    single = gymnasium.wrappers.TimeAwareObservation(limit(make_one()), normalize_time=True)
    single.reset()
    times = [single.step(single.action_space.sample())[0][-1] for _ in range(9)]
    name, modes = kind.__name__.removesuffix("VectorEnv").lower(), {"autoreset_mode": DISABLED}
    limited = tw.TransformedEnv(tw.make("Pendulum-v1"), T.TimeLimit(10))
    without_spec = tw.TransformedEnv(ScriptedEnv(1, (3,), episode_lengths=None), T.TimeLimit(10))
    envs = [
        tw.from_gymnasium(
            gymnasium.make_vec("Pendulum-v1", 1, name, vector_kwargs=modes, wrappers=(limit,))
        ),
        tw.from_gymnasium(kind([lambda: limit(make_one())], **modes)),
        tw.make("Pendulum-v1", backend="gymnasium", vectorization_mode=name, wrappers=(limit,)),
        *(tw.from_gymnasium(tw.to_gymnasium(env)) for env in (limited, without_spec)),
    ]
    envs += [tw.make(env.spec) for env in (limited, envs[2], envs[3])]
    for env in envs:
        with tw.TransformedEnv(env, T.TimeAwareObservation(normalize_time=True)) as timed:
            steps = tw.rollout(timed, None, 10, timed.reset(seed=0))[0]["next"]
            np.testing.assert_allclose(steps["observation"][0, :9, -1], times)
            assert steps["truncated"].flatten().tolist() == [False] * 9 + [True]
            assert (
                timed.spec is None or timed.spec.max_episode_steps == single.spec.max_episode_steps
            )
    with tw.from_gymnasium(kind([lambda: limit(make_one()), make_one], **modes)) as env:
        assert env.signature.max_episode_steps is None  # there is no common one


# On a GPU.


@pytest.mark.cuda
@every_kind
def test_transitions_on_cuda_match_the_cpu_and_never_change(bridge, kind, mode):
    for space in (*SPACES.values(), spaces.Box(0, 255, (256, 256, 3), np.uint8)):
        makers = scripted(3, lengths=STAGGERED, space=space)
        env, same = (
            bridge(makers, kind, mode, copy=False, device="cuda"),
            bridge(makers, kind, mode),
        )
        td, expected, kept = env.reset(seed=3), same.reset(seed=3), []
        for _ in range(12):
            action = same.sample_action()
            transition, td = env.step(td.set("action", action.cuda()))
            reference, expected = same.step(expected.set("action", action))
            kept += [
                (transition["next"], reference["next"]),
                (td.select("observation"), expected.select("observation")),
            ]
        assert transition["next", "reward"].device.type == "cuda"
        torch.cuda.synchronize()
        for ours, theirs in kept:
            assert_same(ours.cpu(), theirs)
