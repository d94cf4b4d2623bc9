"""Returned tensors belong to the caller, and the simulator gets copies of actions."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from single_envs import (
    BOX,
    NEVER,
    SPACES,
    Scripted,
    assert_equal_trees,
    every_kind,
    sample_and_step,
    scripted,
    to_tree,
)

import torchwrap as tw


class Overwriting(Scripted):
    """Writes into its action."""

    def step(self, action):
        result = super().step(action)
        action[...] = 7
        return result


gymnasium.register("TorchwrapTest/Overwriting-v0", entry_point=Overwriting)


@every_kind
def test_images_stay_uint8(bridge, kind, mode):
    env = bridge(scripted(2, lengths=(1,), space=SPACES["image"]), kind, mode)
    transition, td = sample_and_step(env, env.reset(seed=0))
    assert transition["next", "observation"].dtype == td["observation"].dtype == torch.uint8


@pytest.mark.parametrize("space", [BOX, SPACES["nested"], SPACES["image"]], ids=["Box", "nested", "image"])
@pytest.mark.parametrize("copy", [True, False])
@every_kind
def test_returned_tensors_are_never_changed(bridge, kind, mode, copy, space):
    env = bridge(scripted(3, lengths=[(2,), (3,), NEVER], space=space), kind, mode, copy=copy, info_keys=("elapsed",))
    td, kept = env.reset(seed=0), []
    for _ in range(6):
        kept.append((td["observation"], td["observation"].clone()))
        transition, td = sample_and_step(env, td)
        kept.append((transition["next"], transition["next"].clone()))
    env.reset()
    for returned, copied in kept:
        assert_equal_trees(to_tree(returned), to_tree(copied))


@every_kind
def test_writing_into_returned_tensors_does_not_change_the_env(bridge, kind, mode):
    makers = scripted(3, lengths=[(2,), (3,), NEVER])
    env, untouched = bridge(makers, kind, mode, copy=False), bridge(makers, kind, mode, copy=False)
    mask = torch.tensor([False, True, False])
    td, expected = env.reset(seed=0), untouched.reset(seed=0)
    for step in range(8):
        td.apply_(lambda leaf: leaf.fill_(9))
        if step in (0, 3):
            td, expected = env.reset(mask=mask), untouched.reset(mask=mask)
            assert torch.equal(td["observation"][mask], expected["observation"][mask])
            assert (td["observation"][~mask] == 9).all()  # as the caller left it
            td.apply_(lambda leaf: leaf.fill_(9))
        transition, td = sample_and_step(env, td)
        reference, expected = sample_and_step(untouched, expected)
        assert_equal_trees(to_tree(transition), {**to_tree(reference), "observation": np.full((3, 3), 9, np.float32)})
        assert torch.equal(td["observation"], expected["observation"])
        transition.apply_(lambda leaf: leaf.fill_(1))
    ours, theirs = dict(env.named_buffers()), dict(untouched.named_buffers())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
def test_env_that_writes_into_its_action_does_not_change_the_callers(vectorization_mode):
    env = tw.make("TorchwrapTest/Overwriting-v0", 2, backend="gymnasium", vectorization_mode=vectorization_mode)
    try:
        transition, _ = env.step(env.reset(seed=0).set("action", torch.zeros(2, 2)))
        assert torch.equal(transition["action"], torch.zeros(2, 2))
    finally:
        env.close()


def test_env_that_keeps_its_action_is_not_changed_by_the_caller(bridge):
    env = bridge(scripted(2, lengths=NEVER))
    action = torch.zeros(2, 2)
    env.step(env.reset(seed=0).set("action", action))
    action.fill_(1)
    assert all((kept == 0).all() for kept in env.vector_env.get_attr("action"))


def test_action_that_requires_grad_is_accepted(bridge):
    makers = scripted(2, lengths=(3,))
    env, same = bridge(makers), bridge(makers)
    action = torch.rand(2, 2)
    first, _ = env.step(env.reset(seed=0).set("action", action.clone().requires_grad_()))
    second, _ = same.step(same.reset(seed=0).set("action", action))
    assert torch.equal(first["next", "reward"], second["next", "reward"])


def test_steps_leave_the_global_generators_unchanged(bridge):
    env = bridge(scripted(2, lengths=(2,)))
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    _, td = sample_and_step(env, env.reset(seed=0))
    sample_and_step(env, td)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()
