"""Expensive initial states, fifty simulated steps each, with and without a pool."""

from __future__ import annotations

from .measure import Case, Figures, Options, Row, compare
from .report import table


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (1024,):
        rows = {}
        for mode in ("eager", "compiled") if options.compile else ("eager",):
            for name, pool in (("cheap initial states", None), ("without a pool", 0), ("with a pool of 1024", 1024)):
                arguments = {"num_envs": n, "pool": pool, "compiled": mode == "compiled", "device": options.device}
                rows[f"{name}, {mode}"] = Row(Case("torchwrap", "settling", arguments))
        figures.update({f"resets/{name}/{n}": row for name, row in compare(rows, options).items()})
    return figures


def show(figures: Figures) -> str:
    return table("resets: CartPole, microseconds per step", figures, {"us": "us", "(median)": "us_median"})
