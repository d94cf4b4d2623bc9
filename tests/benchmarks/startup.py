"""Seconds to make an env, compile it and call it three times: with an empty cache of compiled code, and with a full one."""

import tempfile

from .cartpole import STACK
from .glue import SEVEN
from .measure import Case, Figures, Options, ask


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (1024, 16384):
        shared = {"num_envs": n, "way": "compiled", "device": options.device}
        cases = {
            "step of seven": Case("torchwrap", "scripted", {**shared, "transforms": SEVEN}),
            "CartPole step": Case("torchwrap", "cartpole", {**shared, "transforms": STACK}),
            "CartPole rollout": Case(
                "torchwrap",
                "cartpole",
                {**shared, "transforms": STACK, "num_steps": options.num_steps},
            ),
            "gymnax scan": Case(
                "jax", "cartpole", {"num_envs": n, "stack": True, "num_steps": options.num_steps}
            ),
        }
        for name, case in cases.items() if options.compile else ():
            figures[f"startup/{name}/{n}"] = _seconds(case, options)
    return figures


def _seconds(case: Case, options: Options) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # of the cache, and of temporary files, where there are precompiled headers
        cold, warm = (
            ask(case, options, "time", TORCHINDUCTOR_CACHE_DIR=folder, TMPDIR=folder)
            for _ in range(2)
        )
    for answer in (cold, warm):
        if "skipped" in answer:
            return answer
    return {"cold_seconds": cold["build_seconds"], "warm_seconds": warm["build_seconds"]}
