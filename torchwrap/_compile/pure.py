"""pure: an env as functions of its state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchwrap import policy, spaces
from torchwrap._compile.inputs import Function, Inputs, aliased_indices
from torchwrap._compile.trace import Trace, exclusively, fake_inputs, trace, without_generators
from torchwrap._core import rows, validation
from torchwrap._core.errors import refusal
from torchwrap._core.rows import Nested, RowMask, tensordict
from torchwrap.env import Env, Root, check_is_env
from torchwrap.spaces import Value


class PureFunction:
    """A traced function without side effects: it returns what the function writes to buffers."""

    def __init__(self, traced: Trace) -> None:
        without_writes = functionalize(traced.graph, remove="mutations")
        trace_pure = make_fx(without_writes, _DECOMPOSITIONS, "fake")
        self.graph = trace_pure(*fake_inputs(traced.graph))
        self.written = _return_writes(self.graph)
        self.constants = _lift_constants(self.graph)
        self.build = rows.builder(traced.result)

    def __call__(self, tensors: Sequence[Tensor], *values: Nested) -> Any:
        """Returns the new values of the tensors `written`, and the result."""
        results = self.graph(*tensors, *rows.leaves(values), *self.constants)
        number = len(self.written)
        return results[:number], self.build(iter(results[number:]))


def _return_writes(graph: GraphModule) -> list[int]:
    """Turns the copies into inputs into results, before the others. Returns the inputs' indices."""
    inputs = list(graph.graph.find_nodes(op="placeholder"))
    copy: Any = torch.ops.aten.copy_.default
    written = []
    values = []
    for node in graph.graph.find_nodes(op="call_function", target=copy):
        target, value = node.args
        written.append(inputs.index(target))
        values.append(value)
        graph.graph.erase_node(node)
    output = graph.graph.output_node()
    results: Any = output.args[0]
    output.args = ((*values, *results),)
    graph.recompile()
    return written


def _lift_constants(graph: GraphModule) -> list[Tensor]:
    """Turns the constants of a graph into inputs, after the others. Returns them."""
    constants = []
    last = list(graph.graph.find_nodes(op="placeholder"))[-1]
    for node in graph.graph.find_nodes(op="get_attr"):
        constants.append(getattr(graph, str(node.target)))
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"constant_{len(constants)}")
        last.meta = node.meta
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    graph.recompile()
    return constants


class PureEnv:
    """The functions that `pure` returns."""

    @exclusively()
    @torch.no_grad()
    def __init__(self, env: Env) -> None:
        check_is_env("pure", env)
        if env.host_stepped or not env.can_snapshot:
            must = f"env must not be {env!r}, because a simulator outside of PyTorch steps it"
            raise ValueError(refusal("pure", must))
        self.env = env
        self.signature = env.signature
        inputs = Inputs(lambda: [env])
        if aliased_indices(list(env.buffers())):
            raise ValueError(refusal("pure", "buffers of env must not share memory"))
        # Detached, because no gradient flows through a step.
        self._tensors = [tensor.detach() for tensor in inputs.tensors]
        indices = {id(tensor): index for index, tensor in enumerate(inputs.tensors)}
        buffers = env._state_buffers()
        # By the index of a tensor, its name in a state. The other tensors are constants.
        self._names = {indices[id(buffer)]: name for name, buffer in buffers.items()}
        num_envs = env.num_envs
        device = env.device
        seed = torch.zeros((), dtype=torch.int64, device=device)
        mask = torch.ones(num_envs, dtype=torch.bool, device=device)
        action = spaces.zeros(env.single_action_space, num_envs, device)
        root = env._root_like(device)
        policy_state = {name: root[name] for name in env.signature.policy_state}
        state: Any = {"buffers": TensorDict(buffers, []), **root}
        self._layout = _layout(TensorDict(state, []))
        self._last = root  # of no consequence where every row starts an episode
        self._seed = self._function(self._seed_all, inputs, seed)
        self._reset = self._function(self._reset_rows, inputs, mask, root)
        self._step = self._function(env._step_and_reset, inputs, action, policy_state)

    def init(self, seed: Tensor | int) -> tuple[TensorDict, TensorDict]:
        """Starts an episode in every env from a seed, as `env.reset(seed)`.

        What the env has learned, such as statistics, is that of the env now.

        Args:
            seed: in [0, 2**64), or an int64 tensor `()` with the same bits.

        Returns:
            state: the state.
            root: the root of the first step.
        """
        owner = "pure.init"
        device = self.signature.device
        is_compiling = torch.compiler.is_compiling()
        if not isinstance(seed, Tensor):
            if not is_compiling:
                seed = validation.integer(owner, "seed", seed, 0, 2**64 - 1)
            signed = seed - (seed >> 63 << 64)  # has the same bits
            seed = torch.tensor(signed, device=device)
        elif not is_compiling:
            validation.tensor(owner, "seed", seed, (), torch.int64, device)
        # Copies, because the env may write to its own.
        buffers = {}
        for name in self._names.values():
            buffers[name] = attrgetter(name)(self.env).detach().clone()
        self._call(self._seed, buffers, seed)
        state, _ = self._results(buffers, self._last)
        return self.reset(state)

    def reset(self, state: TensorDict, mask: Tensor | None = None) -> tuple[TensorDict, TensorDict]:
        """Starts new episodes in every env, or where `mask` is set, as `Env.reset` does.

        Args:
            state: the state.
            mask: bool, `(num_envs,)`.

        Returns:
            state: the next state.
            root: the root of the next step.
        """
        self._check_state("reset", state)
        size = self.signature.num_envs
        device = self.signature.device
        if mask is None:
            mask = torch.ones(size, dtype=torch.bool, device=device)
        if not torch.compiler.is_compiling():
            validation.tensor("pure.reset", "mask", mask, (size,), torch.bool, device)
        last: Any = dict(self._root(state).items())
        buffers = dict(state["buffers"].items())
        root = self._call(self._reset, buffers, mask, last)
        return self._results(buffers, root)

    def step(self, state: TensorDict, action: Value) -> tuple[TensorDict, TensorDict, TensorDict]:
        """Takes an action in every env and resets the finished rows, as `Env.step` does.

        Args:
            state: the state.
            action: the actions, or the root of the state with `action` set. Discrete ones are not
                checked.

        Returns:
            state: the next state.
            transition: as that of `Env.step`.
            root: the root of the next step.
        """
        self._check_state("step", state)
        env = self.env
        td = env._with_action(self._root(state), action, bounds=False)
        buffers = dict(state["buffers"].items())
        transition, entries = env._transition(td, partial(self._call, self._step, buffers))
        next_state, root = self._results(buffers, entries)
        return next_state, transition, root

    def _function(self, function: Function, inputs: Inputs, *values: Nested) -> PureFunction:
        """A function of the env's tensors, which may only write to those of a state."""
        pure_function = PureFunction(trace(without_generators(function), inputs, values))
        for index in pure_function.written:
            if index not in self._names:
                name = inputs.names[inputs.indices.index(index)]
                must = f"the buffer {name} must be in snapshots, because a step writes to it"
                remedy = "Declare it as an EnvBuffer, or use register_state_buffer"
                raise ValueError(refusal("pure", must, remedy=remedy))
        return pure_function

    def _check_state(self, call: str, state: Any) -> None:
        """Raises unless the tensors are as those of a state of this env."""
        if torch.compiler.is_compiling():
            return
        owner = f"pure.{call}"
        remedy = "Pass a state of the same pure(env), and several ones through torch.vmap"
        if not isinstance(state, TensorDictBase):
            must = "state must be a TensorDict"
            raise TypeError(refusal(owner, must, type(state).__name__, remedy))
        found = _layout(state)
        if found == self._layout:
            return
        for name in {**self._layout, **found}:
            needed = self._layout.get(name, "absent")
            got = found.get(name, "absent")
            if got != needed:
                must = f"state must be one of this env, whose {name} is {needed}"
                raise ValueError(refusal(owner, must, got, remedy))

    def _seed_all(self, seed: Any) -> tuple[()]:
        self.env._seed(seed, RowMask.full(self.signature.num_envs, self.signature.device))
        return ()

    def _reset_rows(self, mask: Tensor, last: Any) -> Root:
        return self.env._restart(RowMask(mask), last)

    def _root(self, state: TensorDict) -> TensorDict:
        root = {key: state[key] for key in policy.keys(self.signature)}
        return tensordict(root, self.signature.num_envs)

    def _call(
        self,
        function: PureFunction,
        buffers: dict[str, Tensor],
        *values: Nested,
    ) -> Any:
        """Calls a function with the buffers of a state, and puts the next ones into the dict."""
        tensors = list(self._tensors)
        for index, name in self._names.items():
            tensors[index] = buffers[name]
        written, result = function(tensors, *values)
        for index, value in zip(function.written, written, strict=True):
            buffers[self._names[index]] = value
        return result

    def _results(
        self,
        buffers: dict[str, Tensor],
        root: Root,
    ) -> tuple[TensorDict, TensorDict]:
        """A state, and its root."""
        state: Any = {"buffers": TensorDict(buffers, []), **root}
        return TensorDict(state, []), tensordict(root, self.signature.num_envs)


def _layout(state: Any) -> dict[Any, Any]:
    """Shape, dtype, layout and device of each tensor, by its key."""
    found = {}
    for key, leaf in state.items(True, True):
        found[key] = (tuple(leaf.shape), leaf.dtype, leaf.layout, leaf.device)
    return found


# `torch.vmap` has no rules of its own for these operators, and would loop over the seeds.


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    value = source.to(target.device, target.dtype)
    return value.expand(target.shape).contiguous()


def _masked_fill(tensor: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask, value.to(tensor.device, tensor.dtype), tensor)


_DECOMPOSITIONS: Any = {
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.fill.Scalar: torch.full_like,
    torch.ops.aten.masked_fill.Tensor: _masked_fill,
}


def pure(env: Env) -> PureEnv:
    """An env and its transforms as functions of their state, without side effects.

    Experimental: it may change in every minor version.

    `init(seed)` returns a state and a root, as do `reset(state, mask)` and, with the transition
    between them, `step(state, action)`. A state is what `Env.snapshot` returns, so `Env.restore`
    takes it, and `step` and `reset` take a snapshot. The functions work in
    `torch.compile(fullgraph=True)`, in `scan` and in `torch.vmap`, over the states of several seeds
    for instance. They agree bit for bit with the env's own verbs. States, transitions and roots may
    share memory: do not write to them.

    Args:
        env: a native or functional env with any transforms. Its Python values, its parameters, its
            mode and its buffers that are in no snapshot are constants. A compiled env is taken as
            the eager env.

    Raises:
        ValueError: for code that `compile` refuses, for a simulator on the host, and for a step
            that writes to a buffer that is in no snapshot.

    >>> from torchwrap.testing import ScriptedEnv
    >>> functions = pure(ScriptedEnv(2, episode_lengths=2))
    >>> state, root = functions.init(seed=0)
    >>> state, transition, root = functions.step(state, torch.zeros(2, 6))
    >>> transition["next", "reward"].flatten()
    tensor([1., 1.])
    """
    return PureEnv(env)
