"""Episode statistics, time limits, and elapsed time as an observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gym_spaces
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer, EpisodeClock
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import Transform

# From the result so far, the next value, and the number of values.
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda so_far, value, length: so_far + value,
    "mean": lambda so_far, value, length: so_far + (value - so_far) / length,
    "max": lambda so_far, value, length: torch.maximum(so_far, value),
    "min": lambda so_far, value, length: torch.minimum(so_far, value),
    "last": lambda so_far, value, length: value,
}


class RecordEpisodeStatistics(Transform):
    """Records the return and length of the running episode at every step, and of the latest finished episodes.

    It adds `("next", f"{stats_key}_return")` and `("next", f"{stats_key}_length")`, which at the last step of an episode hold
    its totals. An episode counts as finished when its env is reset. The latest ones are in `return_queue` and `length_queue`.

    Args:
        buffer_length: number of finished episodes to keep.
        stats_key: prefix of the two keys.
        metrics: the "sum", "mean", "max", "min" or "last" value in the episode so far of entries `(num_envs, 1)` of the env's
            `info`, by name, such as `{"energy": "sum", "succeeded": ("success", "max")}`. They are under
            `("next", f"{stats_key}_{name}")`, float32, and the latest finished ones in `metric_queues`.

    Shape: the return is `(num_envs, 1)` float32, the length `(num_envs, 1)` int64.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=1), RecordEpisodeStatistics())
    >>> transition, _ = env.step(env.reset().set("action", env.sample_action()))
    >>> transition["next", "episode_return"], env.transforms[0].return_queue
    (tensor([[1.]]), tensor([1.]))
    """

    records: Tensor
    count: Tensor
    running_return = EnvBuffer((1,), torch.float64)
    running_length = EnvBuffer((1,), torch.int64)
    running_metrics = EnvBuffer(
        row=lambda self: torch.zeros(len(self.metrics), dtype=torch.float64)
    )

    def __init__(
        self,
        buffer_length: int = 100,
        stats_key: str = "episode",
        *,
        metrics: Mapping[str, str | tuple[str, str]] | None = None,
    ) -> None:
        super().__init__()
        self.buffer_length = validation.integer(
            "RecordEpisodeStatistics", "buffer_length", buffer_length, at_least=1
        )
        if not isinstance(stats_key, str) or not stats_key:
            raise TypeError(
                f"RecordEpisodeStatistics needs a non-empty string as stats_key, but got {stats_key!r}."
            )
        self.stats_key, self.metrics = stats_key, dict(metrics or {})
        validation.names("RecordEpisodeStatistics", "the names of metrics", list(self.metrics))
        self._sources = {
            name: (name, each) if isinstance(each, str) else tuple(each)
            for name, each in self.metrics.items()
        }
        for name, source in self._sources.items():
            if name in ("return", "length") or len(source) != 2 or source[1] not in _REDUCTIONS:
                needed = f"RecordEpisodeStatistics needs metrics with one of {[*_REDUCTIONS]}, and not named return or length"
                raise ValueError(f"{needed}, but got {name!r}: {self.metrics[name]!r}.")

    def deployed(self) -> None:
        return None

    @staticmethod
    def of(env: nn.Module) -> list[RecordEpisodeStatistics]:
        """The recorders of an env, innermost first."""
        return [module for module in env.modules() if isinstance(module, RecordEpisodeStatistics)]

    def setup(self, signature: Signature) -> Signature:
        num_envs, device = signature.num_envs, signature.device
        every_step = [name for name, kind in self._sources.values() if kind != "last"]
        if (
            lost := []
            if signature.summed_info is None
            else sorted(set(every_step) - signature.summed_info)
        ):
            got = f"a layer that repeats actions returns only the last {lost}: make that layer with summed_info={lost}"
            raise ValueError(f"RecordEpisodeStatistics needs metrics of every step, but {got}.")
        self.keys = {
            name: f"{self.stats_key}_{name}" for name in ("return", "length", *self.metrics)
        }
        # A ring of (return, length, *metrics) with room for all envs to finish together. The last `num_envs` rows are scratch
        # space, so that `reset` has an index to write each row to, finished or not.
        self.ring_size = max(self.buffer_length, num_envs)
        records = torch.zeros(
            self.ring_size + num_envs, len(self.keys), dtype=torch.float64, device=device
        )
        self.register_state_buffer("records", records)
        self.register_state_buffer("count", torch.zeros(1, dtype=torch.int64, device=device))
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        td.set(self.keys["return"], self.running_return.add_(td["reward"]).float())
        td.set(self.keys["length"], self.running_length.add_(1).clone())
        if self.metrics:
            values = spaces.infos(
                "RecordEpisodeStatistics", td, [info for info, _ in self._sources.values()]
            )
            columns = zip(
                self._sources.items(), values, self.running_metrics.split(1, 1), strict=True
            )
            for (name, (_, kind)), value, so_far in columns:
                latest = _REDUCTIONS[kind](so_far, value.double(), self.running_length)
                so_far.copy_(torch.where(self.running_length == 1, value.double(), latest))
                td.set(self.keys[name], so_far.float())
        return td

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        length = mask.gather(self.running_length)
        finished = (length > 0).squeeze(-1)  # an episode without a step does not count
        if mask.gathered is not None:
            finished = finished & mask.gathered
        number = finished.cumsum(0)  # 1 for the first
        scratch = torch.arange(len(length), device=length.device) + self.ring_size
        slot = torch.where(finished, (self.count + number - 1) % self.ring_size, scratch)
        record = torch.cat(
            [mask.gather(self.running_return), length.double(), mask.gather(self.running_metrics)],
            1,
        )
        self.records.index_copy_(0, slot, torch.where(finished.unsqueeze(-1), record, 0))
        self.count.add_(finished.sum())
        mask.fill_(self.running_return, 0)
        mask.fill_(self.running_length, 0)
        return td

    @property
    def episode_count(self) -> int:
        """Number of finished episodes. Reading it waits for the device."""
        return int(self.count)

    @property
    def return_queue(self) -> Tensor:
        """Returns of the latest finished episodes, oldest first: float32, `(n,)`. Reading it waits for the device."""
        return self._latest()[:, 0].float()

    @property
    def length_queue(self) -> Tensor:
        """Lengths of the latest finished episodes, oldest first: int64, `(n,)`. Reading it waits for the device."""
        return self._latest()[:, 1].long()

    @property
    def metric_queues(self) -> dict[str, Tensor]:
        """Metrics of the latest finished episodes by name, as `return_queue`."""
        return dict(zip(self.metrics, self._latest()[:, 2:].float().unbind(1), strict=True))

    def _latest(self) -> Tensor:
        count = self.episode_count
        latest = torch.arange(max(0, count - self.buffer_length), count, device=self.count.device)
        return self.records[latest % self.ring_size]


class TimeLimit(Transform):
    """Truncates episodes after a number of steps. If an episode terminates in that very step, both flags are set.

    Args:
        max_episode_steps: maximum number of steps per episode. A lower limit of the env below stays in force.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=None), TimeLimit(1))
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "truncated"]
    tensor([[True]])
    """

    elapsed = EpisodeClock()

    def __init__(self, max_episode_steps: int) -> None:
        super().__init__()
        self.max_episode_steps = validation.integer(
            "TimeLimit", "max_episode_steps", max_episode_steps, at_least=1
        )

    def deployed(self) -> None:
        return None

    def setup(self, signature: Signature) -> Signature:
        inner = signature.max_episode_steps
        limit = self.max_episode_steps if inner is None else min(inner, self.max_episode_steps)
        return signature.replace(max_episode_steps=limit)

    def step(self, td: TensorDict) -> TensorDict:
        self.elapsed.add_(1)
        return td.set("truncated", td["truncated"] | (self.elapsed >= self.max_episode_steps))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        mask.fill_(self.elapsed, 0)
        return td


class TimeAwareObservation(Transform):
    """Adds the time since the start of the episode to the observation. The env needs a step limit, such as `TimeLimit`.

    Args:
        flatten: whether to flatten the result into one vector, as Gymnasium's `flatten` does.
        normalize_time: whether time is a fraction of the limit, float32 in [0, 1], instead of a number of steps, int32.
        dict_time_key: key of the time in a `Dict` observation.

    Shape: time is `(num_envs, 1)`. A `Dict` holds it under `dict_time_key`, a `Tuple` as its last element; any other
    observation becomes a `Dict` of "obs" and "time". With `flatten`, all of it is one vector.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, (1,)), TimeLimit(4), TimeAwareObservation(normalize_time=True))
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"]
    tensor([[1.0000, 0.2500]])
    """

    elapsed = EpisodeClock()

    def __init__(
        self, flatten: bool = True, normalize_time: bool = False, *, dict_time_key: str = "time"
    ) -> None:
        super().__init__()
        if not isinstance(dict_time_key, str):
            raise TypeError(
                f"TimeAwareObservation needs dict_time_key as a string, but got {dict_time_key!r}."
            )
        self.flatten = validation.flag("TimeAwareObservation", "flatten", flatten)
        self.normalize_time = validation.flag(
            "TimeAwareObservation", "normalize_time", normalize_time
        )
        self.dict_time_key = dict_time_key

    def setup(self, signature: Signature) -> Signature:
        limit, below = signature.max_episode_steps, signature.single_observation_space
        if limit is None:
            raise ValueError(
                "TimeAwareObservation needs a step limit, but got an env without one: put TimeLimit below it."
            )
        if limit > np.iinfo(np.int32).max and not self.normalize_time:
            needed = "a step limit that int32 holds, or normalize_time=True"
            raise ValueError(f"TimeAwareObservation needs {needed}, but got {limit}.")
        self.limit = limit
        time = (
            gym_spaces.Box(0.0, 1.0)
            if self.normalize_time
            else gym_spaces.Box(0, limit, dtype=np.int32)
        )
        self.time_key = self.dict_time_key
        self.space: gym_spaces.Space[Any]  # before flattening
        if isinstance(below, gym_spaces.Tuple):
            self.time_key, self.space = (
                str(len(below.spaces)),
                gym_spaces.Tuple((*below.spaces, time)),
            )
        elif isinstance(below, gym_spaces.Dict):
            if self.time_key in below.spaces:
                raise ValueError(
                    f"TimeAwareObservation needs an unused dict_time_key, but got {self.time_key!r} in {below}."
                )
            self.space = spaces.dict_like(below, {self.time_key: time, **below.spaces})
        else:
            self.time_key, self.space = "time", gym_spaces.Dict(obs=below, time=time)
        self.is_single = spaces.children(below) is None
        above = gym_spaces.utils.flatten_space(self.space) if self.flatten else self.space
        self.dtype = spaces.dtype(above) if self.flatten else None
        return signature.replace(single_observation_space=above)

    def _add_time(self, td: TensorDict) -> TensorDict:
        observation = td["observation"]
        time = self.elapsed.float() / self.limit if self.normalize_time else self.elapsed.int()
        parts = {"obs": observation} if self.is_single else dict(observation.items())
        timed = TensorDict({**parts, self.time_key: time}, batch_size=time.shape[:1])
        return td.set(
            "observation",
            timed if self.dtype is None else spaces.flatten(self.space, timed, self.dtype),
        )

    def step(self, td: TensorDict) -> TensorDict:
        self.elapsed.add_(1)
        return self._add_time(td)

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        mask.fill_(self.elapsed, 0)
        return self._add_time(td)
