import sys

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


def gymnasium_case(name, **arguments):
    return pytest.param({"backend": "gymnasium", **arguments}, name, id=f"gymnasium {name}")


@pytest.mark.parametrize(
    "arguments, match",
    [
        pytest.param({"id": "CartPoule-v1"}, "CartPoule-v1", id="unknown id"),
        pytest.param({"id": "Nowhere/CartPole-v1"}, "Nowhere/CartPole-v1", id="namespace"),
        pytest.param({"id": ""}, "id", id="empty id"),
        pytest.param({"id": None}, "id", id="no id"),
        pytest.param({"id": "Blackjack-v1", "backend": "torch"}, "Blackjack-v1", id="not native"),
        pytest.param({"backend": "jax"}, "backend", id="unknown backend"),
        pytest.param({"backend": True}, "backend", id="backend is a bool"),
        pytest.param({"device": "nope"}, "device", id="device"),
        pytest.param({"num_envs": 0}, "num_envs", id="no envs"),
        pytest.param({"num_envs": True}, "num_envs", id="num_envs is a bool"),
        pytest.param({"num_envs": "2"}, "num_envs", id="num_envs is a string"),
        pytest.param({"vectorization_mode": "sync"}, "vectorization_mode", id="vectorization"),
        pytest.param({"info_keys": ("a",)}, "info_keys", id="info_keys"),
        pytest.param({"worker_timeout": 5.0}, "worker_timeout", id="worker_timeout"),
        pytest.param({"length": 2}, "length", id="argument"),
        pytest.param({"seed": 2}, r"reset\(seed", id="seed"),
        pytest.param({"render_mode": "human"}, "render_mode", id="render_mode"),
        pytest.param({"first_index": -1}, "first_index", id="first_index"),
        pytest.param({"max_episode_steps": 0}, "max_episode_steps", id="limit of 0"),
        pytest.param({"max_episode_steps": 2.5}, "max_episode_steps", id="limit of 2.5"),
        gymnasium_case("CartPoule-v1", id="CartPoule-v1"),
        gymnasium_case("vectorization_mode", vectorization_mode="fork"),
        gymnasium_case("length", length=2),
        gymnasium_case("seed", seed=2),
        gymnasium_case("first_index", first_index=-1),
        gymnasium_case("max_episode_steps", max_episode_steps=-3),
        gymnasium_case("params", params={}),
    ],
)
def test_make_with_an_invalid_argument_raises_with_its_name(arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        tw.make(**{"id": "CartPole-v1", "num_envs": 2, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": torch.float64, "max_episode_steps": 9, "first_index": 4, "device": "cpu"},
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
    "func_env", [Pendulum, lambda g=1.62: Pendulum(g)], ids=["class", "function"]
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
    with pytest.raises(ValueError, match="moons/Io-v1"):
        tw.make("moons/Io-v1")
    try:
        env = tw.make("moons:moons/Io-v1", 2)
        assert env.spec.id == "moons/Io-v1"
        for again in (tw.make(env.spec), tw.make("moons/Io-v1")):
            assert again.func_env.g == 1.8
        assert tw.make("moons:moons/Io-v1", backend="torch").signature.max_episode_steps == 5
    finally:
        sys.modules.pop("moons", None)


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        pytest.param({"id": "CartPole-v1"}, ValueError, "id", id="Gymnasium's id"),
        pytest.param({"id": "moon/Taken-v0"}, ValueError, "id", id="taken id"),
        pytest.param({"id": "Pendulum"}, ValueError, "id", id="no version"),
        pytest.param({"id": "a/b/Pendulum-v0"}, ValueError, "id", id="two namespaces"),
        pytest.param({"id": "Moon Pendulum-v0"}, ValueError, "id", id="space"),
        pytest.param({"id": "moon:Pendulum-v0"}, ValueError, "id", id="module"),
        pytest.param({"id": "moon/Pendulum-v00"}, ValueError, "id", id="version"),
        pytest.param({"id": None}, ValueError, "id", id="no id"),
        pytest.param({"func_env": Pendulum()}, TypeError, "func_env", id="object"),
        pytest.param({"func_env": FunctionalEnv}, TypeError, "initial", id="other class"),
        pytest.param({"func_env": "Pendulum"}, TypeError, "func_env", id="name"),
        pytest.param({"max_episode_steps": 0}, ValueError, "max_episode_steps", id="limit of 0"),
        pytest.param({"max_episode_steps": 1.5}, TypeError, "max_episode_steps", id="limit of 1.5"),
    ],
)
def test_register_with_an_invalid_argument_raises(registry, arguments, error, match):
    tw.register("moon/Taken-v0", Pendulum)
    before = dict(registry)
    with pytest.raises(error, match=match):
        tw.register(**{"id": "moon/P-v0", "func_env": Pendulum, **arguments})
    assert registry == before


@pytest.mark.parametrize(
    "arguments, match",
    [
        pytest.param({"backend": "gymnasium"}, "backend", id="backend"),
        pytest.param({"length": 2}, "length", id="argument"),
        pytest.param({"seed": 2}, r"reset\(seed", id="seed"),
        pytest.param({"info_keys": ["a"]}, "info_keys", id="info_keys"),
        pytest.param({"max_episode_steps": torch.tensor([2, 3])}, "max_episode_steps", id="limits"),
    ],
)
def test_make_of_a_registered_env_with_an_invalid_argument_raises(registry, arguments, match):
    tw.register("moon/P-v0", Pendulum)
    with pytest.raises((ValueError, TypeError), match=match):
        tw.make("moon/P-v0", 2, **arguments)


@pytest.mark.parametrize("make", [gymnasium.make, gymnasium.make_vec])
def test_gymnasium_refuses_an_id_of_register(registry, make):
    tw.register("moon/P-v0", Pendulum)
    with pytest.raises(TypeError, match=r"torchwrap\.make"):
        make("moon/P-v0")


def test_function_that_returns_no_functions_raises_in_make(registry):
    tw.register("moon/Q-v0", lambda: 3)
    with pytest.raises(TypeError, match="FuncEnv"):
        tw.make("moon/Q-v0")
