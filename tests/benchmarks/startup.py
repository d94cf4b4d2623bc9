"""Seconds to make, compile and call an env, with an empty and with a full cache of code."""

import tempfile

from .cartpole import STACK
from .glue import SEVEN
from .measure import Case, Figures, Options, ask


def run(options: Options) -> Figures:
    figures: Figures = {}
    for n in options.num_envs or (1024, 16384):
        if not options.compile:
            continue
        shared = {"num_envs": n, "way": "compiled", "device": options.device}
        seven = {**shared, "transforms": SEVEN}
        step = {**shared, "transforms": STACK}
        rollout = {**step, "num_steps": options.num_steps}
        scan = {"num_envs": n, "stack": True, "num_steps": options.num_steps}
        cases = {
            "step of seven": Case("torchwrap", "scripted", seven),
            "CartPole step": Case("torchwrap", "cartpole", step),
            "CartPole rollout": Case("torchwrap", "cartpole", rollout),
            "gymnax scan": Case("jax", "cartpole", scan),
        }
        for name, case in cases.items():
            figures[f"startup/{name}/{n}"] = _seconds(case, options)
    return figures


def _seconds(case: Case, options: Options) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        # Precompiled headers are temporary files.
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TMPDIR": folder}
        cold = ask(case, options, "time", **caches)
        warm = ask(case, options, "time", **caches)
    for answer in (cold, warm):
        if "skipped" in answer:
            return answer
    return {"cold_seconds": cold["build_seconds"], "warm_seconds": warm["build_seconds"]}
