"""What the fuzzers have found, as small as it gets."""

from __future__ import annotations

import torch
from gymnasium import spaces
from helpers import assert_same

import torchwrap as tw
from torchwrap import wrappers as W
from torchwrap.envs.pendulum import Pendulum
from torchwrap.testing import ScriptedEnv


def test_initial_states_of_repeated_actions_do_not_depend_on_other_envs():
    alone, batch = (W.RepeatAction(tw.FunctionalEnv(Pendulum(), num_envs, max_episode_steps=3), 2) for num_envs in (1, 2))
    td, tds = alone.reset(seed=0), batch.reset(seed=0)
    for step in range(60):
        if step == 1:
            tds = batch.reset(mask=torch.tensor([False, True]))
        td, tds = alone.step(torch.zeros(1, 1))[1], batch.step(torch.zeros(2, 1))[1]
        assert_same(td, tds[:1])


def test_root_of_restore_shares_no_memory_with_the_snapshot():
    env = ScriptedEnv(2, observation_space=spaces.Dict(a=spaces.Box(1, 9, (2,))))
    env.reset(seed=0)
    snapshot = env.snapshot()
    env.restore(snapshot)["observation", "a"].zero_()
    assert (snapshot["observation", "a"] > 0).all()
