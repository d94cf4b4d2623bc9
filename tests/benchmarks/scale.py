"""The arithmetic of scale: what all-reduces and stragglers cost a PPO of many processes. A model, and measured points.

python -m tests.benchmarks.scale                prints the tables of README.md from scale.json
python -m tests.benchmarks.scale --model        computes the model in it again
python -m tests.benchmarks.scale --measure      measures again as well, in 1, 2 and 4 processes on this machine
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".json")

# What goes through an all-reduce.

COMPONENTS = {"4": 4, "348": 348, "4x84x84": 4 * 84 * 84}
PARAMETERS = {"CartPole-v1": 9_155, "Humanoid-v5": 54_179, "Nature CNN": 1_686_693}  # of the agents in examples/


def sync_bytes(components: int) -> int:
    """float64: four sums per component, and eight pieces of a checksum."""
    return 8 * (4 * components + 8)


def gradient_bytes(parameters: int) -> int:
    return 4 * parameters


# The model of an all-reduce.


@dataclass(frozen=True)
class Network:
    latency: float  # seconds per message
    bandwidth: float  # bytes per second and rank, one way
    tree: bool = True  # whether the library may choose a tree; gloo has a ring only
    node: Network | None = None  # within nodes of eight ranks, whose sums one of them exchanges with other nodes


INFINIBAND = Network(5e-6, 12.5e9)
NETWORKS = {
    "10 Gbit/s Ethernet, gloo": Network(30e-6, 1.25e9, tree=False),
    "100 Gbit/s InfiniBand": INFINIBAND,
    "NVLink 4, nodes of 8": Network(INFINIBAND.latency, INFINIBAND.bandwidth, node=Network(1.9e-6, 376e9)),
}


def all_reduce(num_bytes: int, ranks: int, network: Network) -> float:
    """Seconds of the network alone: a ring or a tree, whichever is faster."""
    if network.node is not None:
        inside = all_reduce(num_bytes, min(ranks, 8), network.node)
        between = Network(network.latency, network.bandwidth, network.tree)
        return inside + all_reduce(num_bytes, -(-ranks // 8), between)
    if ranks == 1:
        return 0.0
    transfer = num_bytes / network.bandwidth
    ring = 2 * (ranks - 1) / ranks * transfer + 2 * (ranks - 1) * network.latency
    tree = 2 * math.log2(ranks) * network.latency + 2 * transfer
    return min(ring, tree) if network.tree else ring


# The model of an iteration of examples/ppo.py: a rollout, a sync, and gradient steps. Each waits for the slowest rank.


@dataclass(frozen=True)
class Workload:
    components: int
    parameters: int
    num_steps: int
    updates: int  # epochs times minibatches
    minibatches: int
    weak: int  # envs per rank that do not depend on the number of ranks
    strong: int  # envs of all ranks
    rollout: tuple[float, float]  # seconds: a + b * envs
    update: tuple[float, float]  # seconds: a + b * rows
    sync_seconds: float  # what a call takes without other ranks
    average_seconds: float


SETTINGS = {  # num_steps, epochs, minibatches, envs per rank and in all, two numbers of envs to measure
    "CartPole-v1": (32, 8, 4, 64, 1024, (64, 512)),
    "Humanoid-v5": (256, 10, 32, 8, 1024, (4, 8)),  # as many rows as the preset's one env, which ranks could not divide
}
DRAWS = 500
RANKS = tuple(2**power for power in range(11))


def line(points: dict[float, float]) -> tuple[float, float]:
    """a and b of `a + b * x` through two points; neither is negative."""
    (x, y), (u, v) = points.items()
    slope = max(v - y, 0.0) / (u - x)
    return max(y - slope * x, 0.0), slope


def workload(name: str, measured: dict[str, Any]) -> Workload:
    num_steps, epochs, minibatches, weak, strong, _ = SETTINGS[name]
    phases = {int(num_envs): row for num_envs, row in measured["phases"][name].items()}
    components = {"CartPole-v1": "4", "Humanoid-v5": "348"}[name]
    return Workload(
        COMPONENTS[components],
        PARAMETERS[name],
        num_steps,
        epochs * minibatches,
        minibatches,
        weak,
        strong,
        line({n: row["rollout_min_ms"] / 1e3 for n, row in phases.items()}),
        line({n * num_steps / minibatches: row["update_min_ms"] / 1e3 for n, row in phases.items()}),
        measured["sync"][components]["1"]["min_us"] / 1e6,
        measured["average"][name]["1"]["min_us"] / 1e6,
    )


def times(ranks: int, cv: float, rng: np.random.Generator) -> np.ndarray:
    """`(DRAWS, ranks)` lognormal numbers with mean 1 and a coefficient of variation."""
    sigma = math.sqrt(math.log1p(cv**2))
    return np.exp(sigma * rng.standard_normal((DRAWS, ranks)) - sigma**2 / 2)


@functools.cache
def slowest(ranks: int, cv: float, reset: float = 0.0, resets: float = 0.0) -> float:
    """The expected maximum over the ranks of such a time, and of a Poisson number of resets that take `reset` each."""
    rng = np.random.default_rng(ranks)
    found = times(ranks, cv, rng)
    if reset:
        found += reset * rng.poisson(resets, found.shape)
    return float(found.max(1).mean())


def iteration(
    work: Workload, ranks: int, num_envs: float, network: Network, cv: float, reset_steps: float = 0, episode: float = 200
) -> dict[str, float]:
    """Seconds of an iteration, and of what a rank computes in it on average. Ranks and steps vary independently.

    With `reset_steps`, each reset takes as long as so many steps of one env, and a rollout has a Poisson number of them.
    """
    rollout = work.rollout[0] + work.rollout[1] * num_envs
    update = work.update[0] + work.update[1] * num_envs * work.num_steps / work.minibatches
    reset = work.rollout[1] / work.num_steps * reset_steps
    resets = num_envs * work.num_steps / episode
    mean = rollout + reset * resets + work.updates * update
    if ranks == 1:
        return {"mean": mean, "seconds": mean}
    waited = rollout * slowest(ranks, cv, reset / rollout, resets) + work.updates * update * slowest(ranks, cv)
    return {"mean": mean, "seconds": waited + communication(work, ranks, network)}


def communication(work: Workload, ranks: int, network: Network) -> float:
    """A sync, the gradients, and two numbers for the progress bar; with what the calls take without other ranks."""
    sync = work.sync_seconds + all_reduce(sync_bytes(work.components), ranks, network)
    gradient = work.average_seconds + all_reduce(gradient_bytes(work.parameters), ranks, network)
    return sync + work.updates * gradient + all_reduce(16, ranks, network)


def scaling(work: Workload, network: Network, cv: float, **resets: float) -> dict[str, Any]:
    """Efficiency by number of ranks, and where more of them stop paying.

    `weak` keeps the envs of a rank, `strong` those of all. `half` is the last number of ranks, of powers of two, whose
    efficiency is at least one half, and `fastest` the one whose iteration takes the least time.
    """
    weak, strong = {}, {}
    alone = iteration(work, 1, work.strong, network, cv, **resets)["seconds"]
    for ranks in RANKS:
        fixed = iteration(work, ranks, work.weak, network, cv, **resets)
        weak[str(ranks)] = {"seconds": fixed["seconds"], "efficiency": fixed["mean"] / fixed["seconds"]}
        seconds = iteration(work, ranks, work.strong / ranks, network, cv, **resets)["seconds"]
        strong[str(ranks)] = {"seconds": seconds, "speedup": alone / seconds, "efficiency": alone / seconds / ranks}
    found: dict[str, Any] = {"weak": weak, "strong": strong}
    for kind in (weak, strong):
        kind["half"] = next((int(ranks) // 2 for ranks, row in kind.items() if row["efficiency"] < 0.5), RANKS[-1])
    strong["fastest"] = min(RANKS, key=lambda ranks: strong[str(ranks)]["seconds"])
    return found


CVS = (0.02, 0.1, 0.3)
RESETS = {"reset_steps": 50, "episode": 200}
PARTS = ("network", "loopback", "stragglers")


def model(measured: dict[str, Any]) -> dict[str, Any]:
    """From the minima of the measured points, because other processes run on a shared machine."""
    sizes = {f"sync/{name}": sync_bytes(number) for name, number in COMPONENTS.items()}
    sizes |= {f"average/{name}": gradient_bytes(number) for name, number in PARAMETERS.items()}
    network = {
        case: {
            "bytes": num_bytes,
            **{
                name: {str(ranks): _round(all_reduce(num_bytes, ranks, one) * 1e6) for ranks in (2, 8, 64, 1024)}
                for name, one in NETWORKS.items()
            },
        }
        for case, num_bytes in sizes.items()
    }
    stragglers: dict[str, Any] = {}
    for name in SETTINGS:
        work = workload(name, measured)
        for title, one in NETWORKS.items():
            for cv in CVS:
                stragglers[f"{name}/{title}/{cv}"] = _rounded(scaling(work, one, cv))
            stragglers[f"{name}/{title}/{CVS[1]}/resets"] = _rounded(scaling(work, one, CVS[1], **RESETS))
    return {"network": network, "loopback": loopback(measured), "stragglers": stragglers}


def loopback(measured: dict[str, Any]) -> dict[str, Any]:
    """gloo within this machine: latency and bandwidth through two points of two processes. Those of four are predictions."""

    def beyond(kind: str, case: str) -> float:
        rows = measured[kind][case]
        return (rows["2"]["min_us"] - rows["1"]["min_us"]) / 1e6

    latency = max(beyond("sync", "4") / 2, 0.0)
    network = Network(
        latency, gradient_bytes(PARAMETERS["Nature CNN"]) / (beyond("average", "Nature CNN") - 2 * latency), False
    )
    found: dict[str, Any] = {"latency_us": _round(latency * 1e6), "gigabytes_per_second": _round(network.bandwidth / 1e9)}
    for kind, sizes, to_bytes in (("sync", COMPONENTS, sync_bytes), ("average", PARAMETERS, gradient_bytes)):
        for case, number in sizes.items():
            own = measured[kind][case]["1"]["min_us"]
            found[f"{kind}/{case}"] = {str(n): _round(own + all_reduce(to_bytes(number), n, network) * 1e6) for n in (2, 4)}
    return found


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    return _round(tree) if isinstance(tree, float) else tree


# Tables of README.md.


def show(figures: dict[str, Any]) -> str:
    network, stragglers = figures["network"], figures["stragglers"]
    lines = [f"| us of the network (model) | bytes | {' | '.join(NETWORKS)} |", "|---" * (2 + len(NETWORKS)) + "|"]
    for case, row in network.items():
        cells = [" / ".join(_us(row[name][ranks]) for ranks in ("8", "64", "1024")) for name in NETWORKS]
        lines.append(f"| {_words(case)} | {row['bytes']:,} | {' | '.join(cells)} |")
    heads = [
        "efficiency (model)",
        *(f"{cv:.0%}".replace("%", " %") for cv in CVS),
        "half",
        "strong: fastest, half",
        "with resets",
    ]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in SETTINGS:
        for title in NETWORKS:
            start = f"{name}/{title}"
            weak = [stragglers[f"{start}/{cv}"]["weak"] for cv in CVS]
            cells = [" / ".join(f"{row[ranks]['efficiency']:.2f}" for ranks in ("8", "64", "1024")) for row in weak]
            cells.append(f"{weak[1]['half']:,}")
            for key in (f"{start}/{CVS[1]}", f"{start}/{CVS[1]}/resets"):
                strong = stragglers[key]["strong"]
                cells.append(f"{strong['fastest']:,} ({strong[str(strong['fastest'])]['speedup']:.1f}), {strong['half']:,}")
            lines.append(f"| {name}, {title} | {' | '.join(cells)} |")
    measured, modelled = figures["measured"], figures["loopback"]
    lines += ["", "| us of a call (median, minimum) | 1 process | 2 | 4 | model of 2, 4 |", "|---" * 5 + "|"]
    for kind in ("sync", "average"):
        for case, row in measured[kind].items():
            cells = [f"{_us(row[n]['median_us'])}, {_us(row[n]['min_us'])}" for n in ("1", "2", "4")]
            predicted = modelled[f"{kind}/{case}"]
            lines.append(
                f"| {_words(f'{kind}/{case}')} | {' | '.join(cells)} | {_us(predicted['2'])}, {_us(predicted['4'])} |"
            )
    return "\n".join(lines)


def _words(case: str) -> str:
    kind, name = case.split("/")
    return f"sync, {name} components" if kind == "sync" else f"gradients, {name}"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=FILE, help="file of the figures")
    parser.add_argument("--model", action="store_true", help="compute the model again from the measured points of the file")
    parser.add_argument("--measure", action="store_true", help="measure the points as well")
    args = parser.parse_args(arguments)
    figures = {} if args.measure else json.loads(args.json.read_text())
    if args.measure:  # the model needs no PyTorch
        figures = importlib.import_module("tests.benchmarks.scale_side").measure()
    if args.measure or args.model:
        figures |= model(figures["measured"])
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(show(figures))


if __name__ == "__main__":
    main()
