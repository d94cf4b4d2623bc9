"""What the bridge refuses, before the simulator moves, and how it describes itself."""

from __future__ import annotations

import functools
import multiprocessing

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from single_envs import (
    BOX,
    DISABLED,
    SAME_STEP,
    Scripted,
    sample_and_step,
    scripted,
)
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T

gymnasium.register("TorchwrapTest/Text-v0", entry_point=Scripted, kwargs={"space": spaces.Text(5)})


class NoMode(SyncVectorEnv):
    def __init__(self, makers):
        super().__init__(makers)
        self.metadata = {"render_modes": []}


@pytest.mark.parametrize(
    "make_one, error, match",
    [
        (lambda: SyncVectorEnv(scripted(2)), ValueError, "DISABLED or SAME_STEP, but got .*NEXT_STEP.*vector_kwargs="),
        (lambda: gymnasium.make_vec("CartPole-v1", 2), ValueError, "NEXT_STEP.*or with torchwrap.make"),
        (lambda: NoMode(scripted(2)), ValueError, "DISABLED or SAME_STEP, but got None"),
        (lambda: gymnasium.make("CartPole-v1"), TypeError, r"needs a gymnasium.vector.VectorEnv, but got .*make_vec"),
        (lambda: None, TypeError, "VectorEnv, but got NoneType"),
        (lambda: "CartPole-v1", TypeError, "VectorEnv, but got str"),
        (
            lambda: SyncVectorEnv(scripted(2, space=spaces.Text(5)), autoreset_mode=DISABLED),
            TypeError,
            "Dict or Tuple, but got Text",
        ),
        (lambda: SyncVectorEnv(scripted(2, space=BOX), autoreset_mode=DISABLED), None, ""),
        (lambda: SyncVectorEnv(scripted(2, space=BOX), autoreset_mode=SAME_STEP), None, ""),
    ],
)
def test_from_gymnasium_without_a_suitable_vector_env_raises_with_a_remedy(make_one, error, match):
    given = make_one()
    if error is None:
        assert tw.from_gymnasium(given).reset().batch_size == (2,)
    else:
        with pytest.raises(error, match=match):
            tw.from_gymnasium(given)


@pytest.mark.parametrize(
    "action, error, match",
    [
        (torch.zeros(2, 3), ValueError, r"an action of shape \(2, 2\) \(num_envs first\), but got \(2, 3\)"),
        (torch.zeros(2), ValueError, r"of shape \(2, 2\)"),
        (torch.zeros(3, 2), ValueError, r"of shape \(2, 2\)"),
        (torch.zeros(2, 2, dtype=torch.float64), TypeError, "dtype torch.float32 .* but got torch.float64"),
        (None, ValueError, r'needs td\["action"\]'),
    ],
)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_invalid_action_raises_before_the_simulator_moves(bridge, kind, action, error, match):
    env = bridge(scripted(2), kind)
    env.reset(seed=0)
    given = {} if action is None else {"action": action}
    with pytest.raises(error, match=match):
        env.step(TensorDict(given, batch_size=[]))
    assert env.vector_env.get_attr("steps") == (0, 0)


@pytest.mark.parametrize(
    "action, error, match",
    [
        (torch.zeros(2, 3), TypeError, r"an action as a TensorDict with keys \['a', 'b'\], but got Tensor"),
        (TensorDict({"a": torch.zeros(2, dtype=torch.int64)}, [2]), TypeError, r"keys \['a', 'b'\], but got \['a'\]"),
        (TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, 3)}, [2]), TypeError, r"an action\['a'\] of dtype torch.int64"),
        (TensorDict({"a": torch.full((2,), 3), "b": torch.zeros(2, 3)}, [2]), ValueError, r"an action\['a'\] in Discrete"),
    ],
)
def test_invalid_nested_action_raises_before_the_simulator_moves(bridge, action, error, match):
    env = bridge(scripted(2, action_space=spaces.Dict({"a": spaces.Discrete(3), "b": BOX})))
    td = env.reset(seed=0)
    with pytest.raises(error, match=match):
        env.step(td.set("action", action))
    assert env.vector_env.get_attr("steps") == (0, 0)


@pytest.mark.parametrize(
    "space, bad, good",
    [
        (spaces.Discrete(3), [0, 3], [0, 2]),
        (spaces.Discrete(3), [-1, 0], [1, 0]),
        (spaces.Discrete(3, start=5), [5, 0], [5, 7]),
        (spaces.MultiDiscrete([2, 4]), [[1, 3], [2, 3]], [[1, 3], [0, 0]]),
    ],
)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_discrete_action_out_of_range_raises_before_the_simulator_moves(bridge, kind, space, bad, good):
    env = bridge(scripted(2, action_space=space), kind)
    td = env.reset(seed=0)
    with pytest.raises(ValueError, match=r"needs an action in .*, but got values from"):
        env.step(td.set("action", torch.tensor(bad)))
    assert env.vector_env.get_attr("steps") == (0, 0)
    env.step(td.set("action", torch.tensor(good)))
    assert env.vector_env.get_attr("steps") == (1, 1)


@pytest.mark.parametrize(
    "mask",
    [[True, False], torch.ones(2), torch.ones(3, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool), np.ones(2, bool)],
    ids=["list", "float", "three", "column", "numpy"],
)
def test_invalid_mask_raises(bridge, mask):
    env = bridge(scripted(2))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"reset needs a mask of shape \(2,\) torch.bool on cpu, but got"):
        env.reset(mask=mask)
    assert env.vector_env.get_attr("episode") == (1, 1)


def test_step_and_partial_reset_before_reset_raise(bridge):
    env = bridge(scripted(2))
    with pytest.raises(RuntimeError, match=r"Call reset\(\) before step\(\)"):
        env.step(TensorDict({"action": torch.zeros(2, 2)}, batch_size=[2]))
    with pytest.raises(RuntimeError, match="needs a first reset of every env"):
        env.reset(mask=torch.tensor([True, False]))


def test_snapshot_and_restore_of_a_simulator_on_the_host_raise(bridge):
    env, native = bridge([functools.partial(gymnasium.make, "CartPole-v1")] * 2), tw.make("CartPole-v1", 2)
    env.reset(seed=0)
    native.reset(seed=0)
    with pytest.raises(
        RuntimeError, match="needs its state in tensors for snapshot and restore, but a simulator outside of PyTorch"
    ):
        env.snapshot()
    with pytest.raises(RuntimeError, match="a simulator outside of PyTorch"):
        env.restore(native.snapshot())
    with pytest.raises(RuntimeError, match="a simulator outside of PyTorch"):
        tw.TransformedEnv(env, T.TimeLimit(4)).restore(native.snapshot())


@pytest.mark.parametrize(
    "id, kwargs",
    [
        ("TorchwrapTest/Text-v0", {}),
        ("TorchwrapTest/Scripted-v0", {"first_index": -1}),
        ("TorchwrapTest/Scripted-v0", {"info_keys": 3}),
    ],
)
def test_make_that_fails_leaves_no_process_behind(id, kwargs):
    before = set(multiprocessing.active_children())
    with pytest.raises((TypeError, ValueError)):
        tw.make(id, 2, backend="gymnasium", vectorization_mode="async", **kwargs)
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.terminate()
        process.join()
    assert not left


# Description.


def test_description_matches_the_vector_env():
    vector_env = gymnasium.make_vec("HalfCheetah-v5", 3, "sync", vector_kwargs={"autoreset_mode": SAME_STEP})
    env = tw.from_gymnasium(vector_env)
    assert env.num_envs == 3
    assert env.single_observation_space == vector_env.single_observation_space
    assert env.observation_space == vector_env.observation_space
    assert env.action_space == vector_env.action_space
    assert env.metadata["autoreset_mode"] is SAME_STEP
    assert env.spec.id == "HalfCheetah-v5"
    assert env.signature.max_episode_steps == 1000
    env.close()


@pytest.mark.parametrize("id, kwargs, limit", [("CartPole-v1", {}, 500), ("CartPole-v1", {"max_episode_steps": 7}, 7)])
def test_signature_has_the_time_limit_in_force(id, kwargs, limit):
    assert tw.make(id, 2, backend="gymnasium", **kwargs).signature.max_episode_steps == limit


def test_close_closes_the_vector_env():
    env = tw.make("TorchwrapTest/Scripted-v0", 2, vectorization_mode="async")
    env.close()
    assert env.vector_env.closed
    assert not [process for process in env.vector_env.processes if process.is_alive()]


def test_render_returns_the_frames_of_the_vector_env():
    env = tw.make("TorchwrapTest/Scripted-v0", 2, lengths=(9,), render_mode="rgb_array")
    sample_and_step(env, env.reset())
    assert env.render_mode == "rgb_array"
    assert np.array_equal(env.render(), np.ones((2, 2, 2, 3)))


def test_make_passes_on_constructor_and_vector_arguments():
    env = tw.make("TorchwrapTest/Scripted-v0", 2, lengths=(2,), ending="both", vector_kwargs={"observation_mode": "same"})
    _, td = sample_and_step(env, env.reset(seed=0))
    transition, _ = sample_and_step(env, td)
    assert transition["next", "terminated"].all() and transition["next", "truncated"].all()
