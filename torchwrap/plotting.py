"""plot_statistics: running statistics, observations and episode returns as a figure of matplotlib (extra `plot`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from torchwrap import spaces
from torchwrap.env import Env
from torchwrap.statistics import RunningMeanStd
from torchwrap.transforms.episode import RecordEpisodeStatistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_statistics(env: Env, td: TensorDictBase | None = None) -> Figure:
    """Draws what an env has learned and recorded: is the normalization sane, and do returns rise?

    There is one plot per `RunningMeanStd`, with mean and standard deviation of each component, red if it has never changed;
    one per `RecordEpisodeStatistics`, with the returns of the latest episodes, oldest first; and one per entry of the
    observations in `td`, with median, quartiles and range of each component, mostly between -3 and 3 if they are normalized.

    Args:
        env: the env.
        td: a root, or transitions of a `Collector`. None draws no observations.

    >>> import torchwrap as tw; from torchwrap import transforms as T
    >>> env = tw.TransformedEnv(tw.make("CartPole-v1", 8), T.RecordEpisodeStatistics(), T.NormalizeObservation())
    >>> data, td = tw.rollout(env, None, 50)
    >>> figure = plot_statistics(env, data)  # figure.savefig("statistics.png")
    >>> [axes.get_title() for axes in figure.axes]
    ['RecordEpisodeStatistics', 'NormalizeObservation.statistics', 'observation']
    """
    if not isinstance(env, Env):
        raise TypeError(f"plot_statistics needs an Env, but got {type(env).__name__}.")
    from matplotlib.figure import Figure  # an optional dependency

    parts: list[tuple[str, Any]] = []
    for name, module in env.named_modules():
        if isinstance(module, RunningMeanStd | RecordEpisodeStatistics):
            parts.append(
                (
                    ".".join(part for part in name.split(".") if part not in ("env", "transforms")),
                    module,
                )
            )
    if td is not None:
        for path, leaf in spaces.leaves(env.single_observation_space):
            values = (
                spaces.at(td["observation"], path)
                .double()
                .cpu()
                .reshape(-1, max(1, math.prod(leaf.shape or ())))
            )
            parts.append((".".join(["observation", *map(str, path)]), values))
    if not parts:
        raise ValueError(
            f"{env!r} has no running statistics to plot: pass td to plot its observations."
        )
    figure = Figure(figsize=(8, 2.6 * len(parts)), layout="constrained")
    for axes, (title, part) in zip(
        figure.subplots(len(parts), squeeze=False)[:, 0], parts, strict=True
    ):
        axes.set(title=title, xlabel="component")
        if isinstance(part, RecordEpisodeStatistics):
            axes.plot(part.return_queue.cpu(), ".")
            axes.set(xlabel=f"latest of {part.episode_count:,} episodes", ylabel="return")
        elif isinstance(part, RunningMeanStd):
            mean, std = part.mean.flatten().cpu(), part.var.sqrt().flatten().cpu()
            for kept, color in ((std > 0, "C0"), (std == 0, "red")):
                axes.errorbar(
                    torch.arange(len(mean))[kept], mean[kept], std[kept], fmt="o", color=color
                )
            axes.set(ylabel=f"mean, std of {int(part.count.max()):,}")
        else:
            low, first, median, third, high = np.quantile(part, (0, 0.25, 0.5, 0.75, 1), axis=0)
            axes.vlines(range(len(median)), low, high, color="C7")
            axes.vlines(range(len(median)), first, third, color="C0", linewidth=4)
            axes.plot(median, "k_")
            axes.set(ylabel="range, quartiles, median")
    return figure
