"""ObservationGroups: each group equals the same transforms on an env of their own."""

import numpy as np
import pytest
import torch
from catalogue import NUM_ENVS
from gymnasium import spaces
from gymnasium.spaces import Box, Dict
from oracles import scripted

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def stacks():
    return {
        "policy": [T.NormalizeObservation(), T.ClipObservation(-1, 1)],
        "frames": [T.FrameStackObservation(3)],
        "raw": [],
    }


def grouped(groups, *above, num_envs=2):
    transforms = T.ObservationGroups(groups), *above
    return scripted(*transforms, num_envs=num_envs, observation_shape=(2,))


@pytest.mark.parametrize("name", stacks())
def test_group_equals_an_env_with_its_transforms_alone(name):
    env = grouped(
        stacks(),
        T.ClipReward(-1, 1),
        num_envs=NUM_ENVS,
    )
    alone = scripted(
        *stacks()[name],
        num_envs=NUM_ENVS,
        observation_shape=(2,),
    )
    assert env.single_observation_space[name] == alone.single_observation_space
    td = env.reset(seed=0)
    other = alone.reset(seed=0)
    ended = 0
    for _ in range(20):
        action = env.sample_action()
        transition, td = env.step(td.set("action", action))
        expected, other = alone.step(other.set("action", action))
        observation = transition["next", "observation", name]
        assert (observation == expected["next", "observation"]).all()
        assert (td["observation", name] == other["observation"]).all()
        assert transition["next", "reward"].max() <= 1
        ended += int(transition["next", "done"].sum())
    assert ended > NUM_ENVS


def test_groups_are_sorted_as_gymnasium_sorts_a_dict():
    space = grouped(stacks()).single_observation_space
    assert space == spaces.Dict(dict(space.spaces))
    assert list(space) == ["frames", "policy", "raw"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: T.ClipReward(-1, 1),
        T.ClipAction,
        lambda: T.TimeLimit(3),
        T.RecordEpisodeStatistics,
        lambda: tw.PolicyState({"hidden": (2,)}),
    ],
    ids=["reward", "action", "limit", "statistics", "policy state"],
)
def test_group_with_a_transform_of_anything_but_observations_raises(make):
    with pytest.raises(ValueError, match="groups"):
        grouped({"one": [make()], "two": []})


def test_other_entries_of_a_step_that_a_group_sets_are_kept():
    class Novelty(T.Transform):
        def step(self, td):
            return td.set("novelty", 2 * td["reward"])

    env = grouped({"one": [Novelty()], "two": []})
    env.reset(seed=0)
    transition, _ = env.step(env.sample_action())
    assert transition["next", "novelty"].equal(2 * transition["next", "reward"])


def test_named_transforms_of_a_group_keep_their_names():
    named = T.Compose({"raw": T.NormalizeObservation()})
    assert "raw" in dict(T.ObservationGroups({"one": named}).parts["one"].named_children())


def test_group_with_a_transform_of_another_env_raises():
    taken = T.NormalizeObservation()
    grouped({"one": [taken]})
    with pytest.raises(ValueError, match="other"):
        grouped({"one": [taken], "two": []})


# Modules cannot have most of these names.
NAMES = ["a.b", "a_b", "", "type", "keys", "keys_", "training"]


@pytest.mark.parametrize("kind", [T.ObservationGroups, T.ObservationKeys])
def test_group_may_have_any_name(kind):
    entry = Box(-np.inf, np.inf, (2,))
    space = entry if kind is T.ObservationGroups else Dict({name: entry for name in NAMES})

    def make():
        groups = {name: [T.NormalizeObservation()] for name in NAMES}
        return tw.TransformedEnv(ScriptedEnv(2, observation_space=space), kind(groups))

    env, other = make(), make()
    tw.rollout(env, None, 9)
    other.load_state_dict(env.state_dict())
    for name in NAMES:
        alone = tw.TransformedEnv(ScriptedEnv(2, (2,)), T.NormalizeObservation())
        tw.rollout(alone, None, 9)
        alone.eval()
        expected = alone.reset()["observation"]
        assert torch.equal(other.eval().reset()["observation", name], expected)
