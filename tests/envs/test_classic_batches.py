"""Spaces, limits, compilation and rendering of the classic control envs."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from classic_oracle import ANYWHERE, IDS, as_state, inject, sample_states
from helpers import mostly_full

import torchwrap as tw
from torchwrap import FunctionalEnv
from torchwrap.testing import check_env


@pytest.mark.parametrize("id", [*IDS, "CartPole-v0"])
def test_spaces_time_limit_and_frame_rate_match_gymnasium(id):
    env = tw.make(id, 3)
    single = gymnasium.make(id)
    assert type(env) is FunctionalEnv
    for name in ("observation_space", "action_space"):
        ours = getattr(env, f"single_{name}")
        theirs = getattr(single, name)
        assert ours == theirs and ours.dtype == theirs.dtype
    assert env.signature.max_episode_steps == single.spec.max_episode_steps
    assert env.metadata["render_fps"] == single.metadata["render_fps"]
    assert env.spec.reward_threshold == single.spec.reward_threshold


@pytest.mark.parametrize("id", mostly_full(IDS, "CartPole-v1", long=IDS[1:]))
def test_check_env_passes(id):
    check_env(functools.partial(tw.make, id, max_episode_steps=7))


@pytest.mark.long
@pytest.mark.full
def test_compiled_float32_state_with_float64_matches_eager():
    id = "MountainCarContinuous-v0"
    initial = sample_states(ANYWHERE[id], 64, np.random.default_rng(0))
    actions = torch.empty(12, 64, 1).uniform_(-2, 2, generator=torch.Generator().manual_seed(0))
    results = []
    for is_compiled in (False, True):
        env = tw.make(id, 64, dtype=torch.float64, max_episode_steps=5)
        if is_compiled:
            tw.compile(env)
        td = env.reset(seed=0)
        inject(env, as_state(id, initial))
        for action in actions:  # past the end of two episodes
            transition, td = env.step(td.set("action", action))
            results.append(
                {
                    **transition["next"].clone().to_dict(),
                    "root": td["observation"],
                }
            )
    torch.testing.assert_close(
        results[:12],
        results[12:],
        rtol=0,
        atol=1e-8,
    )


@pytest.mark.parametrize("id", IDS)
def test_render_matches_gymnasium(id):
    pytest.importorskip("pygame")
    env = tw.make(id, 4, render_mode="rgb_array")
    single = gymnasium.make(id, render_mode="rgb_array")
    env.reset(seed=0)
    single.reset(seed=0)
    states = sample_states(ANYWHERE[id], 4, np.random.default_rng(0)).astype(np.float32)
    inject(env, states)
    frames = env.render()
    for frame, state in zip(frames, states, strict=True):
        single.unwrapped.state = state.astype(np.float64)
        np.testing.assert_array_equal(frame, single.render())
    assert not np.array_equal(frames[0], frames[1])
    np.testing.assert_array_equal(env.render([2])[0], frames[2])
    single.close()
    env.close()
    np.testing.assert_array_equal(env.render()[3], frames[3])  # render works again after close
    env.close()
