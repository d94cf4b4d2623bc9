"""deploy: a policy, and the transforms of the env that it was trained in, as one module from raw observations to actions."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from gymnasium import Space
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchwrap import spaces
from torchwrap._core import nested
from torchwrap._core.reachable import Reachable
from torchwrap._core.rows import RowMask
from torchwrap._deploy import checks, description
from torchwrap._deploy import policy as policies
from torchwrap._deploy.chain import Chain, chain_of
from torchwrap.collector import Policy
from torchwrap.env import Env

Tree: TypeAlias = Any
"""A tensor, or a dict of trees for a `Dict` or `Tuple` space; the keys of a `Tuple` are "0", "1" and so on."""

IS_FIRST = "is_first"


def deploy(env: Env, policy: Policy, *, without: Sequence[str | type] = ()) -> DeployedPolicy:
    """One module from the raw observation to the env's action, for where there is no env: on a robot, in a game, in a service.

    It consists of the env's observation transforms, the policy, and the env's action transforms, all as copies in eval mode
    with frozen statistics. So it computes the actions of `evaluate`, bit for bit, and later training does not change it. It
    leaves out what affects neither observations nor actions, such as rewards, time limits and statistics of episodes.

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
        policy: as for `evaluate`: an `nn.Module` that is called with a TensorDict, a method of one, or a function with modules
            in its closure. It has to be deterministic: `argmax(-1)` of logits, or the mean, instead of a sample.
        without: names or classes of transforms and wrappers to leave out, such as noise, `StickyAction` and `RepeatAction`.
            The deployed module does not need them, or the caller takes over their work.

    Returns:
        The module: `module(observation) -> action`, or `module(observation, state) -> (action, state)`.

    Raises:
        TypeError, ValueError: for a policy that draws random numbers or cannot be copied, and for a transform or wrapper that
            cannot be deployed, by its name: it draws random numbers, drives the env, or needs the reward.

    >>> import torchwrap as tw; from torchwrap import transforms as T
    >>> env = tw.TransformedEnv(tw.make("CartPole-v1", 8), T.NormalizeObservation(), T.FrameStackObservation(2))
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    >>> module = deploy(env, lambda td: network(td["observation"]).argmax(-1))
    >>> action, state = module(torch.zeros(3, 4), module.initial_state(3))
    >>> action.shape, {name: tensor.shape for name, tensor in state.items()}
    (torch.Size([3]), {'FrameStackObservation.frames': torch.Size([3, 2, 4]), 'is_first': torch.Size([3, 1])})
    """
    if not isinstance(env, Env):
        raise TypeError(f"deploy needs an Env first, but got {type(env).__name__}.")
    if not callable(policy):
        raise TypeError(f"deploy needs a policy as {policies.NEEDED}, but got {policy!r}.")
    if isinstance(without, str | type) or not isinstance(without, Sequence):
        raise TypeError(f"deploy needs a list of names or classes as without, but got {without!r}.")
    originals = Reachable([({"policy": policy}, "policy"), ({"env": env}, "env")]).modules
    module = DeployedPolicy(env, policies.copied(policy), chain_of(env, without), set(map(id, originals)))
    _validate(module, env)
    return module


class DeployedPolicy(nn.Module):
    """A policy with the transforms of its env, as one module. `torchwrap.deploy` makes it.

    While a module with a state computes, its transforms hold that state, so only one thread at a time may call it. An exported
    program has no such limit.

    Attributes:
        metadata: what the module is given and returns, as JSON can represent it: the spaces with their bounds (None is
            infinity), the state, the transforms, and what was left out.
    """

    def __init__(self, env: Env, policy: Policy, chain: Chain, originals: set[int]) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(chain.transforms)
        self.policy = policy
        # Modules in functions, of the policy or of a transform. One that could not be copied is left alone.
        apart = {*originals, *map(id, self.modules())}
        found = Reachable([({"policy": policy}, "policy"), ({"transforms": self.transforms}, "transforms")]).modules
        self.in_functions = nn.ModuleList(policies.outermost(module for module in found if id(module) not in apart))
        self.requires_grad_(False)
        self.eval()
        self._observation_space, self._action_space = chain.observation_space, chain.action_space
        self._action_keys = set(spaces.children(env.single_action_space) or ()) or None
        self._num_common = chain.num_common
        self._recurrent = list(env.signature.policy_state)
        self._slots = chain.buffers
        # Where every episode starts: a row of each entry of the state.
        rows = {name: module.get_buffer(key)[:1] for name, (module, key) in self._slots.items()}
        rows |= {name: declared.allocate(None, 1, env.device) for name, declared in env.signature.policy_state.items()}
        if rows or self._num_common < len(self.transforms):
            rows[IS_FIRST] = torch.ones(1, 1, dtype=torch.bool, device=env.device)
        self._initial = {name: f"_initial_{number}" for number, name in enumerate(rows)}
        for name, row in rows.items():
            self.register_buffer(self._initial[name], row.clone(), persistent=False)
        for module, key in self._slots.values():
            del module._buffers[key]
        self._device = env.device
        self.metadata = description.of(env, chain, rows)

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        """The state with which every row starts an episode. Empty if nothing lasts from step to step."""
        rows = {name: self.get_buffer(key) for name, key in self._initial.items()}
        return {name: row.expand(batch_size, *row.shape[1:]).clone() for name, row in rows.items()}

    def example_inputs(self, batch_size: int = 2) -> tuple[Tree, ...]:
        """Arguments of the module, for exports: an observation of zeros, and the initial state if there is one.

        A program that is exported with a batch of 1 takes no other one.
        """
        space, tensors = self._observation_space, itertools.chain(self.buffers(), self.parameters())
        device = next((tensor.device for tensor in tensors), self._device)  # `.to` may have moved them
        observation = _plain(space, spaces.zeros(space, batch_size, device))
        return (observation, self.initial_state(batch_size)) if self._initial else (observation,)

    def dynamic_shapes(self) -> dict[str, Any]:
        """The argument of `torch.export.export` that leaves the batch size open."""
        sizes = {0: torch.export.Dim("batch")}
        return {
            name: _mapped(lambda _: sizes, value)
            for name, value in zip(("observation", "state"), self.example_inputs(1), strict=False)
        }

    def onnx_names(self) -> dict[str, list[str]]:
        """Arguments of `torch.onnx.export`: the names of inputs and outputs. Those of the next state begin with "next."."""
        observation, action = (
            [".".join((name, *path)) for path, _ in spaces.leaves(space)]
            for name, space in (("observation", self._observation_space), ("action", self._action_space))
        )
        return {
            "input_names": [*observation, *self._initial],
            "output_names": [*action, *(f"next.{name}" for name in self._initial)],
        }

    def forward(self, observation: Tree, state: Mapping[str, Tensor] | None = None) -> Any:
        """The action for each row, and with a state also the next one.

        Args:
            observation: raw, `(batch, *shape)` in the dtype of its space.
            state: what the last call returned, or `initial_state`; for a module that has one.

        Raises:
            TypeError, ValueError: for another structure, shape or dtype.
        """
        raw = self._checked_observation(observation)
        if not self._initial:
            if state:
                raise ValueError(f"This deployed policy needs no state, but got one with {list(state)}.")
            action, _ = self._act({"observation": self._observe(raw, None)})
            return _plain(self._action_space, action)
        state = self._checked_state(state, raw)
        mask = RowMask(state[IS_FIRST])
        with self._holding(state):
            root = {"observation": self._observe(raw, mask)}
            if self._recurrent:
                root |= {name: mask.where(self._initial_like(name, state), state[name]) for name in self._recurrent}
                root["is_init"] = state[IS_FIRST].clone()
            action, following = self._act(root)
            following |= {name: module._buffers[key] for name, (module, key) in self._slots.items()}
        following[IS_FIRST] = torch.zeros_like(state[IS_FIRST])
        return _plain(self._action_space, action), {name: following[name] for name in self._initial}

    def _observe(self, raw: spaces.Value, mask: RowMask | None) -> spaces.Value:
        # As an env does: a step of every row, and then a reset of those rows that start an episode. Until it ends, a row has
        # neither terminated nor been truncated. Transforms that do the same in both come first, once.
        some = nested.leaves(raw)[0]
        number = some.shape[0]
        flags = {name: some.new_zeros((number, 1), dtype=torch.bool) for name in ("terminated", "truncated")}
        transforms: list[Any] = list(self.transforms)
        td = nested.tensordict({"observation": raw.clone(), **flags}, number)
        for transform in transforms[: self._num_common]:
            td = transform.step(td)
        common = td["observation"]
        if mask is None:
            return common
        td.set("observation", common.clone())
        for transform in transforms[self._num_common :]:
            td = transform.step(td)
        observation = td["observation"]
        if mask.any():
            td = nested.tensordict({"observation": common.clone()}, number)
            for transform in transforms[self._num_common :]:
                td = transform.reset(td, mask)
            observation = mask.where(td["observation"], observation)
        return observation

    def _act(self, root: dict[str, Any]) -> tuple[spaces.Value, dict[str, Any]]:
        td = nested.tensordict(root, nested.leaves(root["observation"])[0].shape[0])
        action, given = policies.action_of(self.policy(td), self._action_keys)
        given = td if given is None else given
        following = {}
        for name in self._recurrent:
            if ("next", name) not in given.keys(True):
                raise ValueError(f'deploy needs a policy that sets ("next", "{name}"), as PolicyState declares.')
            following[name] = given["next", name]
        transforms: list[Any] = list(self.transforms)
        for transform in reversed(transforms):
            action = transform.action(action)
        return action, following

    @contextlib.contextmanager
    def _holding(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """The transforms have the state in their buffers, as copies that they can write to."""
        try:
            for name, (module, key) in self._slots.items():
                module._buffers[key] = state[name].clone()
            yield
        finally:
            for module, key in self._slots.values():
                module._buffers.pop(key, None)

    def _initial_like(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        return self.get_buffer(self._initial[name]).expand_as(state[name])

    def _checked_observation(self, given: Tree) -> spaces.Value:
        found: dict[tuple[str, ...], Tensor] = {}
        for path, leaf in spaces.leaves(self._observation_space):
            value = given
            for key in path:
                if isinstance(value, Mapping | TensorDictBase):
                    value = value[key] if key in value.keys() else None
            checks.tensor(f"an observation{list(path) if path else ''}", value, leaf.shape or (), spaces.dtype(leaf))
            found[path] = value
        checks.sizes({f"observation{list(path) if path else ''}": value for path, value in found.items()})
        size = next(iter(found.values())).shape[0]
        return spaces.build(self._observation_space, lambda path, leaf: found[path], size)

    def _checked_state(self, given: Mapping[str, Tensor] | None, raw: spaces.Value) -> dict[str, Tensor]:
        if not isinstance(given, Mapping) or given.keys() != self._initial.keys():
            got = list(given) if isinstance(given, Mapping) else given
            raise TypeError(f"This deployed policy needs a state with {list(self._initial)}, but got {got}: initial_state().")
        for name, key in self._initial.items():
            row = self.get_buffer(key)
            checks.tensor(f"the state {name!r}", given[name], row.shape[1:], row.dtype)
        checks.sizes({"observation": nested.leaves(raw)[0], **given})
        return dict(given)

    def extra_repr(self) -> str:
        return f"state={list(self._initial)}" if self._initial else ""


def _validate(module: DeployedPolicy, env: Env) -> None:
    """Calls the module, to raise at construction for what an export would not report."""
    inputs, space = module.example_inputs(), module._action_space
    module(*inputs)  # which may fill caches of the policy
    found = Reachable([({"policy": module.policy}, "policy")])
    try:
        with policies.Watch({id(parameter) for parameter in module.parameters()}):
            result = module(*inputs)
    except policies.RandomnessError as error:
        remedy = "pass one that takes the mode or the mean, such as `.argmax(-1)` of logits"
        raise ValueError(
            f"deploy needs a deterministic policy, but got one that draws random numbers by {error}: {remedy}."
        ) from None
    except policies.ForeignParameterError as error:
        raise ValueError(
            f"deploy needs a policy and transforms whose modules it can copy, but got parameters that it could not, {error}: "
            f"they are those of an imported module, or of a global variable in a method. Use {policies.NEEDED}."
        ) from None
    if changes := found.changes():
        remedy = "what lasts from step to step belongs in transforms.PolicyState"
        raise ValueError(
            f"deploy needs a policy without state of its own, but got one that changes {changes[0][0]}: {remedy}."
        )
    for name, example in inputs[1].items() if len(inputs) == 2 else ():
        following = result[1][name]
        if following.shape != example.shape or following.dtype != example.dtype:
            given = f"{tuple(following.shape)} {following.dtype} for {tuple(example.shape)} {example.dtype}"
            raise ValueError(f'deploy needs a policy that sets ("next", "{name}") as PolicyState declares, but got {given}.')
    for path, leaf in spaces.leaves(space):
        action = functools.reduce(lambda part, key: part[key], path, result[0] if isinstance(result, tuple) else result)
        if tuple(action.shape) != (2, *(leaf.shape or ())) or action.dtype != spaces.dtype(leaf):
            got = f"{tuple(action.shape[1:])} {action.dtype} for each row"
            raise ValueError(f"deploy needs a policy whose actions end up in {leaf}, but got {got}.")


def _mapped(function: Any, tree: Tree) -> Any:
    return {key: _mapped(function, part) for key, part in tree.items()} if isinstance(tree, dict) else function(tree)


def _plain(space: Space[Any], value: spaces.Value) -> Tree:
    """A value with dicts in place of TensorDicts, which need no library, in the order of the space."""
    children = spaces.children(space)
    return value if children is None else {key: _plain(child, value[key]) for key, child in children.items()}
