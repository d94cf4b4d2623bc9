"""An eager step of seven transforms, and its lower bound: the same operators in one function, on plain tensors.

`python -m tests.benchmarks.lower_bound [num_envs ...] [--threads N] [--rounds N]` measures both in turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

import torchwrap as tw
from torchwrap._core.rows import RowMask

from . import script
from .glue import SEVEN
from .torchwrap_side import TRANSFORMS
from .worker import Timed, turn


class Flat:
    """The seven transforms without modules, TensorDicts and checks. It shares the tensors of an env that has been reset."""

    def __init__(self, env: tw.TransformedEnv) -> None:
        _, record, observations, _, stack, reward, _ = env.transforms.flat()
        self.env, self.record = env.unwrapped, record
        self.observations, self.rewards = observations.statistics, reward.statistics
        self.returns, self.lengths, self.discounted = record.running_return, record.running_length, reward.discounted_return
        self.frames, self.order = stack.histories[0].frames, stack.histories[0].order

    @torch.no_grad()
    def step(self, action: Tensor) -> tuple[Tensor, ...]:
        """Observation, reward, done, episode return and length of the successor, and the observation to act on next."""
        td = self.env._step(action.clamp(-1, 1))
        episode_return, episode_length = self.returns.add_(td["reward"]).float(), self.lengths.add_(1).clone()
        frame = _normalize(self.observations, td["observation"]).clamp(-10, 10)
        slots = self.order.numpy()
        slots[:] = (slots + 1) % 4
        self.frames.select(1, int(slots[-1])).copy_(frame)
        observation = self.frames.index_select(1, self.order)
        torch.add(td["reward"], self.discounted, alpha=0.99, out=self.discounted)
        _count(self.rewards, self.discounted)
        reward = (td["reward"] * _moments(self.rewards)[1].float()).clamp(-10, 10)
        done = td["terminated"] | td["truncated"]
        following = observation.clone()
        finished = done.numpy().ravel().nonzero()[0]
        if len(finished):
            self._reset(done, torch.from_numpy(finished), following)
        return observation, reward, done, episode_return, episode_length, following

    def _reset(self, done: Tensor, rows: Tensor, following: Tensor) -> None:
        initial = self.env._reset(RowMask(done))["observation"].index_select(0, rows)
        length = self.lengths.index_select(0, rows)
        entries = torch.where(self.record.is_return, self.returns.index_select(0, rows), length)
        slots = (int(self.record.count) + np.arange(len(rows))) % self.record.ring_size
        self.record.records.index_copy_(0, torch.from_numpy(slots), entries)
        self.record.count.add_(len(rows))
        for buffer in (self.returns, self.lengths, self.discounted):
            buffer.index_fill_(0, rows, 0)
        frame = _normalize(self.observations, initial).clamp(-10, 10)
        stack = frame.unsqueeze(1).expand(-1, 4, -1).clone()
        self.frames.index_put_((rows.unsqueeze(1), self.order), stack)
        following.index_copy_(0, rows, stack)


def _count(sums: Any, rows: Tensor) -> Tensor:
    differences = rows - sums.reference
    wide = differences.double()
    total, squares = wide.sum(0), (wide.square() if wide is differences else wide.square_()).sum(0)
    if not math.isfinite(squares.dot(sums.squares)):
        return sums._count_finite(rows, None)  # the first rows of all
    sums.total.add_(total)
    sums.squares.add_(squares)
    sums.count.add_(len(rows))
    return differences


def _moments(sums: Any) -> tuple[Tensor, Tensor]:
    number = (sums.count - sums.skipped).double()
    mean = sums.total / number
    return mean, (sums.squares / number).addcmul_(mean, mean, value=-1).relu_().add_(1e-8).rsqrt_()


def _normalize(sums: Any, rows: Tensor) -> Tensor:
    differences = _count(sums, rows)
    mean, scale = _moments(sums)
    return differences.sub_(mean.float()).mul_(scale.float())


def pair(num_envs: int) -> tuple[Callable[[], TensorDict], Callable[[], tuple[Tensor, ...]]]:
    """Two functions that take the same steps: one returns the transition of an env, the other what `Flat` computes."""
    envs = [tw.TransformedEnv(script.scripted(num_envs), *(TRANSFORMS[name]() for name in SEVEN)) for _ in range(2)]
    td, _ = (env.reset(seed=0) for env in envs)
    for env in envs:
        env.unwrapped.elapsed.copy_(script.elapsed(num_envs))
    actions, flat = script.actions(num_envs), Flat(envs[1])

    def step() -> TensorDict:
        nonlocal td
        transition, td = envs[0].step(td.set("action", actions))
        return transition

    return step, lambda: flat.step(actions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("num_envs", type=int, nargs="*", default=[64, 1024, 16384])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for num_envs in options.num_envs:
        times: list[list[float]] = [[], []]
        both = pair(num_envs)
        for _ in range(options.rounds + 1):
            for found, call in zip(times, both, strict=True):
                found.append(turn(Timed(call), 0.02))
        ours, bound = (found[1:] for found in times)
        ratio = statistics.median(first / second for first, second in zip(ours, bound, strict=True))
        print(
            f"{num_envs:6} envs: {min(ours):.1f} us, bound {min(bound):.1f}: {min(ours) / min(bound):.2f} times by minima, "
            f"{ratio:.2f} by the median of ratios"
        )


if __name__ == "__main__":
    main()
