"""What takes the place of a step, of transforms over a simulator, and of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from gymnasium import Space
from gymnasium.spaces import Box
from tensordict import NestedKey, TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._compile import cuda_graph
from torchwrap._compile.cuda_graph import CudaGraph
from torchwrap._compile.graph import Graph, Program, Settings
from torchwrap._compile.inputs import Inputs
from torchwrap._compile.trace import no_generators, trace
from torchwrap._core import nested
from torchwrap._core.policy import modules_of
from torchwrap._core.rows import RowMask
from torchwrap.collector import Collector, Root, Storage
from torchwrap.env import Env, Step
from torchwrap.spaces import Value
from torchwrap.transforms import policy_state
from torchwrap.wrappers import TransformedEnv

Rows = dict[NestedKey, Tensor]
"""For each key, where a few steps are written to: `(steps, num_envs, ...)`."""


class CompiledStep:
    """Takes the place of `Env._step_and_reset`: one graph with the auto-reset, and one without, if it is asked for."""

    def __init__(self, env: Env, settings: Settings) -> None:
        inputs = Inputs(lambda: [env])
        self.graphs = {resets: Graph(_step_of(env, resets), inputs, settings) for resets in (True, False)}
        self.graphs[True].prepare(spaces.zeros(env.single_action_space, env.num_envs, env.device))

    def __call__(self, action: Value, resets: bool) -> tuple[TensorDict, Value]:
        return cast(tuple[TensorDict, Value], self.graphs[resets](action))


class CompiledTransforms:
    """Takes the place of the transforms of a layer over a simulator on the host: one graph for steps, and one for resets."""

    def __init__(self, layer: TransformedEnv, settings: Settings) -> None:
        transforms, num_envs, device = layer.transforms, layer.num_envs, layer.device

        def step(td: TensorDict) -> TensorDict:
            with no_generators():
                return transforms.step(td)

        def reset(td: TensorDict, mask: Tensor) -> TensorDict:
            with no_generators():
                return transforms.reset(td, RowMask(mask))

        inputs = Inputs(lambda: [transforms])
        self.step_graph, self.reset_graph = Graph(step, inputs, settings), Graph(reset, inputs, settings)
        observation = spaces.zeros(layer.env.single_observation_space, num_envs, device)
        flags = torch.zeros(3, num_envs, 1, dtype=torch.bool, device=device).unbind(0)
        successor = {"observation": observation, "reward": flags[2].float(), "terminated": flags[0], "truncated": flags[1]}
        self.step_graph.prepare(TensorDict(successor, [num_envs]))
        self.reset_graph.prepare(TensorDict({"observation": observation}, [num_envs]), flags[2])

    def step(self, td: TensorDict) -> TensorDict:
        return cast(TensorDict, self.step_graph(td))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return cast(TensorDict, self.reset_graph(td, mask.column))


class CompiledCollector:
    """Takes the place of `Collector._collect`: a graph of `unroll` steps, policy included, that runs again and again.

    On CUDA the whole rollout is captured as one CUDA graph.
    """

    def __init__(self, collector: Collector, unroll: int, settings: Settings) -> None:
        env = collector.env
        self.collector, self.unroll = collector, unroll
        self.inputs = Inputs(lambda: [env, *modules_of(collector.policy)], lambda: [collector.policy])
        self.steps = Graph(self._run_steps, self.inputs, settings, captured=False)
        self.known: object = None  # what the rest was made for
        self.layout: dict[NestedKey, Tensor] = {}  # of a transition: tensors without values
        self.captured: tuple[CudaGraph, Storage] | None = None
        observation = spaces.zeros(env.single_observation_space, env.num_envs, env.device)
        self._prepare({"observation": observation, **policy_state.initial(env.signature)})

    def __call__(self, root: Root) -> tuple[Storage, Root]:
        env = self.collector.env
        tensors, storage, programs, parts = self._prepare(root)
        num_buffers, num_root = len(self.inputs), len(nested.leaves(root))

        def run_all(tensors: list[Tensor]) -> Sequence[Tensor]:
            buffers, leaves, outside = tensors[:num_buffers], tensors[num_buffers:], list[Tensor]()
            for part in parts:
                results = programs[len(part[0])].run([*buffers, *leaves, *part])
                leaves = list(results[:num_root])
                outside += results[num_root:]
            return [*leaves, *outside]

        if not cuda_graph.captures(env.device):
            results = run_all(tensors)
        else:
            if self.captured is None:
                self.captured = CudaGraph(run_all, num_buffers), storage
            graph, storage = self.captured
            results = graph(tensors)
            storage = {key: value.clone() for key, value in storage.items()}
        if (outside := results[num_root:]) and torch.stack(list(outside)).any():
            space = env.single_action_space
            raise ValueError(f"{env._name()} needs an action in {space}, but got another one from the policy.")
        return storage, cast(Root, nested.builder(root)(iter(results)))

    def _prepare(self, root: Root) -> tuple[list[Tensor], Storage, dict[int, Program], list[tuple[Tensor, ...]]]:
        """The inputs of a rollout, its storage, programs by their number of steps, and where each of them writes to."""
        collector = self.collector
        state, _ = self.inputs.current()
        if state != self.known:
            self.layout = collector._kept(trace(self._first_step, self.inputs, (root,)).result)  # type: ignore[arg-type]
            self.known, self.captured = state, None
        storage = {
            key: torch.empty((collector.num_steps, *leaf.shape), dtype=leaf.dtype, device=collector.env.device)
            for key, leaf in sorted(self.layout.items(), key=lambda item: str(item[0]))
        }
        parts = list(zip(*[value.split(self.unroll) for value in storage.values()], strict=True))
        programs = {}
        for part in (parts[0], parts[-1]):
            if len(part[0]) not in programs:
                program, tensors = self.steps.prepare(root, dict(zip(list(storage), part, strict=True)))
                programs[len(part[0])] = program
        return tensors[: len(tensors) - len(storage)], storage, programs, parts

    def _first_step(self, root: Root) -> TensorDict:
        return self.collector._transition(root, _step_of(self.collector.env))[0]

    def _run_steps(self, root: Root, rows: Rows) -> tuple[Root, tuple[Tensor, ...]]:
        env, step = self.collector.env, _step_of(self.collector.env)
        transitions, outside = list[TensorDict](), list[Tensor]()
        for _ in range(len(next(iter(rows.values())))):
            transition, root = self.collector._transition(root, step)
            transitions.append(transition)
            if self.checks_actions:
                outside.append(_outside(env.single_action_space, transition["action"]))
        for key, target in rows.items():
            target.copy_(torch.stack([transition.get(key) for transition in transitions]))
        return root, (torch.stack(outside).any(),) if outside else ()

    @property
    def checks_actions(self) -> bool:
        """Whether to look for actions out of bounds, as eager mode does on the CPU."""
        env = self.collector.env
        discrete = any(not isinstance(leaf, Box) for _, leaf in spaces.leaves(env.single_action_space))
        return discrete and self.collector.policy is not None and not cuda_graph.captures(env.device)


def _outside(space: Space[Any], action: Value) -> Tensor:
    # Whether an action is out of bounds. Numbers of a Box are not checked in eager mode either.
    parts = [
        spaces.outside(leaf, action[path] if path else action).any()
        for path, leaf in spaces.leaves(space)
        if not isinstance(leaf, Box)
    ]
    return torch.stack(parts).any()


def _step_of(env: Env, resets: bool = True) -> Step:
    def step(action: Value, resets: bool = resets) -> tuple[TensorDict, Value]:
        with no_generators():
            return env._step_and_reset(action, resets)

    return step
