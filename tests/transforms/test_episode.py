"""Transforms that count steps and episodes, against Gymnasium's wrappers."""

import functools

import numpy as np
import oracles
import pytest
import torch
from gymnasium import wrappers
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AutoresetMode
from numpy.testing import assert_allclose, assert_array_equal
from oracles import ENDINGS, RandomEnv, assert_agrees, quick, step, vector_env

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

SPACE = Box(
    -9,
    9,
    (1,),
    np.float64,
)
scripted = functools.partial(
    oracles.scripted,
    num_envs=2,
    observation_shape=(1,),
)
endings = pytest.mark.parametrize("ending", ENDINGS)


def advance(env, num_steps):
    return step(env, env.reset(), num_steps)


@pytest.mark.parametrize(
    "buffer_length",
    quick([1, 2, 3, 7, 100], 3, 100),
)
def test_record_episode_statistics_equals_gymnasiums_vector_wrapper(buffer_length):
    statistics = T.RecordEpisodeStatistics(buffer_length)
    env = oracles.make(
        SPACE,
        statistics,
        num_envs=4,
        max_length=6,
    )
    vec = vector_env(SPACE, 4, AutoresetMode.SAME_STEP, max_length=6)
    oracle = wrappers.vector.RecordEpisodeStatistics(vec, buffer_length)
    td = env.reset(seed=3)
    oracle.reset(seed=3)
    for _ in range(40):
        successor, td = step(env, td)
        info = oracle.step(np.zeros(4, np.int64))[-1]
        done = successor["done"].squeeze(-1).numpy()
        assert_array_equal(
            done,
            info.get("_episode", np.zeros(4, bool)),
        )
        if done.any():
            episode = info["episode"]
            returns = successor["episode_return"][done, 0]
            assert_allclose(returns, episode["r"][done], rtol=1e-5)
            lengths = successor["episode_length"][done, 0]
            assert_array_equal(lengths, episode["l"][done])
        returns = np.array(oracle.return_queue, float).ravel()
        assert_allclose(statistics.return_queue, returns, rtol=1e-5)
        lengths = np.array(oracle.length_queue, int).ravel()
        assert_array_equal(statistics.length_queue, lengths)
        assert statistics.episode_count == oracle.episode_count
    assert oracle.episode_count > 30


@endings
def test_running_sums_are_the_whole_episodes_at_its_last_step(ending):
    env = scripted(
        T.RecordEpisodeStatistics(),
        episode_lengths=(3, 1),
        ending=ending,
    )
    successor = tw.rollout(env, None, 5)["next"]
    returns = successor["episode_return"]
    lengths = successor["episode_length"]
    assert returns[..., 0].tolist() == [[1, 3, 6, 1, 1], [1, 1, 3, 6, 1]]
    assert lengths[..., 0].tolist() == [[1, 2, 3, 1, 1], [1, 1, 2, 3, 1]]
    assert (returns.dtype, lengths.dtype) == (torch.float32, torch.int64)


def test_episode_ended_by_a_transform_above_is_finished():
    statistics = T.RecordEpisodeStatistics()
    advance(
        scripted(statistics, T.TimeLimit(2), episode_lengths=(5, 1)),
        4,
    )
    assert statistics.length_queue.tolist() == [1, 2, 1, 2, 1]


def test_sums_over_long_episodes_are_in_double_precision():
    large_then_small = T.TransformReward(lambda reward: torch.where(reward == 1, 2.0**24, 0.5))
    env = scripted(large_then_small, T.RecordEpisodeStatistics(), episode_lengths=21)
    successor, _ = advance(env, 21)
    assert successor["episode_return"].tolist() == [[2**24 + 10]] * 2


REDUCTIONS = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "last": lambda values: values[-1],
}


def pushing(compiled=False):
    """An env that records every reduction of the actions."""
    metrics = {f"push_{kind}": ("action", kind) for kind in REDUCTIONS}
    statistics = T.RecordEpisodeStatistics(metrics=metrics)
    env = scripted(
        statistics,
        action_space=Box(-1, 1, (1,)),
        episode_lengths=(3, 2),
    )
    return tw.compile(env, backend="eager") if compiled else env


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_metric_equals_numpys_at_every_step_and_in_the_queue(kind, compiled):
    env = pushing(compiled)
    vec = tw.to_gymnasium(pushing())
    vec.reset(seed=0)
    td = env.reset(seed=0)
    running = [[], []]
    finished = []
    for _ in range(7):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        infos = vec.step(action.numpy())[-1]
        for row, pushes in enumerate(running):
            pushes.append(action[row].item())
            expected = pytest.approx(
                REDUCTIONS[kind](np.float64(pushes)),
                rel=1e-6,
            )
            assert transition["next", f"episode_push_{kind}"][row].item() == expected
            if transition["next", "done"][row]:
                assert infos["episode"][f"push_{kind}"][row] == expected
                finished.append(expected)
                running[row] = []
    assert env.transforms[0].metric_queues[f"push_{kind}"].tolist() == finished
    assert len(finished) == 5


def test_two_recorders_of_one_key_raise():
    env = tw.TransformedEnv(ScriptedEnv(1), T.RecordEpisodeStatistics())
    tw.TransformedEnv(env, T.RecordEpisodeStatistics(stats_key="scaled"))
    with pytest.raises(ValueError, match="stats_key"):
        tw.TransformedEnv(env, T.ScaleReward(2), T.RecordEpisodeStatistics())


@pytest.mark.parametrize(
    "limit",
    quick([1, 2, 4, 100], 4),
)
def test_time_limit_equals_gymnasiums(limit):
    theirs = [wrappers.TimeLimit(RandomEnv(SPACE, max_length=6), limit) for _ in range(4)]
    env = oracles.make(
        SPACE,
        T.TimeLimit(limit),
        num_envs=4,
        max_length=6,
    )
    flags = assert_agrees(env, theirs, num_steps=40)
    assert flags.all(1).any()
    assert flags.any(1).sum() > 20


AWARE = [
    Box(-1, 1, (3,)),
    Box(0, 255, (2, 2), np.uint8),
    Box(-1, 1, (2,), np.float64),
    Discrete(4, start=1),
    Dict(a=Box(-1, 1, (2,)), z=Discrete(3)),
    Tuple([Box(-1, 1, (2,)), Discrete(3)]),
]


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("normalize_time", [True, False])
@pytest.mark.parametrize(
    "space",
    quick(AWARE, *AWARE[4:]),
    ids=str,
)
def test_time_aware_observation_equals_gymnasiums(space, normalize_time, flatten):
    arguments = (flatten, normalize_time)
    theirs = []
    for _ in range(2):
        limited = wrappers.TimeLimit(RandomEnv(space), 3)
        aware = wrappers.TimeAwareObservation(limited, *arguments, dict_time_key="elapsed")
        theirs.append(aware)
    ours = T.TimeAwareObservation(*arguments, dict_time_key="elapsed")
    assert_agrees(
        oracles.make(space, T.TimeLimit(3), ours, num_envs=2),
        theirs,
        num_steps=12,
    )


@pytest.mark.parametrize(
    ("limit", "normalize_time", "time"), [(2**31 - 1, False, 1), (2**31, True, 2.0**-31)]
)
def test_time_aware_observation_of_the_longest_limits_is_exact(limit, normalize_time, time):
    aware = T.TimeAwareObservation(flatten=False, normalize_time=normalize_time)
    successor, _ = advance(
        scripted(T.TimeLimit(limit), aware),
        1,
    )
    assert successor["observation", "time"].tolist() == [[time]] * 2


def test_time_aware_observation_of_a_limit_beyond_int32_raises():
    with pytest.raises(ValueError, match="TimeAwareObservation"):
        scripted(T.TimeLimit(2**31), T.TimeAwareObservation())
