"""Transforms that count steps and episodes, against Gymnasium's wrappers."""

import functools
import itertools

import numpy as np
import oracles
import pytest
import torch
from gymnasium import spaces, wrappers
from gymnasium.vector import AutoresetMode
from oracles import ENDINGS, RandomEnv, assert_agrees, quick, step, vector_env
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

SPACE = spaces.Box(-9, 9, (1,), np.float64)
random_env = functools.partial(RandomEnv, SPACE, max_length=6)
make = functools.partial(oracles.make, SPACE, max_length=6)
scripted = functools.partial(oracles.scripted, num_envs=2, observation_shape=(1,))


def advance(env, num_steps):
    return step(env, env.reset(), num_steps)


@pytest.mark.parametrize("buffer_length", quick([1, 2, 3, 7, 100], 3, 100))
def test_record_episode_statistics_equals_gymnasiums_vector_wrapper(buffer_length):
    env = make(T.RecordEpisodeStatistics(buffer_length), num_envs=4)
    same_step = vector_env(SPACE, 4, AutoresetMode.SAME_STEP, max_length=6)
    oracle = wrappers.vector.RecordEpisodeStatistics(same_step, buffer_length)
    td = env.reset(seed=3)
    oracle.reset(seed=3)
    for _ in range(40):
        following, td = step(env, td)
        info = oracle.step(np.zeros(4, np.int64))[-1]
        done = following["done"].squeeze(-1).numpy()
        np.testing.assert_array_equal(done, info.get("_episode", np.zeros(4, bool)))
        if done.any():
            np.testing.assert_allclose(
                following["episode_return"][done, 0], info["episode"]["r"][done], rtol=1e-5
            )
            np.testing.assert_array_equal(
                following["episode_length"][done, 0], info["episode"]["l"][done]
            )
        record = env.transforms[0]
        np.testing.assert_allclose(
            record.return_queue, np.array(oracle.return_queue, float).ravel(), rtol=1e-5
        )
        np.testing.assert_array_equal(
            record.length_queue, np.array(oracle.length_queue, int).ravel()
        )
        assert record.episode_count == oracle.episode_count
    assert oracle.episode_count > 30


def test_record_episode_statistics_running_sums_are_the_whole_episodes_at_its_last_step():
    for ending in ENDINGS:
        data, _ = tw.rollout(
            scripted(T.RecordEpisodeStatistics(), episode_lengths=(3, 1), ending=ending), None, 5
        )
        assert data["next", "episode_return"][..., 0].tolist() == [
            [1, 3, 6, 1, 1],
            [1, 1, 3, 6, 1],
        ], ending
        assert data["next", "episode_length"][..., 0].tolist() == [
            [1, 2, 3, 1, 1],
            [1, 1, 2, 3, 1],
        ], ending
    assert data["next", "episode_return"].dtype == torch.float32
    assert data["next", "episode_length"].dtype == torch.int64


def test_record_episode_statistics_more_episodes_in_one_step_than_fit_keeps_the_latest():
    by_env = T.TransformReward(lambda reward: reward * torch.arange(5.0).unsqueeze(-1))
    env = scripted(by_env, T.RecordEpisodeStatistics(3), num_envs=5, episode_lengths=2)
    advance(env, 2)
    record = env.transforms[1]
    assert (record.return_queue.tolist(), record.length_queue.tolist(), record.episode_count) == (
        [6, 9, 12],
        [2, 2, 2],
        5,
    )


def test_record_episode_statistics_in_eval_counts_one_step_episodes_of_all_envs_and_has_no_state_dict():
    for ending in ENDINGS:
        env = scripted(
            T.RecordEpisodeStatistics(100), num_envs=3, episode_lengths=1, ending=ending
        ).eval()
        env.reset()  # without a step, which counts no episode
        advance(env, 4)
        assert (
            env.transforms[0].return_queue.tolist()
            == env.transforms[0].length_queue.tolist()
            == [1] * 12
        ), ending
    env.transforms[0].return_queue.fill_(99)  # a copy
    assert env.transforms[0].return_queue.tolist() == [1] * 12 and env.state_dict() == {}


def test_record_episode_statistics_episode_ended_by_an_outer_transform_is_closed():
    env = scripted(T.RecordEpisodeStatistics(), T.TimeLimit(2), episode_lengths=(5, 1))
    advance(env, 4)
    assert env.transforms[0].length_queue.tolist() == [1, 2, 1, 2, 1]


def test_record_episode_statistics_masked_reset_changes_and_counts_only_the_rows_of_the_mask():
    env = scripted(T.RecordEpisodeStatistics(), num_envs=3, episode_lengths=None)
    _, td = advance(env, 2)
    env.transforms[0].reset(TensorDict({}, [3]), tw.RowMask(torch.tensor([False, True, False])))
    assert env.transforms[0].return_queue.tolist() == [3]
    following, _ = step(env, td)
    assert following["episode_return"].flatten().tolist() == [6, 3, 6]
    assert following["episode_length"].flatten().tolist() == [3, 1, 3]


def test_sums_over_long_episodes_are_in_double_precision():
    large_then_small = T.TransformReward(lambda reward: torch.where(reward == 1, 2.0**24, 0.5))
    env = scripted(large_then_small, T.RecordEpisodeStatistics(), episode_lengths=21)
    following, _ = advance(env, 21)
    assert following["episode_return"].tolist() == [[2**24 + 10]] * 2


def test_record_episode_statistics_below_and_above_clip_reward_records_raw_and_clipped_rewards():
    inner, outer = T.RecordEpisodeStatistics(stats_key="raw"), T.RecordEpisodeStatistics()
    following, _ = advance(scripted(inner, T.ClipReward(0, 1), outer, episode_lengths=None), 3)
    assert following["raw_return"].tolist() == [[6], [6]]
    assert following["episode_return"].tolist() == following["raw_length"].tolist() == [[3], [3]]


def test_metrics_of_episodes_equal_numpys_in_rows_queues_evaluate_and_a_vector_env():
    kinds = {
        "sum": np.sum,
        "mean": np.mean,
        "max": np.max,
        "min": np.min,
        "last": lambda values: values[-1],
    }
    metrics = {f"push_{kind}": ("action", kind) for kind in kinds}

    def make(compiled=False):
        box = spaces.Box(-1, 1, (1,))
        env = scripted(
            T.RecordEpisodeStatistics(metrics=metrics),
            num_envs=2,
            action_space=box,
            episode_lengths=(3, 2),
        )
        return tw.compile(env, backend="eager") if compiled else env

    def hand(pushes, kind):
        return pytest.approx(kinds[kind](np.float64(pushes)), rel=1e-6)

    for compiled in (False, True):
        env, vec = make(compiled), tw.to_gymnasium(make())
        td, running, ended = env.reset(seed=0), [[], []], []
        vec.reset(seed=0)
        for _ in range(7):
            action = env.sample_action()
            transition, td = env.step(td.set("action", action))
            infos = vec.step(action.numpy())[-1]
            for row in range(2):
                running[row].append(action[row].item())
                for kind in kinds:
                    assert transition["next", f"episode_push_{kind}"][row].item() == hand(
                        running[row], kind
                    )
                if transition["next", "done"][row]:
                    ended.append(running[row])
                    assert infos["episode"]["push_max"][row] == hand(running[row], "max")
                    running[row] = []
        for kind in kinds:
            queue = env.transforms[0].metric_queues[f"push_{kind}"].tolist()
            assert queue == [hand(pushes, kind) for pushes in ended] and len(queue) == 5
    found = tw.evaluate(make(), lambda td: torch.tensor([[0.5], [-0.5]]), 4)
    assert found["episode_push_sum"].tolist() == [1.5, 1, -1, -1.5]
    assert found["episode_push_min"].tolist() == [0.5, 0.5, -0.5, -0.5]
    for wrong in ({"a": "median"}, {"return": "sum"}, {"a": ("b", "c", "sum")}):
        with pytest.raises(ValueError, match="RecordEpisodeStatistics needs metrics with one of"):
            T.RecordEpisodeStatistics(metrics=wrong)
    with pytest.raises(ValueError, match=r"needs metrics of every step.*summed_info"):
        tw.TransformedEnv(
            tw.wrappers.RepeatAction(ScriptedEnv(1), 2),
            T.RecordEpisodeStatistics(metrics={"action": "max"}),
        )


@pytest.mark.parametrize("max_episode_steps", quick([1, 2, 4, 100], 4))
def test_time_limit_equals_gymnasiums(max_episode_steps):
    theirs = [wrappers.TimeLimit(random_env(), max_episode_steps) for _ in range(4)]
    flags = assert_agrees(make(T.TimeLimit(max_episode_steps), num_envs=4), theirs, num_steps=40)
    assert flags.all(1).any() and flags.any(1).sum() > 20


def test_time_limit_in_the_step_of_another_ending_keeps_its_flags():
    for ending, terminated, truncated in (
        ("terminated", True, True),
        ("truncated", False, True),
        ("both", True, True),
    ):
        following, _ = advance(scripted(T.TimeLimit(3), episode_lengths=3, ending=ending), 3)
        assert following["terminated"].flatten().tolist() == [terminated] * 2, ending
        assert following["truncated"].flatten().tolist() == [truncated] * 2, ending


def test_time_limit_counts_from_the_start_of_each_episode():
    for ending in ENDINGS:
        env = scripted(T.TimeLimit(3), episode_lengths=(2, 9), ending=ending).eval()
        data, _ = tw.rollout(env, None, 7)
        assert data["next", "done"][0, :, 0].tolist() == [
            False,
            True,
            False,
            False,
            True,
            False,
            True,
        ], ending
        assert data["next", "done"][1, :, 0].tolist() == [
            False,
            False,
            True,
            False,
            True,
            False,
            False,
        ], ending
        assert env.state_dict() == {}


def test_time_limit_twice_applies_and_declares_the_tighter_one():
    for inner, outer, limit in ((3, 5, 3), (5, 3, 3), (4, 4, 4)):
        env = scripted(T.TimeLimit(inner), T.TimeLimit(outer), episode_lengths=None)
        data, _ = tw.rollout(env, None, 6)
        assert env.signature.max_episode_steps == limit, (inner, outer)
        assert data["next", "truncated"][0, :, 0].tolist() == [
            (step + 1) % limit == 0 for step in range(6)
        ], (inner, outer)
        assert not data["next", "terminated"].any()


AWARE = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Box(-1, 1, (2,), np.float64),
    spaces.Discrete(4, start=1),
    spaces.Dict(a=spaces.Box(-1, 1, (2,)), z=spaces.Discrete(3)),
    spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]),
]


@pytest.mark.parametrize("space", quick(AWARE, *AWARE[4:]), ids=str)
def test_time_aware_observation_equals_gymnasiums(space):
    for arguments in itertools.product((True, False), (True, False)):
        limited = [wrappers.TimeLimit(RandomEnv(space), 3) for _ in range(2)]
        theirs = [
            wrappers.TimeAwareObservation(env, *arguments, dict_time_key="elapsed")
            for env in limited
        ]
        ours = T.TimeAwareObservation(*arguments, dict_time_key="elapsed")
        assert_agrees(oracles.make(space, T.TimeLimit(3), ours, num_envs=2), theirs, num_steps=12)


def test_time_aware_observation_over_a_native_env_has_its_limit():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 2), T.TimeAwareObservation(flatten=False))
    assert env.single_observation_space["time"].high == 500


def test_time_aware_observation_of_the_longest_limits_is_exact():
    for limit, normalize_time, expected in ((2**31 - 1, False, 1), (2**31, True, 2.0**-31)):
        env = scripted(
            T.TimeLimit(limit), T.TimeAwareObservation(flatten=False, normalize_time=normalize_time)
        )
        assert advance(env, 1)[0]["observation", "time"].tolist() == [[expected]] * 2
    with pytest.raises(
        ValueError,
        match="needs a step limit that int32 holds, or normalize_time=True, but got 2147483648",
    ):
        scripted(T.TimeLimit(2**31), T.TimeAwareObservation())
