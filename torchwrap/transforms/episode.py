"""Transforms that count: what happened in an episode, and when it is long enough."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import arguments, spaces
from torchwrap.buffer import Buffer
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

    running_return = Buffer()
    running_length = Buffer()
    records = Buffer()
    count = Buffer()
    behind = Buffer()

    def __init__(self, buffer_length: int = 100, stats_key: str = "episode") -> None:
        super().__init__()
        self.buffer_length = arguments.integer("RecordEpisodeStatistics", "buffer_length", buffer_length, at_least=1)
        if not isinstance(stats_key, str) or not stats_key:
            raise TypeError(f"RecordEpisodeStatistics needs a word as stats_key, but got {stats_key!r}.")
        self.stats_key = stats_key

    def setup(self, signature: Signature) -> Signature:
        n, device = signature.num_envs, signature.device
        self.return_key, self.length_key = f"{self.stats_key}_return", f"{self.stats_key}_length"
        # A ring of (return, length) with room for all envs to finish at once, and behind it a row for each env that did not:
        # so records are written without a branch, and no two to the same place.
        self.ring_size = max(self.buffer_length, n)
        for name, shape in (("running_return", (n, 1)), ("running_length", (n, 1)), ("records", (self.ring_size + n, 2))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64, device=device), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("behind", torch.arange(n, device=device) + self.ring_size, persistent=False)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        td.set(self.return_key, self.running_return.add_(td["reward"]).float())
        return td.set(self.length_key, self.running_length.add_(1).long())

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        row, finished = mask.unsqueeze(-1), mask & (self.running_length[:, 0] > 0)
        if spaces.free_to_look(mask):
            rows = finished.nonzero().squeeze(1)
            record = torch.cat([self.running_return[rows], self.running_length[rows]], 1)
            place = torch.arange(1, len(rows) + 1) + self.count
            self.records.index_copy_(0, place.remainder_(self.ring_size), record)
            self.count.add_(len(rows))
        else:
            record = torch.cat([self.running_return, self.running_length], 1)
            rank = finished.cumsum(0)
            place = torch.where(finished, (rank + self.count) % self.ring_size, self.behind)
            self.records.index_copy_(0, place, torch.where(finished.unsqueeze(-1), record, 0))
            self.count.add_(rank[-1:])
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
        return self._latest()[:, 0].float()

    @property
    def length_queue(self) -> Tensor:
        """Lengths of the latest finished episodes, as `return_queue`."""
        return self._latest()[:, 1].long()

    def _latest(self) -> Tensor:
        count = self.episode_count
        places = torch.arange(max(0, count - self.buffer_length), count, device=self.count.device) + 1
        return self.records[places % self.ring_size]


class TimeLimit(Transform):
    """Truncates episodes that reach a number of steps; they may terminate in the same step, and then both flags are set.

    Args:
        max_episode_steps: that number.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=None), TimeLimit(1))
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "truncated"]
    tensor([[True]])
    """

    elapsed = Buffer()

    def __init__(self, max_episode_steps: int) -> None:
        super().__init__()
        self.max_episode_steps = arguments.integer("TimeLimit", "max_episode_steps", max_episode_steps, at_least=1)

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
