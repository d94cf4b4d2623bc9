"""The contract; returned tensors belong to the caller, and state and actions to the env."""

import functools

import pytest
import torch
from func_envs import (
    BroadcastItself,
    BroadcastWalk,
    Nested,
    Noisy,
    Walk,
    both_aliasing,
    equal,
    one_step,
    variant,
)
from test_functional_info import ScalarTelling

from torchwrap import FunctionalEnv
from torchwrap.testing import check_env

CONTRACT = {
    "a field as the observation": BroadcastItself(),
    "a plain dict": Nested(),
    "vmap": Noisy(),
    "info": ScalarTelling(),
}


@pytest.mark.full
@pytest.mark.parametrize("func_env", CONTRACT.values(), ids=CONTRACT)
def test_env_keeps_the_contract(func_env):
    check_env(functools.partial(FunctionalEnv, func_env, max_episode_steps=4))


def test_action_changed_after_the_step_does_not_change_the_state():
    remembering = variant(
        BroadcastWalk,
        initial=lambda rng: {"last": torch.zeros(*rng.env.shape, 1)},
        transition=lambda state, action, rng: {"last": action},
        observation=lambda state, rng: state["last"].expand(-1, 2),
        reward=lambda state, action, next_state, rng: action[..., 0],
        terminal=lambda state, rng: state["last"][..., 0] > 5,
    )
    env = FunctionalEnv(remembering, 2)
    action = torch.ones(2, 1)
    successor = one_step(env, action)
    action.fill_(9)
    assert env.state["last"].tolist() == [[1], [1]]
    assert successor["reward"].tolist() == [[1], [1]]
    assert successor["observation"].tolist() == [
        [1, 1],
        [1, 1],
    ]


@both_aliasing
def test_rewards_and_flags_that_are_fields_are_never_changed(func_env):
    env = FunctionalEnv(func_env, 2, max_episode_steps=2)
    td = env.reset(seed=0)
    seen = []
    for _ in range(5):
        prize = env.state["prize"].tolist()
        env.state["over"].zero_()
        transition, td = env.step(td.set("action", torch.zeros(2, 1)))
        seen.append((transition["next"], prize))
    env.state["over"].fill_(True)
    for successor, prize in seen:
        assert successor["reward"].squeeze(-1).tolist() == prize
        assert not successor["terminated"].any()


GOAL = torch.zeros(3, 2)
REPEATED = {
    "vmap": variant(
        Walk,
        observation=lambda state, rng: GOAL[0],
        reward=lambda state, action, next_state, rng: torch.ones(()),
        terminal=lambda state, rng: torch.zeros((), dtype=torch.bool),
    ),
    "broadcast": variant(BroadcastWalk, observation=lambda state, rng: GOAL[: len(rng.env)]),
}


@pytest.mark.parametrize("func_env", REPEATED.values(), ids=REPEATED)
def test_tensors_that_functions_return_repeatedly_are_cloned(func_env):
    env = FunctionalEnv(func_env, 3)
    td = env.reset(seed=0)
    td["observation"].add_(5)
    transition, _ = env.step(td.set("action", env.sample_action()))
    for key in ("reward", "terminated", "observation"):
        values = transition["next", key]
        row = values[1].clone()
        values[0] = 1
        assert equal(values[1], row)
    assert equal(GOAL, torch.zeros(3, 2))
    assert equal(transition["next", "observation"][1:], torch.zeros(2, 2))
