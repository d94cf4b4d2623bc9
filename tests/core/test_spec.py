import json

import gymnasium
import pytest
import torch
from catalogue import TRANSFORMS, seven
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap._core import spec as specs
from torchwrap.testing import ScriptedEnv


def assert_alike(env, other):
    assert repr(env) == repr(other)
    other.load_state_dict(env.state_dict())
    one, two = (tw.rollout(each, None, 6, each.reset(seed=3))[0] for each in (env, other))
    assert all((one[key] == two[key]).all() for key in one.keys(True, True))


STACKS = {
    "bare": lambda env: env,
    "one": lambda env: tw.TransformedEnv(env, T.TimeLimit(4)),
    "several": lambda env: tw.TransformedEnv(
        env, T.NormalizeObservation(), T.FrameStackObservation(2, padding_type="zero")
    ),
    "composed": lambda env: tw.TransformedEnv(
        env, T.Compose([T.Compose([T.TimeLimit(4)]), T.NormalizeReward(gamma=0.9)])
    ),
    "in layers": lambda env: tw.TransformedEnv(
        tw.TransformedEnv(W.RepeatAction(env, 2), T.ScaleReward(2)), T.Compose([])
    ),
    "a wrapper on top": lambda env: W.RepeatAction(W.MaxAndSkipObservation(env, 2), 3),
}


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_spec_rebuilds_the_same_stack(backend):
    for stack in STACKS.values():
        env = stack(tw.make("CartPole-v1", 3, backend=backend, first_index=4, max_episode_steps=9))
        assert_alike(env, tw.make(env.spec))
        assert_alike(env, tw.make(EnvSpec.from_json(env.spec.to_json())))
        assert env.spec.id == "CartPole-v1" and tw.make(env.spec, num_envs=7).num_envs == 7


def test_record_of_every_transform_rebuilds_it():
    for make, make_env in TRANSFORMS.values():
        env = tw.TransformedEnv(make_env(2), make())
        assert_alike(env, specs.rebuild(specs.record(env), (W.Wrapper, T.Transform))(make_env(2)))


def test_time_limit_that_was_disabled_stays_disabled():
    env = tw.make("CartPole-v1", max_episode_steps=-1)
    assert (
        env.spec.max_episode_steps is None and tw.make(env.spec).signature.max_episode_steps is None
    )


def test_time_limit_is_in_the_spec_and_that_of_the_env_below_stays():
    env = tw.make("CartPole-v1", 2, max_episode_steps=40)
    env = tw.TransformedEnv(
        W.RepeatAction(env, 4), T.TimeAwareObservation(), T.TimeLimit(9)
    )  # 36 steps of the env itself
    spec = EnvSpec.from_json(env.spec.to_json())
    for made in (env, tw.make(env.spec), tw.make(spec)):
        assert made.spec.max_episode_steps == made.signature.max_episode_steps == 9
        assert (
            made.unwrapped.signature.max_episode_steps == 40
            and made.spec.to_json() == env.spec.to_json()
        )
    assert tw.make(spec, max_episode_steps=20).unwrapped.signature.max_episode_steps == 20
    spec.max_episode_steps = 5
    assert (
        tw.make(spec).spec.max_episode_steps == 5
        and tw.make(spec).unwrapped.signature.max_episode_steps == 40
    )


def test_spec_of_gymnasium_builds_a_torchwrap_env():
    import gymnasium

    env = tw.make(
        gymnasium.make("CartPole-v1", max_episode_steps=7, sutton_barto_reward=True).spec, 2
    )
    assert (
        env.signature.max_episode_steps == 7
        and env.func_env.sutton_barto_reward
        and env.num_envs == 2
    )
    assert tw.make(env.spec, max_episode_steps=5).signature.max_episode_steps == 5


def test_spec_of_env_without_id_is_none():
    assert tw.TransformedEnv(ScriptedEnv(1), T.TimeLimit(3)).spec is None


def test_spec_with_functions_rebuilds_but_has_no_json():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 2), T.Compose([T.TransformReward(torch.tanh)]))
    assert_alike(env, tw.make(env.spec))
    with pytest.raises(TypeError, match="not JSON serializable"):
        env.spec.to_json()
    keys = {"reward_dist": spaces.Box(-1, 1, (1,))}
    env = tw.make("Reacher-v5", info_keys=keys)
    assert tw.make(env.spec).info_spaces == keys


def test_spec_rebuilds_rendering_wrappers(tmp_path):
    below = tw.make("CartPole-v1", 2, render_mode="rgb_array")
    env = W.RecordVideo(
        W.AddRenderObservation(below, render_only=False), tmp_path, video_length=3, envs=[1]
    )
    again = tw.make(EnvSpec.from_json(env.spec.to_json()))
    assert repr(again) == repr(env) and (again.fps, again.envs, again.episode_trigger) == (
        50,
        [1],
        None,
    )
    assert again.env.render_only is False and again.video_folder == str(tmp_path)


def test_spec_that_names_other_code_is_refused_before_any_of_it_runs(tmp_path, monkeypatch):
    class Local(T.RewardTransform):
        def reward(self, reward):
            return reward

    (tmp_path / "foreign_layers.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    written = json.loads(tw.make("CartPole-v1", backend="gymnasium").spec.to_json())
    monkeypatch.setattr(
        gymnasium, "make", lambda *args, **kwargs: pytest.fail("an env was made first")
    )

    def recipe(entry_point, **kwargs):
        return {"name": "x", "entry_point": entry_point, "kwargs": kwargs}

    for entry_point in (
        "os:system",
        "subprocess:Popen",
        "torch.nn:Identity",
        "torchwrap.testing:ScriptedEnv",
        "os",
    ):
        calls = recipe(entry_point, cmd=f"touch {tmp_path}/ran")
        nested = recipe("torchwrap.transforms:TransformReward", func=calls)
        layers = [recipe("torchwrap:TransformedEnv", transforms=[part]) for part in (calls, nested)]
        layers += [
            calls,
            recipe(
                "torchwrap:TransformedEnv",
                transforms=[recipe("torchwrap:Compose", transforms=[nested])],
            ),
        ]
        for layer in layers:
            with pytest.raises(
                ValueError, match=rf"torchwrap Wrappers and Transforms .*, but got {entry_point}\."
            ):
                tw.make(EnvSpec.from_json(json.dumps({**written, "additional_wrappers": [layer]})))
    spec = tw.make("CartPole-v1").spec
    spec.additional_wrappers = (recipe("foreign_layers:Layer"),)
    with pytest.raises(
        ValueError,
        match=r"got foreign_layers:Layer: `import foreign_layers` first, if you trust it\.",
    ):
        tw.make(spec)
    spec.id, spec.additional_wrappers = "foreign_layers:Env-v0", ()
    with pytest.raises(
        ValueError, match="needs a spec whose id names no module, but got 'foreign_layers:Env-v0'"
    ):
        tw.make(spec)
    with pytest.raises(
        ValueError, match=r"torchwrap Wrappers and Transforms that can be imported, but got .*Local"
    ):
        tw.make(tw.TransformedEnv(tw.make("CartPole-v1"), Local()).spec)
    assert not (tmp_path / "ran").exists()


class DropsItsArgument(T.RewardTransform):
    def __init__(self, factor):
        super().__init__()

    def reward(self, reward):
        return reward


def test_argument_that_is_no_attribute_is_named():
    env = tw.TransformedEnv(tw.make("CartPole-v1"), DropsItsArgument(2))
    with pytest.raises(
        ValueError, match=r"DropsItsArgument has no spec: keep its arguments \['factor'"
    ):
        env.spec  # noqa: B018


def test_spec_has_the_layout_of_gymnasium():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 4), seven().transforms[2])
    (layer,) = env.spec.additional_wrappers
    assert layer.name == "TransformedEnv" and layer.kwargs["transforms"][0].kwargs == {
        "epsilon": 1e-8
    }
    assert json.loads(env.spec.to_json())["kwargs"] == {"num_envs": 4}


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_np_random_seed_is_the_seed_in_use(backend):
    env = tw.TransformedEnv(tw.make("CartPole-v1", 3, backend=backend), T.TimeLimit(9))
    assert env.np_random_seed is None
    first = env.reset()["observation"]
    seed = env.np_random_seed
    assert (tw.make(env.spec).reset(seed=seed)["observation"] == first).all()
    env.reset()
    assert (
        env.np_random_seed == seed
        and env.reset(seed=2**63 + 5) is not None
        and env.np_random_seed == 2**63 + 5
    )
    env.reset(seed=8, mask=torch.tensor([False, True, False]))
    assert env.np_random_seed == (2**63 + 5, 8, 2**63 + 5)
    assert (
        tw.make("CartPole-v1")
        .reset()["observation"]
        .ne(tw.make("CartPole-v1").reset()["observation"])
        .any()
    )
