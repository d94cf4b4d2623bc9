"""Whole jobs, written from the README, the guides and the docstrings alone.

Comments compare the numbers of lines. Those of Isaac Lab are from memory and were not run.
"""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest
import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box
from helpers import load_example
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)

import torchwrap as tw
from torchwrap import transforms as T


class Drift(FuncEnv):
    """The README's, with a mass per episode, a level per env, a reset option, and infos."""

    observation_space = Box(-9, 9, (1,))
    action_space = Box(-1, 1, (1,))

    def initial(self, rng, params=None, low=0.0):
        level = 1.0 if params is None else params["level"]
        start = tw.random.uniform(rng, 0, 1, (1,))
        return {
            "x": low + level * start,
            "mass": tw.random.uniform(rng.fold_in(1), 1, 2),
        }

    def transition(self, state, action, rng, params=None):
        return {
            "x": state["x"] + action / state["mass"],
            "mass": state["mass"],
        }

    def observation(self, state, rng, params=None):
        return state["x"]

    def reward(self, state, action, next_state, rng, params=None):
        return -next_state["x"].abs().sum()

    def terminal(self, state, rng, params=None):
        return (state["x"].abs() > 3).all()

    def state_info(self, state, params=None):
        distance = state["x"].abs()
        return {
            "is_success": (distance < 0.5).all(),
            "distance": distance.sum(),
        }


@pytest.fixture(autouse=True)
def registered(registry):
    tw.register("Drift-v0", Drift, max_episode_steps=5)


HALF = torch.arange(4) < 2
GIVEN = torch.tensor([[1.0], [1.5], [0.0], [0.0]])


@pytest.fixture
def stacked():
    transforms = (
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.FrameStackObservation(3),
    )
    env = tw.TransformedEnv(tw.make("Drift-v0", 4), *transforms)
    env.reset(seed=0)
    return env


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_reset_options_of_rows_reach_gymnasium(mode):
    with tw.make("CartPole-v1", 2, backend="gymnasium", vectorization_mode=mode) as env:
        env.reset(seed=0)
        for row, low in enumerate((0.01, 0.02)):
            options = {"low": low, "high": low}
            td = env.reset(mask=torch.arange(2) == row, options=options)
        expected = np.tile([[0.01], [0.02]], 4)
        assert td["observation"].numpy() == pytest.approx(expected)


# 1 line, `python examples/ppo.py --env-id own:Own-v0 --metrics is_success max`; SB3: 1.
@pytest.mark.full
def test_ppo_of_an_own_env(tmp_path, monkeypatch):
    code = """
        import torchwrap, test_jobs
        torchwrap.register("Own-v0", test_jobs.Drift, max_episode_steps=8)
    """
    (tmp_path / "own.py").write_text(inspect.cleandoc(code))
    monkeypatch.syspath_prepend(tmp_path)
    ppo = load_example("ppo")
    small = ppo.Args(
        num_envs=4,
        num_steps=16,
        total_timesteps=128,
        out=tmp_path,
        tensorboard=True,
        num_threads=torch.get_num_threads(),
    )
    given = ["--env-id", "own:Own-v0", "--metrics", "is_success", "max"]
    ppo.main(tyro.cli(ppo.Args, args=given, default=small))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert 0 <= metrics["final_mean_is_success"] <= 1
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("charts/is_success")
    assert [event.step for event in events] == [64, 128]
    assert all(0 <= event.value <= 1 for event in events)
