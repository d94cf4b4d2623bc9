"""NaN and infinity in running statistics, against NumPy; and returns beyond what float32 can count."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import AOT, INDUCTOR, assert_same, buffers
from stable_baselines3.common.running_mean_std import RunningMeanStd as BaselinesMeanStd

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

RunningMeanStd = T.RunningMeanStd
VALUES = [math.nan, math.inf, -math.inf]


def batches(number=30, share=0.2, seed=0, dtype=np.float32):
    """Batches of 5 rows of 3 components far from 0, of which some are not finite; the first batch begins with such a row."""
    rng = np.random.default_rng(seed)
    found = rng.normal([0, 1e5, -3], [1, 2, 20], (number, 5, 3)).astype(dtype)
    found[rng.random(found.shape) < share] = rng.choice(VALUES)
    found[0, 0] = math.nan
    found[3] = math.nan
    return found


def expected(rows):
    finite = [column[np.isfinite(column)] for column in rows.reshape(-1, 3).astype(np.float64).T]
    mean = [column.mean() if len(column) else 0 for column in finite]
    var = [column.var() if len(column) else 1 for column in finite]
    return mean, var, [len(column) for column in finite]


def assert_statistics(statistics, rows):
    mean, var, count = expected(rows)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(statistics.var, var, rtol=1e-5, atol=1e-9)
    assert statistics.count.tolist() == count


def test_statistics_are_those_of_the_finite_values():
    for share, dtype in itertools.product((0, 0.05, 0.5, 0.98), (np.float32, np.float64)):
        rows, statistics = (
            batches(share=share, dtype=dtype),
            RunningMeanStd((3,), dtype=torch.float64),
        )
        for number, batch in enumerate(rows, 1):
            statistics.update(torch.from_numpy(batch))
            assert_statistics(statistics, rows[:number])


def test_mask_decides_before_values_do():
    rows, mask = (
        torch.tensor([[math.nan], [2.0], [math.inf], [4.0]]),
        torch.tensor([False, True, True, True]),
    )
    statistics = RunningMeanStd((1,))
    statistics.update(rows, mask)
    assert (statistics.mean, statistics.var, statistics.count) == (3, 1, 2)
    statistics = RunningMeanStd((1,))
    statistics.update(rows, torch.zeros(4, dtype=torch.bool))
    assert (statistics.mean, statistics.var, statistics.count) == (0, 1, 0)


def test_batch_of_values_that_are_not_finite_counts_none():
    statistics = RunningMeanStd((1,))
    statistics.update(torch.full((4, 1), math.nan))
    assert (statistics.mean, statistics.var, statistics.count) == (0, 1, 0)
    statistics.update(torch.tensor([[1e7], [1e7 + 1]]))
    assert statistics.var == 0.25 and statistics.mean == 1e7 + 0.5


class Breaks(ScriptedEnv):
    """Observations and rewards of one env are not finite in some steps and at the start of some episodes."""

    def _observation_now(self):
        observation = super()._observation_now()
        broken = (self.elapsed + self.episode) % 3 == 1
        column = torch.where(
            (broken & (self.index == 1)).unsqueeze(-1), torch.nan, observation[:, :1]
        )
        return torch.cat([column, observation[:, 1:]], 1)

    def _step(self, action):
        successor = super()._step(action)
        broken = (self.index == 2) & (self.elapsed == 2) & (self.episode % 2 == 0)
        return successor.set(
            "reward", torch.where(broken.unsqueeze(-1), torch.inf, successor["reward"])
        )


def run(env, num_steps):
    td, observations, rewards = env.reset(seed=0), [], []
    observations.append(td["observation"])
    for _ in range(num_steps):
        transition, td = env.step(torch.zeros(4, 6))
        following = transition["next"]
        observations.append(following["observation"])
        rewards.append(following["reward"])
        observations.append(td["observation"][following["done"].squeeze(-1)])
    return observations, rewards


def make(*transforms):
    return tw.TransformedEnv(Breaks(4, (3,), (5, 3, 2, 4)), *transforms)


def test_normalize_observation_counts_the_finite_values_of_steps_and_resets():
    raw, _ = run(Breaks(4, (3,), (5, 3, 2, 4)), 40)
    env = make(T.NormalizeObservation())
    seen, _ = run(env, 40)
    rows = torch.cat(raw).numpy()
    assert (
        np.isnan(rows).any(1).mean() > 0.05
        and torch.cat(seen).isnan().sum() == np.isnan(rows).sum()
    )
    assert_statistics(env.transforms[0].statistics, rows)


def test_normalize_reward_starts_over_in_the_episode_after_a_reward_that_is_not_finite():
    _, raw = run(Breaks(4, (3,), (5, 3, 2, 4)), 40)
    env, returns, counted = make(T.NormalizeReward(gamma=0.9)), np.zeros((4, 1)), []
    env.reset(seed=0)
    for reward in raw:
        transition, _ = env.step(torch.zeros(4, 6))
        returns = 0.9 * returns + reward.double().numpy()
        counted.append(returns.copy())
        assert torch.equal(transition["next", "reward"].isfinite(), reward.isfinite())
        returns[transition["next", "done"].numpy()] = 0
        np.testing.assert_allclose(env.transforms[0].discounted_return, returns, rtol=1e-12)
    counted = np.concatenate(counted)
    finite = counted[np.isfinite(counted)]
    assert len(finite) < len(counted)
    np.testing.assert_allclose(env.transforms[0].statistics.var, finite.var(), rtol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "tolerance"),
    [("aot_eager", AOT), pytest.param("inductor", INDUCTOR, marks=pytest.mark.long)],
)
def test_values_that_are_not_finite_compiled_match_eager(backend, tolerance):
    eager, compiled = (
        make(T.NormalizeObservation(), T.NormalizeReward(), T.ClipReward(-10, 10)) for _ in range(2)
    )
    tw.compile(compiled, backend=backend)
    for expected_values, values in zip(run(eager, 40), run(compiled, 40), strict=True):
        for before, after in zip(expected_values, values, strict=True):
            torch.testing.assert_close(
                after, before, rtol=tolerance, atol=tolerance, equal_nan=True
            )
    assert_same(buffers(compiled), buffers(eager), tolerance)
    observations, rewards, _ = compiled.transforms
    assert (
        observations.statistics.count[0] < observations.statistics.count[1]
        and rewards.statistics.count < 40 * 4
    )


def test_returns_with_gamma_1_grow_beyond_what_float32_can_count():
    env = tw.TransformedEnv(
        ScriptedEnv(1, (1,), None), T.TransformReward(torch.ones_like), T.NormalizeReward(gamma=1)
    )
    env.reset()
    env.transforms[1].discounted_return.fill_(2.0**24)
    theirs, returns = BaselinesMeanStd(epsilon=0, shape=()), np.full(1, 2.0**24)
    for _ in range(50):
        env.step(env.sample_action())
        returns += 1
        theirs.update(returns)
    assert env.transforms[1].discounted_return == 2.0**24 + 50
    np.testing.assert_allclose(env.transforms[1].statistics.var, np.arange(50).var(), rtol=1e-9)
    np.testing.assert_allclose(env.transforms[1].statistics.mean, theirs.mean, rtol=1e-12)


def test_component_whose_first_values_are_missing_is_as_accurate_as_the_others():
    statistics, rows = (
        RunningMeanStd((2,)),
        torch.tensor([[1.0, 1e7], [2.0, 1e7 + 1], [4.0, 1e7 + 2]]),
    )
    statistics.update(torch.tensor([[0.0, math.nan], [3.0, math.inf]]))
    statistics.update(rows)
    np.testing.assert_allclose(statistics.var, [2, 2 / 3], rtol=1e-12)


def test_constant_component_whose_first_value_is_missing_normalizes_to_zero():
    for value in (0.1, 12345.678, -1e6):
        rows, statistics = torch.full((7, 1), value), RunningMeanStd((1,))
        rows[0] = math.nan
        for _ in range(200):
            statistics.update(rows)
            normal = statistics.normalize(rows, 1e-8)
            assert statistics.var >= 0 and (normal[1:] == 0).all() and normal[0].isnan(), value


def test_double_that_cannot_be_squared_is_skipped():
    for value in (1e200, -1e200):
        statistics = RunningMeanStd((1,), dtype=torch.float64)
        for _ in range(3):
            statistics.update(torch.tensor([[1.0], [value], [3.0]], dtype=torch.float64))
        assert (statistics.mean, statistics.var, statistics.count) == (2, 1, 6), value


def test_batch_without_rows_counts_nothing():
    statistics = RunningMeanStd((2,))
    for count in (0, 3):
        statistics.update(torch.ones(0, 2))
        assert (statistics.count == count).all() and (
            statistics.var == (1 if count == 0 else 0)
        ).all()
        statistics.update(torch.ones(3, 2))
