from __future__ import annotations

import io

import pytest
import torch
from func_envs import BroadcastItself, BroadcastNoisy, Nested, Noisy, Plain, equal, play, some_actions
from helpers import each_copy, params

from torchwrap import FunctionalEnv

FUNC_ENVS = [Noisy(), BroadcastNoisy(), Nested(), Plain(), BroadcastItself()]


def through_a_file(snapshot):
    file = io.BytesIO()
    torch.save(snapshot.to_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("carry", [lambda snapshot: snapshot, through_a_file], ids=["memory", "file"])
@pytest.mark.parametrize("func_env", params({type(f).__name__: f for f in FUNC_ENVS}, quick=["BroadcastNoisy", "Nested"]))
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


@each_copy
def test_copy_continues_like_the_env_and_shares_no_memory(replicate):
    env = FunctionalEnv(Noisy(), 4, max_episode_steps=9)
    actions = some_actions(env, 20)
    _, td = play(env, env.reset(seed=5), actions[:7])
    twin = replicate(env)
    assert equal(play(env, td.clone(), actions[7:])[0], play(twin, td.clone(), actions[7:])[0])
    assert not {buffer.data_ptr() for buffer in env.buffers()} & {buffer.data_ptr() for buffer in twin.buffers()}
