"""The contract of envs and transforms, as code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._compile.api import compile
from torchwrap._core import spec as specs
from torchwrap._core.env_buffers import BatchedModule
from torchwrap._core.rows import RowMask
from torchwrap.testing.comparison import (
    NUM_ENVS,
    MakeEnv,
    buffers,
    closing,
    require,
    require_equal,
    require_equal_roots,
    require_equal_runs,
    run,
    sample_actions,
)
from torchwrap.testing.scripted import ScriptedEnv
from torchwrap.transforms import policy_state
from torchwrap.transforms.transform import Transform
from torchwrap.wrappers import TransformedEnv


def check_env(make: MakeEnv) -> None:
    """Checks that an env keeps the contract of `torchwrap.Env`.

    Args:
        make: makes a new env from `num_envs` and `first_index`, such as `functools.partial(torchwrap.make, "CartPole-v1")`.
            Episodes should end within 40 random steps. Otherwise the checks do not reach an auto-reset.

    Raises:
        AssertionError: if the env breaks the contract. The message names the broken promise.

    >>> check_env(ScriptedEnv)
    """
    for check in (
        _check_description,
        _check_step_results,
        _check_caller_owns_results,
        _check_seeding,
        _check_sharding,
        _check_partial_reset,
        _check_snapshot,
        _check_compile,
    ):
        with closing(make) as make_env:
            check(make_env)


def check_transform(make: Callable[[], Transform], make_env: MakeEnv = ScriptedEnv) -> None:
    """Checks that a transform keeps the contract of `torchwrap.Transform`, and an env with it that of `torchwrap.Env`.

    Args:
        make: makes a new transform.
        make_env: makes an env whose spaces the transform accepts, as for `check_env`.

    Raises:
        AssertionError: if the transform breaks the contract. The message names the broken promise.

    >>> from torchwrap import transforms as T
    >>> check_transform(lambda: T.ClipReward(-1, 1))
    """

    def make_transformed(**arguments: Any) -> TransformedEnv:
        return TransformedEnv(make_env(**arguments), make())

    try:
        specs.record(make())
    except ValueError as error:
        raise AssertionError(f"spec: {error}") from None
    # The checks that name the fault of a transform most precisely come before those of an env.
    checks: list[Callable[[Any], None]] = [_check_description, _check_step_results, _check_action, _check_masked_reset]
    checks += [_check_eval, check_env, _check_state_dict]
    for check in checks:
        with closing(make_transformed) as make_one:
            check(make_one)


# The contract of an env.


def _check_description(make: MakeEnv) -> None:
    env = make()
    require(env.num_envs == NUM_ENVS, f"num_envs: needs to be {NUM_ENVS}, but got {env.num_envs}.")
    require("\n" not in repr(env), f"repr: needs to be one line, but got {env!r}.")
    action = env.sample_action()
    in_space = spaces.contains(env.single_action_space, action)
    require(in_space, f"sample_action: needs actions in {env.single_action_space}, but got {action}.")
    try:
        env.step(TensorDict({"action": action}, batch_size=[NUM_ENVS]))
    except RuntimeError as error:
        require("reset" in str(error), f"step before reset: needs an error that names reset, but got {error}.")
    else:
        raise AssertionError("step before reset: needs a RuntimeError, but it returned.")


def _check_step_results(make: MakeEnv) -> None:
    env = make()
    space = env.single_observation_space
    root, known_layout = env.reset(seed=0), None
    declared = {"observation", *policy_state.keys(env.signature)}
    require(set(root.keys()) == declared, f"reset: needs the keys {sorted(declared)}, but got {sorted(root.keys())}.")
    observation = root["observation"]
    require(spaces.contains(space, observation), f"reset: needs an observation in its space, {space}, but got {observation}.")
    for transition, td in run(env, sample_actions(env)):
        successor = transition["next"]
        for key in ("observation", "reward", "terminated", "truncated", "done"):
            require(key in successor.keys(), f'step: needs ("next", "{key}"), but got {sorted(successor.keys())}.')
        layout = {key: (tuple(value.shape), value.dtype) for key, value in successor.items(True, True)}
        changed = f"but got {known_layout} and {layout}"
        require(known_layout in (None, layout), f"step: needs the same keys, shapes and dtypes at every step, {changed}.")
        known_layout = layout
        for key in ("reward", "terminated", "truncated", "done"):
            shape, dtype = (NUM_ENVS, 1), torch.float32 if key == "reward" else torch.bool
            require(layout[key] == (shape, dtype), f"step: needs {key} of {shape} {dtype}, but got {layout[key]}.")
        done = successor["done"].squeeze(-1)
        ended = (successor["terminated"] | successor["truncated"]).squeeze(-1)
        require((done == ended).all(), "step: needs done = terminated | truncated.")
        for value in (successor["observation"], td["observation"]):
            require(spaces.contains(space, value), f"step: needs observations in {space}, but got {value}.")
        # The root, with its rows of new episodes replaced by those of the successor.
        continued = RowMask(done).where(successor["observation"], td["observation"])
        promise = "step: where no episode ended, the root holds the observation of the successor"
        require_equal(successor.select("observation"), TensorDict({"observation": continued}, [NUM_ENVS]), promise)


def _check_caller_owns_results(make: MakeEnv) -> None:
    env, other = make(), make()
    actions = sample_actions(env)
    sample_actions(other)
    results, copies = [], []
    for (transition, td), (erased, erased_td) in zip(run(env, actions), run(other, actions), strict=True):
        require_equal(transition["next"], erased["next"], "outputs: changing them in place must not change the env")
        results += [transition["next"], td.select("observation")]
        copies += [results[-2].clone(), results[-1].clone()]
        for leaf in (*erased.values(True, True), *erased_td.values(True, True)):
            leaf.zero_()
    for result, copy in zip(results, copies, strict=True):
        require_equal(copy, result, "outputs: later steps must not change them")


def _check_seeding(make: MakeEnv) -> None:
    env = make().eval()
    actions = sample_actions(env)
    first_run = list(run(env, actions))
    promise = "reset(seed): the same seed and actions need the same transitions and new episodes"
    require_equal_runs(first_run, run(env, actions), promise)


def _check_sharding(make: MakeEnv) -> None:
    env = make().eval()
    actions = sample_actions(env)
    shards = [make(num_envs=1, first_index=row).eval() for row in range(NUM_ENVS)]
    runs = [run(shard, [action[[row]] for action in actions]) for row, shard in enumerate(shards)]
    for transition, td in run(env, actions):
        for row, shard_run in enumerate(runs):
            promise = f"env {row} of {NUM_ENVS}: needs to equal a single env with first_index={row}"
            require_equal_runs([(transition[[row]], td[[row]])], [next(shard_run)], promise, 1e-6)


def _check_partial_reset(make: MakeEnv) -> None:
    env, other = make().eval(), make().eval()
    actions = sample_actions(env)
    sample_actions(other)
    before, after = actions[: len(actions) // 4], actions[len(actions) // 4 :]
    list(run(env, before))
    *_, (_, other_td) = run(other, before)
    mask = torch.arange(NUM_ENVS, device=env.device) == 1
    td = env.reset(mask=mask)
    require_equal_roots(other_td[~mask], td[~mask], "reset(mask): other rows must keep their observation")
    # A single step, because envs that share a stream of episodes with the reset one may differ later.
    (transition, _), (expected, _) = next(run(env, after, td)), next(run(other, after, other_td))
    require_equal(expected["next"][~mask], transition["next"][~mask], "reset(mask): other rows must continue as before")


def _check_snapshot(make: MakeEnv) -> None:
    env = make()
    actions = sample_actions(env)
    before, after = actions[:7], actions[7:]
    *_, (_, td) = run(env, before)
    if not env.can_snapshot:
        try:
            env.snapshot()
        except RuntimeError:
            return
        raise AssertionError("snapshot: needs a RuntimeError if can_snapshot is False, but it returned.")
    snapshot = env.snapshot()
    first_run = list(run(env, after, td))
    final_buffers = buffers(env)
    require_equal_roots(snapshot, env.restore(snapshot), "restore: needs the observation of the snapshot")
    require_equal_runs(first_run, run(env, after, env.restore(snapshot)), "restore: must continue as before")
    require_equal(final_buffers, buffers(env), "restore: needs to reach the same state")


def _check_compile(make: MakeEnv) -> None:
    env, compiled_env = make(), make()
    if env.host_stepped:
        return
    actions = sample_actions(env)
    sample_actions(compiled_env)
    try:
        compile(compiled_env, backend="aot_eager")
    except ValueError as error:
        raise AssertionError(f"compile: needs a step that is one graph, but got {error}") from None
    promise = "compile: needs the transitions and new episodes of eager mode"
    require_equal_runs(run(env, actions), run(compiled_env, actions), promise, 1e-6)
    require_equal(buffers(env), buffers(compiled_env), "compile: needs the buffers of eager mode", 1e-6)


# The contract of a transform, in addition.


def _check_action(make: Callable[..., TransformedEnv]) -> None:
    env = make()
    action = env.sample_action()
    before = action.clone()
    result = env.transforms.action(action)
    require(bool((action == before).all()), "action: needs to leave the agent's action unchanged. Return a new tensor.")
    spaces.check("action", "a result", env.env.single_action_space, result, NUM_ENVS, env.device)


@torch.no_grad()
def _check_masked_reset(make: Callable[..., TransformedEnv]) -> None:
    env = make()
    list(run(env, sample_actions(env)[:7]))
    transform = env.transforms
    persistent = set(transform.state_dict())
    env_buffers = {
        f"{prefix}.{name}"
        for prefix, module in transform.named_modules()
        if isinstance(module, BatchedModule)
        for name in module._env_buffer_names
    }
    zeros = spaces.zeros(env.env.single_observation_space, NUM_ENVS, env.device)
    every_other = torch.arange(NUM_ENVS, device=env.device) % 2 == 0
    for mask in (every_other, torch.zeros_like(every_other)):
        rows = RowMask(mask)
        observation = env.env._reset(RowMask.full(NUM_ENVS, env.device))["observation"]
        before = buffers(transform)
        results = []
        for other_rows in (observation, zeros):
            for name, buffer in transform.named_buffers():
                buffer.copy_(before[name])
            td = TensorDict({"observation": rows.where(observation, other_rows)}, batch_size=[NUM_ENVS])
            td = transform.reset(td, rows)
            results.append((TensorDict({"rows": td["observation"][mask]}, []).clone(), buffers(transform)))
        (initial, after), (other_initial, other_after) = results
        require_equal(after, other_after, "reset(td, mask): rows outside the mask must not count")
        require_equal(initial, other_initial, "reset(td, mask): rows outside the mask must not count")
        for name, value in after.items():
            per_env = name in env_buffers or (name not in persistent and value.dim() > 0 and len(value) == NUM_ENVS)
            if per_env or not mask.any():
                was, now = (TensorDict({name: td[name][~mask] if per_env else td[name]}, []) for td in (before, after))
                require_equal(was, now, "reset(td, mask): rows outside the mask must not change")


def _check_eval(make: Callable[..., TransformedEnv]) -> None:
    env = make().eval()
    before = TensorDict(env.transforms.state_dict(), []).clone()
    list(run(env, sample_actions(env)))
    require_equal(before, TensorDict(env.transforms.state_dict(), []), "eval(): needs to freeze the state_dict")


def _check_state_dict(make: Callable[..., TransformedEnv]) -> None:
    env, smaller_env = make(), make(num_envs=3)
    actions = sample_actions(env)
    list(run(env, actions))
    smaller_env.load_state_dict(env.state_dict())
    env.eval()
    smaller_env.eval()
    first_rows = ((transition[:3], td[:3]) for transition, td in run(env, actions))
    smaller_run = run(smaller_env, [action[:3] for action in actions])
    require_equal_runs(first_rows, smaller_run, "load_state_dict: needs to restore what was learned, for any num_envs", 1e-6)
