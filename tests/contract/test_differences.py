"""Gymnasium's result and ours, for each row of the table in examples/guides/from_gymnasium.md."""

import cv2
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.spaces import Box, Discrete, Graph, OneOf, Sequence, Text
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv

ZERO = torch.zeros(1, dtype=torch.int64)  # an action of one env


class Ones(gymnasium.Env):
    """Reward 1, and the number of steps plus `start` as the observation."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, truncates=False, length=3, start=1e5):
        self.truncates = truncates
        self.length = length
        self.start = start

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed = 0
        return np.float32([self.start]), {}

    def step(self, action):
        self.elapsed += 1
        observation = np.float32([self.start + self.elapsed])
        ends = self.elapsed == self.length
        truncated = ends and self.truncates
        return observation, 1.0, ends and not truncated, truncated, {}


def vector(*makers, mode=AutoresetMode.DISABLED):
    return SyncVectorEnv(makers, autoreset_mode=mode)


def bridged(maker=Ones, **arguments):
    return tw.from_gymnasium(vector(maker, **arguments))


def flat(values):
    return values.flatten().tolist()


@pytest.mark.parametrize(
    ("truncates", "leaked"),
    [
        pytest.param(False, [1, 1.9, 1, 1.9, 2.71, 1], id="terminated"),
        pytest.param(True, [1, 1.9, 2.71, 3.439, 4.0951, 4.68559], id="truncated"),
    ],
)
def test_normalize_reward_last_reward_does_not_leak_into_the_next_episode(truncates, leaked):
    theirs = wrappers.NormalizeReward(Ones(truncates), gamma=0.9)
    theirs.reset()
    returns = []
    for _ in range(6):
        *_, terminated, truncated, _ = theirs.step(0)
        returns.append(np.asarray(theirs.discounted_reward).item())
        if terminated or truncated:
            theirs.reset()
    assert returns == pytest.approx(leaked)

    rewards = T.TransformReward(torch.ones_like)
    scripted = ScriptedEnv(1, episode_lengths=3, ending="both")
    env = tw.TransformedEnv(scripted, rewards, T.NormalizeReward(0.9))
    env.reset()
    ours = []
    for _ in range(6):
        before = env.transforms[1].discounted_return.item()
        ours.append(0.9 * before + 1)
        env.step(env.sample_action())
    assert ours == pytest.approx([1, 1.9, 2.71, 1, 1.9, 2.71])


def test_wrappers_in_sub_envs_have_statistics_of_their_own():
    makers = [lambda: Ones(start=0), lambda: Ones(start=100)]
    theirs = vector(*(lambda make=make: wrappers.NormalizeObservation(make()) for make in makers))
    theirs.reset()
    theirs.step(np.zeros(2, int))
    means = [each.obs_rms.mean.item() for each in theirs.envs]
    assert means == pytest.approx([0.5, 100.5], rel=1e-3)

    raw = tw.from_gymnasium(vector(*makers))
    env = tw.TransformedEnv(raw, T.NormalizeObservation())
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    assert env.transforms[0].statistics.mean.item() == 50.5


def test_running_mean_std_has_no_pseudo_count_prior():
    draws = np.random.default_rng(0).standard_normal((20_000, 1))
    samples = np.float32(1e5) + draws.astype(np.float32)
    theirs = wrappers.utils.RunningMeanStd(shape=(1,))
    ours = T.RunningMeanStd((1,))
    for batch in samples.reshape(200, 100, 1):
        theirs.update(batch)
        ours.update(torch.from_numpy(batch))
    prior = 1e-4 * 1e5**2 / 20_000
    assert theirs.var.item() == pytest.approx(1 + prior, rel=0.02)  # 51 instead of 1
    variance = samples.var(dtype=np.float64)
    assert ours.var.item() == pytest.approx(variance, rel=1e-6)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_normalize_observation_in_every_autoreset_mode_counts_each_observation_once(mode):
    with pytest.raises(ValueError):
        wrappers.vector.NormalizeObservation(vector(Ones, mode=mode))
    env = tw.TransformedEnv(bridged(mode=mode), T.NormalizeObservation())
    tw.rollout(env, None, 6)
    steps = [0, 1, 2, 3, 0, 1, 2, 3, 0]  # initial and final observations included
    counted = 1e5 + np.float64(steps)
    statistics = env.transforms[0].statistics
    assert (statistics.count == 9).all()
    assert statistics.mean.item() == pytest.approx(counted.mean())
    assert statistics.var.item() == pytest.approx(counted.var())


class Breaks(Ones):
    """An observation that is no number at the second step."""

    def step(self, action):
        observation, *rest = super().step(action)
        if self.elapsed == 2:
            observation = observation * np.nan
        return observation, *rest


def test_normalize_observation_leaves_what_is_no_number_out_of_its_statistics():
    theirs = wrappers.NormalizeObservation(Breaks())
    theirs.reset()
    observations = [theirs.step(0)[0].item() for _ in range(3)]
    assert np.isnan(observations).tolist() == [False, True, True]
    env = tw.TransformedEnv(bridged(Breaks), T.NormalizeObservation())
    data = tw.rollout(env, None, 3)
    assert flat(data["next", "observation"].isnan()) == [False, True, False]
    mean = env.transforms[0].statistics.mean.item()
    finite = [0, 1, 3, 0]
    assert mean == pytest.approx(1e5 + np.mean(finite), rel=1e-12)


def test_record_episode_statistics_reset_in_mid_episode_closes_the_episode():
    theirs = wrappers.RecordEpisodeStatistics(Ones())
    theirs.reset()
    theirs.step(0)
    theirs.reset()
    assert list(theirs.return_queue) == []
    env = tw.TransformedEnv(ScriptedEnv(1, episode_lengths=3), T.RecordEpisodeStatistics())
    env.reset()
    env.step(env.sample_action())
    env.reset()
    assert env.transforms[0].return_queue.tolist() == [1]


def test_masked_reset_forgets_the_statistics_of_its_rows_alone():
    vector_env = vector(lambda: Ones(length=2), lambda: Ones(length=5))
    theirs = wrappers.vector.RecordEpisodeStatistics(vector_env)
    scripted = ScriptedEnv(2, (1,), (2, 5), action_space=Discrete(2))
    ours = tw.TransformedEnv(scripted, T.RecordEpisodeStatistics())
    theirs.reset()
    ours.reset()
    lengths = []
    for _ in range(5):
        *_, done, _, info = theirs.step(np.zeros(2, np.int64))
        transition, _ = ours.step_without_reset(ours.sample_action())
        if done.any():
            mask = torch.from_numpy(done)
            lengths += flat(info["episode"]["l"][done])
            lengths += flat(transition["next", "episode_length"][mask])
            theirs.reset(options={"reset_mask": done})
            ours.reset(mask=mask)
    assert lengths == [2, 2, 2, 2, 1, 5]  # theirs and ours in turns


def test_frame_stack_and_time_limit_work_on_a_batch():
    assert not hasattr(wrappers.vector, "FrameStackObservation")
    assert not hasattr(wrappers.vector, "TimeLimit")
    scripted = ScriptedEnv(3, (1,), episode_lengths=None)
    env = tw.TransformedEnv(scripted, T.TimeLimit(2), T.FrameStackObservation(2))
    data = tw.rollout(env, None, 2)
    stacks = data["next", "observation"][:, 1]
    assert flat(stacks) == [1, 2, 1001, 1002, 2001, 2002]
    assert flat(data["next", "truncated"]) == [False, True] * 3


@pytest.mark.parametrize(
    "transform",
    [
        T.DelayObservation(1),
        T.DiscretizeObservation(2),
        T.TimeAwareObservation(),
        T.DiscretizeAction(2),
        T.StickyAction(0.5),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_transforms_without_a_vector_wrapper_work_on_a_batch(transform):
    name = type(transform).__name__
    assert hasattr(wrappers, name) and not hasattr(wrappers.vector, name)
    scripted = ScriptedEnv(3, observation_space=Box(0, 40, (2,), np.float32))
    env = tw.TransformedEnv(scripted, T.TimeLimit(9), transform)
    data = tw.rollout(env, None, 2)
    assert data["next", "observation"].shape[:2] == (3, 2)


def test_repeat_action_works_on_a_batch():
    assert hasattr(wrappers, "RepeatAction")
    assert not hasattr(wrappers.vector, "RepeatAction")
    env = W.RepeatAction(ScriptedEnv(3, episode_lengths=3), 2)
    data = tw.rollout(env, None, 2)
    assert flat(data["next", "reward"]) == [3] * 6


class Falling(Ones):
    def step(self, action):
        observation, *rest = super().step(action)
        return 1e5 - observation, *rest


def test_max_and_skip_final_observation_uses_only_its_own_frames():
    theirs = wrappers.MaxAndSkipObservation(Ones(), 4)  # episodes of three steps
    theirs.reset()
    assert theirs.step(0)[0] == 1e5 + 3  # the third of four frames; the fourth is still zeros
    theirs.reset()
    theirs.unwrapped.elapsed = 2
    observation, _, terminated, _, _ = theirs.step(0)
    assert terminated and observation == 1e5 + 3  # a frame of the previous episode
    falling = wrappers.MaxAndSkipObservation(Falling(), 4)
    falling.reset()
    assert falling.step(0)[0] == 0  # the maximum with a frame of zeros
    env = W.MaxAndSkipObservation(bridged(Falling), 4)
    env.reset()
    transition, _ = env.step(env.sample_action())
    assert transition["next", "observation"].item() == -2  # of -2 and -3


def test_noise_changes_observations_and_not_renders():
    theirs = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    noise = wrappers.AddWhiteNoise(theirs, 0.5)
    assert noise.observation_space == theirs.observation_space
    theirs.reset(seed=0)
    plain = theirs.render()
    changed = (plain != noise.render()).any(-1)
    assert 0.3 < changed.mean() < 0.7

    ours = tw.make("CartPole-v1", backend="gymnasium", render_mode="rgb_array")
    env = tw.TransformedEnv(W.AddRenderObservation(ours), T.AddWhiteNoise(0.5))
    observed = env.reset(seed=0)["observation"][0]
    changed = (plain != observed.numpy()).any(-1)
    assert 0.3 < changed.mean() < 0.7
    assert (env.render()[0] == plain).all()


def second_start(env, action):
    """The initial observation of the second episode."""
    env.reset(seed=0)
    for _ in range(3):
        env.step(action)
    return env.reset()


def test_sticky_action_does_not_advance_the_envs_rng_stream():
    plain, _ = second_start(gymnasium.make("CartPole-v1"), 0)
    sticky, _ = second_start(wrappers.StickyAction(gymnasium.make("CartPole-v1"), 0.0), 0)
    assert (plain != sticky).any()
    ours = second_start(tw.make("CartPole-v1"), ZERO)
    env = tw.TransformedEnv(tw.make("CartPole-v1"), T.StickyAction(0.0))
    assert ours["observation"].equal(second_start(env, ZERO)["observation"])


def num_frames(folder):
    (path,) = folder.iterdir()
    return int(cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FRAME_COUNT))


def test_record_video_length_is_exact(tmp_path):
    rendered = {"id": "CartPole-v1", "render_mode": "rgb_array"}
    theirs = gymnasium.make(**rendered)
    theirs = wrappers.RecordVideo(theirs, str(tmp_path / "theirs"), video_length=3)
    ours = W.RecordVideo(tw.make(**rendered), tmp_path / "ours", video_length=3)
    for env, action in ((theirs, 0), (ours, ZERO)):
        env.reset(seed=0)
        for _ in range(6):
            env.step(action)
        env.close()
    assert num_frames(tmp_path / "theirs") == 4
    assert num_frames(tmp_path / "ours") == 3


def test_mountain_car_continuous_state_keeps_one_dtype():
    theirs = gymnasium.make("MountainCarContinuous-v0")
    theirs.reset(seed=0)
    assert theirs.unwrapped.state.dtype == np.float64
    theirs.step(np.zeros(1, np.float32))
    assert theirs.unwrapped.state.dtype == np.float32
    env = tw.make("MountainCarContinuous-v0")
    env.reset(seed=0)
    assert {value.dtype for value in env.state.values()} == {torch.float32}


def test_autoreset_happens_within_the_last_step():
    theirs = wrappers.Autoreset(Ones())
    theirs.reset()
    steps = [theirs.step(0) for _ in range(4)]
    observed = [step[0].item() - 1e5 for step in steps]
    assert observed == [1, 2, 3, 0]
    assert [step[1] for step in steps] == [1, 1, 1, 0]  # the last step is no transition
    data = tw.rollout(bridged(), None, 4)
    assert flat(data["observation"] - 1e5) == [0, 1, 2, 0]
    assert flat(data["next", "observation"] - 1e5) == [1, 2, 3, 1]
    assert flat(data["next", "reward"]) == [1, 1, 1, 1]


def test_time_aware_observation_under_two_limits_declares_the_tighter_one():
    theirs = wrappers.TimeLimit(gymnasium.make("Pendulum-v1", max_episode_steps=5), 9)
    theirs = wrappers.TimeAwareObservation(theirs, flatten=False)
    assert theirs.observation_space["time"].high == 9
    below = tw.make("Pendulum-v1", max_episode_steps=5)
    env = tw.TransformedEnv(below, T.TimeLimit(9), T.TimeAwareObservation(flatten=False))
    assert env.single_observation_space["time"].high == 5


class Image(Ones):
    observation_space = Box(0, 255, (2, 2), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full((2, 2), 200, np.uint8), {}


def test_rescale_observation_of_integers_raises():
    assert not wrappers.RescaleObservation(Image(), 0, 1).reset()[0].any()
    with pytest.raises(TypeError, match="float"):
        tw.TransformedEnv(bridged(Image), T.RescaleObservation(0, 1))
    stack = T.DtypeObservation("float32"), T.RescaleObservation(0, 1)
    observation = tw.TransformedEnv(bridged(Image), *stack).reset()["observation"]
    np.testing.assert_allclose(observation, 200 / 255, rtol=1e-6)


def test_resize_observation_to_a_larger_shape_raises():
    theirs, _ = wrappers.ResizeObservation(Image(), (4, 4)).reset()
    assert theirs.shape == (4, 4)
    with pytest.raises(ValueError, match="shape"):
        tw.TransformedEnv(bridged(Image), T.ResizeObservation((4, 4)))


class Unbounded(Ones):
    action_space = Box(-np.inf, np.inf, (1,), np.float32)


def test_rescale_action_needs_finite_bounds():
    bounds = np.float32([-np.inf, np.inf])
    theirs = wrappers.RescaleAction(Unbounded(), *bounds)
    assert theirs.action(np.float32([5])) == 5
    ours = ScriptedEnv(1, action_space=Unbounded.action_space)
    with pytest.raises(ValueError, match="RescaleAction"):
        tw.TransformedEnv(ours, T.RescaleAction(-1, 1))


class Narrow(Ones):
    action_space = Box(0.1, 0.4, (1,), np.float32)


def test_rescaled_bounds_stay_inside():
    bounds = np.float32([-1, 1])
    theirs = wrappers.RescaleAction(Narrow(), *bounds)
    assert not Narrow.action_space.contains(theirs.action(bounds[1:]))
    ours = ScriptedEnv(1, action_space=Narrow.action_space)
    ours = tw.TransformedEnv(ours, T.RescaleAction(*bounds))
    ours.reset()
    transition, _ = ours.step(torch.ones(1, 1))
    assert transition["next", "info", "action"].item() == Narrow.action_space.high


def test_constructor_argument_of_a_built_env_cannot_be_set():
    theirs = wrappers.ClipReward(Ones(), -1, 1)
    assert theirs.set_wrapper_attr("min_reward", -3)
    theirs.reset()
    assert theirs.step(0)[1] == 1  # nothing changes, because the function was made before
    env = tw.TransformedEnv(ScriptedEnv(1), T.ClipReward(-1, 1))
    with pytest.raises(AttributeError, match="min_reward"):
        env.set_wrapper_attr("min_reward", -3)


def test_new_attribute_is_set_on_the_env_itself():
    theirs = wrappers.ClipReward(Ones(), -1, 1)
    env = tw.TransformedEnv(ScriptedEnv(1), T.ClipReward(-1, 1))
    for each in (theirs, env):
        assert each.set_wrapper_attr("mark", 1)
    assert not hasattr(theirs.unwrapped, "mark") and env.unwrapped.mark == 1


def test_seed_is_one_integer_for_all_envs():
    theirs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    one, _ = theirs.reset(seed=3)
    each, _ = theirs.reset(seed=[3, 4])
    assert (one == each).all()
    env = tw.make("CartPole-v1", 2)
    with pytest.raises(TypeError, match="seed"):
        env.reset(seed=[3, 4])
    both = env.reset(seed=4)["observation"]
    first, second = torch.eye(2, dtype=torch.bool)
    td = env.reset(seed=4, mask=first)
    assert td["observation"].equal(both)
    td = env.reset(seed=3, mask=second)
    assert not td["observation"].equal(both)


class Observing(Ones):
    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


@pytest.mark.parametrize(
    "space",
    [
        Text(3),
        Graph(Discrete(2), None),
        Sequence(Discrete(2)),
        OneOf([Discrete(2)] * 2),
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces_of_values_without_a_fixed_shape_are_refused(space):
    makers = [lambda: Observing(space)] * 2
    vector_env = vector(*makers)
    observations, _ = vector_env.reset()
    assert all(map(space.contains, observations))
    with pytest.raises(TypeError, match=type(space).__name__):
        tw.from_gymnasium(vector_env)
