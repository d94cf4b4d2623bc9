"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import replace

from .measure import Options, instruction_sets, machine, settings
from .report import words

EVERYWHERE = ("glue", "number", "cartpole")  # by default in every setting; the others only in the last, because of the time
SUITES = (
    *EVERYWHERE,
    "scaling",
    "each",
    "images",
    "resets",
    "bridge",
    "collector",
    "ppo",
    "startup",
    "memory",
    "soak",
    "learn",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Compares torchwrap with other libraries.")
    parser.add_argument("--json", help="JSON file for the figures, written after each suite")
    parser.add_argument("--plot", help="PNG file for the plot; the plot of `scaling` is scaling.png next to it")
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=list(SUITES), help="suites to run")
    parser.add_argument("--isa", choices=instruction_sets(), nargs="+", help="instruction sets; defaults to all listed here")
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads of every library; defaults to 1 and 2")
    parser.add_argument("--num-envs", type=int, nargs="+", help="batch sizes; defaults to those of each suite")
    parser.add_argument("--seconds", type=float, default=Options.seconds, help="length of one turn of one row")
    parser.add_argument("--repeats", type=int, default=Options.repeats, help="number of turns of each row that count")
    parser.add_argument("--num-steps", type=int, default=Options.num_steps, help="steps of a compiled rollout and of a scan")
    parser.add_argument("--seeds", type=int, nargs="+", default=Options.seeds, help="seeds of ppo")
    parser.add_argument("--device", default=Options.device, help="device of torchwrap; most peers run on the CPU only")
    parser.add_argument("--only", nargs="+", help="transforms of `each`; defaults to all")
    parser.add_argument("--no-compile", action="store_true", help="skip rows that need torch.compile")
    parser.add_argument("--python", action="append", default=[], metavar="SIDE=PATH", help="interpreter of a side")
    arguments = vars(parser.parse_args(argv))
    path, plot, suites, isas, threads = (arguments.pop(name) for name in ("json", "plot", "suite", "isa", "threads"))
    pythons = dict(_side(parser, text) for text in arguments.pop("python"))
    options = Options(compile=not arguments.pop("no_compile"), pythons=pythons, **arguments)

    every = [replace(options, isa=isa, threads=number) for isa, number in settings(isas, threads)]
    figures = {"machine": machine(every)}
    versions = {f"versions of {side}": found for side, found in figures["machine"]["versions"].items()}
    for name, value in {**figures["machine"], **versions}.items():
        if name != "versions":
            print(f"{name}: {', '.join(f'{n} {v}' for n, v in value.items()) if isinstance(value, dict) else value}")
    for name in suites:
        suite = importlib.import_module(f".{name}", __package__)
        everywhere = isas or threads or (name in EVERYWHERE and options.device == "cpu")
        for options in every if everywhere else every[-1:]:
            found = suite.run(options)
            print(f"\n{words([options.setting])}: {suite.show(found)}", flush=True)
            figures.update({f"{key}/{options.setting}": row for key, row in found.items()})
            if path:
                with open(path, "w") as file:
                    json.dump(figures, file, indent=1)
    if plot:
        importlib.import_module(".plot", __package__).draw(figures, plot)


def _side(parser: argparse.ArgumentParser, text: str) -> list[str]:
    if "=" not in text:
        parser.error(f"--python needs SIDE=PATH, but got {text!r}.")
    return text.split("=", 1)


if __name__ == "__main__":
    main()
