"""Executors of a compiled env: of its whole step, or of its transforms over a simulator on the host."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._compile.graph import Graph
from torchwrap._compile.host_reset import HostAutoReset
from torchwrap._compile.reads import Reads
from torchwrap._core.row_mask import RowMask
from torchwrap._env.executor import Eager, Steps, Transforms
from torchwrap.env import Env
from torchwrap.wrappers import TransformedEnv


class CompiledStep(Eager):
    """A step as one graph; or, for large batches on the CPU, as a graph of the step and a host-driven auto-reset."""

    def __init__(self, env: Env, keywords: dict[str, Any]) -> None:
        reads = Reads(({"env": env}, "env"))
        self.whole = Graph(env._step_and_reset, reads, **keywords)
        self.step_only = Graph(env._step_without_reset, reads, **keywords)
        self.auto_reset = HostAutoReset(env, keywords)
        action = spaces.zeros(env.single_action_space, env.num_envs, env.device)
        if self.auto_reset.enabled:
            self.step_only.program(action)
            self.auto_reset.prepare()
        else:
            self.whole.program(action)

    def step(self, env: Steps, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        if not self.auto_reset.enabled:
            return self.whole(action)  # type: ignore[no-any-return]
        successor, observation = self.step_only(action)
        self.auto_reset(successor["done"], observation)
        return successor, observation

    def step_without_reset(self, env: Steps, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        return self.step_only(action)  # type: ignore[no-any-return]


class CompiledTransforms(Eager):
    """The transforms of one layer as two graphs, for steps and for resets. Python drives the simulator below."""

    def __init__(self, layer: TransformedEnv, keywords: dict[str, Any]) -> None:
        transforms, num_envs, device = layer.transforms, layer.num_envs, layer.device
        reads = Reads(({"transforms": transforms}, "transforms"))
        self.step_graph = Graph(lambda td: (transforms.step(td),), reads, **keywords)
        # Initial observations are roots, which belong to the caller.
        own = {**keywords, "static_outputs": False}
        self.reset_graph = Graph(lambda td, mask: transforms.reset(td, RowMask(mask)), reads, **own)
        observation = spaces.zeros(layer.env.single_observation_space, num_envs, device)
        flags = torch.zeros(3, num_envs, 1, dtype=torch.bool, device=device).unbind(0)
        successor = {"observation": observation, "reward": flags[2].float(), "terminated": flags[0], "truncated": flags[1]}
        self.step_graph.program(TensorDict(successor, [num_envs]))
        self.reset_graph.program(TensorDict({"observation": observation}, [num_envs]), flags[2])

    def transform_step(self, transform: Transforms, td: TensorDict) -> TensorDict:
        return self.step_graph(td)[0]  # type: ignore[no-any-return]

    def transform_reset(self, transform: Transforms, td: TensorDict, mask: RowMask) -> TensorDict:
        return self.reset_graph(td, mask.column)  # type: ignore[no-any-return]
