from __future__ import annotations

import copy
import pickle

import pytest
import torch

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv, check_env


class HalfReward(tw.Wrapper):
    def _step(self, td):
        successor = self.env._step(td)
        return successor.set("reward", successor["reward"] / 2)


def test_a_wrapper_is_an_env():
    check_env(lambda **arguments: HalfReward(ScriptedEnv(**arguments)))


def test_a_wrapper_may_change_what_the_env_does():
    env = HalfReward(ScriptedEnv(1))
    transition, _ = env.step(env.reset().set("action", env.sample_action()))
    assert transition["next", "reward"].item() == 0.5


def test_wrappers_nest_as_gymnasiums_do():
    env = HalfReward(tw.TransformedEnv(ScriptedEnv(2), T.ClipReward(-1, 1)))
    assert repr(env) == "<HalfReward<ClipReward(min_reward=-1, max_reward=1)<ScriptedEnv(num_envs=2, device=cpu)>>>"
    assert env.unwrapped is env.env.env and env.num_envs == 2


def test_attributes_are_reached_by_name_and_not_silently():
    env = HalfReward(tw.TransformedEnv(ScriptedEnv(2, ending="both"), T.ClipReward(-1, 1)))
    assert env.get_wrapper_attr("ending") == "both" and env.has_wrapper_attr("transform")
    assert not hasattr(env, "ending") and not env.has_wrapper_attr("gravity")
    with pytest.raises(AttributeError, match="needs a layer with the attribute 'gravity'"):
        env.get_wrapper_attr("gravity")


def test_an_attribute_is_set_where_it_is():
    env = HalfReward(ScriptedEnv(2, ending="both"))
    assert env.set_wrapper_attr("ending", "truncated") and env.unwrapped.ending == "truncated"
    assert not env.set_wrapper_attr("gravity", 1, force=False)
    assert env.set_wrapper_attr("gravity", 1) and env.gravity == 1


def test_wrapping_does_not_change_what_is_sampled_or_drawn():
    bare, stacked = tw.make("CartPole-v1", 3), tw.TransformedEnv(HalfReward(tw.make("CartPole-v1", 3)), T.TimeLimit(99))
    assert (bare.reset(seed=5)["observation"] == stacked.reset(seed=5)["observation"]).all()
    assert (bare.sample_action() == stacked.sample_action()).all()


def test_transforms_one_by_one_or_in_a_list_or_env_by_env_are_the_same():
    def transforms():
        return T.NormalizeObservation(), T.FrameStackObservation(2), T.NormalizeReward()

    first, second, third = transforms()
    stacks = [
        tw.TransformedEnv(ScriptedEnv(4), *transforms()),
        tw.TransformedEnv(ScriptedEnv(4), T.Compose(transforms())),
        tw.TransformedEnv(tw.TransformedEnv(tw.TransformedEnv(ScriptedEnv(4), first), second), third),
    ]
    one, *others = [tw.rollout(env, None, 20, env.reset(seed=0))[0] for env in stacks]
    for other in others:
        assert all((one[key] == other[key]).all() for key in one.keys(True, True))


def test_actions_pass_outermost_first():
    env = tw.TransformedEnv(ScriptedEnv(1), T.RescaleAction(0, 1), T.ClipAction())
    transition, _ = env.step(env.reset().set("action", torch.tensor([[-3.0, 0.0, 0.25, 0.5, 1.0, 3.0]])))
    assert transition["next", "info", "action"].tolist() == [[-1, -1, -0.5, 0, 1, 1]]


def test_an_unfit_transform_in_a_stack_is_named_with_its_position():
    with pytest.raises(
        ValueError, match=r"transforms\[1\] \(RescaleAction\): RescaleAction needs an action space with finite"
    ):
        tw.TransformedEnv(ScriptedEnv(1), T.ClipAction(), T.RescaleAction(0, 1))


def test_training_mode_and_device_reach_every_part():
    env = tw.TransformedEnv(ScriptedEnv(2), T.NormalizeObservation())
    assert not env.eval().transform.training and env.train().transform.training
    assert env.to("cpu").device == torch.device("cpu")


BAD = [
    (lambda: tw.Wrapper(object()), TypeError, "Wrapper needs a torchwrap.Env first, but got object"),
    (lambda: tw.TransformedEnv(T.TimeLimit(3)), TypeError, "TransformedEnv needs a torchwrap.Env first, but got TimeLimit"),
    (lambda: tw.TransformedEnv(ScriptedEnv(), torch.nn.Identity()), TypeError, "needs Transforms, but got Identity"),
    (
        lambda: tw.TransformedEnv(ScriptedEnv(), T.TimeLimit(3), ScriptedEnv()),
        TypeError,
        r"got ScriptedEnv at transforms\[1\]",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_what_cannot_be_stacked_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_transform_belongs_to_one_env():
    normalize = T.NormalizeObservation()
    tw.TransformedEnv(ScriptedEnv(2), normalize)
    with pytest.raises(ValueError, match="needs transforms of its own, but got NormalizeObservation"):
        tw.TransformedEnv(ScriptedEnv(3), T.Compose([normalize]))


class Plain(tw.Wrapper):
    def _reset(self, mask):
        return self.env._reset(mask)


class Own(tw.Wrapper):
    def _reset(self, mask, options=None):
        self.options = options
        return self.env._reset(mask)


def test_options_go_to_whom_they_are_for():
    env = tw.TransformedEnv(tw.Wrapper(tw.make("CartPole-v1", 2)), T.TimeLimit(9))
    assert (env.reset(options={"low": 0.0, "high": 0.0})["observation"] == 0).all()
    env = tw.TransformedEnv(Own(ScriptedEnv(2)), T.TimeLimit(9))
    env.reset(options={"level": 3})
    assert env.env.options == {"level": 3}


@pytest.mark.parametrize("make", [lambda: Plain(tw.make("CartPole-v1", 2)), lambda: tw.Wrapper(ScriptedEnv(2))])
def test_options_for_nobody_are_refused_before_anything_changed(make):
    env = make()
    env.reset(seed=0)
    before = env.snapshot()
    with pytest.raises(ValueError, match="takes no options"):
        env.reset(seed=1, options={"low": 0.0})
    assert all((before[key] == value).all() for key, value in env.snapshot().items(True, True))


def test_a_copy_of_a_compiled_env_is_an_env_of_its_own():
    env = tw.compile(ScriptedEnv(2), backend="eager")
    env.reset(seed=0)
    other = pickle.loads(pickle.dumps(copy.deepcopy(env)))
    tw.rollout(other, None, 2)
    assert (env.elapsed == 0).all()


def test_a_compiled_env_is_the_outermost():
    with pytest.raises(ValueError, match="needs an env that is not compiled yet"):
        tw.TransformedEnv(tw.compile(ScriptedEnv(2), backend="eager"), T.TimeLimit(3))


def test_a_transform_may_join_a_compose_until_it_is_on_an_env():
    compose = T.Compose([T.TimeLimit(9)])
    compose.transforms.append(T.TimeLimit(1))
    data, _ = tw.rollout(tw.TransformedEnv(ScriptedEnv(1, episode_lengths=None), compose), None, 1)
    assert data["next", "truncated"].all()
