"""Spaces, limits, compilation and rendering of the classic control envs."""

import functools

import gymnasium
import numpy as np
import pytest
from classic_oracle import ANYWHERE, IDS, inject, sample_states
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


@pytest.mark.full
@pytest.mark.parametrize("id", mostly_full(IDS, "CartPole-v1", long=IDS[1:]))
def test_check_env_passes(id):
    check_env(functools.partial(tw.make, id, max_episode_steps=7))


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
