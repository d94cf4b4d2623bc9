"""compile: puts compiled graphs in the place of a step, of transforms over a simulator, or of a rollout."""

from __future__ import annotations

from typing import TypeVar

import torch

from torchwrap._compile.backend import Options
from torchwrap._compile.compiled import CompiledCollector, CompiledStep, CompiledTransforms
from torchwrap._compile.graph import Settings
from torchwrap._core import validation
from torchwrap.collector import Collector
from torchwrap.env import Env
from torchwrap.wrappers.transformed import TransformedEnv
from torchwrap.wrappers.wrapper import layers

Target = TypeVar("Target", Env, Collector)


@torch.no_grad()
def compile(target: Target, *, backend: str = "inductor", unroll: int = 1, options: Options | None = None) -> Target:
    """Compiles an env's whole step, or a `Collector` with its policy, into graphs. Results agree up to rounding.

    A graph reads and writes the buffers and parameters of the env and of the policy. They can be written, replaced and moved,
    as can the policy, its modules and their modes: where needed, another graph is compiled at the next call. A policy is an
    `nn.Module`, or a function over modules that it names or closes over. Python numbers and NumPy arrays keep the value that
    they have now. Code that cannot be followed is refused. Do not use the modules in another thread meanwhile.

    Checks of the input stay outside. The step is one graph. If a simulator on the host steps the env, its transforms are
    compiled, in one graph for steps and one for resets. On CUDA, a graph is captured as a CUDA graph. Compile the outermost
    env, last: a compiled env cannot be wrapped. Copies run eagerly. PyTorch keeps compiled graphs in a cache on disk.

    `torch.compile(fullgraph=True)` of your own function that steps an env works as well, without this function.

    Args:
        target: an env or a collector. It is compiled in place.
        backend: as for `torch.compile`; "eager" runs the operators of the graph one by one.
        unroll: steps of a collector per graph. For a few dozen envs, several take less time per step, because a call of a
            graph takes as long as its computation. Compilation takes that many times longer.
        options: for Inductor.

    Returns:
        `target`.

    Raises:
        TypeError: for what is no env or collector.
        ValueError: if code reads values on the host, uses a tensor that no module holds, replaces a tensor, changes a Python
            value, or draws from a foreign generator (the message names it); for what is compiled already; and for a simulator
            on the host without transforms or in a collector.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = compile(ScriptedEnv(2), backend="eager")
    >>> env.is_compiled, env.step(env.reset().set("action", env.sample_action()))[0]["next", "reward"].flatten()
    (True, tensor([1., 1.]))
    """
    env = target.env if isinstance(target, Collector) else target
    if not isinstance(env, Env):
        raise TypeError(f"compile needs an Env or a Collector, but got {type(target).__name__}.")
    if target.is_compiled or env.is_compiled:
        raise ValueError(f"{target!r} is already compiled.")
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueError(f"compile needs a backend of torch.compile, but got {backend!r}.")
    if options and backend != "inductor":
        raise ValueError(f'compile needs backend="inductor" for options, but got {backend!r}.')
    settings = Settings(backend, options or {})
    if isinstance(target, Collector):
        if env.host_stepped:
            raise ValueError(
                f"{env!r} is stepped by a simulator on the host, so a collector of it cannot be compiled: compile the env."
            )
        validation.integer("compile", "unroll", unroll, at_least=1)
        target._compiled = CompiledCollector(target, unroll, settings)
    elif not env.host_stepped:
        env._compiled = CompiledStep(env, settings)
    else:
        transformed = [layer for layer in layers(env) if isinstance(layer, TransformedEnv)]
        if not transformed:
            raise ValueError(f"{env!r} has nothing to compile: a simulator on the host without transforms.")
        compiled = [CompiledTransforms(layer, settings) for layer in transformed]
        for layer, transforms in zip(transformed, compiled, strict=True):
            layer._compiled_step, layer._compiled_reset = transforms.step, transforms.reset
    return target
