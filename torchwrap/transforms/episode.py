"""Episode statistics, time limits, and elapsed time as an observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap._core import validation
from torchwrap._core.buffers import EnvBuffer, EpisodeClock
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.spaces import Signature
from torchwrap.transforms.transform import AugmentedObservation, Transform

# The new result from the old one, the next value, and the number of values with it.
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda result, value, length: result + value,
    "mean": lambda result, value, length: result + (value - result) / length,
    "max": lambda result, value, length: torch.maximum(result, value),
    "min": lambda result, value, length: torch.minimum(result, value),
    "last": lambda result, value, length: value,
}


class RecordEpisodeStatistics(Transform):
    """Records return and length of the running episode, and of the latest finished episodes.

    It adds `("next", f"{stats_key}_return")` and `("next", f"{stats_key}_length")` at every step;
    the last step of an episode holds its totals. An episode counts as finished when its env is
    reset. The latest ones are in `return_queue` and `length_queue`.

    Args:
        buffer_length: number of finished episodes to keep.
        stats_key: prefix of the two keys.
        metrics: the "sum", "mean", "max", "min" or "last" value in the episode so far of entries
            `(num_envs, 1)` of the env's `info`, by name, such as
            `{"energy": "sum", "succeeded": ("success", "max")}`. They are under
            `("next", f"{stats_key}_{name}")`, float32, and the latest finished ones in
            `metric_queues`. Infos of repeated actions are those of their last step.

    Shape: the return is `(num_envs, 1)` float32, the length `(num_envs, 1)` int64.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=1), RecordEpisodeStatistics())
    >>> transition, _ = env.step(env.reset().set("action", env.sample_action()))
    >>> transition["next", "episode_return"], env.transforms[0].return_queue
    (tensor([[1.]]), tensor([1.]))
    """

    buffer_limits = {"count": (0, 2**53)}
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
        owner = "RecordEpisodeStatistics"
        self.buffer_length = validation.integer(owner, "buffer_length", buffer_length, at_least=1)
        self.stats_key = validation.text(owner, "stats_key", stats_key)
        self.metrics = dict(metrics or {})
        validation.names(owner, "the names of metrics", list(self.metrics))
        self._sources = {}
        for name, source in self.metrics.items():
            pair = (name, source) if isinstance(source, str) else tuple(source)
            if name in ("return", "length") or len(pair) != 2 or pair[1] not in _REDUCTIONS:
                must = f"metrics must have one of {[*_REDUCTIONS]}, and not be return or length"
                raise ValueError(refusal(owner, must, f"{name!r}: {source!r}"))
            self._sources[name] = pair

    def deployed(self) -> None:
        return None

    @staticmethod
    def of(env: nn.Module) -> list[RecordEpisodeStatistics]:
        """The recorders of an env, innermost first."""
        return [module for module in env.modules() if isinstance(module, RecordEpisodeStatistics)]

    def setup(self, signature: Signature) -> Signature:
        names = ("return", "length", *self.metrics)
        self.keys = {name: f"{self.stats_key}_{name}" for name in names}
        # A ring of (return, length, *metrics) with room for all envs to finish together, and a row
        # of zeros for envs that do not finish.
        self.ring_size = max(self.buffer_length, signature.num_envs)
        shape = (self.ring_size + 1, len(self.keys))
        device = signature.device
        records = torch.zeros(shape, dtype=torch.float64, device=device)
        self.register_state_buffer("records", records)
        count = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_state_buffer("count", count)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        length = self.running_length.add_(1)
        total = self.running_return.add_(td["reward"])
        keys = self.keys
        td.set(keys["return"], total.float())
        td.set(keys["length"], length.clone())
        if self.metrics:
            self._reduce_metrics(td, length)
        return td

    def _reduce_metrics(
        self,
        td: TensorDict,
        length: Tensor,
    ) -> None:
        info: Any = td.get("info", {})
        for index, (name, (entry, kind)) in enumerate(self._sources.items()):
            value = info.get(entry, None)
            if not isinstance(value, Tensor) or value.shape != length.shape:
                must = f"metric {name!r} must be a tensor {tuple(length.shape)} in the env's info"
                got = sorted(info.keys()) if value is None else validation.described(value)
                raise ValueError(refusal("RecordEpisodeStatistics", must, got))
            value = value.double()
            result = self.running_metrics[:, index : index + 1]
            reduced = _REDUCTIONS[kind](result, value, length)
            result.copy_(torch.where(length == 1, value, reduced))
            td.set(self.keys[name], result.float())

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        length = self.running_length
        is_finished = mask.column & (length > 0)  # an episode without a step does not count
        finished = is_finished.squeeze(1)
        # A row more than there are envs: Inductor of PyTorch 2.11 fails where a long scan is fused
        # with a reduction of as many rows.
        counts = torch.cat([self.count, finished]).cumsum(0)
        slots = torch.where(finished, counts[:-1] % self.ring_size, self.ring_size)
        episodes = torch.cat([self.running_return, length.double(), self.running_metrics], 1)
        episodes = torch.where(is_finished, episodes, 0)
        self.records.index_copy_(0, slots, episodes)
        self.count.add_(is_finished.sum())
        mask.fill_(self.running_return, 0)
        mask.fill_(self.running_length, 0)
        return td

    @property
    def episode_count(self) -> int:
        """Number of finished episodes. Reading it waits for the device."""
        return int(self.count)

    @property
    def return_queue(self) -> Tensor:
        """Returns of the latest finished episodes, oldest first: float32, `(n,)`.

        Reading it waits for the device, as for the other queues.
        """
        return self._latest()[:, 0].float()

    @property
    def length_queue(self) -> Tensor:
        """Lengths of the latest finished episodes, oldest first: int64, `(n,)`."""
        return self._latest()[:, 1].long()

    @property
    def metric_queues(self) -> dict[str, Tensor]:
        """Metrics of the latest finished episodes by name, as `return_queue`."""
        columns = self._latest()[:, 2:].float().unbind(1)
        return dict(zip(self.metrics, columns, strict=True))

    def _latest(self) -> Tensor:
        count = self.episode_count
        first = max(0, count - self.buffer_length)
        latest = torch.arange(first, count, device=self.count.device)
        return self.records[latest % self.ring_size]


class TimeLimit(Transform):
    """Truncates episodes after a number of steps.

    If an episode terminates in that very step, both flags are set.

    Args:
        max_episode_steps: maximum number of steps per episode. A lower limit of the env below stays
            in force.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> env = TransformedEnv(ScriptedEnv(1, episode_lengths=None), TimeLimit(1))
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "truncated"]
    tensor([[True]])
    """

    elapsed = EpisodeClock()

    def __init__(self, max_episode_steps: int) -> None:
        super().__init__()
        name = "max_episode_steps"
        self.max_episode_steps = validation.integer("TimeLimit", name, max_episode_steps, 1)

    def deployed(self) -> None:
        return None

    def setup(self, signature: Signature) -> Signature:
        limit = self.max_episode_steps
        if signature.max_episode_steps is not None:
            limit = min(limit, signature.max_episode_steps)
        return signature.replace(max_episode_steps=limit)

    def step(self, td: TensorDict) -> TensorDict:
        self.elapsed.add_(1)
        return td.set("truncated", td["truncated"] | (self.elapsed >= self.max_episode_steps))

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        mask.fill_(self.elapsed, 0)
        return td


class TimeAwareObservation(AugmentedObservation):
    """Adds the time since the start of the episode to the observation.

    The env needs a step limit, such as `TimeLimit`.

    Args:
        flatten: whether to flatten the result into one vector, as Gymnasium's `flatten` does.
        normalize_time: whether time is a fraction of the limit, float32 in [0, 1], instead of a
            number of steps, int32.
        dict_time_key: key of the time in a `Dict` observation.

    Shape: time is `(num_envs, 1)`. A `Dict` holds it under `dict_time_key`, a `Tuple` as its last
    element; any other observation becomes a `Dict` of "obs" and "time". With `flatten`, all of it
    is one vector.

    >>> from torchwrap.testing import ScriptedEnv; from torchwrap.wrappers import TransformedEnv
    >>> time_aware = TimeAwareObservation(normalize_time=True)
    >>> env = TransformedEnv(ScriptedEnv(1, (1,)), TimeLimit(4), time_aware)
    >>> env.step(env.reset().set("action", env.sample_action()))[1]["observation"]
    tensor([[1.0000, 0.2500]])
    """

    elapsed = EpisodeClock()

    def __init__(
        self, flatten: bool = True, normalize_time: bool = False, *, dict_time_key: str = "time"
    ) -> None:
        super().__init__()
        owner = "TimeAwareObservation"
        self.flatten = validation.flag(owner, "flatten", flatten)
        self.normalize_time = validation.flag(owner, "normalize_time", normalize_time)
        self.dict_time_key = validation.text(owner, "dict_time_key", dict_time_key)

    def setup(self, signature: Signature) -> Signature:
        limit = signature.max_episode_steps
        if limit is None:
            fault = "the env below must have a step limit"
            remedy = "Put TimeLimit below it"
            raise ValueError(refusal("TimeAwareObservation", fault, remedy=remedy))
        self.limit = limit
        time = Box(0.0, 1.0) if self.normalize_time else Box(0, limit, dtype=np.int32)
        is_dict = isinstance(signature.single_observation_space, Dict)
        key = self.dict_time_key if is_dict else "time"
        return self._add_space(signature, key, time, "dict_time_key")

    def step(self, td: TensorDict) -> TensorDict:
        self.elapsed.add_(1)
        return self._add_entry(td, self._time(self.elapsed))

    def reset(
        self,
        td: TensorDict,
        mask: RowMask,
    ) -> TensorDict:
        mask.fill_(self.elapsed, 0)
        return self._add_entry(td, self._time(self.elapsed))

    def _time(self, steps: Tensor) -> Tensor:
        return steps.float() / self.limit if self.normalize_time else steps.int()
