"""examples/plot_statistics.py: the numbers in a figure."""

import gymnasium
import numpy as np
import pytest
from plot_statistics import plot_statistics

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def test_figure_shows_statistics_returns_and_observations():
    transforms = [T.RecordEpisodeStatistics(), T.NormalizeObservation()]
    env = tw.TransformedEnv(ScriptedEnv(2, episode_lengths=2), *transforms)
    data = tw.rollout(env, None, 6)
    figure = plot_statistics(env, data)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "RecordEpisodeStatistics",
        "NormalizeObservation.statistics",
        "observation",
    ]
    returns, moments, observations = figure.axes
    assert returns.lines[0].get_ydata().tolist() == [3] * 6
    assert "of 6 episodes" in returns.get_xlabel()

    statistics = env.transforms[1].statistics
    points, _, (bars,) = moments.containers[0].lines
    assert points.get_ydata() == pytest.approx(statistics.mean.numpy())
    heights = np.diff(bars.get_segments()[0][:, 1])
    std = statistics.var[0].sqrt().item()
    assert heights == pytest.approx(2 * std)

    ends = []
    for lines in observations.collections:
        ends.append([segment[:, 1] for segment in lines.get_segments()])
    values = data["observation"].flatten(0, -2).numpy()
    expected = np.percentile(values, (0, 100, 25, 75), axis=0)
    assert pytest.approx(expected, abs=1e-6) == np.concatenate(ends, 1).T


def test_entries_of_a_dict_have_plots():
    spaces = gymnasium.spaces
    space = spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(3))
    env = ScriptedEnv(2, observation_space=space)
    figure = plot_statistics(env, env.reset())
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["observation.a", "observation.b"]
