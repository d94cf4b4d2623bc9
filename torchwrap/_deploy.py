"""deploy: a policy, and the transforms of the env that it was trained in, as one module from raw observations to actions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from torchwrap import spaces
from torchwrap._core import rows
from torchwrap._core import spec as specs
from torchwrap._core.env_buffers import BatchedModule, EnvBuffer
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.collector import Policy, modules_of
from torchwrap.env import Env
from torchwrap.random import Stream
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.transform import Compose, ObservationTransform, Transform
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper, layers

Tree: TypeAlias = "Tensor | dict[str, Tree]"
"""A tensor, or a dict of trees for a `Dict` or `Tuple` space; the keys of a `Tuple` are "0", "1" and so on."""

State: TypeAlias = Mapping[str, Tensor]
Shapes: TypeAlias = "dict[int, torch.export.Dim] | dict[str, Shapes]"

OWNER = "This deployed policy"
HOST_READS = {"item", "tolist", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__", "__array__"}
NO_TORCHSCRIPT = (
    f"{OWNER} cannot be traced or scripted by torch.jit, which would keep what holds for the example only: "
    "`torch.export.export(module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes())` makes a program of it."
)
POLICY = 'an nn.Module that takes a TensorDict, or a function such as `lambda td: network(td["observation"]).argmax(-1)`'


def deploy(env: Env, policy: Policy, *, without: Sequence[str | type] = ()) -> DeployedPolicy:
    """One module from the raw observation to the env's action, for where there is no env: on a robot, in a game, in a service.

    It consists of the env's observation transforms, the policy, and the env's action transforms, with frozen statistics, and
    computes the actions of `evaluate`, bit for bit. It leaves out what affects neither observations nor actions, such as
    rewards, time limits and statistics of episodes.

    Transforms and the policy are copied, so that later training does not change them: an `nn.Module` in eval mode; of a
    function, the weights of the modules that it names or closes over, which it computes with. Observations, state and weights
    that no action depends on, such as those of a critic, are neither inputs nor in the file.

    Where something lasts from step to step (frames, delays, clocks, what `PolicyState` declares), the module takes a `state`
    and returns the next one: a dict of tensors `(batch, ...)`. Its entry `is_first`, bool `(batch, 1)`, is set in
    `initial_state(batch)`; set rows of it to start episodes in them. Rows of a batch do not affect each other.

    PyTorch alone loads what `torch.export` has saved; ONNX Runtime and AOTInductor take the same program. Exports need torch
    2.11, as `tw.compile` does:

        program = torch.export.export(module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes())
        torch.export.save(program, "policy.pt2", extra_files={"metadata.json": json.dumps(module.metadata)})
        torch.onnx.export(program, dynamo=True, **module.onnx_names()).save("policy.onnx")
        torch._inductor.aoti_compile_and_package(program, package_path="policy_aoti.pt2")

    Args:
        env: the env that the policy was trained in, or a sibling with its `state_dict`.
        policy: as for `evaluate`. It has to be deterministic: `argmax(-1)` of logits, or the mean, instead of a sample.
        without: names or classes of transforms and wrappers to leave out, such as noise, `StickyAction` and `RepeatAction`.
            The deployed module does not need them, or the caller takes over their work.

    Returns:
        The module: `module(observation) -> action`, or `module(observation, state) -> (action, state)`.

    Raises:
        TypeError, ValueError: for a policy that draws random numbers or keeps state of its own, a function that uses a tensor
            outside of modules, and a transform or wrapper that draws random numbers, drives the env, or needs the reward.

    >>> import torchwrap as tw; from torchwrap import transforms as T
    >>> env = tw.TransformedEnv(tw.make("CartPole-v1", 8), T.NormalizeObservation(), T.FrameStackObservation(2))
    >>> _, network = env.reset(seed=0), nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    >>> module = deploy(env, lambda td: network(td["observation"]).argmax(-1))
    >>> action, state = module(torch.zeros(3, 4), module.initial_state(3))
    >>> action.shape, {name: tensor.shape for name, tensor in state.items()}
    (torch.Size([3]), {'FrameStackObservation.frames': torch.Size([3, 2, 4]), 'is_first': torch.Size([3, 1])})
    """
    if not isinstance(env, Env):
        raise TypeError(f"deploy needs an Env first, but got {type(env).__name__}.")
    if not callable(policy) or any(isinstance(part, Env) for module in modules_of(policy) for part in module.modules()):
        raise TypeError(f"deploy needs a policy without an env: {POLICY}; but got {policy!r}.")
    if isinstance(without, str | type) or not isinstance(without, Sequence):
        raise TypeError(f"deploy needs a list of names or classes as without, but got {without!r}.")
    if isinstance(policy, FunctionType | MethodType):
        variables = inspect.getclosurevars(policy)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            if isinstance(value, Tensor):
                remedy = "make the policy an nn.Module, and the tensor a buffer of it"
                raise TypeError(f"deploy needs a policy with tensors in modules, but got the tensor {name!r}: {remedy}.")
    return DeployedPolicy(env, policy, chain_of(env, without))


class DeployedPolicy(nn.Module):
    """A policy with the transforms of its env, as one module. `torchwrap.deploy` makes it.

    Gradients do not flow through it. While it computes, its transforms hold the state, and the modules that a function names
    hold the weights of this module, so only one thread at a time may call it. An exported program has no such limit.

    Attributes:
        metadata: what the module is given and returns, as JSON can represent it: the spaces with their bounds (None is
            infinity), the state, the transforms, and what was left out.
    """

    def __init__(self, env: Env, policy: Policy, chain: Chain) -> None:
        super().__init__()
        import torchwrap

        self.transforms = Compose(chain.transforms)
        self.policy: Policy = copy.deepcopy(policy).eval().requires_grad_(False) if isinstance(policy, nn.Module) else policy
        originals = vars(self)["_originals"] = self._find_originals()
        self.networks = copy.deepcopy(nn.ModuleList(originals))  # what functions compute with
        self._observation_space, self._action_space = chain.observation_space, chain.action_space
        self._action_keys = set(spaces.children(env.single_action_space) or ())
        self._recurrent = list(env.signature.policy_state)
        self._state = state_of(chain.transforms)  # buffers, which hold the initial row between two calls
        initial = {name: declared.allocate(None, 1, env.device) for name, declared in env.signature.policy_state.items()}
        initial["is_first"] = torch.ones(1, 1, dtype=torch.bool, device=env.device)
        for name, row in initial.items():
            self.register_buffer(f"initial_{name}", row, persistent=False)
            if self._state or self._recurrent or not all(map(ignores_starts, chain.transforms)):
                self._state[name] = self, f"initial_{name}"
        # What of them are inputs of the module: what an action depends on.
        self._space, self._inputs = self._observation_space, list(self._state)
        self._check_results()
        self.metadata: dict[str, Json] = {
            "torchwrap": torchwrap.__version__,
            "env": env._name(),
            "observation": described(self._space),
            "action": described(chain.action_space),
            "state": {
                name: {"shape": list(row.shape[1:]), "dtype": str(row.dtype).removeprefix("torch.")}
                for name, row in self.initial_state(1).items()
            },
            "transforms": list(chain.shown),
            "left_out": list(chain.left_out),
        }

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        """The state with which every row starts an episode. Empty if nothing lasts from step to step."""
        return {name: row for name, row in self._initial_rows(batch_size).items() if name in self._inputs}

    def _initial_rows(self, batch_size: int) -> dict[str, Tensor]:
        rows = {name: module.get_buffer(key) for name, (module, key) in self._state.items()}
        return {name: row.expand(batch_size, *row.shape[1:]).clone() for name, row in rows.items()}

    def example_inputs(self, batch_size: int = 2) -> tuple[Tree, ...]:
        """Arguments of the module, for exports: an observation of zeros, and the initial state if there is one.

        A program that is exported with a batch of 1 takes no other one.
        """
        space = self._space
        observation = _plain(space, spaces.zeros(space, batch_size, self.get_buffer("initial_is_first").device))
        return (observation, {**self.initial_state(batch_size)}) if self._inputs else (observation,)

    def dynamic_shapes(self) -> dict[str, Shapes]:
        """The argument of `torch.export.export` that leaves the batch size open."""
        batch, inputs = torch.export.Dim("batch"), self.example_inputs(1)
        return {name: _shapes(value, batch) for name, value in zip(("observation", "state"), inputs, strict=False)}

    def onnx_names(self) -> dict[str, list[str]]:
        """Arguments of `torch.onnx.export`: the names of inputs and outputs. Those of the next state begin with "next."."""
        inputs = [".".join(("observation", *path)) for path, _ in spaces.leaves(self._space)]
        outputs = [".".join(("action", *path)) for path, _ in spaces.leaves(self._action_space)]
        following = [f"next.{name}" for name in self._inputs]
        return {"input_names": [*inputs, *self._inputs], "output_names": [*outputs, *following]}

    def forward(self, observation: Tree, state: State | None = None) -> Tree | tuple[Tree, State]:
        """The action for each row, and with a state also the next one.

        Args:
            observation: raw, `(batch, *shape)` in the dtype of its space.
            state: what the last call returned, or `initial_state`; for a module that has one.

        Raises:
            TypeError, ValueError: for another structure, shape or dtype.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise TypeError(NO_TORCHSCRIPT)
        number = _num_rows(observation)
        raw = _value(self._space, observation, number)
        device = self.get_buffer("initial_is_first").device
        spaces.check(OWNER, "an observation", self._space, raw, number, device)
        initial = self.initial_state(number)
        if state is None and initial:
            raise TypeError("missing state; start with `module.initial_state(batch_size)`.")
        state = {} if state is None else state
        needed, got = ({name: (tuple(row.shape), row.dtype) for name, row in rows.items()} for rows in (initial, state))
        if got != needed:
            raise ValueError(f"{OWNER} needs a state with {needed}, but got {got}.")
        if self._space is not self._observation_space:
            given: Any = raw  # a TensorDict
            zeros = spaces.zeros(self._observation_space, number, device)
            raw = spaces.apply(lambda path, zero: given.get(path, zero), zeros)
        action, following = self._compute(raw, {**self._initial_rows(number), **state})
        plain = _plain(self._action_space, action)
        return (plain, {name: following[name].detach() for name in self._inputs}) if self._inputs else plain

    def _compute(self, raw: Value, state: State) -> tuple[Value, dict[str, Tensor]]:
        """The action and the next state, from all observations and the whole state."""
        own = {name: getattr(module, key).detach() for module, key, name in _tensors(self.networks)}
        originals: Any = self._originals
        return functional_call(originals, own, (self._compute_with_originals, raw, state), tie_weights=False)

    def _compute_with_originals(self, raw: Value, state: State) -> tuple[Value, dict[str, Tensor]]:
        number = rows.leaves(raw)[0].shape[0]
        initial = self._initial_rows(number)
        with self._holding(state):
            mask = RowMask(state["is_first"]) if state else None
            root = {"observation": self._observe(raw, number, mask)}
            if mask is not None and self._recurrent:
                root |= {name: mask.where(initial[name], state[name]) for name in self._recurrent}
                root["is_init"] = state["is_first"].clone()
            action, following = self._act(tensordict(root, number))
            following = {**{name: module.get_buffer(key) for name, (module, key) in self._state.items()}, **following}
        if state:
            following["is_first"] = torch.zeros_like(state["is_first"])
        return action, following

    def _find_originals(self) -> Originals:
        parts = [part for module in self.modules() for part in vars(module).values()]
        functions = [part for part in parts if part is self.policy or isinstance(part, FunctionType | MethodType | partial)]
        found, known = [module for function in functions for module in modules_of(function)], set(self.modules())
        return Originals([module for module in dict.fromkeys(found) if module not in known])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_originals"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self)["_originals"] = self._find_originals()

    def _observe(self, raw: Value, number: int, mask: RowMask | None) -> Value:
        # As an env does: a step of every row, and then a reset of those rows that start an episode. Until it ends, a row has
        # neither terminated nor been truncated. Transforms that do the same in both come first, once.
        ended = torch.zeros(2, number, 1, dtype=torch.bool, device=rows.leaves(raw)[0].device)
        td = tensordict({"observation": raw.clone(), "terminated": ended[0], "truncated": ended[1]}, number)
        remaining = list(self.transforms)
        while remaining and ignores_starts(remaining[0]):
            td = remaining.pop(0).step(td)
        if mask is None:
            return td["observation"]
        initial = tensordict({"observation": td["observation"].clone()}, number)
        try:
            for transform in remaining:
                td = transform.step(td)
            for transform in remaining if mask.any() else ():
                initial = transform.reset(initial, mask)
        except KeyError as error:
            remedy = "Set `is_passive = True` in a class that leaves observations and actions as they are"
            raise refusal(transform, f"reads what only the env has, {error.args[0]}. {remedy}") from error
        return mask.where(initial["observation"], td["observation"]) if mask.any() else td["observation"]

    def _act(self, td: TensorDictBase) -> tuple[Value, dict[str, Tensor]]:
        try:
            action = self.policy(td)
        except (TypeError, KeyError) as error:
            if "TensorDict" not in str(error):
                raise
            got = f"{type(self.policy).__name__}, which raised {str(error).strip().splitlines()[0]!r}"
            raise TypeError(f"deploy needs {POLICY}, but got {got}.") from error
        if not isinstance(action, Tensor | TensorDictBase):
            raise TypeError(f"deploy needs a policy that returns tensors, but got {type(action).__name__}: use {POLICY}.")
        if isinstance(action, TensorDictBase) and set(action.keys()) != self._action_keys:
            action, td = action["action"], action
        for name in self._recurrent:
            if ("next", name) not in td.keys(True):
                raise ValueError(f'deploy needs a policy that sets ("next", "{name}"), as PolicyState declares.')
        for transform in reversed(list(self.transforms)):
            action = transform.action(action)
        return action, {name: td["next", name] for name in self._recurrent}

    @contextlib.contextmanager
    def _holding(self, state: State) -> Iterator[None]:
        """The buffers hold copies of the state, which the transforms write to."""
        # In `_buffers`, because torch.export would take an assignment to the attribute for a change of the module.
        initial = {name: module.get_buffer(key) for name, (module, key) in self._state.items()}
        try:
            for name, (module, key) in self._state.items():
                module._buffers[key] = state[name].clone()
            yield
        finally:
            for name, (module, key) in self._state.items():
                module._buffers[key] = initial[name]

    def _check_results(self) -> None:
        """Calls the module, to raise at construction for errors that an export would not report."""
        below, device = self._space, self.get_buffer("initial_is_first").device
        inputs = _plain(below, spaces.sample(below, Stream(2, seed=0, device=device))), *self.example_inputs()[1:]
        before = {name: value.clone() for name, value in self.state_dict().items()}
        generators = torch if device.type == "cpu" else torch.get_device_module(device)
        seeded = generators.get_rng_state()
        first, second = self(*inputs), self(*inputs)
        is_random = not torch.equal(generators.get_rng_state(), seeded)
        generators.set_rng_state(seeded)
        written = [name for name, value in self.state_dict().items() if not torch.equal(value, before[name])]
        pairs = zip(rows.leaves(first), rows.leaves(second), strict=True)
        if is_random or written or not all(torch.allclose(*pair, rtol=1e-3, equal_nan=True) for pair in pairs):
            self.load_state_dict(before)
            fault = "draws random numbers" if is_random else f"changes {written or 'from call to call'}"
            raise ValueError(
                f"deploy needs a deterministic policy and transforms, but got one that {fault}. Take the mode instead of a "
                "sample, declare state with PolicyState or EnvBuffer, and put the modules of a function into eval mode."
            )
        action, following = first if self._inputs else (first, None)
        chosen = _value(self._action_space, action, 2)
        spaces.check("deploy", "a policy whose actions end", self._action_space, chosen, 2, device)
        self(inputs[0], following)  # checks the next state
        self._leave_out_unread(_value(below, inputs[0], 2))

    def _leave_out_unread(self, raw: Value) -> None:
        """Leaves out the observations, the state and the weights that no action depends on, such as those of a critic."""
        state, held = self._initial_rows(2), list(self._state.values())
        weights = [each for each in _tensors(self) if each[:2] not in held and each[0] is not self]
        paths = {path: spaces.at(raw, path).clone() for path, _ in spaces.leaves(self._space)}
        sources: dict[Any, Tensor] = {**paths, **state, **{name: getattr(module, key) for module, key, name in weights}}
        constants = [vars(module) for module in self.modules()]
        with torch.compiler.set_stance("force_eager"), Dependencies(sources, constants) as dependencies:
            action, following = self._compute(spaces.build(self._space, lambda path, _: paths[path], 2), state)
        if dependencies.foreign:
            got = f"one with a parameter of shape {dependencies.foreign[0]} in a list or further off"
            remedy = "make it an nn.Module of modules"
            raise TypeError(f"deploy needs a policy whose modules it can find, but got {got}: {remedy}.")
        needed = dependencies.of(action) | dependencies.read
        while more := dependencies.of([following[name] for name in state if name in needed]) - needed:
            needed |= more
        if not dependencies.is_complete:
            return
        self._space = _selected(self._space, [path for path in paths if path in needed] or list(paths))
        self._inputs = [name for name in self._inputs if name in needed]
        for module, key, name in weights:
            if name not in needed and (weight := getattr(module, key)).numel():
                setattr(module, key, None)
                if name in dependencies.seen:  # another number would do, but of the same sign and range
                    delattr(module, key)
                    constant = torch.full_like(weight, weight.flatten()[0].item(), requires_grad=False)
                    module.register_buffer(key, constant, persistent=False)

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script comes here
        raise TypeError(NO_TORCHSCRIPT)

    def extra_repr(self) -> str:
        return f"state={self._inputs}" if self._inputs else ""


class Originals(nn.ModuleList):
    """The modules that functions name. In a call, copies of their weights take the place of theirs."""

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Dependencies(TorchFunctionMode):
    """Follows which of some tensors, the sources, each result depends on. Views of the same memory count as one tensor."""

    def __init__(self, sources: Mapping[Any, Tensor], constants: object) -> None:
        super().__init__()
        self._names: dict[int | None, set[Any]] = {}
        self._alive: list[Tensor] = []  # so that no memory is reused
        self.seen, self.read = set[Any](), set[Any]()  # by any function, and by the host
        self.foreign: list[tuple[int, ...]] = []  # shapes of parameters
        self.is_complete = True  # False if a tensor comes from where this cannot follow, such as TorchScript
        self._add(constants, set())
        for name, tensor in sources.items():
            self._add(tensor, {name})

    def _add(self, values: object, names: set[Any]) -> None:
        for tensor in _tensors_in(values):
            self._names.setdefault(_address(tensor), set()).update(names)
            self._alive.append(tensor)

    def of(self, values: object) -> set[Any]:
        """The names of the sources that some values depend on."""
        names = set[Any]()
        for tensor in _tensors_in(values):
            found = self._names.get(_address(tensor))
            names |= found or set()
            self.is_complete &= found is not None
            self.foreign += [tuple(tensor.shape)] if found is None and isinstance(tensor, nn.Parameter) else []
        return names

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        names = self.of((args, kwargs))
        self.seen |= names
        if getattr(function, "__name__", "") in HOST_READS:
            self.read |= names
        self._add(args[:1] if result is None else result, names)  # `x[0] = y` returns None
        return result


def _num_rows(tree: object) -> int:
    while isinstance(tree, Mapping | TensorDictBase) and len(tree.keys()):
        tree = next(iter(tree.values()))
    return tree.shape[0] if isinstance(tree, Tensor) and tree.dim() else 0


def _tensors(root: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """The module of each parameter and buffer, its name there, and its name from the root."""
    found = [(module, f"{prefix}.", {**module._parameters, **module._buffers}) for prefix, module in root.named_modules()]
    return [(module, key, prefix + key) for module, prefix, held in found for key in held if held[key] is not None]


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # inside torch.vmap, for instance
        return None


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | TensorDictBase | list | tuple):
        for part in value.values() if hasattr(value, "values") else value:
            yield from _tensors_in(part)


def _selected(space: Space[Any], paths: Sequence[spaces.Path]) -> Space[Any]:
    """The space with these leaves only."""
    if len(paths) == len(list(spaces.leaves(space))):
        return space
    children = (spaces.children(space) or {}).items()
    rest = {key: [path[1:] for path in paths if path[0] == key] for key, _ in children}
    return gym_spaces.Dict([(key, _selected(child, rest[key])) for key, child in children if rest[key]])


def _shapes(tree: Tree, batch: torch.export.Dim) -> Shapes:
    return {key: _shapes(part, batch) for key, part in tree.items()} if isinstance(tree, dict) else {0: batch}


def _value(space: Space[Any], tree: Tree, number: int) -> Value:
    """A tree with TensorDicts in place of dicts, in the order of the space."""
    children = spaces.children(space)
    if children is None or not isinstance(tree, Mapping | TensorDictBase):
        return tree  # type: ignore[return-value]
    return tensordict({key: _value(child, tree[key], number) for key, child in children.items() if key in tree.keys()}, number)


def _plain(space: Space[Any], value: Value) -> Tree:
    """A value with dicts in place of TensorDicts, which need no library, in the order of the space."""
    if isinstance(value, Tensor):
        return value.detach()
    return {key: _plain(child, spaces.at(value, (key,))) for key, child in (spaces.children(space) or {}).items()}


Part: TypeAlias = Transform | Wrapper
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclasses.dataclass
class Chain:
    """The deployed transforms of an env, innermost first, and the spaces below them: raw observations, the env's actions."""

    observation_space: Space[Any]
    action_space: Space[Any]
    transforms: list[Transform] = dataclasses.field(default_factory=list)
    shown: list[str] = dataclasses.field(default_factory=list)  # as the code that makes them
    left_out: list[str] = dataclasses.field(default_factory=list)


def chain_of(env: Env, without: Sequence[str | type]) -> Chain:
    """The chain of an env. Raises a ValueError for a part that cannot be deployed, or cannot be left out."""
    parts = list(_parts(env))
    known = [piece for part, _, _ in parts for piece in _pieces(part)]
    for entry in without:
        if not any(_is_in(piece, [entry]) for piece in known):
            names = sorted({type(piece).__name__ for piece in known})
            raise ValueError(f"deploy needs names or classes in without among those of the env, {names}, but got {entry!r}.")
    base = parts[0][1] if parts else env.signature
    chain = Chain(base.single_observation_space, base.single_action_space)
    changed: set[str] = set()  # hooks of the transforms so far
    for part, below, above in parts:
        owner = Wrapper if isinstance(part, Wrapper) else Transform
        names = [name for name in ("_step", "_reset", "step", "reset", "action") if name in vars(owner)]
        hooks = {name for name in names if getattr(type(part), name) is not vars(owner)[name]}
        if _is_in(part, without):
            chain.left_out.append(_shown(part))
            for what, conflicts in (("observation", {"step", "reset"}), ("action", {"action"})):
                if (space := getattr(above, f"single_{what}_space")) != getattr(below, f"single_{what}_space"):
                    if changed & conflicts:
                        fault = f"{_shown(part)}: a transform below it changes the {what}"
                        raise ValueError(f"deploy cannot leave out {fault}. Leave that one out too.")
                    setattr(chain, f"{what}_space", space)
        elif hooks and not part.is_passive:
            if isinstance(part, Wrapper):
                raise refusal(part, "drives the env")
            chain.transforms.append(_frozen_copy(part, without))
            chain.shown.append(_shown(part))
            chain.left_out += [_shown(piece) for piece in _pieces(part) if _is_in(piece, without)]
            changed |= hooks
    return chain


def _parts(env: Env | Compose) -> Iterator[tuple[Part, Signature, Signature]]:
    """Transforms and wrappers, innermost first, with the signatures below and above."""
    if isinstance(env, Compose):
        for part, below, above in zip(env, env._signatures, env._signatures[1:], strict=False):
            yield from _parts(part) if isinstance(part, Compose) else [(part, below, above)]
        return
    for layer in reversed(layers(env)):
        if isinstance(layer, TransformedEnv):
            yield from _parts(layer.transforms)
        elif isinstance(layer, Wrapper):
            yield layer, layer.env.signature, layer.signature


def _pieces(part: Part) -> list[Part]:
    """The part, and the transforms inside of it, such as those of `ObservationGroups`."""
    inner = [] if isinstance(part, Wrapper) else list(part.modules())[1:]
    return [part, *(module for module in inner if isinstance(module, Transform) and not isinstance(module, Compose))]


def _is_in(part: Part, without: Sequence[str | type]) -> bool:
    return type(part).__name__ in without or any(isinstance(entry, type) and isinstance(part, entry) for entry in without)


def _frozen_copy(part: Transform, without: Sequence[str | type]) -> Transform:
    """A copy in eval mode, whose env buffers have one initial row, without the parts inside that are left out."""
    for piece in _pieces(part):
        if not _is_in(piece, without) and any(isinstance(module, Stream) for module in piece.children()):
            raise refusal(piece, "draws random numbers")
    transform = copy.deepcopy(part)
    for module, name in _env_buffers(transform):
        declared, row = getattr(type(module), name, None), module.get_buffer(name)[:1].zero_()
        setattr(module, name, declared.allocate(module, 1, row.device) if isinstance(declared, EnvBuffer) else row)
    for compose in [module for module in transform.modules() if isinstance(module, Compose)]:
        compose._checked = frozenset(("action", "step", "reset"))  # in the env
        for name, inner in compose._modules.items():
            if not isinstance(inner, Compose):
                compose.add_module(name, Transform() if _is_in(inner, without) else inner._frozen())
    return transform._frozen().eval().requires_grad_(False)


def _env_buffers(transform: Transform) -> list[tuple[nn.Module, str]]:
    modules = [module for module in transform.modules() if isinstance(module, BatchedModule)]
    return [(module, name) for module in modules for name in module._env_buffer_names]


def state_of(transforms: Sequence[Transform]) -> dict[str, tuple[nn.Module, str]]:
    """The module and the attribute of each buffer with one row per env, by the name of the transform and the attribute."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for transform in transforms:
        for module, key in _env_buffers(transform):
            name = f"{type(transform).__name__}.{key}"
            number = sum(other == name or other.startswith(f"{name}.") for other in found)
            found[f"{name}.{number + 1}" if number else name] = module, key
    return found


def ignores_starts(transform: Transform) -> bool:
    """Whether the transform computes the same whether or not a row starts an episode."""
    hooks = (type(transform).step, type(transform).reset)
    return hooks in [(kind.step, kind.reset) for kind in (Transform, ObservationTransform)] and not _env_buffers(transform)


def refusal(part: Part, fault: str) -> ValueError:
    """The error for a part that cannot be deployed."""
    remedy = f'`without=["{type(part).__name__}"]` leaves it out, and the caller takes over its work.'
    return ValueError(f"deploy cannot use {_shown(part)}, because it {fault}. {remedy}")


def _shown(part: Part) -> str:
    """A transform or wrapper as the code that makes it."""
    if isinstance(part, Transform):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(part))  # the addresses of functions
    try:
        arguments = specs.record(part).kwargs or {}
    except ValueError:  # the wrapper does not keep its arguments
        return f"{type(part).__name__}(...)"
    return f"{type(part).__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def described(space: Space[Any]) -> dict[str, Json]:
    """A space as JSON: its kind, and for a leaf its shape, dtype and values. Equal bounds are one number."""
    children, found = spaces.children(space), {"type": type(space).__name__}
    if children is not None:
        return {**found, "spaces": {key: described(child) for key, child in children.items()}}
    values: dict[str, Json] = {}
    if isinstance(space, gym_spaces.Box):
        values = {"low": _bounds(space.low), "high": _bounds(space.high)}
    elif isinstance(space, gym_spaces.Discrete):
        values = {"n": int(space.n), "start": int(space.start)}
    elif isinstance(space, gym_spaces.MultiDiscrete):
        values = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
    return {**found, "shape": list(space.shape or ()), "dtype": str(np.dtype(space.dtype)), **values}


def _bounds(bound: NDArray[Any]) -> Json:
    values = bound.astype(object)
    values[~np.isfinite(bound)] = None  # JSON has no infinity
    first: Json = values.flat[0] if values.size else None
    return first if all(value == first for value in values.flat) else values.tolist()
