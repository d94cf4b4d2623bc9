from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap.interop.gymnasium import GymnasiumEnv


@pytest.mark.parametrize(
    "id, backend, kind",
    [
        ("CartPole-v1", None, FunctionalEnv),
        ("CartPole-v1", "torch", FunctionalEnv),
        ("CartPole-v1", "gymnasium", GymnasiumEnv),
        ("MountainCar-v0", "gymnasium", GymnasiumEnv),
        ("CartPole-v0", None, FunctionalEnv),
        ("Taxi-v4", None, GymnasiumEnv),
    ],
)
def test_make_prefers_torch_and_falls_back_to_gymnasium(id, backend, kind):
    env = tw.make(id, 2, backend=backend)
    assert type(env) is kind
    assert env.num_envs == 2
    assert env.spec.id == id
    assert repr(env) == f"<{id}(num_envs=2, device=cpu)>"
    env.close()


@pytest.mark.parametrize(
    "vectorization_mode, kind",
    [
        (None, gymnasium.vector.SyncVectorEnv),
        ("sync", gymnasium.vector.SyncVectorEnv),
        ("async", gymnasium.vector.AsyncVectorEnv),
    ],
)
def test_make_with_a_vectorization_mode_uses_that_vector_env(vectorization_mode, kind):
    env = tw.make("CartPole-v1", 2, backend="gymnasium", vectorization_mode=vectorization_mode)
    assert type(env.vector_env) is kind
    assert env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.DISABLED
    env.close()


def test_make_without_num_envs_makes_one_env():
    assert tw.make("CartPole-v1").num_envs == tw.make("CartPole-v1", backend="gymnasium").num_envs == 1


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"id": "CartPoule-v1"}, "make needs a registered id, but got 'CartPoule-v1'.*doesn't exist"),
        ({"id": "CartPole-v77"}, "make needs a registered id, but got 'CartPole-v77'"),
        ({"id": "Nowhere/CartPole-v1"}, "make needs a registered id, but got 'Nowhere/CartPole-v1'"),
        ({"id": ""}, "make needs a registered id, but got ''"),
        ({"id": "CartPoule-v1", "backend": "gymnasium"}, "make needs a registered id, but got 'CartPoule-v1'"),
        (
            {"id": "Taxi-v4", "backend": "torch"},
            r"an id in \[.*'CartPole-v1'.*\] for backend=\"torch\", but got 'Taxi-v4'",
        ),
        ({"id": None}, "make needs an id, a string, or an env's spec, but got None"),
        ({"id": 3}, "make needs an id, a string, or an env's spec, but got 3"),
        ({"backend": "jax"}, 'backend "torch" or "gymnasium", but got \'jax\''),
        ({"device": "nope"}, "make needs a torch.device or its name, but got 'nope'"),
        ({"device": torch.float32}, "make needs a torch.device or its name, but got torch.float32"),
        ({"backend": True}, 'backend "torch" or "gymnasium", but got True'),
        ({"num_envs": 0}, "num_envs of at least 1, but got 0"),
        ({"num_envs": -4}, "num_envs of at least 1, but got -4"),
        ({"num_envs": True}, "num_envs of at least 1, but got True"),
        ({"num_envs": 2.0}, "num_envs of at least 1, but got 2.0"),
        ({"num_envs": "2"}, "num_envs of at least 1, but got '2'"),
        ({"num_envs": "2"}, "integer num_envs of at least 1, but got '2'"),
        ({"vectorization_mode": "sync"}, 'needs backend="gymnasium" for vectorization_mode, info_keys'),
        ({"info_keys": ("a",)}, 'needs backend="gymnasium" for vectorization_mode, info_keys'),
        ({"vectorization_mode": "fork", "backend": "gymnasium"}, 'vectorization_mode "sync" or "async", but got \'fork\''),
        (
            {"vectorization_mode": "vector_entry_point", "backend": "gymnasium"},
            'vectorization_mode "sync" or "async", but got \'vector_entry_point\'',
        ),
        ({"length": 2}, "arguments that CartPole-v1 takes in torch.*'length'"),
        ({"render_mode": "human"}, "render_mode in .*rgb_array.*, but got 'human'"),
        ({"length": 2, "backend": "gymnasium"}, "length"),
        ({"first_index": -1}, "first_index of at least 0, but got -1"),
        ({"first_index": 0.5}, "first_index of at least 0, but got 0.5"),
        ({"first_index": -1, "backend": "gymnasium"}, "first_index of at least 0, but got -1"),
        ({"max_episode_steps": 0}, "max_episode_steps.*0"),
        ({"max_episode_steps": -3}, "max_episode_steps.*-3"),
        ({"max_episode_steps": 2.5}, "max_episode_steps.*2.5"),
        ({"max_episode_steps": 0, "backend": "gymnasium"}, "max_episode_steps.*0"),
        ({"max_episode_steps": -3, "backend": "gymnasium"}, "max_episode_steps.*-3"),
        ({"sutton_barto_reward": True}, None),
        ({"sutton_barto_reward": True, "backend": "gymnasium"}, None),
        ({"dtype": torch.float64, "max_episode_steps": 9, "first_index": 4, "device": "cpu"}, None),
        ({"vectorization_mode": None, "info_keys": ()}, None),
    ],
    ids=str,
)
def test_make_with_invalid_arguments_raises(arguments, match):
    arguments = {"id": "CartPole-v1", "num_envs": 2, **arguments}
    if match is None:
        assert tw.make(**arguments).num_envs == 2
    else:
        with pytest.raises((ValueError, TypeError), match=match):
            tw.make(**arguments)


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


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
@pytest.mark.parametrize("max_episode_steps, limit", [(None, 500), (7, 7), (1, 1), (600, 600)])
def test_max_episode_steps_replaces_the_registered_limit(backend, max_episode_steps, limit):
    env = tw.make("CartPole-v1", 2, backend=backend, max_episode_steps=max_episode_steps)
    assert play_until_done(env, balance) == (limit, True)
    assert env.signature.max_episode_steps == limit
    assert env.spec.max_episode_steps == limit


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_make_passes_constructor_arguments_on(backend):
    env = tw.make("CartPole-v1", 2, backend=backend, sutton_barto_reward=True)
    transition, _ = env.step(env.reset(seed=0).set("action", torch.tensor([0, 1])))
    assert transition["next", "reward"].tolist() == [[0], [0]]
    assert env.spec.kwargs["sutton_barto_reward"] is True


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_make_with_first_index_makes_a_shard(backend):
    whole = tw.make("CartPole-v1", 4, backend=backend).reset(seed=3)["observation"]
    shards = [tw.make("CartPole-v1", 2, backend=backend, first_index=first).reset(seed=3)["observation"] for first in (0, 2)]
    assert torch.equal(whole, torch.cat(shards))
    assert len(np.unique(whole.numpy(), axis=0)) == 4


def test_make_does_not_change_the_registry():
    before = str(gymnasium.spec("CartPole-v1"))
    for backend in ("torch", "gymnasium"):
        env = tw.make("CartPole-v1", 2, backend=backend, max_episode_steps=7, sutton_barto_reward=True)
        env.spec.kwargs["other"] = 1
    assert str(gymnasium.spec("CartPole-v1")) == before


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_spec_is_gymnasiums(backend):
    spec, registered = tw.make("CartPole-v1", 2, backend=backend).spec, gymnasium.spec("CartPole-v1")
    assert isinstance(spec, gymnasium.envs.registration.EnvSpec)
    assert (spec.id, spec.reward_threshold, spec.max_episode_steps) == ("CartPole-v1", registered.reward_threshold, 500)


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_make_with_a_device_creates_tensors_there(backend):
    env = tw.make("CartPole-v1", 2, backend=backend, device=torch.device("cpu"))
    td = env.reset(seed=0)
    assert env.device == td["observation"].device == env.sample_action().device == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_make_on_cuda_creates_tensors_there(backend):
    env = tw.make("CartPole-v1", 2, backend=backend, device="cuda")
    transition, td = env.step(env.reset(seed=0).set("action", env.sample_action()))
    assert env.device.type == "cuda"
    assert {leaf.device.type for leaf in [*transition.values(True, True), td["observation"]]} == {"cuda"}


# At the top.


def test_from_gymnasium_at_the_top_wraps_a_vector_env():
    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    vector_env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs=mode)
    env = tw.from_gymnasium(vector_env)
    assert type(env) is GymnasiumEnv and env.vector_env is vector_env and "from_gymnasium" in tw.__all__
    single, _ = gymnasium.make("CartPole-v1").reset(seed=4)
    np.testing.assert_array_equal(env.reset(seed=3)["observation"][1], single)
    env.close()
