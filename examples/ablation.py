"""A paper's experiments: variants x envs x seeds of ppo.py, in one figure and one table.

python examples/ablation.py                             the maze: networks, what the agent sees
python examples/ablation.py paper.toml                  the experiments of a file, TOML or YAML
python examples/ablation.py paper.toml --processes 8    flags are stronger than the file

Other flags are those of ppo.py, for all runs. Returns are of the env's own rewards, whatever a
variant makes of them. Writes results.json, table.md and ablation.png into --out. If it is killed,
the same command continues: finished runs are kept, others go on from their last checkpoints.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pkgutil
import threading
from concurrent import futures
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import maze  # noqa: F401  # registers its id
import numpy as np
import ppo
import torch
import tyro
from filelock import FileLock
from matplotlib.figure import Figure
from tyro.conf import Positional, Suppress

import torchwrap as tw
from torchwrap import transforms as T

Flags = dict[str, Any]
Result = dict[str, Any]  # of a run: flags, metrics, curve
Name = tuple[str, str, int]  # of a run: variant, env id, seed


@dataclass
class Args(ppo.Args):
    config: Positional[Path | None] = None  # TOML or YAML, of these flags and the three tables
    out: Path = Path("runs/ablation")
    num_seeds: int = 3  # from `seed` on
    processes: int = 1  # trainings at the same time
    make: str = "torchwrap:make"  # module:function, which may put transforms on an env
    score: str = "eval_mean_return"  # of the table: a number of metrics.json
    # By variant and by env: the flags in which its runs differ
    variants: Suppress[dict[str, Flags]] = field(default_factory=lambda: {"PPO": {}})
    envs: Suppress[dict[str, Flags]] = field(default_factory=lambda: {"CartPole-v1": {}})
    # By env: the scores that count as 0 and as 1 in a mean over all envs
    scales: Suppress[dict[str, list[float]]] = field(default_factory=dict)
    env_id: Suppress[str] = ""
    resume: Suppress[bool] = True


def read(path: Path) -> Flags:
    if path.suffix == ".toml":
        import tomllib  # of Python 3.11

        return tomllib.loads(path.read_text())
    import yaml

    return yaml.safe_load(path.read_text())


def write(path: Path, text: str) -> None:
    """Renames a complete file: it is whole even if the process is killed."""
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


# The experiments without a file


def flat(*args: Any, **kwargs: Any) -> tw.Env:
    return tw.TransformedEnv(tw.make(*args, **kwargs), T.FlattenObservation())


def without_trail(*args: Any, **kwargs: Any) -> tw.Env:
    return tw.make(*args, trail=False, **kwargs)


MAZE = {
    "CNN": {},
    "MLP": {"make": "ablation:flat"},
    "CNN without trail": {"make": "ablation:without_trail"},
}

# Runs


class Run:
    def __init__(self, args: ppo.Args, make: str) -> None:
        self.args = args
        self.make = make
        self.path = args.out / "run.json"
        self.flags = {name: str(value) for name, value in vars(args).items()}
        self.flags["make"] = make
        for name in ("out", "save_every", "tensorboard"):
            del self.flags[name]

    def result(self) -> Result | None:
        """What `train` has written, if it has finished."""
        if not self.path.exists():
            return None
        result = json.loads(self.path.read_text())
        others = dict(result["flags"].items() - self.flags.items())
        if others:
            fault = f"flags must be those of {self.path}, with {others}"
            raise ValueError(f"ablation.py: {fault}. Remove its folder, or choose another --out.")
        return result

    def train(self) -> None:
        """Trains, or continues, unless another command does or has done so."""
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / "lock"), open(out / "log.txt", "a") as log:
            if self.result() is not None:
                return
            with redirect_stdout(log), redirect_stderr(log):
                metrics = ppo.main(self.args, pkgutil.resolve_name(self.make))
            result = {"flags": self.flags, "metrics": metrics, "curve": curve_of(self.args)}
            write(self.path, json.dumps(result))


def curve_of(args: ppo.Args) -> list[list[float | None]]:
    """Of a finished run: env steps, and the mean return of the latest 100 episodes."""
    curve = torch.load(args.out / "agent.pt", weights_only=True)["curve"]
    curve = torch.tensor(curve, dtype=torch.float64)[:, :2]
    if args.num_envs > 100:
        # At first, only short episodes have ended. Envs that started together time out together,
        # so that 100 episodes are of one kind: averaged over a time limit, they are of all kinds.
        limit = tw.make(args.env_id, 1).spec.max_episode_steps or 1
        window = min(-(-limit // args.num_steps), (len(curve) + 1) // 2)
        curve = curve.unfold(0, window, 1).mean(-1)[window - 1 :]
    return [[None if math.isnan(value) else value for value in point] for point in curve.tolist()]


def plan(args: Args) -> dict[Name, Run]:
    shared = {each.name: getattr(args, each.name) for each in fields(ppo.Args)}
    shared["make"] = args.make
    runs = {}
    for variant, of_variant in args.variants.items():
        for env_id, of_env in args.envs.items():
            for seed in range(args.seed, args.seed + args.num_seeds):
                values = shared | (of_env or {}) | (of_variant or {})
                folder = env_id.rpartition(":")[2].replace("/", "-")
                name = f"{variant}-{seed}".replace("/", "-")
                values |= {"env_id": env_id, "seed": seed, "out": args.out / folder / name}
                # TOML's 1e5 is no number of steps, and would raise in a training.
                values = {key: str(v) if isinstance(v, float) else v for key, v in values.items()}
                make = values.pop("make")
                runs[variant, env_id, seed] = Run(ppo.Args(**values), make)
    folders = {str(run.args.out) for run in runs.values()}
    if len(folders) < len(runs):
        raise ValueError(
            f"ablation.py: variants and envs must have folders of their own: {folders}."
        )
    return runs


def end_with_parent() -> None:
    """Ends this process with the one that started it, which may be killed and started again."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_all(runs: dict[Name, Run], processes: int) -> dict[Name, Result]:
    """The results of all runs. Those that have none yet are trained."""
    missing = {name: run for name, run in runs.items() if run.result() is None}
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(processes, context, end_with_parent) as pool:
        trainings = {pool.submit(run.train): name for name, run in missing.items()}
        for number, training in enumerate(futures.as_completed(trainings), 1):
            end = training.exception() or "finished"
            print(f"{number} of {len(missing)}:", *trainings[training], end, flush=True)
    for training in trainings:
        training.result()  # raises if it failed
    return {name: run.result() for name, run in runs.items()}


# Statistics, by the formulas of Agarwal et al., "Deep Reinforcement Learning at the Edge of the
# Statistical Precipice" (2021), and of their library rliable


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean without the lowest and the highest quarter, over the last axis."""
    count = scores.shape[-1]
    ordered = np.sort(scores, -1)
    return ordered[..., count // 4 : count - count // 4].mean(-1)


def interval(scores: np.ndarray, resamples: int = 50_000) -> list[float]:
    """The 95 % interval of `interquartile_mean` for scores `(num_envs, num_seeds)`.

    A percentile bootstrap, stratified: seeds are drawn again, for each env apart.
    """
    rng = np.random.default_rng(0)
    seeds = rng.integers(scores.shape[1], size=(resamples, *scores.shape))
    resampled = np.take_along_axis(scores[np.newaxis], seeds, -1)
    means = interquartile_mean(resampled.reshape(resamples, -1))
    return np.percentile(means, (2.5, 97.5)).tolist()


def estimate(scores: np.ndarray) -> dict[str, Any]:
    mean = interquartile_mean(scores.flatten()).item()
    return {"scores": scores.tolist(), "mean": mean, "interval": interval(scores)}


def summarize(results: dict[Name, Result], args: Args) -> dict[str, Any]:
    """By variant and env, and over all envs if all have a scale."""
    scores = [result["metrics"][args.score] for result in results.values()]
    shape = len(args.variants), len(args.envs), args.num_seeds
    of_variants = np.array(scores, dtype=float).reshape(shape)
    summary = {}
    for variant, rows in zip(args.variants, of_variants):
        columns = dict(zip(args.envs, rows[:, np.newaxis]))
        if args.scales.keys() >= args.envs.keys():
            scales = np.array([args.scales[env_id] for env_id in args.envs])
            low, high = scales.T[:, :, np.newaxis]
            columns["all, scaled"] = (rows - low) / (high - low)
        summary[variant] = {name: estimate(column) for name, column in columns.items()}
    return summary


def to_table(summary: dict[str, Any]) -> str:
    columns = list(next(iter(summary.values())))
    lines = [["variant", *columns], ["---"] * (1 + len(columns))]
    for variant, row in summary.items():
        cells = [variant]
        for each in row.values():
            low, high = each["interval"]
            cells.append(f"{each['mean']:.4g} [{low:.4g}, {high:.4g}]")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(results: dict[Name, Result], args: Args) -> Figure:
    figure = Figure(figsize=(5 * len(args.envs) + 2, 4), layout="constrained")
    panels = figure.subplots(1, len(args.envs), squeeze=False)[0]
    seeds = range(args.seed, args.seed + args.num_seeds)
    for axes, env_id in zip(panels, args.envs):
        for variant in args.variants:
            curves = [results[variant, env_id, seed]["curve"] for seed in seeds]
            steps, returns = np.array(curves, dtype=float).T  # (n, num_seeds) each
            bounds = [interval(point[np.newaxis], 2_000) for point in returns]
            axes.plot(steps[:, 0], interquartile_mean(returns), label=variant)
            axes.fill_between(steps[:, 0], *np.transpose(bounds), alpha=0.2)
        axes.set(title=env_id.rpartition(":")[2], xlabel="env steps", ylabel="return")
    panels[0].legend()
    figure.suptitle(f"Interquartile mean of {len(seeds)} seeds, and its 95 % interval")
    return figure


def main(args: Args) -> dict[str, Any]:
    results = train_all(plan(args), args.processes)
    summary = summarize(results, args)
    table = to_table(summary)
    write(args.out / "results.json", json.dumps(summary, indent=2))
    write(args.out / "table.md", table)
    plot(results, args).savefig(args.out / "ablation.png", dpi=80)
    print(f"{table}\nresults in {args.out}")
    return summary


if __name__ == "__main__":
    args = tyro.cli(Args, default=Args(variants=MAZE, envs={"Maze-v0": {"ent_coef": 0.01}}))
    if args.config is not None:
        args = tyro.cli(Args, default=Args(**read(args.config)))
    main(args)
