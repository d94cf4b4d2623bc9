"""Values of users that were accepted, or refused too late or without a name."""

import resource

import gymnasium
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import RewardTerms

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

# Snapshots.


def nested_list():
    """A file of a few kB holds this list of 100 million numbers, because it shares its parts."""
    ten_thousand = [0] * 10_000
    return [ten_thousand] * 10_000


def test_restore_of_a_list_is_refused_before_memory_is_taken():
    env = ScriptedEnv(2)
    env.reset(seed=0)
    snapshot = env.snapshot().to_dict()
    snapshot["buffers"] = nested_list()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TypeError, match="snapshot"):
        env.restore(snapshot)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 100 * 1024  # kilobytes


# Metrics and infos.

METRICS = {"vector": "vector", "nested": "terms"}


@pytest.mark.parametrize("name", METRICS.values(), ids=METRICS)
def test_metric_of_an_info_that_is_no_number_is_refused_by_name(name):
    recorder = T.RecordEpisodeStatistics(metrics={name: "sum"})
    env = tw.TransformedEnv(ScriptedEnv(2), RewardTerms(), recorder)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=f"RecordEpisodeStatistics: .*{name}"):
        env.step(env.sample_action())


class LateNone(gymnasium.Env):
    """Returns None as the info of the third step, or of the second reset."""

    observation_space = Box(-9, 9, (1,))
    action_space = Box(-9, 9, (1,))

    def __init__(self, late):
        self.late = late
        self.calls = {"reset": 0, "step": 0}

    def result(self, call):
        self.calls[call] += 1
        is_late = (call, self.calls[call]) == self.late
        info = None if is_late else {"energy": 1.0}
        observation = self.observation_space.low
        if call == "reset":
            return observation, info
        return observation, 0.0, False, False, info

    def reset(self, *, seed=None, options=None):
        return self.result("reset")

    def step(self, action):
        return self.result("step")


@pytest.mark.parametrize("late", [("step", 3), ("reset", 2)], ids=["step", "reset"])
def test_late_info_none_is_refused_by_name(late):
    mode = AutoresetMode.DISABLED
    vector_env = SyncVectorEnv([lambda: LateNone(late)], autoreset_mode=mode)
    env = tw.from_gymnasium(vector_env, info_keys=["energy"])
    env.reset()
    with pytest.raises(TypeError, match=rf"{late[0]} of env 0 .* info"):
        for _ in range(3):
            env.step(env.sample_action())
        env.reset()
