"""For authors of envs and transforms: an env whose values can be computed by hand, and the contract as code."""

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

from torchwrap import registration, spaces
from torchwrap._compile.api import compile
from torchwrap._core import spec, validation
from torchwrap._core.buffers import BatchedModule, ConstantBuffer, EnvBuffer, EpisodeClock
from torchwrap._core.generators import no_foreign_draws
from torchwrap._core.rows import RowMask, leaves
from torchwrap.env import Env, Options
from torchwrap.transforms.transform import Transform
from torchwrap.wrappers.wrapper import TransformedEnv, layers

_ENDINGS = ("terminated", "truncated", "both")


class ScriptedEnv(Env):
    """An env whose values can be computed by hand, for tests.

    Let i be the global index of the env, e the number of its episode, counted from 0, and t the number of steps taken in it.
    Element j of the flattened observation is 1000 * i + 10 * j + t, wrapped into the bounds of the space if it has any. The
    reward of step t is t. The episode ends after `episode_lengths[(i + e) % len(episode_lengths)]` steps. The action that the
    env received is in `("next", "info", "action")`.

    Args:
        num_envs: number of envs.
        observation_shape: shape of an unbounded float32 observation.
        episode_lengths: one length, or several to cycle through. None for episodes that never end.
        ending: "terminated", "truncated", "both", or "in turn" to cycle through the three, by (i + e) % 3.
        observation_space: replaces the space given by `observation_shape`, if not None.
        action_space: None takes Box(-1, 1, (6,)).
        first_index: global index of the first env.

    >>> env = ScriptedEnv(2, observation_shape=(3,), episode_lengths=(5, 2))
    >>> env.reset()["observation"]
    tensor([[   0.,   10.,   20.],
            [1000., 1010., 1020.]])
    """

    lengths, terminates, truncates = (ConstantBuffer() for _ in range(3))  # by turn, which is i + e
    index = EnvBuffer((), torch.int64)
    elapsed = EpisodeClock(())
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
        given = 2**63 - 1 if episode_lengths is None else episode_lengths
        lengths = list(given) if isinstance(given, Sequence) else [given]
        lengths = [
            validation.integer("ScriptedEnv", "each of episode_lengths", length, at_least=1)
            for length in lengths
        ]
        if not lengths:
            raise ValueError(
                f"ScriptedEnv needs at least one of episode_lengths, but got {episode_lengths}."
            )
        if ending not in (*_ENDINGS, "in turn"):
            raise ValueError(
                f'ScriptedEnv needs ending="terminated", "truncated", "both" or "in turn", but got {ending!r}.'
            )
        if observation_space is None:
            observation_space = gymnasium_spaces.Box(-np.inf, np.inf, observation_shape, np.float32)
        if action_space is None:
            action_space = gymnasium_spaces.Box(-1, 1, (6,), np.float32)
        signature = spaces.Signature(
            num_envs, observation_space, action_space, device, None, first_index
        )
        super().__init__(signature, metadata={"render_modes": []})
        self.ending = ending
        self.index.copy_(torch.arange(first_index, first_index + num_envs, device=device))
        endings = _ENDINGS if ending == "in turn" else [ending]
        turns = range(math.lcm(len(lengths), len(endings)))
        by_turn = {
            "lengths": [lengths[turn % len(lengths)] for turn in turns],
            "terminates": [endings[turn % len(endings)] != "truncated" for turn in turns],
            "truncates": [endings[turn % len(endings)] != "terminated" for turn in turns],
        }
        for name, values in by_turn.items():
            self.register_buffer(name, torch.tensor(values, device=device), persistent=False)
        self.leaves = nn.ModuleList(
            _Leaf(leaf, device) for _, leaf in spaces.leaves(observation_space)
        )

    def _step(self, action: spaces.Value) -> TensorDict:
        self.elapsed.add_(1)
        turn = (self.index + self.episode) % len(self.lengths)
        ended = self.elapsed >= self.lengths[turn]
        successor = {
            "observation": self._observation_now(),
            "reward": self.elapsed.to(torch.float32).unsqueeze(-1),
            "terminated": (ended & self.terminates[turn]).unsqueeze(-1),
            "truncated": (ended & self.truncates[turn]).unsqueeze(-1),
            "info": TensorDict({"action": action.clone()}, batch_size=[self.num_envs]),
        }
        return TensorDict(successor, batch_size=[self.num_envs])

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        mask.fill_(self.elapsed, 0)
        self.episode.add_(mask.tensor)
        return TensorDict({"observation": self._observation_now()}, batch_size=[self.num_envs])

    def _seed(self, seed: int, mask: RowMask) -> None:
        super()._seed(seed, mask)
        mask.fill_(self.episode, -1)

    def _observation_now(self) -> spaces.Value:
        start, leaves = 1000 * self.index + self.elapsed, iter(self.leaves)
        return spaces.build(
            self.single_observation_space, lambda path, leaf: next(leaves)(start), self.num_envs
        )


class _Leaf(nn.Module):
    """The values of a leaf, wrapped into its bounds if it has any."""

    offsets, low, width = ConstantBuffer(), ConstantBuffer(), ConstantBuffer()

    def __init__(self, leaf: gymnasium_spaces.Space[Any], device: torch.device) -> None:
        super().__init__()
        self.dtype = spaces.dtype(leaf)
        self.is_bounded = not isinstance(leaf, gymnasium_spaces.Box) or leaf.is_bounded()
        width, low = spaces.counts(leaf)
        if isinstance(leaf, gymnasium_spaces.Box):
            is_integer = np.issubdtype(leaf.dtype, np.integer)
            low, high = (
                bound.astype(np.int64 if is_integer else np.float64)
                for bound in (leaf.low, leaf.high)
            )
            width = np.where(
                high > low, high - low + is_integer, 1
            )  # not 0, because it is a divisor
        exact = (
            torch.float64 if self.dtype.is_floating_point else torch.int64
        )  # both hold every whole number that occurs
        offsets = 10 * torch.arange(math.prod(leaf.shape or ()), dtype=exact, device=device).view(
            leaf.shape or ()
        )
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("low", torch.tensor(low, device=device), persistent=False)
        self.register_buffer("width", torch.tensor(width, device=device), persistent=False)

    def forward(self, start: Tensor) -> Tensor:
        value = start.view(-1, *(1,) * self.offsets.dim()) + self.offsets
        return (self.low + value % self.width if self.is_bounded else value).to(self.dtype)


MakeEnv: TypeAlias = Callable[..., Env]  # from `num_envs` and `first_index`
Check: TypeAlias = Callable[[Any], None]
Run: TypeAlias = Iterable[tuple[TensorDict, TensorDict]]  # what `env.step` returns, step by step

NUM_ENVS, NUM_STEPS = 5, 40


def check_env(make: MakeEnv | Env) -> None:
    """Checks that an env keeps the contract of `torchwrap.Env`.

    Args:
        make: makes a new env from `num_envs` and `first_index`, such as `functools.partial(torchwrap.make, "CartPole-v1")`; or
            from the number of envs alone, `lambda n: ...`, which leaves out the check of shards; or an env with a `spec`, of
            which others are made. Episodes should end within 40 random steps. Otherwise the checks do not reach an auto-reset.

    Raises:
        AssertionError: if the env breaks the contract. The message names the innermost layer that does, and the cause, such as
            foreign random numbers, values read on the host, or state outside of buffers; or else the broken promise.

    >>> check_env(ScriptedEnv)
    """
    if isinstance(make, Env):
        if make.spec is None:
            remedy = "pass a function that makes n of them, `lambda n: ...`"
            raise TypeError(
                f"check_env cannot make more envs like {make!r}, because it has no spec: {remedy}."
            )
        make = functools.partial(registration.make, make.spec)
    if (
        not callable(make)
        or not inspect.signature(make).parameters
        or (isinstance(make, type) and not issubclass(make, Env))
    ):
        remedy = "for a FuncEnv, pass `lambda n: FunctionalEnv(func_env, n)`"
        raise TypeError(
            f"check_env needs a torchwrap env, or a function of the number of envs, but got {make!r}: {remedy}."
        )
    _run_checks(_OF_ENVS, make)


def check_transform(make: Callable[[], Transform], make_env: MakeEnv = ScriptedEnv) -> None:
    """Checks that a transform keeps the contract of `torchwrap.Transform`, and an env with it the one of `torchwrap.Env`.

    Args:
        make: makes a new transform.
        make_env: makes an env whose spaces the transform accepts, as for `check_env`.

    Raises:
        AssertionError: as `check_env`.

    >>> from torchwrap import transforms as T
    >>> check_transform(lambda: T.ClipReward(-1, 1))
    """
    if isinstance(make, Transform):
        raise TypeError(
            f"check_transform needs a class or a function, but got {make!r}: write `lambda:` before it."
        )
    try:
        spec.record(make())
    except ValueError as error:
        raise AssertionError(f"spec: {error}") from None
    # The checks that name the fault of a transform most precisely come before the checks of an env.
    checks = _check_step_results, _check_action, _check_masked_reset, _check_eval
    _run_checks((*checks, *_OF_ENVS[1:], _check_state_dict), make_env, make)


def _check_step_results(make: MakeEnv) -> None:
    env = make()
    space = env.single_observation_space
    _require(
        env.num_envs == NUM_ENVS,
        f"num_envs needs to be {NUM_ENVS}, as asked for, but got {env.num_envs}.",
    )
    _require("\n" not in repr(env), f"repr() needs to return one line, but got {env!r}.")
    observation, known_layout = env.reset(seed=0)["observation"], None
    _require(
        spaces.contains(space, observation),
        f"reset() needs to return observations in {space}, but got {observation}.",
    )
    for transition, td in _run(env, _sample_actions(env)):
        successor = transition["next"]
        layout = {
            key: (tuple(value.shape), value.dtype) for key, value in successor.items(True, True)
        }
        changed = f"but got {known_layout} and {layout}"
        _require(
            known_layout in (None, layout),
            f"step() needs to return the same keys, shapes and dtypes, {changed}.",
        )
        known_layout = layout
        for value in (successor["observation"], td["observation"]):
            _require(
                spaces.contains(space, value),
                f"step() needs to return observations in {space}, but got {value}.",
            )


def _check_caller_owns_results(make: MakeEnv) -> None:
    env, other = make(), make()
    actions = _sample_actions(env)
    _sample_actions(other)
    results = []
    for (transition, td), (erased, erased_td) in zip(
        _run(env, actions), _run(other, actions), strict=True
    ):
        _require_equal(
            transition["next"], erased["next"], "changing outputs in place must not change the env"
        )
        results += [
            (result, result.clone()) for result in (transition["next"], td.select("observation"))
        ]
        for leaf in (*erased.values(True, True), *erased_td.values(True, True)):
            leaf.zero_()
    for result, copy in results:
        _require_equal(copy, result, "later steps must not change earlier outputs")


def _check_seeding(make: MakeEnv) -> None:
    env = make().eval()
    actions = _sample_actions(env)
    with no_foreign_draws("a step", "draw with torchwrap.random, from a stream", env.device):
        first_run = [(transition.clone(), td.clone()) for transition, td in _run(env, actions)]
    promise = "after reset(seed), the same actions must give the same transitions and new episodes"
    _require_equal_runs(first_run, _run(env, actions), promise)


def _check_sharding(make: MakeEnv) -> None:
    env = make().eval()
    actions = _sample_actions(env)
    runs = [
        _run(make(num_envs=1, first_index=row).eval(), [action[[row]] for action in actions])
        for row in range(NUM_ENVS)
    ]
    for transition, td in _run(env, actions):
        for row, run in enumerate(runs):
            promise = "it mixes rows, or depends on num_envs"
            promise += f": env {row} of {NUM_ENVS} must equal a single env with first_index={row}"
            _require_equal_runs([(transition[[row]], td[[row]])], [next(run)], promise, 1e-6)


def _check_partial_reset(make: MakeEnv) -> None:
    env, other = make().eval(), make().eval()
    actions = _sample_actions(env)
    _sample_actions(other)
    before, after = actions[: len(actions) // 4], actions[len(actions) // 4 :]
    list(_run(env, before))
    *_, (_, other_td) = _run(other, before)
    mask = torch.arange(NUM_ENVS, device=env.device) == 1
    td = env.reset(mask=mask)
    # A single step, because envs that share a stream of episodes with the reset one may differ later.
    (transition, _), (expected, _) = next(_run(env, after, td)), next(_run(other, after, other_td))
    _require_equal(
        expected["next"][~mask],
        transition["next"][~mask],
        "after reset(mask), other rows must continue as before",
    )


def _check_snapshot(make: MakeEnv) -> None:
    env = make()
    if not env.can_snapshot:
        return
    actions = _sample_actions(env)
    before, after = actions[:7], actions[7:]
    *_, (_, td) = _run(env, before)
    snapshot = env.snapshot()
    first_run = list(_run(env, after, td))
    final_buffers = _buffers(env)
    _require_equal(
        snapshot, env.restore(snapshot), "restore() must return the observation of the snapshot"
    )
    _require_equal_runs(
        first_run,
        _run(env, after, env.restore(snapshot)),
        "after restore(), the env must continue as before",
    )
    _require_equal(
        final_buffers, _buffers(env), "after restore(), the env must reach the same state"
    )


def _check_graph(make: MakeEnv) -> None:
    env = make()
    if isinstance(env, TransformedEnv) or not env.host_stepped:
        compile(env, backend="eager")


def _check_compile(make: MakeEnv) -> None:
    env, compiled_env = make(), make()
    if env.host_stepped and not isinstance(env, TransformedEnv):
        return
    actions = _sample_actions(env)
    _sample_actions(compiled_env)
    compile(compiled_env, backend="aot_eager")
    promise = "the compiled env must give the transitions and new episodes of eager mode"
    _require_equal_runs(_run(env, actions), _run(compiled_env, actions), promise, 1e-6)
    _require_equal(
        _buffers(env),
        _buffers(compiled_env),
        "the compiled env must leave its buffers as eager mode does",
        1e-6,
    )


def _check_action(make: Callable[..., TransformedEnv]) -> None:
    env = make()
    action = env.sample_action()
    before = action.clone()
    result = env.transforms.action(action)
    owned = {buffer.untyped_storage().data_ptr() for buffer in env.transforms.buffers()}
    is_buffer = any(leaf.untyped_storage().data_ptr() in owned for leaf in leaves(result))
    _require(
        not is_buffer, "action() returns a buffer, which later steps change: return a new tensor."
    )
    _require(
        bool((action == before).all()),
        "action() writes to the agent's action: return a new tensor.",
    )
    spaces.check(
        "action()", "to return actions", env.env.single_action_space, result, NUM_ENVS, env.device
    )


@torch.no_grad()
def _check_masked_reset(make: Callable[..., TransformedEnv]) -> None:
    env = make()
    list(_run(env, _sample_actions(env)[:7]))
    transform = env.transforms
    modules = [
        (prefix, module)
        for prefix, module in transform.named_modules()
        if isinstance(module, BatchedModule)
    ]
    of_envs = {
        f"{prefix}.{name}" for prefix, module in modules for name in module._env_buffer_names
    }
    zeros = spaces.zeros(env.env.single_observation_space, NUM_ENVS, env.device)
    every_other = torch.arange(NUM_ENVS, device=env.device) % 2 == 0
    for mask in (every_other, torch.zeros_like(every_other)):
        rows, results = RowMask(mask), []
        observation = env.env._reset(RowMask.full(NUM_ENVS, env.device))["observation"]
        before = _buffers(transform)
        for other_rows in (observation, zeros):
            for name, buffer in transform.named_buffers():
                buffer.copy_(before[name])
            td = transform.reset(
                TensorDict({"observation": rows.where(observation, other_rows)}, [NUM_ENVS]), rows
            )
            results.append(
                TensorDict(
                    {"observation": td["observation"][mask], "state": _buffers(transform)}, []
                ).clone()
            )
        _require_equal(
            results[0],
            results[1],
            "it mixes rows: in reset(td, mask), rows outside the mask must not count",
        )
        for name, after in results[0]["state"].items():
            if name in of_envs or not mask.any():
                was, now = (
                    TensorDict({name: each[~mask] if name in of_envs else each}, [])
                    for each in (before[name], after)
                )
                _require_equal(was, now, "reset(td, mask) must not change rows outside the mask")


def _check_eval(make: Callable[..., TransformedEnv]) -> None:
    env = make().eval()
    before = TensorDict(env.transforms.state_dict(), []).clone()
    list(_run(env, _sample_actions(env)))
    _require_equal(
        before, TensorDict(env.transforms.state_dict(), []), "eval() must freeze the state_dict"
    )


def _check_state_dict(make: Callable[..., TransformedEnv]) -> None:
    env, smaller_env = make(), make(num_envs=3)
    actions = _sample_actions(env)
    list(_run(env, actions))
    smaller_env.load_state_dict(env.state_dict())
    first_rows = ((transition[:3], td[:3]) for transition, td in _run(env.eval(), actions))
    smaller_run = _run(smaller_env.eval(), [action[:3] for action in actions])
    _require_equal_runs(
        first_rows,
        smaller_run,
        "load_state_dict() must restore what was learned, for any num_envs",
        1e-6,
    )


_FAULTS = AssertionError, TypeError, ValueError  # the last two are what the library itself refuses
_NAMING = _check_step_results, _check_action  # their messages name the cause
_OF_TRANSFORMS = _check_action, _check_eval, _check_masked_reset
# Each takes for granted what those before it have checked.
_OF_ENVS: tuple[Check, ...] = (
    _check_step_results,
    _check_seeding,
    _check_sharding,
    _check_caller_owns_results,
    _check_partial_reset,
    _check_snapshot,
    _check_graph,
    _check_compile,
)


def _run_checks(
    checks: Iterable[Check], make: MakeEnv, transform: Callable[[], Transform] | None = None
) -> None:
    """Runs checks with an env, and a transform on it if there is one."""
    parameters = inspect.signature(make).parameters.values()
    if not any(each.name == "first_index" or each.kind is each.VAR_KEYWORD for each in parameters):
        of_number, checks = make, [check for check in checks if check is not _check_sharding]
        make = lambda num_envs, first_index: of_number(num_envs)  # noqa: E731
    whole = (lambda **given: TransformedEnv(make(**given), transform())) if transform else make
    for check in checks:
        try:
            _run_check(check, whole)
        except _FAULTS as error:
            stacks = _stacks(make, transform, check in _OF_TRANSFORMS)
            causes = [check] if check in _NAMING else [_check_graph, check]
            found = (_innermost(cause, stacks) for cause in causes)
            raise AssertionError(next(filter(None, found), f"{stacks[-1][0]}: {error}")) from error


def _run_check(check: Check, make: MakeEnv) -> None:
    """Runs a check with `make` and its defaults. What it makes is closed in the end."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*have no samples")  # of statistics in eval mode
        check(
            lambda num_envs=NUM_ENVS, first_index=0: stack.enter_context(
                make(num_envs=num_envs, first_index=first_index)
            )
        )


def _stacks(make: MakeEnv, transform: Any, only_transforms: bool) -> list[tuple[str, MakeEnv]]:
    """The layers by name, innermost first, and a function that makes the env up to each."""
    found: list[tuple[str, MakeEnv]] = []
    with make(num_envs=NUM_ENVS, first_index=0) as env:
        for depth, layer in enumerate(() if only_transforms else layers(env)):
            parts = map(repr, layer.transforms) if isinstance(layer, TransformedEnv) else ()
            name = ", ".join(parts) or type(getattr(layer, "func_env", layer)).__name__
            found.insert(0, (name, lambda depth=depth, **given: layers(make(**given))[depth]))
    for number, part in enumerate(transform().flat() if transform else (), 1):
        first: Any = lambda number=number: itertools.islice(transform().flat(), number)  # noqa: E731
        found.append(
            (repr(part), lambda first=first, **given: TransformedEnv(make(**given), *first()))
        )
    return found


def _innermost(check: Check, stacks: Iterable[tuple[str, MakeEnv]]) -> str:
    """The innermost layer that fails a check, and how; "" if none does."""
    for layer, make in stacks:
        try:
            _run_check(check, make)
        except _FAULTS as error:
            return f"{layer}: {error}"
    return ""


def _require(condition: bool | Tensor, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _require_equal(
    first: TensorDict, second: TensorDict, promise: str, tolerance: float = 0.0
) -> None:
    """Requires equal keys, shapes, dtypes and values, but not of what a step or a snapshot adds to a root."""
    expected, got = (
        td.exclude("action", "next", "buffers").flatten_keys().to_dict() for td in (first, second)
    )
    shown: Any = lambda text: f"{promise}. {' '.join(text.split())}"  # noqa: E731
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=shown
    )


def _require_equal_runs(first: Run, second: Run, promise: str, tolerance: float = 0.0) -> None:
    for (expected, expected_td), (transition, td) in zip(first, second, strict=True):
        _require_equal(expected["next"], transition["next"], promise, tolerance)
        _require_equal(expected_td, td, promise, tolerance)


def _sample_actions(env: Env) -> list[spaces.Value]:
    """Resets the env with seed 0, and samples an action for every step."""
    env.reset(seed=0)
    return [env.sample_action() for _ in range(NUM_STEPS)]


def _run(
    env: Env, actions: list[spaces.Value], td: TensorDict | None = None
) -> Iterator[tuple[TensorDict, TensorDict]]:
    """Yields what `env.step` returns for each action, from the root `td` on. None resets the env with seed 0."""
    td = env.reset(seed=0) if td is None else td
    for number, action in enumerate(actions, 1):
        td.set("action", action.clone())
        for name in env.signature.policy_state:
            td["next", name] = torch.full_like(td[name], number)
        transition, td = env.step(td)
        yield transition, td


def _buffers(module: torch.nn.Module) -> TensorDict:
    return TensorDict(
        {name: buffer.clone() for name, buffer in module.named_buffers()}, batch_size=[]
    )
