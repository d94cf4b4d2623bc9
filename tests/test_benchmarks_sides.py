"""tests/benchmarks: every side steps the same env, and counts its work correctly."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from torchwrap import RowMask

ROOT = Path(__file__).parents[1]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"tests.benchmarks.{name}")


def ends(name, answer):
    if name == "torchwrap_side":
        return int(answer["next", "done"].sum())
    return int((answer[2] | answer[3]).sum() if name == "gymnasium_peer" else answer[2].sum())


@pytest.mark.parametrize("side", ["torchwrap_side", "gymnasium_peer", "sb3_peer"])
@pytest.mark.parametrize("whole", [False, True])
def test_ends_of_episodes_are_spread_evenly(load, side, whole):
    if side == "sb3_peer":
        pytest.importorskip("stable_baselines3")
    transforms = (whole if side == "sb3_peer" else load("glue").THREE) if whole or side == "sb3_peer" else None
    timed = load(side).scripted(40, transforms)
    found = [ends(side, timed.call()) for _ in range(200)]
    first = found.index(1)  # torchwrap's side has taken some steps, to measure what it returns
    assert found == [int(step % 5 == first) for step in range(200)]


def test_gymnasium_side_wastes_the_step_after_an_end(load):
    env = load("gymnasium_peer").Script(1)
    env.reset()
    rewards = [env.step(None)[1].item() for _ in range(203)]
    assert rewards == [*range(1, 201), 0, 1, 2]


def test_state_that_changes_counts_as_read_and_written(load):
    side, env = load("torchwrap_side"), load("script").scripted(5)
    env.reset(seed=0)
    actions = load("script").actions(5)
    buffers = sum(buffer.nbytes for buffer in env.buffers())
    assert side._state(env, lambda: env.step(actions)) == buffers + env.elapsed.nbytes


def test_lower_bound_computes_what_the_env_does(load):
    step, bound = load("lower_bound").pair(16)
    next_root = None
    for _ in range(420):  # each env ends twice
        transition, (*successor, following) = step(), bound()
        if next_root is not None:
            assert torch.equal(transition["observation"], next_root)
        next_root, keys = following, ("observation", "reward", "done", "episode_return", "episode_length")
        for key, value in zip(keys, successor, strict=True):
            assert torch.equal(transition["next", key], value) and transition["next", key].dtype == value.dtype


def test_torch_and_numpy_scripts_are_equal(load):
    script = load("script")
    env, array = script.scripted(3), script.NumpyScript(3)
    env.reset(seed=0)
    array.reset(np.ones(3, bool))
    env.elapsed.copy_(script.elapsed(3))
    array.elapsed[:] = script.elapsed(3).numpy()
    for _ in range(200):
        successor = env._step(script.actions(3))
        for key, value in zip(("observation", "reward", "terminated", "truncated"), array.step(), strict=True):
            np.testing.assert_array_equal(successor[key].reshape(value.shape).numpy(), value)
        ended = successor["terminated"] | successor["truncated"]
        env._reset(RowMask(ended))
        array.reset(ended.squeeze(-1).numpy())


def test_every_transform_is_measured(load):
    from torchwrap import transforms as T

    bases = {"ActionTransform", "Compose", "ObservationTransform", "RewardTransform", "RunningMeanStd", "Transform"}
    bases.add("PassiveEnvChecker")  # not meant for training
    bases |= {"ObservationGroups", "PolicyState", "atari"}  # what others do, and what a policy does
    assert set(load("each").TRANSFORMS) == set(load("torchwrap_side").TRANSFORMS) == set(T.__all__) - bases
    with_peer = {name for name, known in load("each").TRANSFORMS.items() if known}
    assert with_peer == set(load("gymnasium_peer").WRAPPERS)
    assert set(load("number").EIGHT) <= set(T.__all__)


@pytest.mark.parametrize("side", ["torchwrap_side", "gymnasium_peer"])
def test_every_transform_steps_on_its_side(load, side):
    theirs, see = side == "gymnasium_peer", load("each").SEE
    for name in load("gymnasium_peer").WRAPPERS if theirs else load("torchwrap_side").TRANSFORMS:
        load(side).scripted(3, [name], **({} if theirs else {"see": see.get(name, "numbers")})).call()


def test_images_on_both_sides_are_equal(load):
    ours = load("torchwrap_side").atari(3).call()[0]["next", "observation"]
    theirs = load("opencv_peer").atari(3, "formula")
    for _ in range(4):
        stacked = theirs.call()
    np.testing.assert_array_equal(ours.numpy(), stacked)


def test_gymnax_side_counts_every_observation_once_and_stacks_it(load):
    pytest.importorskip("gymnax")
    jax, peer, n = importlib.import_module("jax"), load("jax_peer"), 8
    stacked, bare = peer.CartPole(n, stack=True), peer.CartPole(n, stack=False)
    ours, raw = (jax.jit(env.reset)(jax.random.key(0)) for env in (stacked, bare))
    step_ours, step_raw = jax.jit(stacked.step), jax.jit(bare.step)
    observations, ended = [np.asarray(raw.observation)], 0
    for step in range(60):
        action = jax.numpy.full(n, step % 2)
        frames = ours.observation
        (ours, got), (raw, real) = step_ours(ours, action), step_raw(raw, action)
        done = np.asarray(real["done"])
        ended += done.sum()
        observations += [np.asarray(real["next_observation"]), np.asarray(raw.observation)[done]]
        every = np.concatenate(observations)
        assert int(ours.statistics.count) == len(every)

        def normal(value, every=every):
            return np.clip((value - every.mean(0)) / np.sqrt(every.var(0) + 1e-8), -10, 10)

        close = dict(rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(got["next_observation"][:, -1], normal(real["next_observation"]), **close)
        np.testing.assert_array_equal(got["next_observation"][:, :-1], frames[:, 1:])
        initial = np.asarray(ours.observation)[done]
        np.testing.assert_allclose(initial, normal(np.asarray(raw.observation)[done])[:, None].repeat(4, 1), **close)
        np.testing.assert_array_equal(np.asarray(ours.observation)[~done], np.asarray(got["next_observation"])[~done])
    assert ended > n and math.isfinite(float(ours.observation.sum()))


def test_two_samples_distinguishes_distributions(load):
    two_samples, random = load("soak").two_samples, np.random.default_rng(0)
    one, same, shifted = random.normal(size=2000), random.normal(size=3000), random.normal(0.2, size=3000)
    assert two_samples(one, same) > 0.01 and two_samples(one, one) == 1 and two_samples(one, shifted) < 1e-6
    # By hand: half of one sample is below all of the other, n m / (n + m) = 50, distance 0.5: 2 exp(-2 * 50 * 0.25) - ...
    halves = np.concatenate([np.zeros(50), np.ones(50)])
    assert two_samples(halves, np.ones(100)) == pytest.approx(2 * np.exp(-25), rel=1e-6)


def test_soak_runs_on_both_sides(load):
    ours = load("torchwrap_side").soak("Pendulum-v1", num_envs=4, steps=1000, episodes=6)
    assert ours["steps"] == 1000 and ours["finite"] == 1 and len(ours["returns"]) == 6
    theirs = load("gymnasium_peer").returns("Pendulum-v1", 3)["returns"]
    assert all(-2000 < total < -500 for total in ours["returns"] + theirs)


@pytest.mark.parametrize("pool", [None, 0, 8])
def test_expensive_initial_states_step_with_and_without_a_pool(load, pool):
    settling = load("torchwrap_side").settling(3, pool)
    settling.call()
