"""What takes the place of a step, of transforms over a simulator, and of a rollout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from gymnasium import Space
from gymnasium.spaces import Box
from tensordict import NestedKey, TensorDict
from torch import Tensor

from torchwrap import spaces
from torchwrap._compile import graph
from torchwrap._compile.cuda_graph import CudaGraph
from torchwrap._compile.graph import Graph, Program, Settings
from torchwrap._compile.inputs import Inputs
from torchwrap._compile.trace import no_generators, trace
from torchwrap._core import rows
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
        observation = spaces.zeros(env.single_observation_space, env.num_envs, env.device)
        self._compile({"observation": observation, **policy_state.initial(env.signature)})

    def __call__(self, root: Root) -> tuple[Storage, Root]:
        state, buffers = self.inputs.current()
        if state != self.known:
            self._compile(root)
        tensors = [*buffers, *rows.leaves(root)]
        if self.captured is None:
            storage = self._allocate()
            results = self._run_all(self._parts(storage), tensors)
        else:
            captured, memory = self.captured
            results = captured(tensors)
            storage = {key: value.clone() for key, value in memory.items()}
        if self.checks_actions and torch.stack(list(results[self.num_root :])).any():
            env = self.collector.env
            raise ValueError(
                f"{env._name()} needs an action in {env.single_action_space}, but got another one from the policy."
            )
        return storage, self.build(iter(results))

    @torch.inference_mode(False)  # because later calls can be outside of it
    @torch.no_grad()
    def _compile(self, root: Root) -> None:
        """Finds out what a transition holds, and compiles graphs for it; on CUDA, into storage that is always the same."""
        env, policy = self.collector.env, self.collector.policy
        is_discrete = any(not isinstance(leaf, Box) for _, leaf in spaces.leaves(env.single_action_space))
        # Eager mode looks for actions out of bounds on the CPU.
        self.checks_actions = is_discrete and policy is not None and not graph.captures(env.device)
        self.known, _ = self.inputs.current()
        kept = self.collector._kept(cast(TensorDict, trace(self._first_step, self.inputs, (root,)).result))
        in_order = sorted(kept.items(), key=lambda item: str(item[0]))  # in the order of `rows.leaves`
        self.layout = {key: (leaf.shape, leaf.dtype) for key, leaf in in_order}  # a traced tensor would keep its trace alive
        self.build = cast(Callable[[Iterator[Tensor]], Root], rows.builder(root))
        storage = self._allocate()
        self.num_root, parts = len(rows.leaves(root)), self._parts(storage)
        self.programs: dict[int, Program] = {}  # by their number of steps
        for part in (parts[0], parts[-1]):
            targets: Rows = {key: target for key, target in zip(self.layout, part, strict=True)}
            self.programs[len(part[0])], _ = self.steps.prepare(root, targets)
        run = functools.partial(self._run_all, parts)
        self.captured = (CudaGraph(run, self.inputs.num_tensors), storage) if graph.captures(env.device) else None

    def _allocate(self) -> Storage:
        number, device = self.collector.num_steps, self.collector.env.signature.device
        return {key: torch.empty((number, *shape), dtype=to, device=device) for key, (shape, to) in self.layout.items()}

    def _parts(self, storage: Storage) -> list[tuple[Tensor, ...]]:
        """Where each graph of a rollout writes to."""
        return list(zip(*[value.split(self.unroll) for value in storage.values()], strict=True))

    def _run_all(self, parts: list[tuple[Tensor, ...]], tensors: list[Tensor]) -> Sequence[Tensor]:
        buffers, leaves, outside = tensors[: self.inputs.num_tensors], tensors[self.inputs.num_tensors :], list[Tensor]()
        for part in parts:
            results = self.programs[len(part[0])].run([*buffers, *leaves, *part])
            leaves = list(results[: self.num_root])
            outside += results[self.num_root :]
        return [*leaves, *outside]

    def _first_step(self, root: Root) -> TensorDict:
        return self.collector._transition(root, _step_of(self.collector.env))[0]

    def _run_steps(self, root: Root, targets: Rows) -> tuple[Root, tuple[Tensor, ...]]:
        env, step = self.collector.env, _step_of(self.collector.env)
        transitions, outside = list[TensorDict](), list[Tensor]()
        for _ in range(len(next(iter(targets.values())))):
            transition, root = self.collector._transition(root, step)
            transitions.append(transition)
            if self.checks_actions:
                outside.append(_outside(env.single_action_space, transition["action"]))
        for key, target in targets.items():
            target.copy_(torch.stack([transition.get(key) for transition in transitions]))
        return root, (torch.stack(outside).any(),) if outside else ()


def _outside(space: Space[Any], action: Value) -> Tensor:
    # Whether an action is out of bounds. Numbers of a Box are not checked in eager mode either.
    parts = [
        spaces.outside(leaf, spaces.at(action, path)).any() for path, leaf in spaces.leaves(space) if not isinstance(leaf, Box)
    ]
    return torch.stack(parts).any()


def _step_of(env: Env, resets: bool = True) -> Step:
    def step(action: Value, resets: bool = resets) -> tuple[TensorDict, Value]:
        with no_generators():
            return env._step_and_reset(action, resets)

    return step
