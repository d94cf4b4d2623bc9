from __future__ import annotations

import io

import pytest
import torch
from func_envs import (
    BroadcastItself,
    BroadcastNoisy,
    Nested,
    Noisy,
    Plain,
    Walk,
    changed,
    equal,
    play,
    some_actions,
)
from helpers import buffers, params
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap import transforms as T
from torchwrap.envs.cartpole import CartPole

FUNC_ENVS = [Noisy(), BroadcastNoisy(), Nested(), Plain(), BroadcastItself()]


def through_a_file(snapshot):
    file = io.BytesIO()
    torch.save(snapshot.to_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("carry", [lambda snapshot: snapshot, through_a_file], ids=["memory", "file"])
@pytest.mark.parametrize(
    "func_env",
    params({type(f).__name__: f for f in FUNC_ENVS}, quick=["BroadcastNoisy", "Nested"]),
)
def test_restored_env_continues_bit_for_bit(func_env, carry):
    env, other = (FunctionalEnv(func_env, 4, max_episode_steps=9) for _ in range(2))
    actions = some_actions(env, 30)
    _, td = play(env, env.reset(seed=5), actions[:7])
    snapshot = carry(env.snapshot())
    expected, _ = play(env, td, actions[7:])
    sampled = env.sample_action()
    for restored in (env, other):  # the same env, some steps later; and one that was never reset
        td_again = restored.restore(snapshot)
        assert equal(td_again["observation"], td["observation"])
        assert equal(play(restored, td_again, actions[7:])[0], expected)
        assert equal(restored.sample_action(), sampled)


def test_restored_transformed_env_continues_bit_for_bit():
    def make():
        return tw.TransformedEnv(
            FunctionalEnv(Noisy(), 4), T.TimeLimit(5), T.NormalizeObservation(), T.FrameStackObservation(3)
        )

    env, other = make(), make()
    actions = some_actions(env, 30)
    _, td = play(env, env.reset(seed=5), actions[:7])
    snapshot = through_a_file(env.snapshot())
    expected, _ = play(env, td, actions[7:])
    assert equal(play(other, other.restore(snapshot), actions[7:])[0], expected)


def test_snapshot_is_not_changed_by_later_steps_or_by_restore():
    env = FunctionalEnv(Noisy(), 4)
    play(env, env.reset(seed=5), some_actions(env, 3))
    snapshot = env.snapshot()
    kept = snapshot.clone()
    td = env.restore(snapshot)
    td["observation"].zero_()
    play(env, td, some_actions(env, 9))
    assert equal(snapshot, kept)


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: FunctionalEnv(Noisy(), 5), ValueError, r"restore needs .* of shape \(4,.*\) .*, but got \(5,.*\)"),
        (lambda: FunctionalEnv(Noisy(), 1), ValueError, r"restore needs .* of shape \(4,.*\) .*, but got \(1,.*\)"),
        (lambda: FunctionalEnv(Walk(), 4), ValueError, "snapshot of the same env, but got one that differs in .*state_count"),
        (lambda: FunctionalEnv(CartPole(), 4), ValueError, "snapshot of the same env, but got one that differs in .*state_x"),
        (lambda: FunctionalEnv(Noisy(), 4), None, ""),
    ],
    ids=["more envs", "fewer envs", "another env", "cartpole", "same"],
)
def test_restore_from_another_env_raises_and_changes_nothing(make, error, match):
    env, other = FunctionalEnv(Noisy(), 4), make()
    play(env, env.reset(seed=5), some_actions(env, 3))
    other.reset(seed=1)
    before, snapshot = buffers(env), other.snapshot()
    if error is None:
        assert env.restore(snapshot).batch_size == (4,)
    else:
        with pytest.raises(error, match=match):
            env.restore(snapshot)
        assert changed(env, before) == []


@pytest.mark.parametrize("bad", [None, {}, {"buffers": {}, "observation": 1}, TensorDict({}, []), "snapshot.pt"])
def test_restore_from_no_snapshot_raises(bad):
    env = FunctionalEnv(Noisy(), 2)
    with pytest.raises(
        (TypeError, ValueError), match=r"restore needs (what snapshot\(\) returned|a snapshot of the same env), but got"
    ):
        env.restore(bad)


def test_restore_with_another_dtype_raises_and_changes_nothing():
    env, double = FunctionalEnv(CartPole(), 2), FunctionalEnv(CartPole(dtype=torch.float64), 2)
    env.reset(seed=0)
    double.reset(seed=1)
    before = buffers(env)
    with pytest.raises(ValueError, match=r"needs state_x of shape \(2,\) torch.float32, but got \(2,\) torch.float64"):
        env.restore(double.snapshot())
    assert changed(env, before) == []


def test_restore_with_another_observation_raises_and_changes_nothing():
    env, other = FunctionalEnv(Walk(), 2), FunctionalEnv(Nested(), 2)
    env.reset(seed=0)
    play(other, other.reset(seed=1), torch.ones(2, 2, 1))
    before = buffers(env)
    with pytest.raises((TypeError, ValueError), match="observation"):
        env.restore(other.snapshot())
    assert changed(env, before) == []


def test_snapshot_before_reset_raises():
    with pytest.raises(RuntimeError, match=r"Call reset\(\) before snapshot\(\)"):
        FunctionalEnv(Walk(), 2).snapshot()
