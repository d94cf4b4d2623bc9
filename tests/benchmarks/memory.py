"""The memory of an env: resident bytes of CartPole-v1 with its stack, each side in a fresh process."""

from __future__ import annotations

from typing import Any

from .cartpole import STACK
from .measure import Case, Figures, Options, ask
from .report import table


def run(options: Options) -> Figures:
    figures: Figures = {}
    ours: dict[str, Any] = {"device": options.device, "transforms": STACK}
    for n in options.num_envs or (65536,):
        cases = {"torchwrap-eager": Case("torchwrap", "cartpole", {**ours, "num_envs": n})}
        if options.compile:
            cases["torchwrap-compiled"] = Case("torchwrap", "cartpole", {**ours, "num_envs": n, "compiled": True})
        cases["gymnax-step"] = Case("jax", "cartpole", {"num_envs": n, "stack": True})
        cases["gymnasium-normalise"] = Case("gymnasium", "cartpole", {"num_envs": n, "transforms": STACK[:1]})
        for name, case in cases.items():
            # Return freed memory to the system at once; otherwise it would count as in use.
            figures[f"memory/{name}/{n}"] = ask(case, options, "memory", MALLOC_MMAP_THRESHOLD_="65536")
    return figures


def show(figures: Figures) -> str:
    columns = {"bytes per env": "bytes_per_env", "at the peak": "peak_bytes_per_env"}
    return table("memory: CartPole-v1, resident bytes", figures, columns)
