"""make: an env from an id or a spec. register: an id for an env of one's own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import gymnasium
import torch
from gymnasium import Space
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec
from gymnasium.experimental.functional import FuncEnv

from torchwrap._core import spec as specs
from torchwrap._core import validation
from torchwrap.env import Env
from torchwrap.envs.acrobot import Acrobot
from torchwrap.envs.cartpole import CartPole
from torchwrap.envs.classic import ClassicControl
from torchwrap.envs.mountain_car import MountainCar, MountainCarContinuous
from torchwrap.envs.pendulum import Pendulum
from torchwrap.functional import FunctionalEnv, Functions
from torchwrap.interop.gymnasium import make as make_gymnasium
from torchwrap.interop.gymnasium import make_ale, make_envpool
from torchwrap.transforms.episode import TimeLimit
from torchwrap.transforms.transform import Transform
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper

NATIVE: dict[str, type[ClassicControl]] = {
    "Acrobot-v1": Acrobot,
    "CartPole-v0": CartPole,
    "CartPole-v1": CartPole,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
    "Pendulum-v1": Pendulum,
}
"""Ids with a native torchwrap env, and the functions that implement it."""

# Without Gymnasium's colon, which `make` takes for the end of a module.
_ID = re.compile(r"([\w-]+/)?[\w.-]+-v(0|[1-9][0-9]*)")
_FUNCTIONS = ("initial", "transition", "observation", "reward", "terminal")
_REGISTERED: dict[str, Callable[..., Any]] = {}  # by `register`


def register(
    id: str, func_env: Callable[..., Functions], *, max_episode_steps: int | None = None
) -> None:
    """Registers an id for an env of your own, written as a `FuncEnv`, so that `make(id, num_envs)` makes it in this process.

    The id is registered with Gymnasium too, but `gymnasium.make`, which makes single envs, refuses it. Other processes
    register it by importing the module: `make("module:id")`. The script itself uses the bare id, or it is imported twice.

    Args:
        id: "namespace/Name-v0", or "Name-v0".
        func_env: a class, or a function that returns the functions; see `FunctionalEnv`. It gets the `kwargs` of `make`.
        max_episode_steps: truncates episodes at this length, if `make` gets no other. None disables it.

    >>> import torchwrap as tw
    >>> from torchwrap.envs.pendulum import Pendulum
    >>> tw.register("docs/MoonPendulum-v0", lambda g=1.62: Pendulum(g), max_episode_steps=100)
    >>> tw.make("docs/MoonPendulum-v0", num_envs=2)
    <docs/MoonPendulum-v0(num_envs=2, device=cpu)>
    """
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise ValueError(
            f'register needs an id of the form "namespace/Name-v0" or "Name-v0", but got {id!r}.'
        )
    if id in registration.registry:
        raise ValueError(
            f"register needs an id that is not taken, but got {id!r}: give it another name or version."
        )
    needed = "register needs a FuncEnv class, or a function that returns a FuncEnv"
    missing = [name for name in _FUNCTIONS if not callable(getattr(func_env, name, None))]
    if isinstance(func_env, type) and missing:
        raise TypeError(f"{needed}, but got the class {func_env.__name__} without {missing}.")
    if not callable(func_env):
        remedy = ": pass its class" if isinstance(func_env, FuncEnv) else ""
        raise TypeError(f"{needed}, but got {func_env!r}{remedy}.")
    if max_episode_steps is not None:
        max_episode_steps = validation.integer(
            "register", "max_episode_steps", max_episode_steps, at_least=1
        )
    try:
        gymnasium.register(id, f"{__name__}:refuse", max_episode_steps=max_episode_steps)
    except gymnasium.error.Error as error:
        raise ValueError(
            f"register needs an id that Gymnasium accepts, but got {id!r}: {error}"
        ) from None
    _REGISTERED[id] = func_env


def refuse(**kwargs: Any) -> NoReturn:
    """Raises: `gymnasium.make` makes no envs of `register`."""
    raise TypeError(
        "gymnasium.make cannot make an env of torchwrap.register: use `torchwrap.make(id)`."
    )


def make(
    id: str | EnvSpec,
    num_envs: int | None = None,
    *,
    backend: Literal["torch", "gymnasium", "envpool", "ale"] | None = None,
    device: torch.device | str | None = None,
    first_index: int | None = None,
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
    vectorization_mode: Literal["sync", "async"] | None = None,
    info_keys: Sequence[str] | Mapping[str, Space[Any]] | None = None,
    worker_timeout: float | None = 60.0,
    params: Mapping[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> Env:
    """Makes `num_envs` envs of a registered id, or an env like the one that a spec describes.

    A spec may come from a file, `make(EnvSpec.from_json(text))`: it imports nothing, and calls only constructors of registered
    envs, Transforms and Wrappers that this process has imported, with the arguments it names. `make("module:id")` imports and
    so runs the module: pass no id that you have not typed yourself.

    Args:
        id: an id registered with Gymnasium, or the `spec` of an env, whose arguments those given here override. With
            `backend="envpool"`, an id of EnvPool's.
        num_envs: number of envs. Defaults to 1.
        backend: "torch" for a native torchwrap env, "gymnasium" for Gymnasium's; "envpool" for EnvPool's and "ale" for ALE's,
            which step in C++ with threads. Defaults to the native env if there is one, and to Gymnasium's otherwise.
        device: of all tensors. Defaults to the CPU.
        first_index: global index of the first env; pass `rank * num_envs` for a shard of a larger run. Defaults to 0.
        max_episode_steps: truncates episodes at this length. -1 disables it. Defaults to the registered limit. ALE takes none.
        render_mode: "rgb_array" for `render()` and the wrappers that need it.
        vectorization_mode: for Gymnasium's envs: "sync" (one process, the default) or "async" (one process per env).
        info_keys, worker_timeout: for Gymnasium's envs: as for `torchwrap.from_gymnasium`. EnvPool and ALE take `info_keys`.
        params: for ids of `register`: what differs between envs, as for `FunctionalEnv`.
        kwargs: passed to the env's constructor. EnvPool's takes a `seed`, as `reset` does before the first step only.

    >>> make("CartPole-v1", num_envs=4)
    <CartPole-v1(num_envs=4, device=cpu)>
    >>> make(make("CartPole-v1", num_envs=4).spec, num_envs=2)
    <CartPole-v1(num_envs=2, device=cpu)>
    """
    target = validation.device("make", "cpu" if device is None else device)
    given = {
        **{
            "num_envs": num_envs,
            "backend": backend,
            "device": None if device is None else str(target),
        },
        **{
            "first_index": first_index,
            "max_episode_steps": max_episode_steps,
            "render_mode": render_mode,
        },
        **{
            "vectorization_mode": vectorization_mode,
            "info_keys": info_keys or None,
            "params": params,
            **kwargs,
        },
    }
    given = {name: value for name, value in given.items() if value is not None}
    if worker_timeout != 60.0:
        given["worker_timeout"] = worker_timeout
    if isinstance(id, EnvSpec):
        if ":" in id.id:
            remedy = "import the module first, if you trust it, and leave it out"
            raise ValueError(
                f"make needs a spec whose id names no module, but got {id.id!r}: {remedy}."
            )
        layers = [specs.rebuild(layer, (Wrapper, Transform)) for layer in id.additional_wrappers]
        limit = -1 if id.max_episode_steps is None else id.max_episode_steps
        env = make(id.id, **{"max_episode_steps": limit, **id.kwargs, **given})
        for layer in layers:
            env = layer(env)
        if (
            layers
            and max_episode_steps is None
            and 0 < limit < (env.signature.max_episode_steps or limit + 1)
        ):
            env = TransformedEnv(env, TimeLimit(limit))  # a limit that was assigned to the spec
        return env
    if not isinstance(id, str):
        remedy = "make another env with `make(env.spec)`, and wrap a vector env of Gymnasium's with from_gymnasium"
        raise TypeError(f"make needs an id string or an env's spec, but got {id!r}: {remedy}.")
    count = validation.integer("make", "num_envs", 1 if num_envs is None else num_envs, at_least=1)
    if max_episode_steps is not None and (
        not isinstance(max_episode_steps, int) or max_episode_steps != -1
    ):
        validation.integer("make", "max_episode_steps", max_episode_steps, at_least=1)
    if backend not in (None, "torch", "gymnasium", "envpool", "ale"):
        raise ValueError(
            f'make needs backend="torch", "gymnasium", "envpool" or "ale", but got {backend!r}.'
        )
    if vectorization_mode not in (None, "sync", "async"):
        raise ValueError(
            f'make needs vectorization_mode="sync" or "async", but got {vectorization_mode!r}.'
        )
    func_env = None if backend == "envpool" else _functions_of(id, backend)
    unfit = [
        name
        for name in ("vectorization_mode", "worker_timeout", *(["info_keys"] if func_env else ()))
        if name in given
    ]
    if params is not None and (func_env is None or id in NATIVE):
        remedy = "pass keyword arguments for other envs"
        raise ValueError(
            f"make takes params only for ids of register, whose functions read them, but got {id!r}: {remedy}."
        )
    if unfit and (func_env or backend in ("envpool", "ale")):
        raise ValueError(
            f'make takes no {" or ".join(unfit)} for {id!r} with backend="{backend or "torch"}": leave them out.'
        )
    spec = (
        EnvSpec(id)
        if backend == "envpool"
        else specs.replace(gymnasium.spec(id.rpartition(":")[2]))
    )
    spec.kwargs = {**spec.kwargs, **given}
    spec.kwargs.pop("max_episode_steps", None)  # the field has it
    common: dict[str, Any] = {"device": target, "first_index": first_index or 0, "spec": spec}
    optional = {name: given[name] for name in ("max_episode_steps", "render_mode") if name in given}
    bridge = {**common, "info_keys": info_keys or (), "worker_timeout": worker_timeout}
    if backend == "envpool":
        return make_envpool(id, count, bridge, **optional, **kwargs)
    if backend == "ale":
        return make_ale(id, count, bridge, **optional, **kwargs)
    if max_episode_steps is not None:
        spec.max_episode_steps = None if max_episode_steps == -1 else max_episode_steps
    try:
        if func_env is None:
            return make_gymnasium(
                id, count, vectorization_mode or "sync", bridge, **optional, **kwargs
            )
        functions = func_env(**kwargs)
    except TypeError as error:
        if "seed" in kwargs and "'seed'" in str(error):  # there are envs that take one
            got = f"seed={kwargs['seed']!r}: pass it to reset, `td = env.reset(seed={kwargs['seed']!r})`"
            raise ValueError(
                f"make needs arguments that the env's constructor takes, but got {got}."
            ) from None
        if func_env is None:
            raise
        remedy = ' in torch, or backend="gymnasium"' if id in NATIVE else ""
        raise ValueError(f"make needs arguments that {id} takes{remedy}: {error}") from None
    common |= {"render_mode": render_mode, "params": params}
    return FunctionalEnv(functions, count, max_episode_steps=spec.max_episode_steps, **common)


def _functions_of(id: str, backend: str | None) -> Callable[..., Any] | None:
    """Returns what makes the functions of a registered id, or None for an env of Gymnasium's."""
    module, _, name = id.rpartition(
        ":"
    )  # in Gymnasium's "module:id", importing the module registers the id
    module = "ale_py" if backend == "ale" else module
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        remedy = ""
        if (
            isinstance(error, gymnasium.error.NamespaceNotFound | gymnasium.error.NameNotFound)
            and not module
        ):
            package = {"ALE": "ale_py"}.get(name.partition("/")[0], "package")
            remedy = f' A package registers its ids when it is imported: `make("{package}:{name}")` imports it.'
        elif module == "ale_py" and isinstance(error, ImportError):
            remedy = ". Install it with `pip install torchwrap[atari]`."
        raise ValueError(f"make needs a registered id, but got {id!r}: {error}{remedy}") from None
    if backend in ("gymnasium", "ale"):
        if name in _REGISTERED:
            raise ValueError(
                f'make needs backend="torch" for an id of torchwrap.register, but got "{backend}" for {id!r}.'
            )
        return None
    func_env = _REGISTERED.get(name) or NATIVE.get(id)
    if backend == "torch" and func_env is None:
        raise ValueError(
            f'make needs an id in {sorted({*NATIVE, *_REGISTERED})} for backend="torch", but got {id!r}.'
        )
    return func_env
