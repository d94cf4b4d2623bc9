"""Wrapper: an env around an env."""

import itertools

import gymnasium
import pytest
from helpers import assert_same

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv, check_env


class HalfReward(tw.Wrapper):
    def _step(self, action):
        successor = self.env._step(action)
        return successor.set("reward", successor["reward"] / 2)


@pytest.mark.full
def test_wrapper_satisfies_the_contract_of_an_env():
    check_env(lambda **arguments: HalfReward(ScriptedEnv(**arguments)))


def test_wrapper_nested_has_gymnasiums_repr_and_unwrapped():
    env = HalfReward(tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1)))
    assert (
        repr(env)
        == "<HalfReward<ClipReward(min_reward=-1, max_reward=1)<ScriptedEnv(num_envs=2, device=cpu)>>>"
    )
    assert env.unwrapped is env.env.env and env.num_envs == 2


def test_wrapper_attributes_of_inner_layers_need_get_wrapper_attr():
    env = HalfReward(tw.TransformedEnv(ScriptedEnv(2, ending="both"), T.ClipReward(-1, 1)))
    assert env.get_wrapper_attr("ending") == "both" and env.has_wrapper_attr("transforms")
    assert not hasattr(env, "ending") and not env.has_wrapper_attr("gravity")
    with pytest.raises(AttributeError, match="has no layer with the attribute 'gravity'"):
        env.get_wrapper_attr("gravity")


class Level(ScriptedEnv):
    level = 1


def test_wrapper_set_wrapper_attr_sets_the_layer_that_has_it():
    env = HalfReward(tw.TransformedEnv(Level(2), T.ClipReward(-1, 1)))
    assert (
        env.set_wrapper_attr("level", 2) and env.unwrapped.level == 2 and not hasattr(env, "level")
    )
    assert not env.set_wrapper_attr("gravity", 1, force=False)
    assert env.set_wrapper_attr("gravity", 1) and env.gravity == 1


def test_attributes_of_an_env_without_wrappers_and_of_its_functions_are_gymnasiums():
    single, env = gymnasium.make("CartPole-v1").unwrapped, tw.make("CartPole-v1", 2)
    assert env.get_wrapper_attr("gravity") == single.get_wrapper_attr("gravity")
    for name in ("gravity", "reset", "nope"):
        assert env.has_wrapper_attr(name) == single.has_wrapper_attr(
            name
        ) and not env.set_wrapper_attr("nope", 1, force=False)
    for change in (lambda: env.set_wrapper_attr("gravity", 3), lambda: setattr(env, "gravity", 3)):
        with pytest.raises(
            AttributeError, match=r"FunctionalEnv\.gravity is fixed at construction, but got 3"
        ):
            change()  # it would have no effect in a compiled step
    assert (
        env.set_wrapper_attr("mark", 1)
        and single.set_wrapper_attr("mark", 1)
        and env.mark == single.mark
    )


class Counted(T.Transform):
    """A transform with an attribute of its own, and one that every env has."""

    factor, num_envs = 1, "not the number of envs"


def test_wrapper_attributes_of_transforms_are_found_outermost_first():
    inner, outer = Counted(), Counted()
    inner.factor, inner.depth, outer.factor = 2, "inner", 3
    below = tw.TransformedEnv(Level(2), inner, T.TimeLimit(9))
    env = HalfReward(tw.TransformedEnv(below, Counted(), outer, T.ClipReward(-1, 1)))
    assert env.get_wrapper_attr("factor") == 3 and env.get_wrapper_attr("depth") == "inner"
    assert env.get_wrapper_attr("max_episode_steps") == 9 and env.has_wrapper_attr("max_reward")
    assert not hasattr(env, "factor") and not env.has_wrapper_attr("gravity")
    assert env.env.get_wrapper_attr("num_envs") == 2  # the env's, whatever its transforms have
    assert env.set_wrapper_attr("factor", 4) and (outer.factor, inner.factor) == (4, 2)
    assert env.set_wrapper_attr("depth", "changed") and inner.depth == "changed"
    assert env.env.get_wrapper_attr("factor") == 4 and env.env.env.get_wrapper_attr("factor") == 2


def test_wrapper_set_wrapper_attr_of_a_constructor_argument_raises_in_the_name_of_its_owner():
    env = HalfReward(tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1)))
    for name, owner in (
        ("max_reward", "ClipReward"),
        ("ending", "ScriptedEnv"),
        ("env", "HalfReward"),
    ):
        before = env.get_wrapper_attr(name)
        with pytest.raises(
            AttributeError, match=rf"{owner}\.{name} is fixed at construction, but got 3"
        ):
            env.set_wrapper_attr(name, 3)
        assert env.get_wrapper_attr(name) is before


def test_class_that_overrides_step_or_reset_is_refused_with_the_hook_to_override():
    hooks = {
        "step": r"_step\(action\)",
        "reset": r"_reset\(mask, options=None\)",
        "step_without_reset": r"_step\(action\)",
    }
    for base, (verb, hook) in itertools.product(
        (tw.Env, tw.FunctionalEnv, HalfReward), hooks.items()
    ):
        mixin = type("Mixin", (), {verb: lambda self, *arguments: None})
        for bases, body in (((base,), dict(vars(mixin))), ((mixin, base), {})):
            with pytest.raises(
                TypeError, match=rf"Bypassed overrides {verb}\(\), .*: override {hook} instead"
            ):
                type("Bypassed", bases, {key: value for key, value in body.items() if key == verb})
        assert issubclass(
            type("Hooked", (base,), {hook.partition("\\")[0]: lambda self, *arguments: None}), base
        )


def test_wrapper_of_no_env_raises():
    with pytest.raises(
        TypeError, match=r"Wrapper needs an Env as its first argument, but got object"
    ):
        tw.Wrapper(object())


class RecordOptions(tw.Wrapper):
    def _check_options(self, options):
        pass

    def _reset(self, mask, options=None):
        self.options = options
        return self.env._reset(mask)


def test_wrapper_reset_options_reach_the_layer_that_takes_them():
    env = tw.TransformedEnv(tw.Wrapper(tw.make("CartPole-v1", 2)), T.TimeLimit(9))
    assert (env.reset(options={"low": 0.0, "high": 0.0})["observation"] == 0).all()
    env = tw.TransformedEnv(RecordOptions(ScriptedEnv(2)), T.TimeLimit(9))
    env.reset(options={"level": 3})
    assert env.env.options == {"level": 3}


class NoOptions(tw.Wrapper):
    _check_options = tw.Env._check_options

    def _reset(self, mask, options=None):
        return self.env._reset(mask)


@pytest.mark.parametrize(
    "make", [lambda: NoOptions(tw.make("CartPole-v1", 2)), lambda: tw.Wrapper(ScriptedEnv(2))]
)
def test_wrapper_reset_options_that_no_layer_takes_raise_before_anything_changed(make):
    env = make()
    env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(ValueError, match="takes no options"):
        env.reset(seed=1, options={"low": 0.0})
    assert_same(env.snapshot(), before)
