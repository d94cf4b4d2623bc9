"""The base of envs over a simulator's functions `reset` and `step`, which take a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import Space
from tensordict import TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._core.errors import refusal
from torchwrap._core.rows import Path, tensordict
from torchwrap.interop import _simulator
from torchwrap.spaces import Signature


class FunctionsEnv(_simulator.SimulatorEnv):
    """An env over functions of a simulator. It checks their results, and has no snapshots."""

    reuses_memory = True
    _kind = "an array"

    def __init__(self, owner: str, signature: Signature, info_keys: Sequence[str]) -> None:
        super().__init__(signature)
        self._owner = owner
        self.info_spaces: dict[str, Space[Any]] = dict.fromkeys(info_keys, spaces.REWARD)

    def _observation(self, value: Any, num_rows: int, copy: bool = True) -> spaces.Value:
        def convert(path: Path, leaf: Space[Any]) -> Tensor:
            tensor = spaces.entry(value, path).detach()
            return tensor.to(self.device, spaces.dtype(leaf), copy=copy)

        return spaces.build(self.single_observation_space, convert, num_rows)

    def _column(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        column = value.detach().to(self.device, dtype, copy=self.reuses_memory)
        return column.view(self.num_envs, 1)

    def _successor(
        self, observation: spaces.Value, numbers: Sequence[Tensor], info: dict[str, Any]
    ) -> TensorDict:
        """Adds reward, flags and infos as columns, and the time limit."""
        reward, *flags = numbers
        terminated, truncated = [self._column(flag, torch.bool) for flag in flags]
        limit = self.signature.max_episode_steps
        if limit is not None:
            is_over = self._clocks()[0].to(self.device) >= limit
            truncated = truncated | is_over.view(-1, 1)
        successor: dict[str, Any] = {
            "observation": observation,
            "reward": self._column(reward, torch.float32),
            "terminated": terminated,
            "truncated": truncated,
        }
        if self.info_spaces:
            columns = {name: self._column(info[name], torch.float32) for name in self.info_spaces}
            successor["info"] = tensordict(columns, self.num_envs)
        return tensordict(successor, self.num_envs)

    def _fits(self, value: Any, shape: tuple[int, ...]) -> bool:
        return getattr(value, "shape", None) == shape

    def _can_cast(self, value: Any, leaf: Space[Any]) -> bool:
        raise NotImplementedError

    def _check_observation(self, function: str, observation: Any, num_rows: int) -> None:
        for path, leaf in spaces.leaves(self.single_observation_space):
            try:
                value = spaces.entry(observation, path)
            except (LookupError, TypeError, ValueError):
                value = None
            shape = (num_rows, *(leaf.shape or ()))
            if not self._fits(value, shape) or not self._can_cast(value, leaf):
                keys = "".join([f"[{key!r}]" for key in path])
                kind = f"{self._kind} of shape {shape}"
                must = f"{function} must return observation{keys} for {leaf} as {kind}"
                raise ValueError(refusal(self._owner, must, describe(observation)))

    def _check_numbers(self, result: Any, names: tuple[str, ...]) -> None:
        """Checks the result of a step, whose last entries are `_simulator.STEP`."""
        _simulator.check_tuple(self._owner, "step", names, result, describe)
        *_, reward, terminated, truncated, info = result
        columns = {"reward": reward, "terminated": terminated, "truncated": truncated}
        for name in self.info_spaces:
            if name not in info:
                must = f"info_keys must be among {sorted(info)}"
                raise ValueError(refusal(self._owner, must, repr(name)))
            columns[name] = info[name]
        for name, value in columns.items():
            self._check_column("step", name, value)

    def _check_column(self, function: str, name: str, value: Any) -> None:
        shape = (self.num_envs,)
        fits = self._fits(value, shape) or self._fits(value, (*shape, 1))
        if not fits:
            kind = f"{self._kind} of shape {shape}"
            must = f"{function} must return {name}, one number per env, as {kind}"
            raise ValueError(refusal(self._owner, must, describe(value)))


def describe(value: Any) -> str:
    """A nested value with dtypes, shapes and devices instead of arrays."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} on {value.device}"
    if hasattr(value, "dtype"):
        return f"array {value.dtype}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join([describe(part) for part in value])})"
    if hasattr(value, "items"):
        return str({key: describe(part) for key, part in value.items()})
    return repr(value)
