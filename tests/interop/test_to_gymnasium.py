"""`to_gymnasium`, against Gymnasium's `SyncVectorEnv`."""

import contextlib
import copy
import functools
import itertools

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics as SingleStatistics
from gymnasium.wrappers import vector as vector_wrappers
from single_envs import (
    DISABLED,
    LENGTHS,
    NEVER,
    SAME_STEP,
    SPACES,
    Scripted,
    every_mode,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class Informed(Scripted):
    """Has the same infos at each step and reset, as torchwrap's envs do."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {
            "elapsed": 99,
            "position": np.full(2, -1.0),
        }

    def step(self, action):
        *result, info = super().step(action)
        return *result, {
            "elapsed": info["elapsed"],
            "position": info["position"],
        }


INFO_SPACES = {
    "elapsed": spaces.Box(0, 99, (), np.int64),
    "position": spaces.Box(-9, 9, (2,), np.float64),
}


def done_of(result):
    return result[2] | result[3]


def reset_finished(envs, result):
    """In DISABLED mode, a masked reset where episodes have ended; returns its results."""
    if envs.metadata["autoreset_mode"] is DISABLED and done_of(result).any():
        return envs.reset(options={"reset_mask": done_of(result)})
    return None


def without_times(result):
    """A step's result, its infos without the seconds of episodes."""
    *result, infos = copy.deepcopy(result)
    for level in (infos, infos.get("final_info", {})):
        level.get("episode", {}).pop("t", None)
    return *result, infos


def in_float32(result):
    """A step's result with the reward rounded to float32, torchwrap's dtype of rewards."""
    observation, reward, *others = result
    return (
        observation,
        reward.astype(np.float32).astype(np.float64),
        *others,
    )


def assert_equivalent(actual, expected, where=""):
    assert data_equivalence(actual, expected, exact=True), f"{where}: {actual} is not {expected}"


def assert_same_steps(envs, oracle, num_steps, seed=3):
    """Asserts that two vector envs return the same for the same actions.

    Returns the number of ends.
    """
    assert_equivalent(envs.reset(seed=seed), oracle.reset(seed=seed), "reset")
    envs.action_space.seed(seed)
    ends = 0
    for step in range(num_steps):
        action = envs.action_space.sample()
        result = envs.step(action)
        expected = in_float32(oracle.step(action))
        assert_equivalent(without_times(result), without_times(expected), f"step {step}")
        initial = reset_finished(envs, result)
        assert_equivalent(
            initial,
            reset_finished(oracle, expected),
            f"reset after step {step}",
        )
        ends += int(done_of(result).sum())
    return ends


@pytest.fixture
def export(bridge):
    """Makes a vector env through torchwrap and back, and one of Gymnasium's, of the same envs."""

    def build(makers, mode, *transforms, **kwargs):
        env = bridge(makers, **kwargs)
        env = tw.TransformedEnv(env, *transforms) if transforms else env
        return tw.to_gymnasium(env, autoreset_mode=mode), SyncVectorEnv(makers, autoreset_mode=mode)

    return build


# Against Gymnasium's own vector env.


@pytest.mark.parametrize("id, limit", [("CartPole-v1", None), ("Pendulum-v1", 7)])
@every_mode
def test_export_of_a_gymnasium_env_steps_exactly_like_make_vec(mode, id, limit):
    limited = {"max_episode_steps": limit} if limit else {}
    envs = tw.to_gymnasium(tw.make(id, 3, backend="gymnasium", **limited), autoreset_mode=mode)
    oracle = gymnasium.make_vec(
        id,
        3,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        **limited,
    )
    assert assert_same_steps(envs, oracle, 120) > 5
    names = (
        "num_envs",
        "observation_space",
        "action_space",
        "single_observation_space",
        "single_action_space",
        "render_mode",
    )
    assert all(getattr(envs, name) == getattr(oracle, name) for name in names)
    assert envs.metadata == oracle.metadata and envs.spec.id == id
    envs.close()
    assert envs.closed


@every_mode
def test_infos_and_final_infos_equal_those_of_sync_vector_env(export, mode):
    for name in LENGTHS:
        for ending in ("terminated", "truncated", "both"):
            makers = [
                functools.partial(Informed, lengths=lengths, ending=ending)
                for lengths in LENGTHS[name]
            ]
            assert (assert_same_steps(*export(makers, mode, info_keys=INFO_SPACES), 20) == 0) == (
                name == "never"
            )


@every_mode
def test_observations_and_final_observations_of_every_space_equal_those_of_sync_vector_env(
    export, mode
):
    for name in sorted(SPACES.keys() - {"scalar"}):
        makers = [
            functools.partial(Informed, space=SPACES[name], lengths=lengths)
            for lengths in LENGTHS["staggered"]
        ]
        envs, oracle = export(makers, mode, info_keys=INFO_SPACES)
        assert envs.observation_space == oracle.observation_space
        assert assert_same_steps(envs, oracle, 12) > 5


def test_actions_of_every_space_reach_the_envs(export):
    for name in sorted(SPACES.keys() - {"scalar", "nested", "MultiDiscrete"}):
        envs, oracle = export(
            [functools.partial(Informed, lengths=(5,), action_space=SPACES[name])] * 2,
            SAME_STEP,
            info_keys=INFO_SPACES,
        )
        assert assert_same_steps(envs, oracle, 12) == 4  # the reward is a sum of the action


@every_mode
def test_masked_reset_equals_that_of_sync_vector_env_and_leaves_the_options_alone(export, mode):
    makers = [functools.partial(Informed, lengths=NEVER)] * 3
    envs, oracle = export(makers, mode, info_keys=INFO_SPACES)
    assert_equivalent(envs.reset(seed=0), oracle.reset(seed=0))
    for mask, seed in itertools.product(([True, False, False], [False, True, True]), (None, 5)):
        options = {"reset_mask": np.array(mask)}
        assert_equivalent(
            envs.reset(seed=seed, options=options),
            oracle.reset(seed=seed, options=dict(options)),
        )
        assert list(options) == ["reset_mask"]
        action = envs.action_space.sample()
        assert_equivalent(envs.step(action)[:4], oracle.step(action)[:4])


# Episode statistics.


def test_statistics_equal_those_of_gymnasiums_vector_wrapper_and_of_its_single_wrapper(
    export,
):
    makers = [functools.partial(Informed, lengths=lengths) for lengths in LENGTHS["staggered"]]
    envs, oracle = export(
        makers,
        SAME_STEP,
        T.RecordEpisodeStatistics(),
        info_keys=INFO_SPACES,
    )
    singles = SyncVectorEnv(
        [lambda one=one: SingleStatistics(one()) for one in makers],
        autoreset_mode=SAME_STEP,
    )
    oracle = vector_wrappers.RecordEpisodeStatistics(oracle)
    for each in (envs, oracle, singles):
        each.reset(seed=0)
    ends = 0
    for _ in range(20):
        action = envs.action_space.sample()
        infos, expected, of_singles = (
            each.step(action.copy())[4] for each in (envs, oracle, singles)
        )
        assert infos.keys() == expected.keys()
        assert infos.get("final_info", {}).keys() == of_singles.get("final_info", {}).keys()
        if "episode" not in expected:
            continue
        ends += 1
        final = infos["final_info"]
        of_singles = of_singles["final_info"]
        assert final["episode"].keys() == of_singles["episode"].keys()
        assert_equivalent(infos["_episode"], expected["_episode"])
        assert_equivalent(final["_episode"], of_singles["_episode"])
        for name in "rlt":
            for given, wanted in ((infos, expected), (final, of_singles)):
                assert given["episode"][name].dtype == wanted["episode"][name].dtype
                if name != "t":
                    np.testing.assert_allclose(
                        given["episode"][name],
                        wanted["episode"][name],
                        rtol=1e-5,
                    )
            assert_equivalent(
                final["episode"][f"_{name}"],
                of_singles["episode"][f"_{name}"],
            )
    assert ends > 5


# Gymnasium's own checks, tools and wrappers.


def test_export_is_made_by_make_vec_from_a_vector_entry_point():
    def entry_point(num_envs, **kwargs):
        return tw.to_gymnasium(tw.make("CartPole-v1", num_envs, **kwargs))

    gymnasium.register(
        "TorchwrapTest/Exported-v0",
        vector_entry_point=entry_point,
        max_episode_steps=20,
    )
    try:
        envs = gymnasium.make_vec("TorchwrapTest/Exported-v0", 3)
        assert (
            envs.unwrapped.env.signature.max_episode_steps == 20
            and envs.spec.id == "TorchwrapTest/Exported-v0"
        )
        assert "TorchwrapTest/Exported-v0" in repr(envs)
    finally:
        del gymnasium.registry["TorchwrapTest/Exported-v0"]


# Attributes and methods.


class Leveled(Scripted):
    level = 1

    def scaled(self, factor, plus=0):
        return factor * self.level + plus


@pytest.mark.parametrize("values", [7, [1, 2, 3]], ids=["number", "list"])
def test_attributes_and_methods_are_those_of_sync_vector_env(export, values):
    envs, oracle = export([Leveled] * 3, SAME_STEP)
    for each in (envs, oracle):
        each.set_attr("level", values)
        each.set_attr("wind", values)  # which no env has yet
    for name in ("level", "wind", "observation_space", "action_space"):
        assert envs.get_attr(name) == oracle.get_attr(name)
    assert envs.call("level") == oracle.call("level")
    assert envs.call("scaled", 2, plus=1) == oracle.call("scaled", 2, plus=1)


def test_attributes_of_layers_are_shared():
    env = tw.TransformedEnv(ScriptedEnv(2, (1,)), T.TimeLimit(9))
    envs = tw.to_gymnasium(env)
    assert envs.get_attr("max_episode_steps") == (9, 9)
    envs.set_attr("ending", "both")
    assert env.unwrapped.ending == "both" and envs.get_attr("ending") == ("both", "both")


def test_tuple_of_a_layer_is_one_value_for_all_envs_of_a_simulator():
    env = tw.make("CartPole-v1", 2, backend="gymnasium")
    envs = tw.to_gymnasium(tw.TransformedEnv(env, T.DelayObservation((0, 2))))
    assert envs.get_attr("delay") == ((0, 2), (0, 2))
    assert envs.get_attr("gravity") == (9.8, 9.8)


@pytest.mark.parametrize("name", ["r", "l", "t"])
def test_metric_with_the_name_of_an_entry_of_episodes_is_refused(name):
    recorder = T.RecordEpisodeStatistics(metrics={name: "sum"})
    with pytest.raises(ValueError, match="metrics"):
        tw.to_gymnasium(tw.TransformedEnv(ScriptedEnv(2), recorder))


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_call_of_render_returns_the_frame_of_each_env(backend):
    env = tw.make("CartPole-v1", 2, backend=backend, render_mode="rgb_array")
    envs = tw.to_gymnasium(tw.TransformedEnv(env, T.TimeLimit(9)))
    with contextlib.closing(envs):
        envs.reset(seed=0)
        for frames in (envs.call("render"), envs.render()):
            assert [frame.shape for frame in frames] == [(400, 600, 3)] * 2


# Rendering, and bad input.


@pytest.mark.parametrize("wrap", [None, vector_wrappers.RecordEpisodeStatistics])
def test_close_closes_the_env_once(monkeypatch, wrap):
    env = ScriptedEnv(2)
    calls = []
    monkeypatch.setattr(env, "close", lambda: calls.append(1))
    envs = tw.to_gymnasium(env)
    if wrap is not None:
        envs = wrap(envs)
    envs.close()
    envs.close()
    assert calls == [1]
    assert envs.closed


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, None])
def test_export_in_another_mode_raises(mode):
    with pytest.raises(ValueError, match="autoreset_mode"):
        tw.to_gymnasium(ScriptedEnv(2), autoreset_mode=mode)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"seed": [1, 2]}, "seed"),
        ({"options": {"reset_mask": np.array([1, 0])}}, "mask must have"),
        ({"options": {"colour": 1}}, "colour"),
    ],
    ids=str,
)
def test_reset_with_a_bad_argument_raises_and_changes_nothing(arguments, match):
    envs = tw.to_gymnasium(ScriptedEnv(2, (1,)))
    envs.reset(seed=5)
    envs.step(envs.action_space.sample())
    with pytest.raises((TypeError, ValueError), match=match):
        envs.reset(**arguments)
    assert envs.np_random_seed == 5
    assert envs.step(envs.action_space.sample())[0].tolist() == [
        [2],
        [1002],
    ]


TWO = spaces.Discrete(2)
BAD_ACTIONS = {
    "floats": (TWO, np.array([0.0, 1.0])),
    "out of range": (TWO, np.array([0, 2])),
    "too many": (TWO, np.array([0, 1, 1])),
    "no batch": (spaces.Box(-1, 1, (2,)), np.zeros(2)),
}


@pytest.mark.parametrize("space, actions", BAD_ACTIONS.values(), ids=BAD_ACTIONS)
def test_step_with_a_bad_action_raises_and_changes_nothing(space, actions):
    envs = tw.to_gymnasium(ScriptedEnv(2, (1,), action_space=space))
    envs.reset()
    with pytest.raises(ValueError, match="action"):
        envs.step(actions)
    assert envs.step(envs.action_space.sample())[0].tolist() == [
        [1],
        [1001],
    ]


def test_step_of_finished_envs_in_disabled_mode_asks_for_a_masked_reset():
    envs = tw.to_gymnasium(
        ScriptedEnv(3, (1,), episode_lengths=(1, 9)),
        autoreset_mode=DISABLED,
    )
    envs.reset()
    assert envs.step(envs.action_space.sample())[0].tolist() == [
        [1],
        [1001],
        [2001],
    ]
    envs.reset(options={"reset_mask": np.array([True, False, False])})
    with pytest.raises(RuntimeError, match=r"reset.*\[2\]"):
        envs.step(envs.action_space.sample())
    envs.reset(options={"reset_mask": np.array([False, False, True])})
    assert envs.step(envs.action_space.sample())[0].tolist() == [
        [1],
        [1002],
        [2001],
    ]
