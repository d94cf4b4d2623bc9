"""Wrapper: an env around an env."""

import gymnasium
import pytest
from helpers import assert_same

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


class HalfReward(tw.Wrapper):
    def _step(self, action):
        successor = self.env._step(action)
        return successor.set("reward", successor["reward"] / 2)


class Level(ScriptedEnv):
    level = 1


def clipped():
    return HalfReward(
        tw.TransformedEnv(
            Level(2, ending="both"),
            T.ClipReward(-1, 1),
        )
    )


def test_wrapper_nested_has_gymnasiums_repr_and_unwrapped():
    env = clipped()
    clip = "ClipReward(min_reward=-1, max_reward=1)"
    assert repr(env) == f"<HalfReward<{clip}<Level(num_envs=2, device=cpu)>>>"
    assert env.unwrapped is env.env.env and env.num_envs == 2


def test_wrapper_attributes_of_inner_layers_need_get_wrapper_attr():
    env = clipped()
    assert env.get_wrapper_attr("ending") == "both" and env.has_wrapper_attr("transforms")
    assert not hasattr(env, "ending") and not env.has_wrapper_attr("gravity")
    with pytest.raises(AttributeError, match="gravity"):
        env.get_wrapper_attr("gravity")


def test_wrapper_set_wrapper_attr_sets_the_layer_that_has_it():
    env = clipped()
    assert env.set_wrapper_attr("level", 2)
    assert env.unwrapped.level == 2 and not hasattr(env, "level")
    assert not env.set_wrapper_attr("gravity", 1, force=False)


@pytest.mark.parametrize("name", ["gravity", "reset", "nope"])
def test_attributes_of_functions_are_those_of_gymnasiums_env(name):
    single = gymnasium.make("CartPole-v1").unwrapped
    env = tw.make("CartPole-v1", 2)
    assert env.get_wrapper_attr("gravity") == single.get_wrapper_attr("gravity")
    assert env.has_wrapper_attr(name) == single.has_wrapper_attr(name)


class Counted(T.Transform):
    """A transform with an attribute of its own, and one that every env has."""

    factor = 1
    num_envs = "not the number of envs"


def test_wrapper_attributes_of_transforms_are_found_outermost_first():
    inner = Counted()
    inner.factor = 2
    inner.depth = "inner"
    outer = Counted()
    outer.factor = 3
    below = tw.TransformedEnv(
        Level(2),
        inner,
        T.TimeLimit(9),
    )
    env = HalfReward(
        tw.TransformedEnv(
            below,
            Counted(),
            outer,
            T.ClipReward(-1, 1),
        )
    )
    assert env.get_wrapper_attr("factor") == 3 and env.get_wrapper_attr("depth") == "inner"
    assert env.get_wrapper_attr("max_episode_steps") == 9 and env.has_wrapper_attr("max_reward")
    assert not hasattr(env, "factor") and not env.has_wrapper_attr("gravity")
    assert env.env.get_wrapper_attr("num_envs") == 2  # the env's, not the transform's
    assert env.set_wrapper_attr("factor", 4) and (outer.factor, inner.factor) == (4, 2)
    assert env.set_wrapper_attr("depth", "changed") and inner.depth == "changed"
    assert env.env.get_wrapper_attr("factor") == 4 and below.get_wrapper_attr("factor") == 2


def test_set_wrapper_attr_of_a_transforms_argument_raises_in_its_name():
    env = clipped()
    with pytest.raises(AttributeError, match="ClipReward: max_reward"):
        env.set_wrapper_attr("max_reward", 3)
    assert env.get_wrapper_attr("max_reward") == 1


HOOKS = {"step": "_step", "reset": "_reset", "step_without_reset": "_step"}


@pytest.mark.parametrize("verb, hook", HOOKS.items())
@pytest.mark.parametrize(
    "base",
    [tw.Env, tw.FunctionalEnv, HalfReward],
)
def test_class_that_overrides_a_verb_is_refused_with_the_hook_to_override(base, verb, hook):
    def override(self, *arguments):
        pass

    mixin = type("Mixin", (), {verb: override})
    for bases, body in (
        ((base,), {verb: override}),
        ((mixin, base), {}),
    ):
        with pytest.raises(TypeError, match=rf"Bypassed: {verb}.*{hook}\("):
            type("Bypassed", bases, body)
    assert issubclass(
        type("Hooked", (base,), {hook: override}),
        base,
    )


def test_wrapper_of_no_env_raises():
    with pytest.raises(TypeError, match="env"):
        tw.Wrapper(object())


class NoOptions(tw.Wrapper):
    _check_options = tw.Env._check_options


UNUSED = {
    "layer": lambda: NoOptions(tw.make("CartPole-v1", 2)),
    "env": lambda: tw.Wrapper(ScriptedEnv(2)),
}


@pytest.mark.parametrize("make", UNUSED.values(), ids=UNUSED)
def test_reset_options_that_no_layer_takes_raise_before_anything_changed(make):
    env = make()
    env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(ValueError, match="options"):
        env.reset(seed=1, options={"low": 0.0})
    assert_same(env.snapshot(), before)
