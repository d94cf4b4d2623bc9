"""`torchwrap.plotting`: the numbers that a figure shows."""

import gymnasium
import numpy as np
import pytest
import torch

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.plotting import plot_statistics
from torchwrap.testing import ScriptedEnv


def test_figure_shows_statistics_returns_and_observations():
    env = tw.TransformedEnv(
        ScriptedEnv(2, episode_lengths=2), T.RecordEpisodeStatistics(), T.NormalizeObservation()
    )
    data, _ = tw.rollout(env, None, 6)
    returns, learned, observations = plot_statistics(env, data).axes
    statistics = env.transforms[1].statistics
    assert (
        returns.lines[0].get_ydata().tolist() == [3] * 6 and "of 6 episodes" in returns.get_xlabel()
    )
    points, _, (bars,) = learned.containers[0].lines
    assert points.get_ydata() == pytest.approx(statistics.mean.numpy())
    assert np.diff(bars.get_segments()[0][:, 1]) == pytest.approx(
        2 * statistics.var[0].sqrt().item()
    )
    values = data["observation"].flatten(0, -2).numpy()
    drawn = np.concatenate(
        [[segment[:, 1] for segment in lines.get_segments()] for lines in observations.collections],
        1,
    ).T
    assert drawn == pytest.approx(np.percentile(values, (0, 100, 25, 75), axis=0), abs=1e-6)


def test_components_that_never_change_are_red_and_entries_of_a_dict_have_plots():
    space = gymnasium.spaces.Dict(
        a=gymnasium.spaces.Box(0, 1, (2,)), b=gymnasium.spaces.Discrete(3)
    )
    env = ScriptedEnv(2, observation_space=space)
    assert [axes.get_title() for axes in plot_statistics(env, env.reset()).axes] == [
        "observation.a",
        "observation.b",
    ]
    env = tw.TransformedEnv(ScriptedEnv(2, observation_shape=(1,)), T.NormalizeObservation())
    env.transforms[0].statistics.update(torch.ones(3, 1))
    colors = [
        bars.lines[0].get_color()
        for bars in plot_statistics(env).axes[0].containers
        if len(bars.lines[0].get_xdata())
    ]
    assert colors == ["red"]
    with pytest.raises(ValueError, match="has no running statistics to plot: pass td"):
        plot_statistics(ScriptedEnv(2))
