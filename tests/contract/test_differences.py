"""One test per row of the README's table of differences: Gymnasium's result and ours."""

import cv2
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv


class Ones(gymnasium.Env):
    """Reward 1, and the number of steps plus `start` as the observation."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, truncates=False, length=3, start=1e5):
        self.truncates, self.length, self.start = truncates, length, start

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed = 0
        return np.float32([self.start]), {}

    def step(self, action):
        self.elapsed += 1
        over = self.elapsed == self.length
        return (
            np.float32([self.start + self.elapsed]),
            1.0,
            over and not self.truncates,
            over and self.truncates,
            {},
        )


def vector(mode, **arguments):
    return SyncVectorEnv([lambda: Ones(**arguments)], autoreset_mode=mode)


def test_normalize_reward_last_reward_does_not_leak_into_the_next_episode():
    for truncates, leaked in (
        (False, [1, 1.9, 1, 1.9, 2.71, 1]),
        (True, [1, 1.9, 2.71, 3.439, 4.0951, 4.68559]),
    ):
        theirs, returns = wrappers.NormalizeReward(Ones(truncates), gamma=0.9), []
        theirs.reset()
        for _ in range(6):
            *_, terminated, truncated, _ = theirs.step(0)
            returns.append(np.asarray(theirs.discounted_reward).item())
            if terminated or truncated:
                theirs.reset()
        assert returns == pytest.approx(leaked), truncates
    env = tw.TransformedEnv(
        ScriptedEnv(1, episode_lengths=3, ending="both"),
        T.TransformReward(torch.ones_like),
        T.NormalizeReward(0.9),
    )
    td, ours = env.reset(), []
    for _ in range(6):
        before = env.transforms[1].discounted_return.item()
        _, td = env.step(td.set("action", env.sample_action()))
        ours.append(before * 0.9 + 1)
    assert ours == pytest.approx([1, 1.9, 2.71, 1, 1.9, 2.71])


def test_running_mean_std_has_no_pseudo_count_prior():
    samples = np.float32(1e5) + np.random.default_rng(0).standard_normal((20_000, 1)).astype(
        np.float32
    )
    theirs, ours = wrappers.utils.RunningMeanStd(shape=(1,)), T.RunningMeanStd((1,))
    for batch in samples.reshape(200, 100, 1):
        theirs.update(batch)
        ours.update(torch.from_numpy(batch))
    assert theirs.var.item() == pytest.approx(
        1 + 1e-4 * 1e5**2 / 20_000, rel=0.02
    )  # 51 instead of 1
    assert ours.var.item() == pytest.approx(samples.var(dtype=np.float64), rel=1e-6)


def test_normalize_observation_in_every_autoreset_mode_counts_each_observation_once():
    with pytest.raises(ValueError):
        wrappers.vector.NormalizeObservation(vector(AutoresetMode.SAME_STEP))
    with pytest.raises(ValueError):
        wrappers.vector.NormalizeObservation(vector(AutoresetMode.DISABLED))
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        env = tw.TransformedEnv(tw.from_gymnasium(vector(mode)), T.NormalizeObservation())
        tw.rollout(env, None, 6)
        counted = 1e5 + np.float64(
            [0, 1, 2, 3, 0, 1, 2, 3, 0]
        )  # initial and final observations included
        statistics = env.transforms[0].statistics
        assert (statistics.count == 9).all()
        assert (statistics.mean.item(), statistics.var.item()) == pytest.approx(
            (counted.mean(), counted.var())
        )


def test_frame_stack_and_time_limit_work_on_a_batch():
    assert not hasattr(wrappers.vector, "FrameStackObservation") and not hasattr(
        wrappers.vector, "TimeLimit"
    )
    env = tw.TransformedEnv(
        ScriptedEnv(3, (1,), episode_lengths=None), T.TimeLimit(2), T.FrameStackObservation(2)
    )
    data, _ = tw.rollout(env, None, 2)
    assert data["next", "observation"][:, 1, :, 0].tolist() == [[1, 2], [1001, 1002], [2001, 2002]]
    assert data["next", "truncated"][..., 0].tolist() == [[False, True]] * 3


def test_transforms_without_a_vector_wrapper_work_on_a_batch():
    box = gymnasium.spaces.Box(0, 40, (2,), np.float32)
    for name, arguments in (
        ("DelayObservation", (1,)),
        ("DiscretizeObservation", (2,)),
        ("TimeAwareObservation", ()),
        ("DiscretizeAction", (2,)),
        ("StickyAction", (0.5,)),
    ):
        assert hasattr(wrappers, name) and not hasattr(wrappers.vector, name)
        transforms = T.TimeLimit(9), getattr(T, name)(*arguments)
        data, _ = tw.rollout(
            tw.TransformedEnv(ScriptedEnv(3, observation_space=box), *transforms), None, 2
        )
        assert data["next", "observation"].shape[:2] == (3, 2), name


def test_repeat_action_works_on_a_batch():
    assert hasattr(wrappers, "RepeatAction") and not hasattr(wrappers.vector, "RepeatAction")
    data, _ = tw.rollout(W.RepeatAction(ScriptedEnv(3, episode_lengths=3), 2), None, 2)
    assert data["next", "reward"].squeeze(-1).tolist() == [[3, 3]] * 3


def test_max_and_skip_final_observation_uses_only_its_own_frames():
    theirs = wrappers.MaxAndSkipObservation(Ones(), 4)  # episodes of three steps
    theirs.reset()
    assert theirs.step(0)[0] == 1e5 + 3  # the third of four frames; the fourth is still zeros
    theirs.reset()
    theirs.unwrapped.elapsed = 2
    assert theirs.step(0)[:3:2] == (
        1e5 + 3,
        True,
    )  # one step to the end: a frame of the previous episode
    vector_env = SyncVectorEnv([Falling], autoreset_mode=AutoresetMode.DISABLED)
    falling = wrappers.MaxAndSkipObservation(Falling(), 4)
    falling.reset()
    assert falling.step(0)[0] == 0  # the maximum with a frame of zeros
    env = W.MaxAndSkipObservation(tw.from_gymnasium(vector_env), 4)
    transition, _ = env.step(env.reset().set("action", env.sample_action()))
    assert transition["next", "observation"].item() == -2  # of -2 and -3


class Falling(Ones):
    def step(self, action):
        observation, *rest = super().step(action)
        return 1e5 - observation, *rest


def test_noise_changes_observations_and_not_renders():
    theirs = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    assert wrappers.AddWhiteNoise(theirs, 0.5).observation_space == theirs.observation_space
    theirs.reset(seed=0)
    plain, noisy = theirs.render(), wrappers.AddWhiteNoise(theirs, 0.5).render()
    assert 0.3 < (plain != noisy).any(-1).mean() < 0.7
    ours = W.AddRenderObservation(
        tw.make("CartPole-v1", backend="gymnasium", render_mode="rgb_array")
    )
    env = tw.TransformedEnv(ours, T.AddWhiteNoise(0.5))
    observed = env.reset(seed=0)["observation"][0].numpy()
    assert 0.3 < (plain != observed).any(-1).mean() < 0.7 and (env.render()[0] == plain).all()


def test_sticky_action_does_not_advance_the_envs_rng_stream():
    def second_start(wrap):
        env = wrap(gymnasium.make("CartPole-v1"))
        env.reset(seed=0)
        for _ in range(3):
            env.step(0)
        return env.reset()[0]

    assert (
        second_start(lambda env: env) != second_start(lambda env: wrappers.StickyAction(env, 0.0))
    ).any()
    starts = []
    for transform in (T.Compose([]), T.StickyAction(0.0)):
        env = tw.TransformedEnv(tw.make("CartPole-v1"), transform)
        env.reset(seed=0)
        for _ in range(3):
            env.step(torch.zeros(1, dtype=torch.int64))
        starts.append(env.reset()["observation"])
    assert (starts[0] == starts[1]).all()


def test_record_video_length_is_exact(tmp_path):
    def frames(folder):
        return int(cv2.VideoCapture(str(next(folder.iterdir()))).get(cv2.CAP_PROP_FRAME_COUNT))

    theirs = wrappers.RecordVideo(
        gymnasium.make("CartPole-v1", render_mode="rgb_array"),
        str(tmp_path / "theirs"),
        video_length=3,
    )
    ours = W.RecordVideo(
        tw.make("CartPole-v1", render_mode="rgb_array"), tmp_path / "ours", video_length=3
    )
    theirs.reset(seed=0)
    ours.reset(seed=0)
    for _ in range(6):
        theirs.step(0)
        ours.step(torch.zeros(1, dtype=torch.int64))
    theirs.close()
    ours.close()
    assert (frames(tmp_path / "theirs"), frames(tmp_path / "ours")) == (4, 3)


def test_autoreset_happens_within_the_last_step():
    theirs = wrappers.Autoreset(Ones())
    theirs.reset()
    steps = [theirs.step(0) for _ in range(4)]
    assert [step[0].item() for step in steps] == [1e5 + 1, 1e5 + 2, 1e5 + 3, 1e5]
    assert steps[3][1] == 0  # a step that is no transition
    env = tw.from_gymnasium(SyncVectorEnv([Ones], autoreset_mode=AutoresetMode.DISABLED))
    td = env.reset()
    for _ in range(3):
        transition, td = env.step(td.set("action", env.sample_action()))
    assert transition["next", "observation"].item() == 1e5 + 3 and td["observation"].item() == 1e5
    transition, td = env.step(td.set("action", env.sample_action()))
    assert (
        transition["next", "observation"].item() == 1e5 + 1
        and transition["next", "reward"].item() == 1
    )


def test_time_aware_observation_under_two_limits_declares_the_tighter_one():
    theirs = wrappers.TimeLimit(gymnasium.make("Pendulum-v1", max_episode_steps=5), 9)
    theirs = wrappers.TimeAwareObservation(theirs, flatten=False)
    assert theirs.observation_space["time"].high == 9
    below = tw.make("Pendulum-v1", max_episode_steps=5)
    env = tw.TransformedEnv(below, T.TimeLimit(9), T.TimeAwareObservation(flatten=False))
    assert env.single_observation_space["time"].high == 5


class Image(Ones):
    observation_space = gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full((2, 2), 200, np.uint8), {}


def images(transform):
    vector_env = SyncVectorEnv([Image], autoreset_mode=AutoresetMode.DISABLED)
    return tw.TransformedEnv(tw.from_gymnasium(vector_env), *transform).reset()["observation"]


def test_resize_observation_to_a_larger_shape_raises():
    assert wrappers.ResizeObservation(Image(), (4, 4)).reset()[0].shape == (4, 4)
    with pytest.raises(ValueError, match="at most"):
        images([T.ResizeObservation((4, 4))])


def test_rescale_observation_of_integers_raises():
    assert not wrappers.RescaleObservation(Image(), 0, 1).reset()[0].any()
    with pytest.raises(TypeError, match="of floats"):
        images([T.RescaleObservation(0, 1)])
    np.testing.assert_allclose(
        images([T.DtypeObservation("float32"), T.RescaleObservation(0, 1)]), 200 / 255, rtol=1e-6
    )


def test_record_episode_statistics_reset_in_mid_episode_closes_the_episode():
    theirs = wrappers.RecordEpisodeStatistics(Ones())
    theirs.reset()
    theirs.step(0)
    theirs.reset()
    assert list(theirs.return_queue) == []
    env = tw.TransformedEnv(ScriptedEnv(1, episode_lengths=3), T.RecordEpisodeStatistics())
    env.step(env.reset().set("action", env.sample_action()))
    env.reset()
    assert env.transforms[0].return_queue.tolist() == [1]


def test_mountain_car_continuous_state_keeps_one_dtype():
    theirs = gymnasium.make("MountainCarContinuous-v0")
    theirs.reset(seed=0)
    initial = theirs.unwrapped.state.dtype
    theirs.step(np.zeros(1, np.float32))
    assert (initial, theirs.unwrapped.state.dtype) == (np.float64, np.float32)
    env = tw.make("MountainCarContinuous-v0")
    env.reset(seed=0)
    assert {value.dtype for value in env.state.values()} == {torch.float32}


def test_constructor_argument_of_a_built_env_cannot_be_set():
    theirs = wrappers.ClipReward(Ones(), -1, 1)
    assert theirs.set_wrapper_attr(
        "min_reward", -3
    )  # and nothing changes, because the function was made before
    theirs.reset()
    assert theirs.step(0)[1] == 1
    env = tw.TransformedEnv(ScriptedEnv(1), T.ClipReward(-1, 1))
    with pytest.raises(
        AttributeError, match=r"ClipReward\.min_reward is fixed at construction, but got -3"
    ):
        env.set_wrapper_attr("min_reward", -3)


class Breaks(Ones):
    """An observation that is no number at the second step."""

    def step(self, action):
        observation, *rest = super().step(action)
        return observation * (np.nan if self.elapsed == 2 else 1), *rest


def test_normalize_observation_leaves_what_is_no_number_out_of_its_statistics():
    theirs = wrappers.NormalizeObservation(Breaks())
    theirs.reset()
    assert [bool(np.isnan(theirs.step(0)[0]).all()) for _ in range(3)] == [False, True, True]
    env = tw.from_gymnasium(SyncVectorEnv([Breaks], autoreset_mode=AutoresetMode.DISABLED))
    env = tw.TransformedEnv(env, T.NormalizeObservation())
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    assert [bool(env.step(action)[0]["next", "observation"].isnan().all()) for _ in range(3)] == [
        False,
        True,
        False,
    ]
    assert env.transforms[0].statistics.mean.item() == pytest.approx(
        1e5 + np.mean([0, 1, 3, 0]), rel=1e-12
    )
    env.close()


def test_masked_reset_forgets_the_statistics_of_its_rows_alone():
    spaces = {"observation_space": Ones.observation_space, "action_space": Ones.action_space}
    lengths, ours = (
        [],
        tw.TransformedEnv(ScriptedEnv(2, (1,), (2, 5), **spaces), T.RecordEpisodeStatistics()),
    )
    theirs = SyncVectorEnv(
        [lambda: Ones(length=2), lambda: Ones(length=5)], autoreset_mode=AutoresetMode.DISABLED
    )
    theirs, td = wrappers.vector.RecordEpisodeStatistics(theirs), ours.reset()
    theirs.reset()
    for _ in range(5):
        *_, done, _, info = theirs.step(np.zeros(2, np.int64))
        transition, td = ours.step_without_reset(
            td.set("action", torch.zeros(2, dtype=torch.int64))
        )
        if done.any():
            own = transition["next", "episode_length"][torch.from_numpy(done)]
            lengths.append((info["episode"]["l"][done].tolist(), own.flatten().tolist()))
            theirs.reset(options={"reset_mask": done})
            td = ours.reset(mask=torch.from_numpy(done))
    assert lengths == [([2], [2]), ([2], [2]), ([1], [5])]


def test_rescale_action_needs_finite_bounds():
    class Unbounded(Ones):
        action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    assert (
        wrappers.RescaleAction(Unbounded(), np.float32(-np.inf), np.float32(np.inf)).action(
            np.float32([5])
        )
        == 5
    )
    with pytest.raises(ValueError, match="RescaleAction needs an action space with finite bounds"):
        tw.TransformedEnv(
            ScriptedEnv(1, action_space=Unbounded.action_space), T.RescaleAction(-1, 1)
        )


def test_seed_is_one_integer_for_all_envs():
    theirs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    assert (theirs.reset(seed=3)[0] == theirs.reset(seed=[3, 4])[0]).all()
    env = tw.make("CartPole-v1", 2)
    with pytest.raises(TypeError, match=r"reset needs seed as an integer .*, but got \[3, 4\]"):
        env.reset(seed=[3, 4])
    masks, both = torch.eye(2, dtype=torch.bool), env.reset(seed=4)["observation"]
    assert [
        env.reset(seed=4 - row, mask=masks[row])["observation"].equal(both) for row in (0, 1)
    ] == [True, False]


class Observing(Ones):
    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


def test_spaces_of_values_without_a_fixed_shape_are_refused():
    two = gymnasium.spaces.Discrete(2)
    each = (
        gymnasium.spaces.Text(3),
        gymnasium.spaces.Graph(two, None),
        gymnasium.spaces.Sequence(two),
    )
    for space in (*each, gymnasium.spaces.OneOf([two, two])):
        vector_env = SyncVectorEnv(
            [lambda space=space: Observing(space)] * 2, autoreset_mode=AutoresetMode.DISABLED
        )
        assert all(map(space.contains, vector_env.reset()[0]))
        with pytest.raises(
            TypeError,
            match=r"MultiBinary, Dict or Tuple, but got .*make\(id, wrappers=.* FilterObservation",
        ):
            tw.from_gymnasium(vector_env)
