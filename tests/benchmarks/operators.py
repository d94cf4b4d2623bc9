"""Operators of an eager step, by the function of torchwrap that calls them.

python -m tests.benchmarks.operators
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import torchwrap as tw
from torchwrap import transforms as T

LIBRARY = str(Path(tw.__file__).parent)


class Operators(TorchDispatchMode):
    """Counts operators by file and function."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame and not frame.f_code.co_filename.startswith(LIBRARY):
            frame = frame.f_back
        place = "outside of torchwrap"
        if frame:
            file = frame.f_code.co_filename.removeprefix(LIBRARY)
            place = f"torchwrap{file} {frame.f_code.co_name}"
        self.counts[f"{place}: {func.__name__}"] += 1
        return func(*args, **(kwargs or {}))


def pendulum(num_envs: int) -> tw.Env:
    """Pendulum-v1 with five transforms."""
    env = tw.make("Pendulum-v1", num_envs)
    five = (
        T.RecordEpisodeStatistics(),
        T.NormalizeObservation(),
        T.ClipObservation(-10, 10),
        T.NormalizeReward(),
        T.ClipReward(-10, 10),
    )
    return tw.TransformedEnv(env, *five)


def count(env: tw.Env, finishes: bool) -> Counter[str]:
    """The operators of a step in which the first env's episode ends, or none does."""
    env.reset(seed=0)
    action = env.sample_action()
    env.step(action)
    if finishes:
        elapsed = env.elapsed_steps
        elapsed[0] = env.signature.max_episode_steps - 1
        env.elapsed_steps = elapsed
    operators = Operators()
    with operators:
        env.step(action)
    return operators.counts


def main() -> None:
    envs = {"CartPole-v1": tw.make("CartPole-v1", 8), "Pendulum-v1, five transforms": pendulum(8)}
    for name, env in envs.items():
        for finishes in (False, True):
            counts = count(env, finishes)
            ends = "with a reset" if finishes else "without a reset"
            print(f"{counts.total()} {name}, {ends}")
            for place, number in counts.items():
                print(f"    {number} {place}")


if __name__ == "__main__":
    main()
