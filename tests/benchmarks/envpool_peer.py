"""EnvPool's side: its CartPole-v1 in C++, bare, because it has no transforms."""

import itertools
import os

import envpool
import numpy as np

from .worker import Timed


def cartpole(num_envs: int) -> Timed:
    threads = int(os.environ.get("OMP_NUM_THREADS", 0))  # 0: EnvPool's default
    env = envpool.make(
        "CartPole-v1", env_type="gymnasium", num_envs=num_envs, num_threads=threads, seed=0
    )
    env.reset()
    random = np.random.default_rng(0)
    turns = itertools.cycle([random.integers(0, 2, num_envs) for _ in range(16)])
    return Timed(lambda: env.step(next(turns)))
