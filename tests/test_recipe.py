from __future__ import annotations

import json

import pytest
import torch
from catalogue import TRANSFORMS, seven
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

import torchwrap as tw
from torchwrap import recipe
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv


def assert_alike(env, other):
    assert repr(env) == repr(other)
    other.load_state_dict(env.state_dict())
    one, two = (tw.rollout(each, None, 12, each.reset(seed=3))[0] for each in (env, other))
    assert all((one[key] == two[key]).all() for key in one.keys(True, True))


STACKS = {
    "bare": lambda env: env,
    "one": lambda env: tw.TransformedEnv(env, T.TimeLimit(4)),
    "several": lambda env: tw.TransformedEnv(env, T.NormalizeObservation(), T.FrameStackObservation(2, padding_type="zero")),
    "composed": lambda env: tw.TransformedEnv(env, T.Compose([T.Compose([T.TimeLimit(4)]), T.NormalizeReward(gamma=0.9)])),
    "in layers": lambda env: tw.TransformedEnv(tw.TransformedEnv(W.RepeatAction(env, 2), T.ScaleReward(2)), T.Compose([])),
    "a wrapper on top": lambda env: W.RepeatAction(W.MaxAndSkipObservation(env, 2), 3),
}


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
@pytest.mark.parametrize("name", STACKS)
def test_make_builds_the_same_stack_again(name, backend):
    env = STACKS[name](tw.make("CartPole-v1", 3, backend=backend, first_index=4, max_episode_steps=9))
    assert_alike(env, tw.make(env.spec))
    assert_alike(env, tw.make(EnvSpec.from_json(env.spec.to_json())))
    assert env.spec.id == "CartPole-v1" and tw.make(env.spec, num_envs=7).num_envs == 7


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_says_how_it_was_made(name):
    make, make_env = TRANSFORMS[name]
    env = tw.TransformedEnv(make_env(2), make())
    again = recipe.rebuild(recipe.record(env), make_env(2))
    assert_alike(env, again)


def test_a_limit_taken_away_stays_away():
    env = tw.make("CartPole-v1", max_episode_steps=-1)
    assert env.spec.max_episode_steps is None and tw.make(env.spec).signature.max_episode_steps is None


def test_gymnasiums_own_spec_will_do():
    import gymnasium

    env = tw.make(gymnasium.make("CartPole-v1", max_episode_steps=7, sutton_barto_reward=True).spec, 2)
    assert env.signature.max_episode_steps == 7 and env.func_env.sutton_barto_reward and env.num_envs == 2


def test_the_spec_of_an_env_without_an_id_is_none():
    assert tw.TransformedEnv(ScriptedEnv(1), T.TimeLimit(3)).spec is None


def test_functions_go_through_make_and_not_through_json():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 2), T.Compose([T.TransformReward(torch.tanh)]))
    assert_alike(env, tw.make(env.spec))
    with pytest.raises(ValueError, match=r"to_json needs arguments that JSON has, but got func=<.*tanh.*> of TransformReward"):
        env.spec.to_json()
    keys = {"reward_dist": spaces.Box(-1, 1, (1,))}
    env = tw.make("Reacher-v5", info_keys=keys)
    with pytest.raises(ValueError, match="to_json needs arguments that JSON has, but got info_keys="):
        env.spec.to_json()
    assert tw.make(env.spec).info_spaces == keys


class OnlyOne:
    def __call__(self, observation):
        return observation * 1

    def __deepcopy__(self, memo):
        raise TypeError("there is only one")


def test_a_function_is_the_same_one_under_further_layers():
    func = OnlyOne()
    env = tw.TransformedEnv(tw.make("CartPole-v1"), T.TransformObservation(func))
    again = tw.make(tw.TransformedEnv(env, T.TimeLimit(3)).spec)
    assert again.env.transform.func is func


def test_what_looks_is_made_again_too(tmp_path):
    below = tw.make("CartPole-v1", 2, render_mode="rgb_array")
    env = W.RecordVideo(W.AddRenderObservation(below, render_only=False), tmp_path, video_length=3, envs=[1])
    again = tw.make(EnvSpec.from_json(env.spec.to_json()))
    assert repr(again) == repr(env) and (again.fps, again.envs, again.episode_trigger) == (50, [1], None)
    assert again.env.render_only is False and again.video_folder == str(tmp_path)


def test_a_class_that_cannot_be_imported_is_named():
    class Local(T.RewardTransform):
        def reward(self, reward):
            return reward

    env = tw.TransformedEnv(tw.make("CartPole-v1"), Local())
    with pytest.raises(
        ValueError, match=r"make needs a spec of wrappers and transforms that can be imported, but got .*Local"
    ):
        tw.make(env.spec)


class Forgetful(T.RewardTransform):
    def __init__(self, factor):
        super().__init__()

    def reward(self, reward):
        return reward


def test_an_argument_that_was_not_kept_is_named():
    env = tw.TransformedEnv(tw.make("CartPole-v1"), Forgetful(2))
    with pytest.raises(
        ValueError, match=r"Forgetful needs its arguments as attributes for its spec, but got none for \['factor'"
    ):
        env.spec  # noqa: B018


def test_the_recipe_reads_as_gymnasiums_do():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 4), seven().transforms[2])
    (layer,) = env.spec.additional_wrappers
    assert layer.name == "TransformedEnv" and layer.kwargs["transforms"][0].kwargs == {"epsilon": 1e-8}
    written = json.loads(env.spec.to_json())
    assert written["kwargs"] == {"num_envs": 4}


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_the_seed_in_force_is_known(backend):
    env = tw.TransformedEnv(tw.make("CartPole-v1", 3, backend=backend), T.TimeLimit(9))
    assert env.np_random_seed is None
    first = env.reset()["observation"]
    seed = env.np_random_seed
    assert (tw.make(env.spec).reset(seed=seed)["observation"] == first).all()
    env.reset()
    assert env.np_random_seed == seed and env.reset(seed=2**63 + 5) is not None and env.np_random_seed == 2**63 + 5
    env.reset(seed=8, mask=torch.tensor([False, True, False]))
    assert env.np_random_seed == (2**63 + 5, 8, 2**63 + 5)
    assert tw.make("CartPole-v1").reset()["observation"].ne(tw.make("CartPole-v1").reset()["observation"]).any()
