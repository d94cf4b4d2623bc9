"""deploy: a policy, and the transforms of the env that it was trained in, as one module from raw observations to actions."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from torchwrap import policy as policies
from torchwrap import spaces
from torchwrap._compile.inputs import Root
from torchwrap._compile.trace import dependencies
from torchwrap._core import rows
from torchwrap._core.buffers import BatchedModule, EnvBuffer
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.env import Env
from torchwrap.policy import Policy, act, modules_of
from torchwrap.random import Stream
from torchwrap.spaces import Signature, Value
from torchwrap.transforms.transform import Compose, ObservationTransform, Transform
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper

Tree: TypeAlias = "Tensor | dict[str, Tree]"
"""A tensor, or a dict of trees for a `Dict` or `Tuple` space; the keys of a `Tuple` are "0", "1" and so on."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Part: TypeAlias = Transform | Wrapper
State: TypeAlias = Mapping[str, Tensor]

OWNER = "This deployed policy"


def deploy(env: Env, policy: Policy, *, without: Sequence[str | type] = ()) -> DeployedPolicy:
    """One module from the raw observation to the env's action, for where there is no env: on a robot, in a game, in a service.

    It consists of copies of the env's observation transforms, the policy, and the env's action transforms, with frozen
    statistics, and computes the actions of `evaluate`, bit for bit. A function computes with copies of the modules that it
    names or closes over. Rewards, time limits, statistics of episodes, and observations, state and weights that no action
    depends on, such as those of a critic, are left out.

    The result is called as `module(observation) -> action`; where something lasts from step to step (frames, delays, clocks,
    what `PolicyState` declares), as `module(observation, state) -> (action, state)`, with a dict of tensors `(batch, ...)`.
    Its entry `is_first`, bool `(batch, 1)`, is set in `initial_state(batch)`; set rows of it to start episodes in them.

    `torch.export.export(module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes())` makes a program that PyTorch
    alone, ONNX Runtime and AOTInductor can run, with torch 2.11 or later.

    Args:
        env: the env that the policy was trained in, or a sibling with its `state_dict`.
        policy: as for `evaluate`. It has to be deterministic: `argmax(-1)` of logits, or the mean, instead of a sample.
        without: names or classes of transforms and wrappers to leave out, such as noise, `StickyAction` and `RepeatAction`.
            The deployed module does not need them, or the caller takes over their work.

    Raises:
        TypeError, ValueError: for a policy that draws random numbers or keeps state of its own, a function that uses a tensor
            outside of modules, and a transform or wrapper that draws random numbers, drives the env, or needs the reward.

    >>> import torchwrap as tw; from torchwrap import transforms as T
    >>> env = tw.TransformedEnv(tw.make("CartPole-v1", 8), T.NormalizeObservation(), T.FrameStackObservation(2))
    >>> _, network = env.reset(seed=0), nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    >>> module = deploy(env, lambda td: network(td["observation"]).argmax(-1))
    >>> action, state = module(torch.zeros(3, 4), module.initial_state(3))
    >>> action.shape, list(state)
    (torch.Size([3]), ['FrameStackObservation.histories.0.frames', 'is_first'])
    """
    if not isinstance(env, Env):
        raise TypeError(f"deploy needs an Env as its first argument, but got {type(env).__name__}.")
    if not callable(policy) or any(
        isinstance(part, Env) for module in modules_of(policy) for part in module.modules()
    ):
        raise TypeError(f"deploy needs a callable policy that contains no Env, but got {policy!r}.")
    if isinstance(without, str | type) or not isinstance(without, Sequence):
        raise TypeError(
            f"deploy needs the argument without as a list of names or classes, but got {without!r}."
        )
    if isinstance(policy, FunctionType | MethodType):
        variables = inspect.getclosurevars(policy)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            if isinstance(value, Tensor):
                remedy = "make the policy an nn.Module and the tensor one of its buffers"
                raise TypeError(
                    f"deploy needs a policy with its tensors in modules, but got the tensor {name!r}: {remedy}."
                )
    return DeployedPolicy(env, policy, without)


class DeployedPolicy(nn.Module):
    """A policy with the transforms of its env, as one module. `torchwrap.deploy` makes it.

    Gradients do not flow through it. While it computes, its transforms hold the state, and the modules that a function names
    hold the weights of this module, so only one thread at a time may call it. An exported program has no such limit.

    Attributes:
        metadata: what the module is given and returns, as JSON can represent it: the spaces with their bounds (equal ones are
            one number, None is infinity), the state, and the transforms.
    """

    def __init__(self, env: Env, policy: Policy, without: Sequence[str | type]) -> None:
        super().__init__()
        import torchwrap

        kept, self._observation_space, self._action_space = _kept(env, without)
        self.transforms = _frozen(kept, without)
        self.policy: Policy = (
            _copied(policy).eval().requires_grad_(False)
            if isinstance(policy, nn.Module)
            else policy
        )
        self.signature, self._action_keys = (
            env.signature,
            set(spaces.children(env.single_action_space) or ()),
        )
        self.start = BatchedModule()  # the initial rows of what no transform holds
        for name, declared in {
            **env.signature.policy_state,
            "is_first": EnvBuffer((1,), torch.bool, True),
        }.items():
            self.start.register_env_buffer(name, declared.allocate(None, 1, env.device))
        self.networks = _copied(self._root["networks"])  # what functions compute with
        held = [path for path in _env_buffers(self._root) if not path.startswith("networks.")]
        self._rows = {path.partition(".")[2]: path for path in held}
        self._num_stateless = len(list(itertools.takewhile(_ignores_starts, self.transforms)))
        if len(self._rows) == 1 and self._num_stateless == len(self.transforms):
            self._rows = {}
        # The observations and states that an action depends on are inputs of the module.
        self._space, self._inputs = self._observation_space, list(self._rows)
        self._check(env)
        self.metadata: dict[str, Json] = {
            "torchwrap": torchwrap.__version__,
            "env": env._name(),
            "observation": _described(self._space),
            "action": _described(self._action_space),
            "state": {
                name: {"shape": list(row.shape[1:]), "dtype": str(row.dtype).removeprefix("torch.")}
                for name, row in self.initial_state(1).items()
            },
            "transforms": [
                re.sub(r" at 0x[0-9a-f]+", "", repr(part)) for part in kept
            ],  # the addresses of functions
        }

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        """The state with which every row starts an episode. Empty if nothing lasts from step to step."""
        return {
            name: row
            for name, row in self._initial_rows(batch_size).items()
            if name in self._inputs
        }

    def _initial_rows(self, batch_size: int) -> dict[str, Tensor]:
        initial = {name: self.get_buffer(path) for name, path in self._rows.items()}
        return {
            name: row.expand(batch_size, *row.shape[1:]).clone() for name, row in initial.items()
        }

    def example_inputs(self, batch_size: int = 2) -> tuple[Tree, ...]:
        """Arguments of the module, for exports: an observation of zeros, and the initial state if there is one.

        A program that is exported with a batch of 1 takes no other one.
        """
        zeros = spaces.zeros(self._space, batch_size, self.start.get_buffer("is_first").device)
        observation = _plain(self._space, zeros)
        return (observation, {**self.initial_state(batch_size)}) if self._inputs else (observation,)

    def dynamic_shapes(self) -> dict[str, Any]:
        """The argument of `torch.export.export` that leaves the batch size open."""
        batch: Any = itertools.repeat({0: torch.export.Dim("batch")})
        return dict(
            zip(("observation", "state"), rows.builder(self.example_inputs(1))(batch), strict=False)
        )

    def onnx_names(self) -> dict[str, list[str]]:
        """Arguments of `torch.onnx.export`: the names of inputs and outputs. Names of the next state begin with "next."."""
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
            remedy = "use `torch.export.export(module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes())`"
            raise TypeError(
                f"{OWNER} cannot be traced by torch.jit, which would record the example alone: {remedy}."
            )
        number = _num_rows(observation)
        raw = _value(self._space, observation, number)
        device = self.start.get_buffer("is_first").device
        spaces.check(OWNER, "an observation", self._space, raw, number, device)
        initial = self.initial_state(number)
        if state is None and initial:
            raise TypeError(f"{OWNER} got no state: start with `module.initial_state(batch_size)`.")
        state = {} if state is None else state
        needed, got = (
            {name: (tuple(row.shape), row.dtype) for name, row in rows.items()}
            for rows in (initial, state)
        )
        if got != needed:
            raise ValueError(f"{OWNER} needs a state with {needed}, but got {got}.")
        if self._space is not self._observation_space:
            raw = spaces.zeros(self._observation_space, number, device).update(raw)  # type: ignore[union-attr,arg-type]
        action, following = self._compute(raw, {**self._initial_rows(number), **state})
        plain = _plain(self._action_space, action)
        return (
            (plain, {name: following[name].detach() for name in self._inputs})
            if self._inputs
            else plain
        )

    @functools.cached_property
    def _root(self) -> Root:
        """The transforms, and the modules that functions name."""
        kinds: Any = (FunctionType, MethodType, functools.partial)
        parts = [part for module in self.modules() for part in vars(module).values()]
        functions = [
            part for part in parts if isinstance(part, kinds) or part is vars(self).get("policy")
        ]
        found, known = (
            [module for function in functions for module in modules_of(function)],
            set(self.modules()),
        )
        originals = nn.ModuleList(module for module in dict.fromkeys(found) if module not in known)
        return Root({"transforms": self.transforms, "start": self.start, "networks": originals})

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name != "_root"
        }  # a copy finds its own

    def _call(self, held: dict[str, Tensor], function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function while transforms hold other tensors, and the modules of functions our weights."""
        held |= {
            f"networks.{name}": tensor.detach() for *_, name, tensor in _tensors(self.networks)
        }
        return functional_call(self._root, held, (function, *args), tie_weights=False)

    def _compute(self, raw: Value, state: State) -> tuple[Value, dict[str, Tensor]]:
        """The action and the next state, from all observations and the whole state."""
        held = {path: state[name].clone() for name, path in self._rows.items()}
        action, following = self._call(held, self._act, raw, state)
        return action, {**{name: held[path] for name, path in self._rows.items()}, **following}

    def _act(self, raw: Value, state: State) -> tuple[Value, dict[str, Tensor]]:
        """The action, and the part of the next state that no transform holds and writes to."""
        number = rows.leaves(raw)[0].shape[0]
        root = {
            "observation": self._observe(raw, number, RowMask(state["is_first"]) if state else None)
        }
        if own := {name: state[name] for name in self.signature.policy_state}:
            root |= policies.following(self.signature, own, state["is_first"])
        td: Any = tensordict(root, number)
        action: Any = self.policy(td)
        if isinstance(action, TensorDictBase) and set(action.keys()) != self._action_keys:
            action, td = action["action"], action
        if not isinstance(action, Tensor | TensorDictBase):
            raise TypeError(
                f"deploy needs a policy that returns tensors, but got {type(action).__name__}."
            )
        for transform in reversed(list(self.transforms)):
            action = transform.action(action)
        following = {name: td["next", name] for name in own}
        return action, {
            **following,
            "is_first": torch.zeros_like(state["is_first"]),
        } if state else following

    def _observe(self, raw: Value, number: int, mask: RowMask | None) -> Value:
        # As an env does: a step of every row, and then a reset of those rows that start an episode. Until it ends, a row has
        # neither terminated nor been truncated. Transforms that do the same in both come first, once.
        ended = torch.zeros(2, number, 1, dtype=torch.bool, device=rows.leaves(raw)[0].device)
        td = tensordict(
            {"observation": raw.clone(), "terminated": ended[0], "truncated": ended[1]}, number
        )
        for transform in self.transforms[: self._num_stateless]:
            td = transform.step(td)
        remaining = self.transforms[self._num_stateless :]
        if mask is None or not remaining:
            return td["observation"]
        initial = tensordict({"observation": td["observation"].clone()}, number)
        try:
            for transform in remaining:
                td = transform.step(td)
            for transform in remaining if mask.any() else ():
                initial = transform.reset(initial, mask)
        except KeyError as error:
            remedy = "Set `is_passive = True` in its class if it leaves observations and actions as they are"
            raise _refusal(
                transform, f"reads an entry that only an env provides: {error.args[0]}. {remedy}"
            ) from error
        return (
            mask.where(initial["observation"], td["observation"])
            if mask.any()
            else td["observation"]
        )

    @torch.no_grad()
    def _check(self, env: Env) -> None:
        """Calls the policy as `rollout` does, and the module, to raise for errors that an export would not report."""
        device, number, space = env.device, env.num_envs, env.single_observation_space
        inputs = (
            _plain(self._space, spaces.sample(self._space, Stream(2, seed=0, device=device))),
            *self.example_inputs()[1:],
        )
        before = {name: value.clone() for name, value in self.state_dict().items()}
        td = tensordict(
            {
                "observation": spaces.zeros(space, number, device),
                **policies.initial(env.signature),
            },
            number,
        )
        with no_foreign_draws(
            "deploy needs a deterministic policy, but it",
            "take the mode instead of a sample",
            device,
        ):
            policies.read("deploy", env.signature, self._call({}, act, env, self.policy, td))
            first, second = self(*inputs), self(*inputs)
        written = [
            name
            for name, value in self.state_dict().items()
            if not torch.equal(value, before[name])
        ]
        pairs = zip(rows.leaves(first), rows.leaves(second), strict=True)
        if written or not all(torch.allclose(*pair, rtol=1e-3, equal_nan=True) for pair in pairs):
            remedy = "Declare state with PolicyState or EnvBuffer, and put the modules of a function into eval mode"
            got = f"they change {written}" if written else "two calls differ"
            raise ValueError(
                f"deploy needs a policy and transforms that return the same in every call, but {got}. {remedy}."
            )
        action = _value(self._action_space, first[0] if self._inputs else first, 2)
        spaces.check("deploy", "the env's actions", self._action_space, action, 2, device)
        self._leave_out(_value(self._space, inputs[0], 2))

    def _leave_out(self, raw: Value) -> None:
        """Leaves out the observations, the state and the weights that no action depends on, such as those of a critic."""
        paths, state = [path for path, _ in spaces.leaves(self._space)], self._initial_rows(2)
        given: dict[Any, Tensor] = {**{path: spaces.at(raw, path) for path in paths}, **state}

        def compute(*tensors: Tensor) -> list[Tensor]:
            traced = dict(zip(given, tensors, strict=True))
            observation = spaces.build(self._space, lambda path, _: traced[path], 2)
            action, following = self._compute(observation, {name: traced[name] for name in state})
            return [*rows.leaves(action), *(following[name] for name in state)]

        found = dependencies(compute, list(given.values()), len(state))
        if found is None:
            return
        used, needed = found
        if any(
            isinstance(tensor, nn.Parameter)
            for tensor in needed - {tensor for *_, tensor in _tensors(self)}
        ):
            remedy = "make the policy an nn.Module that registers it"
            raise TypeError(
                f"deploy cannot find a module of the policy, such as one in a list: {remedy}."
            )
        read, children = (
            {path[:1] for path in paths if given[path] in needed},
            spaces.children(self._space) or {},
        )
        if 0 < len(read) < len(children):
            self._space = gym_spaces.Dict(
                [(key, part) for key, part in children.items() if (key,) in read]
            )
        self._inputs = [name for name, row in state.items() if row in needed]
        for module, key, name, weight in list(_tensors(self)):
            if weight not in needed and weight.numel() and name not in self._rows.values():
                # What is only read may be any number of the same sign and range.
                is_read = weight in used or not isinstance(weight, nn.Parameter)
                constant = (
                    torch.full_like(weight, weight.flatten()[0].item(), requires_grad=False)
                    if is_read
                    else None
                )
                delattr(module, key)
                module.register_buffer(key, constant, persistent=False)


def _tensors(root: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """The module of each parameter and buffer, its name there, its name from the root, and the tensor."""
    for prefix, module in root.named_modules():
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                yield module, key, f"{prefix}.{key}".removeprefix("."), tensor


def _env_buffers(root: nn.Module) -> list[str]:
    """The names of the buffers with one row per env."""
    return [
        name
        for module, key, name, _ in _tensors(root)
        if key in getattr(module, "_env_buffer_names", ())
    ]


def _num_rows(tree: object) -> int:
    while isinstance(tree, Mapping | TensorDictBase) and len(tree.keys()):
        tree = next(iter(tree.values()))
    return tree.shape[0] if isinstance(tree, Tensor) and tree.dim() else 0


def _value(space: Space[Any], tree: Tree, number: int) -> Value:
    """A tree with TensorDicts in place of dicts, in the order of the space."""
    children = spaces.children(space)
    if children is None or not isinstance(tree, Mapping | TensorDictBase):
        return tree  # type: ignore[return-value]
    return tensordict(
        {
            key: _value(child, tree[key], number)
            for key, child in children.items()
            if key in tree.keys()
        },
        number,
    )


def _plain(space: Space[Any], value: Value) -> Tree:
    """A value with dicts in place of TensorDicts, which need no library, in the order of the space."""
    if isinstance(value, Tensor):
        return value.detach()
    return {
        key: _plain(child, spaces.at(value, (key,)))
        for key, child in (spaces.children(space) or {}).items()
    }


def _copied(module: Any) -> Any:
    """A deep copy, without the graphs of gradients that a module may hold, such as the distribution of its last batch."""

    class Detached(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            is_result = function is Tensor.__deepcopy__ and not args[0].is_leaf
            return args[0].detach().clone() if is_result else function(*args, **(kwargs or {}))

    with Detached():
        return copy.deepcopy(module)


def _kept(
    env: Env, without: Sequence[str | type]
) -> tuple[list[Transform], Space[Any], Space[Any]]:
    """The transforms of the module, innermost first, and the spaces below them: raw observations, the env's actions."""
    kept = list[Transform]()
    known = [
        part
        for part in env.modules()
        if isinstance(part, Part) and not isinstance(part, Compose | TransformedEnv)
    ]
    for entry in without:
        if not any(_is_in(part, [entry]) for part in known):
            names = sorted({type(part).__name__ for part in known})
            raise ValueError(
                f"deploy needs the argument without to name some of the env's {names}, but got {entry!r}."
            )
    lowest = {
        what: getattr(env.unwrapped, f"single_{what}_space") for what in ("observation", "action")
    }
    for part, below, above in _parts(env):
        if _is_in(part, without):
            for what, hooks in (("observation", ("step", "reset")), ("action", ("action",))):
                if (space := getattr(above, f"single_{what}_space")) != getattr(
                    below, f"single_{what}_space"
                ):
                    if any(
                        getattr(type(other), hook) is not getattr(Transform, hook)
                        for other in kept
                        for hook in hooks
                    ):
                        fault = f"{type(part).__name__}, because a transform below it changes the {what}"
                        raise ValueError(
                            f"deploy cannot leave out {fault}: leave that one out too."
                        )
                    lowest[what] = space
        elif not part.is_passive:
            if isinstance(part, Wrapper):
                raise _refusal(part, "drives the env")
            kept.append(part)
    return kept, lowest["observation"], lowest["action"]


def _parts(env: Env | Compose) -> Iterator[tuple[Part, Signature, Signature]]:
    """Transforms and wrappers, innermost first, with the signatures below and above."""
    if isinstance(env, Compose):
        for part in env:
            if isinstance(part, Compose):
                yield from _parts(part)
            else:
                yield part, part._below, part._above
    elif isinstance(env, Wrapper):
        yield from _parts(env.env)
        yield from (
            _parts(env.transforms)
            if isinstance(env, TransformedEnv)
            else [(env, env.env.signature, env.signature)]
        )


def _is_in(part: Part, without: Sequence[str | type]) -> bool:
    return type(part).__name__ in without or any(
        isinstance(entry, type) and isinstance(part, entry) for entry in without
    )


def _frozen(kept: Sequence[Transform], without: Sequence[str | type]) -> Compose:
    """Copies in eval mode, whose env buffers have one initial row, without what is left out inside of them."""
    transforms = Compose([copy.deepcopy(part) for part in kept])
    for compose in [module for module in transforms.modules() if isinstance(module, Compose)]:
        for name, part in compose._modules.items():
            if not isinstance(part, Compose):
                compose.add_module(name, Transform() if _is_in(part, without) else part._frozen())
    for module in transforms.modules():
        if isinstance(module, Transform):
            module._checked = frozenset(("action", "step", "reset"))  # in the env
        if any(isinstance(child, Stream) for child in module.children()):
            raise _refusal(module, "draws random numbers")
        for name in getattr(module, "_env_buffer_names", ()):
            declared, row = (
                getattr(type(module), name, None),
                torch.zeros_like(module.get_buffer(name)[:1]),
            )
            setattr(
                module,
                name,
                declared.allocate(module, 1, row.device)
                if isinstance(declared, EnvBuffer)
                else row,
            )
    return transforms.eval().requires_grad_(False)


def _ignores_starts(transform: Transform) -> bool:
    """Whether the transform computes the same whether or not a row starts an episode."""
    hooks = (type(transform).step, type(transform).reset)
    is_same = hooks in [(kind.step, kind.reset) for kind in (Transform, ObservationTransform)]
    return is_same and not _env_buffers(transform)


def _refusal(part: nn.Module, fault: str) -> ValueError:
    name = type(part).__name__
    remedy = f'Leave it out with `without=["{name}"]`, if the caller takes over its work.'
    return ValueError(f"deploy cannot use {name}, because it {fault}. {remedy}")


def _described(space: Space[Any]) -> dict[str, Json]:
    """A space as JSON: its kind, and for a leaf its shape, dtype and bounds."""
    if (children := spaces.children(space)) is not None:
        return {
            "type": type(space).__name__,
            "spaces": {key: _described(child) for key, child in children.items()},
        }
    found: dict[str, Any] = {
        "type": type(space).__name__,
        "shape": list(space.shape or ()),
        "dtype": str(space.dtype),
    }
    for name in ("low", "high", "n", "start", "nvec"):
        if hasattr(space, name) and not isinstance(space, gym_spaces.MultiBinary):
            bound = np.asarray(getattr(space, name)).astype(object)
            bound[~np.isfinite(bound.astype(float))] = None  # JSON has no infinity
            found[name] = bound.flat[0] if len({*bound.flat}) == 1 else bound.tolist()
    return found
