"""The command line of the benchmarks."""

import argparse
import importlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import atari, bridge, cartpole, glue, loops, ppo, report, robot, startup, step_costs
from .measure import ROOT, Figures, Options, instruction_sets, machine, settings

FILE = Path(__file__).with_name("cpu.json")
SUITES = {
    "glue": glue.run,
    "cartpole": cartpole.run,
    "bridge": bridge.run,
    "ppo": ppo.run,
    "startup": startup.run,
    "loops": loops.run,
    "step_costs": step_costs.run,
    "robot": robot.run,
    "atari": atari.run,
}
# By default in every setting; the others only in the last, because of the time
EVERYWHERE = ("glue", "cartpole", "bridge", "step_costs", "robot", "atari")
GPU_SUITES = {"collector": cartpole.collector}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description="Compares torchwrap with other libraries."
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="file for the figures; one of the same machine and versions is continued",
    )
    parser.add_argument("--plot", help="PNG file for the plot")
    parser.add_argument(
        "--tables",
        action="store_true",
        help="print only the tables of README.md, of cpu.json or --json",
    )
    parser.add_argument(
        "--suite",
        choices=[*SUITES, *GPU_SUITES],
        nargs="+",
        default=list(SUITES),
        help="suites to run",
    )
    parser.add_argument(
        "--isa",
        choices=instruction_sets(),
        nargs="+",
        help="instruction sets; defaults to all listed here",
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        help="numbers of threads of every library; defaults to 1 and 2",
    )
    parser.add_argument(
        "--num-envs", type=int, nargs="+", help="batch sizes; defaults to those of each suite"
    )
    parser.add_argument(
        "--seconds", type=float, default=Options.seconds, help="length of one turn of one row"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=Options.repeats,
        help="number of turns of each row that count",
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=Options.num_steps,
        help="steps of a compiled rollout and of a scan",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=Options.seeds, help="seeds of ppo")
    parser.add_argument(
        "--device",
        default=Options.device,
        help="device of torchwrap; most peers run on the CPU only",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="skip rows that need torch.compile"
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="SIDE=PATH", help="interpreter of a side"
    )
    arguments = vars(parser.parse_args(argv))
    path = arguments.pop("json")
    plot = arguments.pop("plot")
    suites = arguments.pop("suite")
    isas = arguments.pop("isa")
    threads = arguments.pop("threads")
    if arguments.pop("tables"):
        return print(report.tables(json.loads((path or FILE).read_text())))
    pythons = dict(_side(parser, text) for text in arguments.pop("python"))
    options = Options(compile=not arguments.pop("no_compile"), pythons=pythons, **arguments)

    here = machine(options)
    figures: Figures = {"machine": here}
    if path and path.exists() and path.stat().st_size > 0:
        figures = json.loads(path.read_text())
    if figures["machine"] != here:
        fault = "must have this machine, these versions and this --num-steps. Name a new file"
        parser.error(f"--json: {path} {fault}.")
    print(json.dumps(here, indent=1))
    every = []
    for isa, number in settings(isas, threads):
        every.append(replace(options, isa=isa, threads=number))
    for name in suites:
        everywhere = isas or threads or (name in EVERYWHERE and options.device == "cpu")
        for each in every if everywhere else every[-1:]:
            found = (SUITES | GPU_SUITES)[name](each)
            title = f"{name}, {report.words([each.setting])}"
            print(f"\n{title}:\n{report.table(found)}", flush=True)
            figures.update({f"{key}/{each.setting}": row for key, row in found.items()})
            figures.setdefault("commits", {})[name] = _commit()
            if path:
                path.write_text(report.dumps(figures))
    if plot:
        importlib.import_module(".plot", __package__).draw(figures, plot)


def _side(parser: argparse.ArgumentParser, text: str) -> list[str]:
    if "=" not in text:
        parser.error(f"--python: must be SIDE=PATH, got {text!r}.")
    return text.split("=", 1)


def _commit() -> str:
    """The measured commit, with a "+" for uncommitted changes; empty outside of a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
