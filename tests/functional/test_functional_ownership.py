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
    equal,
    variant,
)
from test_functional_info import Telling

from torchwrap import FunctionalEnv
from torchwrap.testing import check_env

CONTRACT = {
    "a field as the observation": BroadcastItself(),
    "a plain dict": Nested(),
    "vmap": Noisy(),
    "info": Telling(),
}


@pytest.mark.full
@pytest.mark.parametrize("func_env", CONTRACT.values(), ids=CONTRACT)
def test_env_keeps_the_contract(func_env):
    check_env(functools.partial(FunctionalEnv, func_env, max_episode_steps=4))


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
