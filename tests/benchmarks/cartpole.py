"""The whole step of CartPole-v1 with observations normalized, clipped and stacked: dynamics, transforms and auto-reset."""

from __future__ import annotations

from typing import Any

from .glue import sizes
from .measure import Case, Figures, Options, Row, compare
from .report import ratios, table

STACK = ("NormalizeObservation", "ClipObservation", "FrameStackObservation")
TORCHRL = ("VecNormV2", "ClipTransform", "CatFrames")
LONG = 128
STORED = 2**25  # env steps of a rollout on a GPU: about 5 GB, and as much again for the result, twice
REFERENCES = ("torchwrap-compiled", "torchwrap-rollout", f"torchwrap-rollout-{LONG}")


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or sizes(options):
        rows, found = {**_ours(n, options), **_theirs(n, options)}, {}
        if options.device != "cpu" and n * LONG > STORED and rows.pop(REFERENCES[-1], None):
            found[REFERENCES[-1]] = {"skipped": f"{LONG} steps of {n:,} envs are too large for the device's memory"}
        found |= compare(rows, options, REFERENCES)
        figures.update({f"cartpole/{name}/{n}": row for name, row in found.items()})
    copy = compare({"copy": Row(Case("torchwrap", "copy", {"device": options.device}))}, options)["copy"]
    for row in figures.values():
        if "gigabytes_per_second" in row and "skipped" not in copy:
            row["of_copy"] = row["gigabytes_per_second"] / copy["gigabytes_per_second"]
    return {**add_speeds(figures), "cartpole/copy/1": copy}


def add_speeds(figures: Figures) -> Figures:
    for key, row in figures.items():
        if "us" in row:
            row["steps_per_second"] = int(key.split("/")[-1]) / row["us"] * 1e6
    return figures


def _ours(n: int, options: Options) -> dict[str, Row]:
    shared: dict[str, Any] = {"num_envs": n, "device": options.device}
    ways: dict[str, dict[str, Any]] = {"eager": {}}
    if options.compile:
        ways["compiled"] = {"compiled": True}
        ways["rollout"] = {"compiled": True, "num_steps": options.num_steps}
        ways[f"rollout-{LONG}"] = {"compiled": True, "num_steps": LONG}
    rows = {f"torchwrap-{way}": _row("torchwrap", **shared, **keywords, transforms=STACK) for way, keywords in ways.items()}
    for way in ("eager", "compiled") if options.compile else ("eager",):
        rows[f"torchwrap-bare-{way}"] = _row("torchwrap", **shared, **ways[way], transforms=None)
    return rows


def _theirs(n: int, options: Options) -> dict[str, Row]:
    rows = {}
    for kind, stack in (("gymnax", True), ("gymnax-bare", False)):
        for way, steps in (("step", None), (f"scan-{options.num_steps}", options.num_steps), (f"scan-{LONG}", LONG)):
            rows[f"{kind}-{way}"] = _row("jax", num_envs=n, stack=stack, num_steps=steps)
    rows["gymnasium-normalise"] = _row("gymnasium", num_envs=n, transforms=STACK[:1])
    rows["gymnasium-bare"] = _row("gymnasium", num_envs=n, transforms=None)
    rows["envpool-bare"] = _row("envpool", num_envs=n)
    rows["torchrl"] = _row("torchrl", num_envs=n, transforms=TORCHRL)
    rows["torchrl-bare"] = _row("torchrl", num_envs=n, transforms=None)
    return rows


def _row(side: str, **arguments: Any) -> Row:
    return Row(Case(side, "cartpole", arguments))


def show(figures: Figures) -> str:
    columns = {"us": "us", "(median)": "us_median", "steps/s": "steps_per_second", "GB/s": "gigabytes_per_second"}
    title = "cartpole: microseconds per step of all envs; x: times ours; of copy: required memory traffic over copy bandwidth"
    return table(title, figures, {**columns, "of copy": "of_copy", **ratios(REFERENCES)})
