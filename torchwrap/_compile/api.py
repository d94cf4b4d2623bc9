"""compile: an env's step, its transforms, or a collector's rollout as graphs."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import policy, spaces
from torchwrap._compile.graph import Graph, Options, Rollout, Settings
from torchwrap._compile.inputs import Inputs
from torchwrap._compile.trace import without_generators
from torchwrap._core.errors import refusal
from torchwrap._core.rows import Nested, RowMask
from torchwrap.collector import Collector
from torchwrap.env import Env, with_done
from torchwrap.policy import State
from torchwrap.spaces import Value
from torchwrap.wrappers.wrapper import TransformedEnv, layers

Target = TypeVar("Target", Env, Collector)


@torch.no_grad()
def compile(
    target: Target,
    *,
    backend: str = "inductor",
    options: Options | None = None,
) -> Target:
    """Compiles an env's whole step, or a `Collector` with its policy, into graphs.

    Results agree with eager mode up to rounding. On the CPU, the steps of a collector are one scan;
    before PyTorch 2.11, Python loops over the compiled step. A graph reads and writes the buffers
    and parameters of the env and of the policy: an `nn.Module`, a method of one, or a function that
    names modules. A call that finds other modules, modes, hooks, layouts or devices, or another
    `collector.policy`, compiles another graph.

    Python values and NumPy arrays are constants of a graph, as with `jax.jit`; so is what closures,
    globals and attributes hold. Hold what changes in a buffer. The code is traced twice, so a value
    that each call changes is refused; one that changes later is not noticed.

    If a simulator on the host steps the env, only its transforms are compiled. Compile the
    outermost env, last: a compiled env cannot be wrapped, and copies run eagerly. Do not use the
    modules in another thread meanwhile. On CUDA, graphs are captured as CUDA graphs, and a compiled
    collector does not check the bounds of actions, because the host would wait for them. The logger
    "torchwrap" reports each compilation at level INFO.

    Several threads may compile. Meanwhile, PyTorch refuses calls of what `torch.compile` has
    compiled, in all threads; so take no other backend than "inductor" and "eager" then.

    Args:
        target: an env or a collector. It is compiled in place, and returned.
        backend: as for `torch.compile`; "eager" runs the operators of the graph one by one.
        options: for Inductor.

    Raises:
        ValueError: if code reads values on the host, uses a tensor that no module holds, replaces a
            tensor, computes something else in a second call, draws from a foreign generator, or is
            compiled already; the message names it. Also for a simulator on the host in a collector.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = compile(ScriptedEnv(2), backend="eager")
    >>> transition, td = env.step(env.reset().set("action", env.sample_action()))
    >>> env.is_compiled, transition["next", "reward"].flatten()
    (True, tensor([1., 1.]))
    """
    env = target.env if isinstance(target, Collector) else target
    if not isinstance(env, Env):
        got = type(target).__name__
        raise TypeError(refusal("compile", "target must be a torchwrap.Env or Collector", got))
    if target.is_compiled or env.is_compiled:
        raise ValueError(refusal("compile", f"{env!r} or its Collector is already compiled"))
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        remedy = "torch.compiler.list_backends() lists them"
        must = "backend must be one of torch.compile"
        raise ValueError(refusal("compile", must, repr(backend), remedy))
    if options and backend != "inductor":
        raise ValueError(refusal("compile", 'options need backend="inductor"', repr(backend)))
    settings = Settings(backend, options or {})
    if isinstance(target, Collector):
        if env.host_stepped:
            must = f"target must not be a collector, because a simulator steps {env!r}"
            raise ValueError(refusal("compile", must, remedy="Compile the env instead"))
        target._compiled = Rollout(target, settings)
    elif not env.host_stepped:
        env._compiled = CompiledStep(env, settings)
    else:
        transformed = [layer for layer in layers(env) if isinstance(layer, TransformedEnv)]
        if not transformed:
            must = f"target must have transforms to compile, because a simulator steps {env!r}"
            raise ValueError(refusal("compile", must))
        base = env.unwrapped
        successor = spaces.zero_successor(base.signature, base.info_spaces)
        compiled: dict[TransformedEnv, CompiledTransforms] = {}
        for layer in reversed(transformed):
            compiled[layer] = CompiledTransforms(layer, settings, successor)
            successor = compiled[layer].successor
        for layer, graphs in compiled.items():
            layer._graphs = graphs
    return target


class CompiledStep:
    """Takes the place of `Env._step_and_reset`, and of the step without a reset."""

    def __init__(self, env: Env, settings: Settings) -> None:
        inputs = Inputs(lambda: [env])
        self.with_reset = Graph(without_generators(env._step_and_reset), inputs, settings)
        self.without_reset = Graph(without_generators(env._step_only), inputs, settings)
        initial = policy.initial_entries(env.signature)
        state = {name: initial[name] for name in env.signature.policy_state}
        action = spaces.zeros(env.single_action_space, env.num_envs, env.device)
        self.with_reset.prepare(action, state)  # the other one is compiled by its first call

    def __call__(self, action: Value, state: State) -> Any:
        return self.with_reset(action, state)


class CompiledTransforms:
    """Takes the place of a layer's transforms over a simulator on the host.

    `below` is like the successors of the layer below, and `successor` like those of this one.
    """

    def __init__(self, layer: TransformedEnv, settings: Settings, below: TensorDict) -> None:
        transforms = layer.transforms
        inputs = Inputs(lambda: [transforms])
        self.step = Graph(without_generators(self._step_rows), inputs, settings)
        self._reset = Graph(without_generators(self._reset_rows), inputs, settings)
        self.transforms = transforms
        program, _ = self.step.prepare(below)
        fake: Any = program.result
        self.successor = spaces.apply(_zeros, fake[0])
        self._reset.prepare(below.select("observation"), below["truncated"])

    def _step_rows(self, td: TensorDict) -> Nested:
        successor = with_done(self.transforms.step(td))
        return successor, spaces.apply(_copy, successor["observation"])

    def reset(self, td: TensorDict, mask: RowMask) -> Any:
        return self._reset(td, mask.column)

    def _reset_rows(self, td: TensorDict, done: Tensor) -> TensorDict:
        return self.transforms.reset(td, RowMask(done))


def _copy(_: spaces.Path, leaf: Tensor) -> Tensor:
    # Kernels copy bytes slowly. What a graph returns twice, it copies without a kernel.
    return leaf if leaf.itemsize == 1 else leaf.clone()


def _zeros(_: spaces.Path, leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
