from __future__ import annotations

import chance
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.gymnasium import from_gymnasium
from torchwrap.testing import ScriptedEnv

ENDINGS = ["terminated", "truncated", "both", "in turn"]


class Chance(gymnasium.Env):
    # Normal rewards; episodes of 1 to 6 steps that terminate, are truncated, or both.
    observation_space, action_space = spaces.Box(-9, 9, (1,), np.float64), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.way = (int(number) for number in self.np_random.integers([1, 0], [7, 3]))
        return self.np_random.uniform(size=1), {}

    def step(self, action):
        self.left -= 1
        ended, reward = self.left == 0, self.np_random.normal(0, 3)
        return self.np_random.uniform(size=1), reward, ended and self.way != 1, ended and self.way != 0, {}


def make(*transforms, num_envs=4):
    vector_env = SyncVectorEnv([Chance] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    return tw.TransformedEnv(from_gymnasium(vector_env), *transforms)


def scripted(*transforms, num_envs=2, **arguments):
    return tw.TransformedEnv(ScriptedEnv(num_envs, (1,), **arguments), *transforms)


def step(env, td):
    transition, td = env.step(td.set("action", env.sample_action()))
    return transition["next"], td


def advance(env, num_steps):
    td = env.reset()
    for _ in range(num_steps):
        following, td = step(env, td)
    return following, td


# RecordEpisodeStatistics


@pytest.mark.parametrize("buffer_length", [1, 2, 3, 7, 100])
def test_record_episode_statistics_equals_gymnasiums_vector_wrapper(buffer_length):
    env = make(T.RecordEpisodeStatistics(buffer_length))
    same_step = SyncVectorEnv([Chance] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    oracle = wrappers.vector.RecordEpisodeStatistics(same_step, buffer_length)
    td = env.reset(seed=3)
    oracle.reset(seed=3)
    for _ in range(40):
        following, td = step(env, td)
        info = oracle.step(np.zeros(4, np.int64))[-1]
        done = following["done"].squeeze(-1).numpy()
        np.testing.assert_array_equal(done, info.get("_episode", np.zeros(4, bool)))
        if done.any():
            np.testing.assert_allclose(following["episode_return"][done, 0], info["episode"]["r"][done], rtol=1e-5)
            np.testing.assert_array_equal(following["episode_length"][done, 0], info["episode"]["l"][done])
        record = env.transform
        np.testing.assert_allclose(record.return_queue, np.array(oracle.return_queue, float).ravel(), rtol=1e-5)
        np.testing.assert_array_equal(record.length_queue, np.array(oracle.length_queue, int).ravel())
        assert record.episode_count == oracle.episode_count
    assert oracle.episode_count > 30


def test_record_episode_statistics_equals_gymnasiums_single_wrapper():
    env, oracle = make(T.RecordEpisodeStatistics(5), num_envs=1), wrappers.RecordEpisodeStatistics(Chance(), 5)
    td = env.reset(seed=3)
    oracle.reset(seed=3)
    for _ in range(40):
        following, td = step(env, td)
        _, _, terminated, truncated, info = oracle.step(0)
        np.testing.assert_allclose(following["episode_return"].item(), oracle.episode_returns, rtol=1e-5)
        assert following["episode_length"].item() == oracle.episode_lengths
        if terminated or truncated:
            assert following["episode_length"].item() == info["episode"]["l"]
            oracle.reset()
    np.testing.assert_allclose(env.transform.return_queue, list(oracle.return_queue), rtol=1e-5)


@pytest.mark.parametrize("ending", ENDINGS)
def test_record_episode_statistics_gives_running_sums_that_are_whole_at_the_last_step(ending):
    data, _ = tw.rollout(scripted(T.RecordEpisodeStatistics(), episode_lengths=(3, 1), ending=ending), None, 5)
    assert data["next", "episode_return"][..., 0].tolist() == [[1, 3, 6, 1, 1], [1, 1, 3, 6, 1]]
    assert data["next", "episode_length"][..., 0].tolist() == [[1, 2, 3, 1, 1], [1, 1, 2, 3, 1]]
    assert data["next", "episode_return"].dtype == torch.float32
    assert data["next", "episode_length"].dtype == torch.int64


def test_record_episode_statistics_keeps_the_latest_of_more_episodes_than_fit_that_end_in_one_step():
    by_env = T.TransformReward(lambda reward: reward * torch.arange(5.0).unsqueeze(-1))
    env = scripted(by_env, T.RecordEpisodeStatistics(3), num_envs=5, episode_lengths=2)
    advance(env, 2)
    record = env.transform.transforms[1]
    assert record.return_queue.tolist() == [6, 9, 12]
    assert record.length_queue.tolist() == [2, 2, 2]
    assert record.episode_count == 5


def test_record_episode_statistics_keeps_queues_in_order_before_and_after_wrap_around():
    env = scripted(T.RecordEpisodeStatistics(3), num_envs=1, episode_lengths=(1, 2, 3, 4, 5))
    td, queues = env.reset(), []
    for _ in range(15):
        following, td = step(env, td)
        if following["done"].item():
            queues.append(env.transform.length_queue.tolist())
    assert queues == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_record_episode_statistics_has_empty_queues_before_an_episode_has_ended():
    env = scripted(T.RecordEpisodeStatistics(), episode_lengths=None)
    following, _ = advance(env, 9)
    assert env.transform.return_queue.shape == env.transform.length_queue.shape == (0,)
    assert env.transform.episode_count == 0
    assert following["episode_return"].flatten().tolist() == [45, 45]


@pytest.mark.parametrize("ending", ENDINGS)
def test_record_episode_statistics_counts_one_step_episodes_of_all_envs_at_once(ending):
    env = scripted(T.RecordEpisodeStatistics(100), num_envs=3, episode_lengths=1, ending=ending)
    advance(env, 4)
    assert env.transform.return_queue.tolist() == [1] * 12
    assert env.transform.length_queue.tolist() == [1] * 12


def test_record_episode_statistics_closes_an_episode_that_a_transform_above_has_ended():
    env = scripted(T.RecordEpisodeStatistics(), T.TimeLimit(2), episode_lengths=(5, 1))
    advance(env, 4)
    assert env.transform.transforms[0].length_queue.tolist() == [1, 2, 1, 2, 1]


def test_record_episode_statistics_changes_and_counts_only_rows_inside_the_mask():
    env = scripted(T.RecordEpisodeStatistics(), num_envs=3, episode_lengths=None)
    _, td = advance(env, 2)
    env.transform.reset(TensorDict({}, [3]), torch.tensor([False, True, False]))
    assert env.transform.return_queue.tolist() == [3]
    following, _ = step(env, td)
    assert following["episode_return"].flatten().tolist() == [6, 3, 6]
    assert following["episode_length"].flatten().tolist() == [3, 1, 3]


def test_record_episode_statistics_counts_no_episode_without_a_step():
    env = scripted(T.RecordEpisodeStatistics())
    for _ in range(3):
        env.reset()
    assert env.transform.episode_count == 0


def test_record_episode_statistics_hands_out_tensors_of_their_own():
    env = scripted(T.RecordEpisodeStatistics(2), num_envs=1, episode_lengths=1)
    following, td = advance(env, 2)
    given = [following["episode_return"], following["episode_length"], env.transform.return_queue, env.transform.length_queue]
    for tensor in given:
        tensor.fill_(99)
    assert env.transform.return_queue.tolist() == [1, 1]
    assert step(env, td)[0]["episode_return"].item() == 1
    assert all((tensor == 99).all() for tensor in given)


def test_record_episode_statistics_sums_long_episodes_in_double_precision():
    large_then_small = T.TransformReward(lambda reward: torch.where(reward == 1, 2.0**24, 0.5))
    following, _ = advance(scripted(large_then_small, T.RecordEpisodeStatistics(), episode_lengths=21), 21)
    assert following["episode_return"].tolist() == [[2**24 + 10]] * 2


def test_record_episode_statistics_takes_another_key():
    following, _ = advance(scripted(T.RecordEpisodeStatistics(stats_key="raw"), episode_lengths=None), 2)
    assert following["raw_return"].tolist() == [[3], [3]]
    assert following["raw_length"].tolist() == [[2], [2]]
    assert "episode_return" not in following


def test_record_episode_statistics_sees_rewards_as_they_are_at_its_place_in_the_stack():
    inner, outer = T.RecordEpisodeStatistics(stats_key="raw"), T.RecordEpisodeStatistics()
    following, _ = advance(scripted(inner, T.ClipReward(0, 1), outer, episode_lengths=None), 3)
    assert following["raw_return"].tolist() == [[6], [6]]
    assert following["episode_return"].tolist() == [[3], [3]]


def test_record_episode_statistics_goes_on_in_eval_and_learns_nothing():
    env = scripted(T.RecordEpisodeStatistics(), episode_lengths=2).eval()
    advance(env, 2)
    assert env.transform.return_queue.tolist() == [3, 3]
    assert env.state_dict() == {}


# TimeLimit


@pytest.mark.parametrize("max_episode_steps", [1, 2, 4, 100])
def test_time_limit_equals_gymnasiums(max_episode_steps):
    env = make(T.TimeLimit(max_episode_steps))
    oracles = [wrappers.TimeLimit(Chance(), max_episode_steps) for _ in range(4)]
    td, both, num_ended = env.reset(seed=2), 0, 0
    for i, oracle in enumerate(oracles):
        oracle.reset(seed=2 + i)
    for _ in range(40):
        following, td = step(env, td)
        steps = [oracle.step(0) for oracle in oracles]
        begun = [o.reset()[0] if s[2] or s[3] else s[0] for o, s in zip(oracles, steps, strict=True)]
        np.testing.assert_array_equal(following["observation"], [s[0] for s in steps])
        np.testing.assert_array_equal(following["terminated"][:, 0], [s[2] for s in steps])
        np.testing.assert_array_equal(following["truncated"][:, 0], [s[3] for s in steps])
        np.testing.assert_array_equal(following["done"][:, 0], [s[2] or s[3] for s in steps])
        np.testing.assert_array_equal(td["observation"], begun)
        both, num_ended = both + sum(s[2] and s[3] for s in steps), num_ended + sum(s[2] or s[3] for s in steps)
    assert both > 0 and num_ended > 20


@pytest.mark.parametrize(
    ("ending", "terminated", "truncated"),
    [("terminated", True, True), ("truncated", False, True), ("both", True, True)],
)
def test_time_limit_leaves_termination_alone_in_the_same_step(ending, terminated, truncated):
    following, _ = advance(scripted(T.TimeLimit(3), episode_lengths=3, ending=ending), 3)
    assert following["terminated"].flatten().tolist() == [terminated] * 2
    assert following["truncated"].flatten().tolist() == [truncated] * 2


@pytest.mark.parametrize("ending", ["terminated", "truncated", "both"])
def test_time_limit_counts_from_the_start_of_each_episode(ending):
    data, _ = tw.rollout(scripted(T.TimeLimit(3), episode_lengths=(2, 9), ending=ending), None, 7)
    assert data["next", "done"][..., 0].tolist() == [
        [False, True, False, False, True, False, True],
        [False, False, True, False, True, False, False],
    ]


def test_time_limit_truncates_all_envs_at_once_where_none_ends_by_itself():
    data, _ = tw.rollout(scripted(T.TimeLimit(2), num_envs=3, episode_lengths=None), None, 4)
    assert data["next", "truncated"][..., 0].tolist() == [[False, True] * 2] * 3
    assert not data["next", "terminated"].any()


def test_time_limit_resets_only_rows_inside_the_mask():
    env = scripted(T.TimeLimit(3), num_envs=3, episode_lengths=None)
    _, td = advance(env, 2)
    env.transform.reset(TensorDict({}, [3]), torch.tensor([False, True, False]))
    assert step(env, td)[0]["truncated"].flatten().tolist() == [True, False, True]


@pytest.mark.parametrize(("inner", "outer", "limit"), [(3, 5, 3), (5, 3, 3), (4, 4, 4)])
def test_the_tighter_of_two_time_limits_holds_and_is_declared(inner, outer, limit):
    env = scripted(T.TimeLimit(inner), T.TimeLimit(outer), episode_lengths=None)
    data, _ = tw.rollout(env, None, 6)
    assert env.signature.max_episode_steps == limit
    assert data["next", "truncated"][0, :, 0].tolist() == [(step + 1) % limit == 0 for step in range(6)]


def test_time_limit_learns_nothing_and_holds_in_eval():
    env = scripted(T.TimeLimit(2), episode_lengths=None).eval()
    assert advance(env, 2)[0]["truncated"].all()
    assert env.state_dict() == {}


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: T.RecordEpisodeStatistics(0), "RecordEpisodeStatistics needs buffer_length of at least 1, but got 0"),
        (lambda: T.RecordEpisodeStatistics(-1), "RecordEpisodeStatistics needs buffer_length of at least 1, but got -1"),
        (lambda: T.RecordEpisodeStatistics(2.0), "RecordEpisodeStatistics needs an integer buffer_length .* but got 2.0"),
        (lambda: T.RecordEpisodeStatistics(True), "RecordEpisodeStatistics needs buffer_length of at least 1, but got True"),
        (lambda: T.RecordEpisodeStatistics(None), "RecordEpisodeStatistics needs an integer buffer_length .* but got None"),
        (lambda: T.RecordEpisodeStatistics("9"), "RecordEpisodeStatistics needs an integer buffer_length .* but got '9'"),
        (lambda: T.RecordEpisodeStatistics(9, 5), "RecordEpisodeStatistics needs a word as stats_key, but got 5"),
        (lambda: T.RecordEpisodeStatistics(9, ""), "RecordEpisodeStatistics needs a word as stats_key, but got ''"),
        (lambda: T.RecordEpisodeStatistics(9, None), "RecordEpisodeStatistics needs a word as stats_key, but got None"),
        (lambda: T.TimeLimit(0), "TimeLimit needs max_episode_steps of at least 1, but got 0"),
        (lambda: T.TimeLimit(-5), "TimeLimit needs max_episode_steps of at least 1, but got -5"),
        (lambda: T.TimeLimit(2.5), "TimeLimit needs an integer max_episode_steps of at least 1, but got 2.5"),
        (lambda: T.TimeLimit(True), "TimeLimit needs max_episode_steps of at least 1, but got True"),
        (lambda: T.TimeLimit(None), "TimeLimit needs an integer max_episode_steps of at least 1, but got None"),
        (lambda: T.TimeLimit("9"), "TimeLimit needs an integer max_episode_steps of at least 1, but got '9'"),
    ],
)
def test_an_episode_transform_refuses_wrong_arguments(build, match):
    with pytest.raises((TypeError, ValueError), match=match):
        build()


def test_episode_transforms_take_numpys_integers():
    env = scripted(T.RecordEpisodeStatistics(np.int64(2)), T.TimeLimit(np.int32(3)), episode_lengths=None)
    data, _ = tw.rollout(env, None, 6)
    assert data["next", "truncated"][0, :, 0].tolist() == [False, False, True] * 2
    assert env.get_wrapper_attr("signature").max_episode_steps == 3


AWARE = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Box(-1, 1, (2,), np.float64),
    spaces.Discrete(4, start=1),
    spaces.Dict(a=spaces.Box(-1, 1, (2,)), z=spaces.Discrete(3)),
    spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]),
]


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("normalize_time", [True, False])
@pytest.mark.parametrize("space", AWARE, ids=str)
def test_time_aware_observation_equals_gymnasiums(space, normalize_time, flatten):
    def oracle():
        limited = wrappers.TimeLimit(chance.Chance(space), 3)
        return wrappers.TimeAwareObservation(limited, flatten, normalize_time, dict_time_key="elapsed")

    ours = T.TimeAwareObservation(flatten, normalize_time, dict_time_key="elapsed")
    chance.assert_agree(chance.make(space, T.TimeLimit(3), ours), [oracle() for _ in range(3)])


def test_time_aware_observation_takes_the_limit_of_the_env():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 2), T.TimeAwareObservation(flatten=False))
    assert env.single_observation_space["time"].high == 500


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: T.TimeAwareObservation(1), TypeError, "TimeAwareObservation needs flatten as a bool, but got 1"),
        (
            lambda: T.TimeAwareObservation(True, None),
            TypeError,
            "TimeAwareObservation needs normalize_time as a bool, but got None",
        ),
        (
            lambda: T.TimeAwareObservation(dict_time_key=3),
            TypeError,
            "TimeAwareObservation needs dict_time_key as text, but got 3",
        ),
        (
            lambda: chance.make(AWARE[0], T.TimeAwareObservation()),
            ValueError,
            "TimeAwareObservation needs an env with a limit of steps",
        ),
        (
            lambda: chance.make(AWARE[4], T.TimeLimit(3), T.TimeAwareObservation(dict_time_key="z")),
            ValueError,
            "TimeAwareObservation needs a dict_time_key that is free, but got 'z'",
        ),
        (
            lambda: scripted(T.TimeLimit(2**31), T.TimeAwareObservation()),
            ValueError,
            "TimeAwareObservation needs a limit of steps that int32 holds, or normalize_time=True, but got 2147483648",
        ),
    ],
)
def test_time_aware_observation_refuses_wrong_arguments_and_spaces(build, error, match):
    with pytest.raises(error, match=match):
        build()


@pytest.mark.parametrize(("limit", "normalize_time"), [(2**31 - 1, False), (2**31, True)])
def test_time_aware_observation_takes_the_longest_limits(limit, normalize_time):
    env = scripted(T.TimeLimit(limit), T.TimeAwareObservation(flatten=False, normalize_time=normalize_time))
    assert env.step(env.reset().set("action", env.sample_action()))[0]["next", "observation", "time"].tolist() == (
        [[1 / limit]] * 2 if normalize_time else [[1]] * 2
    )


# EvalWrapper


@pytest.mark.parametrize("name", ["eager", "compiled"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_first_episodes_alone_count(ending, name):
    # Lengths by env, then by episode: row i begins with lengths[i], rewards 1, 2, 3, ...; info is the action, of ones.
    lengths = (1, 4, 2, 6)
    env = ScriptedEnv(4, action_space=spaces.Box(-1, 1, (1,)), episode_lengths=lengths, ending=ending)
    env = tw.TransformedEnv(env, T.EvalWrapper(["action"]))
    transform = env.transform
    env = tw.compile(env, backend="aot_eager") if name == "compiled" else env
    td = env.reset(seed=0)
    for step in range(1, 10):
        _, td = env.step(td.set("action", torch.ones(4, 1)))
        counted = [min(step, length) for length in lengths]
        assert transform.episode_metrics["reward"].flatten().tolist() == [n * (n + 1) / 2 for n in counted]
        assert transform.episode_metrics["action"].flatten().tolist() == counted
        assert transform.episode_steps.flatten().tolist() == counted
        assert transform.active_episodes.flatten().tolist() == [length > step for length in lengths]


def test_a_reset_of_ones_own_begins_another_first_episode():
    env = tw.TransformedEnv(ScriptedEnv(3, episode_lengths=(1, 4, 4)), T.EvalWrapper())
    td = env.reset(seed=0)
    for _ in range(2):
        _, td = env.step(td.set("action", env.sample_action()))
    td = env.reset(mask=torch.tensor([True, True, False]))
    transform = env.transform
    assert transform.active_episodes.all() and transform.episode_metrics["reward"].flatten().tolist() == [0, 0, 3]
    env.step(td.set("action", env.sample_action()))
    assert transform.episode_steps.flatten().tolist() == [1, 1, 3]


def test_eval_wrapper_agrees_with_evaluate():
    env = tw.TransformedEnv(tw.make("CartPole-v1", 8), T.EvalWrapper())
    returns = tw.evaluate(env, lambda td: (td["observation"][:, 2] > 0).long(), 8)["episode_return"]
    assert env.transform.episode_metrics["reward"].flatten().tolist() == returns.tolist()


def test_eval_wrapper_names_the_metrics_that_an_env_lacks():
    env = scripted(T.EvalWrapper(["speed"]))
    with pytest.raises(ValueError, match=r"EvalWrapper needs an env with \['speed'\] in its info, but got .*action"):
        env.step(env.reset().set("action", env.sample_action()))


@pytest.mark.parametrize("metrics", ["speed", ["reward"], [3]])
def test_eval_wrapper_refuses_names_that_are_none(metrics):
    with pytest.raises(TypeError, match="EvalWrapper needs metrics as a list of names other than"):
        T.EvalWrapper(metrics)
