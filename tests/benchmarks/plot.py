"""Plots of the figures; the only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .measure import Figures

GLUE = {
    "seven torchwrap-compiled": "torchwrap, compiled",
    "seven torchwrap-eager": "torchwrap, eager",
    "seven sb3": "Stable-Baselines3",
    "seven torchrl": "TorchRL",
}
CARTPOLE = {
    "torchwrap-rollout": "torchwrap, compiled rollout",
    "torchwrap-compiled": "torchwrap, compiled step",
    "gymnax-scan": "gymnax, lax.scan",
    "gymnasium-normalise": "Gymnasium, normalized only",
    "envpool-bare": "EnvPool, no transforms",
    "torchrl": "TorchRL",
}
PPO = {"torchwrap": "torchwrap", "jax": "JAX, jitted", "sb3": "Stable-Baselines3"}
COLORS = {"torchwrap": "C3", "gymnax": "C0", "JAX": "C0", "Stable": "C1", "TorchRL": "C2", "Gymnasium": "C4", "EnvPool": "C5"}


def draw(figures: Figures, path: str) -> None:
    """Plots the cost of transforms, the speed of CartPole and the time PPO takes, with the conditions of the measurement.

    The panel of a suite that was not run stays empty.
    """
    machine = figures["machine"]
    canvas = Figure(figsize=(15, 4.6), layout="constrained")
    canvas.suptitle(conditions(machine), fontsize="medium")
    glue, cartpole, ppo = canvas.subplots(1, 3)
    _lines(glue, figures, "glue", GLUE, "us")
    glue.set(title="A stack of seven transforms\n(lower is better)", ylabel="microseconds added to a step")
    _lines(cartpole, figures, "cartpole", CARTPOLE, "steps_per_second")
    chunk = f"rollout and scan in chunks of {machine['num_steps']} steps"
    cartpole.set(
        title=f"CartPole-v1, normalized, clipped, stacked\n({chunk}; higher is better)", ylabel="env steps per second"
    )
    _bars(ppo, figures)
    other = figures.get("machine of ppo")  # if that suite was run elsewhere
    where = f", on {other['processor'].split(' @')[0]}" if other else ""
    ppo.set(
        title="PPO until CartPole-v1 returns 475\n(median of the seeds; lower is better)",
        xlabel=f"seconds since process start{where}",
    )
    canvas.savefig(path, dpi=120)


def conditions(machine: Mapping[str, Any]) -> str:
    """The conditions of a measurement as two lines of text: machine, instruction set and threads; versions."""
    versions: dict[str, str] = {}
    for found in machine["versions"].values():  # torchwrap's own interpreter is the first
        versions = {**found, **versions}
    libraries = ("torch", "gymnasium", "stable-baselines3", "torchrl", "jax", "gymnax", "envpool")
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}"
    how = f"threads per process: {machine['threads']}, device: {machine['device']}"
    return f"{where}, {how}\n{', '.join(f'{name} {versions[name]}' for name in libraries if name in versions)}"


def draw_learning(figures: Figures, path: str) -> None:
    """Plots one panel per env: the mean return of the latest 100 episodes, one line per seed, and the goal."""
    rows = {key.split("/")[1]: row for key, row in figures.items() if key.startswith("learn/")}
    canvas = Figure(figsize=(15, 3), layout="constrained")
    for axes, (id, row) in zip(canvas.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True):
        for key, one in figures.items():
            if key.startswith(f"learn/{id}/"):
                axes.plot(*zip(*one["curve"], strict=True), label=f"seed {key.split('/')[2]}")
        axes.axhline(row["goal"], color="gray", linestyle="--", label="goal")
        axes.set(title=id, xlabel="env steps")
        axes.locator_params(axis="x", nbins=4)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    canvas.savefig(path, dpi=100)


def _lines(axes: Axes, figures: Figures, suite: str, labels: Mapping[str, str], figure: str) -> None:
    for row, label in labels.items():
        points = sorted(
            (int(key.split("/")[2]), value[figure])
            for key, value in figures.items()
            if key.startswith(f"{suite}/") and _is(key.split("/")[1], row) and value.get(figure, 0) > 0
        )
        if points:
            eager = "--" if label.endswith(("eager", "step")) else "-"
            axes.loglog(*zip(*points, strict=True), eager, marker="o", color=_color(label), label=label)
    axes.set(xlabel="envs")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")


def _is(row: str, name: str) -> bool:
    # The scan with as many steps as the rollout; the longer one is left out.
    return row == name or (name == "gymnax-scan" and row.startswith("gymnax-scan") and not row.endswith("-128"))


def _bars(axes: Axes, figures: Figures) -> None:
    seconds = {label: figures.get(f"ppo/{name}/median", {}).get("wall_seconds_to_target") for name, label in PPO.items()}
    found = {label: value for label, value in seconds.items() if value is not None}
    bars = axes.barh(list(found), list(found.values()), color=[_color(label) for label in found])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()


def _color(label: str) -> str:
    return next(color for name, color in COLORS.items() if label.startswith(name))
