"""Wrappers that render, against Gymnasium's wrappers and the files and windows that they produce."""

import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import cv2
import gymnasium
import numpy as np
import pygame
import pytest
import torch
from gymnasium import wrappers
from gymnasium.utils.save_video import capped_cubic_video_schedule
from helpers import OtherVectorEnv
from oracles import step

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv
from torchwrap.wrappers.render import capped_cubic, tiled


def make(num_envs=2, **arguments):
    return tw.make(
        "CartPole-v1", num_envs, render_mode="rgb_array", **{"max_episode_steps": 5, **arguments}
    )


def push(env, td, num_steps=1):
    return step(env, td, num_steps, action=torch.zeros(env.num_envs, dtype=torch.int64))


def draw(observation):
    theirs = gymnasium.make("CartPole-v1", render_mode="rgb_array").unwrapped
    theirs.state = np.asarray(observation, np.float64)
    return theirs.render()


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_add_render_observation_pixels_show_the_true_successor(backend):
    env = W.AddRenderObservation(make(backend=backend), render_only=False)
    assert env.single_observation_space["pixels"] == gymnasium.spaces.Box(
        0, 255, (400, 600, 3), np.uint8
    )
    td = env.reset(seed=1)
    for number in range(1, 7):
        successor, td = push(env, td)
        assert successor["done"].all() == (number == 5)
        for observation in (successor["observation"], td["observation"]):
            for pixels, state in zip(observation["pixels"], observation["state"], strict=True):
                # Gymnasium renders its float64 state, which may fall on another pixel than the float32 observation.
                assert (np.abs(pixels.numpy().astype(int) - draw(state)) > 0).mean() < 1e-3
    env.close()


def test_add_render_observation_composes_with_dicts_and_image_transforms():
    env = tw.TransformedEnv(
        W.AddRenderObservation(make()), T.GrayscaleObservation(), T.ResizeObservation((84, 84))
    )
    assert env.reset(seed=0)["observation"].shape == (2, 84, 84)
    see = T.TransformObservation(lambda obs: obs, None)
    parts = tw.TransformedEnv(make(), T.TimeAwareObservation(flatten=False), see)
    env = W.AddRenderObservation(parts, render_only=False, render_key="picture")
    single = gymnasium.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=5)
    aware = wrappers.TimeAwareObservation(single, flatten=False)
    theirs = wrappers.AddRenderObservation(aware, render_only=False, render_key="picture")
    assert env.single_observation_space == theirs.observation_space
    assert set(env.reset()["observation"].keys()) == {"picture", "obs", "time"}


def frames_of(path, fps=50):
    video, frames = cv2.VideoCapture(str(path)), []
    assert video.get(cv2.CAP_PROP_FPS) == fps
    while (read := video.read())[0]:
        frames.append(read[1][..., ::-1])  # OpenCV reads BGR
    return np.stack(frames)


def test_record_video_of_episodes_shows_initial_to_final_observation(tmp_path):
    env = W.RecordVideo(
        make(3), tmp_path, episode_trigger=lambda episode: episode % 2 == 0, envs=[1]
    )
    _, td = push(env, env.reset(seed=2), 4)
    final, td = push(env, td)
    assert final["done"].all()
    push(env, td, 12)
    env.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rl-video-episode-0.mp4",
        "rl-video-episode-2.mp4",
    ]
    video = frames_of(tmp_path / "rl-video-episode-0.mp4")
    assert video.shape == (6, 400, 600, 3)
    wanted, other = draw(final["observation"][1]), draw(td["observation"][1])
    assert (
        np.abs(video[-1].astype(int) - wanted).mean() < np.abs(video[-1].astype(int) - other).mean()
    )


def test_record_video_of_a_length_starts_at_a_step_and_tiles_several_envs(tmp_path):
    options = {
        "step_trigger": lambda step: step == 3,
        "video_length": 4,
        "fps": 10,
        "name_prefix": "a",
        "envs": [0, 1, 2],
    }
    env = W.RecordVideo(make(3), tmp_path / "deep" / "er", **options)
    push(env, env.reset(seed=2), 12)
    env.close()
    (path,) = (tmp_path / "deep" / "er").iterdir()
    assert path.name == "a-step-3.mp4" and frames_of(path, fps=10).shape == (4, 800, 1200, 3)


def gray(num_envs, **changes):
    """An env of functions without a class, metadata and render_close. Its gray frames have a brightness of 20 a step."""
    functions = {
        "observation_space": gymnasium.spaces.Box(0, 255, ()),
        "action_space": gymnasium.spaces.Discrete(2),
        "initial": lambda rng: {"light": torch.zeros(())},
        "transition": lambda state, action, rng: {"light": state["light"] + 20},
        "observation": lambda state, rng: state["light"],
        "reward": lambda state, action, following, rng: following["light"],
        "terminal": lambda state, rng: state["light"] > 99,
        "render_init": lambda: "pen",
        "render_image": lambda state, pen: (
            pen,
            torch.full((32, 48), int(state["light"]), dtype=torch.uint8),
        ),
    }
    return tw.FunctionalEnv(
        types.SimpleNamespace(**{**functions, **changes}), num_envs, render_mode="rgb_array"
    )


@pytest.mark.parametrize("fps", [None, 0.5, 12.5])
def test_record_video_of_gray_frames_at_any_rate_is_complete_without_close(fps, tmp_path):
    env = W.RecordVideo(
        gray(2) if fps is None else gray(2, metadata={"render_fps": fps}), tmp_path, envs=[0, 1]
    )
    push(env, env.reset(seed=0), 3)
    del env
    frames = frames_of(tmp_path / "rl-video-episode-0.mp4", fps or 30)
    np.testing.assert_allclose(
        frames, np.broadcast_to(20 * np.arange(4)[:, None, None, None], (4, 32, 96, 3)), atol=3
    )


@pytest.mark.full
def test_record_video_is_complete_after_an_exception_ends_the_program(tmp_path):
    code = f"import test_render\nenv = test_render.W.RecordVideo(test_render.gray(1), {str(tmp_path)!r})\nenv.reset()\n1 / 0"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert frames_of(tmp_path / "rl-video-episode-0.mp4", 30).shape == (1, 32, 48, 3)


def test_record_video_follows_gymnasiums_schedule_and_close_completes_the_file(tmp_path):
    env = W.RecordVideo(make(), tmp_path)
    push(env, env.reset(seed=2), 2)
    assert [path.name for path in tmp_path.iterdir()] == [".rl-video-episode-0.mp4"]
    env.close()
    assert frames_of(tmp_path / "rl-video-episode-0.mp4").shape[0] == 3
    assert all(
        capped_cubic(episode) == capped_cubic_video_schedule(episode) for episode in range(5000)
    )


def test_tiled_frames_are_in_row_major_order():
    for number, shape in ((1, (2, 3)), (2, (2, 6)), (3, (4, 6)), (5, (4, 9)), (9, (6, 9))):
        picture = tiled([np.full((2, 3, 3), index + 1, np.uint8) for index in range(number)])
        assert picture.shape == (*shape, 3)
        assert picture[::2, ::3, 0].flatten().tolist() == [
            *range(1, number + 1),
            *[0] * (picture[::2, ::3, 0].size - number),
        ]


def test_window_is_that_of_gymnasiums_env(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = tw.TransformedEnv(
        tw.make("CartPole-v1", 1, backend="gymnasium", render_mode="human"),
        T.NormalizeObservation(),
    )
    push(env, env.reset(seed=0))
    assert pygame.display.get_surface().get_size() == (600, 400)
    env.close()


def test_render_wrappers_without_their_library_raise_with_its_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "imageio", None)
    with pytest.raises(ImportError, match="imageio"):
        W.RecordVideo(make(), tmp_path)


def same_step():
    makers = [functools.partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")]
    return tw.from_gymnasium(OtherVectorEnv(makers, autoreset_mode="SameStep"))


def test_render_wrappers_wrong_arguments_raise(tmp_path):
    native, rendered = tw.make("CartPole-v1"), make()
    floats, alone = (
        gray(1, render_image=draw)
        for draw in (lambda _, pen: (pen, np.zeros((4, 4))), lambda _, pen: pen)
    )
    for build, error, words in (
        (
            lambda: W.AddRenderObservation(native),
            ValueError,
            'AddRenderObservation needs an env made with render_mode="rgb',
        ),
        (
            lambda: W.AddRenderObservation(same_step()),
            ValueError,
            "cannot render the final frames of a SAME_STEP vector env",
        ),
        (
            lambda: W.AddRenderObservation(rendered, 1),
            TypeError,
            "render_only as a bool, but got 1",
        ),
        (
            lambda: W.AddRenderObservation(rendered, False, "state"),
            ValueError,
            "unused render_key, but got 'state'",
        ),
        (
            lambda: W.AddRenderObservation(rendered, False, 3),
            TypeError,
            "render_key as a non-empty string, but got 3",
        ),
        (
            lambda: W.RecordVideo(rendered, 3),
            TypeError,
            "video_folder and name_prefix as strings, but got 3",
        ),
        (
            lambda: W.RecordVideo(rendered, "x", 7),
            TypeError,
            "a callable episode_trigger, but got 7",
        ),
        (
            lambda: W.RecordVideo(rendered, "x", video_length=-1),
            ValueError,
            "video_length as an integer of at least 0",
        ),
        (
            lambda: W.RecordVideo(rendered, "x", fps=0),
            ValueError,
            "a finite fps above 0, but got 0",
        ),
        (
            lambda: W.RecordVideo(rendered, "x", envs=[2]),
            ValueError,
            "index in envs as an integer of at most 1, but got 2",
        ),
        (lambda: W.RecordVideo(rendered, "x", envs=[]), ValueError, "at least one index in envs"),
        (
            lambda: W.RecordVideo(gray(1, metadata={"render_fps": "fast"}), "x"),
            TypeError,
            "a finite metadata.*but got 'fast'",
        ),
        (
            lambda: W.RecordVideo(floats, tmp_path).reset(),
            ValueError,
            r"uint8, .* got \(4, 4\) float64",
        ),
        (
            lambda: alone.render(),
            TypeError,
            r"render_image needs to return \(render_state, frame\), but got str",
        ),
        (
            lambda: native.render(),
            RuntimeError,
            'CartPole-v1 was made without a render mode: make it with render_mode="rgb',
        ),
    ):
        with pytest.raises(error, match=words):
            build()


def test_record_video_of_observations_shows_the_latest_frame_of_each_stack(tmp_path):
    for stacked, space in (
        (False, (32, 16)),
        (False, (32, 16, 3)),
        (True, (32, 16)),
        (True, (32, 16, 3)),
    ):
        one, two = (gymnasium.spaces.Box(0, 255, shape, np.uint8) for shape in (space, (2, *space)))
        images = ScriptedEnv(2, observation_space=one)
        bright = T.TransformObservation(lambda obs: torch.stack([0 * obs, 0 * obs + 200], 1), two)
        images = tw.TransformedEnv(images, bright) if stacked else images
        env = W.RecordVideo(
            images,
            tmp_path,
            step_trigger=lambda number: number == 0,
            envs=(0, 1),
            from_observation=True,
        )
        expected = env.step(env.reset(seed=0).set("action", env.sample_action()))[0][
            "next", "observation"
        ].double()
        env.close()
        (frame,) = frames_of(tmp_path / "rl-video-step-0.mp4", fps=30)
        for row, picture in enumerate((frame[:, :16], frame[:, 16:])):
            assert picture.shape == (32, 16, 3) and picture.mean() == pytest.approx(
                200 if stacked else expected[row].mean(), abs=4
            )
    with pytest.raises(TypeError, match="RecordVideo needs a Box observation space"):
        W.RecordVideo(
            ScriptedEnv(1, observation_space=gymnasium.spaces.Discrete(2)),
            tmp_path,
            from_observation=True,
        )
