"""NaN and infinity in running statistics, against NumPy."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

NAN = math.nan


class Breaks(ScriptedEnv):
    """Some steps of env 2 reward infinity."""

    def __init__(self):
        super().__init__(
            4,
            (3,),
            (5, 3, 2, 4),
        )

    def _step(self, action):
        successor = super()._step(action)
        broken = (self.index == 2) & (self.elapsed == 2) & (self.episode % 2 == 0)
        reward = torch.where(
            broken.unsqueeze(-1),
            math.inf,
            successor["reward"],
        )
        return successor.set("reward", reward)


def test_normalize_reward_starts_over_after_a_reward_that_is_not_finite():
    plain = Breaks()
    plain.reset(seed=0)
    env = tw.TransformedEnv(
        Breaks(),
        T.NormalizeReward(gamma=0.9),
    )
    env.reset(seed=0)
    returns = np.zeros((4, 1))
    counted = []
    for _ in range(40):
        raw, _ = plain.step(torch.zeros(4, 6))
        reward = raw["next", "reward"]
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
