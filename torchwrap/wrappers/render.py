"""Wrappers that render: pixel observations, and video files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from tensordict import TensorDict

from torchwrap import spaces
from torchwrap._core import validation
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.wrappers.wrapper import Wrapper


class RenderWrapper(Wrapper):
    """Base for wrappers that show the env after each step, before finished rows are reset, and after each reset."""

    def __init__(self, env: Env, from_observation: bool = False) -> None:
        super().__init__(env)
        name = type(self).__name__
        self.from_observation = validation.flag(name, "from_observation", from_observation)
        if from_observation:
            spaces.box(name, "observation", env.single_observation_space)
        elif env.render_mode != "rgb_array":
            raise ValueError(
                f'{name} needs an env made with render_mode="rgb_array", but got {env.render_mode!r}.'
            )
        elif getattr(env.unwrapped, "same_step", False):
            fault = "cannot render the final frames of a SAME_STEP vector env"
            raise ValueError(f"{name} {fault}: make it in AutoresetMode.DISABLED.")
        self._env_fps = validation.positive(
            name, 'metadata["render_fps"]', env.metadata.get("render_fps") or 30
        )


class AddRenderObservation(RenderWrapper):
    """Replaces the observation by the rendered frame, or adds the frame to it.

    Args:
        env: the env to wrap, made with `render_mode="rgb_array"`. It is reset once, to find the size of its frames.
        render_only: whether the frame replaces the observation, or is added to it.
        render_key: key of the frame, if it is added.
        obs_key: key of an observation that is not a `Dict`, if the frame is added.

    Shape: the frame is `(num_envs, height, width, 3)` uint8. Added, it is part of a `Dict`.

    >>> import torchwrap as tw
    >>> env = AddRenderObservation(tw.make("CartPole-v1", 2, render_mode="rgb_array"))
    >>> env.reset()["observation"].shape
    torch.Size([2, 400, 600, 3])
    """

    def __init__(
        self, env: Env, render_only: bool = True, render_key: str = "pixels", obs_key: str = "state"
    ) -> None:
        super().__init__(env)
        self.render_only = validation.flag("AddRenderObservation", "render_only", render_only)
        for name, key in (("render_key", render_key), ("obs_key", obs_key)):
            if not isinstance(key, str) or not key:
                raise TypeError(
                    f"AddRenderObservation needs {name} as a non-empty string, but got {key!r}."
                )
        below = env.single_observation_space
        below = (
            below
            if isinstance(below, gymnasium.spaces.Dict)
            else gymnasium.spaces.Dict({obs_key: below})
        )
        if not render_only and render_key in below.spaces:
            raise ValueError(
                f"AddRenderObservation needs an unused render_key, but got {render_key!r} next to {list(below)}."
            )
        self.render_key, self.obs_key = render_key, obs_key
        env.reset()
        pixels = gymnasium.spaces.Box(0, 255, np.shape(env.render([0])[0]), np.uint8)
        space = (
            pixels if render_only else spaces.dict_like(below, {render_key: pixels, **below.spaces})
        )
        self.signature = env.signature.replace(single_observation_space=space)

    def _step(self, action: spaces.Value) -> TensorDict:
        return self._render(super()._step(action))

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        return self._render(super()._reset(mask, options))

    def _render(self, td: TensorDict) -> TensorDict:
        pixels = spaces.tensor(np.stack(self.env.render()), self.device)
        if self.render_only:
            return td.set("observation", pixels)
        observation = td["observation"]
        is_dict = isinstance(self.env.single_observation_space, gymnasium.spaces.Dict)
        parts = dict(observation.items()) if is_dict else {self.obs_key: observation}
        return td.set(
            "observation", TensorDict({self.render_key: pixels, **parts}, batch_size=td.batch_size)
        )


class RecordVideo(RenderWrapper):
    """Records mp4 videos of one env, or of several envs as tiles of one picture.

    A video shows an episode of the first of `envs`, or a fixed number of frames. Without a trigger, Gymnasium's schedule
    applies: episodes 0, 1, 8, 27, ... and every 1000th. `close()` completes the last file, and so does the end of the program.
    It needs imageio with ffmpeg: `pip install "torchwrap[render]"`.

    Args:
        env: the env to wrap, made with `render_mode="rgb_array"`, unless observations are recorded.
        video_folder: folder of the files. It is created.
        episode_trigger, step_trigger: return whether to start a video at the episode or step with the given number, from 0.
        video_length: number of frames. 0 records whole episodes.
        name_prefix: files are named `{name_prefix}-episode-{number}.mp4` and `{name_prefix}-step-{number}.mp4`.
        fps: frames per second. None takes the env's own rate, or 30.
        envs: indices of the envs to show.
        from_observation: whether to record observations that are images, or the latest one of a stack, instead of `render()`.
            ALE's vector env needs it.

    >>> import tempfile; import torchwrap as tw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     env = RecordVideo(tw.make("CartPole-v1", 2, render_mode="rgb_array"), folder)
    ...     _, _ = env.reset(), env.close()
    ...     [path.name for path in Path(folder).iterdir()]
    ['rl-video-episode-0.mp4']
    """

    def __init__(
        self,
        env: Env,
        video_folder: str | Path,
        episode_trigger: Callable[[int], bool] | None = None,
        step_trigger: Callable[[int], bool] | None = None,
        video_length: int = 0,
        name_prefix: str = "rl-video",
        fps: float | None = None,
        *,
        envs: Sequence[int] = (0,),
        from_observation: bool = False,
    ) -> None:
        super().__init__(env, from_observation)
        for name, trigger in (("episode_trigger", episode_trigger), ("step_trigger", step_trigger)):
            validation.function("RecordVideo", name, trigger or capped_cubic)
        if not isinstance(video_folder, str | Path) or not isinstance(name_prefix, str):
            got = f"{video_folder!r} and {name_prefix!r}"
            raise TypeError(
                f"RecordVideo needs video_folder and name_prefix as strings, but got {got}."
            )
        if not len(envs):
            raise ValueError("RecordVideo needs at least one index in envs, but got none.")
        self.envs = [
            validation.integer("RecordVideo", "each index in envs", row, 0, self.num_envs - 1)
            for row in envs
        ]
        self.fps = self._env_fps if fps is None else validation.positive("RecordVideo", "fps", fps)
        self.video_length = validation.integer(
            "RecordVideo", "video_length", video_length, at_least=0
        )
        self.episode_trigger, self.step_trigger = episode_trigger, step_trigger
        self.video_folder, self.name_prefix = str(video_folder), name_prefix
        import imageio.v2  # noqa: F401  # fails here, and not in the middle of a run

        self._writer: Any = None
        self._num_frames = 0
        self._step_id = self._episode_id = -1

    def deployed(self) -> None:
        return None

    def _step(self, action: spaces.Value) -> TensorDict:
        successor = super()._step(action)
        self._step_id += 1
        if self.step_trigger is not None and self.step_trigger(self._step_id):
            self._start_video(f"step-{self._step_id}")
        self._capture_frame(successor)
        return successor

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        td = super()._reset(mask, options)
        if mask.numpy()[self.envs[0]]:
            self._episode_id += 1
            if not self.video_length:
                self._close_video()
            trigger = self.episode_trigger or (None if self.step_trigger else capped_cubic)
            if trigger is not None and trigger(self._episode_id):
                self._start_video(f"episode-{self._episode_id}")
            self._capture_frame(td)
        return td

    def _start_video(self, name: str) -> None:
        import imageio.v2

        self._close_video()
        path, self._num_frames = (
            Path(self.video_folder).absolute() / f"{self.name_prefix}-{name}.mp4",
            0,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a temporary name until it is closed, so that a named file is always complete.
        temporary: Any = path.with_name(f".{path.name}")
        self._writer = imageio.v2.get_writer(
            temporary, format="FFMPEG", fps=self.fps, codec="libx264", macro_block_size=2
        )
        self._complete = Finalize(
            self, _complete, (self._writer, temporary, path), exitpriority=10
        )  # without close()

    def _picture(self, envs: Sequence[int], td: TensorDict) -> np.ndarray[Any, Any]:
        """The frames of some envs as tiles of one RGB picture."""
        source = (
            td["observation"][list(envs)].cpu().numpy()
            if self.from_observation
            else self.env.render(envs)
        )
        frames = [np.asarray(frame) for frame in source]
        for index, frame in enumerate(frames):
            if self.from_observation and (
                frame.ndim == 4 or (frame.ndim == 3 and frame.shape[2] not in (1, 3, 4))
            ):
                frame = frame[-1]  # the latest of a stack
            if (
                frame.dtype != np.uint8
                or frame.ndim not in (2, 3)
                or (frame.ndim == 3 and frame.shape[2] not in (1, 3, 4))
            ):
                needed = f"{type(self).__name__} needs frames (height, width, 3) of uint8, or gray ones (height, width)"
                raise ValueError(f"{needed}, but got {frame.shape} {frame.dtype}.")
            gray = frame.reshape(*frame.shape[:2], -1)
            frames[index] = np.repeat(gray, 3, 2) if gray.shape[2] == 1 else gray[..., :3]
        return tiled(frames)

    def _capture_frame(self, td: TensorDict) -> None:
        if self._writer is not None:
            frame = self._picture(self.envs, td)
            height, width, _ = (
                frame.shape
            )  # padded with black if they are odd, because the codec needs even ones
            self._writer.append_data(np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0))))
            self._num_frames += 1
            if self._num_frames == self.video_length:
                self._close_video()

    def _close_video(self) -> None:
        if self._writer is not None:
            self._writer = None
            self._complete()

    def close(self) -> None:
        self._close_video()
        super().close()


def _complete(writer: Any, temporary: Path, path: Path) -> None:
    writer.close()
    if temporary.exists():  # it does not before the first frame
        temporary.rename(path)


def tiled(frames: Sequence[Any]) -> Any:
    """Arranges frames `(height, width, 3)` of one size as tiles of one picture, nearly square. Empty tiles are black."""
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    padded = [*frames, *[np.zeros_like(frames[0])] * (rows * columns - len(frames))]
    return np.concatenate(
        [np.concatenate(padded[row * columns :][:columns], 1) for row in range(rows)]
    )


def capped_cubic(episode: int) -> bool:
    """Gymnasium's schedule of episodes to record: cube numbers up to 1000, then every 1000th episode."""
    return round(episode ** (1 / 3)) ** 3 == episode if episode < 1000 else episode % 1000 == 0
