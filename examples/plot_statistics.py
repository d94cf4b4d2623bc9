"""plot_statistics: running statistics, episode returns and observations as a figure, to copy.

    figure = plot_statistics(env, td)
    figure.savefig("statistics.png")

It shows whether the normalization is sane and whether returns rise. It needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from torch import Tensor

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.statistics import RunningMeanStd


def plot_statistics(env: tw.Env, td: TensorDictBase | None = None) -> Figure:
    """Draws one plot per `RunningMeanStd`, `RecordEpisodeStatistics` and entry of the observations.

    Args:
        env: the env.
        td: a root, or transitions of a `Collector`. None draws no observations.
    """
    plots = []
    for path, module in env.named_modules():
        names = [name for name in path.split(".") if name not in ("env", "transforms")]
        if isinstance(module, RunningMeanStd):
            refuse_empty(names, module.mean)
            plots.append((names, plot_moments, module))
        elif isinstance(module, T.RecordEpisodeStatistics):
            plots.append((names, plot_returns, module))
    if td is not None:
        observation = td.select("observation")
        for key, value in observation.items(True, True):
            names = [key] if isinstance(key, str) else key
            refuse_empty(names, value)
            values = value.double().cpu().reshape(observation.numel(), -1)
            plots.append((names, plot_range, values))
    if not plots:
        fault = f"env must have running statistics, got {env!r}"
        raise ValueError(f"plot_statistics: {fault}. Pass td to plot its observations.")
    figure = Figure(figsize=(8, 2.6 * len(plots)), layout="constrained")
    panels = figure.subplots(len(plots), squeeze=False).flat
    for axes, (names, plot, values) in zip(panels, plots):
        axes.set(title=".".join(names), xlabel="component")
        plot(axes, values)
    return figure


def refuse_empty(names: Sequence[str], values: Tensor) -> None:
    if values.numel() == 0:
        fault = f"{'.'.join(names)} must have values, got shape {tuple(values.shape)}"
        raise ValueError(f"plot_statistics: {fault}.")


def plot_moments(axes: Axes, statistics: RunningMeanStd) -> None:
    """Means and standard deviations; red for a component that has never changed."""
    mean = statistics.mean.flatten().cpu()
    std = statistics.var.sqrt().flatten().cpu()
    components = torch.arange(len(mean))
    for rows, color in ((std > 0, "C0"), (std == 0, "red")):
        axes.errorbar(components[rows], mean[rows], std[rows], fmt="o", color=color)
    axes.set(ylabel=f"mean, std of {int(statistics.count.max()):,}")


def plot_returns(axes: Axes, statistics: T.RecordEpisodeStatistics) -> None:
    """Returns of the latest episodes, oldest first."""
    axes.plot(statistics.return_queue.cpu(), ".")
    axes.set(xlabel=f"latest of {statistics.episode_count:,} episodes", ylabel="return")


def plot_range(axes: Axes, values: Tensor) -> None:
    """Medians, quartiles and ranges; mostly between -3 and 3 if normalized."""
    quantiles = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    low, first, median, third, high = values.quantile(quantiles, dim=0)
    components = range(len(median))
    axes.vlines(components, low, high, color="C7")
    axes.vlines(components, first, third, color="C0", linewidth=4)
    axes.plot(median, "k_")
    axes.set(ylabel="range, quartiles, median")
