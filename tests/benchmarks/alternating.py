"""Rollouts of EnvPool's envs with a network as policy: all of them at once, and two halves by turns."""

from __future__ import annotations

from .measure import Case, Figures, Options, Row, compare
from .report import ratios, table

ENVS = {"HalfCheetah-v5": 32, "Pong-v5": 16}


def run(options: Options) -> Figures:
    figures: Figures = {}
    for id, n in ENVS.items():
        shared = {"id": id, "threads": options.threads, "num_steps": options.num_steps}
        groups = {"Collector": [n], "AlternatingCollector": [n // 2, n // 2]}
        rows = {name: Row(Case("torchwrap", "simulators", {**shared, "groups": sizes})) for name, sizes in groups.items()}
        figures |= {f"alternating/{id} {name}/{n}": row for name, row in compare(rows, options, ["Collector"]).items()}
    return figures


def show(figures: Figures) -> str:
    columns = {"us": "us", "(median)": "us_median", **ratios(["Collector"])}
    return table("alternating: microseconds per step of all envs; x: times Collector's", figures, columns)
