"""compile: a whole step, or a whole rollout, as one graph, or as few."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchwrap import arguments, masks, memory, spaces, tree
from torchwrap.buffer import Module
from torchwrap.env import Env
from torchwrap.graph import Graph, Program, Replay, Run, backends
from torchwrap.rollout import Key, Rollout, Row
from torchwrap.wrappers import TransformedEnv, Wrapper

Target = TypeVar("Target", Env, Rollout)

# From so many envs on it pays to look who ended; few are at most one of so many.
_ENOUGH, _SHARE = 4096, 16


@torch.no_grad()
def compile(
    target: Target,
    *,
    backend: str = "inductor",
    static_outputs: bool = False,
    unroll: int = 1,
    options: dict[str, Any] | None = None,
) -> Target:
    """Makes one graph of an env's whole step, or of a `Rollout` with its policy: the same numbers, sooner.

    A graph knows tensors: its input, all buffers, the policy's parameters. What is a number in Python stays what it is now.
    The checks of the input stay outside. Where a foreign simulator steps, the transforms alone are compiled, in two graphs:
    for steps, and for resets, which are run when an episode ended. So it is for 4,096 envs and more on a CPU, with a third
    graph for resets of few. Compile the outermost env, last. After `train()`, `eval()` or `.to(device)` another graph is made
    by itself; copies are not compiled.

    Args:
        target: an env, or a rollout; it is given back.
        backend: as for `torch.compile`; "eager" runs the graph's operators one by one.
        static_outputs: on CUDA, hand out the graph's own memory, which the next step overwrites.
        unroll: steps of a rollout in one graph, resets included. Four save up to half of the time of a few dozen envs, two a
            tenth of that of a thousand, and nothing of that of more; they take as many times longer to compile.
        options: for inductor.

    Raises:
        ValueError: where something looks at values on the host, or keeps state outside of its buffers; it is named.

    >>> from torchwrap.testing import ScriptedEnv
    >>> env = compile(ScriptedEnv(2), backend="eager")
    >>> env.step(env.reset().set("action", env.sample_action()))[0]["next", "reward"].flatten()
    tensor([1., 1.])
    """
    env = target.env if isinstance(target, Rollout) else target
    if not isinstance(env, Env):
        raise TypeError(f"compile needs an Env or a Rollout, but got {type(target).__name__}.")
    layers: list[Env] = list(_layers(env))
    if any(isinstance(value, Graph | _Advance | _Collect) for owner in (target, *layers) for value in vars(owner).values()):
        raise ValueError(f"compile needs what is not compiled yet, but got {target!r}.")
    if backend not in backends():
        raise ValueError(f"compile needs a backend of torch.compile, but got {backend!r}.")
    if options and backend != "inductor":
        raise ValueError(f'compile needs backend="inductor" for options, but got {backend!r}.')
    num_envs, device = env.num_envs, env.device
    keywords: dict[str, Any] = dict(backend=backend, static_outputs=static_outputs, options=options or {}, num_rows=num_envs)

    made: list[tuple[Any, str, Graph]] = []

    def graph(owner: Any, method: str, module: nn.Module, *example: spaces.Value) -> None:
        made.append((owner, method, Graph(getattr(owner, method), [module], **keywords)))
        made[-1][2].program(*example)

    memory.keep_freed()
    if isinstance(target, Rollout):
        if not env.can_snapshot:
            raise ValueError(f"compile needs a rollout in tensors, but got {env!r} on a foreign simulator: compile the env.")
        arguments.integer("compile", "unroll", unroll, at_least=1)
        target._collect = _Collect(target, unroll, keywords)  # type: ignore[method-assign]
    elif env.can_snapshot:
        env._advance = _Advance(env, keywords)  # type: ignore[method-assign]
    else:
        transformed = [layer for layer in layers if isinstance(layer, TransformedEnv)]
        if not transformed:
            raise ValueError(f"compile needs tensor operators, but got {env!r}: a foreign simulator without transforms.")
        for layer in transformed:
            first = spaces.zeros(layer.env.single_observation_space, num_envs, device)
            flags = torch.zeros(3, num_envs, 1, dtype=torch.bool, device=device).unbind(0)
            successor = {"observation": first, "reward": flags[2].float(), "terminated": flags[0], "truncated": flags[1]}
            step = "_conclude" if layer is env else "_transform_step"
            graph(layer, step, layer.transform, TensorDict(successor, [num_envs]))
            afresh = TensorDict({"observation": first}, [num_envs])
            graph(layer, "_transform_reset", layer.transform, afresh, flags[2].squeeze(-1))
    for owner, method, instead in made:  # only when all could be made; found before the method of the class
        setattr(owner, method, instead)
    return target


class _Advance:
    """A step: one graph; or one that leaves ended episodes as they are, and one to begin others where the host looks."""

    def __init__(self, env: Env, keywords: dict[str, Any]) -> None:
        self.whole, self.alone = (Graph(function, [env], **keywords) for function in (env._advance, env._succeed))
        self.begin_anew = _BeginAnew(env, keywords)
        action = spaces.zeros(env.single_action_space, env.num_envs, env.device)
        if self.begin_anew.pays:
            self.alone.program(action)
            self.begin_anew.prepare()
        else:
            self.whole.program(action)

    def __call__(self, action: spaces.Value) -> tuple[TensorDict, spaces.Value]:
        if not self.begin_anew.pays:
            return self.whole(action)
        successor, observation = self.alone(action)
        self.begin_anew(successor["done"], observation)
        return successor, observation


class _BeginAnew:
    """New episodes where the host sees that others ended: of all envs in one graph, of few in another that knows those alone.

    To begin few episodes among many envs, a graph of all of them does again what a step has just done.
    """

    def __init__(self, env: Env, keywords: dict[str, Any]) -> None:
        self.env, self.enough, self.num_few = env, env.num_envs >= _ENOUGH, 0
        few = {**keywords, "options": {"cpp.threads": 1, **keywords["options"]}}  # sooner done than another thread has begun
        self.all, self.few = Graph(self._in_all, [env], **keywords), Graph(self._in_few, [env], **few)

    @property
    def pays(self) -> bool:
        return self.enough and self.env.device.type == "cpu"

    def prepare(self) -> None:
        """Makes the graphs. There is none for few where an env keeps rows elsewhere than in `register_rows`."""
        number = self.env.num_envs // _SHARE
        self.counter, self.rows = np.arange(number), torch.arange(number)
        self.mask = torch.zeros(number, dtype=torch.bool)
        observation = spaces.zeros(self.env.single_observation_space, self.env.num_envs, self.env.device)
        self.all.program(torch.zeros(self.env.num_envs, 1, dtype=torch.bool), observation)
        with contextlib.suppress(ValueError):
            self.few.program(self.rows, self.mask, observation)
            self.num_few = number

    def __call__(self, done: Tensor, observation: spaces.Value) -> None:
        flags = done.numpy().reshape(-1)
        ended = flags.nonzero()[0]
        number, few = len(ended), self.num_few
        if number > few:
            self.all(done, observation)
        elif number:
            rows = self.rows.numpy()
            rows[:number] = ended
            rows[number:] = (~flags[:few]).nonzero()[0][: few - number]  # others, none twice, which stay as they are
            np.less(self.counter, number, out=self.mask.numpy())
            self.few(self.rows, self.mask, observation)

    def _in_all(self, done: Tensor, observation: spaces.Value) -> tuple[()]:
        self.env._begin_anew(done, observation)
        return ()

    def _in_few(self, rows: Tensor, mask: Tensor, observation: spaces.Value) -> tuple[()]:
        with _narrowed(self.env, rows):
            first = self.env._reset(mask)["observation"]
        for place, value in zip(tree.leaves(observation), tree.leaves(first), strict=True):
            place.index_copy_(0, rows, masks.where(mask, value, place.index_select(0, rows)))
        return ()


@contextlib.contextmanager
def _narrowed(env: Env, rows: Tensor) -> Iterator[None]:
    """The env as if these were all of its rows; what is written to them is written back."""
    modules = [module for module in env.modules() if isinstance(module, Module)]
    slots: list[tuple[dict[str, Any], str]] = [(module._buffers, name) for module in modules for name in module._names_of_rows]
    whole = [tensors[name] for tensors, name in slots]
    signatures = [(layer, layer.signature) for layer in _layers(env)]
    try:
        for tensors, name in slots:
            tensors[name] = tensors[name].index_select(0, rows)
        for layer, signature in signatures:
            layer.signature = signature.replace(num_envs=len(rows))
        yield
        for (tensors, name), tensor in zip(slots, whole, strict=True):
            if tensors[name]._version:  # it has been written to
                tensor.index_copy_(0, rows, tensors[name])
    finally:
        for (tensors, name), tensor in zip(slots, whole, strict=True):
            tensors[name] = tensor
        for layer, signature in signatures:
            layer.signature = signature


class _Collect:
    """A rollout as a graph of `unroll` steps that write into the storage, run again and again; on CUDA by one launch."""

    def __init__(self, rollout: Rollout, unroll: int, keywords: dict[str, Any]) -> None:
        env = rollout.env
        modules = [env, *_modules(rollout.policy)]
        self.rollout, self.static_outputs, self.unroll = rollout, keywords["static_outputs"], unroll
        keywords = {**keywords, "part": True}
        self.fill = Graph(self._fill, modules, **keywords)  # gives also whose episode ended
        self.begin_anew = _BeginAnew(env, keywords)
        self.replays: dict[Run, Replay] = {}
        observation = spaces.zeros(env.single_observation_space, env.num_envs, env.device)
        alone = Graph(functools.partial(rollout._transition, advance=env._advance), modules, **keywords)
        rollout._remember(alone.trace((observation,)).result[0])
        # A CUDA graph writes into the same storage each time; elsewhere each call has its own.
        self.kept = rollout._storage(observation) if env.device.type == "cuda" else None
        self._programs(observation, *(self.kept or rollout._storage(observation))[1:])
        if self.looks:
            self.begin_anew.prepare()

    def _programs(
        self, observation: spaces.Value, rows: dict[Key, list[Tensor]], places: list[list[Tensor]]
    ) -> tuple[list[Program], list[list[Tensor]]]:
        # What to run one after the other, and the places that each writes to, in the order of `tree.leaves`.
        keys, build = sorted(rows, key=str), tree.builder(observation)
        columns = [*[rows[key] for key in keys], *[leaves[1:] for leaves in places]]
        steps = list(zip(*columns, strict=True))
        pieces = [steps[start : start + self.unroll] for start in range(0, len(steps), self.unroll)]
        first, last = (
            self.fill.program(
                observation, tuple([(dict(zip(keys, step, strict=False)), build(iter(step[len(keys) :]))) for step in piece])
            )
            for piece in (pieces[0], pieces[-1])
        )
        return [first] * (len(pieces) - 1) + [last], [list(itertools.chain(*piece)) for piece in pieces]

    def _fill(self, here: spaces.Value, steps: tuple[tuple[Row, spaces.Value], ...]) -> tuple[Tensor, spaces.Value]:
        rollout, env = self.rollout, self.rollout.env
        for row, following in steps:
            made = rollout._transition(here, env._succeed if self.looks else env._advance)
            done = rollout._store(*made, row, here, following)
            here = following
        return done, here

    @property
    def looks(self) -> bool:
        """Whether the host begins new episodes between the graphs."""
        return self.unroll == 1 and self.begin_anew.pays

    def __call__(self, observation: spaces.Value) -> tuple[Row, spaces.Value]:
        storage, rows, places = self.kept or self.rollout._storage(observation)
        (programs, pieces), looks = self._programs(observation, rows, places), self.looks
        buffers, count, first = self.fill.buffers(), len(self.fill.slots), [leaves[0] for leaves in places]

        def collect(tensors: list[Tensor]) -> list[Tensor]:
            buffers, leaves = tensors[:count], tensors[count:]
            for place, leaf in zip(first, leaves, strict=True):
                place.copy_(leaf)
            leaves = first
            for (run, build), piece in zip(programs, pieces, strict=True):
                done, *leaves = run([*buffers, *leaves, *piece])
                if looks:
                    self.begin_anew(done, build(iter([done, *leaves]))[1])
            return [*storage.values(), done, *leaves]

        run, build = programs[0]
        whole: Run = collect
        if self.kept:
            whole = self.replays.setdefault(run, Replay(collect, count, self.static_outputs))
        tensors = iter(whole([*buffers, *tree.leaves(observation)]))
        return {key: next(tensors) for key in storage}, build(tensors)[1]


def _modules(policy: Any, above: tuple[Any, ...] = ()) -> list[nn.Module]:
    """Those that a policy is, is a method of, or is a function around."""
    if isinstance(policy, nn.Module):
        return [policy]
    if any(policy is one for one in above):
        return []
    parts: list[Any] = []
    if isinstance(policy, functools.partial):
        parts = [policy.func, *policy.args, *policy.keywords.values()]
    elif isinstance(policy, list | tuple | dict):
        parts = list(policy.values() if isinstance(policy, dict) else policy)
    elif inspect.ismethod(policy):
        parts = [policy.__self__, policy.__func__]
    elif inspect.isfunction(policy):
        names = inspect.getclosurevars(policy)
        parts = [*names.nonlocals.values(), *(value for value in names.globals.values() if isinstance(value, nn.Module))]
    return [module for part in parts for module in _modules(part, (*above, policy))]


def _layers(env: Env) -> Iterator[Env]:
    yield env
    while isinstance(env, Wrapper):
        env = env.env
        yield env
