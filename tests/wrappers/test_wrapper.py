"""Wrapper: an env around an env."""

from __future__ import annotations

import pytest
from helpers import assert_same

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv, check_env


class HalfReward(tw.Wrapper):
    def _step(self, action):
        successor = self.env._step(action)
        return successor.set("reward", successor["reward"] / 2)


def test_wrapper_satisfies_the_contract_of_an_env():
    check_env(lambda **arguments: HalfReward(ScriptedEnv(**arguments)))


def test_wrapper_overriding_step_changes_the_transition():
    env = HalfReward(ScriptedEnv(1))
    transition, _ = env.step(env.reset().set("action", env.sample_action()))
    assert transition["next", "reward"].item() == 0.5


def test_wrapper_nested_has_gymnasiums_repr_and_unwrapped():
    env = HalfReward(tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1)))
    assert repr(env) == "<HalfReward<ClipReward(min_reward=-1, max_reward=1)<ScriptedEnv(num_envs=2, device=cpu)>>>"
    assert env.unwrapped is env.env.env and env.num_envs == 2


def test_wrapper_attributes_of_inner_layers_need_get_wrapper_attr():
    env = HalfReward(tw.TransformedEnv(ScriptedEnv(2, ending="both"), T.ClipReward(-1, 1)))
    assert env.get_wrapper_attr("ending") == "both" and env.has_wrapper_attr("transforms")
    assert not hasattr(env, "ending") and not env.has_wrapper_attr("gravity")
    with pytest.raises(AttributeError, match="needs a layer with the attribute 'gravity'"):
        env.get_wrapper_attr("gravity")


def test_wrapper_set_wrapper_attr_sets_the_layer_that_has_it():
    env = HalfReward(ScriptedEnv(2, ending="both"))
    assert env.set_wrapper_attr("ending", "truncated") and env.unwrapped.ending == "truncated"
    assert not env.set_wrapper_attr("gravity", 1, force=False)
    assert env.set_wrapper_attr("gravity", 1) and env.gravity == 1


def test_wrapper_does_not_change_what_is_sampled_or_drawn():
    bare, stacked = tw.make("CartPole-v1", 3), tw.TransformedEnv(HalfReward(tw.make("CartPole-v1", 3)), T.TimeLimit(99))
    assert (bare.reset(seed=5)["observation"] == stacked.reset(seed=5)["observation"]).all()
    assert (bare.sample_action() == stacked.sample_action()).all()


def test_wrapper_of_what_is_not_an_env_raises():
    with pytest.raises(TypeError, match=r"Wrapper needs a torchwrap\.Env first, but got object"):
        tw.Wrapper(object())


def test_wrapper_of_a_compiled_env_raises():
    env = tw.compile(ScriptedEnv(2), backend="eager")
    for wrap in (tw.Wrapper, lambda env: tw.TransformedEnv(env, T.TimeLimit(3))):
        with pytest.raises(ValueError, match=r"needs an env that is not compiled, but got .*: compile it last"):
            wrap(env)


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


@pytest.mark.parametrize("make", [lambda: NoOptions(tw.make("CartPole-v1", 2)), lambda: tw.Wrapper(ScriptedEnv(2))])
def test_wrapper_reset_options_that_no_layer_takes_raise_before_anything_changed(make):
    env = make()
    env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(ValueError, match="takes no options"):
        env.reset(seed=1, options={"low": 0.0})
    assert_same(env.snapshot(), before)
