"""compile: gives an env or a collector a compiled executor."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from torchwrap._compile.builds import compiling
from torchwrap._compile.collector import CompiledCollector
from torchwrap._compile.inductor import backends, prepare
from torchwrap._compile.step import CompiledStep, CompiledTransforms
from torchwrap._core import validation
from torchwrap.collector import Collector
from torchwrap.env import Env
from torchwrap.wrappers.transformed import TransformedEnv
from torchwrap.wrappers.wrapper import layers

Target = TypeVar("Target", Env, Collector)

# The first version whose Inductor has the options and the toolchain that `inductor` and `toolchain` set.
MIN_TORCH = "2.11"


@torch.no_grad()
def compile(
    target: Target,
    *,
    backend: str = "inductor",
    static_outputs: bool = False,
    unroll: int = 1,
    options: dict[str, Any] | None = None,
) -> Target:
    """Compiles an env's whole step, or a `Collector` with its policy, into graphs. Results agree up to rounding.

    A graph reads tensors: its input, and whatever buffers, parameters and other tensors the code finds in modules and objects.
    They can be written, replaced and moved, as can a policy, its modules, hooks and modes: where needed, another graph is
    compiled at the next call. Python numbers and NumPy arrays keep the value that they have now, and code that changes one, or
    draws from Python or NumPy, is refused. Compiling changes nothing, in this thread or another.

    Checks of the input stay outside. The step is one graph; for 4,096 envs and more on a CPU, resets are separate graphs,
    which run only when an episode ended; the one for more than a sixteenth of the envs is built while the first steps run.
    If a simulator on the host steps the env, its transforms are compiled, in one graph for steps and one for resets. What
    takes more than three seconds says so on stderr. Compile the outermost env, last: a compiled env cannot be wrapped.
    Copies run eagerly.

    Args:
        target: an env or a collector. It is compiled in place.
        backend: as for `torch.compile`; "eager" runs the operators of the graph one by one.
        static_outputs: on CUDA, return transitions in the graph's own memory, which the next call overwrites. Roots are still
            copies.
        unroll: steps of a collector per graph, resets included. Four save up to half of the time of a few dozen envs, two a
            tenth of that of a thousand; from 4,096 envs on, one is faster. Compilation takes as many times longer.
        options: for Inductor.

    Returns:
        `target`.

    Raises:
        RuntimeError: with a PyTorch before 2.11, where torchwrap runs eagerly only.
        TypeError: for what is no env or collector.
        ValueError: if code reads values on the host, changes Python state or replaces tensors (the message names it), for what
            is compiled already, and for a simulator on the host without transforms or in a collector.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = compile(ScriptedEnv(2), backend="eager")
    >>> env.is_compiled, env.step(env.reset().set("action", env.sample_action()))[0]["next", "reward"].flatten()
    (True, tensor([1., 1.]))
    """
    if torch.__version__ < MIN_TORCH:
        raise RuntimeError(
            f"compile needs torch>={MIN_TORCH}, but got torch {torch.__version__}: leave this call out to stay in eager mode, "
            "or install a newer torch."
        )
    env = target.env if isinstance(target, Collector) else target
    if not isinstance(env, Env):
        raise TypeError(f"compile needs an Env or a Collector, but got {type(target).__name__}.")
    if target.is_compiled or env.is_compiled:
        raise ValueError(f"compile needs what is not compiled yet, but got {target!r}.")
    if backend not in backends():
        raise ValueError(f"compile needs a backend of torch.compile, but got {backend!r}.")
    if options and backend != "inductor":
        raise ValueError(f'compile needs backend="inductor" for options, but got {backend!r}.')
    keywords = dict(backend=backend, static_outputs=static_outputs, options=options or {}, num_rows=env.num_envs)
    executors: list[tuple[Any, Any]]  # what gets which, once all of them are compiled
    with compiling() as builds:
        prepare(builds, backend, options or {}, env.device)
        if isinstance(target, Collector):
            if env.host_stepped:
                raise ValueError(
                    f"compile needs a collector whose env is stepped in PyTorch, but got {env!r}, which a simulator on the "
                    "host steps: compile the env."
                )
            validation.integer("compile", "unroll", unroll, at_least=1)
            executors = [(target, CompiledCollector(target, unroll, keywords))]
        elif not env.host_stepped:
            executors = [(env, CompiledStep(env, keywords))]
        else:
            transformed = [layer for layer in layers(env) if isinstance(layer, TransformedEnv)]
            if not transformed:
                raise ValueError(
                    f"compile needs tensor operators, but got {env!r}: a simulator on the host without transforms."
                )
            executors = [(layer, CompiledTransforms(layer, keywords)) for layer in transformed]
    for owner, executor in executors:
        owner._executor = executor
    return target
