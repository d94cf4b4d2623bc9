"""torch.compile: the only file that names it. Nothing else in the library knows whether it is compiled."""

from __future__ import annotations

from typing import Any

import torch

from torchwrap.env import Env


def compile(env: Env, **options: Any) -> Env:
    """Makes one graph of an env's whole step, auto-reset and transforms included, and gives the env back.

    The checks of the input stay outside. Numbers and buffers are those of the eager env. Compile the outermost env, last: a
    wrapper would go around the graph. Copies of it are not compiled.

    Args:
        env: an env whose dynamics are tensor operators; a foreign simulator's are not.
        options: for `torch.compile`, beside `fullgraph=True` and `dynamic=False`.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = compile(ScriptedEnv(2), backend="eager")
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "reward"].flatten()
    tensor([1., 1.])
    """
    if not env.can_snapshot:
        raise ValueError(f"compile needs an env whose dynamics are tensor operators, but got {env!r} on a foreign simulator.")
    env._advance = torch.compile(env._advance, fullgraph=True, dynamic=False, **options)  # type: ignore[method-assign]
    return env
