"""Compilation changes no state, and outputs of compiled envs and collectors are the caller's."""

import functools

import pytest
import torch
from catalogue import NUM_ENVS, stack
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from helpers import (
    AOT,
    INDUCTOR,
    Held,
    after,
    assert_no_overlap,
    assert_plays_the_same,
    assert_same,
    buffers,
    leaves,
    mostly_full,
    play,
    steps,
)

import torchwrap as tw
from torchwrap import transforms as T

full = pytest.mark.full
small = functools.partial(stack, "Compose of two")


def compiled(target):
    return tw.compile(target, backend="aot_eager")


# State.


@full
@pytest.mark.parametrize("collects", [False, True], ids=["env", "collector"])
def test_compile_in_mid_episode_leaves_state_unchanged(collects):
    env = small()
    eager = small()
    td, eager_td = (after(each, 7) for each in (env, eager))
    before = env.snapshot()
    generator = torch.get_rng_state()
    target = tw.Collector(env, None, 9) if collects else env
    assert compiled(target) is target
    assert_same(env.snapshot(), before)
    assert (torch.get_rng_state() == generator).all()
    if collects:
        given, _ = target(td)
        expected, _ = tw.rollout(eager, None, 9, eager_td)
    else:
        given, _ = play(env, 30, td)
        expected, _ = play(eager, 30, eager_td)
    assert_same(given, expected, AOT)
    assert_same(buffers(env), buffers(eager), AOT)


def test_snapshots_pass_between_eager_and_compiled_bit_for_bit():
    env = compiled(small())
    eager = small()
    after(eager, 13, seed=4)
    snapshot = eager.snapshot()
    once, _ = play(env, 40, env.restore(snapshot))
    back = env.snapshot()
    assert_same(once, play(env, 40, env.restore(snapshot))[0])
    assert_same(once, play(eager, 40, eager.restore(snapshot))[0], AOT)
    assert_same(eager.restore(back), env.restore(back))
    assert_same(eager.snapshot(), back)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_state_dict_loads_into_a_compiled_env(assign):
    env = compiled(small())
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


@pytest.mark.parametrize("ending", mostly_full(["terminated", "both"], "terminated"))
def test_outputs_of_a_step_do_not_overlap(ending):
    # A compiler can know that an env never truncates, so that done equals terminated.
    env = compiled(stack("Compose of seven", ending=ending))
    transition, td = one_step(env)
    tensors = [leaf for leaf in leaves(transition, td, buffers(env)) if leaf.numel()]
    assert len({leaf.data_ptr() for leaf in tensors}) == len(tensors)
    assert_no_overlap(transition.exclude("observation"), td)


def assert_belong_to_caller(eager, env, tolerance):
    expected, _ = play(eager, 50, eager.reset(seed=0))
    held = Held()
    for step, (transition, td) in enumerate(steps(env, 50, env.reset(seed=0))):
        assert_same(transition["next"], expected["transition", "next"][step], tolerance)
        for leaf in leaves(transition["next"], td):
            leaf.copy_(torch.full_like(leaf, step % 2))
        held.add(transition["next"], td)
    held.assert_unchanged()


def test_outputs_of_a_step_belong_to_the_caller():
    assert_belong_to_caller(small(), compiled(small()), AOT)


@full
def test_outputs_of_inductor_belong_to_the_caller(pair, inductor_cartpole):
    assert_belong_to_caller(*pair, INDUCTOR)
    for env in (pair[1], inductor_cartpole):
        transition, td = one_step(env)
        assert_no_overlap(transition.exclude("observation"), td)


@full
def test_outputs_of_the_smallest_inductor_graphs_stay_unchanged():
    # No operator in them is external, so Inductor may keep all results in memory that it owns.
    env = tw.compile(tw.make("CartPole-v1", NUM_ENVS))
    stacked = tw.TransformedEnv(tw.make("CartPole-v1", NUM_ENVS), T.FrameStackObservation(2))
    collect = tw.compile(tw.Collector(stacked, None, 3))
    following = None
    held = Held()
    for transition, td in steps(env, 9, env.reset(seed=0)):
        data, following = collect(following)
        held.add(transition["next"], td, data, following)
    held.assert_unchanged()


def test_data_of_a_collector_belong_to_the_caller():
    make = functools.partial(stack, "FrameStackObservation")
    collect, eager = (tw.Collector(make(), None, 5) for _ in range(2))
    compiled(collect)
    td, eager_td = (each.env.reset(seed=0) for each in (collect, eager))
    held = Held()
    for _ in range(6):
        data, td = collect(td)
        expected, eager_td = eager(eager_td)
        assert_same(data, expected, AOT)
        assert_no_overlap(data)
        held.add(data)
    held.assert_unchanged()


class OneNumber(FuncEnv):
    """An env whose observation is a view of its state."""

    observation_space = spaces.Box(-9, 9, (1,))
    action_space = spaces.Box(-1, 1, (1,))

    def initial(self, rng, params=None):
        return {"x": tw.random.uniform(rng, shape=())}

    def transition(self, state, action, rng, params=None):
        return {"x": state["x"] + action[0]}

    def observation(self, state, rng, params=None):
        return state["x"].unsqueeze(-1)

    def reward(self, state, action, next_state, rng, params=None):
        return next_state["x"]

    def terminal(self, state, rng, params=None):
        return state["x"].abs() > 1


@pytest.mark.long
@full
def test_observations_that_are_views_of_the_state_survive_a_reset():
    # Inductor drops a copy of a copy, although both are results.
    env, eager = (tw.FunctionalEnv(OneNumber(), 4096, max_episode_steps=3) for _ in range(2))
    tw.compile(env)
    assert_plays_the_same(eager, env, 4, INDUCTOR)
    transition, td = env.step_without_reset(env.sample_action())
    assert_no_overlap(transition, td)
