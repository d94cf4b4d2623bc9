"""Plots of the figures, drawn again by `python -m tests.benchmarks.plot <JSON file> <PNG file>`.

It is the only file that imports matplotlib.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .measure import Figures
from .report import conditions, settings, within, words

GLUE = {
    "seven torchwrap-compiled": "torchwrap, compiled",
    "seven torchwrap-torch.compile": "torchwrap, torch.compile",
    "seven torchwrap-eager": "torchwrap, eager",
    "seven sb3": "Stable-Baselines3",
    "seven torchrl": "TorchRL",
}
CARTPOLE = {
    "torchwrap-rollout": "torchwrap, compiled rollout",
    "torchwrap-compiled": "torchwrap, compiled step",
    "torchwrap-torch.compile": "torchwrap, torch.compile",
    "gymnax-scan": "gymnax, lax.scan",
    "gymnasium-normalise": "Gymnasium, normalized only",
    "envpool-bare": "EnvPool, no transforms",
    "torchrl": "TorchRL",
}
PPO = {"torchwrap": "torchwrap", "sb3": "Stable-Baselines3"}
STYLES = {"eager": ":", "step": "--", "torch.compile": "-."}
COLORS = {
    "torchwrap": "C3",
    "gymnax": "C0",
    "Stable": "C1",
    "TorchRL": "C2",
    "Gymnasium": "C4",
    "EnvPool": "C5",
}


def draw(figures: Figures, path: str) -> None:
    """Plots the cost of transforms and the speed of CartPole in each setting, and the time of PPO.

    The panel of a suite that was not run stays empty.
    """
    found = settings(figures, "glue/") or settings(figures, "cartpole/") or [""]
    canvas = Figure(figsize=(2.5 + 3.7 * max(len(found), 2), 9.5), layout="constrained")
    canvas.suptitle(conditions(figures["machine"]), fontsize="medium")
    names = [[f"{suite} {setting}" for setting in found] for suite in ("glue", "cartpole")]
    panels = canvas.subplot_mosaic([*names, ["ppo"] * len(found)], height_ratios=(4, 4, 1))
    glue, cartpole = ([panels[name] for name in row] for row in names)
    _settings(glue, figures, found, "glue", GLUE, "us")
    glue[0].set_ylabel(
        "A stack of seven transforms:\nmicroseconds added to a step\n(lower is better)"
    )
    _settings(cartpole, figures, found, "cartpole", CARTPOLE, "steps_per_second")
    chunk = f"rollouts and scans of {figures['machine']['num_steps']} steps"
    cartpole[0].set_ylabel(
        f"CartPole-v1, normalized, clipped,\nstacked ({chunk}):\nenv steps per second (higher is better)"
    )
    _bars(panels["ppo"], figures)
    canvas.savefig(path, dpi=100)


def draw_scores(
    runs: Mapping[str, Mapping[str, Any]], published: Mapping[str, Any], path: str
) -> None:
    """Plots one panel per env: one line per seed of each trainer, and the published mean and deviation as a band."""
    canvas = Figure(figsize=(12, 6), layout="constrained")
    for axes, (env, score) in zip(canvas.subplots(2, 3).flat, published.items(), strict=True):
        for trainer, label in (
            ("sb3", "Stable-Baselines3, tuned"),
            ("torchwrap", "torchwrap's examples/ppo.py"),
        ):
            for key, run in runs.items():
                if key.startswith(f"{trainer}/{env}/"):
                    steps, returns = zip(*run["curve"], strict=True)
                    axes.plot(steps, returns, color=_color(label), label=label)
        if score:
            low, high = score.mean - score.deviation, score.mean + score.deviation
            axes.axhspan(low, high, color="C7", alpha=0.3, label="CleanRL's score")
        axes.set(title=env, xlabel="env steps")
        axes.locator_params(axis="x", nbins=4)
        axes.grid(alpha=0.3)
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if named:
            axes.legend(named.values(), named, fontsize="small")
    canvas.savefig(path, dpi=100)


def draw_device(found: Mapping[str, Any], path: str) -> None:
    """Plots what `tests.cuda_day` has found: seven transforms, CartPole, PPO, and how many tests passed."""
    figures, steps = {}, found["steps"]
    for step in steps.values():
        figures.update(
            {key: row for key, row in step.get("figures", {}).items() if isinstance(row, dict)}
        )
    floor = steps.get("floor", {}).get("figures", {})
    canvas = Figure(figsize=(18, 4.8), layout="constrained")
    canvas.suptitle(f"{floor.get('name', found['device'])}, torch {floor.get('torch', '?')}")
    glue, cartpole, ppo, tests = canvas.subplots(1, 4)
    _lines(glue, figures, "glue", GLUE, "whole_us")
    for name, label in (("launch_us", "a launch"), ("replay_us", "the replay of a graph")):
        if name in floor:
            glue.axhline(
                floor[name],
                color="gray",
                linestyle="--" if name == "launch_us" else ":",
                label=label,
            )
    glue.set(title="Seven transforms: microseconds per step", xlabel="envs")
    _lines(
        cartpole,
        figures,
        "cartpole",
        {**CARTPOLE, "torchwrap-eager": "torchwrap, eager"},
        "of_copy",
    )
    cartpole.set(
        title="CartPole-v1, normalized, clipped, stacked:\nrequired traffic over copy bandwidth",
        xlabel="envs",
    )
    for axes in (glue, cartpole):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    learned = {
        key.removeprefix("ppo/"): step["figures"]
        for key, step in steps.items()
        if key.startswith("ppo/") and "figures" in step
    }
    speeds = ppo.bar(
        list(learned), [row["steps_per_second_steady"] or 0 for row in learned.values()], color="C3"
    )
    ppo.bar_label(
        speeds, [f"return {row['final_mean_return'] or 0:.0f}" for row in learned.values()]
    )
    ppo.set(title="examples/ppo.py: env steps per second")
    counts = Counter()
    for step in steps.values():
        counts.update({name: int(number) for name, number in step.get("counts", {}).items()})
    tests.bar_label(tests.bar(list(counts), list(counts.values()), color="C7"))
    tests.set(title="CUDA tests")
    canvas.savefig(path, dpi=100)


def _settings(
    row: Sequence[Axes],
    figures: Figures,
    found: Sequence[str],
    suite: str,
    labels: Mapping[str, str],
    figure: str,
) -> None:
    """One panel per setting, all with the same axes, and one legend."""
    for axes, setting in zip(row, found, strict=True):
        if axes is not row[0]:
            axes.sharex(row[0])
            axes.sharey(row[0])
        _lines(axes, within(figures, setting), suite, labels, figure)
        axes.set(title=words([setting]) if setting else "", xlabel="envs")
        axes.grid(alpha=0.3)
    if row[-1].lines:
        row[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _lines(
    axes: Axes, figures: Figures, suite: str, labels: Mapping[str, str], figure: str
) -> None:
    for row, label in labels.items():
        points = sorted(
            (int(key.split("/")[2]), value[figure])
            for key, value in figures.items()
            if key.startswith(f"{suite}/")
            and _is(key.split("/")[1], row)
            and value.get(figure, 0) > 0
        )
        if points:
            style = next((style for end, style in STYLES.items() if label.endswith(end)), "-")
            axes.loglog(
                *zip(*points, strict=True), style, marker="o", color=_color(label), label=label
            )


def _is(row: str, name: str) -> bool:
    # The scan with as many steps as the rollout; the longer one is left out.
    return row == name or (
        name == "gymnax-scan" and row.startswith("gymnax-scan") and not row.endswith("-128")
    )


def _bars(axes: Axes, figures: Figures) -> None:
    medians = {
        key.split("/")[1]: row
        for key, row in figures.items()
        if key.startswith("ppo/") and "/median/" in key
    }
    seconds = {
        label: medians.get(name, {}).get("wall_seconds_to_target") for name, label in PPO.items()
    }
    found = {label: value for label, value in seconds.items() if value is not None}
    if not found:
        return axes.set_axis_off()
    bars = axes.barh(list(found), list(found.values()), color=[_color(label) for label in found])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    where = figures.get("machine of ppo", figures["machine"])[
        "processor"
    ]  # it may have been measured on another one
    axes.set(
        title="PPO until CartPole-v1 returns 475 (lower is better)",
        xlabel=f"seconds since process start, median of the seeds; {where}, {words(settings(figures, 'ppo/'))}",
    )


def _color(label: str) -> str:
    return next(color for name, color in COLORS.items() if label.startswith(name))


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
