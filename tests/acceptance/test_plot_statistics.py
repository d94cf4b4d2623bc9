"""examples/plot_statistics.py: the numbers in a figure."""

import gymnasium

from torchwrap.testing import ScriptedEnv


def test_entries_of_a_dict_have_plots():
    from plot_statistics import plot_statistics  # with Matplotlib, which takes a second

    spaces = gymnasium.spaces
    space = spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(3))
    env = ScriptedEnv(2, observation_space=space)
    figure = plot_statistics(env, env.reset())
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["observation.a", "observation.b"]
