"""What compiled steps cost on an H200, predicted without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import torch

import torchwrap as tw
from torchwrap import transforms as T

from . import script
from .glue import SEVEN
from .offline_cuda_driver import Kernel, Program, compile_for_h200
from .torchwrap_side import TRANSFORMS

# A kernel takes as long as the longest of: its launch in a CUDA graph, its bytes, and the rounds of its loop.
LAUNCH_US, BYTES_PER_US, ROUND_US = 1.5, 4.8e6, 0.2


def cartpole(num_envs: int) -> tw.Env:
    return tw.make("CartPole-v1", num_envs)


def stacked(num_envs: int) -> tw.Env:
    return tw.TransformedEnv(
        cartpole(num_envs), T.NormalizeObservation(), T.ClipObservation(-10, 10), T.FrameStackObservation(4)
    )


CASES = {
    "seven": lambda n: tw.TransformedEnv(script.scripted(n), T.Compose([TRANSFORMS[name]() for name in SEVEN])),
    "cartpole": cartpole,
    "cartpole stacked": stacked,
    "cartpole collector": lambda n: tw.Collector(cartpole(n), None, num_steps=2),  # a graph of one step
}


def microseconds(kernel: Kernel) -> float:
    return max(LAUNCH_US, (kernel.reads + kernel.writes) / BYTES_PER_US, kernel.rounds * ROUND_US)


def figures(program: Program) -> dict[str, Any]:
    times = [round(microseconds(kernel), 2) for kernel in program.kernels]
    moved = sum(kernel.reads + kernel.writes for kernel in program.kernels)
    floor_us = program.floor / BYTES_PER_US
    return {
        "kernels": len(program.kernels),
        "external": program.external,
        "host_copies": program.host_copies,
        "bytes": moved,
        "floor_bytes": program.floor,
        "us": round(sum(times), 1),
        "floor_us": round(floor_us, 1),
        "ratio": round(sum(times) / floor_us, 2),
        "each": [_row(kernel, time) for kernel, time in zip(program.kernels, times, strict=True)],
    }


def _row(kernel: Kernel, us: float) -> dict[str, Any]:
    return {**dataclasses.asdict(kernel), "name": kernel.name[len("triton_") : 70], "us": us}


def show(title: str, found: dict[str, Any]) -> None:
    print(
        f"{title}: {found['kernels']} kernels, {found['external']} external calls, {found['host_copies']} host copies;",
        end=" ",
    )
    print(f"{found['bytes'] / 1e6:.2f} MB of {found['floor_bytes'] / 1e6:.2f}, {found['us']} us of {found['floor_us']}")
    print("        us    MB read   written  rounds  registers  spills")
    for kernel in found["each"]:
        amounts = f"{kernel['us']:10.2f} {kernel['reads'] / 1e6:10.3f} {kernel['writes'] / 1e6:9.3f}"
        print(f"{amounts} {kernel['rounds']:7} {kernel['registers']:10} {kernel['spills']:7}  {kernel['name']}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("what", nargs="*", help=f"cases, of {', '.join(map(repr, CASES))}; numbers of envs")
    arguments = parser.parse_args()
    numbers = [int(word) for word in arguments.what if word.isdigit()] or [4096, 1048576]
    names = [word for word in arguments.what if not word.isdigit()] or list(CASES)
    warnings.simplefilter("ignore")
    cases = {}
    for name in names:
        for number in numbers:
            cases[f"{name}/{number}"] = found = figures(compile_for_h200(CASES[name](number)))
            show(f"{name}, {number} envs", found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
