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
    "CleanRL": "C0",
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
    stack = f"CartPole-v1, normalized, clipped,\nstacked ({chunk})"
    cartpole[0].set_ylabel(f"{stack}:\nenv steps per second (higher is better)")
    _bars(panels["ppo"], figures)
    canvas.savefig(path, dpi=100)


def draw_scores(runs: Mapping[str, Mapping[str, Any]], tasks: Mapping[str, Any], path: str) -> None:
    """Plots one panel per env: a line per seed and trainer, and the published score as a band."""
    shown = [env for env in tasks if any(f"/{env}/" in key for key in runs)]
    num_rows = -(-len(shown) // 4)
    canvas = Figure(figsize=(14, 3 * num_rows), layout="constrained")
    panels = list(canvas.subplots(num_rows, 4).flat)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    named: dict[str, Any] = {}
    for axes, env in zip(panels, shown, strict=False):
        for trainer, label in (
            ("sb3", "Stable-Baselines3, the zoo's hyperparameters"),
            ("cleanrl", "CleanRL's hyperparameters, in ppo.py"),
            ("torchwrap", "torchwrap's ppo.py"),
        ):
            for key, run in runs.items():
                if key.startswith(f"{trainer}/{env}/"):
                    steps, returns = zip(*run["curve"], strict=True)
                    axes.plot(steps, returns, color=_color(label), label=label)
        score = tasks[env].published
        if score:
            low = score.mean - score.deviation
            high = score.mean + score.deviation
            axes.axhspan(low, high, color="C7", alpha=0.3, label="CleanRL's published score")
        axes.set(title=env, xlabel="env steps")
        axes.locator_params(axis="x", nbins=4)
        axes.grid(alpha=0.3)
        named.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    canvas.legend(named.values(), named, loc="outside lower center", ncols=len(named))
    canvas.savefig(path, dpi=100)


def draw_device(found: Mapping[str, Any], path: str) -> None:
    """Plots the figures of `tests.cuda_day`: seven transforms, CartPole, PPO, and its tests."""
    steps = found["steps"]
    figures = {}
    for step in steps.values():
        rows = step.get("figures", {})
        figures.update({key: row for key, row in rows.items() if isinstance(row, dict)})
    floor = steps.get("floor", {}).get("figures", {})
    canvas = Figure(figsize=(18, 4.8), layout="constrained")
    canvas.suptitle(f"{floor.get('name', found['device'])}, torch {floor.get('torch', '?')}")
    glue, cartpole, ppo, tests = canvas.subplots(1, 4)
    _lines(glue, figures, "glue", GLUE, "whole_us")
    for name, label, style in (
        ("launch_us", "a launch", "--"),
        ("replay_us", "the replay of a graph", ":"),
    ):
        if name in floor:
            glue.axhline(floor[name], color="gray", linestyle=style, label=label)
    glue.set(title="Seven transforms: microseconds per step", xlabel="envs")
    labels = {**CARTPOLE, "torchwrap-eager": "torchwrap, eager"}
    _lines(cartpole, figures, "cartpole", labels, "of_copy")
    title = "CartPole-v1, normalized, clipped, stacked:\nrequired traffic over copy bandwidth"
    cartpole.set(title=title, xlabel="envs")
    for axes in (glue, cartpole):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    learned = {}
    for key, step in steps.items():
        if key.startswith("ppo/") and "figures" in step:
            learned[key.removeprefix("ppo/")] = step["figures"]
    speeds = [row["steps_per_second_steady"] or 0 for row in learned.values()]
    returns = [f"return {row['final_mean_return'] or 0:.0f}" for row in learned.values()]
    ppo.bar_label(ppo.bar(list(learned), speeds, color="C3"), returns)
    ppo.set(title="examples/ppo.py: env steps per second")
    counts = Counter()
    for step in steps.values():
        for name, number in step.get("counts", {}).items():
            counts[name] += int(number)
    bars = tests.bar(list(counts), list(counts.values()), color="C7")
    tests.bar_label(bars)
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
        points = []
        for key, value in figures.items():
            if not key.startswith(f"{suite}/"):
                continue
            _, name, num_envs = key.split("/")[:3]
            if _is(name, row) and value.get(figure, 0) > 0:
                points.append((int(num_envs), value[figure]))
        if points:
            num_envs, values = zip(*sorted(points), strict=True)
            styles = [style for end, style in STYLES.items() if label.endswith(end)]
            style = styles[0] if styles else "-"
            axes.loglog(num_envs, values, style, marker="o", color=_color(label), label=label)


def _is(row: str, name: str) -> bool:
    if name == "gymnax-scan":  # with as many steps as the rollout
        return row.startswith(name) and not row.endswith("-128")
    return row == name


def _bars(axes: Axes, figures: Figures) -> None:
    medians = {
        key.split("/")[1]: row
        for key, row in figures.items()
        if key.startswith("ppo/") and "/median/" in key
    }
    found = {}
    for name, label in PPO.items():
        seconds = medians.get(name, {}).get("wall_seconds_to_target")
        if seconds is not None:
            found[label] = seconds
    if not found:
        return axes.set_axis_off()
    colors = [_color(label) for label in found]
    bars = axes.barh(list(found), list(found.values()), color=colors)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    machine = figures.get("machine of ppo", figures["machine"])  # it may be another one
    where = f"{machine['processor']}, {words(settings(figures, 'ppo/'))}"
    axes.set(
        title="PPO until CartPole-v1 returns 475 (lower is better)",
        xlabel=f"seconds since process start, median of the seeds; {where}",
    )


def _color(label: str) -> str:
    return next(color for name, color in COLORS.items() if label.startswith(name))


if __name__ == "__main__":
    source, target = sys.argv[1:]
    draw(json.loads(Path(source).read_text()), target)
