"""The contract of an env, in both styles; returned tensors belong to the caller, and state and actions to the env."""

import functools

import pytest
import torch
from func_envs import (
    BroadcastItself,
    BroadcastWalk,
    Noisy,
    Plain,
    Walk,
    both_aliasing,
    equal,
    every_env,
    odd,
    play,
    some_actions,
)
from helpers import each_copy, params
from test_functional_info import ScalarTelling

from torchwrap import FunctionalEnv
from torchwrap.testing import check_env

CONTRACT = {
    "a field as the observation": functools.partial(
        FunctionalEnv, BroadcastItself(), max_episode_steps=7
    ),
    "a plain dict": functools.partial(FunctionalEnv, Plain(), max_episode_steps=7),
    "vmap": functools.partial(FunctionalEnv, Noisy(), max_episode_steps=7),
    "info": functools.partial(FunctionalEnv, ScalarTelling(), max_episode_steps=4),
}


@pytest.mark.parametrize("make", params(CONTRACT, quick=["a field as the observation"]))
def test_env_keeps_the_contract(make):
    check_env(make)


@each_copy
def test_copy_continues_like_the_env_and_shares_no_memory(replicate):
    env = FunctionalEnv(Noisy(), 4, max_episode_steps=9)
    actions = some_actions(env, 20)
    _, td = play(env, env.reset(seed=5), actions[:7])
    twin = replicate(env)
    assert equal(play(env, td.clone(), actions[7:])[0], play(twin, td.clone(), actions[7:])[0])
    assert not {buffer.data_ptr() for buffer in env.buffers()} & {
        buffer.data_ptr() for buffer in twin.buffers()
    }


@every_env
def test_writing_into_returned_tensors_does_not_change_the_env(func_env):
    env, same = (FunctionalEnv(func_env, 3, max_episode_steps=3) for _ in range(2))
    td, expected = env.reset(seed=0), same.reset(seed=0)
    for step, action in enumerate(some_actions(env, 10)):
        td.apply_(lambda leaf: leaf.fill_(77))
        if step % 4 == 2:
            mask = torch.tensor([False, True, False])
            td, expected = env.reset(mask=mask), same.reset(mask=mask)
            assert equal(td["observation"][mask], expected["observation"][mask])
            td.apply_(lambda leaf: leaf.fill_(77))
        transition, td = env.step(td.set("action", action.clone()))
        reference, expected = same.step(expected.set("action", action))
        assert equal(transition["next"], reference["next"])
        assert equal(td["observation"], expected["observation"])
        transition.apply_(lambda leaf: leaf.fill_(1))
    assert equal(env.snapshot()["buffers"], same.snapshot()["buffers"])


def test_action_changed_after_the_step_does_not_change_the_state():
    remembering = odd(
        BroadcastWalk,
        initial=lambda rng: {"last": torch.zeros(*rng.env.shape, 1)},
        transition=lambda state, action, rng: {"last": action},
        observation=lambda state, rng: state["last"].expand(-1, 2),
        reward=lambda state, action, next_state, rng: action[..., 0],
        terminal=lambda state, rng: state["last"][..., 0] > 5,
    )
    env, action = FunctionalEnv(remembering, 2), torch.ones(2, 1)
    transition, _ = env.step(env.reset(seed=0).set("action", action))
    action.fill_(9)
    assert env.state["last"].tolist() == [[1], [1]]
    assert transition["next", "reward"].tolist() == [[1], [1]]
    assert transition["next", "observation"].tolist() == [[1, 1]] * 2


@both_aliasing
def test_rewards_and_flags_that_are_fields_are_never_changed(func_env):
    env = FunctionalEnv(func_env, 2, max_episode_steps=2)
    td, kept = env.reset(seed=0), []
    for _ in range(5):
        prize = env.state["prize"].tolist()
        env.state["over"].zero_()
        transition, td = env.step(td.set("action", torch.zeros(2, 1)))
        kept.append((transition["next", "reward"], prize, transition["next", "terminated"]))
    env.state["over"].fill_(True)
    assert [reward.squeeze(-1).tolist() for reward, _, _ in kept] == [prize for _, prize, _ in kept]
    assert not any(terminated.any() for _, _, terminated in kept)


@pytest.mark.parametrize("base", [Walk, BroadcastWalk])
def test_tensors_that_functions_return_repeatedly_are_cloned(base):
    goal, functions = torch.zeros(3, 2), {"observation": lambda state, rng: goal[: len(rng.env)]}
    if base is Walk:  # one tensor for all rows, and at each call
        goal, functions = torch.zeros(2), {"observation": lambda state, rng: goal}
        functions["reward"] = lambda state, action, next_state, rng: torch.ones(())
        functions["terminal"] = lambda state, rng: torch.zeros((), dtype=torch.bool)
    env = FunctionalEnv(odd(base, **functions), 3)
    td = env.reset(seed=0)
    td["observation"].add_(5)
    transition, _ = env.step(td.set("action", env.sample_action()))
    following = transition["next"]
    for key in ("reward", "terminated", "observation"):
        row = following[key][1].clone()
        following[key][0] = 1
        assert (following[key][1] == row).all()
    assert (goal == 0).all() and following["observation"][1:].eq(0).all()
