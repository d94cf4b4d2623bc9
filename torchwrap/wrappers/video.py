"""RecordVideo: video files of an env, or of several envs as tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from torchwrap._core import validation
from torchwrap._core.rows import RowMask
from torchwrap.env import Env, Options
from torchwrap.spaces import Value
from torchwrap.wrappers.render import RenderWrapper, tiled


class RecordVideo(RenderWrapper):
    """Records mp4 videos of one env, or of several envs as tiles of one picture.

    A video shows an episode of the first of `envs`, from the initial to the final observation, or a fixed number of frames.
    Without a trigger, Gymnasium's schedule applies: episodes 0, 1, 8, 27, ... and every 1000th. Episodes and steps are counted
    from 0. It needs imageio with ffmpeg: `pip install "torchwrap[render]"`.

    Args:
        env: the env to wrap, made with `render_mode="rgb_array"`.
        video_folder: folder of the files. It is created.
        episode_trigger: returns whether to record the episode with the given number.
        step_trigger: returns whether to start a video at the step with the given number.
        video_length: number of frames. 0 records whole episodes.
        name_prefix: files are named `{name_prefix}-episode-{number}.mp4` and `{name_prefix}-step-{number}.mp4`.
        fps: frames per second. None takes the env's own rate, or 30.
        envs: indices of the envs to show.

    >>> import tempfile; import torchwrap as tw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     env = RecordVideo(tw.make("CartPole-v1", 2, render_mode="rgb_array"), folder)
    ...     _, _ = env.reset(), env.close()
    ...     [path.name for path in Path(folder).iterdir()]
    ['rl-video-episode-0.mp4']
    """

    is_passive = True

    def __init__(
        self,
        env: Env,
        video_folder: str | Path,
        episode_trigger: Callable[[int], bool] | None = None,
        step_trigger: Callable[[int], bool] | None = None,
        video_length: int = 0,
        name_prefix: str = "rl-video",
        fps: int | None = None,
        *,
        envs: Sequence[int] = (0,),
    ) -> None:
        super().__init__(env)
        for name, trigger in (("episode_trigger", episode_trigger), ("step_trigger", step_trigger)):
            validation.function("RecordVideo", name, trigger or capped_cubic)
        if not isinstance(video_folder, str | Path) or not isinstance(name_prefix, str):
            got = f"{video_folder!r} and {name_prefix!r}"
            raise TypeError(f"RecordVideo needs video_folder and name_prefix as strings, but got {got}.")
        self.envs = self._check_envs(envs)
        self.fps = validation.integer("RecordVideo", "fps", self._env_fps if fps is None else fps, at_least=1)
        self.video_length = validation.integer("RecordVideo", "video_length", video_length, at_least=0)
        self.episode_trigger, self.step_trigger = episode_trigger, step_trigger
        self.video_folder, self.name_prefix = str(video_folder), name_prefix
        import imageio.v2  # noqa: F401  # an optional dependency, which is missed here and not in the middle of a run

        self._writer: Any = None
        self._path, self._num_frames = Path(), 0
        self._step_id = self._episode_id = -1

    def _step(self, action: Value) -> TensorDict:
        successor = self.env._step(action)
        self._step_id += 1
        if self.step_trigger is not None and self.step_trigger(self._step_id):
            self._start_video(f"step-{self._step_id}")
        self._capture_frame()
        return successor

    def _reset(self, mask: RowMask, options: Options | None = None) -> TensorDict:
        td = self.env._reset(mask, options)
        if mask.numpy()[self.envs[0]]:
            self._episode_id += 1
            if not self.video_length:
                self._close_video()
            trigger = self.episode_trigger or (None if self.step_trigger else capped_cubic)
            if trigger is not None and trigger(self._episode_id):
                self._start_video(f"episode-{self._episode_id}")
            self._capture_frame()
        return td

    def _start_video(self, name: str) -> None:
        import imageio.v2

        self._close_video()
        self._path, self._num_frames = Path(self.video_folder) / f"{self.name_prefix}-{name}.mp4", 0
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Under a temporary name until it is closed, so that a named file is always complete.
        temporary: Any = self._path.with_name(f".{self._path.name}")
        self._writer = imageio.v2.get_writer(temporary, format="FFMPEG", fps=self.fps, codec="libx264", macro_block_size=2)

    def _capture_frame(self) -> None:
        if self._writer is not None:
            frame = tiled(self.env.render(self.envs))
            height, width, _ = frame.shape  # padded with black if they are odd, because the codec needs even ones
            self._writer.append_data(np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0))))
            self._num_frames += 1
            if self._num_frames == self.video_length:
                self._close_video()

    def _close_video(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._path.with_name(f".{self._path.name}").rename(self._path)

    def close(self) -> None:
        self._close_video()
        super().close()


def capped_cubic(episode: int) -> bool:
    """Gymnasium's schedule of episodes to record: cube numbers up to 1000, then every 1000th episode.

    >>> [episode for episode in range(30) if capped_cubic(episode)]
    [0, 1, 8, 27]
    """
    return round(episode ** (1 / 3)) ** 3 == episode if episode < 1000 else episode % 1000 == 0
