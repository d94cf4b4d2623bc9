"""ObservationGroups: each group equals the same transforms on an env of their own."""

import pytest
from catalogue import NUM_ENVS, AddNoise
from gymnasium import spaces

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def stacks():
    return {
        "policy": [T.NormalizeObservation(), T.ClipObservation(-1, 1)],
        "frames": [T.FrameStackObservation(3)],
        "raw": [],
    }


def test_each_group_equals_an_env_with_its_transforms_alone():
    grouped = tw.TransformedEnv(
        ScriptedEnv(NUM_ENVS, (2,)), T.ObservationGroups(stacks()), T.ClipReward(-1, 1)
    )
    alone = {
        name: tw.TransformedEnv(ScriptedEnv(NUM_ENVS, (2,)), *parts)
        for name, parts in stacks().items()
    }
    td, others = grouped.reset(seed=0), {name: env.reset(seed=0) for name, env in alone.items()}
    assert grouped.single_observation_space == spaces.Dict(
        {n: env.single_observation_space for n, env in alone.items()}
    )
    ended = 0
    for _ in range(20):
        action = grouped.sample_action()
        transition, td = grouped.step(td.set("action", action))
        ended += int(transition["next", "done"].sum())
        for name, env in alone.items():
            expected, others[name] = env.step(others[name].set("action", action))
            assert (
                transition["next", "observation", name] == expected["next", "observation"]
            ).all()
            assert (td["observation", name] == others[name]["observation"]).all()
        assert transition["next", "reward"].max() <= 1
    assert ended > NUM_ENVS


def test_group_changed_by_the_caller_leaves_the_others_as_they_are():
    td = tw.TransformedEnv(ScriptedEnv(2, (1,)), T.ObservationGroups({"one": [], "two": []})).reset(
        seed=0
    )
    td["observation", "one"].fill_(9)
    assert td["observation", "two"].flatten().tolist() == [0, 1000]


def test_statistics_of_each_group_are_saved_and_frozen():
    env, other = (
        tw.TransformedEnv(ScriptedEnv(n, (2,)), T.ObservationGroups(stacks())) for n in (4, 2)
    )
    tw.rollout(env, None, 10, env.reset(seed=0))
    other.load_state_dict(env.state_dict())
    statistics = [found.transforms[0].groups["policy"][0].statistics for found in (env, other)]
    assert (statistics[0].mean == statistics[1].mean).all() and (statistics[0].count >= 44).all()
    other.eval()
    tw.rollout(other, None, 5, other.reset(seed=1))
    assert (statistics[0].mean == statistics[1].mean).all()


def test_unfit_groups_raise():
    taken = T.NormalizeObservation()
    tw.TransformedEnv(ScriptedEnv(2), T.ObservationGroups({"one": [taken]}))
    others = (
        T.ClipReward(-1, 1),
        T.ClipAction(),
        T.TimeLimit(3),
        T.RecordEpisodeStatistics(),
        tw.PolicyState({"hidden": (2,)}),
    )
    needs_observations = r"needs transforms of observations, but got .* in 'one': put transforms of"
    for transform, words in (
        *((other, needs_observations) for other in others),
        (taken, "belong to no other env"),
    ):
        with pytest.raises(ValueError, match=words):
            tw.TransformedEnv(ScriptedEnv(2), T.ObservationGroups({"one": [transform], "two": []}))
            pytest.fail(f"{transform} is accepted")
    with pytest.raises(TypeError, match="needs"):
        T.ObservationGroups({"one": T.ClipAction()})


def test_noise_differs_between_groups_and_from_what_comes_above():
    groups, others = (
        T.ObservationGroups({"one": [AddNoise()], "two": [AddNoise()]}) for _ in range(2)
    )
    above = T.FilterObservation(["one", "two"]), T.FlattenObservation(), AddNoise()
    env = tw.TransformedEnv(ScriptedEnv(2, (2,)), groups, *above)
    assert env.signature.num_streams == 5  # the env's own, that of actions, and three of transforms
    seen = tw.TransformedEnv(ScriptedEnv(2, (2,)), others).reset(seed=0)
    assert (seen["observation", "one"] != seen["observation", "two"]).all()
