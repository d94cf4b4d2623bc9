"""Returns of PPO on MuJoCo after a million steps, beside those that CleanRL publishes and those of SB3's tuned PPO here.

python -m tests.benchmarks.scores                                     trains what is missing, one run after the other
python -m tests.benchmarks.scores --env-id Hopper-v5 --seed 1         this run again
python -m tests.benchmarks.scores --trainer sb3 --env-id Hopper-v5    three runs of Stable-Baselines3 again
python -m tests.benchmarks.scores --show                              nothing: only draws and prints what there is

It writes examples/results/ppo_mujoco.json after each run, and ppo_mujoco.png at the end.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from .measure import ROOT, Case, Options, ask, machine

FILE = ROOT / "examples" / "results" / "ppo_mujoco.json"
SEEDS = (1, 2, 3)


class Score(NamedTuple):
    mean: float
    deviation: float


# The last 100 episodes of three seeds: docs/benchmark of CleanRL at the tag pr-424, ppo_continuous_action.py on the v4 of each
# env. It has no score for Ant.
PUBLISHED = {
    "Hopper-v5": Score(2382.9, 271.7),
    "Walker2d-v5": Score(2288.0, 571.8),
    "HalfCheetah-v5": Score(1442.6, 46.0),
    "InvertedPendulum-v5": Score(963.1, 22.2),
    "Ant-v5": None,
    "Humanoid-v5": Score(716.1, 49.1),
}
TRAINERS = {"torchwrap": tuple(PUBLISHED), "sb3": ("Hopper-v5", "HalfCheetah-v5")}
"""The envs of each."""

Runs = dict[str, dict[str, Any]]
"""`{"<trainer>/<env>/<seed>": {figure: value}}`."""


def train(trainer: str, env: str, seed: int) -> dict[str, Any]:
    """A run in a process of its own, on one thread, and the CPU seconds of that process and its children."""
    ours = {"compiled": True} if trainer == "torchwrap" else {}
    before = sum(os.times()[2:4])
    run = ask(Case(trainer, "learn", {"id": env, "seed": seed, **ours}), Options())
    return {**run, "cpu_seconds": sum(os.times()[2:4]) - before}


def thin(curve: Sequence[Sequence[float]], points: int = 64) -> list[list[float]]:
    """At most so many points of env steps and mean return, at equal distances from the last one backwards."""
    every = -(-len(curve) // points)
    return [[steps, round(mean, 1)] for steps, mean, *_ in curve[::-1][::every][::-1]]


def at(run: dict[str, Any], env_steps: float) -> float:
    """The return at the last point of a curve that is not later, or at the first one."""
    return next(
        (mean for steps, mean in reversed(run["curve"]) if steps <= env_steps), run["curve"][0][1]
    )


def speed(runs: Sequence[dict[str, Any]]) -> float:
    """Env steps per CPU second, in the median of the runs that know theirs; 0 if none does."""
    found = [run["env_steps"] / run["cpu_seconds"] for run in runs if "cpu_seconds" in run]
    return statistics.median(found) if found else 0.0


def show(runs: Runs) -> str:
    """A row per env and trainer: the score, that of each seed, the published one, the one at equal CPU seconds, the speed."""
    lines = [
        "| env | trainer | score | of each seed | CleanRL's | at equal CPU seconds | env steps per CPU s |"
    ]
    lines.append("|" + "---|" * 7)
    for env, published in PUBLISHED.items():
        of_env = {
            trainer: [runs[key] for key in sorted(runs) if key.startswith(f"{trainer}/{env}/")]
            for trainer in TRAINERS
        }
        speeds = {trainer: speed(found) for trainer, found in of_env.items()}
        seconds = (
            min(found[0]["env_steps"] / speeds[trainer] for trainer, found in of_env.items())
            if all(speeds.values())
            else 0
        )
        for trainer, found in of_env.items():
            if not found:
                continue
            seeds = [run["final_mean_return"] for run in found]
            cells = [env, trainer, spread(seeds), " / ".join(f"{score:,.0f}" for score in seeds)]
            cells.append(f"{published.mean:,.0f} ± {published.deviation:,.0f}" if published else "")
            earlier = [at(run, seconds * speeds[trainer]) for run in found] if seconds else []
            cells.append(f"{spread(earlier)} after {seconds:,.0f} s" if earlier else "")
            cells.append(f"{speeds[trainer]:,.0f}" if speeds[trainer] else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):,.0f} ± {statistics.pstdev(values):,.0f}"


def wanted(arguments: argparse.Namespace, runs: Runs) -> list[str]:
    """The keys of the runs to train: those that are named, or if none is, those that are missing."""
    chosen = (arguments.trainer, arguments.env_id, arguments.seed)
    every = [
        (trainer, env, seed) for seed in SEEDS for trainer, envs in TRAINERS.items() for env in envs
    ]
    named = [
        run
        for run in every
        if all(choice in (None, part) for choice, part in zip(chosen, run, strict=True))
    ]
    keys = [f"{trainer}/{env}/{seed}" for trainer, env, seed in named]
    return [key for key in keys if any(chosen) or key not in runs]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.scores", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--trainer", choices=list(TRAINERS), help="defaults to both")
    parser.add_argument("--env-id", choices=list(PUBLISHED), help="defaults to all")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="defaults to all")
    parser.add_argument("--show", action="store_true", help="train nothing")
    arguments = parser.parse_args(argv)
    file = json.loads(FILE.read_text()) if FILE.exists() else {}
    runs: Runs = file.setdefault("runs", {})
    for key in [] if arguments.show else wanted(arguments, runs):
        print(key, flush=True)
        trainer, env, seed = key.split("/")
        run = train(trainer, env, int(seed))
        if "skipped" in run:
            sys.exit(f"{key} could not be run: {run['skipped']}")
        add(file, key, run)
    importlib.import_module(".plot", __package__).draw_scores(
        runs, PUBLISHED, str(FILE.with_suffix(".png"))
    )
    print(show(runs))


def add(file: dict[str, Any], key: str, run: dict[str, Any]) -> None:
    """Writes a run into the file, and what it ran on."""
    file["runs"][key] = {**run, "curve": thin(run["curve"])}
    file |= {
        "machine": machine(Options()),
        "curve": "env steps, mean return of the latest 100 episodes",
    }
    FILE.write_text(json.dumps(file) + "\n")


if __name__ == "__main__":
    main()
