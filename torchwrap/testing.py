"""For authors of envs, transforms and policies: ScriptedEnv, and the contract as code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium import spaces as gymnasium_spaces
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from torchwrap import random, registration, spaces
from torchwrap._compile.api import compile
from torchwrap._core import spec, validation
from torchwrap._core.buffers import EnvBuffer, distrust
from torchwrap._core.errors import refusal
from torchwrap._core.generators import kept_generators, no_foreign_draws
from torchwrap._core.rows import RowMask, equal, layout, leaves
from torchwrap.collector import eval_mode
from torchwrap.env import Env, Options
from torchwrap.functional import FunctionalEnv
from torchwrap.policy import DECLARED, Policy, act, modules_of
from torchwrap.transforms.transform import Transform
from torchwrap.wrappers.wrapper import TransformedEnv, layers

_ENDINGS = ("terminated", "truncated", "both")


class ScriptedEnv(Env):
    """An env whose values can be computed by hand, for tests.

    Let i be the global index of the env, e the number of its episode, counted from 0, and t the
    number of steps taken in it. Element j of the flattened observation is 1000 * i + 10 * j + t,
    wrapped into the bounds of the space if it has any. The reward of step t is t. The episode ends
    after `episode_lengths[(i + e) % len(episode_lengths)]` steps. The action that the env received
    is in `("next", "info", "action")`.

    Args:
        num_envs: number of envs.
        observation_shape: shape of an unbounded float32 observation.
        episode_lengths: one length, or several to cycle through. None for episodes that never end.
        ending: "terminated", "truncated", "both", or "in turn" to cycle through the three, by
            (i + e) % 3.
        observation_space: replaces the space given by `observation_shape`, if not None.
        action_space: None takes Box(-1, 1, (6,)).
        first_index: global index of the first env.

    >>> env = ScriptedEnv(2, observation_shape=(3,), episode_lengths=(5, 2))
    >>> env.reset()["observation"]
    tensor([[   0.,   10.,   20.],
            [1000., 1010., 1020.]])
    """

    lengths: Tensor
    terminates: Tensor
    truncates: Tensor
    index = EnvBuffer((), torch.int64)
    elapsed = EnvBuffer((), torch.int64)
    episode = EnvBuffer((), torch.int64, fill=-1)

    def __init__(
        self,
        num_envs: int = 1,
        observation_shape: tuple[int, ...] = (17,),
        episode_lengths: int | Sequence[int] | None = (5, 3, 1, 4),
        *,
        ending: Literal["terminated", "truncated", "both", "in turn"] = "in turn",
        observation_space: gymnasium_spaces.Space[Any] | None = None,
        action_space: gymnasium_spaces.Space[Any] | None = None,
        first_index: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        device = validation.device("ScriptedEnv", device)
        lengths = episode_lengths if isinstance(episode_lengths, Sequence) else [episode_lengths]
        if episode_lengths is None:
            lengths = [2**63 - 1]
        validation.choice("ScriptedEnv", "ending", ending, *_ENDINGS, "in turn")
        if observation_space is None:
            observation_space = gymnasium_spaces.Box(-np.inf, np.inf, observation_shape, np.float32)
        if action_space is None:
            action_space = gymnasium_spaces.Box(-1, 1, (6,), np.float32)
        signature = spaces.Signature(
            num_envs, observation_space, action_space, device, first_index=first_index
        )
        super().__init__(signature, metadata={"render_modes": []})
        self.ending = ending
        self.index.copy_(torch.arange(first_index, first_index + num_envs, device=device))
        endings = _ENDINGS if ending == "in turn" else [ending]
        constants = {
            "lengths": lengths,
            "terminates": [each != "truncated" for each in endings],
            "truncates": [each != "terminated" for each in endings],
        }
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values, device=device), persistent=False)
        leaves = [_Leaf(leaf, device) for _, leaf in spaces.leaves(observation_space)]
        self.leaves = nn.ModuleList(leaves)

    def _step(self, action: spaces.Value) -> TensorDict:
        self.elapsed.add_(1)
        turn = self.index + self.episode
        ended = self.elapsed >= self.lengths[turn % len(self.lengths)]
        terminates = self.terminates[turn % len(self.terminates)]
        truncates = self.truncates[turn % len(self.truncates)]
        successor = {
            "observation": self._observation_now(),
            "reward": self.elapsed.to(torch.float32).unsqueeze(-1),
            "terminated": (ended & terminates).unsqueeze(-1),
            "truncated": (ended & truncates).unsqueeze(-1),
            "info": TensorDict({"action": action.clone()}, batch_size=[self.num_envs]),
        }
        return TensorDict(successor, batch_size=[self.num_envs])

    def _reset(
        self,
        mask: RowMask,
        options: Options | None = None,
    ) -> TensorDict:
        mask.fill_(self.elapsed, 0)
        self.episode.add_(mask.tensor)
        return TensorDict({"observation": self._observation_now()}, batch_size=[self.num_envs])

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        mask.fill_(self.episode, -1)

    def _observation_now(self) -> spaces.Value:
        start = 1000 * self.index + self.elapsed
        values = iter([leaf(start) for leaf in self.leaves])
        space = self.single_observation_space
        return spaces.build(space, lambda path, leaf: next(values), self.num_envs)


class _Leaf(nn.Module):
    """The values of a leaf, wrapped into its bounds if it has any."""

    offsets: Tensor
    low: Tensor
    width: Tensor

    def __init__(
        self,
        leaf: gymnasium_spaces.Space[Any],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.dtype = spaces.dtype(leaf)
        self.is_bounded = True
        # It holds every whole number that occurs.
        exact = torch.float64 if self.dtype.is_floating_point else torch.int64
        if isinstance(leaf, gymnasium_spaces.Box):
            self.is_bounded = leaf.is_bounded()
            low = torch.as_tensor(leaf.low, device=device).to(exact)
            width = torch.as_tensor(leaf.high, device=device).to(exact) - low
            if exact is torch.int64:
                width = width + 1  # both bounds are values
            width = width.where(width > 0, 1)  # a divisor
        else:
            count, start = spaces.counts(leaf)
            low = torch.as_tensor(start, device=device)
            width = torch.as_tensor(count, device=device)
        shape = leaf.shape or ()
        numbers = torch.arange(math.prod(shape), dtype=exact, device=device)
        offsets = 10 * numbers.view(shape)
        for name, values in {"offsets": offsets, "low": low, "width": width}.items():
            self.register_buffer(name, values, persistent=False)

    def forward(self, start: Tensor) -> Tensor:
        column = start.view(-1, *[1] * self.offsets.dim())
        value = column + self.offsets
        if self.is_bounded:
            value = self.low + value % self.width
        return value.to(self.dtype)


class _RandomSteps(Transform):
    """Replaces observations and rewards of steps by random ones, so that conditions vary."""

    def setup(self, signature: spaces.Signature) -> spaces.Signature:
        self.stream, signature = signature.stream()
        self.sampler = spaces.Sampler(signature.single_observation_space, signature.device)
        return signature

    def step(self, td: TensorDict) -> TensorDict:
        reward = random.normal(self.stream.key(), shape=(1,))
        return td.set("reward", reward).set("observation", self.sampler(self.stream))


MakeEnv: TypeAlias = Callable[..., Env]  # from `num_envs` and `first_index`
Check: TypeAlias = Callable[[Any], None]
Steps: TypeAlias = Iterable[tuple[TensorDict, TensorDict]]  # results of `env.step`

NUM_ENVS = 5
NUM_STEPS = 40


def check_env(make: MakeEnv | Env) -> None:
    """Checks that an env keeps the contract of `torchwrap.Env`.

    Args:
        make: makes a new env from `num_envs` and `first_index`, such as
            `functools.partial(torchwrap.make, "CartPole-v1")`; or from the number of envs alone,
            `lambda n: ...`, which leaves out the check of shards; or an env with a `spec`, of which
            others are made. Episodes should end within 40 random steps. Otherwise the checks do not
            reach an auto-reset.

    Raises:
        AssertionError: if the env breaks the contract. The message names the innermost layer that
            does, and the cause, such as foreign random numbers, values read on the host, shapes
            that change later, or state outside of buffers; or else the broken promise.

    >>> check_env(ScriptedEnv)
    """
    if isinstance(make, Env):
        if make.spec is None:
            must = "make must be a function or an env with a spec"
            raise TypeError(refusal("check_env", must, make))
        make = functools.partial(registration.make, make.spec)
    is_other_class = isinstance(make, type) and not issubclass(make, Env)
    is_function = callable(make) and bool(inspect.signature(make).parameters)
    if is_other_class or not is_function:
        must = "make must be a torchwrap env, or a function of the number of envs"
        raise TypeError(refusal("check_env", must, repr(make)))
    _run_checks(_ENV_CHECKS, make)


def check_transform(
    make: Callable[[], Transform],
    make_env: MakeEnv = ScriptedEnv,
) -> None:
    """Checks that a transform keeps the contract of `Transform`, and an env with it that of `Env`.

    Checks of episodes run again with random observations and rewards instead of those of the env,
    and by default in longer episodes. Other numbers of envs are not compared if those of the env
    itself differ, such as in `params`.

    Python values are constants of a compiled graph. A value that changes between two calls, such as
    an attribute that a training loop anneals, is not found: hold it in a buffer.

    Args:
        make: makes a new transform.
        make_env: makes an env whose spaces the transform accepts, as for `check_env`.

    Raises:
        AssertionError: as `check_env`.

    >>> from torchwrap import transforms as T
    >>> check_transform(lambda: T.ClipReward(-1, 1))
    """
    if isinstance(make, Transform):
        must = "make must be a class or a function"
        raise TypeError(refusal("check_transform", must, make, "Write `lambda:` before it"))
    try:
        spec.record(make())
    except ValueError as error:
        raise AssertionError(f"spec: {error}") from None
    # The checks that name the fault of a transform most precisely come before the checks of an env.
    first = (_check_step_results, _check_action, _check_masked_reset, _check_eval)
    _run_checks((*first, *_ENV_CHECKS[1:], _check_state_dict), make_env, make)
    again = (_check_seeding, _check_partial_reset, _check_snapshot)
    if make_env is ScriptedEnv:
        make_env = functools.partial(ScriptedEnv, episode_lengths=(17, 3, 1, 12))
    _run_checks(again, make_env, make, _RandomSteps)


@torch.no_grad()
def check_policy(env: Env, policy: Policy) -> None:
    """Checks that a policy can be evaluated, compiled and collected with.

    Args:
        env: is reset, and takes 40 steps: pass a separate one, with two envs or more.
        policy: as for `Collector`. It is called in eval mode, and then in its own modes.

    Raises:
        AssertionError: if the policy calls a module that `evaluate` and `compile` do not find,
            carries state from call to call, changes the root, returns memory that a later call
            changes, or entries whose layout changes; or mixes envs, as BatchNorm in train mode.
        ValueError: for an action that the env refuses.

    >>> network = nn.Linear(3, 6)
    >>> check_policy(ScriptedEnv(2, (3,)), lambda td: network(td["observation"] / 2000).tanh())
    """
    with eval_mode(env, *modules_of(policy)):
        root = _check_calls(env, policy)
    copies = root[[0] * env.num_envs]  # env 0 among copies instead of other envs
    first = _answer(env, policy, root)["action"]
    second = _answer(env, policy, copies)["action"]
    fault = "the action of env 0 depends on other envs, as with BatchNorm in train mode"
    _require(equal(first[0], second[0], 1e-5), f"policy: {fault}.")


def _check_calls(env: Env, policy: Policy) -> TensorDict:
    """Checks a policy in eval mode. Returns the first root."""
    td = env.reset(seed=0)
    called: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, _: called.append(module))
    try:
        with torch.compiler.set_stance("force_eager"):  # Dynamo cannot trace the hook
            _answer(env, policy, td)
    finally:
        handle.remove()
    found = {part for module in modules_of(policy) for part in module.modules()}
    # TorchRL makes containers anew in each call.
    leaf_modules = [module for module in called if not list(module.children())]
    unknown = [type(module).__name__ for module in leaf_modules if module not in found]
    must = "policy: evaluate and compile cannot find the module"
    remedy = "Pass the module itself, or name it in the function"
    _require(not unknown, f"{must} {unknown[:1]}. {remedy}.")
    kept = []
    for _ in range(NUM_STEPS):
        root = td.clone()
        with kept_generators():
            td = act(env, policy, td)
        is_same = equal(root, td.select(*root.keys()))
        _require(is_same, "policy: it changes the values of its root. Write to new tensors.")
        answer = td.exclude(*root.keys())
        kept.append((root, answer, answer.clone()))
        _require(layout(answer) == layout(kept[0][1]), "policy: the layout of its results changes.")
        _, td = env.step(td)
    for _, answer, copy in kept:
        is_own = equal(copy, answer)
        _require(is_own, "policy: a later call changes earlier results. Return new tensors.")
    for root, answer, _ in (kept[0], kept[-1]):
        again = _answer(env, policy, root)
        fault = "policy: two calls with the same root and global generators differ"
        _require(equal(answer, again, 1e-5), f"{fault}. {DECLARED}.")
    return kept[0][0]


def _answer(env: Env, policy: Policy, root: TensorDict) -> TensorDict:
    """The entries that a policy adds to a root."""
    with kept_generators():
        return act(env, policy, root.clone()).exclude(*root.keys())


# Checks. Each takes `make(num_envs=..., first_index=...)`.


def _check_step_results(make: MakeEnv) -> None:
    env = make()
    _require(env.num_envs == NUM_ENVS, f"num_envs must be {NUM_ENVS}, got {env.num_envs}.")
    _require("\n" not in repr(env), f"repr() must return one line, got {env!r}.")
    _require_in_space("reset()", env, env.reset(seed=0))
    first_layout = None
    for transition, td in _steps(env, _sample_actions(env)):
        distrust(env.modules())  # each layer checks the next step again
        successor = transition["next"]
        leaves = successor.items(True, True)
        layout = {key: (tuple(value.shape), value.dtype) for key, value in leaves}
        first_layout = first_layout or layout
        got = f"got {first_layout} and {layout}"
        must = f"step() must return the same keys, shapes and dtypes, {got}."
        _require(layout == first_layout, must)
        _require_in_space("step()", env, successor)
        _require_in_space("step()", env, td)


def _check_functions(make: MakeEnv) -> None:
    """The functions of a `FunctionalEnv` are pure."""
    env = make().unwrapped
    if not isinstance(env, FunctionalEnv):
        return
    actions = _sample_actions(env)
    next(_steps(env, actions))  # the first step refuses a key that is drawn from twice
    call = env.call

    def checked(name: str, key: Any, *arguments: Any, **keywords: Any) -> Any:
        given = (arguments, env.params)
        before = [leaf.clone() for leaf in leaves(given)]
        result = call(name, key, *arguments, **keywords)
        owner = f"{name} of the functions"
        is_kept = equal(tuple(before), tuple(leaves(given)))
        _require(is_kept, f"{owner} writes to its arguments. Return new tensors, as `x + 1` is.")
        again = call(name, key, *arguments, **keywords)
        fault = f"{owner} returns different results in two calls with the same arguments"
        _require(equal(result, again), f"{fault}. Keep what changes in the state.")
        return result

    env.call = checked  # type: ignore[method-assign]
    list(_steps(env, actions))


def _check_twins(make: MakeEnv) -> None:
    env, other, actions = _make_twins(make)
    promise = "two envs of `make` must be equal: make each anew, and draw nothing in constructors"
    _require_equal_steps(_steps(env, actions), _steps(other, actions), promise)


def _check_caller_owns_results(make: MakeEnv) -> None:
    env, other, actions = _make_twins(make)
    kept = []
    pairs = zip(_steps(env, actions), _steps(other, actions), strict=True)
    for (transition, td), (erased, erased_td) in pairs:
        promise = "changing outputs in place must not change the env"
        _require_equal(transition["next"], erased["next"], promise)
        for result in (transition["next"], td.select("observation")):
            kept.append((result, result.clone()))
        erased.zero_()
        erased_td.zero_()
    for result, copy in kept:
        _require_equal(copy, result, "later steps must not change earlier outputs")


def _check_seeding(make: MakeEnv) -> None:
    env = make().eval()
    actions = _sample_actions(env)
    with no_foreign_draws("a step", "Draw with torchwrap.random, from a stream", env.device):
        first = []
        for transition, td in _steps(env, actions):
            first.append((transition.clone(), td.clone()))
    promise = "after reset(seed), the same actions must give the same transitions and new episodes"
    _require_equal_steps(first, _steps(env, actions), promise)


def _check_sharding(make: MakeEnv) -> None:
    env = make().eval()
    actions = _sample_actions(env)
    singles = []
    for row in range(NUM_ENVS):
        single = make(num_envs=1, first_index=row).eval()
        singles.append(_steps(single, [action[[row]] for action in actions]))
    for transition, td in _steps(env, actions):
        for row, steps in enumerate(singles):
            fault = "it mixes rows, or depends on num_envs"
            promise = f"{fault}: env {row} of {NUM_ENVS} must equal an env with first_index={row}"
            step = (transition[[row]], td[[row]])
            _require_equal_steps([step], [next(steps)], promise, 1e-6)


def _check_partial_reset(make: MakeEnv) -> None:
    env, other, actions = _make_twins(lambda: make().eval())
    before = actions[: NUM_STEPS // 4]
    after = actions[NUM_STEPS // 4 :]
    list(_steps(env, before))
    *_, (_, other_td) = _steps(other, before)
    mask = torch.arange(NUM_ENVS, device=env.device) == 1
    td = env.reset(mask=mask)
    # A single step: envs that share a stream of episodes with the reset env may differ later.
    transition, _ = next(_steps(env, after, td))
    expected, _ = next(_steps(other, after, other_td))
    promise = "after reset(mask), other rows must continue as before"
    _require_equal(expected["next"][~mask], transition["next"][~mask], promise)


def _check_snapshot(make: MakeEnv) -> None:
    env = make()
    if not env.can_snapshot:
        return
    actions = _sample_actions(env)
    *_, (_, td) = _steps(env, actions[:7])
    snapshot = env.snapshot()
    first = list(_steps(env, actions[7:], td))
    final_buffers = _buffers(env)
    restored = env.restore(snapshot)
    _require_equal(snapshot, restored, "restore() must return the observation of the snapshot")
    promise = "after restore(), the env must continue as before"
    _require_equal_steps(first, _steps(env, actions[7:], restored), promise)
    _require_equal(final_buffers, _buffers(env), f"{promise}, to the same state")


def _is_host_env(env: Env) -> bool:
    return env.host_stepped and not isinstance(env, TransformedEnv)


def _check_graph(make: MakeEnv) -> None:
    env = make()
    if not _is_host_env(env):
        compile(env, backend="eager")


def _check_compile(make: MakeEnv) -> None:
    env, compiled, actions = _make_twins(make)
    if _is_host_env(env):
        return
    compile(compiled, backend="aot_eager")
    promise = "the compiled env must give the transitions, new episodes and buffers of eager mode"
    _require_equal_steps(_steps(env, actions), _steps(compiled, actions), promise, 1e-6)
    _require_equal(_buffers(env), _buffers(compiled), promise, 1e-6)


def _check_action(make: Callable[..., TransformedEnv]) -> None:
    env = make()
    action = env.sample_action()
    before = action.clone()
    result = env.transforms.action(action)
    results = {leaf.untyped_storage().data_ptr() for leaf in leaves(result)}
    buffers = {buffer.untyped_storage().data_ptr() for buffer in env.transforms.buffers()}
    remedy = "return a new tensor."
    is_new = results.isdisjoint(buffers)
    _require(is_new, f"action() returns a buffer, which later steps change: {remedy}")
    is_same = bool((action == before).all())
    _require(is_same, f"action() writes to the agent's action: {remedy}")
    space = env.env.single_action_space
    spaces.check("action()", "result", space, result, NUM_ENVS, env.device)


@torch.no_grad()
def _check_masked_reset(make: Callable[..., TransformedEnv]) -> None:
    env = make()
    list(_steps(env, _sample_actions(env)[:7]))
    transform = env.transforms
    every_row = RowMask.full(NUM_ENVS, env.device)
    zeros = spaces.zeros(env.env.single_observation_space, NUM_ENVS, env.device)
    even = torch.arange(NUM_ENVS, device=env.device) % 2 == 0
    for mask in (even, torch.zeros_like(even)):
        rows = RowMask(mask)
        observation = env.env._reset(every_row)["observation"]
        before = _buffers(transform)
        expected = _reset_transform(transform, observation, rows)
        for name, buffer in transform.named_buffers():
            buffer.copy_(before[name])
        result = _reset_transform(transform, rows.where(observation, zeros), rows)
        promise = "it mixes rows: in reset(td, mask), rows outside the mask must not count"
        _require_equal(expected, result, promise)
        after = result["state"]
        if mask.any():
            names = transform._paths("_env_buffer_names")
            before = TensorDict({name: before[name][~mask] for name in names}, [])
            after = TensorDict({name: after[name][~mask] for name in names}, [])
        _require_equal(before, after, "reset(td, mask) must not change rows outside the mask")


def _reset_transform(
    transform: Transform,
    observation: spaces.Value,
    rows: RowMask,
) -> TensorDict:
    """The set rows of the initial observation, and the buffers afterwards."""
    td = transform.reset(TensorDict({"observation": observation.clone()}, [NUM_ENVS]), rows)
    entries = {"observation": td["observation"][rows.tensor], "state": _buffers(transform)}
    return TensorDict(entries, []).clone()


def _check_eval(make: Callable[..., TransformedEnv]) -> None:
    env = make().eval()
    before = TensorDict(env.transforms.state_dict(), []).clone()
    list(_steps(env, _sample_actions(env)))
    after = TensorDict(env.transforms.state_dict(), [])
    _require_equal(before, after, "eval() must freeze the state_dict")


def _check_state_dict(make: Callable[..., TransformedEnv]) -> None:
    env = make()
    smaller = make(num_envs=3)
    actions = _sample_actions(env)
    list(_steps(env, actions))
    smaller.load_state_dict(env.state_dict())
    first_rows = []
    for transition, td in _steps(env.eval(), actions):
        first_rows.append((transition[:3], td[:3]))
    steps = _steps(smaller.eval(), [action[:3] for action in actions])
    promise = "load_state_dict() must restore what was learned, for any num_envs"
    _require_equal_steps(first_rows, steps, promise, 1e-6)


# The library itself raises the second and the third, and PyTorch the last one in the user's code.
_FAULTS = (AssertionError, TypeError, ValueError, RuntimeError)
_NAMING = (_check_step_results, _check_functions, _check_action)  # their messages name the cause
_OTHER_SIZES = (_check_sharding, _check_state_dict)  # of no use if the env depends on num_envs
_TRANSFORM_CHECKS = (_check_action, _check_eval, _check_masked_reset)
# Each check relies on those before it.
_ENV_CHECKS: tuple[Check, ...] = (
    _check_step_results,
    _check_functions,
    _check_seeding,
    _check_twins,
    _check_sharding,
    _check_caller_owns_results,
    _check_partial_reset,
    _check_snapshot,
    _check_graph,
    _check_compile,
)


# Running the checks.


def _run_checks(
    checks: Iterable[Check],
    make: MakeEnv,
    transform: Callable[[], Transform] | None = None,
    below: Callable[[], Transform] | None = None,
) -> None:
    """Runs checks with an env, and a transform on it if there is one, with another one below."""
    if not _takes_first_index(make):
        checks = [check for check in checks if check is not _check_sharding]
        make = functools.partial(_make_of_number, make)
    if below is not None:
        make = functools.partial(_make_transformed, make, below)
    whole = make if transform is None else functools.partial(_make_transformed, make, transform)
    for check in checks:
        error = _error_of(check, whole)
        if error is None:
            continue
        if transform is not None and check in _OTHER_SIZES and _error_of(check, make):
            continue
        stacks = [] if check in _TRANSFORM_CHECKS else _layers_of(make)
        stacks += _transforms_of(make, transform)
        causes = [check] if check in _NAMING else [_check_graph, check]
        faults = [_innermost_fault(cause, stacks) for cause in causes]
        outermost, _ = stacks[-1]
        # Without the library's frames, which say nothing of the layer.
        raise AssertionError(faults[0] or faults[-1] or f"{outermost}: {error}")


def _takes_first_index(make: MakeEnv) -> bool:
    parameters = inspect.signature(make).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    return "first_index" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _make_of_number(
    make: MakeEnv,
    num_envs: int,
    first_index: int,
) -> Env:
    return make(num_envs)


def _make_transformed(
    make: MakeEnv,
    transform: Callable[[], Transform],
    length: int | None = None,
    **given: Any,
) -> Env:
    """Makes an env with a transform, or with the first few transforms of a Compose."""
    whole = transform()
    parts = [whole] if length is None else itertools.islice(whole.flat(), length)
    return TransformedEnv(make(**given), *parts)


def _make_layer(
    make: MakeEnv,
    depth: int,
    **given: Any,
) -> Env:
    return layers(make(**given))[depth]


def _layers_of(make: MakeEnv) -> list[tuple[str, MakeEnv]]:
    """The layers of an env by name, innermost first, and a function that makes each."""
    found: list[tuple[str, MakeEnv]] = []
    with make(num_envs=NUM_ENVS, first_index=0) as env:
        for depth, layer in enumerate(layers(env)):
            name = type(getattr(layer, "func_env", layer)).__name__
            if isinstance(layer, TransformedEnv) and len(layer.transforms):
                name = ", ".join(map(repr, layer.transforms))
            found.append((name, functools.partial(_make_layer, make, depth)))
    return found[::-1]


def _transforms_of(
    make: MakeEnv, transform: Callable[[], Transform] | None
) -> list[tuple[str, MakeEnv]]:
    """The parts of a transform by name, and a function that makes the env up to each."""
    found: list[tuple[str, MakeEnv]] = []
    if transform is not None:
        for length, part in enumerate(transform().flat(), 1):
            made = functools.partial(_make_transformed, make, transform, length)
            found.append((repr(part), made))
    return found


def _innermost_fault(
    check: Check,
    stacks: Iterable[tuple[str, MakeEnv]],
) -> str:
    """The innermost layer that fails a check, and how; "" if none does."""
    for layer, make in stacks:
        error = _error_of(check, make)
        if error is not None:
            return f"{layer}: {error}"
    return ""


def _error_of(check: Check, make: MakeEnv) -> Exception | None:
    try:
        _run_check(check, make)
    except _FAULTS as error:
        return error
    return None


def _run_check(check: Check, make: MakeEnv) -> None:
    """Runs a check, and closes the envs that it has made."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*have no samples")  # statistics in eval mode

        def make_open(num_envs: int = NUM_ENVS, first_index: int = 0) -> Env:
            return stack.enter_context(make(num_envs=num_envs, first_index=first_index))

        check(make_open)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _require_in_space(
    call: str,
    env: Env,
    td: TensorDict,
) -> None:
    for path, space in spaces.leaves(env.single_observation_space):
        part = spaces.entry(td["observation"], path)
        must = f"{call} must return observation{list(path) or ''} in {space}, got {part}."
        _require(spaces.contains(space, part), must)


def _require_equal(
    first: TensorDict,
    second: TensorDict,
    promise: str,
    tolerance: float = 0.0,
) -> None:
    """Requires equal keys, shapes, dtypes and values; keys that only a step adds do not count."""
    added = ("action", "next", "buffers")
    expected = first.exclude(*added).flatten_keys().to_dict()
    got = second.exclude(*added).flatten_keys().to_dict()
    try:
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{promise}. {' '.join(str(error).split())}") from None


def _require_equal_steps(
    first: Steps,
    second: Steps,
    promise: str,
    tolerance: float = 0.0,
) -> None:
    for (expected, expected_td), (transition, td) in zip(first, second, strict=True):
        _require_equal(expected["next"], transition["next"], promise, tolerance)
        _require_equal(expected_td, td, promise, tolerance)


def _sample_actions(env: Env) -> list[spaces.Value]:
    """Resets the env with seed 0, and samples an action for every step."""
    env.reset(seed=0)
    return [env.sample_action() for _ in range(NUM_STEPS)]


def _make_twins(make: MakeEnv) -> tuple[Any, Env, list[spaces.Value]]:
    """Two envs that have done the same, and an action for every step."""
    env = make()
    twin = make()
    actions = _sample_actions(env)
    _sample_actions(twin)
    return env, twin, actions


def _steps(
    env: Env,
    actions: list[spaces.Value],
    td: TensorDict | None = None,
) -> Iterator[tuple[TensorDict, TensorDict]]:
    """Yields the results of `env.step` from the root `td` on. None resets the env with seed 0."""
    if td is None:
        td = env.reset(seed=0)
    for number, action in enumerate(actions, 1):
        td.set("action", action.clone())
        for name in env.signature.policy_state:
            td["next", name] = torch.full_like(td[name], number)
        transition, td = env.step(td)
        yield transition, td


def _buffers(module: nn.Module) -> TensorDict:
    buffers = TensorDict(dict(module.named_buffers()), [])
    return buffers.clone()
