"""Compilation changes no state, and outputs of compiled envs and collectors are the caller's."""

import functools

import pytest
import torch
from catalogue import NUM_ENVS, stack
from helpers import (
    AOT,
    Held,
    after,
    assert_no_overlap,
    assert_plays_the_same,
    assert_same,
    buffers,
    leaves,
    play,
    steps,
)

import torchwrap as tw
from torchwrap import transforms as T

full = pytest.mark.full
small = functools.partial(stack, "Compose of two")


def compiled(target):
    return tw.compile(target, backend="aot_eager")


@functools.cache
def compiled_small():
    return compiled(small())


@pytest.fixture
def traced():
    """An env that is compiled once, in the state after construction."""
    env = compiled_small()
    for name, buffer in small().named_buffers():
        env.get_buffer(name).copy_(buffer)
    return env.train()


# State.


@full
def test_collector_compiled_in_mid_episode_goes_on_as_in_eager_mode():
    env = small()
    eager = small()
    for each in (env, eager):
        after(each, 7)
    before = env.snapshot()
    generator = torch.get_rng_state()
    collect = compiled(tw.Collector(env, None, 9))
    assert_same(env.snapshot(), before)
    assert (torch.get_rng_state() == generator).all()
    given = collect()
    expected = tw.rollout(eager, None, 9)
    assert_same(given, expected, AOT)
    assert_same(buffers(env), buffers(eager), AOT)


@pytest.mark.full
def test_snapshots_pass_between_eager_and_compiled_bit_for_bit(traced):
    env = traced
    eager = small()
    after(eager, 13, seed=4)
    snapshot = eager.snapshot()
    once, _ = play(env, 40, env.restore(snapshot))
    back = env.snapshot()
    assert_same(once, play(env, 40, env.restore(snapshot))[0])
    assert_same(once, play(eager, 40, eager.restore(snapshot))[0], AOT)
    assert_same(eager.restore(back), env.restore(back))
    assert_same(eager.snapshot(), back)


@pytest.mark.parametrize("assign", [False, pytest.param(True, marks=full)])
def test_state_dict_loads_into_a_compiled_env(traced, assign):
    env = compiled(small()) if assign else traced
    eager = small()
    teacher = small(episode_lengths=9)
    after(teacher, 30)
    count = teacher.transforms[0].statistics.count.clone()
    for each in (env, eager):
        learned = {name: value.clone() for name, value in teacher.state_dict().items()}
        each.load_state_dict(learned, assign=assign)
    assert_plays_the_same(eager, env.to("cpu"), 20, AOT)
    assert (env.transforms[0].statistics.count > count).all()


# Outputs.


def one_step(env):
    return env.step(env.reset().set("action", env.sample_action()))


@full
def test_outputs_of_a_step_do_not_overlap():
    # A compiler can know that an env never truncates, so that done equals terminated.
    env = compiled(small(ending="terminated"))
    transition, td = one_step(env)
    tensors = [leaf for leaf in leaves(transition, td, buffers(env)) if leaf.numel()]
    assert len({leaf.data_ptr() for leaf in tensors}) == len(tensors)
    assert_no_overlap(transition.exclude("observation"), td)


def test_outputs_of_a_step_belong_to_the_caller(traced):
    eager = small()
    expected, _ = play(eager, 50, eager.reset(seed=0))
    held = Held()
    for step, (transition, td) in enumerate(steps(traced, 50, traced.reset(seed=0))):
        assert_same(transition["next"], expected["transition", "next"][step], AOT)
        for leaf in leaves(transition["next"], td):
            leaf.copy_(torch.full_like(leaf, step % 2))
        held.add(transition["next"], td)
    held.assert_unchanged()


@full
def test_outputs_of_the_smallest_inductor_graphs_stay_unchanged():
    # No operator in them is external, so Inductor may keep all results in memory that it owns.
    env = tw.compile(tw.make("CartPole-v1", NUM_ENVS))
    stacked = tw.TransformedEnv(tw.make("CartPole-v1", NUM_ENVS), T.FrameStackObservation(2))
    collect = tw.compile(tw.Collector(stacked, None, 3))
    held = Held()
    for transition, td in steps(env, 9, env.reset(seed=0)):
        data = collect()
        held.add(transition["next"], td, data, stacked.root)
    held.assert_unchanged()


@pytest.mark.full
def test_data_of_a_collector_belong_to_the_caller():
    make = functools.partial(stack, "FrameStackObservation")
    collect, eager = (tw.Collector(make(), None, 5) for _ in range(2))
    tw.compile(collect, backend="eager")
    for each in (collect, eager):
        each.env.reset(seed=0)
    held = Held()
    for _ in range(6):
        data = collect()
        expected = eager()
        assert_same(data, expected, AOT)
        assert_no_overlap(data)
        held.add(data)
    held.assert_unchanged()
