import functools
import sys
import warnings

import gymnasium
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
from torchwrap.interop.gymnasium import GymnasiumEnv

each_backend = pytest.mark.parametrize("backend", ["torch", "gymnasium"])


@pytest.mark.parametrize(
    "id, backend, kind",
    [
        ("CartPole-v1", None, FunctionalEnv),
        ("CartPole-v1", "torch", FunctionalEnv),
        ("CartPole-v1", "gymnasium", GymnasiumEnv),
        ("CartPole-v0", None, FunctionalEnv),
        ("Blackjack-v1", None, GymnasiumEnv),
    ],
)
def test_make_prefers_torch_and_falls_back_to_gymnasium(id, backend, kind):
    env = tw.make(id, 2, backend=backend)
    assert type(env) is kind
    assert env.spec.id == id
    assert repr(env) == f"<{id}(num_envs=2, device=cpu)>"
    assert tw.make(id, backend=backend).num_envs == 1


@pytest.mark.parametrize("mode, kind", [(None, SyncVectorEnv), ("async", AsyncVectorEnv)])
def test_make_uses_the_vector_env_of_the_mode_and_leaves_the_registry_alone(mode, kind):
    before = str(gymnasium.spec("CartPole-v1"))
    arguments = {"vectorization_mode": mode, "sutton_barto_reward": True}
    with tw.make("CartPole-v1", 2, backend="gymnasium", **arguments) as env:
        assert type(env.vector_env) is kind
        assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
        env.spec.kwargs["other"] = 1
    assert str(gymnasium.spec("CartPole-v1")) == before


INVALID = [  # the last argument is at fault
    {"id": "CartPoule-v1"},
    {"id": None},
    {"backend": "torch", "id": "Blackjack-v1"},
    {"backend": "jax"},
    {"device": "nope"},
    {"num_envs": 0},
    {"vectorization_mode": "sync"},
    {"info_keys": ("a",)},
    {"length": 2},
    {"seed": 2},
    {"render_mode": "human"},
    {"first_index": -1},
    {"max_episode_steps": 0},
    {"backend": "gymnasium", "id": "CartPoule-v1"},
    {"backend": "gymnasium", "vectorization_mode": "fork"},
    {"backend": "gymnasium", "max_episode_steps": -3},
    {"backend": "gymnasium", "params": {}},
    {"backend": "envpool", "noop_max": 0},
]


@pytest.mark.parametrize("arguments", INVALID, ids=str)
def test_make_with_an_invalid_argument_raises_with_its_name(arguments):
    with pytest.raises((ValueError, TypeError), match=[*arguments][-1]):
        tw.make(**{"id": "CartPole-v1", "num_envs": 2, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "dtype": torch.float64,
            "max_episode_steps": 9,
            "first_index": 4,
            "device": "cpu",
        },
        {"vectorization_mode": None, "info_keys": ()},
    ],
    ids=["of functions", "unset"],
)
def test_make_takes_arguments_of_the_functions_and_unset_ones(arguments):
    assert tw.make("CartPole-v1", 2, **arguments).num_envs == 2


def play_until_done(env):
    """Steps until all episodes end: how many, and whether all of them were truncated."""
    balance = torch.tensor([0.3, 0.6, 9.0, 3.0])
    td = env.reset(seed=0)
    steps = 0
    done = False
    while not done:
        td["action"] = (td["observation"] @ balance > 0).long()
        transition, td = env.step(td)
        done = transition["next", "done"].all()
        steps += 1
    return steps, transition["next", "truncated"].all().item()


@each_backend
@pytest.mark.parametrize("given, limit", [(None, 500), (7, 7), (1, 1), (600, 600)])
def test_max_episode_steps_replaces_the_registered_limit(backend, given, limit):
    env = tw.make("CartPole-v1", 2, backend=backend, max_episode_steps=given)
    assert play_until_done(env) == (limit, True)
    assert env.signature.max_episode_steps == limit
    assert env.spec.max_episode_steps == limit


# register.


@pytest.mark.parametrize(
    "func_env",
    [Pendulum, lambda g=1.62: Pendulum(g)],
    ids=["class", "function"],
)
@pytest.mark.parametrize("id", ["moon/Pendulum-v0", "MoonPendulum-v3"])
def test_registered_env_is_made_from_its_id(registry, id, func_env):
    assert tw.register(id, func_env, max_episode_steps=7) is None
    env = tw.make(id, 3, g=2.0)
    assert type(env) is FunctionalEnv
    assert type(env.func_env) is Pendulum
    assert env.func_env.g == 2
    assert repr(env) == f"<{id}(num_envs=3, device=cpu)>"
    assert tw.make(id, backend="torch").func_env.g in (10, 1.62)


def test_cell_of_a_notebook_that_registers_again_replaces_the_env(registry):
    for g in (1.0, 2.0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tw.register("moon/Cell-v0", functools.partial(Pendulum, g), max_episode_steps=int(g))
    assert "moon/Cell-v0" in str(caught[0].message)
    env = tw.make("moon/Cell-v0")
    assert env.func_env.g == env.signature.max_episode_steps == 2


@pytest.mark.parametrize("given, limit", [(None, 7), (9, 9), (-1, None)])
def test_limit_of_make_replaces_that_of_register(registry, given, limit):
    tw.register("moon/Pendulum-v0", Pendulum, max_episode_steps=7)
    env = tw.make("moon/Pendulum-v0", max_episode_steps=given)
    assert env.signature.max_episode_steps == env.spec.max_episode_steps == limit


@pytest.mark.parametrize("through_json", [False, True])
def test_registered_env_is_made_from_its_spec(registry, through_json):
    tw.register("moon/Pendulum-v0", Pendulum, max_episode_steps=7)
    env = tw.make("moon/Pendulum-v0", 3, g=2.0)
    spec = tw.TransformedEnv(env, T.ClipReward(-1, 0)).spec
    if through_json:
        spec = EnvSpec.from_json(spec.to_json())
    again = tw.make(spec, 2, first_index=1)
    assert again.unwrapped.func_env.g == 2
    assert again.signature.max_episode_steps == 7
    assert type(again.transforms[0]) is T.ClipReward
    expected = env.reset(seed=0)["observation"][1:]
    assert torch.equal(again.reset(seed=0)["observation"], expected)


def test_registered_env_of_a_module_is_made_by_the_modules_name(registry, monkeypatch, tmp_path):
    (tmp_path / "moons.py").write_text(
        "import torchwrap as tw\nfrom torchwrap.envs.pendulum import Pendulum\n"
        "tw.register('moons/Io-v1', lambda: Pendulum(1.8), max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"module:.*moons/Io-v1"):
        tw.make("moons/Io-v1")
    try:
        env = tw.make("moons:moons/Io-v1", 2)
        assert env.spec.id == "moons/Io-v1"
        for again in (tw.make(env.spec), tw.make("moons/Io-v1")):
            assert again.func_env.g == 1.8
        assert tw.make("moons:moons/Io-v1", backend="torch").signature.max_episode_steps == 5
    finally:
        sys.modules.pop("moons", None)


UNFIT = [
    {"id": "CartPole-v1"},
    {"id": "Pendulum"},
    {"id": "a/b/Pendulum-v0"},
    {"id": "moon:Pendulum-v0"},
    {"id": None},
    {"func_env": Pendulum()},
    {"max_episode_steps": 0},
]


@pytest.mark.parametrize("arguments", UNFIT, ids="".join)
def test_register_with_an_invalid_argument_raises(registry, arguments):
    before = dict(registry)
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        tw.register(**{"id": "moon/P-v0", "func_env": Pendulum, **arguments})
    assert registry == before


def test_function_that_returns_no_functions_raises_in_make(registry):
    tw.register("moon/Q-v0", lambda: 3)
    with pytest.raises(TypeError, match="FuncEnv"):
        tw.make("moon/Q-v0")
