"""examples/plot_statistics.py: the numbers in a figure."""

import gymnasium
import numpy as np
import pytest
import torch
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


def test_components_that_never_change_are_red():
    env = tw.TransformedEnv(ScriptedEnv(2, observation_shape=(1,)), T.NormalizeObservation())
    env.transforms[0].statistics.update(torch.ones(3, 1))
    (axes,) = plot_statistics(env).axes
    unchanged = axes.containers[1].lines[0]
    assert unchanged.get_xdata() == [0]
    assert unchanged.get_color() == "red"


@pytest.mark.parametrize(
    ("env", "num_rows", "name"),
    [
        pytest.param(ScriptedEnv(2, (0,)), 2, "observation", id="observation of size 0"),
        pytest.param(ScriptedEnv(2, (3,)), 0, "observation", id="no rows"),
        pytest.param(
            tw.TransformedEnv(ScriptedEnv(2, (0,)), T.NormalizeObservation()),
            None,
            "NormalizeObservation.statistics",
            id="statistics of size 0",
        ),
    ],
)
def test_plot_of_no_values_is_refused_by_its_name(env, num_rows, name):
    td = None if num_rows is None else env.reset()[:num_rows]
    with pytest.raises(ValueError, match=name):
        plot_statistics(env, td)


def test_env_without_statistics_is_refused():
    with pytest.raises(ValueError, match="td"):
        plot_statistics(ScriptedEnv(2))
