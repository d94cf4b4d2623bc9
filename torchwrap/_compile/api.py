"""compile: puts compiled graphs in the place of a step, of transforms over a simulator, or of a rollout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import Tensor

from torchwrap import policy as policies
from torchwrap import spaces
from torchwrap._compile import graph
from torchwrap._compile.cuda_graph import CudaGraph
from torchwrap._compile.graph import Graph, Options, Program, Settings
from torchwrap._compile.inputs import Inputs
from torchwrap._compile.trace import NoGenerators, trace
from torchwrap._core import rows, validation
from torchwrap._core.rows import RowMask
from torchwrap.collector import Collector, Storage
from torchwrap.env import Env, Root, Step
from torchwrap.policy import State, modules_of
from torchwrap.spaces import Value
from torchwrap.wrappers.wrapper import TransformedEnv, layers

Target = TypeVar("Target", Env, Collector)


@torch.no_grad()
def compile(
    target: Target, *, backend: str = "inductor", unroll: int = 1, options: Options | None = None
) -> Target:
    """Compiles an env's whole step, or a `Collector` with its policy, into graphs. Results agree up to rounding.

    A graph reads and writes the buffers and parameters of the env and of the policy, which is an `nn.Module`, or a function
    over modules that it names or closes over. Python numbers and NumPy arrays keep the value that they have now. If the next
    call finds other modules, modes or devices, it compiles another graph. Code that cannot be followed is refused.

    If a simulator on the host steps the env, its transforms are compiled alone. Compile the outermost env, last: a compiled
    env cannot be wrapped, and copies run eagerly. Do not use the modules in another thread meanwhile. On CUDA, graphs are
    captured as CUDA graphs, and a compiled collector does not check the bounds of actions, because the host would wait for
    them. The logger "torchwrap" reports each compilation at level INFO.

    Args:
        target: an env or a collector. It is compiled in place, and returned.
        backend: as for `torch.compile`; "eager" runs the operators of the graph one by one.
        unroll: steps of a collector per graph. For a few dozen envs, several take less time per step. Compilation takes that
            many times longer.
        options: for Inductor.

    Raises:
        ValueError: if code reads values on the host, uses a tensor that no module holds, replaces a tensor, changes a Python
            value, or draws from a foreign generator (the message names it); and for a simulator on the host in a collector.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = compile(ScriptedEnv(2), backend="eager")
    >>> env.is_compiled, env.step(env.reset().set("action", env.sample_action()))[0]["next", "reward"].flatten()
    (True, tensor([1., 1.]))
    """
    env = target.env if isinstance(target, Collector) else target
    if not isinstance(env, Env):
        raise TypeError(f"compile needs an Env or a Collector, but got {type(target).__name__}.")
    if target.is_compiled or env.is_compiled:
        raise ValueError(
            f"{'' if env.is_compiled else 'The Collector of '}{env!r} is already compiled."
        )
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        remedy = "torch.compiler.list_backends() lists them"
        raise ValueError(
            f"compile needs a backend of torch.compile, but got {backend!r}: {remedy}."
        )
    if options and backend != "inductor":
        raise ValueError(f'compile needs backend="inductor" for options, but got {backend!r}.')
    settings = Settings(backend, options or {})
    if isinstance(target, Collector):
        if env.host_stepped:
            fault = "is stepped by a simulator on the host, so its collector cannot be compiled"
            raise ValueError(f"{env!r} {fault}: compile the env instead.")
        validation.integer("compile", "unroll", unroll, at_least=1)
        target._compiled = CompiledCollector(target, unroll, settings)
    elif not env.host_stepped:
        env._compiled = CompiledStep(env, settings)
    else:
        transformed = [layer for layer in layers(env) if isinstance(layer, TransformedEnv)]
        if not transformed:
            raise ValueError(
                f"{env!r} has nothing to compile: a simulator on the host steps it, and it has no transforms."
            )
        compiled = [CompiledTransforms(layer, settings) for layer in transformed]
        for layer, transforms in zip(transformed, compiled, strict=True):
            layer._compiled_step, layer._compiled_reset = transforms.step, transforms.reset
    return target


class CompiledStep:
    """The graphs of an env's step: with the auto-reset, and without it, once it is asked for."""

    def __init__(self, env: Env, settings: Settings) -> None:
        inputs = Inputs(lambda: [env])
        self.with_reset = Graph(_traceable(env._step_and_reset), inputs, settings)
        self.step_only = Graph(_traceable(env._step_only), inputs, settings)
        action = spaces.zeros(env.single_action_space, env.num_envs, env.device)
        state = policies.initial(env.signature)
        state.pop(policies.IS_INIT, None)
        self.with_reset.prepare(action, state)

    def __call__(self, action: Value, state: State) -> tuple[TensorDict, Root]:
        return cast(tuple[TensorDict, Root], self.with_reset(action, state))

    def without_reset(self, action: Value, state: State) -> tuple[TensorDict, Root]:
        """Takes a step that resets no env."""
        return cast(tuple[TensorDict, Root], self.step_only(action, state))


class CompiledTransforms:
    """Takes the place of the transforms of a layer over a simulator on the host: one graph for steps, and one for resets."""

    def __init__(self, layer: TransformedEnv, settings: Settings) -> None:
        transforms, num_envs, device = layer.transforms, layer.num_envs, layer.device

        def step(td: TensorDict) -> TensorDict:
            with NoGenerators():
                return transforms.step(td)

        def reset(td: TensorDict, mask: Tensor) -> TensorDict:
            with NoGenerators():
                return transforms.reset(td, RowMask(mask))

        inputs = Inputs(lambda: [transforms])
        self.step_graph, self.reset_graph = (
            Graph(step, inputs, settings),
            Graph(reset, inputs, settings),
        )
        observation = spaces.zeros(layer.env.single_observation_space, num_envs, device)
        flags = torch.zeros(3, num_envs, 1, dtype=torch.bool, device=device).unbind(0)
        successor = {
            "observation": observation,
            "reward": flags[2].float(),
            "terminated": flags[0],
            "truncated": flags[1],
        }
        self.step_graph.prepare(TensorDict(successor, [num_envs]))
        self.reset_graph.prepare(TensorDict({"observation": observation}, [num_envs]), flags[2])

    def step(self, td: TensorDict) -> TensorDict:
        return cast(TensorDict, self.step_graph(td))

    def reset(self, td: TensorDict, mask: RowMask) -> TensorDict:
        return cast(TensorDict, self.reset_graph(td, mask.column))


class CompiledCollector:
    """Takes the place of `Collector._collect`: a graph of `unroll` steps, run repeatedly; on CUDA, all is one CUDA graph."""

    def __init__(self, collector: Collector, unroll: int, settings: Settings) -> None:
        env = collector.env
        self.collector, self.unroll = collector, unroll
        self.inputs = Inputs(
            lambda: [env, *modules_of(collector.policy)], lambda: [collector.policy]
        )
        self.steps = Graph(self._rollout, self.inputs, settings, captured=False)
        observation = spaces.zeros(env.single_observation_space, env.num_envs, env.device)
        self._compile({"observation": observation, **policies.initial(env.signature)})

    def __call__(self, root: Root) -> tuple[Storage, Root]:
        state, buffers = self.inputs.current()
        if state != self.known:
            self._compile(root)
        tensors = [*buffers, *rows.leaves(root)]
        if self.captured is None:
            storage = self._allocate()
            results = self._run_all(storage, tensors)
        else:
            captured, memory = self.captured
            results = captured(tensors)
            storage = {key: value.clone() for key, value in memory.items()}
        if self.checks_actions and torch.stack(list(results[self.num_root :])).any():
            env = self.collector.env
            space = env.single_action_space
            raise ValueError(
                f"{env._name()} needs an action in {space}, but the policy returned one outside of it."
            )
        return storage, self.build(iter(results))

    @torch.inference_mode(False)  # because later calls can be outside of it
    @torch.no_grad()
    def _compile(self, root: Root) -> None:
        """Finds out what a transition holds, and compiles graphs for it; on CUDA, into storage that is always the same."""
        env, policy = self.collector.env, self.collector.policy
        is_discrete = any(
            not isinstance(leaf, Box) for _, leaf in spaces.leaves(env.single_action_space)
        )
        # Eager mode looks for actions out of bounds on the CPU.
        self.checks_actions = is_discrete and policy is not None and not graph.captures(env.device)
        self.known, _ = self.inputs.current()
        step = _traceable(env._step_and_reset)
        first = trace(lambda root: self.collector._step(root, step)[0], self.inputs, (root,))
        kept = self.collector._select(cast(TensorDict, first.result))
        number, self.layout = self.collector.num_steps, Storage()  # in the order of `rows.leaves`
        for key, leaf in sorted(kept.items(), key=lambda item: str(item[0])):
            self.layout[key] = torch.empty((number, *leaf.shape), dtype=leaf.dtype, device="meta")
        self.build = cast(Callable[[Iterator[Tensor]], Root], rows.builder(root))
        self.num_root, storage = len(rows.leaves(root)), self._allocate()
        self.programs: dict[int, Program] = {}  # by their number of steps
        for steps in (min(self.unroll, number), number % self.unroll or self.unroll):
            self.programs[steps], _ = self.steps.prepare(
                root, {key: value[:steps] for key, value in storage.items()}
            )
        run = functools.partial(self._run_all, storage)
        self.captured = (
            (CudaGraph(run, self.inputs.num_tensors), storage)
            if graph.captures(env.device)
            else None
        )

    def _allocate(self) -> Storage:
        empty = functools.partial(torch.empty_like, device=self.collector.env.signature.device)
        return dict(zip(self.layout, map(empty, self.layout.values()), strict=True))

    def _run_all(self, storage: Storage, tensors: list[Tensor]) -> Sequence[Tensor]:
        buffers, leaves, outside = (
            tensors[: self.inputs.num_tensors],
            tensors[self.inputs.num_tensors :],
            list[Tensor](),
        )
        split = functools.partial(torch.split, split_size_or_sections=self.unroll)
        for part in zip(*map(split, storage.values()), strict=True):  # where each graph writes to
            results = self.programs[len(part[0])].run([*buffers, *leaves, *part])
            leaves = list(results[: self.num_root])
            outside += results[self.num_root :]
        return [*leaves, *outside]

    def _rollout(self, root: Root, targets: Storage) -> tuple[Root, tuple[Tensor, ...]]:
        env = self.collector.env
        step = _traceable(env._step_and_reset)
        transitions, outside = list[TensorDict](), list[Tensor]()
        # Numbers of a Box are not checked in eager mode either.
        checked = [
            (path, leaf)
            for path, leaf in spaces.leaves(env.single_action_space)
            if not isinstance(leaf, Box)
        ]
        for _ in range(len(next(iter(targets.values())))):
            transition, root = self.collector._step(root, step)
            transitions.append(transition)
            if self.checks_actions:
                outside += [
                    spaces.outside(leaf, spaces.at(transition["action"], path)).any()
                    for path, leaf in checked
                ]
        for key, target in targets.items():
            target.copy_(torch.stack([transition.get(key) for transition in transitions]))
        return root, (torch.stack(outside).any(),) if outside else ()


def _traceable(function: Step) -> Step:
    """A step that refuses draws from PyTorch's generators."""

    def step(action: Value, state: State) -> tuple[TensorDict, Root]:
        with NoGenerators():
            return function(action, state)

    return step
