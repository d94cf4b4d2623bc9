"""NormalizeObservation, NormalizeReward and their statistics against NumPy."""

import copy
import functools
import math

import numpy as np
import oracles
import pytest
import torch
from catalogue import BOXES
from gymnasium.spaces import Box, Dict, Discrete
from helpers import assert_same, buffers
from numpy.testing import assert_allclose
from oracles import ENDINGS, quick

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

INF = np.inf
LENGTHS = [(5, 3, 1, 4), 1, 3, None]
scripted = functools.partial(
    oracles.scripted,
    num_envs=4,
    observation_shape=(2,),
)
close = functools.partial(assert_allclose, rtol=1e-5, atol=1e-5)
masked = pytest.mark.parametrize(
    "masked",
    [False, True],
    ids=["all rows", "mask"],
)


def step(env, td):
    return oracles.step(
        env,
        td,
        action=torch.zeros_like(env.sample_action()),
    )


def normal(rows, counted, epsilon=1e-8):
    """NumPy's normalization of rows by the statistics of others, in double precision."""
    counted = np.concatenate(counted).astype(np.float64)
    return (np.asarray(rows, np.float64) - counted.mean(0)) / np.sqrt(counted.var(0) + epsilon)


def count(statistics, rows, size, masked):
    for batch in rows.split(size):
        mask = torch.ones(len(batch), dtype=torch.bool) if masked else None
        statistics.update(batch, mask)


# RunningMeanStd


@pytest.mark.full
def test_statistics_with_an_outlier_as_reference_are_accurate():
    features = torch.linspace(1, 100, 64)
    statistics = T.RunningMeanStd((64,))
    statistics.update(torch.zeros(1, 64))
    rows = features.expand(4096, 64).contiguous()
    for _ in range(1000):
        statistics.update(rows)
    number = 1000 * 4096
    exact = features.double() ** 2 * number / (number + 1) ** 2  # of one zero among the features
    assert_allclose(statistics.var, exact, rtol=1e-6)
    assert statistics.normalize(rows, 1e-8).isfinite().all()


OFFSETS = {  # offset, and dtype of the statistics
    "Unix time": (1.7e9, torch.float64),
    "1e8": (1e8, torch.float64),
    "1e4 in float32": (1e4, torch.float32),
}


def with_holes(offset, dtype, first):
    """Rows around an offset; the first ones hold a fault, in other components each."""
    rows = offset + torch.randn(64, 3, generator=torch.Generator().manual_seed(2)).double()
    rows = rows.to(dtype)
    rows[0, 0] = first
    rows[:5, 1] = first
    return rows


@masked
@pytest.mark.parametrize("first", [math.nan, INF, -INF], ids=str)
@pytest.mark.parametrize(("offset", "dtype"), OFFSETS.values(), ids=OFFSETS)
def test_statistics_of_an_offset_after_a_first_value_that_does_not_count(
    offset, dtype, first, masked
):
    rows = with_holes(offset, dtype, first)
    statistics = T.RunningMeanStd((3,), dtype=dtype)
    count(statistics, rows, 16, masked)
    exact = np.where(np.isfinite(rows.numpy()), rows.numpy(), np.nan).astype(np.float64)
    assert statistics.count.tolist() == [63, 59, 64]
    assert_allclose(statistics.mean, np.nanmean(exact, 0), rtol=1e-12)
    assert_allclose(statistics.var, np.nanvar(exact, 0), rtol=1e-6)


BEGINNINGS = {
    "loaded": lambda statistics: statistics.load_state_dict(T.RunningMeanStd((3,)).state_dict()),
    "in place": lambda statistics: [buffer.zero_() for buffer in statistics.buffers()],
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_statistics_that_begin_again_take_another_reference(begin):
    statistics = T.RunningMeanStd((3,))
    for _ in range(2):
        statistics.update(with_holes(0, torch.float32, math.nan))
    begin(statistics)
    rows = with_holes(1e6, torch.float32, math.nan)
    statistics.update(rows)
    assert_allclose(statistics.var, np.nanvar(rows.double().numpy(), 0), rtol=1e-6)


WRONG_ROWS = {
    "one row": torch.ones(3),
    "a column": torch.ones(5, 1),
    "other rows": torch.ones(5, 4),
    "bool": torch.ones(5, 3) > 0,
    "an array": np.ones((5, 3)),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_rows_of_another_kind_are_refused_by_name(name):
    statistics = T.RunningMeanStd((3,))
    calls = [statistics.update, lambda rows: statistics.normalize(rows, 1e-8)]
    for call in calls[: 1 + (name != "one row")]:
        with pytest.raises(ValueError, match="RunningMeanStd: rows"):
            call(WRONG_ROWS[name])
    with pytest.raises(ValueError, match="mask"):
        statistics.update(torch.ones(5, 3), torch.ones(1) > 0)
    assert not statistics.count.any()


EXTREMES = {  # rows that float32 or its differences do not hold
    "seconds": (np.arange(10) + 1_700_000_000, torch.float32),
    "int32": (np.arange(10, dtype=np.int32) + 1_700_000_000, torch.float32),
    "nanoseconds": (100 * np.arange(10) + 1_700_000_000_000_000_000, torch.float64),
    "all of int64": (np.array([-(2**63), 2**63 - 1, 2**60]), torch.float64),
    "float32": (np.float32([1e38, -1e38, 3e38]), torch.float32),
}


@pytest.mark.parametrize(("rows", "dtype"), EXTREMES.values(), ids=EXTREMES)
def test_statistics_of_large_numbers_are_exact(rows, dtype):
    statistics = T.RunningMeanStd((1,), dtype=dtype)
    statistics.update(torch.from_numpy(rows).unsqueeze(1))
    exact = rows.astype(np.longdouble)
    assert statistics.count == len(rows)
    assert_allclose(statistics.mean, exact.mean().astype(float))
    assert_allclose(statistics.var, exact.var().astype(float))


@pytest.mark.newest
def test_nanoseconds_are_normalized_also_when_deployed():
    time = 1_700_000_000_000_000_000 + torch.tensor([[0], [100]])
    env = scripted(
        T.NormalizeObservation(),
        observation_space=Box(0, 2**62, (1,), np.int64),
        action_space=Box(-9, 9, (1,)),
    )
    statistics = env.transforms[0].statistics
    statistics.update(time)
    deployed = tw.deploy(env, lambda td: td["observation"])
    for function in (env.transforms[0].observation, deployed):
        assert function(time).tolist() == [[-1], [1]]


FAULTS = [
    ("count", -5),
    ("count", 1e30),  # which is -2**63 in int64
    ("squares", -1.0),
    ("total", math.nan),
    ("reference", INF),
]


@pytest.mark.parametrize(("name", "value"), FAULTS, ids=str)
def test_statistics_that_no_rows_have_are_not_loaded(name, value):
    agent = torch.nn.ModuleDict({"statistics": T.RunningMeanStd((3,))})
    agent["statistics"].update(with_holes(0, torch.float32, INF))
    before = buffers(agent)
    saved = agent.state_dict()
    saved[f"statistics.{name}"] = saved[f"statistics.{name}"] * 0 + value
    with pytest.raises(RuntimeError, match=rf"statistics\.{name} must"):
        agent.load_state_dict(saved)
    assert_same(buffers(agent), before)


def test_statistics_of_rows_with_a_gradient_keep_no_graph():
    rows = torch.randn(8, 3, requires_grad=True)
    statistics = T.RunningMeanStd((3,))
    statistics.update(2 * rows, torch.arange(8) > 2)
    replica = copy.deepcopy(statistics)
    assert not any(buffer.requires_grad for buffer in statistics.buffers())
    assert_allclose(replica.var, (2 * rows[3:]).detach().double().numpy().var(0), rtol=1e-6)


# Both transforms


def record(lengths):
    env = scripted(
        T.NormalizeObservation(),
        T.NormalizeReward(0.5),
        episode_lengths=lengths,
    )
    with pytest.warns(UserWarning, match="no samples"):
        env.eval().reset(seed=0)
    td = env.train().reset(mask=torch.tensor([False, True, True, False]))
    history = []
    for number in range(20):
        _, td = step(env, td)
        if number % 4 == 3:
            td = env.reset(mask=(torch.arange(4) + number) % 3 == 0)
        history.append(buffers(env.transforms))
    return torch.stack(history)


@pytest.mark.parametrize(
    "lengths",
    quick(LENGTHS, LENGTHS[0]),
    ids=str,
)
def test_normalizers_without_host_readable_masks_have_the_same_buffers(lengths, monkeypatch):
    expected = record(lengths)  # sums of integers and halves, so their order makes no difference
    monkeypatch.setattr("torchwrap._core.rows.is_host_readable", lambda tensor: False)
    assert_same(record(lengths), expected)
    assert (expected["NormalizeObservation.statistics.count"][-1] > 2 + 20 * 4).all()


def network(td):
    return td["observation", "raw"].repeat(1, 6)[:, :6]


@pytest.mark.parametrize(
    "call",
    [tw.Env.reset, lambda env: tw.evaluate(env, network, 1)],
    ids=["reset", "evaluate"],
)
def test_statistics_without_a_sample_warn_where_they_normalize_in_eval(call):
    grouped = T.ObservationGroups({"raw": [], "normal": [T.NormalizeObservation()]})
    env = scripted(grouped, T.NormalizeReward()).eval()
    with pytest.warns(UserWarning, match="no samples"):
        call(env)
    step(env.train(), env.reset())
    call(env.eval())  # a warning is an error


# NormalizeObservation


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    "lengths",
    quick(LENGTHS, *LENGTHS[:2]),
    ids=str,
)
def test_each_successor_and_each_initial_observation_counts_once(lengths, ending):
    env = scripted(
        T.NormalizeObservation(1e-2),
        episode_lengths=lengths,
        ending=ending,
    )
    plain = scripted(episode_lengths=lengths, ending=ending)
    td = env.reset()
    raw = plain.reset()
    counted = [raw["observation"]]
    close(
        td["observation"],
        normal(raw["observation"], counted, 1e-2),
    )
    for _ in range(12):
        ours, td = step(env, td)
        successor, raw = step(plain, raw)
        done = successor["done"].squeeze(-1)
        counted.append(successor["observation"])
        expected = normal(successor["observation"], counted, 1e-2)
        close(ours["observation"], expected)
        counted.append(raw["observation"][done])
        initial = normal(raw["observation"], counted, 1e-2)
        close(
            td["observation"],
            np.where(done[:, None], initial, expected),
        )
    statistics = env.transforms[0].statistics
    counted = torch.cat(counted)
    assert_allclose(statistics.mean, counted.mean(0), rtol=1e-5)
    assert (statistics.count == len(counted)).all()


@pytest.mark.parametrize(
    "lengths",
    quick([None, (1,), (5, 3, 2), 4], (5, 3, 2)),
    ids=str,
)
def test_normalize_observation_of_a_dict_keeps_statistics_of_each_box(lengths):
    below = ScriptedEnv(3, observation_space=BOXES, episode_lengths=lengths)
    plain = tw.TransformedEnv(copy.deepcopy(below))
    env = tw.TransformedEnv(below, T.NormalizeObservation())
    td = env.reset(seed=0)
    raw = plain.reset(seed=0)
    counted = {key: [value] for key, value in raw["observation"].items(True, True)}
    for _ in range(12):
        action = env.sample_action()
        _, td = env.step(td.set("action", action))
        transition, raw = plain.step(raw.set("action", action))
        done = transition["next", "done"].squeeze(-1)
        for key, rows in counted.items():
            rows.append(transition["next", "observation", key])
            rows.append(raw["observation", key][done])
    assert env.single_observation_space["more"][0] == Box(-INF, INF, (2, 2))
    alone = env.transforms(raw.select("observation"))
    for key, rows in counted.items():
        close(
            alone["observation", key],
            normal(raw["observation", key], rows),
        )


def test_discrete_entry_of_a_dict_is_refused_with_the_transform_that_takes_the_others():
    space = Dict(gear=Discrete(5), speed=Box(-9, 9, (2,)))
    env = ScriptedEnv(2, observation_space=space)
    with pytest.raises(TypeError, match=r"NormalizeObservation.*ObservationKeys"):
        tw.TransformedEnv(env, T.NormalizeObservation())


@pytest.mark.parametrize(
    "space",
    [
        Box(0, 255, (4, 3, 3), np.uint8),
        Box(-100, 100, (3,), np.int64),
        Box(-1, 1, ()),
        Box(-5, 5, (2,), np.float16),
        Box(-5, 5, (2, 2), np.float64),
    ],
    ids=str,
)
def test_normalize_observation_of_any_shape_and_dtype_gives_float32(space):
    plain = ScriptedEnv(3, observation_space=space)
    rows = plain.reset()["observation"]
    env = tw.TransformedEnv(plain, T.NormalizeObservation())
    observation = env.reset()["observation"]
    assert env.single_observation_space == Box(-INF, INF, space.shape)
    assert observation.dtype == torch.float32
    close(
        observation,
        normal(rows, [rows]),
        rtol=1e-3,
        atol=1e-3,
    )


# NormalizeReward


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_normalize_reward_equals_numpy_over_the_returns_of_every_env(gamma, lengths):
    env = scripted(T.NormalizeReward(gamma, 1e-3), episode_lengths=lengths)
    plain = scripted(episode_lengths=lengths)
    td = env.reset()
    raw = plain.reset()
    returns = np.zeros(4)
    counted = []
    for _ in range(8):
        ours, td = step(env, td)
        successor, raw = step(plain, raw)
        reward = successor["reward"][:, 0].numpy()
        returns = returns * gamma + reward
        counted.append(returns)
        expected = reward / np.sqrt(np.var(counted) + 1e-3)
        assert_allclose(
            ours["reward"][:, 0],
            expected,
            rtol=1e-4,
        )
        returns = np.where(
            successor["done"][:, 0],
            0,
            returns,
        )
