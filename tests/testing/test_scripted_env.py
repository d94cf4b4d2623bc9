"""ScriptedEnv: exact values, endings in turn, and wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from torchwrap.testing import ScriptedEnv


def test_scripted_env_with_large_indices_gives_exact_observations():
    for space in (
        spaces.Box(-np.inf, np.inf, (3,), np.float64),
        spaces.Box(0, 2**40, (3,), np.int64),
    ):
        for first_index in (0, 2**22, 2**24 - 2):
            env = ScriptedEnv(
                2, episode_lengths=None, observation_space=space, first_index=first_index
            )
            env.reset(seed=0)
            for time in (1, 2):
                transition, _ = env.step(env.sample_action())
                expected = [
                    [1000 * (first_index + i) + 10 * j + time for j in range(3)] for i in range(2)
                ]
                assert transition["next", "observation"].tolist() == expected


def test_scripted_env_takes_lengths_and_endings_in_turn():
    for index in (0, 1, 5):
        env = ScriptedEnv(1, (1,), episode_lengths=(5, 2), first_index=index)
        td, seen = env.reset(seed=0), []
        for _ in range(12):
            transition, td = env.step(td.set("action", env.sample_action()))
            following = transition["next"]
            if following["done"]:
                seen.append(
                    (
                        following["reward"].item(),
                        following["terminated"].item(),
                        following["truncated"].item(),
                    )
                )
        endings = [(True, False), (False, True), (True, True)]
        assert (
            seen == [((5, 2)[(index + e) % 2], *endings[(index + e) % 3]) for e in range(len(seen))]
            and len(seen) >= 3
        )


def test_scripted_env_wrong_arguments_raise():
    for arguments, error, message in (
        (
            {"episode_lengths": 0},
            ValueError,
            "each of episode_lengths as an integer of at least 1, but got 0",
        ),
        ({"episode_lengths": ()}, ValueError, r"at least one of episode_lengths, but got \(\)"),
        (
            {"episode_lengths": "3"},
            TypeError,
            "each of episode_lengths as an integer of at least 1, but got '3'",
        ),
        ({"device": "nope"}, ValueError, "a torch.device or its name, but got 'nope'"),
        ({"ending": "never"}, ValueError, "ending=.* but got 'never'"),
    ):
        with pytest.raises(error, match=f"ScriptedEnv needs {message}"):
            ScriptedEnv(**arguments)
