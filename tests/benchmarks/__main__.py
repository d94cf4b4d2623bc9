"""The command line: which suites, how long, who runs where, and where the figures go."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence

from .measure import Options, machine

SUITES = ("glue", "number", "cartpole", "each", "images", "resets", "bridge", "ppo", "startup", "memory", "soak", "learn")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measures torchwrap beside its peers.")
    parser.add_argument("--json", help="file to write figures to, after each suite")
    parser.add_argument("--plot", help="picture to draw")
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=list(SUITES), help="what to measure")
    parser.add_argument("--num-envs", type=int, nargs="+", help="batch sizes instead of each suite's own")
    parser.add_argument("--seconds", type=float, default=Options.seconds, help="of one turn of one row")
    parser.add_argument("--repeats", type=int, default=Options.repeats, help="turns of each row that count")
    parser.add_argument("--num-steps", type=int, default=Options.num_steps, help="of a compiled rollout, and of a scan")
    parser.add_argument("--seeds", type=int, nargs="+", default=Options.seeds, help="of ppo")
    parser.add_argument("--threads", type=int, help="for every library, instead of its own default")
    parser.add_argument("--device", default=Options.device, help="of torchwrap; peers stay on the CPU")
    parser.add_argument("--no-compile", action="store_true", help="leave out rows that need torch.compile")
    parser.add_argument("--python", action="append", default=[], metavar="SIDE=PATH", help="the interpreter of a side")
    arguments = vars(parser.parse_args(argv))
    path, picture, suites = (arguments.pop(name) for name in ("json", "plot", "suite"))
    pythons = dict(_side(parser, text) for text in arguments.pop("python"))
    options = Options(compile=not arguments.pop("no_compile"), pythons=pythons, **arguments)

    figures = {"machine": machine(options)}
    versions = {f"versions of {side}": found for side, found in figures["machine"]["versions"].items()}
    for name, value in {**figures["machine"], **versions}.items():
        if name != "versions":
            print(f"{name}: {', '.join(f'{n} {v}' for n, v in value.items()) if isinstance(value, dict) else value}")
    for name in suites:
        suite = importlib.import_module(f".{name}", __package__)
        found = suite.run(options)
        print(f"\n{suite.show(found)}", flush=True)
        figures.update(found)
        if path:
            with open(path, "w") as file:
                json.dump(figures, file, indent=1)
    if picture:
        importlib.import_module(".plot", __package__).draw(figures, picture)


def _side(parser: argparse.ArgumentParser, text: str) -> list[str]:
    if "=" not in text:
        parser.error(f"--python needs SIDE=PATH, but got {text!r}.")
    return text.split("=", 1)


if __name__ == "__main__":
    main()
