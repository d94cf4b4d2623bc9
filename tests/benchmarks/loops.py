"""Whole training loops on HalfCheetah-v5: CleanRL's PPO, SB3's PPO, and examples/ppo.py.

A figure is the CPU time of a process per step of all envs, learning included: 2,048 steps of one
env and 10 epochs of 32 minibatches an iteration, four transforms.
"""

import importlib
import time
from collections.abc import Callable
from typing import Any

from .measure import Case, Figures, Options, ask

ENV_ID = "HalfCheetah-v5"
BATCH_SIZE = 2048
ITERATIONS = 4
ROUNDS = 3
LOOPS = {
    "cleanrl": {
        "gymnasium": Case("gymnasium", "cleanrl", {}),
        "torchwrap": Case("torchwrap", "cleanrl", {"way": "eager"}),
        "torchwrap-compiled": Case("torchwrap", "cleanrl", {"way": "compiled"}),
        "torchwrap-ppo.py": Case("torchwrap", "ppo_loop", {"compiled": False}),
        "torchwrap-ppo.py-compiled": Case("torchwrap", "ppo_loop", {"compiled": True}),
    },
    "sb3": {
        "sb3": Case("sb3", "ppo_loop", {}),
        "torchwrap": Case("torchwrap", "sb3_loop", {"way": "eager"}),
        "torchwrap-compiled": Case("torchwrap", "sb3_loop", {"way": "compiled"}),
    },
}


def run(options: Options) -> Figures:
    """The least time of some rounds, and its ratio to that of the first row, the peer."""
    figures: Figures = {}
    for n in options.num_envs or (1, 8):
        for loop, cases in LOOPS.items():
            rows: Figures = {}
            for _ in range(ROUNDS):
                for name, case in cases.items():
                    if name.endswith("compiled") and not options.compile:
                        continue
                    found = ask(case._replace(arguments={**case.arguments, "num_envs": n}), options)
                    row = rows.setdefault(name, found)
                    if "whole_us" in found:
                        row["whole_us"] = min(row["whole_us"], found["whole_us"])
            peer = rows[next(iter(cases))]
            for name, row in rows.items():
                if "whole_us" in row and "whole_us" in peer:
                    row["whole_ratio"] = row["whole_us"] / peer["whole_us"]
                figures[f"loops/{loop} {name}/{n}"] = row
    return figures


def cleanrl(num_envs: int, make_envs: Callable[[Any], Any]) -> dict[str, float]:
    """A step of cleanrl_style.py, with other envs."""
    module = importlib.import_module(".cleanrl_style", __package__)
    module.make_envs = make_envs

    def learn(iterations: int) -> None:
        args = module.Args(
            ENV_ID,
            num_envs=num_envs,
            num_steps=BATCH_SIZE // num_envs,
            total_timesteps=iterations * BATCH_SIZE,
            learning_rate=3e-4,
            gamma=0.99,
            num_minibatches=32,
            update_epochs=10,
        )
        module.main(args)

    return per_step(learn, num_envs)


def sb3(num_envs: int, venv: Any) -> dict[str, float]:
    """A step of SB3's PPO. Its hyperparameters are those by default, which are CleanRL's."""
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", venv, n_steps=BATCH_SIZE // num_envs, device="cpu", seed=0)
    return per_step(lambda iterations: model.learn(iterations * BATCH_SIZE), num_envs)


def per_step(learn: Callable[[int], Any], num_envs: int) -> dict[str, float]:
    """Microseconds of a step of all envs, after one iteration to warm up."""
    learn(1)
    start = time.process_time()
    learn(ITERATIONS)
    seconds = time.process_time() - start
    return {"whole_us": seconds * 1e6 * num_envs / (ITERATIONS * BATCH_SIZE)}
