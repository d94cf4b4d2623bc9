"""A fresh process that continues envs from snapshots: `python fuzz_fresh_process.py`, one path of a file per line of input."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))


def continued(task):
    """What an env returns after a snapshot, and its snapshot at the end.

    The task has `seed` (of the stack) or `spec` (as JSON), `training`, `snapshot` and `operations`.
    """
    from fuzz_operations import play, tensors
    from fuzz_stacks import draw
    from gymnasium.envs.registration import EnvSpec

    import torchwrap as tw

    env = tw.make(EnvSpec.from_json(task["spec"])) if task["spec"] else draw(task["seed"]).make()
    env.train(task["training"])
    td = env.restore(task["snapshot"])
    root = tensors({"root": td})
    results, _ = play(env, task["operations"], td)
    return [root, *results, tensors({"snapshot": env.snapshot()})]


def main():
    for line in sys.stdin:
        path = Path(line.strip())
        answers = []
        for task in torch.load(path, weights_only=True):
            try:
                answers.append(continued(task))
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
        torch.save(answers, path)
        print(path, flush=True)


if __name__ == "__main__":
    main()
