"""Values of users that were accepted, or refused too late or without a name."""

import resource

import pytest
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
