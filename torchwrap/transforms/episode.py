"""Transforms that count: what happened in an episode, and when it is long enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict
from torch import Tensor

from torchwrap import arguments, masks, spaces
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
        for name in ("running_return", "running_length"):
            self.register_rows(name, torch.zeros(n, 1, dtype=torch.float64, device=device))
        records = torch.zeros(self.ring_size + n, 2, dtype=torch.float64, device=device)
        self.register_buffer("records", records, persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)
        self.register_rows("behind", torch.arange(n, device=device) + self.ring_size)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        td.set(self.return_key, self.running_return.add_(td["reward"]).float())
        return td.set(self.length_key, self.running_length.add_(1).long())

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        row = mask.unsqueeze(-1)
        if masks.free_to_look(mask):
            # In NumPy, whose small operators cost half.
            rows, count = masks.rows(mask).numpy(), self.count.numpy()
            finished = np.concatenate([self.running_return.numpy()[rows], self.running_length.numpy()[rows]], 1)
            finished = finished[finished[:, 1] > 0]
            self.records.numpy()[np.arange(count[0] + 1, count[0] + 1 + len(finished)) % self.ring_size] = finished
            count += len(finished)
        else:
            record = torch.cat([self.running_return, self.running_length], 1)
            finishes = mask & (self.running_length[:, 0] > 0)
            rank = finishes.cumsum(0)
            place = torch.where(finishes, (rank + self.count) % self.ring_size, self.behind)
            self.records.index_copy_(0, place, torch.where(finishes.unsqueeze(-1), record, 0))
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


class EvalWrapper(Transform):
    """Sums up each env's first episode alone, as Brax's wrapper of that name: so short ones count no more than long ones.

    It goes on top of the other transforms. A reset of your own begins another first episode.

    Args:
        metrics: names of what else to sum, numbers `(num_envs, 1)` that the env has in its `info`.

    The results, to be read when no episode is active any more: `episode_metrics`, a dict of sums `(num_envs, 1)` float32 for
    "reward" and each name; `active_episodes`, bool, and `episode_steps`, int64, both `(num_envs, 1)`.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(2, episode_lengths=(1, 2)), EvalWrapper())
    >>> td = env.reset()
    >>> while env.transform.active_episodes.any():
    ...     _, td = env.step(td.set("action", env.sample_action()))
    >>> env.transform.episode_metrics["reward"].flatten()  # 1, and 1 + 2
    tensor([1., 3.])
    """

    sums = Buffer()
    active_episodes = Buffer()
    episode_steps = Buffer()
    ended = Buffer()

    def __init__(self, metrics: Sequence[str] = ()) -> None:
        super().__init__()
        names = metrics if isinstance(metrics, tuple | list) else [None]
        if not all(isinstance(name, str) and name not in ("", "reward") for name in names) or len(set(names)) < len(names):
            raise TypeError(
                f'EvalWrapper needs metrics as a list of names other than "reward", each once, but got {metrics!r}.'
            )
        self.metrics = list(metrics)

    def setup(self, signature: Signature) -> Signature:
        n, device = signature.num_envs, signature.device
        self.register_rows("sums", torch.zeros(n, 1 + len(self.metrics), device=device))
        self.register_rows("episode_steps", torch.zeros(n, 1, dtype=torch.int64, device=device))
        for name in ("active_episodes", "ended"):
            self.register_rows(name, torch.zeros(n, 1, dtype=torch.bool, device=device))
        return signature

    @property
    def episode_metrics(self) -> dict[str, Tensor]:
        """Sums over each env's first episode, by name."""
        return dict(zip(["reward", *self.metrics], self.sums.clone().split(1, 1), strict=True))

    def step(self, td: TensorDict) -> TensorDict:
        active = self.active_episodes
        try:
            values = [td["reward"], *(td["info", name] for name in self.metrics)]
        except KeyError as error:
            raise ValueError(f"EvalWrapper needs an env with {self.metrics} in its info, but got {error.args[0]}.") from error
        self.sums.add_(torch.where(active, torch.cat(values, 1), 0))
        self.episode_steps.add_(active)
        torch.logical_or(td["terminated"], td["truncated"], out=self.ended)
        active.logical_and_(~self.ended)
        return td

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        # After an episode's last step it is the env that begins anew; else somebody else did.
        anew = mask.unsqueeze(1) & ~self.ended
        self.sums.masked_fill_(anew, 0)
        self.episode_steps.masked_fill_(anew, 0)
        self.active_episodes.logical_or_(anew)
        self.ended.masked_fill_(mask.unsqueeze(1), False)
        return td


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
        self.register_rows("elapsed", elapsed)
        inner = signature.max_episode_steps
        limit = self.max_episode_steps if inner is None else min(inner, self.max_episode_steps)
        return signature.replace(max_episode_steps=limit)

    def step(self, td: TensorDict) -> TensorDict:
        self.elapsed.add_(1)
        return td.set("truncated", td["truncated"] | (self.elapsed >= self.max_episode_steps))

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        self.elapsed.masked_fill_(mask.unsqueeze(-1), 0)
        return td


class TimeAwareObservation(Transform):
    """Adds the number of steps since the episode began.

    Args:
        flatten: whether observation and time become one vector, as Gymnasium's `flatten` makes it.
        normalize_time: whether time is a share of the limit, float32 in [0, 1], and not a number of steps, int32.
        dict_time_key: where the time goes in a `Dict` observation.

    Shape: time is `(num_envs, 1)`. `Dict` observations get it under `dict_time_key`, `Tuple` ones at the end, others become a
    `Dict` of "obs" and "time".

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, (1,)), TimeLimit(4), TimeAwareObservation(normalize_time=True))
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"]
    tensor([[1.0000, 0.2500]])
    """

    elapsed = Buffer()

    def __init__(self, flatten: bool = True, normalize_time: bool = False, *, dict_time_key: str = "time") -> None:
        super().__init__()
        if not isinstance(dict_time_key, str):
            raise TypeError(f"TimeAwareObservation needs dict_time_key as text, but got {dict_time_key!r}.")
        self.flatten = arguments.flag("TimeAwareObservation", "flatten", flatten)
        self.normalize_time = arguments.flag("TimeAwareObservation", "normalize_time", normalize_time)
        self.dict_time_key = dict_time_key

    def setup(self, signature: Signature) -> Signature:
        limit, below = signature.max_episode_steps, signature.single_observation_space
        if limit is None:
            raise ValueError("TimeAwareObservation needs an env with a limit of steps, but got none: put TimeLimit below it.")
        if limit > np.iinfo(np.int32).max and not self.normalize_time:
            raise ValueError(
                f"TimeAwareObservation needs a limit of steps that int32 holds, or normalize_time=True, but got {limit}."
            )
        self.limit = limit
        time = gym_spaces.Box(0.0, 1.0) if self.normalize_time else gym_spaces.Box(0, limit, dtype=np.int32)
        parts = spaces.children(below)
        self.time_key = self.dict_time_key
        self.space: gymnasium.Space[Any]
        if isinstance(below, gym_spaces.Tuple):
            self.time_key, self.space = str(len(below.spaces)), gym_spaces.Tuple((*below.spaces, time))
        elif isinstance(below, gym_spaces.Dict):
            if self.time_key in below.spaces:
                raise ValueError(
                    f"TimeAwareObservation needs a dict_time_key that is free, but got {self.time_key!r} in {below}."
                )
            self.space = gym_spaces.Dict({self.time_key: time, **below.spaces})
        else:
            self.time_key, self.space = "time", gym_spaces.Dict(obs=below, time=time)
        self.alone = parts is None
        above = gym_spaces.utils.flatten_space(self.space) if self.flatten else self.space
        self.dtype = spaces.dtype(above) if self.flatten else None
        elapsed = torch.zeros(signature.num_envs, 1, dtype=torch.int64, device=signature.device)
        self.register_rows("elapsed", elapsed)
        return signature.replace(single_observation_space=above)

    def _aware(self, td: TensorDict) -> TensorDict:
        observation = td["observation"]
        time = self.elapsed / self.limit if self.normalize_time else self.elapsed.int()
        parts = {"obs": observation} if self.alone else dict(observation.items())
        aware = TensorDict({**parts, self.time_key: time}, batch_size=time.shape[:1])
        return td.set("observation", spaces.flatten(self.space, aware, self.dtype) if self.dtype is not None else aware)

    def step(self, td: TensorDict) -> TensorDict:
        self.elapsed.add_(1)
        return self._aware(td)

    def reset(self, td: TensorDict, mask: Tensor) -> TensorDict:
        self.elapsed.masked_fill_(mask.unsqueeze(-1), 0)
        return self._aware(td)
