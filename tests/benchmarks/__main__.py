"""The command line: which suites, how long, and where the figures go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from . import glue, ppo
from .measure import machine

SUITES = {"glue": glue, "ppo": ppo}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measures torchwrap beside its peers.")
    parser.add_argument("--json", help="file to write {name: figures} to")
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=list(SUITES), help="what to measure")
    parser.add_argument("--num-envs", type=int, nargs="+", default=glue.NUM_ENVS, help="batch sizes of glue")
    parser.add_argument("--seconds", type=float, default=0.3, help="for one turn of one step")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads for PyTorch's operators")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)

    figures = {"machine": machine()}
    for name, value in figures["machine"].items():
        print(f"{name}: {value}")
    for name in arguments.suite:
        found = SUITES[name].run(arguments.num_envs, arguments.seconds, arguments.repeats)
        print(f"\n{SUITES[name].table(found)}")
        figures.update(found)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
