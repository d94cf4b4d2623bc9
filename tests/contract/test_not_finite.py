"""NaN and infinity in running statistics, against NumPy; and returns beyond float32's integers."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

NAN = math.nan


def assert_statistics(statistics, rows):
    """Statistics are NumPy's of the finite values of each component."""
    for index, column in enumerate(rows.reshape(-1, 3).astype(np.float64).T):
        finite = column[np.isfinite(column)]
        mean, var = (finite.mean(), finite.var()) if len(finite) else (0, 1)
        assert_allclose(
            statistics.mean[index],
            mean,
            rtol=1e-6,
            atol=1e-6,
        )
        assert_allclose(
            statistics.var[index],
            var,
            rtol=1e-5,
            atol=1e-9,
        )
        assert statistics.count[index] == len(finite)


class Breaks(ScriptedEnv):
    """Some steps and resets of env 1 observe NaN, and some steps of env 2 reward infinity."""

    def __init__(self):
        super().__init__(
            4,
            (3,),
            (5, 3, 2, 4),
        )

    def _observation_now(self):
        observation = super()._observation_now()
        broken = ((self.elapsed + self.episode) % 3 == 1) & (self.index == 1)
        observation[:, 0].masked_fill_(broken, NAN)
        return observation

    def _step(self, action):
        successor = super()._step(action)
        broken = (self.index == 2) & (self.elapsed == 2) & (self.episode % 2 == 0)
        reward = torch.where(
            broken.unsqueeze(-1),
            math.inf,
            successor["reward"],
        )
        return successor.set("reward", reward)


def play(*transforms):
    """All observations and rewards of 40 steps, and the env."""
    env = tw.TransformedEnv(Breaks(), *transforms)
    return (*observe(env), env)


def observe(env):
    td = env.reset(seed=0)
    observations = [td["observation"]]
    rewards = []
    for _ in range(40):
        transition, td = env.step(torch.zeros(4, 6))
        successor = transition["next"]
        observations.append(successor["observation"])
        observations.append(td["observation"][successor["done"].squeeze(-1)])
        rewards.append(successor["reward"])
    return torch.cat(observations), torch.stack(rewards)


def test_normalize_observation_counts_the_finite_values_of_steps_and_resets():
    raw, _, _ = play()
    normalized, _, env = play(T.NormalizeObservation())
    assert raw.isnan().any(1).float().mean() > 0.05
    assert torch.equal(normalized.isnan(), raw.isnan())
    assert_statistics(env.transforms[0].statistics, raw.numpy())


def test_normalize_reward_starts_over_after_a_reward_that_is_not_finite():
    _, raw, _ = play()
    env = tw.TransformedEnv(
        Breaks(),
        T.NormalizeReward(gamma=0.9),
    )
    env.reset(seed=0)
    returns = np.zeros((4, 1))
    counted = []
    for reward in raw:
        transition, _ = env.step(torch.zeros(4, 6))
        returns = 0.9 * returns + reward.double().numpy()
        counted.append(returns.copy())
        assert torch.equal(transition["next", "reward"].isfinite(), reward.isfinite())
        returns[transition["next", "done"].numpy()] = 0
        assert_allclose(env.transforms[0].discounted_return, returns, rtol=1e-12)
    counted = np.concatenate(counted)
    finite = counted[np.isfinite(counted)]
    assert len(finite) < len(counted)
    assert_allclose(
        env.transforms[0].statistics.var,
        finite.var(),
        rtol=1e-9,
    )


@pytest.mark.parametrize(
    "value",
    [0.1, 12345.678, -1e6],
)
def test_constant_component_whose_first_value_is_missing_normalizes_to_zero(value):
    statistics = T.RunningMeanStd((1,))
    rows = torch.full((7, 1), value)
    rows[0] = NAN
    for _ in range(200):
        statistics.update(rows)
        normalized = statistics.normalize(rows, 1e-8)
        assert statistics.var >= 0
        assert (normalized[1:] == 0).all()
        assert normalized[0].isnan()
