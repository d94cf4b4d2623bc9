"""A compiled env equals the same env in eager mode, which other tests compare with oracles."""

import copy

import pytest
import torch
from catalogue import (
    NUM_ENVS,
    cartpole,
    gymnasium_cartpole,
    seven,
    stack,
)
from helpers import (
    AOT,
    INDUCTOR,
    assert_no_overlap,
    assert_plays_the_same,
    params,
)

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

full = pytest.mark.full


def compiled(env):
    return tw.compile(env, backend="aot_eager")


def assert_staggered(done):
    """Every env ends, and at different times."""
    assert done.any(0).all()
    assert not done.all(1).all()


# Inductor.


def small():
    return tw.TransformedEnv(
        ScriptedEnv(NUM_ENVS, (3,)), T.ClipAction(), T.FrameStackObservation(2)
    )


THROUGH_INDUCTOR = {
    "small": small,
    "Compose of seven": lambda: stack("Compose of seven"),
    "CartPole": cartpole,
}


@pytest.mark.parametrize("make", params(THROUGH_INDUCTOR, quick=["small"]))
def test_env_through_inductor_matches_eager(make):
    following = assert_plays_the_same(make(), tw.compile(make()), 300, INDUCTOR)
    assert_staggered(following["done"])
    assert following["terminated"].any()
    assert following["truncated"].any()


# Graphs.


@pytest.mark.full
def test_each_mode_takes_one_graph_for_steps_resets_and_states(graphs):
    env = tw.compile(stack("Compose of two"), backend="counting")
    eager = stack("Compose of two")
    for mode, number in ((True, 1), (False, 2), (True, 2)):
        assert_plays_the_same(eager.train(mode), env.train(mode), 12, AOT)
        for each in (env, eager):
            each.reset(mask=torch.arange(NUM_ENVS) < 2)
            each.restore(each.snapshot())
            each.load_state_dict(each.state_dict())
        assert len(graphs) == number


# Envs that a simulator on the host steps.


def half_cheetah():
    info_keys = ["x_position", "x_velocity"]
    env = tw.make("HalfCheetah-v5", 3, max_episode_steps=20, info_keys=info_keys)
    return tw.TransformedEnv(env, seven())


SIMULATORS = {
    "cartpole": gymnasium_cartpole,
    "processes": lambda: gymnasium_cartpole(2, "async"),
    "mujoco": half_cheetah,
}


@full
@pytest.mark.parametrize("make", SIMULATORS.values(), ids=SIMULATORS)
def test_compiled_transforms_over_a_simulator_match_eager(make, graphs):
    with make() as eager, tw.compile(make(), backend="counting") as env:
        assert assert_plays_the_same(eager, env, 60, AOT)["done"].any()
        assert len(graphs) <= 3  # a step, a reset, and one more for info
        assert_plays_the_same(eager.eval(), env.eval(), 10, AOT)


FEW = {"none": (), "no buffers": (T.ClipReward(-0.5, 0.5),)}


@pytest.mark.parametrize("transforms", FEW.values(), ids=FEW)
def test_few_transforms_over_a_simulator_match_eager_and_outputs_do_not_overlap(transforms):
    eager, env = (
        tw.TransformedEnv(
            tw.make("CartPole-v1", 4, backend="gymnasium"), *copy.deepcopy(transforms)
        )
        for _ in range(2)
    )
    assert_plays_the_same(eager, compiled(env), 40, AOT)
    transition, td = env.step(env.reset().set("action", env.sample_action()))
    assert_no_overlap(transition.exclude("observation"), td)


def two_layers():
    env = tw.make("CartPole-v1", 3, backend="gymnasium")
    inner = tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.NormalizeReward())
    return tw.TransformedEnv(tw.Wrapper(inner), T.NormalizeObservation(), T.TimeLimit(11))


@full
def test_every_layer_over_a_simulator_is_compiled(graphs):
    eager = two_layers()
    env = tw.compile(two_layers(), backend="counting")
    assert_plays_the_same(eager, env, 1, AOT)
    number = len(graphs)  # the outer layer learns at the first step which keys the inner one adds
    assert_plays_the_same(eager, env, 100, AOT)
    assert len(graphs) == number <= 5
