"""RunningMeanStd, NormalizeObservation and NormalizeReward against NumPy, Gymnasium and Stable-Baselines3."""

from __future__ import annotations

import copy
import functools
import itertools

import numpy as np
import oracles
import pytest
import torch
from catalogue import BOXES
from gymnasium import spaces, wrappers
from gymnasium.vector import SyncVectorEnv
from helpers import assert_same, buffers
from oracles import ENDINGS, RandomEnv, quick
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

LENGTHS = [(5, 3, 1, 4), 1, 3, None]
FLOATS = spaces.Box(-np.inf, np.inf, (3,), np.float64)
RANDOM = {"observe": lambda rng: rng.normal([0, -3, 100], [1, 0.1, 20]), "reward": (1, 2)}
make = functools.partial(oracles.make, num_envs=4, **RANDOM)
scripted = functools.partial(oracles.scripted, num_envs=4, observation_shape=(2,))


def random_env(space=FLOATS, **arguments):
    return RandomEnv(space, **RANDOM, **arguments)


def baselines(max_length=4, **arguments):
    vec = VecNormalize(
        DummyVecEnv([lambda: random_env(max_length=max_length)] * 4),
        **{"clip_reward": np.inf, **arguments},
    )
    vec.obs_rms.count = vec.ret_rms.count = 0  # without its pseudo-count prior
    vec.seed(1)
    vec.reset()
    return vec


def step(env, td):
    return oracles.step(env, td, action=torch.zeros_like(env.sample_action()))


def reference(rows):
    # Mean, variance and count by NumPy, in double precision.
    rows = np.concatenate([np.asarray(part, np.float64) for part in rows])
    return rows.mean(0), rows.var(0), len(rows)


def assert_statistics(statistics, rows, rtol=1e-6):
    mean, var, count = reference(rows)
    np.testing.assert_allclose(statistics.mean, mean, rtol=rtol, atol=rtol * np.sqrt(var.max()))
    np.testing.assert_allclose(statistics.var, var, rtol=rtol, atol=rtol * var.max())
    assert (statistics.count == count).all()


@pytest.mark.parametrize("masked", quick([False, True], False))
def test_running_mean_std_of_ten_million_float32_rows_with_a_large_mean_is_accurate(masked):
    samples = 1e4 + 0.1 * torch.randn(2**20, 1, generator=torch.Generator().manual_seed(0))
    statistics, every = T.RunningMeanStd((1,)), torch.ones(2**14, dtype=torch.bool)
    for batch in samples.split(2**14) * 10:
        statistics.update(batch, every if masked else None)
    mean, var, count = reference([samples])
    assert statistics.count.item() == 10 * count > 10_000_000
    np.testing.assert_allclose(statistics.mean, mean, rtol=0, atol=1e-4 * 0.1)
    np.testing.assert_allclose(statistics.var.sqrt(), np.sqrt(var), rtol=1e-5)
    normal = statistics.normalize(samples, 1e-8).numpy()
    np.testing.assert_allclose(normal.mean(0, np.float64), 0, atol=1e-3)
    np.testing.assert_allclose(normal.std(0, dtype=np.float64), 1, atol=1e-4)


def test_running_mean_std_of_a_large_mean_in_any_batch_size_is_accurate_and_normalizes_as_float64():
    rows = 1e4 + 0.1 * torch.randn(8192, 2, generator=torch.Generator().manual_seed(1))
    mean, var, count = reference([rows])
    for size, masked in itertools.product((3, 64, 4096), (False, True)):
        statistics = T.RunningMeanStd((2,))
        for batch in rows.split(size):
            statistics.update(batch, torch.ones(len(batch), dtype=torch.bool) if masked else None)
        np.testing.assert_allclose(statistics.mean, mean, atol=0.001, err_msg=f"{size} {masked}")
        np.testing.assert_allclose(statistics.var, var, rtol=0.01, err_msg=f"{size} {masked}")
        assert (statistics.count == count).all()
        exact = (rows.double() - statistics.mean) / (statistics.var + 1e-8).sqrt()
        np.testing.assert_allclose(
            statistics.normalize(rows, 1e-8),
            exact,
            rtol=1e-5,
            atol=1e-5,
            err_msg=f"{size} {masked}",
        )


def test_running_mean_std_equals_gymnasiums_without_its_prior():
    ours, theirs = T.RunningMeanStd((3,)), wrappers.utils.RunningMeanStd(0, (3,))
    for size in (1, 5, 2, 8):
        rows = np.random.default_rng(size).normal(7, 3, (size, 3)).astype(np.float32)
        ours.update(torch.from_numpy(rows))
        theirs.update(rows.astype(np.float64))
        np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-6)
        np.testing.assert_allclose(ours.var, theirs.var, rtol=1e-5)


@pytest.mark.parametrize("lengths", quick(LENGTHS, LENGTHS[0]), ids=str)
def test_normalizers_without_host_readable_masks_have_the_same_buffers(lengths, monkeypatch):
    def recorded():
        env = scripted(T.NormalizeObservation(), T.NormalizeReward(0.5), episode_lengths=lengths)
        with pytest.warns(UserWarning, match="statistics that have no sample"):
            env.eval().reset(seed=0)
        td, rows, history = (
            env.train().reset(mask=torch.tensor([False, True, True, False])),
            torch.arange(4),
            [],
        )
        for number in range(20):
            _, td = step(env, td)
            if number % 4 == 3:
                td = env.reset(mask=(rows + number) % 3 == 0)
            history.append(buffers(env.transforms))
        return torch.stack(history)

    expected = recorded()  # sums of integers and halves, so that their order makes no difference
    monkeypatch.setattr("torchwrap._core.rows.is_host_readable", lambda tensor: False)
    assert_same(recorded(), expected)
    assert (expected["NormalizeObservation.statistics.count"][-1] > 2 + 20 * 4).all()


def test_statistics_without_a_sample_warn_where_they_normalize_in_eval():
    grouped = T.ObservationGroups({"raw": [], "normal": [T.NormalizeObservation()]})
    network = lambda td: td["observation", "raw"].repeat(1, 6)[:, :6]  # noqa: E731
    for call in (
        tw.Env.reset,
        lambda env: tw.evaluate(env, network, 1),
        lambda env: tw.deploy(env, network),
    ):
        env = scripted(copy.deepcopy(grouped), T.NormalizeReward()).eval()
        with pytest.warns(
            UserWarning,
            match=r"normalizes in eval\(\) with statistics that have no samples: load those",
        ):
            call(env)
    step(env.train(), env.reset())
    (
        env.eval().reset(),
        tw.evaluate(env, network, 1),
        tw.deploy(env, network),
    )  # a warning is an error


@pytest.mark.parametrize("lengths", quick(LENGTHS, *LENGTHS[:2]), ids=str)
def test_normalize_observation_counts_and_normalizes_each_successor_and_each_initial_observation_once(
    lengths,
):
    for ending in ENDINGS:
        env = scripted(T.NormalizeObservation(1e-2), episode_lengths=lengths, ending=ending)
        plain = scripted(episode_lengths=lengths, ending=ending)
        td, raw = env.reset(), plain.reset()
        counted = [raw["observation"].numpy()]

        def normal(rows, counted=counted):
            mean, var, _ = reference(counted)
            return (rows - mean) / np.sqrt(var + 1e-2)

        np.testing.assert_allclose(td["observation"], normal(counted[0]), rtol=1e-5, atol=1e-5)
        for _ in range(12):
            ours, td = step(env, td)
            following, raw = step(plain, raw)
            done = following["done"].squeeze(-1).numpy()
            counted.append(following["observation"].numpy())
            successor = normal(counted[-1])
            np.testing.assert_allclose(
                ours["observation"], successor, rtol=1e-5, atol=1e-5, err_msg=ending
            )
            counted.append(raw["observation"].numpy()[done])
            first = np.where(done[:, None], normal(raw["observation"].numpy()), successor)
            np.testing.assert_allclose(
                td["observation"], first, rtol=1e-5, atol=1e-5, err_msg=ending
            )
        assert_statistics(env.transforms[0].statistics, counted)


@pytest.mark.parametrize("dtype", quick([np.float32, np.float64], np.float32))
def test_normalize_observation_equals_gymnasiums_vector_wrapper_without_its_prior(dtype):
    # Over endless episodes, because Gymnasium's wrapper misses final observations.
    space = spaces.Box(-np.inf, np.inf, (3,), dtype)
    env = make(space, T.NormalizeObservation(), max_length=None)
    oracle = wrappers.vector.NormalizeObservation(
        SyncVectorEnv([lambda: random_env(space, max_length=None)] * 4)
    )
    oracle.obs_rms.count = 0
    assert env.single_observation_space == oracle.single_observation_space
    td = env.reset(seed=1)
    np.testing.assert_allclose(td["observation"], oracle.reset(seed=1)[0], rtol=1e-4, atol=1e-4)
    for _ in range(40):
        following, td = step(env, td)
        np.testing.assert_allclose(
            following["observation"], oracle.step(np.zeros(4, int))[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("lengths", quick([None, (1,), (5, 3, 2), 4], (5, 3, 2)))
def test_normalize_observation_of_a_dict_keeps_statistics_of_each_box(lengths):
    below = ScriptedEnv(3, observation_space=BOXES, episode_lengths=lengths)
    env, plain = (
        tw.TransformedEnv(copy.deepcopy(below), part)
        for part in (T.NormalizeObservation(), T.Compose([]))
    )
    (td, raw), counted = (each.reset(seed=0) for each in (env, plain)), []
    for key in (paths := list(raw["observation"].keys(True, True))):
        counted.append([*raw["observation", key].numpy()])
    for _ in range(12):
        action = env.sample_action()
        _, td = env.step(td.set("action", action))
        transition, raw = plain.step(raw.set("action", action))
        for key, rows in zip(paths, counted, strict=True):
            rows += [*transition["next", "observation", key].numpy()]
            rows += [*raw["observation", key][transition["next", "done"].squeeze(-1)].numpy()]
    assert env.single_observation_space["more"][0] == spaces.Box(
        -np.inf, np.inf, (2, 2), np.float32
    )
    assert isinstance(env.transforms[0].statistics, torch.nn.ModuleList)
    alone = env.transforms(raw.select("observation"))  # by the statistics at the end
    for key, rows in zip(paths, counted, strict=True):
        exact = np.array(rows, np.float64)
        normal = (raw["observation", key].double().numpy() - exact.mean(0)) / np.sqrt(
            exact.var(0) + 1e-8
        )
        np.testing.assert_allclose(alone["observation", key], normal, rtol=1e-5, atol=1e-5)


def test_normalize_observation_with_clip_observation_equals_stable_baselines_vec_normalize():
    # Over endless episodes, because VecNormalize does not count final observations.
    env = make(FLOATS, T.NormalizeObservation(), T.ClipObservation(-1, 1), max_length=None)
    vec = baselines(max_length=None, clip_obs=1.0)
    td = env.reset(seed=1)
    for _ in range(40):
        _, td = step(env, td)
        observation, _, _, _ = vec.step(np.zeros(4, int))
    assert np.abs(observation).max() == 1
    np.testing.assert_allclose(td["observation"], observation, rtol=1e-4, atol=1e-4)


def test_normalize_observation_of_a_box_of_any_shape_and_dtype_gives_float32():
    for space in (
        spaces.Box(0, 255, (4, 3, 3), np.uint8),
        spaces.Box(-100, 100, (3,), np.int64),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(-5, 5, (2,), np.float16),
        spaces.Box(-5, 5, (2, 2), np.float64),
    ):
        env = tw.TransformedEnv(ScriptedEnv(3, observation_space=space), T.NormalizeObservation())
        td, rows = (
            env.reset(),
            ScriptedEnv(3, observation_space=space)
            .reset()["observation"]
            .numpy()
            .astype(np.float64),
        )
        assert env.single_observation_space == spaces.Box(
            -np.inf, np.inf, space.shape, np.float32
        ), space
        assert (
            td["observation"].shape == (3, *space.shape)
            and td["observation"].dtype == torch.float32
        ), space
        expected = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8)
        np.testing.assert_allclose(
            td["observation"], expected, rtol=1e-3, atol=1e-3, err_msg=f"{space}"
        )


def test_normalize_observation_standalone_is_the_same_function_and_counts_nothing():
    env = scripted(T.NormalizeObservation())
    env.reset()
    before = {name: value.clone() for name, value in env.state_dict().items()}
    rows = torch.randn(2, 5, 2)
    td = TensorDict({"observation": rows}, [2, 5])
    statistics = env.transforms[0].statistics
    expected = (rows.double() - statistics.mean) / (statistics.var + 1e-8).sqrt()
    np.testing.assert_allclose(env.transforms(td)["observation"], expected, rtol=1e-5, atol=1e-5)
    assert td["observation"] is rows
    assert all(torch.equal(value, before[name]) for name, value in env.state_dict().items())


def test_normalize_reward_of_endless_episodes_equals_gymnasiums():
    env = make(FLOATS, T.NormalizeReward(0.95), num_envs=1, max_length=None)
    oracle = wrappers.NormalizeReward(random_env(max_length=None), gamma=0.95)
    oracle.return_rms.count = 0
    td = env.reset(seed=1)
    oracle.reset(seed=1)
    for _ in range(40):
        following, td = step(env, td)
        np.testing.assert_allclose(following["reward"].item(), oracle.step(0)[1], rtol=1e-4)


@pytest.mark.parametrize("max_length", quick([1, 4, None], 4))
@pytest.mark.parametrize("clip", [np.inf, 0.5])
def test_normalize_reward_over_episode_ends_equals_stable_baselines_vec_normalize(clip, max_length):
    env = make(FLOATS, T.NormalizeReward(0.95), T.ClipReward(-clip, clip), max_length=max_length)
    vec = baselines(max_length, gamma=0.95, clip_reward=clip)
    td, ended = env.reset(seed=1), 0
    for _ in range(60):
        following, td = step(env, td)
        _, reward, done, _ = vec.step(np.zeros(4, int))
        np.testing.assert_allclose(following["reward"][:, 0], reward, rtol=1e-4)
        ended += done.sum()
    np.testing.assert_allclose(env.transforms[0].statistics.var.item(), vec.ret_rms.var, rtol=1e-5)
    assert ended > 50 or max_length is None


def test_normalize_reward_equals_numpy_over_the_returns_of_every_env():
    for gamma, lengths in itertools.product((0.0, 0.5, 1.0), LENGTHS):
        env, plain = (
            scripted(T.NormalizeReward(gamma, 1e-3), episode_lengths=lengths),
            scripted(episode_lengths=lengths),
        )
        td, raw, running, counted = env.reset(), plain.reset(), np.zeros(4), []
        for _ in range(8):
            ours, td = step(env, td)
            following, raw = step(plain, raw)
            reward = following["reward"][:, 0].numpy()
            running = running * gamma + reward
            counted.append(running)
            expected = reward / np.sqrt(np.var(counted) + 1e-3)
            np.testing.assert_allclose(
                ours["reward"][:, 0], expected, rtol=1e-4, err_msg=f"{gamma} {lengths}"
            )
            running = np.where(following["done"][:, 0], 0, running)


@pytest.mark.full
def test_running_mean_std_with_an_outlier_as_reference_is_accurate():
    features = torch.linspace(1, 100, 64)
    statistics = T.RunningMeanStd((64,))
    statistics.update(torch.zeros(1, 64))
    rows = features.expand(4096, 64).contiguous()
    for _ in range(1000):
        statistics.update(rows)
    n = 1000 * 4096
    exact = features.double() ** 2 * n / (n + 1) ** 2  # of n times the feature and one zero
    np.testing.assert_allclose(statistics.var, exact, rtol=1e-6)
    assert statistics.normalize(rows, 1e-8).isfinite().all()


def test_normalize_observation_of_large_integers_resolves_small_differences():
    for base in (2**40, -(2**40)):
        env = ScriptedEnv(
            4, observation_space=spaces.Box(base, base + 6, (1,), np.int64), episode_lengths=None
        )
        env = tw.TransformedEnv(env, T.NormalizeObservation())
        data, _ = tw.rollout(env, None, 8)
        counted = [(1000 * i + t) % 7 for i in range(4) for t in range(9)]
        assert env.transforms[0].statistics.var.item() == pytest.approx(
            np.var(counted), rel=1e-6
        ), base
        assert data["next", "observation"].abs().max() < 3, base


def test_running_mean_std_of_a_constant_double_has_variance_zero():
    statistics = T.RunningMeanStd((1,), dtype=torch.float64)
    for _ in range(300):
        statistics.update(torch.full((7, 1), 1e12 + 0.1, dtype=torch.float64))
    assert statistics.var.item() == 0
    assert (
        statistics.normalize(torch.full((7, 1), 1e12 + 0.1, dtype=torch.float64), 1e-8).tolist()
        == [[0]] * 7
    )
