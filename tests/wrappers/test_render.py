"""Wrappers that render, against Gymnasium's wrappers and by the files that they write."""

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
from gymnasium.utils.save_video import capped_cubic_video_schedule
from helpers import OtherVectorEnv, each_copy
from oracles import step

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap import wrappers as W
from torchwrap.testing import ScriptedEnv
from torchwrap.wrappers.render import capped_cubic


def make(num_envs=2, **arguments):
    return tw.make(
        "CartPole-v1",
        num_envs,
        render_mode="rgb_array",
        **{"max_episode_steps": 5, **arguments},
    )


def push(env, td, num_steps=1):
    return step(
        env,
        td,
        num_steps,
        action=torch.zeros(env.num_envs, dtype=torch.int64),
    )


def draw(observation):
    theirs = gymnasium.make("CartPole-v1", render_mode="rgb_array").unwrapped
    theirs.state = np.asarray(observation, np.float64)
    return theirs.render()


@each_copy
def test_copy_of_a_rendered_env_renders_by_itself(replicate, tmp_path):
    env = W.RecordVideo(make(), tmp_path, video_length=2)
    push(env, env.reset(seed=0))
    frames = env.render()
    copy = replicate(env)
    np.testing.assert_array_equal(copy.render(), frames)
    copy.close()
    np.testing.assert_array_equal(env.render(), frames)


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
                # Gymnasium's float64 state may fall on another pixel than our float32 observation.
                assert (pixels.numpy() != draw(state)).mean() < 1e-3
    env.close()


def frames_of(path, fps=50):
    video = cv2.VideoCapture(str(path))
    frames = []
    assert video.get(cv2.CAP_PROP_FPS) == fps
    while (read := video.read())[0]:
        frames.append(read[1][..., ::-1])  # OpenCV reads BGR
    return np.stack(frames)


def test_record_video_of_episodes_shows_initial_to_final_observation(
    tmp_path,
):
    env = W.RecordVideo(
        make(3),
        tmp_path,
        episode_trigger=lambda episode: episode % 2 == 0,
        envs=[1],
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
    shown = video[-1].astype(int)
    drawn = [draw(root["observation"][1]) for root in (final, td)]
    final_difference, initial_difference = (np.abs(shown - each).mean() for each in drawn)
    assert final_difference < initial_difference


def test_record_video_of_a_length_starts_at_a_step(tmp_path):
    options = {
        "step_trigger": lambda step: step == 3,
        "video_length": 4,
        "fps": 10,
        "name_prefix": "a",
    }
    env = W.RecordVideo(make(3), tmp_path / "deep" / "er", **options)
    push(env, env.reset(seed=2), 12)
    env.close()
    (path,) = (tmp_path / "deep" / "er").iterdir()
    assert path.name == "a-step-3.mp4" and frames_of(path, fps=10).shape == (4, 400, 600, 3)


def gray(num_envs, **changes):
    """An env of functions without a class. Its gray frames become brighter by 20 a step."""
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
        types.SimpleNamespace(**{**functions, **changes}),
        num_envs,
        render_mode="rgb_array",
    )


@pytest.mark.parametrize("fps", [None, 0.5, 12.5])
def test_record_video_of_gray_frames_at_any_rate_is_complete_without_close(fps, tmp_path):
    env = W.RecordVideo(
        gray(2) if fps is None else gray(2, metadata={"render_fps": fps}),
        tmp_path,
    )
    push(env, env.reset(seed=0), 3)
    del env
    frames = frames_of(tmp_path / "rl-video-episode-0.mp4", fps or 30)
    light = np.broadcast_to(20 * np.arange(4)[:, None, None, None], (4, 32, 48, 3))
    np.testing.assert_allclose(frames, light, atol=3)


@pytest.mark.full
def test_record_video_is_complete_after_an_exception_ends_the_program(
    tmp_path,
):
    record = f"env = test_render.W.RecordVideo(test_render.gray(1), {str(tmp_path)!r})"
    code = f"import test_render\n{record}\ntest_render.push(env, env.reset())\n1 / 0"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    video = frames_of(tmp_path / "rl-video-episode-0.mp4", 30)
    assert video.shape == (2, 32, 48, 3)


def test_record_video_follows_gymnasiums_schedule_and_close_completes_the_file(
    tmp_path,
):
    env = W.RecordVideo(make(), tmp_path)
    push(env, env.reset(seed=2), 2)
    assert [path.name for path in tmp_path.iterdir()] == [".rl-video-episode-0.mp4"]
    env.close()
    assert frames_of(tmp_path / "rl-video-episode-0.mp4").shape[0] == 3
    assert all(
        capped_cubic(episode) == capped_cubic_video_schedule(episode) for episode in range(5000)
    )


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


def spec_of_video(name_prefix):
    spec = W.RecordVideo(RENDERED, "x").spec.to_json()
    return gymnasium.envs.registration.EnvSpec.from_json(spec.replace("rl-video", name_prefix))


NATIVE = tw.make("CartPole-v1")
RENDERED = make()
DISCRETE = ScriptedEnv(1, observation_space=gymnasium.spaces.Discrete(2))
INVALID = {
    "render_mode": lambda: W.AddRenderObservation(NATIVE),
    "SAME_STEP": lambda: W.AddRenderObservation(same_step()),
    "render_only": lambda: W.AddRenderObservation(RENDERED, 1),
    "render_key .*'state'": lambda: W.AddRenderObservation(RENDERED, False, "state"),
    "render_key .*3": lambda: W.AddRenderObservation(RENDERED, False, 3),
    "video_folder": lambda: W.RecordVideo(RENDERED, 3),
    "episode_trigger": lambda: W.RecordVideo(RENDERED, "x", 7),
    "video_length": lambda: W.RecordVideo(RENDERED, "x", video_length=-1),
    "name_prefix .*7": lambda: W.RecordVideo(RENDERED, "x", name_prefix=7),
    "name_prefix .*'../../x'": lambda: W.RecordVideo(RENDERED, "x", name_prefix="../../x"),
    "name_prefix .*'/x'": lambda: W.RecordVideo(RENDERED, "x", name_prefix="/x"),
    "name_prefix .*'a/b'": lambda: tw.make(spec_of_video("a/b")),
    "fps": lambda: W.RecordVideo(RENDERED, "x", fps=0),
    "index in envs": lambda: W.RecordVideo(RENDERED, "x", envs=[2]),
    "envs .*one index": lambda: W.RecordVideo(RENDERED, "x", envs=[0, 1]),
    "render_fps": lambda: W.RecordVideo(gray(1, metadata={"render_fps": "fast"}), "x"),
    "observation": lambda: W.RecordVideo(DISCRETE, "x", from_observation=True),
}


@pytest.mark.parametrize("match", INVALID)
def test_invalid_argument_raises_with_its_name(match):
    with pytest.raises((ValueError, TypeError), match=match):
        INVALID[match]()


def test_frame_of_floats_raises(tmp_path):
    floats = gray(1, render_image=lambda _, pen: (pen, np.zeros((4, 4))))
    with pytest.raises(ValueError, match="float64"):
        W.RecordVideo(floats, tmp_path).reset()


def test_render_image_that_returns_a_frame_alone_raises():
    with pytest.raises(TypeError, match="render_image"):
        gray(1, render_image=lambda _, pen: pen).render()


@pytest.mark.parametrize("shape", [(32, 32, 4), (4, 32, 32)], ids=str)
def test_video_of_observations_that_are_no_images_raises(tmp_path, shape):
    env = ScriptedEnv(1, observation_space=gymnasium.spaces.Box(0, 255, shape, np.uint8))
    with pytest.raises(ValueError, match="observations"):
        W.RecordVideo(env, tmp_path, from_observation=True)


@pytest.mark.parametrize("backend", ["torch", "gymnasium"])
def test_video_below_repeated_actions_ends_with_its_episode(tmp_path, backend):
    limits = {"max_episode_steps": 3, "backend": backend}
    env = W.RecordVideo(make(2, **limits), tmp_path)
    env = W.RepeatAction(env, 8)
    push(env, env.reset(seed=0))
    env.close()
    assert len(frames_of(tmp_path / "rl-video-episode-0.mp4")) == 4


@pytest.mark.parametrize("shape", [(32, 16), (32, 16, 3)], ids=["gray", "color"])
def test_video_of_observations_shows_those_of_its_env(tmp_path, shape):
    space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
    options = {"envs": [1], "from_observation": True}
    env = ScriptedEnv(2, observation_space=space)
    env = W.RecordVideo(env, tmp_path, step_trigger=lambda number: number == 0, **options)
    successor, _ = step(env, env.reset(seed=0))
    env.close()
    (frame,) = frames_of(tmp_path / "rl-video-step-0.mp4", fps=30)
    shown = successor["observation"][1].double().mean()
    assert frame.shape == (32, 16, 3) and frame.mean() == pytest.approx(shown, abs=4)
