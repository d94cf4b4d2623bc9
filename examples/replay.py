"""Replay buffers for off-policy training, in a file to copy.

    buffer = ReplayBuffer(size=100_000, gamma=0.99, n_step=3)
    data, td = collect(td)  # of a Collector; `transition, td = env.step(td)` can be stored, too
    buffer.extend(data)
    batch = buffer.sample(256)
    target = batch["reward"] + batch["discount"] * value(batch["next_observation"])

A transition of torchwrap holds its true successor, also where an episode ended. So `terminated` alone decides whether a target
bootstraps: `discount` is 0 after a termination, and after a truncation the value is that of the final observation.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

FLAGS = ("reward", "terminated", "done")


def n_step_returns(
    reward: Tensor, terminated: Tensor, done: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of the first step of each window `(..., n)` of successive steps of an env, up to the end of its episode.

    Sutton and Barto (2018), section 7.1. With *m* steps up to that end, or *n*:

    Returns:
        returns: `reward[0] + gamma * reward[1] + ... + gamma**(m - 1) * reward[m - 1]`, `(...)`.
        discount: of the value of the last successor, `gamma**m`, or 0 where the episode terminated.
        last: `m - 1`, the step whose successor that is, int64.
    """
    steps = torch.arange(reward.shape[-1], device=reward.device)
    reached = done.cumsum(-1) - done.long() == 0  # no step before has ended the episode
    last = reached.sum(-1) - 1
    returns = torch.where(reached, reward * gamma**steps, 0).sum(-1)
    is_final = terminated.gather(-1, last.unsqueeze(-1)).squeeze(-1)
    return returns, gamma ** (last + 1) * ~is_final, last


class ReplayBuffer:
    """A ring of the latest `size` transitions of all envs, as tensors `(size // num_envs, num_envs, ...)`.

    Successive steps of an env are expected to follow each other: after `env.reset()` in mid-episode, begin a new buffer.

    Args:
        size: number of transitions.
        gamma: discount factor per step.
        n_step: number of rewards in a return. Windows end with their episode, and with the newest step.
        device: of the storage, and of what `sample` returns. None is that of the first data.
    """

    history = 0  # number of the oldest steps that are not sampled

    def __init__(
        self, size: int, gamma: float, n_step: int = 1, device: torch.device | str | None = None
    ) -> None:
        self.size, self.gamma, self.n_step, self.device = size, gamma, n_step, device
        self.storage: TensorDict | None = None
        self.written = 0  # steps of each env

    def extend(self, data: TensorDictBase) -> None:
        """Stores transitions: those of a collection `(num_envs, num_steps)`, or of one step `(num_envs,)`."""
        data = self.encode(data if data.dim() == 2 else data.unsqueeze(1))
        if self.storage is None:
            self.device = self.device or data.device or data["action"].device
            self.num_envs, self.capacity = data.shape[0], max(1, self.size // data.shape[0])
            shape = [self.capacity, self.num_envs]
            self.storage = data[:, 0].apply(
                lambda leaf: torch.zeros(
                    *shape, *leaf.shape[1:], dtype=leaf.dtype, device=self.device
                ),
                batch_size=shape,
            )
        data = data[:, -self.capacity :].transpose(0, 1).to(self.device)
        rows = (
            torch.arange(self.written, self.written + len(data), device=self.device) % self.capacity
        )
        self.storage[rows] = data
        self.written += len(data)

    def sample(self, batch_size: int) -> TensorDict:
        """Draws transitions uniformly, with replacement, by PyTorch's global generator; see `get`."""
        if self.num_steps <= self.history:
            raise ValueError(
                f"sample needs more than {self.history} steps of each env, but got {self.num_steps} so far."
            )
        steps = torch.randint(self.history, self.num_steps, (batch_size,), device=self.device)
        return self.get(steps, torch.randint(self.num_envs, (batch_size,), device=self.device))

    def get(self, steps: Tensor, envs: Tensor) -> TensorDict:
        """The transitions `(n,)` of these steps and envs, int64 `(n,)`, of which step 0 is the oldest one that is stored.

        They hold `observation`, `action`, the n-step `reward` and `discount`, each `(n,)`, and `next_observation`: where the
        value is to be taken that `discount` multiplies.
        """
        window = steps.unsqueeze(1) + torch.arange(self.n_step, device=self.device)
        successors = self.at(window, envs.unsqueeze(1), "next")
        reward, terminated, done = (successors[name].squeeze(-1) for name in FLAGS)
        is_newest = window >= self.num_steps - 1
        reward, discount, last = n_step_returns(reward, terminated, done | is_newest, self.gamma)
        batch = {
            "observation": self.observation(steps, envs),
            "action": self.at(steps, envs, "action"),
        }
        batch |= {
            "reward": reward,
            "discount": discount,
            "next_observation": self.next_observation(steps + last, envs),
        }
        return TensorDict(batch, [len(steps)])

    @property
    def num_steps(self) -> int:
        """Number of steps of each env that are stored."""
        return 0 if self.storage is None else min(self.written, self.capacity)

    def at(self, steps: Tensor, envs: Tensor, *key: str) -> Tensor | TensorDict:
        oldest = self.written - self.num_steps
        return self.storage[key][(oldest + steps) % self.capacity, envs]

    # How observations are stored.

    def encode(self, data: TensorDictBase) -> TensorDictBase:
        return data.select(
            "observation", "action", ("next", "observation"), *(("next", name) for name in FLAGS)
        )

    def observation(self, steps: Tensor, envs: Tensor) -> Tensor | TensorDict:
        return self.at(steps, envs, "observation")

    def next_observation(self, steps: Tensor, envs: Tensor) -> Tensor | TensorDict:
        return self.at(steps, envs, "next", "observation")


class FrameReplayBuffer(ReplayBuffer):
    """Stores the newest frame of each stack of `FrameStackObservation(stack_size)`, and makes the stacks again in `sample`.

    A transition takes two frames instead of twice `stack_size`: its observation's, and its successor's. Stacks are equal bit
    for bit; they begin with their episode. The `stack_size - 1` oldest steps are not sampled, because their stacks may lack
    frames that are no longer stored.

    Args:
        stack_size: as that of `FrameStackObservation`, with observations `(num_envs, stack_size, ...)`.
        padding_type: as that of `FrameStackObservation`: "reset", or "zero" where zeros lie in the space.
        size, gamma, n_step, device: as for `ReplayBuffer`.
    """

    def __init__(self, stack_size: int, *args, padding_type: str = "reset", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.history, self.padding_type = stack_size - 1, padding_type
        self.elapsed: Tensor | int = (
            0  # steps of each env since its episode began, or since the first one that was stored
        )

    def encode(self, data: TensorDictBase) -> TensorDictBase:
        observation, done, (num_envs, num_steps) = (
            data["observation"],
            data["next", "done"].squeeze(-1),
            data.shape,
        )
        if observation.shape[2] != self.history + 1:
            got = tuple(observation.shape[2:])
            raise ValueError(
                f"FrameReplayBuffer needs observations of {self.history + 1} frames, but got {got}."
            )
        following = torch.arange(1, num_steps + 1, device=done.device)
        before = torch.zeros(num_envs, 1, dtype=torch.int64, device=done.device) - self.elapsed
        starts = torch.cat(
            [before, torch.where(done, following, before).cummax(1)[0]], 1
        )  # of the episode of each step
        self.elapsed = num_steps - starts[:, -1:]
        elapsed = (following - 1 - starts[:, :-1]).clamp(max=self.history)
        encoded = (
            super()
            .encode(data)
            .set("observation", observation[:, :, -1])
            .set("elapsed", elapsed.int())
        )
        return encoded.set(("next", "observation"), data["next", "observation"][:, :, -1])

    def observation(self, steps: Tensor, envs: Tensor) -> Tensor:
        ago = torch.arange(self.history, -1, -1, device=self.device)  # oldest frame first
        steps, envs = steps.unsqueeze(1), envs.unsqueeze(1)
        elapsed = self.at(steps, envs, "elapsed").long()
        frames = self.at(steps - torch.minimum(ago, elapsed), envs, "observation")
        if self.padding_type == "zero":
            is_padding = (ago > elapsed).view(*frames.shape[:2], *(1,) * (frames.dim() - 2))
            frames = frames.masked_fill(is_padding, 0)
        return frames

    def next_observation(self, steps: Tensor, envs: Tensor) -> Tensor:
        newest = self.at(steps, envs, "next", "observation").unsqueeze(1)
        return torch.cat([self.observation(steps, envs)[:, 1:], newest], 1)


class TorchRLReplayBuffer:
    """The same from TorchRL's `ReplayBuffer`, which stores n-step returns; a step is stored when its window is complete."""

    def __init__(
        self, size: int, gamma: float, n_step: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        import torchrl.data

        self.buffer = torchrl.data.ReplayBuffer(
            storage=torchrl.data.LazyTensorStorage(size, device=device)
        )
        self.gamma, self.n_step, self.device = gamma, n_step, device
        self.recent: ReplayBuffer | None = None

    def extend(self, data: TensorDictBase) -> None:
        """Stores transitions `(num_envs, num_steps)`, the same number of steps at each call."""
        num_envs, num_steps = data.shape
        if self.recent is None:
            self.recent = ReplayBuffer(
                num_envs * (num_steps + self.n_step - 1), self.gamma, self.n_step, self.device
            )
        self.recent.extend(data)
        complete = torch.arange(
            max(0, self.recent.num_steps - self.n_step + 1), device=self.device
        )[-num_steps:]
        steps, envs = torch.meshgrid(
            complete, torch.arange(num_envs, device=self.device), indexing="ij"
        )
        if len(complete) > 0:
            self.buffer.extend(self.recent.get(steps.flatten(), envs.flatten()))

    def sample(self, batch_size: int) -> TensorDict:
        """As `ReplayBuffer.sample`."""
        return self.buffer.sample(batch_size)
