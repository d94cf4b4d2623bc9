"""Transforms that count: what happened in an episode, and when it is long enough."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap.spaces import Signature
from torchwrap.transforms.base import Transform


class RecordEpisodeStatistics(Transform):
    """Writes the return and length of the running episode, and keeps those of the latest finished ones.

    Adds `("next", f"{stats_key}_return")`, `(num_envs, 1)` float32, and `("next", f"{stats_key}_length")`, `(num_envs, 1)`
    int64: at an episode's last step they are the whole episode's. An episode is closed when it is reset, whatever ended it.

    Args:
        buffer_length: how many finished episodes to keep.
        stats_key: the first word of the two keys.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=2), RecordEpisodeStatistics())
    >>> td = env.reset()
    >>> for _ in range(2):
    ...     transition, td = env.step(td.set("action", env.sample_action()))
    >>> transition["next", "episode_return"], env.get_wrapper_attr("transform").return_queue
    (tensor([[3.]]), tensor([3.]))
    """

    running_return: Tensor
    running_length: Tensor
    returns: Tensor
    lengths: Tensor
    count: Tensor

    def __init__(self, buffer_length: int = 100, stats_key: str = "episode") -> None:
        super().__init__()
        if isinstance(buffer_length, bool) or not isinstance(buffer_length, int) or buffer_length < 1:
            raise ValueError(f"RecordEpisodeStatistics needs a buffer_length of at least 1, but got {buffer_length!r}.")
        self.buffer_length = buffer_length
        self.stats_key = stats_key

    def setup(self, signature: Signature) -> Signature:
        n, size, device = signature.num_envs, self.buffer_length, signature.device
        self.register_buffer("running_return", torch.zeros(n, 1, dtype=torch.float64, device=device), persistent=False)
        self.register_buffer("running_length", torch.zeros(n, 1, dtype=torch.int64, device=device), persistent=False)
        # One slot more than asked for, which takes what is not to be kept: a write without a branch.
        self.register_buffer("returns", torch.zeros(size + 1, device=device), persistent=False)
        self.register_buffer("lengths", torch.zeros(size + 1, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        self.running_return.add_(td["reward"])
        self.running_length.add_(1)
        td.set(f"{self.stats_key}_return", self.running_return.to(torch.float32))
        return td.set(f"{self.stats_key}_length", self.running_length.clone())

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        finished = mask & (self.running_length > 0).squeeze(-1)
        rank = finished.cumsum(0)
        total = rank[-1:]
        kept = finished & (rank > total - self.buffer_length)
        slot = torch.where(kept, (self.count + rank - 1) % self.buffer_length, self.buffer_length)
        self.returns.index_copy_(0, slot, torch.where(kept, self.running_return.squeeze(-1), 0).to(torch.float32))
        self.lengths.index_copy_(0, slot, torch.where(kept, self.running_length.squeeze(-1), 0))
        self.count.add_(total)
        row = mask.unsqueeze(-1)
        self.running_return.masked_fill_(row, 0)
        self.running_length.masked_fill_(row, 0)
        return td

    @property
    def episode_count(self) -> int:
        """How many episodes have finished. Reading it waits for the device."""
        return int(self.count)

    @property
    def return_queue(self) -> Tensor:
        """Returns of the latest finished episodes, oldest first, at most `buffer_length`. Reading it waits for the device."""
        return self._latest(self.returns)

    @property
    def length_queue(self) -> Tensor:
        """Lengths of the latest finished episodes, as `return_queue`."""
        return self._latest(self.lengths)

    def _latest(self, ring: Tensor) -> Tensor:
        count = self.episode_count
        return ring[:-1].roll(-(count % self.buffer_length) if count > self.buffer_length else 0)[
            : min(count, self.buffer_length)
        ]


class TimeLimit(Transform):
    """Truncates episodes that reach a number of steps; they may terminate in the same step, and then both flags are set.

    Args:
        max_episode_steps: that number.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=None), TimeLimit(1))
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "truncated"]
    tensor([[True]])
    """

    elapsed: Tensor

    def __init__(self, max_episode_steps: int) -> None:
        super().__init__()
        if isinstance(max_episode_steps, bool) or not isinstance(max_episode_steps, int) or max_episode_steps < 1:
            raise ValueError(f"TimeLimit needs max_episode_steps of at least 1, but got {max_episode_steps!r}.")
        self.max_episode_steps = max_episode_steps

    def setup(self, signature: Signature) -> Signature:
        elapsed = torch.zeros(signature.num_envs, 1, dtype=torch.int64, device=signature.device)
        self.register_buffer("elapsed", elapsed, persistent=False)
        inner = signature.max_episode_steps
        limit = self.max_episode_steps if inner is None else min(inner, self.max_episode_steps)
        return signature.replace(max_episode_steps=limit)

    def step(self, td: TensorDict) -> TensorDict:
        self.elapsed.add_(1)
        return td.set("truncated", td["truncated"] | (self.elapsed >= self.max_episode_steps))

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        self.elapsed.masked_fill_(mask.unsqueeze(-1), 0)
        return td
