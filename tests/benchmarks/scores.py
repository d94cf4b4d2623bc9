"""Returns of PPO after equal numbers of steps: our presets, CleanRL's, and the zoo's with SB3.

python -m tests.benchmarks.scores                                     trains missing runs
python -m tests.benchmarks.scores --env-id Hopper-v5 --seed 201       this run again
python -m tests.benchmarks.scores --trainer sb3 --env-id Hopper-v5    three runs of SB3 again
python -m tests.benchmarks.scores --show                              draws and prints, no training

Nobody tuned on the seeds that are shown.

It writes examples/results/ppo_scores.json after each run, and ppo_scores.png at the end.
"""

import argparse
import fcntl
import importlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from .measure import ROOT, Case, Options, ask, machine

FILE = ROOT / "examples" / "results" / "ppo_scores.json"
SEEDS = {"torchwrap": (201, 202, 203, 204, 205), "cleanrl": (1, 2, 3), "sb3": (1, 2, 3)}
"""By trainer: examples/ppo.py, the same with the hyperparameters of CleanRL, and SB3's PPO."""

# Those of ppo.py and ppo_continuous_action.py, whose networks have two layers of 64 units.
CLEANRL_DISCRETE = (
    "--learning-rate 2.5e-4 --num-envs 4 --num-steps 128 --gamma 0.99 --gae-lambda 0.95"
    " --num-minibatches 4 --update-epochs 4 --clip-vloss True --hidden-size 64 --ent-coef 0.01"
    " --normalize False"
)
CLEANRL_CONTINUOUS = (
    "--learning-rate 3e-4 --num-envs 1 --num-steps 2048 --gamma 0.99 --gae-lambda 0.95"
    " --num-minibatches 32 --update-epochs 10 --clip-vloss True --hidden-size 64 --log-std 0"
)


class Score(NamedTuple):
    mean: float
    deviation: float


class Task(NamedTuple):
    num_steps: int
    cleanrl: str = CLEANRL_CONTINUOUS
    published: Score | None = None
    """The last 100 episodes of three seeds of ppo_continuous_action.py on the v4 of the env, from
    docs/benchmark of CleanRL at the tag pr-424. It has no score for Ant."""


TASKS = {
    "CartPole-v1": Task(150_000, CLEANRL_DISCRETE),
    "Acrobot-v1": Task(400_000, CLEANRL_DISCRETE),
    "MountainCar-v0": Task(10**6, CLEANRL_DISCRETE),
    "MountainCarContinuous-v0": Task(10**6),
    "Pendulum-v1": Task(400_000),
    "Hopper-v5": Task(10**6, published=Score(2382.9, 271.7)),
    "Walker2d-v5": Task(10**6, published=Score(2288.0, 571.8)),
    "HalfCheetah-v5": Task(10**6, published=Score(1442.6, 46.0)),
    "InvertedPendulum-v5": Task(10**6, published=Score(963.1, 22.2)),
    "Ant-v5": Task(10**6),
    "Humanoid-v5": Task(10**6, published=Score(716.1, 49.1)),
}
HEAD = "| env | trainer | score | of each seed | CleanRL's published | CPU seconds |"

Runs = dict[str, dict[str, Any]]
"""`{"<trainer>/<env>/<seed>": {figure: value}}`."""


def train(trainer: str, env: str, seed: int) -> dict[str, Any]:
    """A run in another process, on one thread, with the CPU seconds of that process."""
    task = TASKS[env]
    arguments = {"id": env, "seed": seed, "num_steps": task.num_steps}
    side = "sb3" if trainer == "sb3" else "torchwrap"
    if side == "torchwrap":
        flags = task.cleanrl if trainer == "cleanrl" else ""
        arguments["flags"] = ["--compile", *flags.split()]
    before = sum(os.times()[2:4])
    run = ask(Case(side, "learn", arguments), Options())
    return {**run, "cpu_seconds": sum(os.times()[2:4]) - before}


def thin(curve: Sequence[Sequence[float]], points: int = 64) -> list[list[float]]:
    """At most `points` pairs of env steps and mean return, at equal distances up to the last."""
    every = -(-len(curve) // points)
    first = (len(curve) - 1) % every
    return [[steps, round(mean, 1)] for steps, mean, *_ in curve[first::every]]


def show(runs: Runs) -> str:
    """A row per env and trainer."""
    lines = [HEAD, "|" + "---|" * 6]
    for env, task in TASKS.items():
        published = task.published
        score = f"{published.mean:,.0f} ± {published.deviation:,.0f}" if published else ""
        for trainer in SEEDS:
            found = [runs[key] for key in sorted(runs) if key.startswith(f"{trainer}/{env}/")]
            if not found:
                continue
            returns = [run["final_mean_return"] for run in found]
            seeds = " / ".join(f"{mean:,.0f}" for mean in returns)
            known = [run["cpu_seconds"] for run in found if "cpu_seconds" in run]
            seconds = f"{statistics.median(known):,.0f}" if known else ""
            cells = [env, trainer, spread(returns), seeds, score, seconds]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Mean and deviation, which one value does not have."""
    mean = f"{statistics.mean(values):,.0f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.pstdev(values):,.0f}"


def wanted(arguments: argparse.Namespace, runs: Runs) -> list[str]:
    """The keys of the runs to train: the chosen ones, or if none is chosen, the missing ones."""
    keys = []
    for trainer, seeds in SEEDS.items():
        keys += [f"{trainer}/{env}/{seed}" for seed in seeds for env in TASKS]
    chosen = [arguments.trainer, arguments.env_id, arguments.seed]
    if not any(chosen):
        return [key for key in keys if key not in runs]
    parts = {str(choice) for choice in chosen if choice}
    return [key for key in keys if parts <= set(key.split("/"))]


def main(argv: Sequence[str] | None = None) -> None:
    description, *_ = __doc__.splitlines()
    parser = argparse.ArgumentParser("python -m tests.benchmarks.scores", description=description)
    parser.add_argument("--trainer", choices=list(SEEDS), help="defaults to all")
    parser.add_argument("--env-id", choices=list(TASKS), help="defaults to all")
    parser.add_argument("--seed", type=int, help="defaults to all")
    parser.add_argument("--show", action="store_true", help="train nothing")
    arguments = parser.parse_args(argv)
    for key in [] if arguments.show else wanted(arguments, read()["runs"]):
        print(key, flush=True)
        trainer, env, seed = key.split("/")
        run = train(trainer, env, int(seed))
        if "skipped" in run:
            sys.exit(f"{key} could not be run: {run['skipped']}")
        add(key, run)
    runs = read()["runs"]
    plot = importlib.import_module(".plot", __package__)
    plot.draw_scores(runs, TASKS, str(FILE.with_suffix(".png")))
    print(show(runs))


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def add(key: str, run: dict[str, Any]) -> None:
    """Writes a run into the file, to which other processes add theirs, and its machine."""
    where = machine(Options())
    with FILE.open("r+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        file = json.load(stream)
        file["runs"][key] = {**run, "curve": thin(run["curve"])}
        file["machine"] = where
        file["curve"] = "env steps, mean return of the latest 100 episodes"
        stream.seek(0)
        stream.write(json.dumps(file) + "\n")
        stream.truncate()


if __name__ == "__main__":
    main()
