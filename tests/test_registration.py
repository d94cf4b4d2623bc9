import sys

import gymnasium
import pytest
import torch
from gymnasium.envs.registration import EnvSpec

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap import transforms as T
from torchwrap.envs.pendulum import Pendulum
from torchwrap.interop.gymnasium import GymnasiumEnv

each_backend = pytest.mark.parametrize("backend", ["torch", "gymnasium"])


def test_make_prefers_torch_and_falls_back_to_gymnasium():
    for id, backend, kind in (
        ("CartPole-v1", None, FunctionalEnv),
        ("CartPole-v1", "torch", FunctionalEnv),
        ("CartPole-v1", "gymnasium", GymnasiumEnv),
        ("MountainCar-v0", "gymnasium", GymnasiumEnv),
        ("CartPole-v0", None, FunctionalEnv),
        ("Blackjack-v1", None, GymnasiumEnv),
    ):
        env = tw.make(id, 2, backend=backend)
        assert type(env) is kind and env.num_envs == 2 and env.spec.id == id
        assert repr(env) == f"<{id}(num_envs=2, device=cpu)>"
        assert tw.make(id, backend=backend).num_envs == 1


def test_make_with_a_vectorization_mode_uses_that_vector_env_and_leaves_the_registry_alone():
    before = str(gymnasium.spec("CartPole-v1"))
    sync, processes = gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv
    for vectorization_mode, kind in ((None, sync), ("async", processes)):
        arguments = dict(
            vectorization_mode=vectorization_mode, max_episode_steps=7, sutton_barto_reward=True
        )
        with tw.make("CartPole-v1", 2, backend="gymnasium", **arguments) as env:
            assert type(env.vector_env) is kind
            assert env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.DISABLED
            env.spec.kwargs["other"] = 1
    assert str(gymnasium.spec("CartPole-v1")) == before


OF_GYMNASIUM = "for 'CartPole-v1' with backend=\"torch\": leave them out"
BACKENDS = 'backend="torch", "gymnasium", "envpool" or "ale", but got'


def test_make_with_invalid_arguments_raises():
    for arguments, match in (
        (
            {"id": "CartPoule-v1"},
            "make needs a registered id, but got 'CartPoule-v1'.*doesn't exist",
        ),
        (
            {"id": "Nowhere/CartPole-v1"},
            "make needs a registered id, but got 'Nowhere/CartPole-v1'",
        ),
        ({"id": ""}, "make needs a registered id, but got ''"),
        (
            {"id": "CartPoule-v1", "backend": "gymnasium"},
            "make needs a registered id, but got 'CartPoule-v1'",
        ),
        (
            {"id": "Blackjack-v1", "backend": "torch"},
            r"in \[.*'CartPole-v1'.*\] for backend=\"torch\", but got 'Blackjack-v1'",
        ),
        ({"id": None}, "make needs an id string or an env's spec, but got None"),
        ({"backend": "jax"}, f"{BACKENDS} 'jax'"),
        ({"backend": True}, f"{BACKENDS} True"),
        ({"device": "nope"}, "make needs a torch.device or its name, but got 'nope'"),
        ({"num_envs": 0}, "num_envs as an integer of at least 1, but got 0"),
        ({"num_envs": True}, "num_envs as an integer of at least 1, but got True"),
        ({"num_envs": "2"}, "num_envs as an integer of at least 1, but got '2'"),
        ({"vectorization_mode": "sync"}, f"make takes no vectorization_mode {OF_GYMNASIUM}"),
        (
            {"info_keys": ("a",), "worker_timeout": 5.0},
            f"make takes no worker_timeout or info_keys {OF_GYMNASIUM}",
        ),
        (
            {"vectorization_mode": "fork", "backend": "gymnasium"},
            'vectorization_mode="sync" or "async", but got \'fork\'',
        ),
        ({"length": 2}, "arguments that CartPole-v1 takes in torch.*'length'"),
        ({"render_mode": "human"}, "render_mode among .*rgb_array.*, but got 'human'"),
        ({"length": 2, "backend": "gymnasium"}, "length"),
        (
            {"seed": 2},
            r"constructor takes, but got seed=2: pass it to reset, `td = env.reset\(seed=2\)`",
        ),
        (
            {"seed": 2, "backend": "gymnasium"},
            "constructor takes, but got seed=2: pass it to reset",
        ),
        ({"first_index": -1}, "first_index as an integer of at least 0, but got -1"),
        (
            {"first_index": -1, "backend": "gymnasium"},
            "first_index as an integer of at least 0, but got -1",
        ),
        ({"max_episode_steps": 0}, "max_episode_steps.*0"),
        ({"max_episode_steps": 2.5}, "max_episode_steps.*2.5"),
        ({"max_episode_steps": -3, "backend": "gymnasium"}, "max_episode_steps.*-3"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            tw.make(**{"id": "CartPole-v1", "num_envs": 2, **arguments})
    for valid in (
        {"dtype": torch.float64, "max_episode_steps": 9, "first_index": 4, "device": "cpu"},
        {"vectorization_mode": None, "info_keys": ()},
    ):
        assert tw.make("CartPole-v1", 2, **valid).num_envs == 2


def play_until_done(env, policy):
    """Steps until all episodes end: how many, and whether all of them were truncated."""
    td, steps = env.reset(seed=0), 0
    while True:
        transition, td = env.step(td.set("action", policy(td["observation"])))
        steps += 1
        if transition["next", "done"].all():
            return steps, transition["next", "truncated"].all().item()


def balance(observation):
    return (observation @ torch.tensor([0.3, 0.6, 9.0, 3.0]) > 0).long()


@each_backend
def test_max_episode_steps_replaces_the_registered_limit(backend):
    for max_episode_steps, limit in ((None, 500), (7, 7), (1, 1), (600, 600)):
        env = tw.make("CartPole-v1", 2, backend=backend, max_episode_steps=max_episode_steps)
        assert play_until_done(env, balance) == (limit, True)
        assert env.signature.max_episode_steps == env.spec.max_episode_steps == limit


# register.


@pytest.mark.parametrize(
    "func_env", [Pendulum, lambda g=1.62: Pendulum(g)], ids=["class", "function"]
)
@pytest.mark.parametrize("id", ["moon/Pendulum-v0", "MoonPendulum-v3"])
def test_registered_env_is_made_from_its_id_and_from_its_spec(registry, id, func_env):
    assert tw.register(id, func_env, max_episode_steps=7) is None
    env = tw.make(id, 3, g=2.0)
    assert type(env) is FunctionalEnv and type(env.func_env) is Pendulum and env.func_env.g == 2
    assert (env.spec.id, env.spec.max_episode_steps, env.num_envs) == (id, 7, 3)
    assert repr(env) == f"<{id}(num_envs=3, device=cpu)>"
    assert env.signature.max_episode_steps == 7 and tw.make(id, backend="torch").func_env.g in (
        10,
        1.62,
    )
    assert tw.make(id, max_episode_steps=9).signature.max_episode_steps == 9
    assert tw.make(id, max_episode_steps=-1).signature.max_episode_steps is None
    transformed = tw.TransformedEnv(env, T.ClipReward(-1, 0))
    for spec in (transformed.spec, EnvSpec.from_json(transformed.spec.to_json())):
        copy = tw.make(spec, 2, first_index=1)
        assert (
            copy.unwrapped.func_env.g == 2
            and copy.signature.max_episode_steps == 7
            and copy.num_envs == 2
        )
        assert type(copy.transforms[0]) is T.ClipReward
        assert torch.equal(copy.reset(seed=0)["observation"], env.reset(seed=0)["observation"][1:])


def test_registered_env_of_a_module_is_made_by_the_modules_name(registry, monkeypatch, tmp_path):
    (tmp_path / "moons.py").write_text(
        "import torchwrap as tw\nfrom torchwrap.envs.pendulum import Pendulum\n"
        "tw.register('moons/Io-v1', lambda: Pendulum(1.8), max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"make needs a registered id, but got 'moons/Io-v1'"):
        tw.make("moons/Io-v1")
    try:
        env = tw.make("moons:moons/Io-v1", 2)
        assert (
            env.spec.id == "moons/Io-v1"
            and tw.make(env.spec).func_env.g == tw.make("moons/Io-v1").func_env.g == 1.8
        )
        assert tw.make("moons:moons/Io-v1", backend="torch").signature.max_episode_steps == 5
    finally:
        sys.modules.pop("moons", None)


def test_register_with_invalid_arguments_raises_and_registers_nothing(registry):
    tw.register("moon/Taken-v0", Pendulum)
    before, own = dict(registry), dict(tw.registration._REGISTERED)
    form = 'an id of the form "namespace/Name-v0" or "Name-v0", but got'
    for id, func_env, limit, error, match in (
        (
            "CartPole-v1",
            Pendulum,
            5,
            ValueError,
            "an id that is not taken, but got 'CartPole-v1': give it another name",
        ),
        (
            "moon/Taken-v0",
            Pendulum,
            5,
            ValueError,
            "an id that is not taken, but got 'moon/Taken-v0'",
        ),
        ("Pendulum", Pendulum, 5, ValueError, f"{form} 'Pendulum'"),
        ("a/b/Pendulum-v0", Pendulum, 5, ValueError, form),
        ("Moon Pendulum-v0", Pendulum, 5, ValueError, form),
        ("moon:Pendulum-v0", Pendulum, 5, ValueError, form),
        ("moon/Pendulum-v00", Pendulum, 5, ValueError, form),
        (None, Pendulum, 5, ValueError, f"{form} None"),
        (
            "moon/P-v0",
            Pendulum(),
            5,
            TypeError,
            "a FuncEnv class, or a function that returns a FuncEnv.*: pass its class",
        ),
        (
            "moon/P-v0",
            FunctionalEnv,
            5,
            TypeError,
            r"a FuncEnv class.* the class FunctionalEnv without \['initial', ",
        ),
        (
            "moon/P-v0",
            "torchwrap.envs.pendulum:Pendulum",
            5,
            TypeError,
            "a FuncEnv class.* but got 'torchwrap.envs",
        ),
        (
            "moon/P-v0",
            Pendulum,
            0,
            ValueError,
            "max_episode_steps as an integer of at least 1, but got 0",
        ),
        (
            "moon/P-v0",
            Pendulum,
            1.5,
            TypeError,
            "max_episode_steps as an integer of at least 1, but got 1.5",
        ),
    ):
        with pytest.raises(error, match=f"register needs {match}"):
            tw.register(id, func_env, max_episode_steps=limit)
        assert registry == before and own == tw.registration._REGISTERED


def test_make_of_a_registered_env_with_invalid_arguments_raises(registry):
    tw.register("moon/P-v0", Pendulum)
    for arguments, match in (
        (
            {"backend": "gymnasium"},
            'make needs backend="torch" for an id of torchwrap.register, but got "gymnasium"',
        ),
        ({"length": 2}, "make needs arguments that moon/P-v0 takes: .*'length'"),
        ({"seed": 2}, "pass it to reset"),
        ({"info_keys": ["a"]}, "make takes no info_keys for 'moon/P-v0' with backend="),
        (
            {"max_episode_steps": torch.tensor([2, 3])},
            r"max_episode_steps as an integer of at least 1, but got tensor\(\[2",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            tw.make("moon/P-v0", 2, **arguments)
    with pytest.raises(
        ValueError,
        match=r"in \[.*'CartPole-v1'.*'moon/P-v0'\] for backend=\"torch\", but got 'Blackjack-v1'",
    ):
        tw.make("Blackjack-v1", backend="torch")
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(
            TypeError, match=r"cannot make an env of torchwrap.register: use `torchwrap.make\(id\)`"
        ):
            make("moon/P-v0")
    tw.register("moon/Q-v0", lambda: 3)
    with pytest.raises(
        TypeError,
        match="FunctionalEnv needs a FuncEnv with observation_space and action_space, but got 3",
    ):
        tw.make("moon/Q-v0")
