"""HostAutoReset: auto-reset by the host, between graphs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchwrap import spaces
from torchwrap._compile.graph import Graph
from torchwrap._compile.reads import Reads
from torchwrap._core import nested
from torchwrap._core.env_buffers import BatchedModule
from torchwrap._core.reachable import Reachable
from torchwrap._core.row_mask import RowMask
from torchwrap.env import Env
from torchwrap.wrappers.wrapper import layers

# Minimum batch size for a host-side check of `done`; a partial reset covers at most 1/16 of the rows.
_MIN_HOST_RESET_ENVS, _PARTIAL_RESET_DIVISOR = 4096, 16


class HostAutoReset:
    """Host-driven auto-reset: one graph over the full batch, one over the finished rows only.

    In a graph of the whole step, resetting a few of many envs costs as much as the step itself, because every row is computed
    and then selected.

    Args:
        env: the env to reset.
        keywords: of the graphs.
    """

    def __init__(self, env: Env, keywords: dict[str, Any]) -> None:
        self.env, self.is_large, self.max_partial = env, env.num_envs >= _MIN_HOST_RESET_ENVS, 0
        # One thread, because a partial reset is over before another one has started.
        partial = {**keywords, "options": {"cpp.threads": 1, **keywords["options"]}}
        reads = Reads(({"env": env}, "env"))
        self.full, self.partial = Graph(self._reset_all, reads, **keywords), Graph(self._reset_rows, reads, **partial)

    @property
    def enabled(self) -> bool:
        """Whether it is faster than a graph that resets by itself: for large batches on the CPU."""
        return self.is_large and self.env.device.type == "cpu"

    def prepare(self) -> None:
        """Compiles the graphs. That of full resets, which are rare, may still be built when this returns.

        Partial resets need every per-env state in env buffers. Otherwise they are left out, with a warning.
        """
        number, num_envs = self.env.num_envs // _PARTIAL_RESET_DIVISOR, self.env.num_envs
        self.counter, self.rows = np.arange(number), torch.arange(number, device="cpu")
        self.mask = torch.zeros(number, dtype=torch.bool, device="cpu")
        observation = spaces.zeros(self.env.single_observation_space, num_envs, self.env.device)
        reason = None
        try:
            self.partial.program(self.rows, self.mask, observation)
            self.max_partial = number
        except ValueError as error:
            reason = error
        self.full.program(torch.zeros(num_envs, 1, dtype=torch.bool, device="cpu"), observation, later=reason is None)
        if reason is not None:
            warnings.warn(
                f"compile resets all {num_envs} envs where one of them ends, which takes longer, because a reset of some rows "
                f"cannot be traced: keep the state of each env in an EnvBuffer, and take sizes from tensors. {reason}",
                stacklevel=2,
            )

    def __call__(self, done: Tensor, observation: spaces.Value) -> None:
        """Writes the initial observations of new episodes into the finished rows."""
        flags = done.numpy().reshape(-1)
        finished = flags.nonzero()[0]
        number, most = len(finished), self.max_partial
        if number > most:
            self.full(done, observation)
        elif number:
            rows = self.rows.numpy()
            rows[:number] = finished
            # The graph has a fixed number of rows. The rest are distinct rows outside the mask, which stay as they are.
            rows[number:] = (~flags[:most]).nonzero()[0][: most - number]
            np.less(self.counter, number, out=self.mask.numpy())
            self.partial(self.rows, self.mask, observation)

    def _reset_all(self, done: Tensor, observation: spaces.Value) -> tuple[()]:
        self.env._auto_reset(RowMask(done), observation)
        return ()

    def _reset_rows(self, rows: Tensor, mask: Tensor, observation: spaces.Value) -> tuple[()]:
        row_mask = RowMask(mask)
        part, pairs = _restricted_to_rows(self.env, rows)
        initial = part._reset(row_mask)["observation"]
        for whole, tensor in pairs:
            if tensor._version:  # it was written to
                whole.index_copy_(0, rows, tensor)
        for target, value in zip(nested.leaves(observation), nested.leaves(initial), strict=True):
            target.index_copy_(0, rows, row_mask.where(value, target.index_select(0, rows)))
        return ()


def _restricted_to_rows(env: Env, rows: Tensor) -> tuple[Env, list[tuple[Tensor, Tensor]]]:
    """A copy of the env that has only these rows, and each env buffer with its rows. Other tensors are shared with the env."""
    shared: dict[int, Any] = {key: tensor for key, (tensor, _) in Reachable([({"env": env}, "env")]).tensors.items()}
    shared.update({id(layer._position): layer._position for layer in layers(env)})  # a reset does not read it
    part = copy.deepcopy(env, shared)
    pairs = []
    for module in part.modules():
        for name in module._env_buffer_names if isinstance(module, BatchedModule) else ():
            whole = module._buffers[name]
            assert whole is not None
            module._buffers[name] = whole.index_select(0, rows)
            pairs.append((whole, module._buffers[name]))
    for layer in layers(part):  # of a copy, so those of the env keep their signatures
        vars(layer)["signature"] = layer.signature.replace(num_envs=len(rows))
    return part, pairs  # type: ignore[return-value]
