"""The contract as code: what every env and every transform has to keep, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchwrap import masks, recipe, spaces
from torchwrap.compile import compile
from torchwrap.env import Env
from torchwrap.testing.scripted import ScriptedEnv
from torchwrap.transforms.base import Transform
from torchwrap.wrappers import TransformedEnv

MakeEnv = Callable[..., Env]
_N, _STEPS = 5, 40


def check_env(make: MakeEnv) -> None:
    """Raises an AssertionError that says what is wrong, unless envs keep the contract of `torchwrap.Env`.

    Args:
        make: gives a new env from `num_envs` and `first_index`, such as `functools.partial(torchwrap.make, "CartPole-v1")`.
            Episodes should end within 40 random steps, or what happens there is not seen.

    >>> check_env(ScriptedEnv)
    """
    for check in (_description, _contract, _caller_owns_outputs, _seeds, _shards, _partial_reset, _snapshot, _compiled):
        check(make)


def check_transform(make: Callable[[], Transform], make_env: MakeEnv = ScriptedEnv) -> None:
    """Raises an AssertionError that says what is wrong, unless a transform keeps the contract of `torchwrap.Transform`.

    Args:
        make: gives a new transform.
        make_env: gives the env to put it on, as for `check_env`: one whose spaces it serves.

    >>> from torchwrap import transforms as T
    >>> check_transform(lambda: T.ClipReward(-1, 1))
    """

    def make_stack(**arguments: Any) -> TransformedEnv:
        return TransformedEnv(make_env(**arguments), make())

    try:
        recipe.record(make())
    except ValueError as error:
        raise AssertionError(f"spec: {error}") from None
    for check in (_description, _contract, _action, _mask, _frozen):
        check(make_stack)
    check_env(make_stack)
    _learned(make_stack)


# Helpers.


def _require(condition: bool | Tensor, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _equal(first: TensorDict, second: TensorDict, what: str, tolerance: float = 0.0) -> None:
    keys = set(first.keys(True, True))
    _require(
        keys == set(second.keys(True, True)), f"{what}: needs the same keys, but got {keys ^ set(second.keys(True, True))}."
    )
    for key in keys:
        one, two = first[key], second[key]
        layout = f"{key} of {tuple(one.shape)} {one.dtype}, but got {tuple(two.shape)} {two.dtype}"
        _require(one.dtype == two.dtype and one.shape == two.shape, f"{what}: needs {layout}.")
        same = torch.isclose(one, two, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not same.all():
            place = (~same).nonzero()[0].tolist()
            got = f"{one[tuple(place)].item()} and {two[tuple(place)].item()}"
            raise AssertionError(f"{what}: needs equal {key}, but got {got} at {place}.")


def _actions(env: Env) -> list[spaces.Value]:
    env.reset(seed=0)
    return [env.sample_action() for _ in range(_STEPS)]


def _run(env: Env, actions: list[spaces.Value], td: TensorDict | None = None) -> Iterator[tuple[TensorDict, TensorDict]]:
    td = env.reset(seed=0) if td is None else td
    for action in actions:
        transition, td = env.step(td.set("action", action.clone()))
        yield transition, td


def _buffers(module: torch.nn.Module) -> TensorDict:
    return TensorDict({name: buffer.clone() for name, buffer in module.named_buffers()}, batch_size=[])


# What holds for every env.


def _description(make: MakeEnv) -> None:
    env = make(num_envs=_N, first_index=0)
    _require(env.num_envs == _N, f"num_envs: needs to be {_N} as asked for, but got {env.num_envs}.")
    _require("\n" not in repr(env), f"repr: needs to be one line, but got {env!r}.")
    action = env.sample_action()
    _require(spaces.contains(env.single_action_space, action), f"sample_action: needs to be in the space, but got {action}.")
    try:
        env.step(TensorDict({"action": action}, batch_size=[_N]))
    except RuntimeError as error:
        _require("reset" in str(error), f"step before reset: needs an error that names reset, but got {error}.")
    else:
        raise AssertionError("step before reset: needs a RuntimeError, but got a step.")
    env.close()


def _contract(make: MakeEnv) -> None:
    env = make(num_envs=_N, first_index=0)
    first, keys = env.reset(seed=0), None
    _require(set(first.keys()) == {"observation"}, f"reset: needs to give observation alone, but got {sorted(first.keys())}.")
    _require(spaces.contains(env.single_observation_space, first["observation"]), "reset: needs an observation in its space.")
    for transition, td in _run(env, _actions(env)):
        following = transition["next"]
        for key in ("observation", "reward", "terminated", "truncated", "done"):
            _require(key in following.keys(), f'step: needs ("next", "{key}"), but got {sorted(following.keys())}.')
        layout = {key: (value.shape, value.dtype) for key, value in following.items(True, True)}
        _require(
            keys in (None, layout), f"step: needs the same keys, shapes and dtypes each time, but got {keys} and {layout}."
        )
        keys = layout
        for key in ("reward", "terminated", "truncated", "done"):
            expected = ((_N, 1), torch.float32 if key == "reward" else torch.bool)
            _require(layout[key] == expected, f"step: needs {key} of {expected}, but got {layout[key]}.")
        done = following["done"].squeeze(-1)
        either = (following["terminated"] | following["truncated"]).squeeze(-1)
        _require((done == either).all(), "step: needs done = terminated | truncated.")
        for value in (following["observation"], td["observation"]):
            _require(
                spaces.contains(env.single_observation_space, value),
                f"step: needs observations in {env.single_observation_space}, but got {value}.",
            )
        kept = masks.where(done, following["observation"], td["observation"])
        _equal(
            TensorDict({"observation": kept}, [_N]),
            TensorDict({"observation": following["observation"]}, [_N]),
            "step: where no episode ended",
        )
    env.close()


def _caller_owns_outputs(make: MakeEnv) -> None:
    env, other = make(num_envs=_N, first_index=0), make(num_envs=_N, first_index=0)
    actions = _actions(env)
    _actions(other)
    held, copies = [], []
    runs = zip(_run(env, actions), _run(other, actions), strict=True)
    for (transition, td), (scribbled, scribbled_td) in runs:
        _equal(transition["next"], scribbled["next"], "outputs: changing them in place needs to leave the env alone")
        held += [transition["next"], td.select("observation")]
        copies += [held[-2].clone(), held[-1].clone()]
        for leaf in (*scribbled.values(True, True), *scribbled_td.values(True, True)):
            leaf.zero_()
    for value, copy in zip(held, copies, strict=True):
        _equal(value, copy, "outputs: no later step may change them")
    env.close()
    other.close()


def _seeds(make: MakeEnv) -> None:
    env = make(num_envs=_N, first_index=0).eval()
    actions = _actions(env)
    once = [(transition["next"].clone(), td.clone()) for transition, td in _run(env, actions)]
    for (following, td), (transition, again) in zip(once, _run(env, actions), strict=True):
        _equal(following, transition["next"], "reset(seed): the same actions need the same transitions")
        _equal(td.select("observation"), again.select("observation"), "reset(seed): needs the same new episodes")
    env.close()


def _shards(make: MakeEnv) -> None:
    whole = make(num_envs=_N, first_index=0).eval()
    actions = _actions(whole)
    ones = [make(num_envs=1, first_index=row).eval() for row in range(_N)]
    runs = [_run(one, [action[[row]] for action in actions]) for row, one in enumerate(ones)]
    for transition, td in _run(whole, actions):
        for row, run in enumerate(runs):
            alone, alone_td = next(run)
            what = f"env {row} of {_N}: needs to be the env with first_index={row}"
            _equal(transition["next"][[row]], alone["next"], what, 1e-6)
            _equal(td[[row]].select("observation"), alone_td.select("observation"), what, 1e-6)
    for env in (whole, *ones):
        env.close()


def _partial_reset(make: MakeEnv) -> None:
    env, other = make(num_envs=_N, first_index=0).eval(), make(num_envs=_N, first_index=0).eval()
    actions = _actions(env)
    _actions(other)
    half = len(actions) // 4
    *_, (_, td) = _run(env, actions[:half])
    *_, (_, other_td) = _run(other, actions[:half])
    mask = torch.arange(_N, device=env.device) == 1
    rows = ~mask
    td = env.reset(mask=mask)
    _equal(td[rows].select("observation"), other_td[rows].select("observation"), "reset(mask): other rows need to stay")
    # One step: later on, envs that share a stream of episodes with the one that was reset would have to differ.
    (transition, _), (expected, _) = next(_run(env, actions[half:], td)), next(_run(other, actions[half:], other_td))
    _equal(transition["next"][rows], expected["next"][rows], "reset(mask): other rows need to go on")
    env.close()
    other.close()


def _snapshot(make: MakeEnv) -> None:
    env = make(num_envs=_N, first_index=0)
    actions = _actions(env)
    *_, (_, td) = _run(env, actions[:7])
    if not env.can_snapshot:
        try:
            env.snapshot()
        except RuntimeError:
            return env.close()
        raise AssertionError("snapshot: needs a RuntimeError where can_snapshot is False, but got a snapshot.")
    snapshot = env.snapshot()
    once = [(transition["next"].clone(), td.clone()) for transition, td in _run(env, actions[7:], td)]
    after = _buffers(env)
    _equal(env.restore(snapshot).select("observation"), snapshot.select("observation"), "restore: needs where to act next")
    for (following, td), (transition, again) in zip(once, _run(env, actions[7:], env.restore(snapshot)), strict=True):
        _equal(following, transition["next"], "restore: needs to go on as before")
        _equal(td.select("observation"), again.select("observation"), "restore: needs the same new episodes")
    _equal(_buffers(env), after, "restore: needs to reach the same state")
    env.close()


def _compiled(make: MakeEnv) -> None:
    env, other = make(num_envs=_N, first_index=0), make(num_envs=_N, first_index=0)
    if env.can_snapshot:
        actions = _actions(env)
        _actions(other)
        try:
            compile(other, backend="aot_eager")
        except ValueError as error:
            raise AssertionError(f"compile: needs a step that is one graph, but got {error}") from None
        graph = _run(other, actions)
        for transition, td in _run(env, actions):
            compiled, compiled_td = next(graph)
            _equal(transition["next"], compiled["next"], "compile: needs what eager mode gives", 1e-6)
            _equal(td.select("observation"), compiled_td.select("observation"), "compile: needs the same new episodes", 1e-6)
        _equal(_buffers(env), _buffers(other), "compile: needs the buffers of eager mode", 1e-6)
    env.close()
    other.close()


# What holds for every transform beside.


def _action(make: Callable[..., TransformedEnv]) -> None:
    stack = make(num_envs=_N, first_index=0)
    action = stack.sample_action()
    before = action.clone()
    given = stack.transform.action(action)
    _require(bool((action == before).all()), "action: needs to leave the agent's action as it is; give a new tensor.")
    spaces.check("action", "to give", stack.env.single_action_space, given, _N, stack.device)
    stack.close()


@torch.no_grad()
def _mask(make: Callable[..., TransformedEnv]) -> None:
    stack = make(num_envs=_N, first_index=0)
    actions = _actions(stack)
    for _ in _run(stack, actions[:7]):
        pass
    transform, space = stack.transform, stack.env.single_observation_space
    persistent = set(transform.state_dict())
    for mask in (torch.arange(_N, device=stack.device) % 2 == 0, torch.zeros(_N, dtype=torch.bool, device=stack.device)):
        observation = stack.env._reset(torch.ones_like(mask))["observation"]
        results = []
        before = _buffers(transform)
        for elsewhere in (observation, spaces.zeros(space, _N, stack.device)):
            for name, buffer in transform.named_buffers():
                buffer.copy_(before[name])
            first = masks.where(mask, observation, elsewhere)
            given = transform.reset(TensorDict({"observation": first}, batch_size=[_N]), mask)
            results.append((given["observation"].clone(), _buffers(transform)))
        (once, after), (again, after_again) = results
        _equal(after, after_again, "reset(td, mask): rows outside the mask must not count")
        _equal(
            TensorDict({"rows": once[mask]}, []),
            TensorDict({"rows": again[mask]}, []),
            "reset(td, mask): rows outside the mask must not count",
        )
        for name, value in after.items():
            running = name not in persistent and value.dim() > 0 and len(value) == _N
            if running or not mask.any():
                one, two = (td[name][~mask] if running else td[name] for td in (after, before))
                _equal(
                    TensorDict({name: one}, []),
                    TensorDict({name: two}, []),
                    "reset(td, mask): rows outside the mask must not change",
                )
    stack.close()


def _frozen(make: Callable[..., TransformedEnv]) -> None:
    stack = make(num_envs=_N, first_index=0).eval()
    before = TensorDict(stack.transform.state_dict(), []).clone()
    for _ in _run(stack, _actions(stack)):
        pass
    _equal(TensorDict(stack.transform.state_dict(), []), before, "eval(): needs to freeze the state_dict")
    stack.close()


def _learned(make: Callable[..., TransformedEnv]) -> None:
    stack, other = make(num_envs=_N, first_index=0), make(num_envs=3, first_index=0)
    actions = _actions(stack)
    for _ in _run(stack, actions):
        pass
    other.load_state_dict(stack.state_dict())
    stack.eval()
    other.eval()
    few = [action[:3] for action in actions]
    for (transition, td), (fewer, fewer_td) in zip(_run(stack, actions), _run(other, few), strict=True):
        _equal(transition["next"][:3], fewer["next"], "load_state_dict: needs to carry over what was learned", 1e-6)
        _equal(td[:3].select("observation"), fewer_td.select("observation"), "load_state_dict: needs to carry over", 1e-6)
    stack.close()
    other.close()
