"""The command line of the benchmarks."""

import argparse
import importlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import bridge, cartpole, glue, ppo, report, startup
from .measure import ROOT, Figures, Options, instruction_sets, machine, settings

FILE = Path(__file__).with_name("cpu.json")
SUITES = {
    "glue": glue.run,
    "cartpole": cartpole.run,
    "bridge": bridge.run,
    "ppo": ppo.run,
    "startup": startup.run,
}
EVERYWHERE = (
    "glue",
    "cartpole",
    "bridge",
)  # by default in every setting; the others only in the last, because of the time
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
    path, plot, suites, isas, threads = (
        arguments.pop(name) for name in ("json", "plot", "suite", "isa", "threads")
    )
    if arguments.pop("tables"):
        return print(report.tables(json.loads((path or FILE).read_text())))
    pythons = dict(_side(parser, text) for text in arguments.pop("python"))
    options = Options(compile=not arguments.pop("no_compile"), pythons=pythons, **arguments)

    here = machine(options)
    figures: Figures = (
        json.loads(path.read_text())
        if path and path.exists() and path.stat().st_size
        else {"machine": here}
    )
    if figures["machine"] != here:
        parser.error(
            f"{path} has figures of another machine, of other versions or of another --num-steps: name a new file."
        )
    print(json.dumps(here, indent=1))
    every = [replace(options, isa=isa, threads=number) for isa, number in settings(isas, threads)]
    for name in suites:
        everywhere = isas or threads or (name in EVERYWHERE and options.device == "cpu")
        for one in every if everywhere else every[-1:]:
            found = (SUITES | GPU_SUITES)[name](one)
            print(f"\n{name}, {report.words([one.setting])}:\n{report.table(found)}", flush=True)
            figures.update({f"{key}/{one.setting}": row for key, row in found.items()})
            figures.setdefault("commits", {})[name] = _commit()
            if path:
                path.write_text(report.dumps(figures))
    if plot:
        importlib.import_module(".plot", __package__).draw(figures, plot)


def _side(parser: argparse.ArgumentParser, text: str) -> list[str]:
    if "=" not in text:
        parser.error(f"--python needs SIDE=PATH, but got {text!r}.")
    return text.split("=", 1)


def _commit() -> str:
    """The commit that was measured, with a "+" after it if there were other changes; empty outside of a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
