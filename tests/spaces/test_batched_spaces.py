"""The batched spaces of envs have a generator, as those of Gymnasium's vector envs."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import each_copy

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

KINDS = ["action_space", "observation_space"]
each_kind = pytest.mark.parametrize("kind", KINDS)


def samples(space, count=5):
    return [space.sample().tolist() for _ in range(count)]


def native():
    return tw.make("Pendulum-v1", 3)


def gymnasiums():
    return tw.make("Pendulum-v1", 3, backend="gymnasium")


def wrapper():
    return tw.Wrapper(native())


def transformed():
    return tw.TransformedEnv(native(), T.NormalizeObservation(), T.TimeLimit(9))


MAKERS = [native, gymnasiums, wrapper, transformed]
each_maker = pytest.mark.parametrize("make", MAKERS)


@each_kind
@each_maker
def test_seeded_samples_are_those_of_gymnasiums_vector_env(make, kind):
    theirs = getattr(gymnasium.make_vec("Pendulum-v1", 3), kind)
    with make() as env:
        if make is transformed and kind == "observation_space":
            theirs = spaces.Box(-np.inf, np.inf, (3, 3))
        assert getattr(env, kind).seed(7) == theirs.seed(7)
        assert samples(getattr(env, kind)) == samples(theirs)


def test_space_that_no_layer_changes_is_one_for_the_whole_stack():
    # As in Gymnasium, so that a seed given before wrapping counts.
    env = transformed()
    assert env.action_space is env.unwrapped.action_space
    assert env.observation_space is not env.unwrapped.observation_space


@each_copy
def test_copy_of_an_env_continues_the_samples(replicate):
    env = tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1))
    env.action_space.seed(3)
    first = samples(env.action_space)
    expected = samples(replicate(env).action_space)
    assert samples(env.action_space) == expected != first


@pytest.mark.parametrize("kind", ["single_action_space", "single_observation_space"])
def test_two_envs_of_one_class_have_their_own_spaces(kind):
    one, other = [getattr(tw.make("MountainCar-v0", 2), kind) for _ in range(2)]
    theirs = getattr(gymnasium.make_vec("MountainCar-v0", 2), kind)
    for space in (theirs, one):
        space.seed(5)
    other.seed(6)
    assert samples(one) == samples(theirs)
