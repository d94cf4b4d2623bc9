"""Specs: how a stack was made, from which `make` makes another."""

import gymnasium
import numpy as np
import pytest
import torch
from catalogue import TRANSFORMS
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from helpers import assert_same, from_reset

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap._core import spec as specs


def assert_alike(env, other):
    assert repr(env) == repr(other)
    other.load_state_dict(env.state_dict())
    data = from_reset(tw.Collector(env, None, 6))
    assert_same(from_reset(tw.Collector(other, None, 6)), data)


def from_json(env):
    return tw.make(EnvSpec.from_json(env.spec.to_json()))


def several(env):
    return tw.TransformedEnv(
        env,
        T.NormalizeObservation(),
        T.FrameStackObservation(2),
    )


def composed(env):
    inner = T.Compose([T.TimeLimit(4)])
    return tw.TransformedEnv(
        env,
        T.Compose([inner, T.NormalizeReward(gamma=0.9)]),
    )


def in_layers(env):
    env = tw.TransformedEnv(
        W.RepeatAction(env, 2),
        T.ScaleReward(2),
    )
    return tw.TransformedEnv(env, T.Compose([]))


def with_numbers(env):
    noise = T.AddNoise(np.float32([0.1, 0.2, 0.3, 0.4]), period=None)
    command = T.CommandObservation(-1.0, torch.tensor(2.5), 3)
    return tw.TransformedEnv(env, noise, command, T.AddNoise(0.1))


def with_dtypes(env):
    cast = T.DtypeObservation(torch.float64)
    return tw.TransformedEnv(env, cast, tw.PolicyState({"hidden": (2,)}, torch.float16))


STACKS = {
    "bare": lambda env: env,
    "one": lambda env: tw.TransformedEnv(env, T.TimeLimit(4)),
    "several": several,
    "composed": composed,
    "in layers": in_layers,
    "with numbers": with_numbers,
    "with dtypes": with_dtypes,
    "a wrapper on top": lambda env: W.RepeatAction(W.MaxAndSkipObservation(env, 2), 3),
}
each_backend = pytest.mark.parametrize("backend", ["torch", "gymnasium"])


@each_backend
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_spec_rebuilds_the_same_stack(stack, backend):
    env = tw.make(
        "CartPole-v1",
        3,
        backend=backend,
        first_index=4,
        max_episode_steps=9,
    )
    env = stack(env)
    assert_alike(env, tw.make(env.spec))
    assert_alike(env, from_json(env))
    assert env.spec.id == "CartPole-v1" and tw.make(env.spec, num_envs=7).num_envs == 7


@pytest.mark.parametrize("make, make_env", TRANSFORMS.values(), ids=TRANSFORMS)
def test_record_of_every_transform_rebuilds_it(make, make_env):
    env = tw.TransformedEnv(make_env(2), make())
    rebuilt = specs.rebuild(
        specs.record(env),
        (W.Wrapper, T.Transform),
    )
    assert_alike(env, rebuilt(make_env(2)))


def limited():
    """36 steps of an env whose own limit is 40."""
    env = W.RepeatAction(
        tw.make("CartPole-v1", 2, max_episode_steps=40),
        4,
    )
    return tw.TransformedEnv(
        env,
        T.TimeAwareObservation(),
        T.TimeLimit(9),
    )


@pytest.mark.parametrize(
    "rebuild",
    [lambda env: tw.make(env.spec), from_json],
)
def test_time_limit_of_a_stack_and_of_its_env_are_rebuilt(rebuild):
    env = limited()
    made = rebuild(env)
    assert made.spec.max_episode_steps == made.signature.max_episode_steps == 9
    assert made.unwrapped.signature.max_episode_steps == 40
    assert made.spec.to_json() == env.spec.to_json()


def test_time_limit_of_a_spec_and_of_its_env_can_be_changed():
    spec = limited().spec
    assert tw.make(spec, max_episode_steps=20).unwrapped.signature.max_episode_steps == 20
    spec.max_episode_steps = 5
    env = tw.make(spec)
    assert env.spec.max_episode_steps == 5
    assert env.unwrapped.signature.max_episode_steps == 40


def test_spec_of_gymnasium_builds_a_torchwrap_env():
    single = gymnasium.make("CartPole-v1", max_episode_steps=7, sutton_barto_reward=True)
    env = tw.make(single.spec, 2)
    assert env.signature.max_episode_steps == 7 and env.num_envs == 2
    assert env.func_env.sutton_barto_reward
    assert tw.make(env.spec, max_episode_steps=5).signature.max_episode_steps == 5


def test_spec_with_functions_rebuilds_but_has_no_json():
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 2),
        T.Compose([T.TransformReward(torch.tanh)]),
    )
    assert_alike(env, tw.make(env.spec))
    with pytest.raises(TypeError, match="JSON"):
        env.spec.to_json()


def test_spec_keeps_the_spaces_of_infos():
    keys = {"reward_dist": spaces.Box(-1, 1, (1,))}
    env = tw.make("Reacher-v5", info_keys=keys)
    assert tw.make(env.spec).info_spaces == keys


def test_spec_rebuilds_rendering_wrappers(tmp_path):
    env = tw.make("CartPole-v1", 2, render_mode="rgb_array")
    env = W.AddRenderObservation(env, render_only=False)
    env = W.RecordVideo(
        env,
        tmp_path,
        video_length=3,
        envs=[1],
    )
    again = from_json(env)
    assert repr(again) == repr(env)
    assert again.fps == 50 and again.envs == [1] and again.episode_trigger is None
    assert again.env.render_only is False and again.video_folder == str(tmp_path)


# A spec from a file runs no code of others.


def recipe(entry_point, **kwargs):
    return {"name": "x", "entry_point": entry_point, "kwargs": kwargs}


def spec_with(*layers):
    spec = tw.make("CartPole-v1", backend="gymnasium").spec
    spec.additional_wrappers = layers
    return spec


def test_spec_with_an_unused_argument_of_version_0_2_rebuilds():
    kwargs = {"num_repeats": 2, "summed_info": []}
    layer = recipe("torchwrap.wrappers.repeat:RepeatAction", **kwargs)
    assert tw.make(spec_with(layer)).num_repeats == 2


FOREIGN = ["os:system", "subprocess:Popen", "torch.nn:Identity", "os"]
FOREIGN += ["torchwrap.testing:ScriptedEnv"]


@pytest.mark.parametrize("entry_point", FOREIGN)
def test_spec_that_names_other_code_raises_before_any_of_it_runs(
    entry_point, tmp_path, monkeypatch
):
    call = recipe(entry_point, cmd=f"touch {tmp_path}/ran")
    nested = recipe("torchwrap.transforms:TransformReward", func=call)
    compose = recipe("torchwrap:Compose", transforms=[nested])
    layers = [recipe("torchwrap:TransformedEnv", transforms=[p]) for p in (call, nested, compose)]
    texts = [spec_with(layer).to_json() for layer in (call, *layers)]
    monkeypatch.setattr(
        gymnasium,
        "make",
        lambda *_, **__: pytest.fail("an env was made first"),
    )
    for text in texts:
        with pytest.raises(ValueError, match=entry_point):
            tw.make(EnvSpec.from_json(text))
    assert not (tmp_path / "ran").exists()


def test_spec_that_names_a_module_imports_none(tmp_path, monkeypatch):
    (tmp_path / "foreign_layers.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="import foreign_layers"):
        tw.make(spec_with(recipe("foreign_layers:Layer")))
    spec = spec_with()
    spec.id = "foreign_layers:Env-v0"
    with pytest.raises(ValueError, match="foreign_layers"):
        tw.make(spec)


def test_spec_with_a_local_class_raises():
    class Local(T.RewardTransform):
        def reward(self, reward):
            return reward

    with pytest.raises(ValueError, match="Local"):
        tw.make(tw.TransformedEnv(tw.make("CartPole-v1"), Local()).spec)


class DropsItsArgument(T.RewardTransform):
    def __init__(self, factor):
        super().__init__()

    def reward(self, reward):
        return reward


def test_argument_that_is_no_attribute_is_named():
    env = tw.TransformedEnv(tw.make("CartPole-v1"), DropsItsArgument(2))
    with pytest.raises(ValueError, match=r"DropsItsArgument.*factor"):
        env.spec  # noqa: B018


@each_backend
def test_np_random_seed_is_the_seed_in_use(backend):
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 3, backend=backend),
        T.TimeLimit(9),
    )
    assert env.np_random_seed is None
    first = env.reset()
    seed = env.np_random_seed
    assert_same(
        tw.make(env.spec).reset(seed=seed),
        first,
    )
    env.reset()
    assert env.np_random_seed == seed
    env.reset(seed=2**63 + 5)
    assert env.np_random_seed == 2**63 + 5
