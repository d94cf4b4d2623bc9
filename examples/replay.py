"""Replay buffers for off-policy training, in a file to copy.

    buffer = ReplayBuffer(size=100_000, gamma=0.99, n_step=3)
    data = collect()  # of a Collector; `transition, td = env.step(td)` can be stored, too
    buffer.extend(data)
    batch = buffer.sample(256)
    target = td_target(batch, value(batch["next_observation"]))

A transition holds its true successor, also where an episode ended. So `terminated` alone decides
whether a target bootstraps: `discount` is 0 after a termination, and after a truncation the value
of the final observation counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

FLAGS = ("reward", "terminated", "done")
Device = torch.device | str | None


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


def episodes(data: TensorDictBase) -> list[TensorDict]:
    """The transitions `(n,)` of each episode in a collection `(num_envs, num_steps)`.

    They follow each other env after env. The first and the last episode of an env may be cut by the
    data: where the end is missing, the last `done` of an episode is False.
    """
    ends = data["next", "done"].squeeze(-1).clone()
    ends[:, -1] = True
    last = ends.flatten().nonzero().squeeze(1)
    lengths = last.diff(prepend=last.new_tensor([-1]))
    return list(data.reshape(-1).split(lengths.tolist()))


def sequences(data: TensorDictBase) -> list[TensorDict]:
    """The rows of each env for a model of sequences: an episode of n steps has n + 1 of them.

    A row holds an `observation`, the `action` and the `reward` that led to it, and `is_first`,
    `is_last` and `is_terminal`. The action and the reward of an initial observation are zeros. A
    state of `PolicyState` is the one that the policy met the observation with.

    Args:
        data: `(num_envs, num_steps)`. The first step of an env counts as that of an episode, unless
            `is_init` is there and not set.
    """
    rows, is_row = pairs(data, starts(data, default=True))
    return [each[kept] for each, kept in zip(rows, is_row)]


def pairs(data: TensorDictBase, begins: Tensor) -> tuple[TensorDict, Tensor]:
    """For each step an initial row and the successor's, `(num_envs, 2 * num_steps)`, and a mask.

    The mask has the successors, and the initial rows of steps that begin an episode. `begins`
    says so of the first steps: bool, `(num_envs,)`.
    """
    successor = data["next"]
    keys = data.keys(True)
    shared = [key for key in successor.keys(True, True) if key in keys]
    reward, terminated, done = (successor[name].squeeze(-1) for name in FLAGS)
    rows = successor.select(*shared)
    rows["action"] = data["action"]
    rows["reward"] = reward
    rows["is_first"] = torch.zeros_like(done)
    rows["is_last"] = done
    rows["is_terminal"] = terminated
    initial = rows.apply(torch.zeros_like)
    initial.update(data.select(*shared))
    initial["is_first"] = torch.ones_like(done)
    is_initial = done.roll(1, 1)
    is_initial[:, 0] = begins
    is_row = torch.stack([is_initial, torch.ones_like(done)], 2)
    both = torch.stack([initial, rows], 2)
    return both.flatten(1, 2), is_row.flatten(1, 2)


def starts(data: TensorDictBase, default: bool = False) -> Tensor:
    """Whether the first step of each env begins an episode, as `is_init` says: `(num_envs,)`."""
    is_init = torch.full_like(data["next", "done"], default)
    if "is_init" in data.keys():
        is_init = data["is_init"]
    return is_init[:, 0, 0]


def differs(first: Tensor | TensorDictBase, second: Tensor | TensorDictBase) -> Tensor:
    """Whether observations `(n, ...)` differ: bool, `(n,)`. NaN equals NaN."""
    if isinstance(first, TensorDictBase):
        parts = [differs(first[key], second[key]) for key in first.keys()]
        return torch.stack(parts).any(0)
    both_nan = (first != first) & (second != second)
    unequal = (first != second) & ~both_nan
    return unequal.reshape(len(first), -1).any(1)


@dataclass(eq=False)
class ReplayBuffer:
    """A ring of the latest transitions, as tensors `(size // num_envs, num_envs, ...)`.

    Windows of n steps end with their episode, and with the newest step. They also end where data
    does not begin with the newest successors, as after `env.reset()` in mid-episode or in a run
    that continues with new episodes. Once there is data of all envs, single episodes can be stored,
    too, such as demonstrations: each where the fewest steps are.

    Args:
        size: number of transitions. gamma: discount factor per step. n_step: number of rewards in a
        return. device: device of the storage and of samples. None takes that of the first data.
    """

    size: int
    gamma: float
    n_step: int = 1
    device: Device = None
    storage = None  # a TensorDict
    history = 0  # number of the oldest steps that are not sampled

    def extend(self, data: TensorDictBase) -> None:
        """Stores transitions.

        Args:
            data: of a collection `(num_envs, num_steps)`, of a step `(num_envs,)`, or of an episode
                `(1, num_steps)`.
        """
        if data.dim() == 1:
            data = data.unsqueeze(1)
        begins = starts(data)
        # Without no_grad(), an actor leaves its graph in the actions.
        data = self.encode(data).detach()
        self.device = self.device or data.device or data["next", "done"].device
        data = data.transpose(0, 1).to(self.device)
        begins = begins.to(self.device)
        if self.storage is None:
            self.allocate(data[0])
            self.write(data, self.envs)
        elif data.shape[1] == self.num_envs:
            self.append(data, self.envs, begins)
        elif data.shape[1] == 1:
            for part in data.split(self.capacity):  # in several columns if it is long
                self.append(part, self.written.argmin().unsqueeze(0), begins)
        else:
            fault = f"data must have {self.num_envs} envs as before, got {data.shape[1]}"
            raise ValueError(f"extend: {fault}.")

    def append(self, data: TensorDictBase, envs: Tensor, begins: Tensor) -> None:
        """Stores encoded steps `(num_steps, n)` of some envs after the newest ones."""
        slots = (self.written[envs] - 1) % self.capacity
        newest = slots.to(self.device), envs.to(self.device)
        last = self.storage["next"][newest]
        is_gap = differs(last["observation"], data["observation"][0]) | begins
        self.storage["next", "done"][newest] = last["done"] | is_gap.unsqueeze(1)
        self.write(data, envs)

    def allocate(self, row: TensorDictBase) -> None:
        self.num_envs = len(row)
        self.capacity = max(1, self.size // self.num_envs)
        self.storage = torch.zeros_like(row).expand(self.capacity, self.num_envs).clone()
        # On the host, so that nobody waits for the device: indices, and number of steps by env
        self.envs = torch.arange(self.num_envs)
        self.written = torch.zeros_like(self.envs)

    def write(self, data: TensorDictBase, envs: Tensor) -> None:
        """Stores encoded steps `(num_steps, n)` of some envs."""
        data = data[-self.capacity :]
        slots = (self.written[envs] + torch.arange(len(data)).unsqueeze(1)) % self.capacity
        self.storage[slots.to(self.device), envs.to(self.device)] = data
        self.written[envs] += len(data)
        self.counts = self.written.clamp(max=self.capacity)  # steps in storage
        self.oldest = (self.written - self.counts).to(self.device)
        self.newest = self.counts.to(self.device) - 1

    def state_dict(self) -> dict[str, Any]:
        """The steps in storage, oldest first, as new tensors `(num_steps, num_envs, ...)`.

        With "counts", the number of steps by env, if they differ.
        """
        if self.storage is None:
            return {}
        steps = torch.arange(self.num_steps, device=self.device).unsqueeze(1)
        envs = self.envs.to(self.device)
        state = self.storage[self.slots(steps, envs), envs].to_dict()
        if len(self.counts.unique()) > 1:
            state["counts"] = self.counts
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the steps. A buffer of another size takes the newest ones that fit."""
        self.storage = None
        if state:
            state = dict(state)
            counts = state.pop("counts", None)
            done = state["next"]["done"]
            self.device = self.device or done.device
            data = TensorDict(state, done.shape[:2], device=self.device)
            self.allocate(data[0])
            if counts is None:
                self.write(data, self.envs)
            else:
                for env, count in zip(self.envs.split(1), counts.tolist()):
                    self.write(data[:count, env], env)

    def sample(self, batch_size: int) -> TensorDict:
        """Draws transitions uniformly, with replacement; see `get`."""
        shape = (batch_size,)
        if self.num_steps <= self.history:
            fault = f"must store more than {self.history} steps of each env, got {self.num_steps}"
            raise ValueError(f"sample: {fault}. Call extend() first.")
        if self.counts.min() == self.counts.max():
            steps = torch.randint(self.history, self.num_steps, shape, device=self.device)
            envs = torch.randint(self.num_envs, shape, device=self.device)
            return self.get(steps, envs)
        ends = (self.counts - self.history).clamp(min=0).cumsum(0)
        number = torch.randint(int(ends[-1]), shape, device=self.device)
        ends = ends.to(self.device)
        envs = torch.searchsorted(ends, number, right=True)
        newer = ends[envs] - number - 1  # number of newer steps of the env
        return self.get(self.newest[envs] - newer, envs)

    def get(self, steps: Tensor, envs: Tensor) -> TensorDict:
        """The transitions `(n,)` of steps and envs, int64 `(n,)`. Step 0 is the oldest in storage.

        They hold `observation`, `action`, the n-step `reward` and `discount`, each `(n,)`, and
        `next_observation`, whose value `discount` multiplies.
        """
        window = steps.unsqueeze(1) + torch.arange(self.n_step, device=self.device)
        return self.make_batch(window, envs, self.read(window, envs.unsqueeze(1), "next"))

    def make_batch(self, window: Tensor, envs: Tensor, successors: TensorDict) -> TensorDict:
        """The transitions of windows of steps `(n, n_step)` with these successors."""
        reward, terminated, done = (successors[name].squeeze(-1) for name in FLAGS)
        is_last = done | (window >= self.newest[envs].unsqueeze(1))
        reward, discount, last = n_step_returns(reward, terminated, is_last, self.gamma)
        steps = window[:, 0]
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
        """Number of steps in storage of the env that has most."""
        return 0 if self.storage is None else int(self.counts.max())

    def slots(self, steps: Tensor, envs: Tensor) -> Tensor:
        """Where steps are in the ring. Step 0 of an env is its oldest."""
        return (self.oldest[envs] + steps) % self.capacity

    def read(self, steps: Tensor, envs: Tensor, *key: str) -> Tensor | TensorDict:
        return self.storage[key][self.slots(steps, envs), envs]

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
    Data that does not continue the newest steps has to begin with initial observations.

    Args:
        stack_size: `FrameStackObservation`'s, for observations `(num_envs, stack_size, ...)`.
        padding_type: `FrameStackObservation`'s: "reset", or "zero" where zeros lie in the space.
        size, gamma, n_step, device: as for `ReplayBuffer`.
    """

    def __init__(self, stack_size: int, *args, padding_type: str = "reset", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.history = stack_size - 1
        self.padding_type = padding_type

    def encode(self, data: TensorDictBase) -> TensorDictBase:
        observation = data["observation"]
        if observation.shape[2] != self.history + 1:
            fault = f"stack_size must be observation.shape[2], got {self.history + 1}"
            raise ValueError(f"FrameReplayBuffer: {fault} for {tuple(observation.shape)}.")
        encoded = super().encode(data)
        encoded["observation"] = observation[:, :, -1]
        encoded["next", "observation"] = data["next", "observation"][:, :, -1]
        return encoded

    def observation(self, steps: Tensor, envs: Tensor) -> Tensor:
        ago = torch.arange(self.history + 1, device=self.device)
        steps = steps.unsqueeze(1)
        envs = envs.unsqueeze(1)
        is_end = self.read(steps - ago[1:], envs, "next", "done").squeeze(-1)
        is_reached = is_end.cumsum(1) == 0
        elapsed = is_reached.sum(1, keepdim=True)  # steps since the episode began, or `history`
        ago = ago.flip(0)  # oldest frame first
        frames = self.read(steps - torch.minimum(ago, elapsed), envs, "observation")
        if self.padding_type == "zero":
            is_padding = (ago > elapsed).view(*frames.shape[:2], *[1] * (frames.dim() - 2))
            frames = frames.masked_fill(is_padding, 0)
        return frames

    def next_observation(self, steps: Tensor, envs: Tensor) -> Tensor:
        newest = self.read(steps, envs, "next", "observation").unsqueeze(1)
        return torch.cat([self.observation(steps, envs)[:, 1:], newest], 1)


class HindsightReplayBuffer(ReplayBuffer):
    """Replaces goals by ones that the episode achieves later, as hindsight experience replay.

    Andrychowicz et al. (2017), with their strategy "future", as each sample is drawn. Observations
    are a `Dict` with "achieved_goal" and "desired_goal", as those of Gymnasium's robots. A window
    of n steps has one goal: it ends where the env sets another one. Terminations stay.

    Args:
        reward: takes achieved and desired goals, each `(n, ...)`, and returns rewards `(n,)`.
        ratio: the share of samples with a new goal; 0.8 are four of five.
        size, gamma, n_step, device: as for `ReplayBuffer`.
    """

    def __init__(
        self, reward: Callable[[Tensor, Tensor], Tensor], *args, ratio: float = 0.8, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)
        self.reward = reward
        self.ratio = ratio
        self.ends: Tensor | None = None  # the last step of the episode of each step in storage

    def write(self, data: TensorDictBase, envs: Tensor) -> None:
        super().write(data, envs)
        self.ends = None

    def find_ends(self) -> Tensor:
        """The last step that is stored of the episode of each step, `(num_steps, num_envs)`."""
        steps = torch.arange(self.num_steps, device=self.device).unsqueeze(1)
        envs = self.envs.to(self.device)
        is_end = self.read(steps, envs, "next", "done").squeeze(-1)
        is_end = is_end | (steps >= self.newest)
        ends = torch.where(is_end, steps, self.num_steps)
        return ends.flip(0).cummin(0).values.flip(0)

    def get(self, steps: Tensor, envs: Tensor) -> TensorDict:
        if self.ends is None:
            self.ends = self.find_ends()
        left = self.ends[steps, envs] - steps + 1
        position = torch.rand(len(steps), dtype=torch.float64, device=self.device)
        later = steps + (position * left).long()
        is_new = torch.rand(len(steps), device=self.device) < self.ratio

        window = steps.unsqueeze(1) + torch.arange(self.n_step, device=self.device)
        column = envs.unsqueeze(1)
        successors = self.read(window, column, "next")
        own = self.read(window, column, "observation", "desired_goal")
        following = successors["observation", "desired_goal"]
        is_other = (own != following).flatten(2).any(-1) & ~is_new.unsqueeze(1)
        successors["done"] |= is_other.unsqueeze(-1)

        achieved = successors["observation", "achieved_goal"]
        new = self.read(later, envs, "next", "observation", "achieved_goal")
        goals = new.unsqueeze(1).expand_as(achieved)
        rewards = self.reward(achieved.flatten(0, 1), goals.flatten(0, 1))
        reward = successors["reward"]
        rewards = rewards.view_as(reward).to(reward.dtype)
        successors["reward"] = torch.where(is_new.view(-1, 1, 1), rewards, reward)

        batch = self.make_batch(window, envs, successors)
        is_new = is_new.view(-1, *[1] * (new.dim() - 1))
        goal = torch.where(is_new, new, batch["observation", "desired_goal"])
        for name in ("observation", "next_observation"):
            batch[name, "desired_goal"] = goal
        return batch


@dataclass(eq=False)
class SequenceBuffer:
    """A ring for each env of the latest rows of `sequences`, for world models.

    A sequence begins at any row, and goes on where an episode ends. Each observation is stored
    once. Data that does not begin with the newest observation is of a new episode.

    Args:
        size: number of rows. length: number of rows of a sequence. device: device of the storage
        and of samples. None takes that of the first data.
    """

    size: int
    length: int
    device: Device = None

    def clear(self) -> None:
        self.storage: TensorDict | None = None
        self.written = torch.zeros(1, dtype=torch.int64)  # rows by env
        self.capacity = self.size

    __post_init__ = clear

    def extend(self, data: TensorDictBase) -> None:
        """Stores the rows of a collection `(num_envs, num_steps)`."""
        done = data["next", "done"].squeeze(-1)
        self.device = self.device or done.device
        data = data.detach().to(self.device)
        if self.storage is None:
            rows, _ = pairs(data[:, :1], done[:, 0])
            self.allocate(rows[:, 0])
        elif len(data) != len(self.envs):
            fault = f"data must have {len(self.envs)} envs as before, got {len(data)}"
            raise ValueError(f"extend: {fault}.")
        newest = (self.written - 1) % self.capacity, self.envs
        row = self.storage[newest]
        is_gap = differs(row["observation"], data["observation"][:, 0])
        begins = row["is_last"] | is_gap | starts(data)
        self.storage["is_last"][newest] = begins
        rows, is_row = pairs(data, begins)
        numbers = is_row.cumsum(1) + self.written.unsqueeze(1)
        self.written = numbers[:, -1]
        # The newest rows that fit: equal indices would be written in any order.
        oldest = self.written - self.capacity
        is_kept = is_row & (numbers > oldest.unsqueeze(1))
        slots = (numbers - 1) % self.capacity
        envs = self.envs.unsqueeze(1).expand_as(slots)
        self.storage[slots[is_kept], envs[is_kept]] = rows[is_kept]

    def sample(self, batch_size: int) -> TensorDict:
        """Draws sequences `(batch_size, length)`: first the env, then the first row, uniformly."""
        num_rows = self.written.clamp(max=self.capacity)
        num_starts = num_rows - self.length + 1
        if num_starts.min() < 1:
            fault = f"must store {self.length} rows of each env, got {num_rows.min()}"
            raise ValueError(f"sample: {fault}. Call extend() first, or make the buffer larger.")
        envs = torch.randint(len(self.envs), (batch_size,), device=self.device)
        oldest = (self.written - num_rows)[envs]
        position = torch.rand(batch_size, dtype=torch.float64, device=self.device)
        first = oldest + (position * num_starts[envs]).long()
        rows = first.unsqueeze(1) + torch.arange(self.length, device=self.device)
        return self.storage[rows % self.capacity, envs.unsqueeze(1)]

    def state_dict(self) -> dict[str, Any]:
        """The storage as new tensors, and the number of rows that were written by env."""
        if self.storage is None:
            return {}
        return {"rows": self.storage.clone().to_dict(), "written": self.written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the rows, and the number that fits."""
        self.clear()
        if state:
            is_last = state["rows"]["is_last"]
            self.device = self.device or is_last.device
            rows = TensorDict(state["rows"], is_last.shape, device=self.device)
            self.storage = rows.clone()
            self.written = state["written"].to(self.device)
            self.capacity, num_envs = rows.shape
            self.envs = torch.arange(num_envs, device=self.device)

    def allocate(self, row: TensorDictBase) -> None:
        num_envs = len(row)
        self.envs = torch.arange(num_envs, device=self.device)
        self.capacity = max(1, self.size // num_envs)
        self.storage = torch.zeros_like(row).expand(self.capacity, num_envs).clone()
        self.storage["is_last"].fill_(True)  # so that the first rows are initial
        self.written = torch.zeros_like(self.envs)
