"""Graphs: a whole step, or a whole rollout, as one. The only file that knows of PyTorch's compilers and of CUDA graphs."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchwrap import arguments, masks, memory, spaces, tree
from torchwrap.env import Env
from torchwrap.rollout import Rollout, Row
from torchwrap.transforms.base import Transform
from torchwrap.wrappers import TransformedEnv, Wrapper

Target = TypeVar("Target", Env, Rollout)
Run = Callable[[list[Tensor]], Sequence[Tensor]]

# Sizes and strides are settled when a graph is made. The wrapper around the kernels in C++, with small intermediates on its
# stack, costs half of the one in Python.
_INDUCTOR = {"size_asserts": False}
_INDUCTOR_CPU = {"cpp_wrapper": True, "aot_inductor.allow_stack_allocation": True}


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
    for steps, and for resets, which are run when an episode ended. Compile the outermost env, last. After `train()`,
    `eval()` or `.to(device)` another graph is made by itself; copies are not compiled.

    Args:
        target: an env, or a rollout; it is given back.
        backend: as for `torch.compile`; "eager" runs the graph's operators one by one.
        static_outputs: on CUDA, hand out the graph's own memory, which the next step overwrites.
        unroll: steps of a rollout in one graph. More of them save up to half of the time of a few dozen envs, a sixth of that
            of a thousand, and take as many times longer to compile.
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
    if any(isinstance(value, Graph | _Collect) for owner in (target, *layers) for value in vars(owner).values()):
        raise ValueError(f"compile needs what is not compiled yet, but got {target!r}.")
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise ValueError(f"compile needs a backend of torch.compile, but got {backend!r}.")
    if options and backend != "inductor":
        raise ValueError(f'compile needs backend="inductor" for options, but got {backend!r}.')
    keywords: dict[str, Any] = dict(backend=backend, static_outputs=static_outputs, options=options or {})

    made: list[tuple[Any, str, Graph]] = []

    def graph(owner: Any, method: str, module: nn.Module, *example: spaces.Value) -> None:
        made.append((owner, method, Graph(getattr(owner, method), [module], **keywords)))
        made[-1][2].program(*example)

    memory.keep_freed()
    num_envs, device = env.num_envs, env.device
    if isinstance(target, Rollout):
        if not env.can_snapshot:
            raise ValueError(f"compile needs a rollout in tensors, but got {env!r} on a foreign simulator: compile the env.")
        arguments.integer("compile", "unroll", unroll, at_least=1)
        target._collect = _Collect(target, unroll=unroll, **keywords)  # type: ignore[method-assign]
    elif env.can_snapshot:
        graph(env, "_advance", env, spaces.zeros(env.single_action_space, num_envs, device))
    else:
        transformed = [layer for layer in layers if isinstance(layer, TransformedEnv)]
        if not transformed:
            raise ValueError(f"compile needs tensor operators, but got {env!r}: a foreign simulator without transforms.")
        for layer in transformed:
            first = spaces.zeros(layer.env.single_observation_space, num_envs, device)
            flags = torch.zeros(3, num_envs, 1, dtype=torch.bool, device=device).unbind(0)
            successor = {"observation": first, "reward": flags[2].float(), "terminated": flags[0], "truncated": flags[1]}
            graph(layer, "_transform_step", layer.transform, TensorDict(successor, [num_envs]))
            afresh = TensorDict({"observation": first}, [num_envs])
            graph(layer, "_transform_reset", layer.transform, afresh, flags[2].squeeze(-1))
    for owner, method, instead in made:  # only when all could be made; found before the method of the class
        setattr(owner, method, instead)
    return target


class Program(NamedTuple):
    """A graph that is ready to run: from buffers and the leaves of the input to the leaves of the result."""

    run: Run
    build: Callable[[Iterator[Tensor]], Any]
    """From leaves to the result."""


class Graph:
    """A function of tensors and TensorDicts, which writes to the buffers of modules in place, as one graph.

    It is traced once for each device, structure of the input, and combination of `train()` and `eval()`; then it runs
    without Python between the operators, and without a compiler's guards: whoever calls it has checked the shapes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Iterable[nn.Module],
        *,
        backend: str,
        options: dict[str, Any],
        static_outputs: bool = False,
        replayed: bool = True,
    ) -> None:
        self.function = function
        self.modules = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self.slots: list[tuple[dict[str, Any], str]] = [
            (tensors, name)
            for module in self.modules
            for tensors in _tensors_of(module)
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        self.backend, self.options = backend, options
        self.static_outputs, self.replayed = static_outputs, replayed
        self.programs: dict[Any, Program] = {}

    def __call__(self, *values: Any) -> Any:
        tensors = [*self.buffers(), *tree.leaves(values)]
        run, build = self._program(tensors[0].device, values)
        return build(iter(run(tensors)))

    def program(self, *values: Any) -> Program:
        """What runs the graph for inputs like these; it is made where it is missing."""
        return self._program([*self.buffers(), *tree.leaves(values)][0].device, values)

    def _program(self, device: torch.device, values: Any) -> Program:
        key = (device, tree.structure(values), *[module.training for module in self.modules])
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = self._make(values)
        return program

    def buffers(self) -> list[Tensor]:
        """Buffers and parameters. They are read anew each time, for `.to(device)` puts others into their places."""
        return [tensors[name] for tensors, name in self.slots]

    def _make(self, values: Any) -> Program:
        graph, result, example = self.trace(values)
        device = example[0].device
        if self.backend == "inductor":
            options = _INDUCTOR | (_INDUCTOR_CPU if device.type == "cpu" else {}) | self.options
            # Caches of compiled graphs, on disk, ask for a ShapeEnv. Tracing has none: it would let unknown numbers pass.
            mode = FakeTensorMode(shape_env=ShapeEnv())
            fakes: list[Any] = [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
            with torch._guards.tracing(torch._guards.TracingContext(mode)):
                compiled = torch._inductor.compile(graph, fakes, options=options)
        else:
            compiled = torch._dynamo.lookup_backend(self.backend)(graph, example)

        bools = [place for place, leaf in enumerate(tree.leaves(result)) if leaf.dtype == torch.bool]

        def run(tensors: list[Tensor]) -> Sequence[Tensor]:
            leaves = list(compiled(*tensors))
            for place in bools:
                leaves[place] = leaves[place].view(torch.bool)
            return leaves

        replayed = self.replayed and device.type == "cuda"
        return Program(_Replay(run, len(self.slots), self.static_outputs) if replayed else run, tree.builder(result))

    def trace(self, values: Any) -> tuple[torch.fx.GraphModule, Any, list[Tensor]]:
        """The graph of operators, the result without its values, and an example of the graph's input."""
        example = [tensor.detach() for tensor in (*self.buffers(), *tree.leaves(values))]
        build, count, result = tree.builder(values), len(self.slots), None

        def flat(*tensors: Tensor) -> list[Tensor]:
            nonlocal result
            self._put(tensors[:count])
            result = self.function(*build(iter(tensors[count:])))
            self._check_state(tensors[:count], attributes)
            return [masks.as_bytes(leaf) for leaf in tree.leaves(result)]

        held, attributes = self.buffers(), [_attributes(module) for module in self.modules]
        checks = Distribution._validate_args
        Distribution.set_default_validate_args(False)  # they look at values
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # which has no values, not even numbers that are not known yet
        try:
            with mode:
                graph = make_fx(flat)(*[mode.from_tensor(tensor) for tensor in example])
        except _State as error:
            for module, before in zip(self.modules, attributes, strict=True):
                vars(module).update(before)
            raise ValueError(f"compile needs state in buffers that are written in place, but got {error}.") from None
        except Exception as error:
            what = f"compile needs tensor operators whose results nobody looks at on the host, but got {_culprit(error)}"
            raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            Distribution.set_default_validate_args(checks)
            self._put(held)
        return graph, result, example

    def _put(self, buffers: Iterable[Tensor]) -> None:
        for (tensors, name), tensor in zip(self.slots, buffers, strict=True):
            tensors[name] = tensor

    def _check_state(self, buffers: Iterable[Tensor], attributes: list[dict[str, Any]]) -> None:
        names = {id(tensors): type(module).__name__ for module in self.modules for tensors in _tensors_of(module)}
        for (tensors, name), tensor in zip(self.slots, buffers, strict=True):
            if tensors.get(name) is not tensor:
                raise _State(f"another tensor as {names[id(tensors)]}.{name}")
        for module, before in zip(self.modules, attributes, strict=True):
            for name, value in _attributes(module).items():
                same = name in before and (value is before[name] or (isinstance(value, list | dict) and value == before[name]))
                if not same:
                    raise _State(f"another {type(value).__name__} as {type(module).__name__}.{name}")


class _State(Exception):
    """What a graph would not remember."""


class _Collect:
    """A rollout as a graph of `unroll` steps that write into the storage, run again and again; on CUDA by one launch."""

    def __init__(self, rollout: Rollout, *, backend: str, options: dict[str, Any], static_outputs: bool, unroll: int) -> None:
        env = rollout.env
        modules = [env, *_modules(rollout.policy)]
        self.rollout, self.static_outputs, self.unroll = rollout, static_outputs, unroll
        self.fill = Graph(rollout._fill, modules, backend=backend, options=options, replayed=False)
        self.replays: dict[Run, _Replay] = {}
        observation = spaces.zeros(env.single_observation_space, env.num_envs, env.device)
        alone = Graph(rollout._transition, modules, backend=backend, options=options)
        rollout._remember(alone.trace((observation,))[1][0])
        # A CUDA graph writes into the same storage each time; elsewhere each call has its own.
        self.kept = rollout._storage() if env.device.type == "cuda" else None
        self._programs(observation, self.kept or rollout._storage())

    def _programs(self, observation: spaces.Value, storage: Row) -> tuple[list[Program], list[list[Tensor]]]:
        # What to run one after the other, and the places that each writes to: rows of the storage, their keys in the order
        # of `tree.leaves`. Bools are bytes there, which a graph on the CPU stores in vectors.
        keys, num_steps, unroll = sorted(storage, key=str), self.rollout.num_steps, self.unroll
        bools = {key for key, value in storage.items() if value.dtype == torch.bool}
        columns = [(storage[key].view(torch.uint8) if key in bools else storage[key]).unbind(0) for key in keys]
        rows = list(zip(*columns, strict=True))
        pieces = [rows[start : start + unroll] for start in range(0, num_steps, unroll)]
        first, last = (
            self.fill.program(observation, tuple([dict(zip(keys, row, strict=True)) for row in piece]))
            for piece in (pieces[0], pieces[-1])
        )
        return [first] * (len(pieces) - 1) + [last], [[place for row in piece for place in row] for piece in pieces]

    def __call__(self, observation: spaces.Value) -> tuple[Row, spaces.Value]:
        storage = self.kept or self.rollout._storage()
        (programs, pieces), buffers, count = self._programs(observation, storage), self.fill.buffers(), len(self.fill.slots)

        def collect(tensors: list[Tensor]) -> list[Tensor]:
            buffers, leaves = tensors[:count], tensors[count:]
            for (run, _), places in zip(programs, pieces, strict=True):
                leaves = list(run([*buffers, *leaves, *places]))
            return [*storage.values(), *leaves]

        run, build = programs[0]
        whole: Run = collect
        if self.kept:
            whole = self.replays.setdefault(run, _Replay(collect, count, self.static_outputs))
        tensors = iter(whole([*buffers, *tree.leaves(observation)]))
        return {key: next(tensors) for key in storage}, build(tensors)


class _Replay:
    """A function of tensors as a CUDA graph, which is one launch; the first `count` tensors are buffers, used in place."""

    def __init__(self, run: Run, count: int, static_outputs: bool) -> None:
        self.run, self.count, self.static_outputs = run, count, static_outputs
        self.buffers: list[Tensor] = []

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        buffers, inputs = tensors[: self.count], tensors[self.count :]
        if len(self.buffers) != len(buffers) or not all(map(operator.is_, self.buffers, buffers)):
            self._capture(buffers, inputs)
        for static, value in zip(self.inputs, inputs, strict=True):
            static.copy_(value)
        self.graph.replay()
        return self.outputs if self.static_outputs else [output.clone() for output in self.outputs]

    def _capture(self, buffers: list[Tensor], inputs: list[Tensor]) -> None:
        self.buffers, self.inputs = buffers, [value.clone() for value in inputs]
        before = [buffer.clone() for buffer in buffers]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate their workspaces before anything is captured
            for _ in range(3):
                self.run([*self.buffers, *self.inputs])
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.run([*self.buffers, *self.inputs])
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._buffers, module._parameters


def _attributes(module: nn.Module) -> dict[str, Any]:
    # Lists and dicts as they are now; what belongs to nn.Module is looked after elsewhere.
    return {
        name: value.copy() if type(value) in (list, dict) else value
        for name, value in vars(module).items()
        if not name.startswith("_")
    }


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


def _culprit(error: Exception) -> str:
    """The innermost env or transform that was at work."""
    found, trace = "the policy", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Env | Transform):
            found = f"{type(owner).__name__}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return found
