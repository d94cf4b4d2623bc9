"""compile: puts graphs in the place of a step, of transforms over a simulator, or of a rollout."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import Tensor

from torchwrap import policy, spaces
from torchwrap._compile.graph import (
    OUTSIDE,
    Graph,
    Options,
    Rollout,
    Root,
    Settings,
    Storage,
    captures,
)
from torchwrap._compile.inputs import Inputs
from torchwrap._compile.trace import NoGenerators
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap._core.rows import RowMask
from torchwrap.collector import Collector
from torchwrap.env import Env
from torchwrap.spaces import Value
from torchwrap.wrappers.wrapper import TransformedEnv, layers

Target = TypeVar("Target", Env, Collector)


@torch.no_grad()
def compile(
    target: Target, *, backend: str = "inductor", unroll: int = 1, options: Options | None = None
) -> Target:
    """Compiles an env's whole step, or a `Collector` with its policy, into graphs.

    Results agree with eager mode up to rounding. A graph reads and writes the buffers and parameters
    of the env and of the policy: an `nn.Module`, a method of one, or a function that names modules.
    Python values and NumPy arrays are constants of a graph: it keeps those that the trace found, so
    keep values that change in buffers. If a call finds other modules, modes or devices, it compiles
    another graph. Code that cannot be followed is refused.

    If a simulator on the host steps the env, only its transforms are compiled. Compile the outermost
    env, last: a compiled env cannot be wrapped, and copies run eagerly. Do not use the modules in
    another thread meanwhile. On CUDA, graphs are captured as CUDA graphs, and a compiled collector
    does not check the bounds of actions, because the host would wait for them. The logger
    "torchwrap" reports each compilation at level INFO.

    Args:
        target: an env or a collector. It is compiled in place, and returned.
        backend: as for `torch.compile`; "eager" runs the operators of the graph one by one.
        unroll: steps of a collector per graph. For a few dozen envs, several take less time per
            step, and compilation takes that many times longer.
        options: for Inductor.

    Raises:
        ValueError: if code reads values on the host, uses a tensor that no module holds, replaces a
            tensor, computes something else in a second call, or draws from a foreign generator; the
            message names it. Also for a simulator on the host in a collector.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = compile(ScriptedEnv(2), backend="eager")
    >>> transition, td = env.step(env.reset().set("action", env.sample_action()))
    >>> env.is_compiled, transition["next", "reward"].flatten()
    (True, tensor([1., 1.]))
    """
    env = target.env if isinstance(target, Collector) else target
    if not isinstance(env, Env):
        got = type(target).__name__
        raise TypeError(refusal("compile", "target must be an Env or a Collector", got))
    if target.is_compiled or env.is_compiled:
        raise ValueError(refusal("compile", f"{env!r} or its Collector is already compiled"))
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        remedy = "torch.compiler.list_backends() lists them"
        must = "backend must be one of torch.compile"
        raise ValueError(refusal("compile", must, repr(backend), remedy))
    if options and backend != "inductor":
        raise ValueError(refusal("compile", 'options need backend="inductor"', repr(backend)))
    validation.integer("compile", "unroll", unroll, at_least=1)
    settings = Settings(backend, options or {})
    if isinstance(target, Collector):
        if env.host_stepped:
            must = f"target must be an env that PyTorch steps, and a simulator steps {env!r}"
            raise ValueError(refusal("compile", must, remedy="Compile the env instead"))
        target._compiled = _compiled_collector(target, unroll, settings)
    elif not env.host_stepped:
        env._compiled = CompiledStep(env, settings)
    else:
        _compile_transforms(env, settings)
    return target


class CompiledStep:
    """Takes the place of `Env._step_and_reset`."""

    def __init__(self, env: Env, settings: Settings) -> None:
        inputs = Inputs(lambda: [env])
        self.graphs = {
            resets: Graph(_step_of(env, resets), inputs, settings) for resets in (True, False)
        }
        self.graphs[True].prepare(spaces.zeros(env.single_action_space, env.num_envs, env.device))

    def __call__(self, action: Value, resets: bool) -> Any:
        return self.graphs[resets](action)


def _step_of(env, resets=True):
    def step(action, resets=resets):
        with NoGenerators():
            return env._step_and_reset(action, resets)

    return step


def _compile_transforms(env: Env, settings: Settings) -> None:
    """Compiles the transforms of every layer over a simulator."""
    transformed = [layer for layer in layers(env) if isinstance(layer, TransformedEnv)]
    if not transformed:
        must = f"target must have transforms to compile, because a simulator steps {env!r}"
        raise ValueError(refusal("compile", must))
    compiled = [_compiled_transforms(layer, settings) for layer in transformed]
    for layer, (step, reset) in zip(transformed, compiled, strict=True):
        layer._compiled_step = step
        layer._compiled_reset = lambda td, mask, reset=reset: reset(td, mask.column)


def _compiled_transforms(layer: TransformedEnv, settings: Settings) -> tuple[Graph, Graph]:
    """The transforms of a layer: a graph for steps, and one for resets."""
    transforms = layer.transforms

    def step(td: TensorDict) -> TensorDict:
        with NoGenerators():
            return transforms.step(td)

    def reset(td: TensorDict, mask: Tensor) -> TensorDict:
        with NoGenerators():
            return transforms.reset(td, RowMask(mask))

    inputs = Inputs(lambda: [transforms])
    step_graph = Graph(step, inputs, settings)
    reset_graph = Graph(reset, inputs, settings)
    below = layer.env
    initial = TensorDict({}, [below.num_envs])
    initial["observation"] = spaces.zeros(
        below.single_observation_space, below.num_envs, below.device
    )
    flag = torch.zeros(below.num_envs, 1, dtype=torch.bool, device=below.device)
    flags = {"terminated": flag, "truncated": flag.clone()}
    step_graph.prepare(initial.copy().update({**flags, "reward": flag.float()}))
    reset_graph.prepare(initial, flag)
    return step_graph, reset_graph


def _compiled_collector(collector: Collector, unroll: int, settings: Settings) -> Rollout:
    """Takes the place of `Collector._collect`."""
    env = collector.env
    space = env.single_action_space

    def step(root: Root) -> tuple[Storage, Root]:
        transition, following = collector._transition(root, _step_of(env))
        stored = collector._kept(transition)
        # Eager mode checks discrete actions on the CPU too, and never those of a Box.
        if collector.policy is not None and not captures(env.device):
            outside = [
                spaces.outside(leaf, spaces.at(transition["action"], path)).any()
                for path, leaf in spaces.leaves(space)
                if not isinstance(leaf, Box)
            ]
            if outside:
                stored[OUTSIDE] = torch.stack(outside).any()
        return stored, following

    observation = spaces.zeros(env.single_observation_space, env.num_envs, env.device)
    root: Root = {"observation": observation, **policy.initial(env.signature)}
    return Rollout(collector, step, root, unroll, settings)
