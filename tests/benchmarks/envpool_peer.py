"""EnvPool's side: its CartPole-v1 in C++, bare, because it has no transforms."""

import itertools
import os

import envpool
import numpy as np

from .worker import Timed


def cartpole(num_envs: int) -> Timed:
    threads = int(os.environ.get("OMP_NUM_THREADS", 0))  # 0: EnvPool's default
    options = dict(env_type="gymnasium", num_threads=threads, seed=0)
    env = envpool.make("CartPole-v1", num_envs=num_envs, **options)
    env.reset()
    actions = np.random.default_rng(0).integers(0, 2, (16, num_envs))
    turns = itertools.cycle(actions)
    return Timed(lambda: env.step(next(turns)))
