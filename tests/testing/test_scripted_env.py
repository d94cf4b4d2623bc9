"""ScriptedEnv: exact values, endings in turn, and wrong arguments."""

import numpy as np
import pytest
from gymnasium import spaces

from torchwrap.testing import ScriptedEnv

SPACES = {
    "float64": spaces.Box(
        -np.inf,
        np.inf,
        (3,),
        np.float64,
    ),
    "int64": spaces.Box(0, 2**40, (3,), np.int64),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("first_index", [0, 2**22, 2**24 - 2])
def test_scripted_env_with_large_indices_gives_exact_observations(space, first_index):
    env = ScriptedEnv(2, episode_lengths=None, observation_space=space, first_index=first_index)
    env.reset(seed=0)
    for time in (1, 2):
        transition, _ = env.step(env.sample_action())
        starts = [1000 * (first_index + row) + time for row in range(2)]
        expected = [[start, start + 10, start + 20] for start in starts]
        assert transition["next", "observation"].tolist() == expected


@pytest.mark.parametrize("index", [0, 1, 5])
def test_scripted_env_takes_lengths_and_endings_in_turn(index):
    env = ScriptedEnv(
        1,
        (1,),
        episode_lengths=(5, 2),
        first_index=index,
    )
    env.reset(seed=0)
    seen = []
    for _ in range(12):
        transition, _ = env.step(env.sample_action())
        if transition["next", "done"]:
            keys = ("reward", "terminated", "truncated")
            seen.append([transition["next", key].item() for key in keys])
    lengths = [5, 2, 5, 2, 5, 2, 5, 2]
    endings = [
        [1, 0],
        [0, 1],
        [1, 1],
    ] * 3
    expected = [
        [
            lengths[turn],
            *endings[turn],
        ]
        for turn in range(index, index + 3)
    ]
    assert seen[:3] == expected


WRONG = [
    (ValueError, "device", "nope"),
    (ValueError, "ending", "never"),
]


@pytest.mark.parametrize(("error", "name", "value"), WRONG, ids=str)
def test_scripted_env_with_a_wrong_argument_raises(error, name, value):
    with pytest.raises(error, match=f"ScriptedEnv.*{name}"):
        ScriptedEnv(**{name: value})
