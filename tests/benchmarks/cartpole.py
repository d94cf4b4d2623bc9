"""A whole step of CartPole-v1: bare, and with observations normalized, clipped and stacked."""

from typing import Any

from .glue import sizes, ways
from .measure import Case, Figures, Options, Row, compare

STACK = ("NormalizeObservation", "ClipObservation", "FrameStackObservation")
TORCHRL = ("VecNormV2", "ClipTransform", "CatFrames")
LONG = 128
STORED = 2**25  # env steps of a rollout on a GPU: about 5 GB, and as much for the result, twice
REFERENCES = (
    "torchwrap-torch.compile",
    "torchwrap-compiled",
    "torchwrap-rollout",
    f"torchwrap-rollout-{LONG}",
    "torchwrap-bare-eager",
)


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or sizes(options):
        rows = {**_ours(n, options), **_theirs(n, options)}
        found = {}
        long = f"torchwrap-rollout-{LONG}"
        if options.device != "cpu" and n * LONG > STORED and long in rows:
            del rows[long]
            reason = f"{LONG} steps of {n:,} envs are too large for the device's memory"
            found[long] = {"skipped": reason}
        found |= compare(rows, options, REFERENCES)
        figures.update({f"cartpole/{name}/{n}": row for name, row in found.items()})
    case = Case("torchwrap", "copy", {"device": options.device})
    copy = compare({"copy": Row(case)}, options)["copy"]
    for row in figures.values():
        if "gigabytes_per_second" in row and "skipped" not in copy:
            row["of_copy"] = row["gigabytes_per_second"] / copy["gigabytes_per_second"]
    return {**add_speeds(figures), "cartpole/copy/1": copy}


def collector(options: Options) -> Figures:
    """Rollouts of CartPole-v1 with a policy, compared with TorchRL's Collector."""
    figures: Figures = {}
    for n in options.num_envs or (4096,):
        shared: dict[str, Any] = {"num_envs": n, "num_steps": options.num_steps}
        shared["device"] = options.device
        rows = {"torchrl": Row(Case("torchrl", "collector", shared))}
        for way in ways(options, "eager", "compiled"):
            rows[f"torchwrap-{way}"] = Row(Case("torchwrap", "collector", {**shared, "way": way}))
        found = compare(rows, options, ("torchwrap-eager", "torchwrap-compiled"))
        figures |= {f"collector/{name}/{n}": row for name, row in found.items()}
    return add_speeds(figures)


def add_speeds(figures: Figures) -> Figures:
    for key, row in figures.items():
        if "us" in row:
            row["steps_per_second"] = int(key.split("/")[-1]) / row["us"] * 1e6
    return figures


def _ours(n: int, options: Options) -> dict[str, Row]:
    shared: dict[str, Any] = {"num_envs": n, "device": options.device}
    rows = {}
    for way in ways(options):
        rows[f"torchwrap-{way}"] = row("torchwrap", **shared, way=way, transforms=STACK)
        rows[f"torchwrap-bare-{way}"] = row("torchwrap", **shared, way=way, transforms=None)
    if options.compile:
        shared |= {"way": "compiled", "transforms": STACK}
        for name, steps in (("rollout", options.num_steps), (f"rollout-{LONG}", LONG)):
            rows[f"torchwrap-{name}"] = row("torchwrap", **shared, num_steps=steps)
    return rows


def _theirs(n: int, options: Options) -> dict[str, Row]:
    rows = {}
    for kind, stack in (("gymnax", True), ("gymnax-bare", False)):
        for steps in (None, options.num_steps, LONG):
            way = f"scan-{steps}" if steps else "step"
            rows[f"{kind}-{way}"] = row("jax", num_envs=n, stack=stack, num_steps=steps)
    rows["gymnasium-normalise"] = row("gymnasium", num_envs=n, transforms=STACK[:1])
    rows["gymnasium-bare"] = row("gymnasium", num_envs=n, transforms=None)
    rows["envpool-bare"] = row("envpool", num_envs=n)
    rows["torchrl"] = row("torchrl", num_envs=n, transforms=TORCHRL)
    rows["torchrl-bare"] = row("torchrl", num_envs=n, transforms=None)
    return rows


def row(side: str, **arguments: Any) -> Row:
    return Row(Case(side, "cartpole", arguments))
