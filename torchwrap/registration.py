"""make: an env from an id or a spec. register: an id for an env of your own."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import gymnasium
import torch
from gymnasium import Space
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from torchwrap._core import spec as specs
from torchwrap._core import validation
from torchwrap._core.errors import refusal
from torchwrap.env import Env
from torchwrap.envs.acrobot import Acrobot
from torchwrap.envs.cartpole import CartPole
from torchwrap.envs.classic import ClassicControl
from torchwrap.envs.mountain_car import MountainCar, MountainCarContinuous
from torchwrap.envs.pendulum import Pendulum
from torchwrap.functional import FunctionalEnv, Functions
from torchwrap.interop._engines import NO_LIMIT, NUM_SEEDS
from torchwrap.interop._infos import InfoKeys, info_spaces
from torchwrap.interop._workers import WorkerEnv, answer_time
from torchwrap.interop.gymnasium import GymnasiumEnv
from torchwrap.random import fresh_seed
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
_REGISTERED: dict[str, Callable[..., Any]] = {}  # by `register`


def register(
    id: str, func_env: Callable[..., Functions], *, max_episode_steps: int | None = None
) -> None:
    """Registers an id for an env of your own, written as a `FuncEnv`, for `make(id, num_envs)`.

    The id is registered with Gymnasium too, but `gymnasium.make`, which makes single envs, refuses
    it. A second call replaces the env of the first, with Gymnasium's warning. Other processes
    register it by importing the module: `make("module:id")`. The script itself uses the bare id, or
    it is imported twice.

    Args:
        id: "namespace/Name-v0", or "Name-v0".
        func_env: a class, or a function that returns the functions; see `FunctionalEnv`. It gets
            the `kwargs` of `make`.
        max_episode_steps: truncates episodes at this length, if `make` gets no other. None disables
            it.

    >>> import torchwrap as tw
    >>> from torchwrap.envs.pendulum import Pendulum
    >>> tw.register("docs/MoonPendulum-v0", lambda g=1.62: Pendulum(g), max_episode_steps=100)
    >>> tw.make("docs/MoonPendulum-v0", num_envs=2)
    <docs/MoonPendulum-v0(num_envs=2, device=cpu)>
    """
    if not isinstance(id, str) or not _ID.fullmatch(id):
        must = 'id must have the form "namespace/Name-v0" or "Name-v0"'
        raise ValueError(refusal("register", must, f"{id!r}"))
    if id in registration.registry and id not in _REGISTERED:
        raise ValueError(refusal("register", "id must be new, or one of register", id))
    validation.function("register", "func_env", func_env)
    if max_episode_steps is not None:
        max_episode_steps = validation.integer(
            "register", "max_episode_steps", max_episode_steps, at_least=1
        )
    try:
        gymnasium.register(id, f"{__name__}:refuse", max_episode_steps=max_episode_steps)
    except gymnasium.error.Error as error:
        must = f"id must be one that Gymnasium accepts ({error})"
        raise ValueError(refusal("register", must, id)) from None
    _REGISTERED[id] = func_env


def refuse(**kwargs: Any) -> NoReturn:
    """Raises: `gymnasium.make` makes no envs of `register`."""
    fault = "the id belongs to torchwrap.register"
    raise TypeError(refusal("gymnasium.make", fault, remedy="Use `torchwrap.make(id)`"))


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

    A spec may come from a file, `make(EnvSpec.from_json(text))`: it imports nothing, and calls only
    constructors of registered envs, Transforms and Wrappers that this process has imported, with
    the arguments it names. `make("module:id")` imports and so runs the module: pass no id that you
    have not typed yourself.

    Args:
        id: an id registered with Gymnasium, or the `spec` of an env, whose arguments those given
            here override. With `backend="envpool"`, an id of EnvPool's.
        num_envs: number of envs. Defaults to 1.
        backend: "torch" for a native torchwrap env, "gymnasium" for Gymnasium's; "envpool" for
            EnvPool's and "ale" for ALE's, which step in C++ with threads. Defaults to the native
            env if there is one, and to Gymnasium's otherwise.
        device: of all tensors. Defaults to the CPU.
        first_index: global index of the first env; pass `rank * num_envs` for a shard of a larger
            run. Defaults to 0.
        max_episode_steps: truncates episodes at this length. -1 disables it. Defaults to the
            registered limit. ALE takes none.
        render_mode: "rgb_array" for `render()` and the wrappers that need it.
        vectorization_mode: for Gymnasium's envs: "sync" (one process, the default) or "async" (one
            process per env).
        info_keys, worker_timeout: for Gymnasium's envs: as for `torchwrap.from_gymnasium`. EnvPool
            and ALE take `info_keys`.
        params: what differs between envs, as for `FunctionalEnv`: for ids of `register`, and the
            physics of CartPole and Pendulum.
        kwargs: passed to the env's constructor. EnvPool's envs are seeded by `seed`.

    >>> make("CartPole-v1", num_envs=4)
    <CartPole-v1(num_envs=4, device=cpu)>
    >>> make(make("CartPole-v1", num_envs=4).spec, num_envs=2)
    <CartPole-v1(num_envs=2, device=cpu)>
    """
    given: dict[str, Any] = {
        "num_envs": num_envs,
        "backend": backend,
        "device": device and str(validation.device("make", device)),
        "first_index": first_index,
        "max_episode_steps": max_episode_steps,
        "render_mode": render_mode,
        "vectorization_mode": vectorization_mode,
        "info_keys": info_keys or None,
        "params": params,
    }
    # Only what is given goes on: a spec has the others, and a backend refuses those it cannot use.
    arguments = {name: value for name, value in given.items() if value is not None}
    arguments |= kwargs  # None may be a value of these
    if worker_timeout != 60.0:  # None disables it
        arguments["worker_timeout"] = worker_timeout
    if isinstance(id, EnvSpec):
        return _make_from_spec(id, arguments)
    if not isinstance(id, str):
        remedy = "An env has a spec if `make` has made it; `register` takes your own"
        raise TypeError(refusal("make", "id must be a string or an env's spec", repr(id), remedy))
    if backend is not None:
        validation.choice("make", "backend", backend, *_MAKERS)
    if num_envs is not None:
        validation.integer("make", "num_envs", num_envs, at_least=1)
    if max_episode_steps is not None:
        max_episode_steps = validation.integer(
            "make", "max_episode_steps", max_episode_steps, at_least=-1
        )
    spec = _spec_of(id, backend)
    spec.kwargs = specs.copied({**spec.kwargs, **arguments})
    spec.kwargs.pop("max_episode_steps", None)  # the field has it
    if max_episode_steps is not None:
        spec.max_episode_steps = None if max_episode_steps == -1 else max_episode_steps
    if backend is None:
        backend = "torch" if id in NATIVE or spec.id in _REGISTERED else "gymnasium"
    arguments.pop("backend", None)
    num_envs = arguments.pop("num_envs", 1)
    common = {
        "spec": spec,
        "device": arguments.pop("device", "cpu"),
        "first_index": arguments.pop("first_index", 0),
    }
    return _MAKERS[backend](id, num_envs, common, **arguments)


def _make_from_spec(spec: EnvSpec, arguments: dict[str, Any]) -> Env:
    if ":" in spec.id:
        raise ValueError(refusal("make", "the id of a spec must name no module", spec.id))
    kinds = (Wrapper, Transform)
    layers = [specs.rebuild(layer, kinds) for layer in spec.additional_wrappers]
    limit = -1 if spec.max_episode_steps is None else spec.max_episode_steps
    env = make(spec.id, **{"max_episode_steps": limit, **spec.kwargs, **arguments})
    for layer in layers:
        env = layer(env)
    # The kwargs may hold a looser limit than the one that the user has assigned to the spec.
    if layers and "max_episode_steps" not in arguments and limit > 0:
        limit_in_force = env.signature.max_episode_steps
        if limit_in_force is None or limit < limit_in_force:
            env = TransformedEnv(env, TimeLimit(limit))
    return env


# The makers of the backends. `common` holds the spec, the device and the first index. Their keyword
# arguments are those that the backend can use.


def _make_torch(
    id: str,
    num_envs: int,
    common: dict[str, Any],
    *,
    max_episode_steps: int | None = None,  # the spec has it
    render_mode: str | None = None,
    params: Mapping[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> Env:
    spec = common["spec"]
    func_env = _REGISTERED.get(spec.id) or NATIVE.get(id)
    if func_env is None:
        must = f"id must be in {sorted({*NATIVE, *_REGISTERED})} for backend='torch'"
        raise ValueError(refusal("make", must, id))
    if params is not None and spec.id not in _REGISTERED:
        names = NATIVE[id].parameters
        unknown = sorted(params.keys() - {*names})
        if unknown:
            raise ValueError(refusal("make", f"params of {id} must be of {names}", unknown))
    with _arguments_of(f"{id} in torch"):
        functions = func_env(**kwargs)
    return FunctionalEnv(
        functions,
        num_envs,
        max_episode_steps=spec.max_episode_steps,
        render_mode=render_mode,
        params=params,
        **common,
    )


def _make_gymnasium(
    id: str,
    num_envs: int,
    common: dict[str, Any],
    *,
    vectorization_mode: str = "sync",
    info_keys: InfoKeys = (),
    worker_timeout: float | None = 60.0,
    wrappers: Sequence[Callable[..., Any]] = (),
    vector_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Env:
    validation.choice("make", "vectorization_mode", vectorization_mode, "sync", "async")

    def make_one() -> Any:
        with _arguments_of(id):
            env: Any = gymnasium.make(id, **kwargs)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    options = dict(vector_kwargs or {})
    options |= {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}  # tensors are copies
    if vectorization_mode == "sync":
        vector_env: Any = SyncVectorEnv([make_one] * num_envs, **options)
    else:
        timeout = answer_time("make", worker_timeout)
        infos = info_spaces(info_keys)
        workers = []
        for row in range(num_envs):
            workers.append(functools.partial(WorkerEnv, make_one, row, infos, os.getpid(), timeout))
        before = set(multiprocessing.active_children())
        try:
            vector_env = AsyncVectorEnv(workers, **options)
        except (EOFError, ConnectionError) as error:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            fault = (
                f"could not construct {id} in worker processes: one ended, perhaps after it "
                f"printed an exception, or took more than worker_timeout={timeout} s"
            )
            remedy = 'Pass vectorization_mode="sync" to construct the envs in this process'
            raise RuntimeError(refusal("make", fault, remedy=remedy)) from error
    return GymnasiumEnv(vector_env, info_keys=info_keys, worker_timeout=worker_timeout, **common)


def _make_envpool(
    id: str,
    num_envs: int,
    common: dict[str, Any],
    *,
    info_keys: InfoKeys = (),
    seed: int | None = None,
    **kwargs: Any,
) -> Env:
    """Makes EnvPool's envs. Env *i* gets the seed `seed + first_index + i`."""
    noop_max = kwargs.get("noop_max", 1)  # EnvPool divides by it, and the process would end
    validation.integer("make", "noop_max", noop_max, at_least=1)
    try:
        envpool = importlib.import_module("envpool")
    except ImportError as error:
        fault = f"backend='envpool' needs the package envpool ({error})"
        remedy = "Install it with `pip install torchwrap[envpool]`"
        raise ImportError(refusal("make", fault, remedy=remedy)) from error
    if id not in envpool.list_all_envs():
        raise ValueError(refusal("make", "id must be in envpool.list_all_envs()", id))
    if kwargs.get("max_episode_steps") == -1:
        kwargs["max_episode_steps"] = NO_LIMIT
    first_index = common["first_index"]
    validation.integer("make", "first_index", first_index, at_least=0)
    seed = fresh_seed() if seed is None else seed
    seed = validation.integer("make", "seed", seed, at_least=0, at_most=2**64 - 1)
    seed = (seed + first_index) % NUM_SEEDS
    with _arguments_of(f"EnvPool's {id}"):
        pool = envpool.make(id, env_type="gymnasium", num_envs=num_envs, seed=seed, **kwargs)
    limit = pool.config["max_episode_steps"]
    common["spec"].max_episode_steps = None if limit == NO_LIMIT else limit
    return GymnasiumEnv(pool, info_keys=info_keys, **common)


def _make_ale(
    id: str,
    num_envs: int,
    common: dict[str, Any],
    *,
    info_keys: InfoKeys = (),
    **kwargs: Any,
) -> Env:
    if not str(common["spec"].vector_entry_point).startswith("ale_py"):
        must = 'id must be that of a game, such as "ALE/Pong-v5"'
        raise ValueError(refusal("make", must, id))
    if kwargs.get("max_episode_steps") == -1:
        del kwargs["max_episode_steps"]
    kwargs.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)
    mode: Any = "vector_entry_point"
    with _arguments_of("ALE's vector env"):
        vector_env = gymnasium.make_vec(id, num_envs, vectorization_mode=mode, **kwargs)
    return GymnasiumEnv(vector_env, info_keys=info_keys, **common)


_MAKERS: dict[str, Callable[..., Env]] = {
    "torch": _make_torch,
    "gymnasium": _make_gymnasium,
    "envpool": _make_envpool,
    "ale": _make_ale,
}


@contextlib.contextmanager
def _arguments_of(what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, AssertionError, gymnasium.error.Error) as error:
        must = f"arguments must be those of {what} ({error})"
        raise ValueError(refusal("make", must)) from error


def _spec_of(id: str, backend: str | None) -> EnvSpec:
    """A copy of the spec of a registered id. In "module:id", the module registers the id."""
    if backend == "envpool":
        return EnvSpec(id)
    module, _, name = id.rpartition(":")
    if backend == "ale":
        module = "ale_py"
    try:
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        must = f"id must be registered, or name the module that does it, module:id ({error})"
        raise ValueError(refusal("make", must, f"{id!r}")) from None
    if name in _REGISTERED and backend not in (None, "torch"):
        must = f'backend must be "torch" for {id}, an id of torchwrap.register'
        raise ValueError(refusal("make", must, backend))
    return specs.replace(spec)
