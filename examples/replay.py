"""Replay buffers for off-policy training, in a file to copy.

    buffer = ReplayBuffer(size=100_000, gamma=0.99, n_step=3)
    data, td = collect(td)  # of a Collector; `transition, td = env.step(td)` can be stored, too
    buffer.extend(data)
    batch = buffer.sample(256)
    target = td_target(batch, value(batch["next_observation"]))

A transition holds its true successor, also where an episode ended. So `terminated` alone decides
whether a target bootstraps: `discount` is 0 after a termination, and after a truncation the value
of the final observation counts.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

FLAGS = ("reward", "terminated", "done")


def td_target(batch: TensorDict | dict[str, Tensor], next_value: Tensor) -> Tensor:
    """`reward + discount * next_value`, and `reward` where `discount` is 0: each `(n,)`.

    There, `next_value` may be NaN, as of a simulator that blew up, and NaN * 0 is NaN.
    """
    discount = batch["discount"]
    return batch["reward"] + torch.where(discount > 0, discount * next_value, 0)


def n_step_returns(
    reward: Tensor, terminated: Tensor, done: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of windows `(..., n)` of an env's successive steps, up to the end of the episode.

    Sutton and Barto (2018), section 7.1. With *m* steps up to that end, or *n*:

    Returns:
        returns: `reward[0] + gamma * reward[1] + ... + gamma**(m - 1) * reward[m - 1]`, `(...)`.
        discount: `gamma**m`, for the value of the last successor; 0 where the episode terminated.
        last: `m - 1`, the step with the last successor, int64.
    """
    steps = torch.arange(reward.shape[-1], device=reward.device)
    ends_before = done.cumsum(-1) - done.long()
    reached = ends_before == 0
    last = reached.sum(-1) - 1
    returns = torch.where(reached, reward * gamma**steps, 0).sum(-1)
    is_final = terminated.gather(-1, last.unsqueeze(-1)).squeeze(-1)
    return returns, gamma ** (last + 1) * ~is_final, last


def sequences(data: TensorDictBase) -> list[TensorDict]:
    """The rows of each env for a model of sequences: an episode of n steps has n + 1 of them.

    A row holds an `observation` with the `action`, `reward`, `terminated` and `done` that came with
    it, and `is_first`. Initial observations have it set, and zeros in the other entries.

    Args:
        data: a collection `(num_envs, num_steps)`. An env's first row counts as initial.
    """
    rows = data["next"].select("observation", *FLAGS)
    for name in FLAGS:
        rows[name] = rows[name].squeeze(-1)
    rows["action"] = data["action"]
    rows["is_first"] = torch.zeros_like(rows["done"])
    initial = rows.apply(torch.zeros_like)
    initial["observation"] = data["observation"]
    initial["is_first"] = ~rows["is_first"]
    begins = rows["done"].roll(1, 1)
    begins[:, 0] = True
    pairs = torch.stack([initial, rows], 2).flatten(1, 2)
    is_row = torch.stack([begins, torch.ones_like(begins)], 2).flatten(1, 2)
    return [steps[kept] for steps, kept in zip(pairs, is_row)]


class ReplayBuffer:
    """A ring of the latest transitions, as tensors `(size // num_envs, num_envs, ...)`.

    Steps of an env must follow each other: after `env.reset()` in mid-episode, begin a new buffer.

    Args:
        size: number of transitions. gamma: discount factor per step. n_step: number of rewards in a
        return. Windows end with their episode, and with the newest step. device: device of the
        storage and of samples. None takes that of the first data.
    """

    history = 0  # number of the oldest steps that are not sampled

    def __init__(
        self, size: int, gamma: float, n_step: int = 1, device: torch.device | str | None = None
    ) -> None:
        self.size = size
        self.gamma = gamma
        self.n_step = n_step
        self.device = device
        self.storage: TensorDict | None = None
        self.written = 0  # steps of each env

    def extend(self, data: TensorDictBase) -> None:
        """Stores transitions of a collection `(num_envs, num_steps)` or of a step `(num_envs,)`."""
        if data.dim() == 1:
            data = data.unsqueeze(1)
        # Without no_grad(), an actor leaves its graph in the actions.
        data = self.encode(data).detach()
        if self.storage is None:
            self.device = self.device or data.device or data["action"].device
            self.num_envs = len(data)
            self.capacity = max(1, self.size // self.num_envs)
            row = torch.zeros_like(data[:, 0], device=self.device)
            self.storage = row.expand(self.capacity, self.num_envs).clone()
        data = data[:, -self.capacity :].transpose(0, 1).to(self.device)
        steps = torch.arange(len(data), device=self.device) + self.written
        self.storage[steps % self.capacity] = data
        self.written += len(data)

    def sample(self, batch_size: int) -> TensorDict:
        """Draws transitions uniformly, with replacement; see `get`."""
        shape = (batch_size,)
        if self.num_steps <= self.history:
            fault = f"must store more than {self.history} steps of each env, got {self.num_steps}"
            raise ValueError(f"sample: {fault}. Call extend() first.")
        steps = torch.randint(self.history, self.num_steps, shape, device=self.device)
        envs = torch.randint(self.num_envs, shape, device=self.device)
        return self.get(steps, envs)

    def get(self, steps: Tensor, envs: Tensor) -> TensorDict:
        """The transitions `(n,)` of steps and envs, int64 `(n,)`. Step 0 is the oldest in storage.

        They hold `observation`, `action`, the n-step `reward` and `discount`, each `(n,)`, and
        `next_observation`, whose value `discount` multiplies.
        """
        window = steps.unsqueeze(1) + torch.arange(self.n_step, device=self.device)
        successors = self.read(window, envs.unsqueeze(1), "next")
        reward, terminated, done = (successors[name].squeeze(-1) for name in FLAGS)
        is_last = done | (window >= self.num_steps - 1)
        reward, discount, last = n_step_returns(reward, terminated, is_last, self.gamma)
        batch = {
            "observation": self.observation(steps, envs),
            "action": self.read(steps, envs, "action"),
            "reward": reward,
            "discount": discount,
            "next_observation": self.next_observation(steps + last, envs),
        }
        return TensorDict(batch, [len(steps)])

    @property
    def num_steps(self) -> int:
        """Number of steps of each env in storage."""
        return 0 if self.storage is None else min(self.written, self.capacity)

    def read(self, steps: Tensor, envs: Tensor, *key: str) -> Tensor | TensorDict:
        oldest = self.written - self.num_steps
        return self.storage[key][(oldest + steps) % self.capacity, envs]

    # Storage of observations

    def encode(self, data: TensorDictBase) -> TensorDictBase:
        successor = [("next", name) for name in ("observation", *FLAGS)]
        return data.select("observation", "action", *successor)

    def observation(self, steps: Tensor, envs: Tensor) -> Tensor | TensorDict:
        return self.read(steps, envs, "observation")

    def next_observation(self, steps: Tensor, envs: Tensor) -> Tensor | TensorDict:
        return self.read(steps, envs, "next", "observation")


class FrameReplayBuffer(ReplayBuffer):
    """Stores the newest frame of each stack of `FrameStackObservation`, and samples whole stacks.

    A transition takes two frames instead of twice `stack_size`. Sampled stacks are bit-identical.
    The `stack_size - 1` oldest steps are not sampled, because older frames are no longer stored.

    Args:
        stack_size: `FrameStackObservation`'s, for observations `(num_envs, stack_size, ...)`.
        padding_type: `FrameStackObservation`'s: "reset", or "zero" where zeros lie in the space.
        size, gamma, n_step, device: as for `ReplayBuffer`.
    """

    def __init__(self, stack_size: int, *args, padding_type: str = "reset", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.history = stack_size - 1
        self.padding_type = padding_type
        # Steps of each env since its episode began, or since the first stored step
        self.elapsed: Tensor | int = 0

    def encode(self, data: TensorDictBase) -> TensorDictBase:
        observation = data["observation"]
        if observation.shape[2] != self.history + 1:
            fault = f"stack_size must be observation.shape[2], got {self.history + 1}"
            raise ValueError(f"FrameReplayBuffer: {fault} for {tuple(observation.shape)}.")
        done = data["next", "done"].squeeze(-1)
        num_envs, num_steps = data.shape
        following = torch.arange(1, num_steps + 1, device=done.device)
        before = torch.zeros(num_envs, 1, dtype=torch.int64, device=done.device) - self.elapsed
        latest_start, _ = torch.where(done, following, before).cummax(1)
        starts = torch.cat([before, latest_start], 1)  # the first step of each step's episode
        self.elapsed = num_steps - starts[:, -1:]
        elapsed = following - 1 - starts[:, :-1]
        encoded = super().encode(data)
        encoded["elapsed"] = elapsed.clamp(max=self.history).int()
        encoded["observation"] = observation[:, :, -1]
        encoded["next", "observation"] = data["next", "observation"][:, :, -1]
        return encoded

    def observation(self, steps: Tensor, envs: Tensor) -> Tensor:
        ago = torch.arange(self.history, -1, -1, device=self.device)  # oldest frame first
        steps = steps.unsqueeze(1)
        envs = envs.unsqueeze(1)
        elapsed = self.read(steps, envs, "elapsed").long()
        frames = self.read(steps - torch.minimum(ago, elapsed), envs, "observation")
        if self.padding_type == "zero":
            is_padding = (ago > elapsed).view(*frames.shape[:2], *[1] * (frames.dim() - 2))
            frames = frames.masked_fill(is_padding, 0)
        return frames

    def next_observation(self, steps: Tensor, envs: Tensor) -> Tensor:
        newest = self.read(steps, envs, "next", "observation").unsqueeze(1)
        return torch.cat([self.observation(steps, envs)[:, 1:], newest], 1)


class TorchRLReplayBuffer:
    """TorchRL's `ReplayBuffer` with n-step returns: steps are stored with complete windows."""

    def __init__(
        self, size: int, gamma: float, n_step: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        import torchrl.data

        storage = torchrl.data.LazyTensorStorage(size, device=device)
        self.buffer = torchrl.data.ReplayBuffer(storage=storage)
        self.gamma = gamma
        self.n_step = n_step
        self.device = device
        self.recent: ReplayBuffer | None = None

    def extend(self, data: TensorDictBase) -> None:
        """Stores transitions `(num_envs, num_steps)`, the same number of steps at each call."""
        num_envs, num_steps = data.shape
        if self.recent is None:
            size = num_envs * (num_steps + self.n_step - 1)
            self.recent = ReplayBuffer(size, self.gamma, self.n_step, self.device)
        self.recent.extend(data)
        num_complete = max(0, self.recent.num_steps - self.n_step + 1)
        complete = torch.arange(num_complete, device=self.device)[-num_steps:]
        rows = torch.cartesian_prod(complete, torch.arange(num_envs, device=self.device))
        if len(rows) > 0:
            self.buffer.extend(self.recent.get(*rows.unbind(1)))

    def sample(self, batch_size: int) -> TensorDict:
        """As `ReplayBuffer.sample`."""
        return self.buffer.sample(batch_size)
