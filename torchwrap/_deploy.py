"""deploy: a policy and its env's transforms as one program, from raw observations to actions."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium import spaces as gym_spaces
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchwrap import policy as policies
from torchwrap import spaces
from torchwrap._compile.inputs import places_of, swap
from torchwrap._compile.trace import exclusively
from torchwrap._core import rows, validation
from torchwrap._core.buffers import BatchedModule, EnvBuffer
from torchwrap._core.errors import refusal
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.rows import RowMask, tensordict
from torchwrap.collector import eval_mode
from torchwrap.env import Env, check_is_env
from torchwrap.policy import Policy, modules_of
from torchwrap.random import Stream
from torchwrap.spaces import Value
from torchwrap.transforms.groups import ObservationGroups, ObservationKeys
from torchwrap.transforms.transform import Compose, ObservationTransform, Transform
from torchwrap.wrappers.wrapper import TransformedEnv, Wrapper

Tree = Any
"""A tensor, or a dict of trees for a `Dict` or `Tuple` space; a `Tuple` has the keys "0", "1"..."""

State = dict[str, Tensor]
OWNER = "This deployed policy"
_STATELESS = (Transform, ObservationTransform, Compose, ObservationGroups, ObservationKeys)
"""Classes whose hooks `step` and `reset` compute the same, with parts for which this holds."""


@exclusively()
def deploy(env: Env, policy: Policy) -> DeployedPolicy:
    """One program from the raw observation to the env's action, for a robot, a game or a service.

    `torch.export` traces the env's observation transforms, the policy and the env's action
    transforms, with frozen statistics and the policy in eval mode. The program computes the actions
    of `evaluate`, bit for bit. It has copies of all tensors that it reads, and nothing that the
    action does not depend on: other entries of a `Dict` observation, the transforms and the state
    that only they need, a critic, rewards and time limits. PyTorch has to be 2.11 or later.

    The result is called as `deployed(observation) -> action`. If something lasts from step to step
    (frames, delays, clocks, the states of `PolicyState`), it is called as `deployed(observation,
    state) -> (action, state)`, with a dict of tensors `(batch, ...)`. The entry `is_first`, bool
    `(batch, 1)`, is set in `initial_state(batch)`; set rows of it to start episodes in them.

    Args:
        env: the env that the policy was trained in, or a sibling with its `state_dict`. For a robot
            that has noise and delays of its own, make the sibling without those transforms.
        policy: as for `evaluate`. It has to be deterministic: `argmax(-1)` of logits, or the mean,
            instead of a sample; and `torch.export` has to be able to trace it. It gets any number
            of rows, `td.batch_size[0]`, for which `len(td)` is a constant.

    Raises:
        TypeError, ValueError: for a policy that draws random numbers, carries state of its own or
            cannot be traced, and for transforms and wrappers that drive the env, or draw random
            numbers that the action depends on.

    >>> import torchwrap as tw; from torchwrap import transforms as T
    >>> env = tw.make("CartPole-v1", 8)
    >>> env = tw.TransformedEnv(env, T.NormalizeObservation(), T.FrameStackObservation(2))
    >>> _, network = env.reset(seed=0), nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    >>> deployed = deploy(env, lambda td: network(td["observation"]).argmax(-1))
    >>> action, state = deployed(torch.zeros(3, 4), deployed.initial_state(3))
    >>> action.shape, list(state)
    (torch.Size([3]), ['FrameStackObservation.histories.0.frames', 'is_first'])
    """
    if torch.__version__ < (2, 11):  # type: ignore[operator]
        raise RuntimeError(refusal("deploy", "PyTorch must be 2.11 or later", torch.__version__))
    check_is_env("deploy", env)
    validation.function("deploy", "policy", policy)
    step = _Step(env, policy)
    observation = spaces.sample(step.space, Stream(1, seed=0, device=env.device))
    remedy = "Take the mode instead of a sample"
    eagerly = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), eagerly, eval_mode(*modules_of(policy)):
        with no_foreign_draws("deploy: the policy", remedy, env.device):
            results = [step(observation, step.initial) for _ in range(2)]
        _check_equal(*results)
        deployed = DeployedPolicy(step)
        _, state = results[0]
        # This call also replaces what tracing has left in attributes of the policy.
        action, following = step(observation, state)
        kept = deployed.initial_state(1)
        result = deployed(observation, {name: state[name] for name in kept})
        expected = {name: following[name] for name in kept}
        _check_equal(result, (action, expected) if kept else action)
    return deployed


class DeployedPolicy:
    """A policy with the transforms of its env, as one program. `torchwrap.deploy` makes it.

    Gradients do not flow through it.

    Attributes:
        program: the `torch.export.ExportedProgram`, for any batch size: for `torch.export.save`,
            `torch.onnx.export` and AOTInductor.
        metadata: inputs and outputs, as JSON can represent them: the spaces with their bounds
            (equal bounds are one number, None is infinity), and the state.
    """

    def __init__(self, step: _Step) -> None:
        self._device = step.env.device
        self._action_space = step.env.unwrapped.single_action_space
        initial = step.initial if step.lasts else {}
        self.program = _export(step, step.space, initial)
        self._space, self._initial = _needed(self.program, step.space, initial)
        step.check_draws(self._initial)
        if self._space != step.space or self._initial.keys() != initial.keys():
            self.program = _export(step, self._space, self._initial)
        _freeze(self.program)
        self._run = self.program.module(check_guards=False)
        state = {}
        for name, row in self._initial.items():
            dtype = str(row.dtype).removeprefix("torch.")
            state[name] = {"shape": list(row.shape[1:]), "dtype": dtype}
        self.metadata = {
            "env": step.env._label,
            "observation": _described(self._space),
            "action": _described(self._action_space),
            "state": state,
        }

    def initial_state(self, batch_size: int) -> State:
        """The state with which every row starts an episode. Empty if nothing lasts."""
        return _repeated(self._initial, validation.integer(OWNER, "batch_size", batch_size, 1))

    def onnx_names(self) -> dict[str, list[str]]:
        """Names of inputs and outputs for `torch.onnx.export`. Next states begin with "next."."""
        state = list(self._initial)
        inputs = _paths("observation", self._space) + state
        outputs = _paths("action", self._action_space) + [f"next.{name}" for name in state]
        return {"input_names": inputs, "output_names": outputs}

    def __call__(self, observation: Tree, state: State | None = None) -> Tree:
        """The action for each row, and with a state also the next state.

        Args:
            observation: raw, `(batch, *shape)` in the dtype of its space. Of a `Dict`, entries that
                the action does not depend on may be given, too.
            state: of the last call, or `initial_state`; for a policy that has one.

        Raises:
            TypeError, ValueError: for another structure, shape or dtype.
        """
        number = _num_rows(observation)
        raw = _value(self._space, observation, number)
        remedy = "Pass `torch.as_tensor(observation)`, with `[None]` for a single one"
        spaces.check(OWNER, "an observation", self._space, raw, number, self._device, remedy=remedy)
        given = {} if state is None else state
        if not isinstance(given, Mapping):
            must = "state must be a dict of tensors"
            raise TypeError(refusal(OWNER, must, type(state).__name__))
        got = rows.layout(tensordict(given))
        needed = rows.layout(tensordict(self.initial_state(number)))
        if got != needed:
            remedy = "Start with `initial_state(batch_size)`"
            raise ValueError(refusal(OWNER, f"state must hold {needed}", got, remedy))
        return self._run(_plain(raw), *filter(None, [dict(given)]))


class _Step:
    """One step of a policy and its transforms, as a function: what `torch.export` traces."""

    def __init__(self, env: Env, policy: Policy) -> None:
        self.env = env
        self.policy = policy
        self.space = env.unwrapped.single_observation_space
        self.transforms = Compose(list(_deployed(env)))
        self.num_stateless = len(list(itertools.takewhile(_is_stateless, self.transforms)))
        has_stateful = self.num_stateless < len(self.transforms)
        self.lasts = has_stateful or bool(env.signature.policy_state)
        # The state consists of the rows that transforms hold, and of those that start here.
        self.held = self.transforms._paths("_env_buffer_names")
        self.initial: State = {}
        for path in self.held:
            self.initial[path] = self.transforms.get_buffer(path).clone()
        is_first = EnvBuffer((1,), torch.bool, fill=True)
        for name, row in {**env.signature.policy_state, "is_first": is_first}.items():
            self.initial[name] = row.allocate(None, 1, env.device)

    def __call__(self, observation: Tree, given: Any = ()) -> tuple[Tree, State]:
        """The action and the next state. Entries that are not given are zero, or initial."""
        number = _num_rows(observation)
        raw = observation
        if not isinstance(observation, Tensor):
            zeros: Any = spaces.zeros(self.space, number, self.env.device)
            raw = zeros.update(observation)
        state = _repeated(self.initial, number) | dict(given)
        place_of = places_of(self.transforms)
        places = [place_of[name] for name in self.held]
        own = swap(places, [state[name].clone() for name in self.held])
        try:
            action, following = self.act(raw, state)
        finally:
            held = swap(places, own)
        following.update(zip(self.held, held, strict=True))
        space = self.env.unwrapped.single_action_space
        action = _value(space, action, number)
        spaces.check("deploy", "the env's action", space, action, number, self.env.device)
        return _plain(action), following

    def act(self, raw: Value, state: State) -> tuple[Value, State]:
        """The action, and the part of the next state that no transform holds."""
        is_first = state["is_first"]
        signature = self.env.signature
        root = {"observation": self.observe(raw, is_first)}
        if signature.policy_state:
            root |= policies.next_entries(signature, state, is_first)
        number = _num_rows(raw)
        td = tensordict(root, number)
        try:
            td = policies.act(self.env, self.policy, td)
        except KeyError as error:
            fault = f"policy raised a KeyError; the keys of a deployed root are {sorted(root)}"
            raise ValueError(refusal("deploy", fault)) from error
        policies.check("deploy", signature, td, number)
        action = td.get("action", None)
        space = signature.single_action_space
        spaces.check("deploy", "the policy's action", space, action, number, self.env.device)
        action = action.clone()  # which a transform may write to
        for transform in reversed(list(self.transforms)):
            action = transform.action(action)
        following = {name: td["next", name] for name in signature.policy_state}
        following["is_first"] = torch.zeros_like(is_first)
        return action, following

    def observe(self, raw: Value, is_first: Tensor) -> Any:
        """The observation that the policy reads.

        As in an env, every row takes a step, and then the rows that start an episode are reset.
        Stateless transforms below the others do the same in both, so they run once.
        """
        number = _num_rows(raw)
        running = torch.zeros(number, 1, dtype=torch.bool, device=self.env.device)
        td = tensordict({"observation": raw.clone()}, number)
        td.update({"terminated": running, "truncated": running.clone()})
        for transform in self.transforms[: self.num_stateless]:
            td = transform.step(td)
        above = self.transforms[self.num_stateless :]
        if not above:
            return td["observation"]
        mask = RowMask(is_first)
        initial = tensordict({"observation": td["observation"].clone()}, number)
        for transform in above:
            td = transform.step(td)
        for transform in above:
            initial = transform.reset(initial, mask)
        return mask.where(initial["observation"], td["observation"])

    def check_draws(self, state: State) -> None:
        """Raises if a random stream is among the state that the action depends on."""
        for name in state:
            path, _, _ = name.rpartition(".")
            if isinstance(self.transforms.get_submodule(path), Stream):
                owner, _, _ = path.rpartition(".")
                part = self.transforms.get_submodule(owner)
                raise _unusable(part, "it draws random numbers")


def _export(step: _Step, space: Space[Any], initial: State) -> Any:
    """A program without writes in place, for this observation and state, and any batch size."""

    def forward(observation: Tree, state: Any = ()) -> Any:
        action, following = step(observation, state)
        return (action, {name: following[name] for name in initial}) if initial else action

    module: Any = nn.Module()
    module.forward = forward
    example: Tree = (_plain(spaces.zeros(space, 2, step.env.device)),)
    if initial:
        example += (_repeated(initial, 2),)
    dimensions: Any = itertools.repeat({0: torch.export.Dim("batch")})
    shapes = rows.builder(example)(dimensions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # because PyTorch's exporter uses deprecated code
        try:
            program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            must = (
                "torch.export must be able to trace policy and transforms, with no TorchScript, no "
                "DistributedDataParallel, and `td.batch_size[0]` in place of `len(td)`"
            )
            raise ValueError(refusal("deploy", must, f"{error!r}")) from error
        return program.run_decompositions({})


def _needed(
    program: Any,
    space: Space[Any],
    initial: State,
) -> tuple[Space[Any], State]:
    """The entries of the raw observation, and of the state, that the action depends on."""
    signature = program.graph_signature
    keys = [path[:1] for path, _ in spaces.leaves(space)]
    source_of = dict(zip(signature.user_inputs, [*keys, *initial], strict=True))
    number = len(signature.user_outputs) - len(initial)
    next_of = dict(zip(initial, signature.user_outputs[number:], strict=True))
    node_of = {node.name: node for node in program.graph.nodes}
    same_as = _same_values(program.graph)
    queue = list(signature.user_outputs[:number])
    known = set()
    found = set()
    while queue:
        name = same_as[queue.pop()]
        if name in known:
            continue
        known.add(name)
        source = source_of.get(name)
        found.add(source)
        if source in next_of:
            queue.append(next_of[source])
        node = node_of[name]
        if not str(node.target).startswith("aten.sym_"):  # a size
            queue += [each.name for each in node.all_input_nodes]
    parts = spaces.children(space) or {}
    kept = [key for key in parts if (key,) in found]
    if 0 < len(kept) < len(parts):
        space = gym_spaces.Dict([(key, parts[key]) for key in kept])
    return space, {name: row for name, row in initial.items() if name in found}


def _same_values(graph: Any) -> dict[str, str]:
    """For each node, by name, the first one with the same value."""
    same_as: dict[str, str] = {}
    first_of: dict[str, str] = {}
    for node in graph.nodes:
        args = torch.fx.node.map_arg(node.args, lambda each: same_as[each.name])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda each: same_as[each.name])
        key = f"{node.target} {args} {kwargs}"
        if node.target is torch.ops.aten.clone.default:
            key = args[0]
        elif node.target is torch.ops.aten.where.self and args[1] == args[2]:
            key = args[1]
        same_as[node.name] = first_of.setdefault(key, node.name)
        first_of[node.name] = same_as[node.name]
    return same_as


def _freeze(program: Any) -> None:
    """Drops what no output depends on, and replaces tensors that the program reads by copies."""
    node_of = {node.name: node for node in program.graph.nodes}
    for node in reversed(list(node_of.values())):
        if node.op == "call_function" and not node.users:
            program.graph.erase_node(node)  # such as an assertion
    specs = program.graph_signature.input_specs
    for spec in list(specs):
        if spec.target is None:  # an input of the caller
            continue
        node = node_of[spec.arg.name]
        value = program.constants.pop(spec.target)
        if node.users:
            program.constants[spec.target] = value.detach().clone()
        else:
            program.graph.erase_node(node)
            specs.remove(spec)
    program.graph_module.recompile()


def _deployed(env: Env) -> Iterator[Transform]:
    """Replacements of the transforms, innermost first, in eval mode and with rows of one env."""
    if not isinstance(env, Wrapper):
        return
    yield from _deployed(env.env)
    if not isinstance(env, TransformedEnv):
        _replacement(env)  # raises, unless the wrapper changes nothing
        return
    for part in env.transforms.flat():
        if _replacement(part) is None:
            continue
        fresh = copy.deepcopy(part).eval()
        fresh.attached = False
        learned = fresh.state_dict()
        fresh.allocate(1, env.device)
        try:
            fresh.setup(part._below.replace(num_envs=1, device=env.device))
        except ValueError as error:
            raise _unusable(part, error) from error
        fresh.load_state_dict(learned)
        for module in list(fresh.modules()):
            if isinstance(module, BatchedModule):
                module._warn_untrained("deploy")
            if isinstance(module, Transform):
                module._position = None  # no check of results, which have other rows and no reward
            if isinstance(module, Compose):
                for name, child in module.named_children():
                    module.add_module(name, _replacement(child) or Transform())
        yield _replacement(fresh)


def _replacement(part: Any) -> Any:
    """`part.deployed()`, unless a class of the user changes hooks, but not their `deployed`."""
    inherited = part.deployed.__func__
    for kind in type(part).__mro__:
        if "deployed" in vars(kind) or kind.__module__.startswith("torchwrap."):
            break
        hooks = sorted({"step", "reset", "action", "observation"} & vars(kind).keys())
        if hooks and inherited not in (Transform.deployed, Wrapper.deployed):
            owner = inherited.__qualname__.partition(".")[0]
            fault = f"it has {hooks} of its own, but {owner}'s deployed(): define it, too"
            raise _unusable(part, fault)
    try:
        return part.deployed()
    except ValueError as error:
        raise _unusable(part, error) from error


def _unusable(part: Any, reason: object) -> ValueError:
    reason = str(reason).removesuffix(".")
    fault = f"cannot use {type(part).__name__}, because {reason}"
    remedy = "Deploy an env without it, which has loaded the state_dict of this one"
    return ValueError(refusal("deploy", fault, remedy=remedy))


def _is_stateless(transform: Transform) -> bool:
    """Whether the transform computes the same whether or not a row starts an episode."""
    known = [(kind.step, kind.reset) for kind in _STATELESS]
    kinds = [type(part) for part in transform.modules() if isinstance(part, Transform)]
    if any((kind.step, kind.reset) not in known for kind in kinds):
        return False
    return not transform._paths("_env_buffer_names")


def _check_equal(first: Any, second: Any) -> None:
    try:
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5, equal_nan=True)
    except AssertionError as error:
        must = "policy and transforms must return the same in every call"
        remedy = "Declare state with PolicyState or EnvBuffer, and take modes, not samples"
        raise ValueError(refusal("deploy", must, remedy=remedy)) from error


def _repeated(initial: State, number: Any) -> State:
    state = {}
    for name, row in initial.items():
        state[name] = row.expand(number, *row.shape[1:]).clone()
    return state


def _paths(name: str, space: Space[Any]) -> list[str]:
    return [".".join((name, *path)) for path, _ in spaces.leaves(space)]


def _num_rows(tree: Tree) -> int:
    while isinstance(tree, Mapping | TensorDictBase) and len(tree.keys()):
        tree = next(iter(tree.values()))
    return tree.shape[0] if isinstance(tree, Tensor) and tree.dim() else 1


def _value(space: Space[Any], tree: Tree, number: int) -> Any:
    """A tree with TensorDicts in place of dicts, in the order of the space."""
    children = spaces.children(space)
    if children is None:
        return tree
    values = {}
    try:
        for key, child in children.items():
            values[key] = _value(child, tree[key], number)
    except (LookupError, TypeError):
        must = f"a value of {space} must be a dict with the keys {list(children)}"
        raise ValueError(refusal(OWNER, must, rows.layout(tree))) from None
    return tensordict(values, number)


def _plain(value: Value) -> Tree:
    """A value with dicts, which need no library, in place of TensorDicts."""
    return value if isinstance(value, Tensor) else value.to_dict()


def _described(space: Space[Any]) -> dict[str, Any]:
    """A space as JSON: its kind, and for a leaf its shape, dtype and bounds."""
    described: dict[str, Any] = {"type": type(space).__name__}
    children = spaces.children(space)
    if children is not None:
        described["spaces"] = {key: _described(child) for key, child in children.items()}
        return described
    described["shape"] = list(space.shape or ())
    described["dtype"] = str(space.dtype)
    if not isinstance(space, gym_spaces.MultiBinary):
        for name in ("low", "high", "n", "start", "nvec"):
            if hasattr(space, name):
                described[name] = _bound(getattr(space, name))
    return described


def _bound(bound: Any) -> Any:
    """Numbers as JSON, which has no infinity; equal ones as one number."""
    numbers = np.asarray(bound).astype(object)
    numbers[~np.isfinite(numbers.astype(float))] = None
    values = set(numbers.flat)
    return values.pop() if len(values) == 1 else numbers.tolist()
