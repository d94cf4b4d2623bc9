"""RescaleObservation against Gymnasium's wrapper. RescaleAction is in test_action.py."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces, wrappers
from oracles import RandomEnv, assert_agrees, make

from torchwrap import transforms as T

# Gymnasium warns about the bounds it rounds to the space's dtype.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
INF = np.inf
BOX = spaces.Box(-2, 7, (3,), np.float32)
CASES = [
    (BOX, -1.0, 1.0),
    (BOX, np.float32([-1, 0, 5]), np.float32([0, 1, 1000])),
    (spaces.Box(np.float32([-2, 0.1, 5]), np.float32([2, 0.5, 1000])), 0.0, 1.0),
    (spaces.Box(0, 255, (2, 2), np.float64), 0.0, 1.0),
    (spaces.Box(np.float32([0.1, -1e-3, -0.7, 3]), np.float32([0.7, 1e3, 1e-5, 3.1])), -0.3, 0.9),
    (spaces.Box(-1, 1, (), np.float32), 0.0, 3.0),
    (spaces.Box(np.float32([-INF, 0, -1]), np.float32([1, INF, 1])), np.float32([-INF, 3, 0]), np.float32([5, INF, 1])),
    (spaces.Box(-INF, INF, (2,), np.float32), -INF, INF),
]


def test_rescale_observation_equals_gymnasiums():
    for space, low, high in CASES:
        oracles = [wrappers.RescaleObservation(RandomEnv(space), low, high) for _ in range(3)]
        assert_agrees(make(space, T.RescaleObservation(low, high)), oracles)
